//! From what was written to what it means: the resolved [`Plan`].
//!
//! [`resolve`] looks at everything before it refuses anything. It needs a few [`Facts`] that no
//! configuration holds: how many ranks there are, where tensors live, and what the job knows about
//! `"auto"`. What each `"auto"` became is part of the answer.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::check::{check, find_variant};
use crate::diagnosis::{Diagnosis, Findings, Report};
use crate::dynamic_batching::DynamicBatchingPlan;
use crate::key::{Asks, Key};

use crate::keys::{
    DEEPSPEED, activation_checkpointing, batch, curriculum, data_efficiency, monitor, offload,
    one_bit, optimizer, precision, report, scheduler, zero,
};
use crate::kind::Kind;
use crate::node::Node;
use crate::plan::{
    BatchPlan, GradientReduction, OptimizerOffload, OptimizerPlan, ParamGroupError, ParamGroups,
    Plan, ReductionPlan, Stage,
};
use crate::section::Section;
use crate::source::join;
use crate::written::Written;

/// What a configuration is resolved for.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Data-parallel ranks, at least 1.
    pub world_size: usize,
    /// Whether tensors live in host memory, so that offload to it already holds.
    pub host_device: bool,
    /// Width of the model, from which `"auto"` bucket sizes follow.
    pub hidden_size: Option<usize>,
    /// Optimizer steps of the run, for schedules that need their length.
    pub total_steps: Option<usize>,
    /// Steps of the warm-up where the file says `"auto"`.
    pub warmup_steps: Option<usize>,
    /// Learning rate where the file gives none or says `"auto"`.
    pub learning_rate: Option<f64>,
    /// Samples of a micro-batch where the file gives none or says `"auto"`.
    pub micro_batch_size: Option<usize>,
    /// Whether activations are recomputed, where the job file says so.
    pub gradient_checkpointing: Option<bool>,
    /// Parameters that are updated in another way; a DeepSpeed configuration cannot name them.
    pub param_groups: ParamGroups,
}

impl Facts {
    /// Facts of a run on the host about which nothing else is known.
    pub fn on_host(world_size: usize) -> Self {
        Self {
            world_size,
            host_device: true,
            hidden_size: None,
            total_steps: None,
            warmup_steps: None,
            learning_rate: None,
            micro_batch_size: None,
            gradient_checkpointing: None,
            param_groups: ParamGroups::default(),
        }
    }
}

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

/// What an `"auto"` became, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AutoAnswer {
    /// The value.
    pub value: serde_json::Value,
    /// Where it comes from.
    pub from: String,
}

/// Answers to `"auto"`, collected while sections are resolved.
#[derive(Debug, Default)]
pub(crate) struct Autos(BTreeMap<String, AutoAnswer>);

impl Autos {
    pub(crate) fn answer(&mut self, path: &str, value: impl Into<serde_json::Value>, from: &str) {
        self.0.insert(path.to_owned(), AutoAnswer { value: value.into(), from: from.to_owned() });
    }
}

/// What the sections' rules share.
pub(crate) struct Context<'a> {
    pub(crate) facts: &'a Facts,
    /// ZeRO stage as written. Stage 1 of the plan is 0 for optimizers that exchange momenta.
    pub(crate) stage: u8,
    pub(crate) findings: Findings,
    pub(crate) autos: Autos,
}

/// Resolves a configuration.
///
/// # Errors
/// A [`Report`] with everything that is wrong, and the warnings and notes too.
pub fn resolve(written: &Written, facts: &Facts) -> Result<Resolved, Report> {
    let (top, mut context) = open(written, facts);
    let batch = batch::resolve(&top, &mut context);
    let precision = precision::resolve(&top, &mut context);
    let optimizer = optimizer::resolve(&top, &mut context);
    let schedule = scheduler::resolve(&top, &optimizer, &mut context);
    one_bit::check_warmup(&optimizer, schedule.warmup_steps(), &mut context);
    let zero = zero::resolve(&top, &optimizer, &mut context);
    let activations = activation_checkpointing::resolve(&top, &mut context);
    let uses_nvme = matches!(zero.optimizer_states, OptimizerOffload::Nvme(_))
        || activations.offload.swap_file().is_some();
    offload::check_aio(&top, uses_nvme, &mut context);
    let dynamic_batching = data_efficiency::resolve(&top, &mut context);
    let curriculum = curriculum::resolve(&top, &mut context);
    check_rate(optimizer.lr(), &mut context);
    let param_groups = context.facts.param_groups.clone();
    check_groups(param_groups.check(&optimizer, schedule.cycles_momentum()), &mut context);
    let plan = Plan {
        param_groups,
        batch,
        dynamic_batching,
        curriculum,
        schedule,
        precision,
        gradient_clipping: Some(top.real("gradient_clipping")).filter(|clip| *clip > 0.0),
        reduction: reduction(&top, &optimizer, zero.stage, &mut context),
        optimizer,
        activations,
        report: report::resolve(&top),
        monitor: monitor::resolve(&top, &mut context),
        zero,
    };
    default_autos(DEEPSPEED, written.node(), "", &mut context.autos);
    context.findings.attribute(written.typed());
    let notes = context.findings.verdict(written.source())?;
    Ok(Resolved { plan, notes, autos: context.autos.0 })
}

