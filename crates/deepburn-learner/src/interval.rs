//! How often the training loop evaluates and saves.

/// An interval between evaluations or checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// Every this many optimizer steps.
    Steps(u64),
    /// Every epoch, in the step that takes its last sample.
    ///
    /// Epochs are counted by samples, because a batch may have samples of two epochs, and because
    /// the size of a step can change: by a schedule, by dynamic batching, or when a run resumes
    /// with another batch size.
    Epochs {
        /// The number of samples of an epoch, over all ranks.
        samples: u64,
    },
}

impl Interval {
    /// Returns true if the interval ends in `step`, before and after which `samples` had been
    /// taken. An interval of 0 counts as 1.
    pub(crate) fn is_due(self, step: u64, samples: [u64; 2]) -> bool {
        match self {
            Self::Steps(every) => step.is_multiple_of(every.max(1)),
            Self::Epochs { samples: epoch } => {
                // A step may contain the ends of several epochs, which are due once.
                let [before, after] = samples.map(|samples| samples / epoch.max(1));
                before < after
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the steps in which epochs of 10 samples end.
    fn epoch_ends(sizes: &[u64]) -> Vec<u64> {
        let interval = Interval::Epochs { samples: 10 };
        let mut taken = 0;
        let mut is_due = |(step, size): (u64, &u64)| {
            let before = taken;
            taken += size;
            interval.is_due(step, [before, taken]).then_some(step)
        };
        (1..).zip(sizes).filter_map(&mut is_due).collect()
    }

    #[test]
    fn an_epoch_ends_in_the_step_with_its_last_sample() {
        assert_eq!(epoch_ends(&[5; 6]), [2, 4, 6]);
        // 4, 8 | 12, 16 | 20 | 24, 28 | 32
        assert_eq!(epoch_ends(&[4; 8]), [3, 5, 8]);
        // Steps with more samples than an epoch.
        assert_eq!(epoch_ends(&[25, 4, 4, 25]), [1, 3, 4]);
        // Steps of changing size.
        assert_eq!(epoch_ends(&[2, 2, 8, 8, 1, 9]), [3, 4, 6]);
    }

    #[test]
    fn steps_are_counted_from_the_start() {
        let due =
            |every: u64| (1..=6).filter(move |step| Interval::Steps(every).is_due(*step, [0, 0]));
        assert!(due(3).eq([3, 6]) && due(1).eq(1..=6) && due(0).eq(1..=6));
    }
}
