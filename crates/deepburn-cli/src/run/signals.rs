//! Signal handlers. SIGTERM, SIGINT, SIGHUP and SIGUSR1 end a run after the current step, with a
//! checkpoint. A SIGTERM or SIGINT after another of these signals ends it immediately.
//!
//! `timeout` sends its signal twice: to the process that it started, and to its process group. A
//! signal that arrives again within [`REPEATED`] therefore counts as one.
//!
//! SIGHUP arrives when the terminal closes or a connection is lost. It may follow another signal:
//! systemd sends it after SIGTERM. A second SIGHUP therefore has no effect. `nohup` starts programs
//! with SIGHUP ignored, and their runs continue.
//!
//! `deepburn launch` sends SIGUSR1, because mpirun forwards that signal to all ranks and does not
//! act on it. A second SIGUSR1 has no effect. A SIGUSR1 that arrives during the preparation ends
//! the run after its first step.
//!
//! In a launched job SIGTERM has another meaning: mpirun sends it after another rank has failed.
//! The step cannot be completed then, so the first SIGTERM only sets a flag. mpirun waits a second
//! before it sends SIGKILL. In that second the ranks report the failure, or the rank that they wait
//! for.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use deepburn::Interrupt;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::{flag, low_level};

use crate::run::launcher_env::launch_id;

/// The messages for a first and a second signal.
type Messages = [&'static str; 2];

const OF_SIGINT: Messages = [
    "\nSIGINT: the run ends at its next safe point; a second signal ends it immediately\n",
    "\nSIGINT: the run ends immediately\n",
];

const OF_SIGTERM: Messages = [
    "\nSIGTERM: the run ends at its next safe point; a second signal ends it immediately\n",
    "\nSIGTERM: the run ends immediately\n",
];

const OF_SIGHUP: &str =
    "\nSIGHUP: the run ends at its next safe point; start it with nohup to let it continue\n";

/// The time in which the same signal counts as one. It is shorter than the time between two presses
/// of a key.
const REPEATED: Duration = Duration::from_millis(150);

/// The signals that this process has received.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// The request to end the run.
    request: Arc<EndRequest>,
    /// Whether mpirun is ending the job.
    terminated: Arc<AtomicBool>,
}

/// A request to end the run. Signal handlers change it, so all fields are atomic.
#[derive(Debug)]
struct EndRequest {
    /// Whether a signal has arrived.
    received: Arc<AtomicBool>,
    /// Number of the last signal.
    number: AtomicI32,
    /// The time from which `first` is counted.
    start: Instant,
    /// The number of the first signal, in the lowest 8 bits, and the milliseconds from `start` to
    /// it; 0 before it.
    first: AtomicU64,
}

impl Default for EndRequest {
    fn default() -> Self {
        Self {
            received: Arc::default(),
            number: AtomicI32::default(),
            start: Instant::now(),
            first: AtomicU64::default(),
        }
    }
}

/// The place of a signal among the signals of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrival {
    /// The first signal.
    First,
    /// The first signal again, sent by the same program.
    Repeated,
    /// A later signal.
    Second,
}

impl EndRequest {
    /// Records a signal that arrives now. It may be called in a signal handler.
    fn receive(&self, signal: i32) -> Arrival {
        self.receive_after(signal, self.start.elapsed())
    }

    /// Records a signal that arrives `after` the start.
    ///
    /// The first signal is one atomic value, so that two threads that handle the same signal agree
    /// on which is first.
    fn receive_after(&self, signal: i32, after: Duration) -> Arrival {
        self.number.store(signal, Relaxed);
        self.received.store(true, Relaxed);
        // All caught signals have numbers from 1 to 255.
        let now = (after.as_millis() as u64) << 8 | signal as u64;
        match self.first.compare_exchange(0, now, Relaxed, Relaxed) {
            Ok(_) => Arrival::First,
            Err(first)
                if first & 0xff == signal as u64
                    && u128::from((now >> 8).saturating_sub(first >> 8)) < REPEATED.as_millis() =>
            {
                Arrival::Repeated
            }
            Err(_) => Arrival::Second,
        }
    }
}

/// Makes a write beyond the file size limit (`ulimit -f`) return an error, as on a full disk. By
/// default, SIGXFSZ would end the process.
pub(crate) fn survive_file_limits() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

impl Signals {
    /// Registers the handler of SIGUSR1, which would end the process by default. Other signals
    /// still end a process during its preparation.
    pub(crate) fn prepare() -> io::Result<Self> {
        let signals = Self::default();
        survive_file_limits()?;
        let request = signals.request.clone();
        let receive = move || {
            request.receive(SIGUSR1);
        };
        // SAFETY: the action reads a clock and changes atomics, which a signal handler may do.
        unsafe { low_level::register(SIGUSR1, receive) }?;
        Ok(signals)
    }

