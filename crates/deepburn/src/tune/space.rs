//! The search space of a configuration, and what its section `autotuning` leaves of it.

use deepburn_config::{
    AutotuningPlan, Plan, RawConfig, RecomputePolicy, RunContext, SizeLimits, Stage, autotuning,
};
use deepburn_tune::{Buffers, SearchSpace, StatePlacement};

use super::TuneError;

/// Returns the search space of a configuration whose plan is `plan`: all ZeRO stages and policies,
/// offload to host memory if the device is not the host, and offload to NVMe if there is a folder.
/// The number of pipeline stages is the plan's.
///
/// An optimizer that exchanges its momentum needs all states on every rank, so it has neither other
/// stages nor offload.
pub fn search_space(
    plan: &Plan,
    context: &RunContext,
    ranks: Vec<usize>,
    has_nvme: bool,
) -> SearchSpace {
    let batch_sizes = vec![plan.batch.train_batch_size];
    if plan.optimizer.exchanges_momentum() {
        let stages = vec![Stage::Disabled];
        return SearchSpace { ranks, batch_sizes, stages, ..SearchSpace::default() };
    }
    let states = StatePlacement::ALL.into_iter().filter(|states| match states {
        StatePlacement::Device => true,
        StatePlacement::OptimizerOnHost | StatePlacement::AllOnHost => !context.host_device,
        StatePlacement::OptimizerOnNvme | StatePlacement::AllOnNvme => has_nvme,
    });
    let mut recompute = SearchSpace::default().recompute;
    if let policy @ RecomputePolicy::EveryNth(_) = plan.backward.activations.recompute
        && !recompute.contains(&policy)
    {
        recompute.push(policy);
    }
    SearchSpace {
        ranks,
        batch_sizes,
        pipeline_stages: vec![plan.mesh.pipeline_stages],
        states: states.collect(),
        recompute,
        buffers: vec![Buffers::AsConfigured, Buffers::Small],
        ..SearchSpace::default()
    }
}

/// Separates the section `autotuning` from a configuration: returns the configuration of a training
/// run, and what the section asks for. Notes about the section are logged.
///
/// # Errors
/// Returns the errors of the section.
pub fn split(config: &RawConfig) -> Result<(RawConfig, AutotuningPlan), TuneError> {
    let (plan, notes) = autotuning(config)?;
    for note in notes {
        tracing::info!("{}", note.finding());
    }
    let mut rest = config.to_json();
    if let Some(keys) = rest.as_object_mut() {
        keys.remove("autotuning");
    }
    Ok((RawConfig::from_value(&rest)?, plan))
}

/// Restricts a search space to what the section `autotuning` asks for. `batch_size` is the one of
/// the configuration, of which others are multiples and halves.
///
/// # Errors
/// Returns an error if no candidate is left.
pub fn narrow(
    space: &mut SearchSpace,
    autotuning: &AutotuningPlan,
    batch_size: usize,
) -> Result<(), TuneError> {
    if autotuning.fast {
        space.states.retain(|states| *states == StatePlacement::Device);
        space.recompute.retain(|policy| *policy == RecomputePolicy::Off);
        space.buffers.retain(|buffers| *buffers == Buffers::AsConfigured);
    }
    if let Some(limits) = autotuning.batch_sizes {
        space.batch_sizes = batch_sizes(batch_size, limits);
    }
    space.micro_batch_sizes = autotuning.micro_batch_sizes;
    if let Some(most) = autotuning.num_micro_batch_sizes {
        let mut sizes: Vec<_> = space.candidates().iter().map(|it| it.micro_batch).collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        sizes.dedup();
        space.micro_batch_sizes.min = sizes.get(most - 1).copied().or(space.micro_batch_sizes.min);
    }
    match space.candidates().is_empty() {
        true => Err(TuneError::Empty { reason: nothing_left(space, autotuning, batch_size) }),
        false => Ok(()),
    }
}

/// Returns the batch sizes within `limits`: halves and doubles of `batch_size`. Without an upper
/// limit there are no larger ones.
fn batch_sizes(batch_size: usize, limits: SizeLimits) -> Vec<usize> {
    let most = limits.max.unwrap_or(batch_size);
    let half = |size: &usize| size.is_multiple_of(2).then_some(size / 2);
    let smaller = std::iter::successors(Some(batch_size), half);
    let larger = std::iter::successors(batch_size.checked_mul(2), |size| size.checked_mul(2));
    let larger = larger.take_while(|size| *size <= most);
    smaller.chain(larger).filter(|size| limits.contains(*size)).collect()
}

/// Returns why a search space has no candidates.
fn nothing_left(space: &SearchSpace, autotuning: &AutotuningPlan, batch_size: usize) -> String {
    let limits = |limits: SizeLimits| {
        let side = |value: Option<usize>| value.map_or("no limit".to_owned(), |it| it.to_string());
        format!("{} to {}", side(limits.min), side(limits.max))
    };
    if space.batch_sizes.is_empty() {
        let given = autotuning.batch_sizes.map(limits).unwrap_or_default();
        return format!(
            "autotuning: no half or double of train_batch_size, {batch_size}, is within min_train_batch_size and \
             max_train_batch_size, {given}; widen them"
        );
    }
    let list = |numbers: &[usize]| -> String {
        numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
    };
    // The ranks that share the samples of a step, for each number of pipeline stages.
    let pairs = space
        .ranks
        .iter()
        .flat_map(|ranks| space.pipeline_stages.iter().map(move |it| (*ranks, *it)));
    let sharing: Vec<_> = pairs
        .filter(|(ranks, stages)| *stages > 0 && ranks.is_multiple_of(*stages))
        .map(|(ranks, stages)| ranks / stages)
        .collect();
    if sharing.is_empty() {
        return format!(
            "pipeline stages: {} do not divide {} ranks; give another number",
            list(&space.pipeline_stages),
            list(&space.ranks)
        );
    }
    let divides = |ranks: &usize| space.batch_sizes.iter().any(|size| size.is_multiple_of(*ranks));
    if !sharing.iter().any(divides) {
        return format!(
            "train_batch_size: {} is not a multiple of {} data-parallel ranks; give another number",
            list(&space.batch_sizes),
            list(&sharing)
        );
    }
    format!(
        "autotuning: no micro-batch that divides the batch is within min_train_micro_batch_size_per_gpu and \
         max_train_micro_batch_size_per_gpu, {}; widen them",
        limits(space.micro_batch_sizes)
    )
}
