//! `finetune`: trains a language model or a text classifier, sharded over ranks.

use std::process::ExitCode;

use deepburn_cli::{
    Arguments, HugePageAllocator, exit, finetune, parse, set_block_thresholds, start_logging,
};

/// Decides how much memory a step takes beside its arrays, and how fast they are allocated.
#[global_allocator]
static ALLOCATOR: HugePageAllocator = HugePageAllocator;

/// Parses the command line and runs the job. The exit status says how it ended (see the library's
/// documentation).
fn main() -> ExitCode {
    set_block_thresholds();
    let profiler = start_logging();
    exit(finetune(parse::<Arguments>(), &profiler))
}
