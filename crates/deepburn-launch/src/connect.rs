//! Checks that remote hosts respond before `mpirun` is started, because `mpirun` would wait for
//! them forever.
//!
//! Every host runs `true` through the remote shell, all at the same time, so the check takes as
//! long as the slowest host. It runs before each start, because a host may have gone down since the
//! last one.

use std::fmt::Write;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use thiserror::Error;

use crate::events::{Events, LaunchEvent};

/// The reason why hosts cannot be used.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// Hosts do not respond, or the remote shell fails on them.
    #[error(
        "unreachable hosts:{hosts}\neach must run `{shell} HOST true` within {timeout} s without a password; start them or repair the remote shell, leave them out with --exclude, or raise --connect-timeout"
    )]
    Unreachable {
        /// One line per host with the problem.
        hosts: String,
        /// The remote shell.
        shell: String,
        /// The time-out in seconds.
        timeout: u64,
    },
    /// The remote shell command is empty.
    #[error(
        "--remote-shell: empty; it is a command that runs another on a host, such as `ssh -p 2222`; give one"
    )]
    NoShell,
}

/// Runs `true` on all `hosts` in parallel through the remote shell. Returns a signal that arrived
/// before all hosts had responded.
///
/// An empty list of hosts needs no check. After a failure, a time-out or a signal, no remote shell
/// is left running.
///
/// # Errors
/// Returns the hosts that failed or did not respond within `timeout`.
pub(crate) fn connect(
    hosts: &[&str],
    shell: &str,
    timeout: Duration,
    events: &Events,
) -> Result<Option<i32>, ConnectError> {
    let deadline = Instant::now() + timeout;
    let mut pending = Vec::new();
    let mut failures: Vec<Option<String>> = vec![None; hosts.len()];
    for (index, host) in hosts.iter().enumerate() {
        match start(index, probe(shell, host, timeout)?, events) {
            Ok(pid) => pending.push((index, pid)),
            Err(error) => failures[index] = Some(format!("{shell}: {error}")),
        }
    }
    while !pending.is_empty() {
        match events.next(Some(deadline)) {
            Some(LaunchEvent::Answer { host, output }) => {
                pending.retain(|(index, _)| *index != host);
                failures[host] = failure(output);
            }
            Some(LaunchEvent::Signal(signal)) => {
                end(&pending);
                return Ok(Some(signal));
            }
            // These events are from an earlier run.
            Some(LaunchEvent::Stalled(_) | LaunchEvent::Aborts(_) | LaunchEvent::Ended(_)) => {}
            None => break,
        }
    }
    end(&pending);
    for (index, _) in &pending {
        failures[*index] = Some(format!("no answer within {} s", timeout.as_secs()));
    }
    let mut lines = String::new();
    for (host, failure) in hosts.iter().zip(&failures) {
        if let Some(failure) = failure {
            let _ = write!(lines, "\n  {host}: {failure}");
        }
    }
    match lines.is_empty() {
        true => Ok(None),
        false => Err(ConnectError::Unreachable {
            hosts: lines,
            shell: shell.to_owned(),
            timeout: timeout.as_secs(),
        }),
    }
}

/// Returns the command that runs `true` on a host.
///
/// # Errors
/// Returns [`ConnectError::NoShell`] if `shell` is empty.
fn probe(shell: &str, host: &str, timeout: Duration) -> Result<Command, ConnectError> {
    // The command is split in the same way as by mpirun: at spaces, without support for quotes.
    let mut words = shell.split_whitespace();
    let program = words.next().ok_or(ConnectError::NoShell)?;
    let mut command = Command::new(program);
    if Path::new(program).file_name().is_some_and(|name| name == "ssh") {
        // A password prompt would block the check until the time-out.
        let seconds = timeout.as_secs().max(1);
        command.args(["-o", "BatchMode=yes", "-o", &format!("ConnectTimeout={seconds}")]);
    }
    // The command has its own process group, so that it can be killed as a whole.
    command.args(words).args([host, "true"]).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

/// Starts a check whose result is sent as an event.
///
/// `host` is the index of the host, which is included in the event.
///
/// # Errors
/// Returns an error if the remote shell cannot be started.
fn start(host: usize, mut command: Command, events: &Events) -> io::Result<Pid> {
    let child = command.spawn()?;
    let pid = Pid::from_child(&child);
    let sender = events.sender();
    thread::spawn(move || {
        // The launcher may have stopped listening.
        let _ = sender.send(LaunchEvent::Answer { host, output: child.wait_with_output() });
    });
    Ok(pid)
}

/// Kills the checks that are still running.
fn end(pending: &[(usize, Pid)]) {
    for (_, group) in pending {
        // The process may have ended in the meantime.
        let _ = kill_process_group(*group, Signal::KILL);
    }
}

/// Returns the problem of a host from the result of its remote shell; `None` if it responded.
///
/// The problem is the last line of standard error, or the exit status if there is none.
fn failure(output: io::Result<Output>) -> Option<String> {
    match output {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            let last = text.lines().rev().find(|line| !line.trim().is_empty());
            Some(last.map_or_else(|| output.status.to_string(), |line| line.trim().to_owned()))
        }
        Err(error) => Some(error.to_string()),
    }
}
