//! `finetune`: trains a language model or a text classifier, sharded over ranks.

use std::process::ExitCode;

use deepburn_cli::{
    Arguments, HugePageAllocator, exit, finetune, parse, set_block_thresholds, start_logging,
};

/// Serves large allocations from huge pages, which makes training steps faster and keeps their peak
/// memory low.
#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator;

/// Parses the command line and runs the job. The documentation of the library lists the exit
/// statuses.
fn main() -> ExitCode {
    set_block_thresholds();
    let profiler = start_logging();
    exit(finetune(parse::<Arguments>(), &profiler))
}
