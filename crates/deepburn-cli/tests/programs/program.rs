//! Runs a program under test and checks how it ended.

use std::path::Path;
#[cfg(unix)]
use std::process::Child;
use std::process::{Command, Output};

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `finetune` with the current folder `folder`.
pub(crate) fn finetune<S: AsRef<str>>(folder: &Path, arguments: &[S]) -> Ending {
    run(env!("CARGO_BIN_EXE_finetune"), folder, arguments)
}

/// Runs `deepburn` with the current folder `folder`.
pub(crate) fn deepburn<S: AsRef<str>>(folder: &Path, arguments: &[S]) -> Ending {
    run(env!("CARGO_BIN_EXE_deepburn"), folder, arguments)
}

/// Returns the command of `finetune` with the current folder `folder`.
pub(crate) fn finetune_command<S: AsRef<str>>(folder: &Path, arguments: &[S]) -> Command {
    command(env!("CARGO_BIN_EXE_finetune"), folder, arguments)
}

/// Runs `finetune` with mpirun on `processes` ranks, with the current folder `folder`.
#[cfg(feature = "mpi")]
pub(crate) fn finetune_processes(folder: &Path, processes: usize, arguments: &[&str]) -> Ending {
    // There may be more processes than cores. Processes that wait yield their core.
    let options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"];
    let processes = ["-np", &processes.to_string(), env!("CARGO_BIN_EXE_finetune")];
    let mut mpirun = command("mpirun", folder, &[&options[..], &processes, arguments].concat());
    // Test containers often have only the root user.
    mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    Ending::of(mpirun.output().unwrap())
}

fn run<S: AsRef<str>>(program: &str, folder: &Path, arguments: &[S]) -> Ending {
    Ending::of(command(program, folder, arguments).output().unwrap())
}

/// Returns the command of `program` with the current folder `folder`.
pub(crate) fn command<S: AsRef<str>>(program: &str, folder: &Path, arguments: &[S]) -> Command {
    let mut command = Command::new(program);
    command
        .args(arguments.iter().map(AsRef::as_ref))
        .current_dir(folder)
        .env_remove("RUST_LOG")
        .env("RUST_BACKTRACE", "1")
        // Nothing is downloaded, and caches are in the folder.
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HOME", folder.join("hf"))
        .env("XDG_CACHE_HOME", folder.join("cache"))
        // Without it, the search for GPUs reports a missing desktop as an error.
        .env("XDG_RUNTIME_DIR", folder);
    command
}

/// Asks a program to end, as launchers and schedulers do.
#[cfg(unix)]
pub(crate) fn terminate(running: &Child) {
    let number = running.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &number]).status().unwrap().success());
}

impl Ending {
    /// Reads the output of a program.
    pub(crate) fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self {
            status: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// Panics unless the program succeeded.
    #[track_caller]
    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        self
    }

    /// Panics unless the program ended with `status` and one error message that contains all of
    /// `parts`.
    #[track_caller]
    pub(crate) fn failed(self, status: i32, parts: &[&str]) -> Self {
        if let Some(fault) = self.fault(status, parts) {
            panic!("{fault}");
        }
        self
    }

    /// Returns the reason for which [`failed`](Self::failed) would panic, if there is one.
    pub(crate) fn fault(&self, status: i32, parts: &[&str]) -> Option<String> {
        let messages = self.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        let shown = |what: &str| Some(format!("{what}\nstderr: {}", self.stderr));
        if self.status != Some(status) {
            return shown(&format!("status {:?}, expected {status}", self.status));
        }
        if messages != 1 {
            return shown(&format!("{messages} messages, expected 1"));
        }
        if ["panicked", "stack backtrace", "RUST_BACKTRACE="]
            .iter()
            .any(|it| self.stderr.contains(it))
        {
            return shown("a panic shows");
        }
        let missing = parts.iter().find(|part| !self.stderr.contains(**part));
        missing.and_then(|part| shown(&format!("no {part:?} in the message")))
    }
}
