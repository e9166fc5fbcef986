//! `finetune`: trains a language model or a text classifier, sharded over ranks.

use std::process::ExitCode;

use deepburn_cli::{Arguments, exit, finetune, keep_freed_memory, parse, start_logging};

/// mimalloc keeps freed blocks for the next op. The system's allocator returns large ones to the kernel at once, and a
/// training step would spend a fifth of its time on mapping and clearing them again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Parses the command line and runs the job. The exit status says how it ended (see the library's
/// documentation).
fn main() -> ExitCode {
    keep_freed_memory();
    let profiler = start_logging();
    exit(finetune(parse::<Arguments>(), &profiler))
}
