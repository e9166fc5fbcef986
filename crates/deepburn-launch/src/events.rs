//! The event queue of the launcher: signals, responses of hosts, and the end of `mpirun`.
//!
//! Each event source has its own thread. All of these threads sleep until an event occurs, except
//! the thread that checks for a stalled `mpirun`.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::process::{ExitStatus, Output};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

/// An event.
#[derive(Debug)]
pub(crate) enum LaunchEvent {
    /// This process received a signal.
    Signal(i32),
    /// The remote shell of a host has ended.
    Answer {
        /// The index of the host.
        host: usize,
        /// The exit status and the output of the remote shell.
        output: io::Result<Output>,
    },
    /// This `mpirun` has not reacted to the end of a rank.
    Stalled(Pid),
    /// This `mpirun` reports that it is ending the job.
    Aborts(Pid),
    /// `mpirun` has ended.
    Ended(io::Result<ExitStatus>),
}

/// The event queue.
#[derive(Debug)]
pub(crate) struct Events {
    /// The sender. New threads get a clone of it.
    sender: Sender<LaunchEvent>,
    /// The receiver, which only the launcher's main thread reads.
    receiver: Receiver<LaunchEvent>,
}

/// The time in which the same signal counts as one. `timeout` sends its signal to the process that
/// it started and to its process group.
const REPEATED: Duration = Duration::from_millis(150);

impl Events {
    /// Starts to catch SIGTERM, SIGINT, SIGHUP and SIGUSR1.
    ///
    /// Afterwards these signals no longer end the process. Signal handlers may only call
    /// async-signal-safe functions, so a handler writes a byte to a socket, and a thread converts
    /// the byte to an event.
    ///
    /// # Errors
    /// Returns an error if a socket or a handler cannot be created.
    pub(crate) fn listen() -> io::Result<Self> {
        let (sender, receiver) = channel();
        for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1] {
            let (mut reader, writer) = UnixStream::pair()?;
            // The handler writes one byte per signal.
            signal_hook::low_level::pipe::register(signal, writer)?;
            let sender = sender.clone();
            thread::spawn(move || {
                let (mut byte, mut last) = ([0], None::<Instant>);
                while reader.read_exact(&mut byte).is_ok() {
                    let now = Instant::now();
                    if last.is_some_and(|last| now - last < REPEATED) {
                        continue;
                    }
                    last = Some(now);
                    if sender.send(LaunchEvent::Signal(signal)).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self { sender, receiver })
    }

    /// Returns the sender for threads that report events.
    pub(crate) fn sender(&self) -> Sender<LaunchEvent> {
        self.sender.clone()
    }

    /// Waits for the next event; `None` after the deadline.
    pub(crate) fn next(&self, deadline: Option<Instant>) -> Option<LaunchEvent> {
        // The queue owns a sender itself, so it is never disconnected.
        match deadline {
            None => self.receiver.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.receiver.recv_timeout(left).ok()
            }
        }
    }

    /// Waits for `duration`. Returns early with the first signal.
    ///
    /// Other events belong to runs that have ended and are dropped.
    pub(crate) fn pause(&self, duration: Duration) -> Option<i32> {
        let end = Instant::now() + duration;
        while let Some(event) = self.next(Some(end)) {
            if let LaunchEvent::Signal(signal) = event {
                return Some(signal);
            }
        }
        None
    }

    /// Returns a signal that has arrived but has not been handled yet.
    pub(crate) fn pending_signal(&self) -> Option<i32> {
        self.receiver.try_iter().find_map(|event| match event {
            LaunchEvent::Signal(signal) => Some(signal),
            _ => None,
        })
    }
}

/// Returns the name of a caught signal.
pub(crate) fn signal_name(signal: i32) -> &'static str {
    match signal {
        SIGINT => "SIGINT",
        SIGHUP => "SIGHUP",
        // Batch systems use this signal to announce the end of the job's time.
        SIGUSR1 => "SIGUSR1",
        _ => "SIGTERM",
    }
}
