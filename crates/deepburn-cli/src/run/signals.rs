//! SIGTERM, SIGINT and SIGUSR1: the first one ends the run after its step, with a checkpoint. A second
//! SIGTERM or SIGINT ends it at once.
//!
//! `deepburn launch` sends SIGUSR1, because mpirun forwards that signal to all ranks and takes no action of
//! its own. It may come again, which changes nothing, and it may come while the rank still prepares: then
//! the run ends after its first step. SIGTERM then comes from mpirun, after another rank has failed. The
//! step cannot be finished, so the first SIGTERM only sets a flag: within the second before SIGKILL the
//! ranks report the failure, or for whom they wait.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use deepburn::Interrupt;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;

use crate::run::results::STARTED;

/// The signals that this process has got.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    came: Arc<AtomicBool>,
    /// Whether the next one ends the process.
    at_once: Arc<AtomicBool>,
    number: Arc<AtomicUsize>,
    /// Whether mpirun ends the job.
    terminated: Arc<AtomicBool>,
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) an error like that of a full disk, in place of the
/// end of the process.
pub(crate) fn survive_file_limits() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

impl Signals {
    /// Listens to SIGUSR1, whose default is to kill the process. Other signals still end a process
    /// that prepares its run.
    pub(crate) fn prepare() -> io::Result<Self> {
        let signals = Self::default();
        survive_file_limits()?;
        signals.note(SIGUSR1)?;
        Ok(signals)
    }

    /// Listens to SIGTERM and SIGINT too, from now on.
    pub(crate) fn listen(&self) -> io::Result<()> {
        let is_launched = std::env::var_os(STARTED).is_some();
        // In this order: what ends the process asks whether another one came before.
        flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, self.at_once.clone())?;
        self.note(SIGINT)?;
        if is_launched {
            let terminated = &self.terminated;
            flag::register_conditional_shutdown(SIGTERM, 128 + SIGTERM, terminated.clone())?;
            flag::register(SIGTERM, terminated.clone())?;
            return Ok(());
        }
        flag::register_conditional_shutdown(SIGTERM, 128 + SIGTERM, self.at_once.clone())?;
        self.note(SIGTERM)
    }

    /// Takes a signal for a request to end the run.
    fn note(&self, signal: i32) -> io::Result<()> {
        flag::register_usize(signal, self.number.clone(), signal as usize)?;
        flag::register(signal, self.came.clone())?;
        flag::register(signal, self.at_once.clone())?;
        Ok(())
    }

    /// What asks a run to end when a signal comes.
    pub(crate) fn interrupt(&self) -> Interrupt {
        Interrupt::from_flag(self.came.clone())
    }

    /// A flag that is set once mpirun ends the job.
    pub(crate) fn terminated(&self) -> Arc<AtomicBool> {
        self.terminated.clone()
    }

    /// The last signal that came: its number and its name.
    pub(crate) fn last(&self) -> (u8, &'static str) {
        match self.number.load(Relaxed) as i32 {
            SIGINT => (SIGINT as u8, "SIGINT"),
            SIGUSR1 => (SIGUSR1 as u8, "SIGUSR1"),
            _ => (SIGTERM as u8, "SIGTERM"),
        }
    }
}
