//! One run of `mpirun`, from its start until all its processes have ended.
//!
//! ```text
//! stage                 on                                  action               next stage
//! Running               a signal                            SIGUSR1, repeated    Stopping
//! Running, Stopping     an abort that mpirun reports        wait up to 10 s      Terminating
//! Stopping              another signal, or grace is over    SIGTERM              Terminating
//! Terminating           another signal, or 10 s are over    SIGKILL              Killed
//! ```
//!
//! A stalled `mpirun` is killed at any stage. The end of `mpirun` ends the run at any stage.
//! Processes that `mpirun` leaves behind are then killed.
//!
//! A run has five threads: two copy output, one waits for the end of `mpirun`, one checks whether
//! `mpirun` has stalled, and the calling thread handles events. The other threads send their events
//! to one queue, so events are handled one at a time.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::events::{Events, LaunchEvent, signal_name};
use crate::guard::Guard;
use crate::output::copy_lines;
use crate::{orphans, stall};

/// The way in which a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobEnd {
    /// All ranks exited with status 0.
    Success,
    /// A rank or `mpirun` itself failed.
    Failed {
        /// The exit status of the first failed rank, or 128 plus the number of the signal that
        /// ended it.
        status: u8,
        /// The failed rank, if it appeared in the output of `mpirun`.
        rank: Option<usize>,
    },
    /// The launcher received a signal, and the job did not exit with status 0.
    Interrupted {
        /// The number of the signal.
        signal: u8,
    },
}

impl JobEnd {
    /// Returns the exit status of the launcher: the exit status of the first failed rank, or 128
    /// plus the number of the signal that interrupted the job.
    pub fn status(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failed { status, .. } => status,
            Self::Interrupted { signal } => 128 + signal,
        }
    }
}

/// The time after which `mpirun` is killed, measured from SIGTERM or from the moment when `mpirun`
/// starts to end a job. Normally `mpirun` waits twice for one second. If the network connection to
/// a host is lost, it would wait much longer for the TCP time-out.
const TERMINATION: Duration = Duration::from_secs(10);

/// The interval between requests to save and stop. Requests are repeated, because `mpirun` loses
/// signals that arrive while it starts ranks.
const AGAIN: Duration = Duration::from_secs(5);

/// The maximum time to wait for remaining output after the end of `mpirun`. A remote shell that
/// stays connected in the background could keep its pipe open for longer.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// Runs the command line `words` until all processes have ended. After a signal, ranks have the
/// time `grace` to save and stop.
///
/// Standard input is empty. The output of ranks is copied to the launcher's output line by line.
///
/// # Errors
/// Returns an error if `words` is empty, if `mpirun` cannot be started, or if waiting for it fails.
pub(crate) fn run(words: &[String], grace: Duration, events: &Events) -> io::Result<JobEnd> {
    orphans::adopt();
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // mpirun gets its own process group, so that Ctrl-C reaches only the launcher. It has no
    // standard input, because a background group that reads from a terminal is stopped.
    let mut child = Command::new(program)
        .args(arguments)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mpirun = Pid::from_child(&child);
    // The job can run without a guard, which is only needed if the launcher is killed.
    let guard = Guard::of(mpirun)
        .inspect_err(|error| {
            tracing::warn!(
                "no guard could be started ({error}): if deepburn is killed, end mpirun by hand"
            );
        })
        .ok();
    let sender = events.sender();
    let failed_ranks = copy_output(&mut child, mpirun, &sender);
    let stalls = sender.clone();
    thread::spawn(move || {
        stall::has_stalled(mpirun).then(|| stalls.send(LaunchEvent::Stalled(mpirun)))
    });
    thread::spawn(move || {
        // The launcher may have stopped listening.
        let _ = sender.send(LaunchEvent::Ended(child.wait()));
    });
    let (status, interrupted) = supervise(mpirun, grace, events)?;
    if let Some(guard) = guard {
        guard.dismiss();
    }
    let orphans = orphans::end_all();
    if orphans > 0 {
        tracing::warn!("killed the processes that outlived mpirun: {orphans}");
    }
    let deadline = Instant::now() + LAST_OUTPUT;
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut rank = None;
    while let Ok(found) = failed_ranks.recv_timeout(left()) {
        rank = rank.or(found);
    }
    Ok(match (exit_code(status), interrupted) {
        (0, _) => JobEnd::Success,
        (_, Some(signal)) => JobEnd::Interrupted { signal },
        (status, None) => JobEnd::Failed { status, rank },
    })
}

/// Copies the output of `mpirun` with two threads. Each thread sends the failed rank that it found
/// in the output.
fn copy_output(
    child: &mut Child,
    mpirun: Pid,
    events: &Sender<LaunchEvent>,
) -> Receiver<Option<usize>> {
    let (sender, receiver) = channel();
    if let Some(output) = child.stdout.take() {
        let sender = sender.clone();
        thread::spawn(move || sender.send(copy_lines(output, io::stdout(), || {})));
    }
    if let Some(output) = child.stderr.take() {
        let events = events.clone();
        let on_abort = move || {
            // The launcher may have stopped listening.
            let _ = events.send(LaunchEvent::Aborts(mpirun));
        };
        thread::spawn(move || sender.send(copy_lines(output, io::stderr(), on_abort)));
    }
    receiver
}

