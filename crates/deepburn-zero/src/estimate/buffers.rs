//! The temporary buffers that ZeRO needs in addition to the model states.
//!
//! Main type: [`Gathering`], the complete parameters that stage 3 keeps or
//! gathers in addition to the shards.
//!
//! Every function returns a number of elements on one rank, and the caller
//! multiplies it by the size of an element. The numbers are upper limits, not
//! averages: buckets are counted as full, and directions are counted for the
//! largest round.

use deepburn_comm::Partition;
use deepburn_config::{OptimizerOffload, ZeroPlan};

use super::{DirectionMemory, ParameterSize, sum};
use crate::ledger::Tier;
use crate::optimizer::{ROUNDS_PER_MODEL, WORKSPACE};
use crate::persistence::persistent_parameters;
use crate::reduce::BUCKETS_PER_MODEL;

/// Returns the number of elements in gradient buckets: the bucket that is being
/// filled and, with `overlap_comm`, the bucket that is being reduced.
///
/// The capacity of a bucket is `reduce_bucket_size`, but at most 1/16 of the
/// trainable elements, as in `reduce.rs`. A gradient that exceeds the capacity
/// is reduced in a separate bucket.
pub(super) fn bucket_elements(parameters: &[ParameterSize], zero: &ZeroPlan, ranks: u64) -> u64 {
    // On one rank, the gradient in a bucket and the accumulated gradient share
    // one allocation.
    if ranks == 1 && zero.optimizer_states == OptimizerOffload::Device {
        return 0;
    }
    let trainable = || parameters.iter().filter(|p| p.is_trainable()).map(|p| p.numel);
    let share = sum(trainable()).div_ceil(BUCKETS_PER_MODEL as u64);
    let capacity = share.min(zero.gradients.reduce_bucket_size as u64);
    // The largest gradient may exceed the capacity.
    let bucket = capacity.max(trainable().max().unwrap_or(0));
    bucket.saturating_mul(if zero.gradients.overlap_comm { 2 } else { 1 })
}

/// Returns the peak number of direction elements on a rank during the optimizer
/// step.
///
/// The three kinds of rounds run one after the other and are never in memory at
/// the same time, so the result is their maximum:
///
/// - Norms and momenta: the owned elements of one round (1/16 of the model or
///   one parameter), plus the sent and received messages of one bit per
///   element.
/// - Fused momenta (1-bit LAMB): the momenta of all parameters, one additional
///   direction, and the messages.
/// - Matrices (Muon): the shard and the complete matrix for each matrix of the
///   largest round, plus the workspace of the Newton-Schulz iteration on the
///   largest matrix.
pub(super) fn direction_elements(parameters: &[ParameterSize], zero: &ZeroPlan, ranks: u64) -> u64 {
    let shards = if zero.stage.shards_optimizer() { ranks } else { 1 };
    let owned = |numel: u64| Partition::new(numel as usize, shards as usize).shard_len() as u64;
    let with = |memory| parameters.iter().filter(move |p| p.direction == memory).map(|p| p.numel);
    // A round contains up to 1/16 of the model, or one larger parameter.
    let total = sum(parameters.iter().filter(|p| p.is_trainable()).map(|p| p.numel));
    let share = total.div_ceil(ROUNDS_PER_MODEL as u64);
    let largest = with(DirectionMemory::Owned).max().unwrap_or(0);
    let padding = with(DirectionMemory::Owned).count() as u64;
    let of_norms = match largest {
        0 => 0,
        largest => owned(share.max(largest)).saturating_add(padding),
    };
    // A message has one bit per element and one scale per rank. It is sent and
    // received.
    let errors = parameters.iter().filter(|p| p.keeps_errors).count() as u64;
    let of_messages = match errors {
        0 => 0,
        tensors => share.max(largest).div_ceil(16).saturating_add(tensors * ranks * 3),
    };
    // A round has one matrix per rank. A rank first holds its shards of all
    // directions and one complete direction. After the computation it holds the
    // results of all owners.
    let mut matrices: Vec<u64> = with(DirectionMemory::Whole).collect();
    matrices.sort_unstable_by(|left, right| right.cmp(left));
    matrices.truncate(ranks as usize);
    let of_matrices = sum(matrices.iter().map(|numel| owned(*numel).saturating_add(*numel)));
    let workspace = matrices.first().map_or(0, |numel| numel.saturating_mul(WORKSPACE));
    // 1-bit LAMB exchanges all momenta in one round, and holds one direction in
    // addition to the momenta.
    let fused = with(DirectionMemory::AllOwned);
    let of_fused = match fused.clone().max() {
        None => 0,
        Some(largest) => {
            let all = sum(fused);
            let messages = all.div_ceil(16).saturating_add(errors * ranks * 3);
            all.saturating_add(largest).saturating_add(messages)
        }
    };
    let of_rounds = of_norms.saturating_add(of_messages).max(of_fused);
    of_rounds.max(of_matrices.saturating_add(workspace))
}

/// The number of elements of complete parameters that stage 3 keeps or gathers
/// in addition to the shards.
///
/// All are 0 below stage 3.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Gathering {
    /// Elements of persistent copies, which are kept between steps.
    pub(super) persistent: u64,
    /// Elements of the largest parameter that is gathered for an op.
    pub(super) largest: u64,
    /// The limit for the elements of all parameters that are gathered at the
    /// same time.
    pub(super) limit: u64,
}

impl Gathering {
    /// Creates the counts. On one rank, only parameters whose shards are not on
    /// the device are gathered.
    pub(super) fn new(
        parameters: &[ParameterSize],
        homes: &[Tier],
        ranks: u64,
        zero: &ZeroPlan,
    ) -> Self {
        if !zero.stage.shards_parameters() {
            return Self::default();
        }
        let plan = &zero.parameters;
        let numels = || parameters.iter().map(|p| p.numel);
        let persistent = persistent_parameters(numels(), plan);
        let mut gathering = Self::default();
        let mut gathered_sum = 0_u64;
        for (index, (numel, home)) in numels().zip(homes).enumerate() {
            if ranks == 1 && *home == Tier::Device {
                continue;
            }
            if persistent.binary_search(&index).is_ok() {
                gathering.persistent = gathering.persistent.saturating_add(numel);
            } else {
                // `max_live_parameters` is only a limit if these parameters
                // have more elements.
                gathered_sum = gathered_sum.saturating_add(numel);
                gathering.largest = gathering.largest.max(numel);
            }
        }
        // A single parameter may exceed the limit, because an op needs the
        // complete parameter.
        gathering.limit = gathered_sum.min(plan.max_live_parameters as u64).max(gathering.largest);
        gathering
    }
}
