//! Fine-tunes a language model, sharded over ranks as a DeepSpeed configuration says.

use std::process::ExitCode;

use deepburn_cli::{Arguments, exit, finetune, keep_freed_memory, parse, show_notes};

/// Keeps freed blocks for the next op: the system's allocator gives large ones back at once, and
/// a training step would spend a fifth of its time having them mapped and cleared again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    keep_freed_memory();
    let profiler = show_notes();
    exit(finetune(parse::<Arguments>(), &profiler))
}
