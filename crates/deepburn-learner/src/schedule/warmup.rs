//! The rise that three schedules share, and where a decay after it stands.

use deepburn_config::WarmupShape;

/// A warm-up of `steps` applied steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Warmup {
    steps: usize,
    shape: WarmupShape,
}

impl Warmup {
    /// A warm-up takes 2 steps at least: `ln 1` would divide by zero.
    pub(super) fn new(steps: usize, shape: WarmupShape) -> Self {
        Self { steps: steps.max(2), shape }
    }

    /// How far the rise is at position `i`, from 0 to 1; `None` once it is over.
    ///
    /// Position -1 (the first step) and 0 (the second) both give 0.
    pub(super) fn progress(self, i: i64) -> Option<f64> {
        let (i, steps) = (i.max(0) as f64, self.steps as f64);
        (i < steps).then(|| match self.shape {
            WarmupShape::Log => (i + 1.0).ln() / steps.ln(),
            WarmupShape::Linear => i / steps,
        })
    }

    /// What is left of a linear decay from the end of the warm-up to `total` steps, 1 to 0.
    pub(super) fn remaining(self, i: i64, total: usize) -> f64 {
        ((total as f64 - i as f64) / self.decay_steps(total)).max(0.0)
    }

    /// How far a decay to `total` steps is, 0 to 1; ahead of [`Self::remaining`] by one step, as
    /// DeepSpeed's cosine counts.
    pub(super) fn decayed(self, i: i64, total: usize) -> f64 {
        ((i as f64 - self.steps as f64 + 1.0) / self.decay_steps(total)).clamp(0.0, 1.0)
    }

    fn decay_steps(self, total: usize) -> f64 {
        total.saturating_sub(self.steps).max(1) as f64
    }
}
