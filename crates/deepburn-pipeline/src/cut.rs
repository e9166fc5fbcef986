//! The cut of a model into the stages of a pipeline.

use std::fmt;
use std::ops::Range;

use crate::block::Block;
use crate::deepspeed::{partition_balanced, partition_uniform};
use crate::method::CutMethod;
use crate::schedule::PassSchedule;

/// What a step of a pipeline needs beyond its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineStep {
    /// The schedule, which determines how many sets of activations a stage holds.
    pub schedule: PassSchedule,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Maximum bytes of states and activations of a rank; `None` for no limit. Only
    /// [`CutMethod::Cost`] respects it.
    pub memory_limit: Option<u64>,
}

/// The blocks of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageBlocks {
    /// Positions of the blocks.
    pub blocks: Range<usize>,
    /// Operations of the forward and backward pass of a micro-batch.
    pub operations: u128,
    /// Bytes of the states, and of as many sets of activations as are in flight or deferred.
    pub bytes: u128,
}

/// The stages of a pipeline, each with its first and last block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosestCut(Vec<(String, String)>);

/// The reason why a model cannot be cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// A stage would have no block.
    #[error(
        "{stages} pipeline stages for a model of {blocks} blocks: each stage needs a block; use at most {blocks} stages"
    )]
    TooManyStages {
        /// Number of stages.
        stages: usize,
        /// Number of blocks.
        blocks: usize,
    },
    /// `type:REGEX` would leave a stage without a match.
    #[error(
        "type:{pattern} matches {matches} of {blocks} blocks, fewer than the {stages} pipeline stages; use \
         a pattern that matches more blocks, or fewer stages"
    )]
    TooFewMatches {
        /// The regular expression.
        pattern: String,
        /// Number of blocks whose names match.
        matches: usize,
        /// Number of blocks.
        blocks: usize,
        /// Number of stages.
        stages: usize,
    },
    /// No cut fits into memory.
    #[error(
        "no cut into pipeline stages fits into {limit} bytes per rank: with the closest one ({cut}), stage {stage} needs \
         {needed} bytes, {} too many; use more stages, a higher ZeRO stage, activation checkpointing or offload",
        .needed - u128::from(*.limit)
    )]
    OutOfMemory {
        /// The cut whose largest shortfall is the smallest.
        cut: ClosestCut,
        /// The stage with this shortfall.
        stage: usize,
        /// Bytes that it needs.
        needed: u128,
        /// Bytes that a rank has.
        limit: u64,
    },
}

impl fmt::Display for ClosestCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (stage, (first, last)) in self.0.iter().enumerate() {
            let separator = if stage > 0 { " | " } else { "" };
            match first == last {
                true => write!(f, "{separator}{first}")?,
                false => write!(f, "{separator}{first} to {last}")?,
            }
        }
        Ok(())
    }
}

/// Divides `blocks`, which are in the order of their execution, into `stages`; 0 counts as 1.
///
/// [`CutMethod::Cost`] finds the cut whose slowest stage has the fewest operations, among those
/// that fit into memory. Of several such cuts, it takes the one whose largest stage needs the least
/// memory.
///
/// # Errors
/// Returns a [`CutError`] if a stage would have no block or no match, or if no cut fits into
/// memory.
pub fn cut(
    blocks: &[Block],
    stages: usize,
    method: &CutMethod,
    step: PipelineStep,
) -> Result<Vec<StageBlocks>, CutError> {
    let stages = stages.max(1);
    if stages > blocks.len() {
        return Err(CutError::TooManyStages { stages, blocks: blocks.len() });
    }
    let candidate = StageCosts::new(blocks, stages, step);
    let ranges = match method {
        CutMethod::Cost => return candidate.fastest().ok_or_else(|| candidate.shortfall(blocks)),
        CutMethod::Uniform => partition_uniform(blocks.len(), stages),
        CutMethod::Parameters => {
            let parameters: Vec<_> = blocks.iter().map(|block| block.parameters).collect();
            partition_balanced(&parameters, stages)
        }
        //= deepspeed 0.19.8 runtime/pipe/module.py _partition_layers
        CutMethod::Type(pattern) => {
            let matching = |block: &Block| u64::from(pattern.is_match(&block.name));
            let weights: Vec<_> = blocks.iter().map(matching).collect();
            let matches = weights.iter().sum::<u64>() as usize;
            if matches < stages {
                let (pattern, blocks) = (pattern.to_string(), blocks.len());
                return Err(CutError::TooFewMatches { pattern, matches, blocks, stages });
            }
            partition_balanced(&weights, stages)
        }
    };
    let stages = ranges.windows(2).enumerate();
    Ok(stages.map(|(stage, ends)| candidate.stage(stage, ends[0]..ends[1])).collect())
}

