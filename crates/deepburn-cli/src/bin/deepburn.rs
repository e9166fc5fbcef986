//! `deepburn`: tools for configurations, memory estimates, checkpoints, trained models and
//! launching.

use std::process::ExitCode;

use deepburn_cli::{HugePageAllocator, Tools, exit, parse, run_tool, start_logging};

/// Serves large allocations from huge pages, as in `finetune`.
#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator;

/// Parses the command line and runs one tool. The documentation of the library lists the exit
/// statuses.
fn main() -> ExitCode {
    let _profiler = start_logging();
    exit(run_tool(parse::<Tools>()))
}