    /// Registers the handlers of SIGTERM, SIGINT and SIGHUP. With `prints`, they print what happens
    /// next.
    ///
    /// Ctrl-C twice always ends the process, even if it hangs in a collective. The shutdown is part
    /// of the signal handler, so that it does not depend on the training loop.
    pub(crate) fn listen(&self, prints: bool) -> io::Result<()> {
        let is_launched = launch_id().is_some();
        // In a launched job, the launcher prints the messages.
        let prints = prints && !is_launched;
        self.end_at(SIGINT, prints.then_some(OF_SIGINT))?;
        self.end_at_hangup(prints.then_some(OF_SIGHUP))?;
        if is_launched {
            // The handler that ends the process is registered first, so that the first signal does
            // not end it.
            let terminated = &self.terminated;
            flag::register_conditional_shutdown(SIGTERM, 128 + SIGTERM, terminated.clone())?;
            flag::register(SIGTERM, terminated.clone()).map(drop)
        } else {
            self.end_at(SIGTERM, prints.then_some(OF_SIGTERM))
        }
    }

    /// Registers the handler of a signal that ends the run, and the process if it arrives a second
    /// time. `messages` are printed at once, because the current step may take minutes.
    fn end_at(&self, signal: i32, messages: Option<Messages>) -> io::Result<()> {
        let request = self.request.clone();
        let [first, second] = messages.unwrap_or_default();
        let end = move || match request.receive(signal) {
            Arrival::First => tell(first),
            Arrival::Repeated => {}
            Arrival::Second => {
                tell(second);
                low_level::exit(128 + signal);
            }
        };
        // SAFETY: the action reads a clock, changes atomics and calls `poll`, `write` and `_exit`,
        // which a signal handler may do.
        unsafe { low_level::register(signal, end) }.map(drop)
    }

    /// Registers the handler of SIGHUP, unless the program was started with SIGHUP ignored.
    /// `message` is printed at the first signal.
    fn end_at_hangup(&self, message: Option<&'static str>) -> io::Result<()> {
        if is_ignored(SIGHUP)? {
            return Ok(());
        }
        let (request, message) = (self.request.clone(), message.unwrap_or_default());
        let end = move || {
            if request.receive(SIGHUP) == Arrival::First {
                tell(message);
            }
        };
        // SAFETY: the action reads a clock, changes atomics and calls `poll` and `write`, which a
        // signal handler may do.
        unsafe { low_level::register(SIGHUP, end) }.map(drop)
    }

    /// Returns the interrupt of the training loop, which a signal triggers.
    pub(crate) fn interrupt(&self) -> Interrupt {
        Interrupt::from_flag(self.request.received.clone())
    }

    /// Returns a flag that is set when mpirun ends the job.
    pub(crate) fn terminated(&self) -> Arc<AtomicBool> {
        self.terminated.clone()
    }

    /// Returns the number and the name of the last signal.
    pub(crate) fn last(&self) -> (u8, &'static str) {
        match self.request.number.load(Relaxed) {
            SIGINT => (SIGINT as u8, "SIGINT"),
            SIGHUP => (SIGHUP as u8, "SIGHUP"),
            SIGUSR1 => (SIGUSR1 as u8, "SIGUSR1"),
            _ => (SIGTERM as u8, "SIGTERM"),
        }
    }
}

/// Returns whether this process ignores a signal, as the program that started it decided.
fn is_ignored(signal: i32) -> io::Result<bool> {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action, the call only writes the current one to `action`, which it
    // fills when it returns 0.
    match unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } {
        // SAFETY: the call has succeeded.
        0 => Ok(unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes a text to standard error from a signal handler.
fn tell(text: &str) {
    let mut stderr = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // A write to a full pipe would block the handler, and with it the end of the process. SAFETY:
    // the pointer is to one `pollfd`, and with a timeout of 0 the call does not wait.
    if unsafe { libc::poll(&raw mut stderr, 1, 0) } == 1 {
        // SAFETY: the text has this length. An error is ignored, because it cannot be reported.
        let _ = unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_signal_at_once_counts_as_one() {
        let request = EndRequest::default();
        let start = Duration::from_secs(9);
        assert_eq!(request.receive_after(SIGTERM, start), Arrival::First);
        assert_eq!(request.receive_after(SIGTERM, start + REPEATED / 2), Arrival::Repeated);
        assert_eq!(request.receive_after(SIGINT, start + REPEATED / 2), Arrival::Second);
        assert_eq!(request.receive_after(SIGTERM, start + REPEATED), Arrival::Second);
        assert!(request.received.load(Relaxed));
    }
}