/// The stage of ending a job. Each stage is more forceful than the previous one.
#[derive(Debug, Clone, Copy)]
enum StopStage {
    /// The ranks train and have not been asked to stop.
    Running,
    /// Ranks were asked to save and stop.
    Stopping,
    /// `mpirun` was asked to end the ranks.
    Terminating,
    /// `mpirun` was killed. The launcher only waits for it to end.
    Killed,
}

/// Waits for the end of `mpirun`. A signal or an expired deadline starts the next stage. Returns
/// the exit status and the first signal.
///
/// SIGUSR1 is sent again every few seconds while ranks are stopping, because `mpirun` loses signals
/// while it starts ranks. Ranks ignore repeated signals. `grace` is measured from the first signal.
///
/// # Errors
/// Returns an error if waiting for `mpirun` fails.
fn supervise(
    mpirun: Pid,
    grace: Duration,
    events: &Events,
) -> io::Result<(ExitStatus, Option<u8>)> {
    let mut stage = StopStage::Running;
    let mut deadline = None;
    let mut interrupted = None;
    loop {
        let again = Instant::now() + AGAIN;
        let stopping =
            matches!(stage, StopStage::Stopping) && deadline.is_none_or(|end| again < end);
        match events.next(if stopping { Some(again) } else { deadline }) {
            Some(LaunchEvent::Ended(status)) => return Ok((status?, interrupted)),
            None if stopping => {
                send(mpirun, Signal::USR1);
                continue;
            }
            // This is a late response of a host check.
            Some(LaunchEvent::Answer { .. }) => continue,
            // This is a late event of an earlier run.
            Some(LaunchEvent::Stalled(process) | LaunchEvent::Aborts(process))
                if process != mpirun =>
            {
                continue;
            }
            Some(LaunchEvent::Aborts(_)) => {
                // Later stages have their own deadlines.
                if matches!(stage, StopStage::Running | StopStage::Stopping) {
                    (stage, deadline) =
                        (StopStage::Terminating, Some(Instant::now() + TERMINATION));
                }
                continue;
            }
            Some(LaunchEvent::Stalled(_)) => {
                tracing::warn!("a rank ended and mpirun does not react; mpirun is killed");
                let _ = kill_process_group(mpirun, Signal::KILL);
                (stage, deadline) = (StopStage::Killed, None);
                continue;
            }
            Some(LaunchEvent::Signal(signal)) => {
                interrupted = interrupted.or(u8::try_from(signal).ok());
                tracing::info!("{}", notice(signal, stage, grace));
            }
            None => tracing::warn!("{}", overdue(stage)),
        }
        (stage, deadline) = escalate(stage, mpirun, grace);
    }
}

/// Moves to the stage after `stage`, which ends `mpirun` more forcefully. Returns the new stage and
/// its deadline.
fn escalate(stage: StopStage, mpirun: Pid, grace: Duration) -> (StopStage, Option<Instant>) {
    match stage {
        StopStage::Running => {
            send(mpirun, Signal::USR1);
            (StopStage::Stopping, Instant::now().checked_add(grace))
        }
        StopStage::Stopping => {
            send(mpirun, Signal::TERM);
            (StopStage::Terminating, Some(Instant::now() + TERMINATION))
        }
        StopStage::Terminating | StopStage::Killed => {
            let _ = kill_process_group(mpirun, Signal::KILL);
            (StopStage::Killed, None)
        }
    }
}

/// Sends a signal to `mpirun`, which may already have ended.
fn send(mpirun: Pid, signal: Signal) {
    if let Err(error) = kill_process(mpirun, signal) {
        tracing::debug!("mpirun could not be signaled: {error}");
    }
}

/// Describes the reaction to a signal at a stage.
fn notice(signal: i32, stage: StopStage, grace: Duration) -> String {
    let name = signal_name(signal);
    match stage {
        StopStage::Running => format!(
            "{name}: the ranks are asked to save and stop, within {} s; a second signal ends them \
             at once",
            grace.as_secs()
        ),
        StopStage::Stopping => format!("{name}: mpirun is asked to end the ranks at once"),
        StopStage::Terminating | StopStage::Killed => format!("{name}: mpirun is killed"),
    }
}

/// Describes an expired deadline at a stage.
fn overdue(stage: StopStage) -> &'static str {
    match stage {
        StopStage::Running | StopStage::Stopping => {
            "the ranks have not stopped within --grace-seconds; mpirun is asked to end them"
        }
        StopStage::Terminating | StopStage::Killed => {
            "mpirun has not ended the ranks; it is killed"
        }
    }
}

/// Returns the exit status as a shell reports it.
///
/// A status that does not fit in a `u8` is returned as 1.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}
