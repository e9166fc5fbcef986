//! Detects backward passes by the gradients that they report.
//!
//! An engine that calls `backward` itself knows when it starts. Burn's `Learner` calls it inside
//! `TrainStep::step`. The first gradient of a model is then the earliest sign of its backward pass:
//!
//! ```text
//!  arm()        before forward       forget the last pass, remember what to announce
//!  report()     first gradient       announce: switch gathering and recomputation to backward
//!  report()     other gradients      count
//!  end()        backward is over     count the pass, if it reported gradients of this model
//! ```
//!
//! Two engines on one thread have a watch each. `end` is called for a backward pass of any model,
//! so a pass counts only for the models that it reported gradients of.

use std::fmt;
use std::time::Instant;

/// Watches the backward passes of one model.
#[derive(Default)]
pub(crate) struct BackwardWatch {
    /// Called at the beginning of the next backward pass.
    announce: Option<Box<dyn FnOnce()>>,
    /// The time of the first gradient since the watch was armed.
    began: Option<Instant>,
    /// Whether the pass in progress has reported a gradient of this model.
    reporting: bool,
    /// The number of gradients since the watch was armed.
    reported: usize,
    /// The number of completed passes since the model was created.
    completed: u64,
}

impl BackwardWatch {
    /// Calls `announce` when the next backward pass begins, and resets the count of gradients. An
    /// earlier announcement that was not made is dropped.
    pub(crate) fn arm(&mut self, announce: Box<dyn FnOnce()>) {
        self.announce = Some(announce);
        self.began = None;
        self.reported = 0;
    }

    /// Records a gradient of this model. The first one announces the pass.
    pub(crate) fn report(&mut self) {
        self.reporting = true;
        self.reported += 1;
        if let Some(announce) = self.announce.take() {
            self.began = Some(Instant::now());
            announce();
        }
    }

    /// Records the end of a backward pass of any model on this thread.
    pub(crate) fn end(&mut self) {
        if std::mem::take(&mut self.reporting) {
            self.completed += 1;
        }
    }

    /// Returns the number of completed backward passes that reported gradients of this model.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Returns the number of gradients that were reported since [`arm`](Self::arm) was called.
    pub(crate) fn reported(&self) -> usize {
        self.reported
    }

    /// Returns the time at which the last watched backward pass began; `None` if it was not
    /// detected.
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
