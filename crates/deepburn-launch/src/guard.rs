//! Ends `mpirun` when the launcher is killed.
//!
//! A launcher that gets SIGKILL, or runs out of memory, cannot end what it has started. A guard can: a
//! shell whose standard input is a pipe that the launcher holds open. When the launcher is gone, however
//! that came about, the pipe is closed and the shell sends signals.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

/// SIGTERM, with which `mpirun` ends its ranks on all hosts, and SIGKILL after 10 s. Once `mpirun` has ended the
/// script ends too, because another process may get its number.
const SCRIPT: &str = r#"read line
kill -TERM "$1" || exit
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "$1" || exit; done
kill -KILL "$1""#;

/// The shell that waits.
pub(crate) struct Guard {
    shell: Child,
}

impl Guard {
    /// Guards `mpirun`.
    pub(crate) fn of(mpirun: Pid) -> io::Result<Self> {
        // In a process group of its own, which the terminal's Ctrl-C does not reach.
        let shell = Command::new("sh")
            .args(["-c", SCRIPT, "guard", &mpirun.as_raw_nonzero().to_string()])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { shell })
    }

    /// Ends the guard once `mpirun` has ended.
    pub(crate) fn dismiss(mut self) {
        // Killed before its pipe is closed, so that it sends nothing.
        let ended = self.shell.kill().and_then(|()| self.shell.wait());
        if let Err(error) = ended {
            tracing::debug!("the guard could not be ended: {error}");
        }
    }
}
