//! `zero_optimization`: what is sharded, and how it travels.
//!
//! The stage comes first: it decides which other keys have an effect. A key that was chosen and has
//! none is a warning; one that stands there with its default, as in most files, is a note.

use super::offload;
use crate::context::Context;
use crate::diagnosis::Severity;
use crate::key::Trigger;
use crate::keys::DeepSpeed;
use crate::keys::zero::Zero;
use crate::plan::{GatherPlan, GradientPlan, OptimizerPlan, Stage, ZeroPlan};
use crate::section::{Section, Setting};

/// The section's part of the plan.
pub(crate) fn resolve(
    top: &DeepSpeed<'_>,
    optimizer: &OptimizerPlan,
    context: &mut Context<'_>,
) -> ZeroPlan {
    let zero = &top.zero_optimization.value;
    let stage = resolve_stage(top, optimizer, context);
    check_effects(top, stage.number(), context);
    check_allgather_bucket(zero, stage, context);
    let (optimizer_states, parameter_shards) =
        offload::resolve(top, optimizer, stage.number(), context);
    ZeroPlan {
        stage,
        gradients: GradientPlan {
            // A bucket of one element holds one gradient, as an empty one does in DeepSpeed.
            reduce_bucket_size: reduce_bucket(zero, context).max(1),
            overlap_comm: zero.overlap_comm.value.unwrap_or(stage == Stage::Parameters),
            contiguous_gradients: zero.contiguous_gradients.value,
            reduce_scatter: zero.reduce_scatter.value,
            ignore_unused_parameters: zero.ignore_unused_parameters.value,
        },
        allgather_bucket_size: zero.allgather_bucket_size.value,
        parameters: GatherPlan {
            prefetch_bucket_size: prefetch_bucket(zero, context),
            persistence_threshold: persistence_threshold(zero, context),
            model_persistence_threshold: unlimited(zero.stage3_model_persistence_threshold.value),
            max_live_parameters: zero.stage3_max_live_parameters.value,
            max_reuse_distance: zero.stage3_max_reuse_distance.value,
            gather_16bit_weights_on_model_save: zero
                .stage3_gather_16bit_weights_on_model_save
                .value,
        },
        optimizer_states,
        parameter_shards,
    }
}

/// Returns the stage of the run.
///
/// An optimizer that exchanges momenta has whole states on every rank. Stage 1 would shard nothing
/// and is resolved to 0, so that everything after this, estimates of memory too, sees what the run
/// really does. Stages 2 and 3 are errors, as in DeepSpeed.
fn resolve_stage(
    top: &DeepSpeed<'_>,
    optimizer: &OptimizerPlan,
    context: &mut Context<'_>,
) -> Stage {
    let setting = &top.zero_optimization.value.stage;
    let stage = match setting.value {
        0 => Stage::Disabled,
        1 => Stage::OptimizerStates,
        2 => Stage::Gradients,
        _ => Stage::Parameters,
    };
    if !optimizer.exchanges_momentum() || stage == Stage::Disabled {
        return stage;
    }
    let name = optimizer.name();
    if stage == Stage::OptimizerStates {
        let message = format!(
            "1 is run as stage 0: {name} needs its whole states on every rank, so nothing is sharded"
        );
        let remedy = "write 0, or use AdamW to shard optimizer states";
        context.warning(setting, message, remedy);
        return Stage::Disabled;
    }
    let steps = match optimizer {
        OptimizerPlan::ZeroOneAdam(_) => "in most steps",
        _ => "after freeze_step",
    };
    let message = format!(
        "{name} is not compatible with ZeRO stage {}: {steps} gradients are not reduced, and each rank needs its whole \
         gradient and momentum",
        stage.number(),
    );
    let remedy = "set zero_optimization.stage to 0 or 1, or use AdamW";
    context.error(&top.optimizer.value.name, message, remedy);
    stage
}

/// Python's largest size means no limit.
fn unlimited(size: usize) -> usize {
    if size >= i64::MAX as usize { usize::MAX } else { size }
}

/// Reports keys that have no effect at this stage.
fn check_effects(top: &DeepSpeed<'_>, stage: u8, context: &mut Context<'_>) {
    for key in Zero::KEYS {
        let (first, last) = key.stages;
        let entry = top.zero_optimization.child(key);
        let Some(node) = entry.given().filter(|_| !(first..=last).contains(&stage)) else {
            continue;
        };
        // The default is in many files; only a value that was chosen deserves a warning.
        let chosen = key.asks(Trigger::Differs, node);
        let severity = if chosen { Severity::Warning } else { Severity::Note };
        let range = match first == last {
            true => format!("stage {first}"),
            false => format!("stages {first} to {last}"),
        };
        let message = format!("{node} has no effect at stage {stage}, only at {range}");
        let remedy = match chosen {
            false => String::new(),
            // The optimizer, not the file, has set the stage.
            true if stage != context.stage => "remove it".to_owned(),
            true => format!("use {range} or remove it"),
        };
        context.add(severity, &entry, message, remedy);
    }
}

/// DeepSpeed refuses an odd size where it all-gathers in halves: stages 1 and 2.
fn check_allgather_bucket(zero: &Zero<'_>, stage: Stage, context: &mut Context<'_>) {
    let size = zero.allgather_bucket_size.value;
    if matches!(stage, Stage::OptimizerStates | Stage::Gradients) && size % 2 == 1 {
        let message =
            format!("{size} is odd; must be even at stages 1 and 2, as DeepSpeed requires");
        let remedy = format!("write {}", size.saturating_add(1));
        context.error(&zero.allgather_bucket_size, message, remedy);
    }
}

/// Gradients of a bucket; with `"auto"` as many as one square layer has.
fn reduce_bucket(zero: &Zero<'_>, context: &mut Context<'_>) -> usize {
    let square = |hidden: usize| hidden.saturating_mul(hidden);
    size(&zero.reduce_bucket_size, square, "hidden size squared", context)
}

/// Parameters that are gathered ahead; with `"auto"` most of one square layer.
fn prefetch_bucket(zero: &Zero<'_>, context: &mut Context<'_>) -> usize {
    // floor(0.9 h^2) without a detour over doubles.
    let rule = |hidden: usize| {
        let square = hidden.saturating_mul(hidden) as u128;
        usize::try_from(square * 9 / 10).unwrap_or(usize::MAX)
    };
    size(&zero.stage3_prefetch_bucket_size, rule, "0.9 times the hidden size squared", context)
}

/// Size up to which parameters stay gathered; with `"auto"` all biases and norms of a transformer
/// do.
fn persistence_threshold(zero: &Zero<'_>, context: &mut Context<'_>) -> usize {
    let rule = |hidden: usize| hidden.saturating_mul(10);
    size(&zero.stage3_param_persistence_threshold, rule, "10 times the hidden size", context)
}

/// A size that is given, derived from the hidden size for `"auto"` as the Hugging Face integration
/// does, or the default.
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
    context.answer(&setting.path, size, from);
    size
}
