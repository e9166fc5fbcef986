//! Signal handlers. SIGTERM, SIGINT and SIGUSR1 end a run after the current step, with a checkpoint. A second SIGTERM
//! or SIGINT ends it immediately.
//!
//! `deepburn launch` sends SIGUSR1, because mpirun forwards that signal to all ranks and does not act on it. A second
//! SIGUSR1 has no effect. A SIGUSR1 that arrives during the preparation ends the run after its first step.
//!
//! In a launched job SIGTERM has another meaning: mpirun sends it after another rank has failed. The step cannot be
//! completed then, so the first SIGTERM only sets a flag. mpirun waits a second before it sends SIGKILL. In that second
//! the ranks report the failure, or the rank that they wait for.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use deepburn::Interrupt;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

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

/// The signals that this process has received.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// Whether a signal has arrived.
    received: Arc<AtomicBool>,
    /// Whether the next signal ends the process.
    ends_process: Arc<AtomicBool>,
    /// Number of the last signal.
    number: Arc<AtomicUsize>,
    /// Whether mpirun is ending the job.
    terminated: Arc<AtomicBool>,
}

/// Makes a write beyond the file size limit (`ulimit -f`) return an error, as on a full disk. By default, SIGXFSZ would
/// end the process.
pub(crate) fn survive_file_limits() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

impl Signals {
    /// Registers the handler of SIGUSR1, which would end the process by default. Other signals still end a process
    /// during its preparation.
    pub(crate) fn prepare() -> io::Result<Self> {
        let signals = Self::default();
        survive_file_limits()?;
        signals.note(SIGUSR1)?;
        Ok(signals)
    }

    /// Registers the handlers of SIGTERM and SIGINT. With `prints`, they print what happens next.
    ///
    /// Ctrl-C twice always ends the process, even if it hangs in a collective. The shutdown is part of the signal
    /// handler, so that it does not depend on the training loop.
    pub(crate) fn listen(&self, prints: bool) -> io::Result<()> {
        let is_launched = launch_id().is_some();
        // Handlers run in order of registration. Messages and the shutdown are registered before the handler that sets
        // the flag, so that the first signal does not end the process. In a launched job, the launcher prints the
        // message.
        if prints && !is_launched {
            self.tell(SIGINT, OF_SIGINT)?;
            self.tell(SIGTERM, OF_SIGTERM)?;
        }
        flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, self.ends_process.clone())?;
        self.note(SIGINT)?;
        if is_launched {
            let terminated = &self.terminated;
            flag::register_conditional_shutdown(SIGTERM, 128 + SIGTERM, terminated.clone())?;
            flag::register(SIGTERM, terminated.clone())?;
            return Ok(());
        }
        flag::register_conditional_shutdown(SIGTERM, 128 + SIGTERM, self.ends_process.clone())?;
        self.note(SIGTERM)
    }

    /// Registers a handler that prints on standard error what the signal does. It prints at once, because the current
    /// step may take minutes.
    fn tell(&self, signal: i32, messages: Messages) -> io::Result<()> {
        let ends_process = self.ends_process.clone();
        let tell = move || {
            let text = messages[usize::from(ends_process.load(Relaxed))];
            let mut stderr =
                libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
            // A write to a full pipe would block the handler, and with it the shutdown.
            // SAFETY: the pointer is to one `pollfd`, and with a timeout of 0 the call does not wait.
            if unsafe { libc::poll(&raw mut stderr, 1, 0) } == 1 {
                // SAFETY: the text has this length. An error is ignored, because it cannot be reported.
                let _ =
                    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
            }
        };
        // SAFETY: the action loads a flag and calls `poll` and `write`, which a signal handler may do.
        unsafe { signal_hook::low_level::register(signal, tell) }.map(drop)
    }

    /// Registers a signal as a request to end the run.
    fn note(&self, signal: i32) -> io::Result<()> {
        flag::register_usize(signal, self.number.clone(), signal as usize)?;
        flag::register(signal, self.received.clone())?;
        flag::register(signal, self.ends_process.clone())?;
        Ok(())
    }

    /// Returns the interrupt of the training loop, which a signal triggers.
    pub(crate) fn interrupt(&self) -> Interrupt {
        Interrupt::from_flag(self.received.clone())
    }

    /// Returns a flag that is set when mpirun ends the job.
    pub(crate) fn terminated(&self) -> Arc<AtomicBool> {
        self.terminated.clone()
    }

    /// Returns the number and the name of the last signal.
    pub(crate) fn last(&self) -> (u8, &'static str) {
        match self.number.load(Relaxed) as i32 {
            SIGINT => (SIGINT as u8, "SIGINT"),
            SIGUSR1 => (SIGUSR1 as u8, "SIGUSR1"),
            _ => (SIGTERM as u8, "SIGTERM"),
        }
    }
}
