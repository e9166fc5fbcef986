//! From what was written to what it means: the resolved [`Plan`].
//!
//! [`resolve`] looks at everything before it refuses anything. It needs a [`RunContext`], which no
//! configuration holds: how many ranks there are, where tensors live, and what the job knows about
//! `"auto"`. What each `"auto"` became is part of the answer.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::check::check;
use crate::context::{AutoAnswer, Context, RunContext};
use crate::diagnosis::{Diagnosis, Findings, Report, refuse};
use crate::key::Key;
use crate::key_path::join;
use crate::keys::DeepSpeed;
use crate::node::Node;
use crate::plan::{
    OptimizerOffload, OptimizerPlan, ParamGroupError, Plan, ReportPlan, SchedulePlan,
};
use crate::raw_config::RawConfig;
use crate::rules::{
    activations, batch, curriculum, data_efficiency, monitor, offload, one_bit, optimizer,
    precision, reduction, scheduler, zero,
};
use crate::section::{Entry, Read, Section, filled};

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
    let mut findings = Findings::default();
    check(DeepSpeed::KEYS, config.node(), &mut findings);
    if run.world_size == 0 {
        refuse!(findings, "" => "0 ranks cannot train: the world size must be 1 or more"; "use 1 rank or more");
    }
    let top = DeepSpeed::read(&Entry::document(config.node()));
    let mut context = Context { top: &top, run, findings, autos: BTreeMap::new() };
    let plan = plan(&mut context);
    let Context { findings, mut autos, .. } = context;
    default_autos(DeepSpeed::KEYS, config.node(), "", &mut autos);
    Ok(Resolved { plan, notes: config.verdict(findings)?, autos })
}

/// Applies the rule of each section.
fn plan(context: &mut Context<'_>) -> Plan {
    let top = context.top;
    let batch = batch::resolve(context);
    let precision = precision::resolve(context);
    let optimizer = optimizer::resolve(context);
    let schedule = scheduler::resolve(&optimizer, context);
    one_bit::check_warmup(&optimizer, schedule.warmup_steps(), context);
    let zero = zero::resolve(&optimizer, context);
    let activations = activations::resolve(context);
    let uses_nvme = matches!(zero.optimizer_states, OptimizerOffload::Nvme(_))
        || activations.offload.swap_file().is_some();
    offload::check_aio(uses_nvme, context);
    let dynamic_batching = data_efficiency::resolve(context);
    let curriculum = curriculum::resolve(context);
    check_optimizer(&optimizer, &schedule, context);
    Plan {
        param_groups: context.run.param_groups.clone(),
        batch,
        dynamic_batching,
        curriculum,
        schedule,
        precision,
        gradient_clipping: Some(top.gradient_clipping.value).filter(|clip| *clip > 0.0),
        reduction: reduction::resolve(&optimizer, zero.stage, context),
        optimizer,
        activations,
        report: filled!(ReportPlan, top { steps_per_print, wall_clock_breakdown }),
        monitor: monitor::resolve(context),
        zero,
    }
}

/// Reports a learning rate beyond f32, in which parameters would become infinite, settings of groups that the optimizer
/// lacks, and learning rates without a proportion.
fn check_optimizer(optimizer: &OptimizerPlan, schedule: &SchedulePlan, context: &mut Context<'_>) {
    let lr = optimizer.lr();
    if lr > f64::from(f32::MAX) {
        refuse!(context, "optimizer.params.lr" => "{lr:e} is larger than an f32 can hold ({:e})", f32::MAX;
            "give a learning rate, 1e-4 for example");
    }
    match context.run.param_groups.check(optimizer, schedule.cycles_momentum()) {
        Err(ParamGroupError::Unfit { group, reason }) => {
            refuse!(context, format!("training.param_groups[{group}]") => "{reason}"; "");
        }
        Err(ParamGroupError::MuonRate { adam_lr }) => {
            refuse!(context, "optimizer.params.muon_lr" => "is 0 and Adam's {adam_lr:?}, in proportion to it";
                "give a muon_lr above 0, or freeze the matrices by training.param_groups");
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

/// Every `"auto"` that no rule answered has become the table's default.
fn default_autos(
    keys: &'static [Key],
    section: &Node,
    path: &str,
    autos: &mut BTreeMap<String, AutoAnswer>,
) {
    for (name, value) in section.entries() {
        let Some(key) = Key::find(keys, name) else { continue };
        let path = join(path, key.name);
        if value.is_auto() && key.auto && !autos.contains_key(&path) {
            let value = key.default.node().to_json();
            autos.insert(path.clone(), AutoAnswer { value, from: "the default".to_owned() });
        }
        default_autos(key.keys_in(section).unwrap_or_default(), value, &path, autos);
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
