//! Detects backward passes by their reported gradients.
//!
//! An engine that calls `backward` knows when the pass starts. Burn's `Learner` calls `backward`
//! inside `TrainStep::step`. In that case the first reported gradient of a model is the earliest
//! sign of its backward pass:
//!
//! ```text
//!  arm()        before forward       reset, store the callback
//!  report()     first gradient       run the callback: gathering and recomputation switch to backward
//!  report()     other gradients      count
//!  end()        end of backward      count the pass if it reported gradients of this model
//! ```
//!
//! Two engines on one thread have one watch each. `end` is called after the backward pass of any
//! model, so a pass is counted only by the watches that received gradients from it.

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
    /// Sets `announce` as the callback for the start of the next backward pass, and resets the
    /// gradient count. A callback from an earlier call that has not run is dropped.
    pub(crate) fn arm(&mut self, announce: Box<dyn FnOnce()>) {
        self.announce = Some(announce);
        self.began = None;
        self.reported = 0;
    }

    /// Records a gradient of this model. The first gradient of a pass runs the callback.
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

    /// Returns true if the pass in progress has reported a gradient of this model.
    pub(crate) fn is_reporting(&self) -> bool {
        self.reporting
    }

    /// Forgets a pass that failed before its end.
    pub(crate) fn abandon(&mut self) {
        self.reporting = false;
        // The callback belongs to the pass that failed and must not announce a later one.
        self.announce = None;
    }

    /// Returns the number of completed backward passes with gradients of this model.
    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }

    /// Returns the number of gradients since the last call of [`arm`](Self::arm).
    pub(crate) fn reported(&self) -> usize {
        self.reported
    }

    /// Returns the time at which the last backward pass began, or `None` if no gradient has been
    /// reported since the watch was armed.
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