/// The cost of every possible stage, in constant time.
struct StageCosts {
    /// For each number of blocks, the operations of the first ones.
    operations: Vec<u128>,
    state_bytes: Vec<u128>,
    activation_bytes: Vec<u128>,
    stages: usize,
    step: PipelineStep,
}

impl StageCosts {
    fn new(blocks: &[Block], stages: usize, step: PipelineStep) -> Self {
        let operations = |block: &Block| {
            u128::from(block.forward_operations) + u128::from(block.backward_operations)
        };
        Self {
            operations: sums(blocks.iter().map(operations)),
            state_bytes: sums(blocks.iter().map(|block| block.state_bytes.into())),
            activation_bytes: sums(blocks.iter().map(|block| block.activation_bytes.into())),
            stages,
            step,
        }
    }

    /// Returns the stage with this index and these blocks.
    fn stage(&self, stage: usize, blocks: Range<usize>) -> StageBlocks {
        let of = |sums: &[u128]| sums[blocks.end] - sums[blocks.start];
        let PipelineStep { schedule, micro_batches, .. } = self.step;
        // The operands of deferred products, inputs and gradients of linear layers, take about as
        // much as all activations of a micro-batch.
        let sets = schedule.in_flight(stage, self.stages, micro_batches)
            + schedule.deferred(stage, micro_batches);
        let sets = sets as u128;
        let activations = of(&self.activation_bytes).saturating_mul(sets);
        let bytes = of(&self.state_bytes).saturating_add(activations);
        StageBlocks { operations: of(&self.operations), bytes, blocks }
    }

    /// Returns by how many bytes a stage exceeds the memory of a rank.
    fn excess(&self, stage: &StageBlocks) -> u128 {
        self.step.memory_limit.map_or(0, |limit| stage.bytes.saturating_sub(limit.into()))
    }

    /// Returns the fastest cut that fits into memory; `None` if none fits.
    fn fastest(&self) -> Option<Vec<StageBlocks>> {
        let fits = |stage: &StageBlocks| self.excess(stage) == 0;
        let operations = |stage: &StageBlocks| fits(stage).then_some(stage.operations);
        let slowest = self.smallest_maximum(operations)?.iter().map(|it| it.operations).max()?;
        // Most cuts are as fast, because only the slowest stage counts.
        self.smallest_maximum(|stage| {
            (fits(stage) && stage.operations <= slowest).then_some(stage.bytes)
        })
    }

    /// Returns the error that no cut fits into memory.
    fn shortfall(&self, blocks: &[Block]) -> CutError {
        let closest = self.smallest_maximum(|stage| Some(self.excess(stage))).unwrap_or_default();
        let needed = closest.iter().map(|stage| stage.bytes).max().unwrap_or_default();
        let name = |block: usize| blocks.get(block).map_or(String::new(), |it| it.name.clone());
        let ends = closest
            .iter()
            .map(|stage| (name(stage.blocks.start), name(stage.blocks.end.saturating_sub(1))));
        CutError::OutOfMemory {
            cut: ClosestCut(ends.collect()),
            stage: closest.iter().position(|stage| stage.bytes == needed).unwrap_or_default(),
            needed,
            limit: self.step.memory_limit.unwrap_or_default(),
        }
    }

