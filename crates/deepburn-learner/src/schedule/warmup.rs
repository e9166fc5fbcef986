//! The warm-up of three schedules, and the decay after it.

use deepburn_config::WarmupShape;

/// A warm-up over `steps` applied steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Warmup {
    /// The number of applied steps, at least 2.
    steps: usize,
    /// Logarithmic (DeepSpeed's default) or linear.
    shape: WarmupShape,
}

impl Warmup {
    //= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR warmup_num_steps
    /// Returns a warm-up of at least 2 steps. With 1 step, the logarithmic shape would divide by
    /// `ln 1 = 0`.
    pub(super) fn new(steps: usize, shape: WarmupShape) -> Self {
        Self { steps: steps.max(2), shape }
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR
    /// Returns the progress of the warm-up at position `i`, from 0 to 1; `None` after its end.
    ///
    /// Positions -1 (the first step) and 0 (the second) both return 0.
    pub(super) fn progress(self, i: i64) -> Option<f64> {
        let (i, steps) = (i.max(0) as f64, self.steps as f64);
        (i < steps).then(|| match self.shape {
            WarmupShape::Log => (i + 1.0).ln() / steps.ln(),
            WarmupShape::Linear => i / steps,
        })
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py WarmupDecayLR
    /// Returns the factor of a linear decay from the end of the warm-up (1) to step `total` (0).
    pub(super) fn remaining(self, i: i64, total: usize) -> f64 {
        ((total as f64 - i as f64) / self.decay_steps(total)).max(0.0)
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py WarmupCosineLR
    /// Returns the progress of a decay to step `total`, from 0 to 1. It is one step ahead of
    /// [`Self::remaining`], because DeepSpeed's cosine schedule counts steps from 1.
    pub(super) fn decayed(self, i: i64, total: usize) -> f64 {
        ((i as f64 - self.steps as f64 + 1.0) / self.decay_steps(total)).clamp(0.0, 1.0)
    }

    /// Returns the number of decay steps, at least 1 so that it can be a divisor.
    fn decay_steps(self, total: usize) -> f64 {
        total.saturating_sub(self.steps).max(1) as f64
    }
}
