//! What the launcher waits for, in one queue: signals, answers of hosts, the end of `mpirun`.
//!
//! Each source has a thread. All but the one that looks for a stalled `mpirun` sleep until something
//! happens.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::process::{ExitStatus, Output};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

/// One thing that happened.
#[derive(Debug)]
pub(crate) enum LaunchEvent {
    /// This process got a signal.
    Signal(i32),
    /// The remote shell of a host ended.
    Answer {
        /// Index of the host.
        host: usize,
        /// Its exit status and what it printed.
        output: io::Result<Output>,
    },
    /// This `mpirun` ignores the end of a rank.
    Stalled(Pid),
    /// This `mpirun` says that it ends the job.
    Aborts(Pid),
    /// `mpirun` ended.
    Ended(io::Result<ExitStatus>),
}

/// The queue.
#[derive(Debug)]
pub(crate) struct Events {
    sender: Sender<LaunchEvent>,
    receiver: Receiver<LaunchEvent>,
}

impl Events {
    /// Catches SIGTERM, SIGINT, SIGHUP and SIGUSR1 from now on.
    pub(crate) fn listen() -> io::Result<Self> {
        let (sender, receiver) = channel();
        for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1] {
            let (mut reader, writer) = UnixStream::pair()?;
            // One byte is written for each signal.
            signal_hook::low_level::pipe::register(signal, writer)?;
            let sender = sender.clone();
            thread::spawn(move || {
                let mut byte = [0];
                while reader.read_exact(&mut byte).is_ok() {
                    if sender.send(LaunchEvent::Signal(signal)).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self { sender, receiver })
    }

    /// Where a thread puts events.
    pub(crate) fn sender(&self) -> Sender<LaunchEvent> {
        self.sender.clone()
    }

    /// Waits for the next event; `None` once the deadline has passed.
    pub(crate) fn next(&self, deadline: Option<Instant>) -> Option<LaunchEvent> {
        // The queue holds a sender itself, so it is never disconnected.
        match deadline {
            None => self.receiver.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.receiver.recv_timeout(left).ok()
            }
        }
    }

    /// Waits for `duration`, or for a signal, which is returned.
    pub(crate) fn pause(&self, duration: Duration) -> Option<i32> {
        let end = Instant::now() + duration;
        while let Some(event) = self.next(Some(end)) {
            if let LaunchEvent::Signal(signal) = event {
                return Some(signal);
            }
        }
        None
    }

    /// A signal that has come and that nobody has looked at.
    pub(crate) fn pending_signal(&self) -> Option<i32> {
        self.receiver.try_iter().find_map(|event| match event {
            LaunchEvent::Signal(signal) => Some(signal),
            _ => None,
        })
    }
}

/// The name of a signal that is caught.
pub(crate) fn signal_name(signal: i32) -> &'static str {
    match signal {
        SIGINT => "SIGINT",
        SIGHUP => "SIGHUP",
        // Batch systems announce the end of a job's time with it.
        SIGUSR1 => "SIGUSR1",
        _ => "SIGTERM",
    }
}
