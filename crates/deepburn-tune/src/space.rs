//! The settings that are tuned.

use deepburn_config::{RecomputePolicy, SizeLimits, Stage};

use crate::candidate::{Buffers, CandidateConfig, StatePlacement};

/// The values of each setting that is tuned. A setting with one value is fixed.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchSpace {
    /// Numbers of ranks, of all pipeline stages together.
    pub ranks: Vec<usize>,
    /// Numbers of pipeline stages. One that does not divide a number of ranks is not tried with it.
    pub pipeline_stages: Vec<usize>,
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
            pipeline_stages: vec![1],
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
    /// One data-parallel rank is tried at one ZeRO stage. A batch size that the number of
    /// data-parallel ranks does not divide has no candidates, and neither has a placement that the
    /// stage does not support.
    pub fn candidates(&self) -> Vec<CandidateConfig> {
        let mut candidates = Vec::new();
        // In this lexicographic order, a candidate follows all that are no more expensive in any of
        // the three outer settings.
        for &buffers in &self.buffers {
            for &states in &self.states {
                for &recompute in &self.recompute {
                    for &stage in self.stages.iter().filter(|stage| states.fits(**stage)) {
                        let settings = |batch: RankBatch| CandidateConfig {
                            ranks: batch.ranks,
                            pipeline_stages: batch.pipeline_stages,
                            stage,
                            states,
                            recompute,
                            buffers,
                            micro_batch: batch.micro_batch,
                            accumulation: batch.accumulation,
                        };
                        // At another stage, one rank would do the same work again.
                        let is_lowest = self.is_lowest(stage, states);
                        candidates.extend(
                            self.batches()
                                .into_iter()
                                .map(settings)
                                .filter(|it| is_lowest || it.data_parallel_ranks() > 1),
                        );
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

    /// Returns how the ranks can share the samples of a step.
    fn batches(&self) -> Vec<RankBatch> {
        let mut batches = Vec::new();
        for &ranks in &self.ranks {
            let dividing = self.pipeline_stages.iter().filter(|stages| divides(**stages, ranks));
            for &pipeline_stages in dividing {
                // All stages of a pipeline work on the samples of its data-parallel rank.
                let sharing = ranks / pipeline_stages;
                for &batch in self.batch_sizes.iter().filter(|batch| divides(sharing, **batch)) {
                    let of_rank = batch / sharing;
                    let sizes = micro_batch_sizes(of_rank).into_iter();
                    let sizes = sizes.filter(|size| self.micro_batch_sizes.contains(*size));
                    batches.extend(sizes.map(|micro_batch| {
                        let accumulation = of_rank / micro_batch;
                        RankBatch { ranks, pipeline_stages, micro_batch, accumulation }
                    }));
                }
            }
        }
        batches
    }
}

/// The ranks of a candidate, and the samples that each of them has in a step.
struct RankBatch {
    ranks: usize,
    pipeline_stages: usize,
    micro_batch: usize,
    accumulation: usize,
}

/// Returns whether `part`, unless it is 0, divides `whole`.
fn divides(part: usize, whole: usize) -> bool {
    part > 0 && whole.is_multiple_of(part)
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
    fn pipeline_stages_divide_the_ranks_and_share_samples() {
        let space = SearchSpace {
            ranks: vec![2, 3, 4],
            pipeline_stages: vec![0, 1, 2],
            batch_sizes: vec![12],
            recompute: vec![RecomputePolicy::Off],
            ..SearchSpace::default()
        };
        let candidates = space.candidates();
        assert!(candidates.iter().all(|candidate| candidate.batch_size() == 12));
        let count = |ranks, stages| {
            let is = |it: &&CandidateConfig| (it.ranks, it.pipeline_stages) == (ranks, stages);
            candidates.iter().filter(is).count()
        };
        // With one data-parallel rank, 4 sizes (12, 6, 3, 1) at one ZeRO stage; with two, 3 sizes
        // (6, 3, 1) at four stages.
        assert_eq!([count(2, 2), count(4, 2), count(2, 1)], [4, 3 * 4, 3 * 4]);
        assert_eq!([count(3, 2), count(2, 0), count(4, 0)], [0; 3]);
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
