//! From what was written to what it means: the resolved [`Plan`].
//!
//! [`resolve`] looks at everything before it refuses anything. It needs a [`RunContext`], which no
//! configuration holds: how many ranks there are, where tensors live, and what the job knows about
//! `"auto"`. What each `"auto"` became is part of the answer.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::check::check;
use crate::context::{AutoAnswer, Context, RunContext};
use crate::diagnosis::{Diagnosis, Findings, Report};
use crate::key::Key;
use crate::keys::DeepSpeed;
use crate::kind::{Kind, Variant};
use crate::node::Node;
use crate::plan::{OptimizerOffload, ParamGroupError, Plan, ReportPlan};
use crate::raw_config::RawConfig;
use crate::rules::{
    activations, batch, curriculum, data_efficiency, monitor, offload, one_bit, optimizer,
    precision, reduction, scheduler, zero,
};
use crate::section::{Entry, Read, Section};
use crate::source::join;

/// A configuration that was accepted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Resolved {
    /// What it means.
    pub plan: Plan,
    /// Warnings and notes, warnings first.
    pub notes: Vec<Diagnosis>,
    /// What each `"auto"` became, by full key path.
    pub autos: BTreeMap<String, AutoAnswer>,
}

/// Resolves a configuration.
///
/// Each section has a rule. Rules run in the order of their dependencies: the schedule needs the
/// optimizer's learning rate, the ZeRO section the optimizer, and the check of `aio` everything
/// that may use a file. Every rule returns a value even where it reports an error, so that one run
/// finds all that is wrong.
///
/// # Errors
/// A [`Report`] with everything that is wrong, and the warnings and notes too.
pub fn resolve(config: &RawConfig, run: &RunContext) -> Result<Resolved, Report> {
    let (top, mut context) = open(config, run);
    let batch = batch::resolve(&top, &mut context);
    let precision = precision::resolve(&top, &mut context);
    let optimizer = optimizer::resolve(&top, &mut context);
    let schedule = scheduler::resolve(&top, &optimizer, &mut context);
    one_bit::check_warmup(&optimizer, schedule.warmup_steps(), &mut context);
    let zero = zero::resolve(&top, &optimizer, &mut context);
    let activations = activations::resolve(&top, &mut context);
    let uses_nvme = matches!(zero.optimizer_states, OptimizerOffload::Nvme(_))
        || activations.offload.swap_file().is_some();
    offload::check_aio(&top, uses_nvme, &mut context);
    let dynamic_batching = data_efficiency::resolve(&top, &mut context);
    let curriculum = curriculum::resolve(&top, &mut context);
    check_rate(optimizer.lr(), &mut context);
    let param_groups = context.run.param_groups.clone();
    check_groups(param_groups.check(&optimizer, schedule.cycles_momentum()), &mut context);
    let plan = Plan {
        param_groups,
        batch,
        dynamic_batching,
        curriculum,
        schedule,
        precision,
        gradient_clipping: Some(top.gradient_clipping.value).filter(|clip| *clip > 0.0),
        reduction: reduction::resolve(&top, &optimizer, zero.stage, &mut context),
        optimizer,
        activations,
        report: ReportPlan {
            steps_per_print: top.steps_per_print.value,
            wall_clock_breakdown: top.wall_clock_breakdown.value,
        },
        monitor: monitor::resolve(&top, &mut context),
        zero,
    };
    default_autos(DeepSpeed::KEYS, config.node(), "", &mut context.autos);
    let notes = config.verdict(context.findings)?;
    Ok(Resolved { plan, notes, autos: context.autos })
}

/// Parameters are f32; a rate beyond what that holds would make all of them infinite.
fn check_rate(lr: f64, context: &mut Context<'_>) {
    if lr > f64::from(f32::MAX) {
        let message = format!("{lr:e} is larger than an f32 can hold ({:e})", f32::MAX);
        let remedy = "give a learning rate, 1e-4 for example";
        context.error("optimizer.params.lr", message, remedy);
    }
}

/// Reports settings of groups that the optimizer lacks, and learning rates without a proportion.
fn check_groups(checked: Result<(), ParamGroupError>, context: &mut Context<'_>) {
    match checked {
        Err(ParamGroupError::Unfit { group, reason }) => {
            context.error(format!("training.param_groups[{group}]"), reason, "");
        }
        Err(ParamGroupError::MuonRate { adam_lr }) => {
            let message = format!("is 0 and Adam's {adam_lr:?}, in proportion to it");
            let remedy = "give a muon_lr above 0, or freeze the matrices by training.param_groups";
            context.error("optimizer.params.muon_lr", message, remedy);
        }
        // The others are about a model.
        _ => {}
    }
}

/// Resolves a configuration before the number of steps is known, which follows from the data.
///
/// A program needs the batches to open its data, and reports everything that is wrong with the
/// configuration before it reads any. Then it resolves again with [`RunContext::total_steps`]. Until
/// then `"auto"` lengths of schedules are as long as possible, which no rule refuses.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_preliminary(config: &RawConfig, run: &RunContext) -> Result<Plan, Report> {
    let total_steps = run.total_steps.or(Some(usize::MAX));
    Ok(resolve(config, &RunContext { total_steps, ..run.clone() })?.plan)
}

/// Checks every key alone, and reads all sections.
fn open<'a>(config: &'a RawConfig, run: &'a RunContext) -> (DeepSpeed<'a>, Context<'a>) {
    let mut findings = Findings::default();
    check(DeepSpeed::KEYS, config.node(), &mut findings);
    if run.world_size == 0 {
        let message = "0 ranks cannot train: the world size must be 1 or more";
        findings.error("", message, "use 1 rank or more");
    }
    let top = DeepSpeed::read(&Entry::document(config.node()));
    let stage = top.zero_optimization.value.stage.value as u8;
    (top, Context { run, stage, findings, autos: BTreeMap::new() })
}

/// Every `"auto"` that no rule answered has become the table's default.
fn default_autos(
    keys: &'static [Key],
    section: &Node,
    path: &str,
    autos: &mut BTreeMap<String, AutoAnswer>,
) {
    for (name, value) in section.entries() {
        let Some(key) = keys.iter().find(|key| key.is_called(name)) else { continue };
        let path = join(path, key.name);
        if value.is_auto() && key.auto && !autos.contains_key(&path) {
            let value = key.default.node().to_json();
            autos.insert(path.clone(), AutoAnswer { value, from: "the default".to_owned() });
        }
        let inner = match key.kind {
            Kind::Variants(variants) => section
                .get("type")
                .and_then(|node| Variant::find(variants, node.as_text()?))
                .map_or(&[][..], |variant| variant.keys),
            _ => key.keys(),
        };
        default_autos(inner, value, &path, autos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_beyond_f32_is_refused() {
        let text = r#"{"train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e39}}}"#;
        let written = RawConfig::from_json(text).unwrap();
        let error = resolve(&written, &RunContext::on_host(1)).unwrap_err().to_string();
        assert!(error.contains("optimizer.params.lr") && error.contains("1e39"), "{error}");
    }
}