    /// Returns the cut whose largest `value` of a stage is the smallest. A stage without a value is
    /// not allowed; `None` if every cut has such a stage.
    ///
    /// Replacing the stages before the last one with a better cut of the same blocks never makes
    /// the whole cut worse. Each prefix is therefore solved once.
    fn smallest_maximum(
        &self,
        value: impl Fn(&StageBlocks) -> Option<u128>,
    ) -> Option<Vec<StageBlocks>> {
        let blocks = self.operations.len() - 1;
        // For each stage and end, the smallest maximum of the stages up to it, and its start.
        let mut best: Vec<Vec<Option<(u128, usize)>>> = Vec::with_capacity(self.stages);
        for stage in 0..self.stages {
            let mut row = vec![None; blocks + 1];
            for (end, kept) in row.iter_mut().enumerate().skip(stage + 1) {
                let cut_at = |start: usize| {
                    let before = match stage.checked_sub(1) {
                        None => (start == 0).then_some(0),
                        Some(previous) => best[previous][start].map(|(value, _)| value),
                    };
                    Some((before?.max(value(&self.stage(stage, start..end))?), start))
                };
                *kept = (stage..end).filter_map(cut_at).min();
            }
            best.push(row);
        }
        let mut end = blocks;
        let mut cut = Vec::with_capacity(self.stages);
        for stage in (0..self.stages).rev() {
            let (_, start) = best[stage][end]?;
            cut.push(self.stage(stage, start..end));
            end = start;
        }
        cut.reverse();
        Some(cut)
    }
}

