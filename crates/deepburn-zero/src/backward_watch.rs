//! Notices backward passes by the gradients that they report.

use std::fmt;
use std::time::Instant;

/// Watches the backward passes of one model.
#[derive(Default)]
pub(crate) struct BackwardWatch {
    /// Called at the beginning of the next backward pass.
    announce: Option<Box<dyn FnOnce()>>,
    began: Option<Instant>,
    /// Whether the pass in progress has reported a gradient of this model.
    reporting: bool,
    reported: usize,
    completed: u64,
}

impl BackwardWatch {
    /// Calls `announce` when the next backward pass begins.
    pub(crate) fn arm(&mut self, announce: Box<dyn FnOnce()>) {
        self.announce = Some(announce);
        self.began = None;
        self.reported = 0;
    }

    /// Notes a gradient of this model, the first of which announces the pass.
    pub(crate) fn report(&mut self) {
        self.reporting = true;
        self.reported += 1;
        if let Some(announce) = self.announce.take() {
            self.began = Some(Instant::now());
            announce();
        }
    }

    /// Notes the end of a backward pass of any model on this thread.
    pub(crate) fn end(&mut self) {
        if std::mem::take(&mut self.reporting) {
            self.completed += 1;
        }
    }

    /// Completed backward passes that reported gradients of this model.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Gradients that were reported since [`arm`](Self::arm) was called.
    pub(crate) fn reported(&self) -> usize {
        self.reported
    }

    /// When the last watched backward pass began.
    pub(crate) fn began(&self) -> Option<Instant> {
        self.began
    }
}

impl fmt::Debug for BackwardWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackwardWatch")
            .field("reporting", &self.reporting)
            .field("completed", &self.completed)
            .finish_non_exhaustive()
    }
}
