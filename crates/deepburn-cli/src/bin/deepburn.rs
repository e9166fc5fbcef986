//! The tools beside the main job: check a configuration, estimate memory, generate text, compare runs.

use std::process::ExitCode;

use deepburn_cli::{Tools, exit, parse, run_tool, show_notes};

/// As in `finetune`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let _profiler = show_notes();
    exit(run_tool(parse::<Tools>()))
}
