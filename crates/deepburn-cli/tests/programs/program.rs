//! A program under test, run to its end.

use std::path::Path;
use std::process::{Command, Output};

/// How a program ended.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `finetune` with its current folder at `folder`.
pub(crate) fn finetune<S: AsRef<str>>(folder: &Path, arguments: &[S]) -> Ending {
    run(env!("CARGO_BIN_EXE_finetune"), folder, arguments)
}

/// Runs `deepburn` with its current folder at `folder`.
pub(crate) fn deepburn<S: AsRef<str>>(folder: &Path, arguments: &[S]) -> Ending {
    run(env!("CARGO_BIN_EXE_deepburn"), folder, arguments)
}

/// `finetune`, ready to be started with its current folder at `folder`.
pub(crate) fn finetune_command<S: AsRef<str>>(folder: &Path, arguments: &[S]) -> Command {
    command(env!("CARGO_BIN_EXE_finetune"), folder, arguments)
}

/// Runs `finetune` as `processes` ranks of mpirun, with its current folder at `folder`.
#[cfg(feature = "mpi")]
pub(crate) fn finetune_processes(folder: &Path, processes: usize, arguments: &[&str]) -> Ending {
    // More processes than cores, which wait for each other without taking the cores of those that compute.
    let options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"];
    let processes = ["-np", &processes.to_string(), env!("CARGO_BIN_EXE_finetune")];
    let mut mpirun = command("mpirun", folder, &[&options[..], &processes, arguments].concat());
    // Containers of tests often have no other user.
    mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    Ending::of(mpirun.output().unwrap())
}

fn run<S: AsRef<str>>(program: &str, folder: &Path, arguments: &[S]) -> Ending {
    Ending::of(command(program, folder, arguments).output().unwrap())
}

/// `program`, ready to be started with its current folder at `folder`.
pub(crate) fn command<S: AsRef<str>>(program: &str, folder: &Path, arguments: &[S]) -> Command {
    let mut command = Command::new(program);
    command
        .args(arguments.iter().map(AsRef::as_ref))
        .current_dir(folder)
        .env_remove("RUST_LOG")
        .env("RUST_BACKTRACE", "1")
        // Nothing is downloaded, and caches stay in the folder.
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HOME", folder.join("hf"))
        .env("XDG_CACHE_HOME", folder.join("cache"))
        // Without it, the search for GPUs reports a missing desktop as an error.
        .env("XDG_RUNTIME_DIR", folder);
    command
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

    /// The program ended well.
    #[track_caller]
    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.status, Some(0), "{}", self.stderr);
        self
    }

    /// The program ended with `status` and one message, in which all of `parts` are.
    #[track_caller]
    pub(crate) fn failed(self, status: i32, parts: &[&str]) -> Self {
        if let Some(fault) = self.fault(status, parts) {
            panic!("{fault}");
        }
        self
    }

    /// Returns the difference from [`failed`](Self::failed), if there is one.
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
