//! The rules of DeepSpeed's sections: each turns a section into its part of the plan.
//!
//! A rule that reports an error still returns a value, which is discarded with the rest of the
//! plan. Disabled sections are checked completely too.
//!
//! Names that most rules use are imported here, so that a rule only imports this module.

mod activations;
mod autocast;
mod autotuning;
mod batch;
mod curriculum;
mod data_efficiency;
mod hyperparameters;
mod mesh;
mod monitor;
mod muon;
mod offload;
mod one_bit;
mod optimizer;
mod precision;
mod reduction;
mod scheduler;
mod trainer_schedule;
mod zero;

pub use autotuning::autotuning;
use hyperparameters::{bounds, learning_rate, moments, warn_of_zero_eps};

use crate::context::Context;
use crate::counted::counted;
use crate::diagnosis::{KeyLocation, Severity, note, refuse, report, warning};
use crate::key::{SectionVariant, Status, Trigger};
use crate::keys::*;
use crate::node::Node;
use crate::plan::*;
use crate::request::unused;
use crate::section::{ConfigEntry, FromEntry, Section, Setting, filled};
use crate::suggestion::nearest;

/// Applies the rule of each section.
pub(crate) fn plan(context: &mut Context<'_>) -> Plan {
    let top = context.top;
    // The stages come first: they divide the ranks, and only the ranks of a stage share a batch.
    let pipeline_stages = mesh::pipeline_stages(context);
    let batch = batch::resolve(pipeline_stages, context);
    let precision = precision::resolve(context);
    let optimizer = optimizer::resolve(context);
    // A schedule starts at the optimizer's learning rate, and a freeze must come after its warm-up.
    let schedule = scheduler::resolve(&optimizer, context);
    one_bit::check_warmup(&optimizer, schedule.warmup_steps(), context);
    let zero = zero::resolve(&optimizer, batch.data_parallel_size, context);
    let ranks = batch.data_parallel_size;
    let mesh = mesh::resolve(pipeline_stages, ranks, zero.stage, &optimizer, context);
    let pipeline = mesh::pipeline(&mesh, &optimizer, zero.stage, context);
    let activations = activations::resolve(context);
    // `aio` has an effect if anything is on NVMe, so it comes after all that may be.
    let uses_nvme = matches!(zero.optimizer_states, OptimizerOffload::Nvme(_))
        || activations.offload.swap_file().is_some();
    offload::check_aio(uses_nvme, context);
    let data_efficiency = DataEfficiencyPlan {
        dynamic_batching: data_efficiency::resolve(context),
        curriculum: curriculum::resolve(context),
    };
    check_optimizer(&optimizer, &schedule, context);
    autotuning::refuse_run(context);
    Plan {
        mesh,
        pipeline,
        param_groups: context.run.param_groups.clone(),
        quantization: context.run.quantization.clone(),
        batch,
        data_efficiency,
        schedule,
        precision,
        backward: BackwardPlan {
            // 0 disables clipping in DeepSpeed.
            gradient_clipping: Some(top.gradient_clipping.value).filter(|clip| *clip > 0.0),
            reduction: reduction::resolve(&optimizer, zero.stage, context),
            activations,
        },
        optimizer,
        outputs: OutputPlan {
            report: filled!(ReportPlan, top { steps_per_print, wall_clock_breakdown }),
            monitor: monitor::resolve(context),
        },
        zero,
    }
}

/// Reports a learning rate that exceeds f32, because parameters would become infinite, settings of
/// groups that the optimizer does not have, and learning rates whose ratio is not defined.
fn check_optimizer(optimizer: &OptimizerPlan, schedule: &SchedulePlan, context: &mut Context<'_>) {
    let lr = optimizer.lr();
    refuse!(if lr > f64::from(f32::MAX);
        context, "optimizer.params.lr" => "{lr:e} is larger than an f32 can hold ({:e})", f32::MAX;
        "give a learning rate, 1e-4 for example");
    match context.run.param_groups.check(optimizer, schedule.cycles_momentum()) {
        Err(ParamGroupError::Unfit { group, reason }) => {
            refuse!(context, format!("training.param_groups[{group}]") => "{reason}"; "");
        }
        Err(ParamGroupError::MuonRate { adam_lr }) => {
            refuse!(context, "optimizer.params.muon_lr" => "is 0 and Adam's {adam_lr:?}, in proportion to it";
                "give a muon_lr above 0, or freeze the matrices by training.param_groups");
        }
        Ok(()) => {}
    }
}

impl Context<'_> {
    /// Reports `key` if it is given and `is_unused`: a warning, or a note if it has its default, as
    /// in many files. `why` is the reason.
    fn report_unused(&mut self, key: &ConfigEntry<'_>, is_unused: bool, why: &str) {
        let Some(node) = key.given().filter(|_| is_unused) else { return };
        let (severity, remedy) = key.key.unused(node);
        report!(severity, self, key => "{node} has no effect: {why}"; "{remedy}");
    }
}

/// Returns the variant that `name`, the section's `type`, selects. Reports an unknown name with the
/// most similar known name, and a variant that is not supported in this version. A missing `type`
/// has already been reported.
fn choose(
    name: &Setting<'_, Option<&str>>,
    variants: &'static [SectionVariant],
    noun: &str,
    context: &mut Context<'_>,
) -> Option<&'static SectionVariant> {
    let given = name.value?;
    let Some(variant) = SectionVariant::find(variants, given) else {
        let available = variants.iter().filter(|v| matches!(v.status, Status::Honored));
        let available: Vec<_> = available.map(|variant| variant.name).collect();
        let remedy = match nearest(variants.iter().map(|variant| variant.name), given) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => format!("use one of {}", available.join(", ")),
        };
        refuse!(context, name => "unknown {noun} \"{given}\""; "{remedy}");
        return None;
    };
    let Status::Unavailable { feature, remedy, .. } = variant.status else { return Some(variant) };
    refuse!(context, name => "\"{given}\" asks for {feature}, which is not available in this version"; "{remedy}");
    None
}
