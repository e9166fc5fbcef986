//! SIGTERM, SIGINT and SIGUSR1: the first one ends the run after its step, with a checkpoint. A second
//! SIGTERM or SIGINT ends it at once.
//!
//! `deepburn launch` sends SIGUSR1, because mpirun hands that on to all ranks and does nothing by itself.
//! It may come again, which means nothing. SIGTERM then comes from mpirun alone, where another rank has
//! failed, and ends the rank at once: no step can be finished without the other.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use deepburn::Interrupt;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

use crate::results::STARTED;

/// The signals that this process has got.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    came: Arc<AtomicBool>,
    /// Whether the next one ends the process.
    at_once: Arc<AtomicBool>,
    number: Arc<AtomicUsize>,
}

impl Signals {
    /// Listens from now on.
    pub(crate) fn listen() -> io::Result<Self> {
        let signals = Self::default();
        let is_launched = std::env::var_os(STARTED).is_some();
        for signal in [SIGTERM, SIGINT, SIGUSR1] {
            // In this order: what ends the process asks whether another one came before.
            if signal == SIGTERM && is_launched {
                let always = Arc::new(AtomicBool::new(true));
                flag::register_conditional_shutdown(signal, 128 + signal, always)?;
            } else if signal != SIGUSR1 {
                flag::register_conditional_shutdown(signal, 128 + signal, signals.at_once.clone())?;
            }
            flag::register_usize(signal, signals.number.clone(), signal as usize)?;
            flag::register(signal, signals.came.clone())?;
            flag::register(signal, signals.at_once.clone())?;
        }
        Ok(signals)
    }

    /// What asks a run to end when a signal comes.
    pub(crate) fn interrupt(&self) -> Interrupt {
        Interrupt::from_flag(self.came.clone())
    }

    /// Whether one has come.
    pub(crate) fn came(&self) -> Arc<AtomicBool> {
        self.came.clone()
    }

    /// From now on the first one ends the process at once: there is no step to finish. None has come
    /// by that: ranks ask each other for signs of life only when one really has.
    pub(crate) fn end_at_once(&self) {
        self.at_once.store(true, Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_training_is_no_signal() {
        let signals = Signals::default();
        signals.end_at_once();
        assert!(signals.at_once.load(Relaxed));
        assert!(!signals.came().load(Relaxed));
    }
}
