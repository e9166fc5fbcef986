//! The settings of an engine that do not change during a run.

use deepburn_config::{OverflowPlan, PipelineSchedule, Plan, RecomputePolicy};
use deepburn_pipeline::PassSchedule;

/// The part of a [`Plan`] that only the engine reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineSettings {
    /// Whether the step is skipped or the run ends if a gradient is not finite.
    pub(crate) overflow: OverflowPlan,
    /// The largest global gradient norm; `None` does not clip.
    pub(crate) clip: Option<f64>,
    /// Whether stage 3 may gather all parameters to save them in 16 bits.
    pub(crate) gathers_for_saving: bool,
    /// The order of the passes of a pipeline stage.
    pub(crate) pass_schedule: PassSchedule,
    /// Whether backward recomputes activations.
    pub(crate) recomputes: bool,
    /// Whether the time of a phase includes the work that it leaves to the device.
    pub(crate) times_phases: bool,
}

impl EngineSettings {
    /// Reads the settings from a plan.
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            overflow: plan.precision.overflow,
            clip: plan.backward.gradient_clipping,
            gathers_for_saving: plan.zero.parameters.gather_16bit_weights_on_model_save,
            pass_schedule: pass_schedule(plan),
            recomputes: plan.backward.activations.recompute != RecomputePolicy::Off,
            times_phases: plan.outputs.report.wall_clock_breakdown,
        }
    }
}

/// Returns the order of the passes of a pipeline stage under `plan`.
pub fn pass_schedule(plan: &Plan) -> PassSchedule {
    // Without a pipeline, the order is never asked for.
    match plan.pipeline.as_ref().map(|it| it.schedule).unwrap_or_default() {
        PipelineSchedule::FillDrain => PassSchedule::FillDrain,
        PipelineSchedule::OneForwardOneBackward => PassSchedule::OneForwardOneBackward,
        PipelineSchedule::ZeroBubbleH1 => PassSchedule::ZeroBubbleH1,
    }
}
