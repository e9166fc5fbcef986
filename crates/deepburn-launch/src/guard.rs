//! Ends `mpirun` if the launcher is killed.
//!
//! A launcher that receives SIGKILL or runs out of memory cannot end the processes that it has
//! started, so a guard does. The guard is a shell whose standard input is a pipe that the launcher
//! holds open. When the launcher ends for any reason, the pipe is closed, and the shell sends the
//! signals.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

/// The script of the guard. It sends SIGTERM, so that `mpirun` ends its ranks on all hosts, and
/// SIGKILL after 10 s. It exits as soon as `mpirun` has ended, because another process may then get
/// the same process id.
const SCRIPT: &str = r#"read line
kill -TERM "$1" || exit
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "$1" || exit; done
kill -KILL "$1""#;

/// A shell that waits for the end of the launcher.
pub(crate) struct Guard {
    /// The shell, whose standard input is the pipe.
    shell: Child,
}

impl Guard {
    /// Starts a guard for `mpirun`.
    ///
    /// # Errors
    /// Returns an error if no shell can be started.
    pub(crate) fn of(mpirun: Pid) -> io::Result<Self> {
        // The guard has its own process group, which Ctrl-C does not reach.
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "guard", &mpirun.as_raw_nonzero().to_string()])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { shell })
    }

    /// Ends the guard after `mpirun` has ended.
    pub(crate) fn dismiss(mut self) {
        // The shell is killed before its pipe is closed, so that it sends no signals.
        let ended = self.shell.kill().and_then(|()| self.shell.wait());
        if let Err(error) = ended {
            tracing::debug!("the guard could not be ended: {error}");
        }
    }
}
