//! `zero_optimization`: sharding, communication and offload of model states.
//!
//! The stage is resolved first, because it determines which other keys have an effect. A key
//! without an effect is a warning if it differs from its default, and a note if it has its default,
//! as in most files.

use super::*;

/// Resolves the section.
pub(crate) fn resolve(
    optimizer: &OptimizerPlan,
    data_parallel_size: usize,
    context: &mut Context<'_>,
) -> ZeroPlan {
    let zero = &context.top.zero_optimization.value;
    let stage = resolve_stage(optimizer, context);
    // With the resolved stage, because keys of the requested one have no effect if it is lowered.
    check_effects(stage.number(), context);
    check_allgather_bucket(zero, stage, context);
    let (optimizer_states, parameter_shards) = offload::resolve(optimizer, stage.number(), context);
    let square = |hidden: usize| hidden.saturating_mul(hidden);
    let bucket = size(&zero.reduce_bucket_size, square, "hidden size squared", context);
    // floor(0.9 h^2), computed in integers.
    let most = |hidden| usize::try_from(square(hidden) as u128 * 9 / 10).unwrap_or(usize::MAX);
    let prefetch = &zero.stage3_prefetch_bucket_size;
    let prefetch = size(prefetch, most, "0.9 times the hidden size squared", context);
    // With this size, biases and norms of a transformer are persistent.
    let several = |hidden: usize| hidden.saturating_mul(10);
    let persistent = &zero.stage3_param_persistence_threshold;
    let persistent = size(persistent, several, "10 times the hidden size", context);
    let of_model = zero.stage3_model_persistence_threshold.value;
    ZeroPlan {
        stage,
        gradients: filled!(GradientPlan, zero {
            contiguous_gradients, reduce_scatter, ignore_unused_parameters,
        }
            // A bucket of one element holds one gradient, as a bucket of size 0 does in DeepSpeed.
            reduce_bucket_size: bucket.max(1),
            //= deepspeed 0.19.8 runtime/zero/config.py overlap_comm_valid
            overlap_comm: zero.overlap_comm.value.unwrap_or(stage == Stage::Parameters),
        ),
        allgather_bucket_size: zero.allgather_bucket_size.value,
        parameters: filled!(GatherPlan, zero {
            max_live_parameters, max_reuse_distance, gather_16bit_weights_on_model_save,
        }
            secondary_partition_size: secondary_partition(zero, stage, data_parallel_size, context),
            prefetch_bucket_size: prefetch,
            persistence_threshold: persistent,
            // Python's `sys.maxsize` means no limit.
            model_persistence_threshold: if of_model < i64::MAX as usize { of_model } else { usize::MAX },
        ),
        optimizer_states,
        parameter_shards,
    }
}

/// Returns the stage of the run.
///
/// An optimizer that exchanges momenta has the full states on every rank. Stage 1 would shard
/// nothing and is resolved to 0, so that all other code, such as memory estimates, uses the actual
/// stage. Stages 2 and 3 are errors, as in DeepSpeed.
fn resolve_stage(optimizer: &OptimizerPlan, context: &mut Context<'_>) -> Stage {
    let top = context.top;
    let setting = &top.zero_optimization.value.stage;
    let stage = Stage::ALL[setting.value];
    if !optimizer.exchanges_momentum() || stage == Stage::Disabled {
        return stage;
    }
    let name = optimizer.name();
    if stage == Stage::OptimizerStates {
        warning!(context, setting =>
            "1 is run as stage 0: {name} needs its whole states on every rank, so nothing is sharded";
            "write 0, or use AdamW to shard optimizer states");
        return Stage::Disabled;
    }
    let steps = match optimizer {
        OptimizerPlan::ZeroOneAdam(_) => "in most steps",
        _ => "after freeze_step",
    };
    refuse!(context, &top.optimizer.value.name =>
        "{name} is not compatible with ZeRO stage {}: {steps} gradients are not reduced, and each rank needs its \
         whole gradient and momentum", stage.number();
        "set zero_optimization.stage to 0 or 1, or use AdamW");
    stage
}

/// Reports keys that have no effect at this stage.
fn check_effects(stage: u8, context: &mut Context<'_>) {
    let section = &context.top.zero_optimization;
    for key in Zero::KEYS {
        let (first, last) = key.stages;
        let entry = section.child(key);
        let Some(node) = entry.given().filter(|_| !(first..=last).contains(&stage)) else {
            continue;
        };
        let range = match first == last {
            true => format!("stage {first}"),
            false => format!("stages {first} to {last}"),
        };
        // Many files contain the default. Only another value deserves a warning.
        let (severity, remedy) = match key.asks(Trigger::Differs, node) {
            false => (Severity::Note, String::new()),
            // The optimizer, not the file, has set the stage.
            true if usize::from(stage) != section.value.stage.value => {
                (Severity::Warning, "remove it".to_owned())
            }
            true => (Severity::Warning, format!("use {range} or remove it")),
        };
        report!(severity, context, &entry =>
            "{node} has no effect at stage {stage}, only at {range}"; "{remedy}");
    }
}

/// Reports an odd size at stages 1 and 2, where DeepSpeed all-gathers in halves and rejects it.
fn check_allgather_bucket(zero: &Zero<'_>, stage: Stage, context: &mut Context<'_>) {
    let size = zero.allgather_bucket_size.value;
    refuse!(if matches!(stage, Stage::OptimizerStates | Stage::Gradients) && size % 2 == 1;
        context, &zero.allgather_bucket_size =>
        "{size} is odd; must be even at stages 1 and 2, as DeepSpeed requires";
        "write {}", size.saturating_add(1));
}

/// Returns the number of ranks of a secondary shard group; `None` without hpZ.
fn secondary_partition(
    zero: &Zero<'_>,
    stage: Stage,
    ranks: usize,
    context: &mut Context<'_>,
) -> Option<usize> {
    let (key, mics) = (&zero.zero_hpz_partition_size, &zero.mics_shard_size);
    let size = key.value;
    if size == 1 || stage != Stage::Parameters {
        return None;
    }
    refuse!(if !ranks.is_multiple_of(size); context, key =>
        "{size} does not divide the {}", counted(ranks, "data-parallel rank");
        "write a divisor, the ranks of one host for example, or 1");
    refuse!(if mics.value > 0; context, key =>
        "is given together with mics_shard_size, which already gathers inside groups"; "remove one of them");
    if size == ranks {
        note!(context, key => "{size} are all data-parallel ranks, so backward gathers over all of them, as with 1");
        return None;
    }
    Some(size)
}

/// Returns a given size. For `"auto"`, returns the size derived from the hidden size, as in the
/// Hugging Face integration, or the default if the hidden size is not known.
fn size(
    setting: &Setting<'_, usize>,
    rule: impl Fn(usize) -> usize,
    from: &str,
    context: &mut Context<'_>,
) -> usize {
    if !setting.is_auto() {
        return setting.value;
    }
    let (size, from) = match context.run.hidden_size {
        Some(hidden) => (rule(hidden), from),
        None => (setting.value, "DeepSpeed's default; the hidden size is not known"),
    };
    context.answer(setting, size, from);
    size
}