/// Parameters are f32; a rate beyond what that holds would make all of them infinite.
fn check_rate(lr: f64, context: &mut Context<'_>) {
    if lr > f64::from(f32::MAX) {
        let message = format!("{lr:e} is larger than an f32 can hold ({:e})", f32::MAX);
        let remedy = "give a learning rate, 1e-4 for example";
        context.findings.error("optimizer.params.lr", message, remedy);
    }
}

/// Reports settings of groups that the optimizer lacks, and learning rates without a proportion.
fn check_groups(checked: Result<(), ParamGroupError>, context: &mut Context<'_>) {
    match checked {
        Err(ParamGroupError::Unfit { group, reason }) => {
            context.findings.error(format!("training.param_groups[{group}]"), reason, "");
        }
        Err(ParamGroupError::MuonRate { adam_lr }) => {
            let message = format!("is 0 and Adam's {adam_lr:?}, in proportion to it");
            let remedy = "give a muon_lr above 0, or freeze the matrices by training.param_groups";
            context.findings.error("optimizer.params.muon_lr", message, remedy);
        }
        // The others are about a model.
        _ => {}
    }
}

/// Resolves the batches alone, from which the length of an epoch follows.
///
/// # Errors
/// A [`Report`] about the batch sizes and about single keys that are wrong.
pub fn resolve_batch(
    written: &Written,
    facts: &Facts,
) -> Result<(BatchPlan, Option<DynamicBatchingPlan>), Report> {
    let (top, mut context) = open(written, facts);
    let batch = batch::resolve(&top, &mut context);
    let dynamic = data_efficiency::resolve(&top, &mut context);
    context.findings.attribute(written.typed());
    context.findings.verdict(written.source())?;
    Ok((batch, dynamic))
}

fn open<'a>(written: &'a Written, facts: &'a Facts) -> (Section<'a>, Context<'a>) {
    let mut findings = Findings::default();
    check(DEEPSPEED, written.node(), &mut findings);
    if facts.world_size == 0 {
        findings.error(
            "",
            "0 ranks cannot train: the world size must be 1 or more",
            "use 1 rank or more",
        );
    }
    let top = Section::new(DEEPSPEED, Some(written.node()), "");
    let stage = top.section("zero_optimization").integer("stage") as u8;
    (top, Context { facts, stage, findings, autos: Autos::default() })
}

fn reduction(
    top: &Section<'_>,
    optimizer: &OptimizerPlan,
    stage: Stage,
    context: &mut Context<'_>,
) -> ReductionPlan {
    const OP: &str = "gradient_allreduce_op";
    let op = match top.choice(OP) {
        "sum" => GradientReduction::Sum,
        _ => GradientReduction::Mean,
    };
    if op == GradientReduction::Sum && stage == Stage::Parameters {
        let message = "\"sum\" is not supported with ZeRO stage 3";
        context.findings.push(top.error(OP, message, "write \"mean\", or use stage 0, 1 or 2"));
    }
    if optimizer.exchanges_momentum() {
        check_exchange(top, optimizer, context);
    }
    ReductionPlan {
        op,
        prescale: top.flag("prescale_gradients"),
        predivide_factor: top.real("gradient_predivide_factor"),
    }
}

/// Notes settings of the gradient reduction with an optimizer that stops reducing gradients.
fn check_exchange(top: &Section<'_>, optimizer: &OptimizerPlan, context: &mut Context<'_>) {
    let name = optimizer.name();
    for key in ["communication_data_type", "prescale_gradients", "gradient_predivide_factor"] {
        let Some(node) = top.given(key) else { continue };
        if top.key(key).asks(Asks::Differs, node) {
            let steps = match optimizer {
                OptimizerPlan::ZeroOneAdam(_) => "that update ZeroOneAdam's second moment: other",
                _ => &format!("before {name}'s freeze_step: later"),
            };
            let message = format!(
                "{node} only affects steps {steps} steps exchange momenta in place of gradients, one bit for each \
                 element"
            );
            context.findings.push(top.note(key, message));
        }
    }
}

/// Every `"auto"` that no rule answered has become the table's default.
fn default_autos(keys: &'static [Key], section: &Node, path: &str, autos: &mut Autos) {
    for (name, value) in section.entries() {
        let Some(key) = keys.iter().find(|key| key.is_called(name)) else { continue };
        let path = join(path, key.name);
        if value.is_auto() && key.auto && !autos.0.contains_key(&path) {
            autos.answer(&path, key.default.node().to_json(), "the default");
        }
        let inner = match key.kind {
            Kind::Variants(variants) => section
                .get("type")
                .and_then(|node| find_variant(variants, node.as_text()?))
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
        let written = Written::from_json(text).unwrap();
        let error = resolve(&written, &Facts::on_host(1)).unwrap_err().to_string();
        assert!(error.contains("optimizer.params.lr") && error.contains("1e39"), "{error}");
    }
}
