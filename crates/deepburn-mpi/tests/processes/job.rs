//! Starts test bodies under `mpirun`.

use std::process::{Command, Output};
use std::time::Duration;

use deepburn_comm::{RankFailure, run_rank};
use deepburn_mpi::{MpiGroup, Process, Settings};

/// Runs `body` (the path of an ignored test) on `ranks` processes. Returns `None` if `mpirun` is
/// not installed.
pub(crate) fn mpirun(ranks: usize, body: &str, variables: &[(&str, &str)]) -> Option<Output> {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]);
    if rustix_is_root() {
        command.arg("--allow-run-as-root");
    }
    command.args(["-np", &ranks.to_string()]).arg(program);
    command.args(["--exact", body, "--ignored", "--nocapture", "--test-threads=1"]);
    command.envs(variables.iter().copied());
    match command.output() {
        Ok(output) => Some(output),
        Err(error) => {
            println!("skipped: mpirun cannot be started ({error})");
            None
        }
    }
}

/// Runs `body` and checks that all ranks succeed.
pub(crate) fn succeeds(ranks: usize, body: &str) {
    let Some(output) = mpirun(ranks, body, &[]) else { return };
    let text = text_of(&output);
    assert!(output.status.success(), "{ranks} ranks: {text}");
    assert_eq!(text.matches("1 passed").count(), ranks, "{text}");
}

/// Returns the output of all ranks.
pub(crate) fn text_of(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}

/// Runs `run` as the rank of this process.
pub(crate) fn as_rank<R>(
    timeout: Duration,
    piece: usize,
    run: impl FnOnce(&MpiGroup) -> Result<R, deepburn_comm::CommError>,
) -> Result<R, RankFailure<deepburn_comm::CommError>> {
    let process = Process::connect().unwrap();
    let group = process.group(Settings { timeout, piece }, |work| work());
    run_rank(&group, || run(&group))
}

fn rustix_is_root() -> bool {
    // SAFETY: reads a number.
    unsafe { libc::geteuid() == 0 }
}
