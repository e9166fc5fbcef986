//! `deepburn`: the tools beside the main job.

use std::process::ExitCode;

use deepburn_cli::{HugePageAllocator, Tools, exit, parse, run_tool, start_logging};

/// The same allocator as in `finetune`.
#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator;

/// Parses the command line and runs one tool. The exit status says how it ended (see the library's
/// documentation).
fn main() -> ExitCode {
    let _profiler = start_logging();
    exit(run_tool(parse::<Tools>()))
}
