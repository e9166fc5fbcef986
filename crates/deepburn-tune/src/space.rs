//! The settings that are tuned.

use deepburn_config::{RecomputePolicy, SizeLimits, Stage};

use crate::candidate::{Buffers, CandidateConfig, StatePlacement};

/// The values of each setting that is tuned. A setting with one value is fixed.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchSpace {
    /// Numbers of ranks.
    pub ranks: Vec<usize>,
    /// Samples of an optimizer step over all ranks.
    pub batch_sizes: Vec<usize>,
    /// Limits of the samples in one forward and backward pass of a rank.
    pub micro_batch_sizes: SizeLimits,
    /// ZeRO stages.
    pub stages: Vec<Stage>,
    /// Places of model states.
    pub states: Vec<StatePlacement>,
    /// Policies of activation checkpointing.
    pub recompute: Vec<RecomputePolicy>,
    /// Sizes of communication buffers.
    pub buffers: Vec<Buffers>,
}

impl Default for SearchSpace {
    /// Returns all stages and policies on one rank, without offload.
    fn default() -> Self {
        Self {
            ranks: vec![1],
            batch_sizes: vec![1],
            micro_batch_sizes: SizeLimits::default(),
            stages: Stage::ALL.to_vec(),
            states: vec![StatePlacement::Device],
            recompute: vec![
                RecomputePolicy::Off,
                RecomputePolicy::Selective,
                RecomputePolicy::EveryNth(2),
                RecomputePolicy::Full,
            ],
            buffers: vec![Buffers::AsConfigured],
        }
    }
}

impl SearchSpace {
    /// Returns all candidates, cheap settings before expensive ones: a candidate that is never
    /// slower than another one comes before it.
    ///
    /// One rank is tried at one stage. A batch size that the number of ranks does not divide has no
    /// candidates, and neither has a placement that the stage does not support.
    pub fn candidates(&self) -> Vec<CandidateConfig> {
        let mut candidates = Vec::new();
        // In this lexicographic order, a candidate follows all that are no more expensive in any of
        // the three outer settings.
        for &buffers in &self.buffers {
            for &states in &self.states {
                for &recompute in &self.recompute {
                    for &stage in self.stages.iter().filter(|stage| states.fits(**stage)) {
                        for (ranks, micro_batch, accumulation) in self.batches() {
                            // At another stage, one rank would do the same work again.
                            if ranks == 1 && !self.is_lowest(stage, states) {
                                continue;
                            }
                            candidates.push(CandidateConfig {
                                ranks,
                                stage,
                                states,
                                recompute,
                                buffers,
                                micro_batch,
                                accumulation,
                            });
                        }
                    }
                }
            }
        }
        candidates
    }

    /// Returns whether `stage` is the lowest one that supports a placement. One rank has nothing to
    /// shard, so it does the same at every stage.
    fn is_lowest(&self, stage: Stage, states: StatePlacement) -> bool {
        let supporting = self.stages.iter().filter(|stage| states.fits(**stage));
        supporting.min().is_some_and(|lowest| *lowest == stage)
    }

    /// Returns the numbers of ranks, samples of a micro-batch and micro-batches of a step.
    fn batches(&self) -> Vec<(usize, usize, usize)> {
        let mut batches = Vec::new();
        for &ranks in &self.ranks {
            for &batch in self.batch_sizes.iter().filter(|batch| batch.is_multiple_of(ranks)) {
                let of_rank = batch / ranks;
                let sizes = micro_batch_sizes(of_rank).into_iter();
                let sizes = sizes.filter(|size| self.micro_batch_sizes.contains(*size));
                batches.extend(sizes.map(|size| (ranks, size, of_rank / size)));
            }
        }
        batches
    }
}

/// Returns sizes of micro-batches that divide `samples`: itself, its halves as long as they are
/// even, and 1.
fn micro_batch_sizes(samples: usize) -> Vec<usize> {
    let half = |size: &usize| size.is_multiple_of(2).then_some(size / 2);
    let mut sizes: Vec<_> =
        std::iter::successors(Some(samples).filter(|it| *it > 0), half).collect();
    if sizes.last().is_some_and(|smallest| *smallest > 1) {
        sizes.push(1);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_divide_the_batch() {
        assert_eq!(micro_batch_sizes(12), [12, 6, 3, 1]);
        assert_eq!(micro_batch_sizes(8), [8, 4, 2, 1]);
        assert_eq!(micro_batch_sizes(1), [1]);
        assert!(micro_batch_sizes(0).is_empty());
    }

    #[test]
    fn candidates_keep_the_batch_size() {
        let space = SearchSpace {
            ranks: vec![1, 2, 3, 4],
            batch_sizes: vec![12],
            ..SearchSpace::default()
        };
        let candidates = space.candidates();
        assert!(candidates.iter().all(|candidate| candidate.batch_size() == 12));
        // 4 sizes at stage 0 on one rank; 3 (6, 3, 1), 3 (4, 2, 1) and 2 (3, 1) at four stages;
        // with four policies.
        assert_eq!(candidates.len(), (4 + (3 + 3 + 2) * 4) * 4);
    }

    #[test]
    fn a_candidate_that_is_never_slower_comes_first() {
        let states = StatePlacement::ALL.to_vec();
        let buffers = vec![Buffers::AsConfigured, Buffers::Small];
        let candidates = SearchSpace { states, buffers, ..SearchSpace::default() }.candidates();
        for (at, candidate) in candidates.iter().enumerate() {
            let later = &candidates[at + 1..];
            assert!(later.iter().all(|later| !later.is_never_slower(candidate)), "{candidate:?}");
        }
    }

    #[test]
    fn limits_exclude_sizes() {
        let limits = SizeLimits { min: Some(2), max: Some(4) };
        let space = SearchSpace {
            batch_sizes: vec![8],
            micro_batch_sizes: limits,
            ..SearchSpace::default()
        };
        assert!(space.candidates().iter().all(|it| it.micro_batch == 2 || it.micro_batch == 4));
    }
}