/// Returns the sum of the first values, for each number of them.
fn sums(values: impl Iterator<Item = u128>) -> Vec<u128> {
    let mut sums = vec![0];
    sums.extend(values.scan(0, |sum, value| {
        *sum += value;
        Some(*sum)
    }));
    sums
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use regex::Regex;

    use super::*;

    fn step(
        schedule: PassSchedule,
        micro_batches: usize,
        memory_limit: Option<u64>,
    ) -> PipelineStep {
        PipelineStep { schedule, micro_batches, memory_limit }
    }

    fn block(name: &str, operations: u64, state_bytes: u64, activation_bytes: u64) -> Block {
        Block {
            name: name.into(),
            forward_operations: operations,
            state_bytes,
            activation_bytes,
            ..Block::default()
        }
    }

    fn blocks_of(stages: &[StageBlocks]) -> Vec<Range<usize>> {
        stages.iter().map(|stage| stage.blocks.clone()).collect()
    }

    /// GPT-2 small: the head has 31 % of the operations, and the embedding none.
    fn gpt2() -> Vec<Block> {
        let mut blocks = vec![Block { parameters: 39_383_808, ..block("wte", 0, 0, 0) }];
        for layer in 0..12 {
            let name = format!("h.{layer}");
            blocks.push(Block { parameters: 7_087_872, ..block(&name, 575, 0, 0) });
        }
        blocks.push(Block { parameters: 38_598_912, ..block("head", 3100, 0, 0) });
        blocks
    }

    //= deepspeed 0.19.8 runtime/pipe/module.py _partition_layers
    #[test]
    fn each_method_cuts_by_its_weights() {
        let step = step(PassSchedule::OneForwardOneBackward, 4, None);
        for (method, stages, expected) in [
            (CutMethod::Cost, 2, vec![0..10, 10..14]),
            (CutMethod::Parameters, 2, vec![0..7, 7..14]),
            (CutMethod::Uniform, 4, vec![0..4, 4..8, 8..11, 11..14]),
            (CutMethod::Type(Regex::new(r"^h\.").unwrap()), 3, vec![0..5, 5..9, 9..14]),
        ] {
            let stages = cut(&gpt2(), stages, &method, step).unwrap();
            assert_eq!(blocks_of(&stages), expected, "{method:?}");
        }
    }

    #[test]
    fn what_cannot_be_cut_is_an_error_with_the_numbers() {
        let step_of = |limit| step(PassSchedule::OneForwardOneBackward, 4, limit);
        let blocks = ["a", "b", "c"].map(|name| block(name, 10, 100, 10));
        let error = |stages, method: CutMethod, limit| {
            cut(&blocks, stages, &method, step_of(limit)).unwrap_err().to_string()
        };
        let none = cut(&[], 0, &CutMethod::Cost, step_of(Some(1))).unwrap_err().to_string();
        assert!(none.contains("1 pipeline stages for a model of 0 blocks"), "{none}");
        let letters = CutMethod::Type(Regex::new("[x-z]").unwrap());
        for (message, parts) in [
            (
                error(4, CutMethod::Uniform, None),
                vec!["4 pipeline stages", "3 blocks", "at most 3 stages"],
            ),
            (error(2, letters, None), vec!["type:[x-z] matches 0 of 3 blocks", "2 pipeline"]),
            // The first of two stages holds two sets of activations.
            (
                error(2, CutMethod::Cost, Some(200)),
                vec!["200 bytes", "(a | b to c)", "stage 1 needs 220 bytes, 20 too many"],
            ),
        ] {
            for part in parts {
                assert!(message.contains(part), "{message}: {part}");
            }
        }
    }

    #[test]
    fn a_schedule_with_more_activations_moves_the_cut() {
        let blocks: Vec<_> = (0..4).map(|at| block(&at.to_string(), 10, 0, 10)).collect();
        let of = |schedule, limit| {
            let cut = cut(&blocks, 2, &CutMethod::Cost, step(schedule, 4, Some(limit)));
            cut.map(|stages| blocks_of(&stages)).map_err(|error| error.to_string())
        };
        assert_eq!(of(PassSchedule::OneForwardOneBackward, 40), Ok(vec![0..2, 2..4]));
        assert_eq!(of(PassSchedule::OneForwardOneBackward, 39), Ok(vec![0..1, 1..4]));
        // The last stage holds the operands of one micro-batch.
        assert_eq!(of(PassSchedule::ZeroBubbleH1, 40), Ok(vec![0..2, 2..4]));
        assert!(of(PassSchedule::ZeroBubbleH1, 39).unwrap_err().contains("1 too many"));
        assert!(of(PassSchedule::FillDrain, 79).unwrap_err().contains("1 too many"));
    }

    /// Returns every cut of `blocks` into `stages`, each of at least one block.
    fn all_cuts(blocks: Range<usize>, stages: usize) -> Vec<Vec<Range<usize>>> {
        if stages == 1 {
            return vec![vec![blocks]];
        }
        let mut cuts = Vec::new();
        for first in blocks.start + 1..=blocks.end + 1 - stages {
            for rest in all_cuts(first..blocks.end, stages - 1) {
                cuts.push(std::iter::once(blocks.start..first).chain(rest).collect());
            }
        }
        cuts
    }

    proptest! {
        #[test]
        fn the_cut_is_the_best_of_all(
            costs in proptest::collection::vec((0u64..20, 0u64..9, 0u64..9), 1..9),
            stages in 1usize..5,
            micro_batches in 1usize..6,
            limit in proptest::option::of(0u64..60),
            schedule in prop::sample::select(vec![
                PassSchedule::FillDrain,
                PassSchedule::OneForwardOneBackward,
                PassSchedule::ZeroBubbleH1,
            ]),
        ) {
            prop_assume!(stages <= costs.len());
            let step = step(schedule, micro_batches, limit);
            let blocks: Vec<_> = costs.iter().map(|&(o, s, a)| block("x", o, s, a)).collect();
            let candidates = StageCosts::new(&blocks, stages, step);
            let every = all_cuts(0..blocks.len(), stages).into_iter().map(|cut| {
                let stages = cut.into_iter().enumerate();
                let stages: Vec<_> = stages.map(|(at, range)| candidates.stage(at, range)).collect();
                let most = |value: fn(&StageBlocks) -> u128| stages.iter().map(value).max().unwrap();
                let excess = stages.iter().map(|stage| candidates.excess(stage)).max().unwrap();
                (excess, most(|stage| stage.operations), most(|stage| stage.bytes))
            });
            let best = every.min_by_key(|&(excess, operations, bytes)| match excess {
                0 => (0, operations, bytes),
                _ => (excess, 0, 0),
            });
            let (excess, operations, bytes) = best.unwrap();
            match cut(&blocks, stages, &CutMethod::Cost, step) {
                Ok(found) => {
                    prop_assert_eq!(excess, 0);
                    prop_assert_eq!(found.iter().map(|it| it.operations).max(), Some(operations));
                    prop_assert_eq!(found.iter().map(|it| it.bytes).max(), Some(bytes));
                    let covered: Vec<_> = found.iter().flat_map(|it| it.blocks.clone()).collect();
                    prop_assert_eq!(covered, (0..blocks.len()).collect::<Vec<_>>());
                }
                Err(CutError::OutOfMemory { needed, limit, .. }) => {
                    prop_assert_eq!(needed - u128::from(limit), excess);
                }
                Err(error) => prop_assert!(false, "{}", error),
            }
        }
    }
}
