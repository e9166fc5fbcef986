//! The schedule of a job: `warmup_steps`, `warmup_ratio`, `lr_scheduler_type` and its parameters.
//! Rules that depend on the optimizer or on the number of steps are checked later.

use super::*;
use crate::job_plan::DeepSpeedDefaults;
use crate::keys::job::SchedulerKwargs;
use crate::plan::{LrSchedulerParameters, LrSchedulerType};
use crate::step_count::StepCount;

impl JobReader<'_> {
    /// Reads the settings that take effect where the DeepSpeed configuration does not set them.
    pub(super) fn deepspeed_defaults(&mut self, training: &Training<'_>) -> DeepSpeedDefaults {
        filled!(DeepSpeedDefaults, training {
            learning_rate, micro_batch_size, gradient_checkpointing, lr_scheduler_type,
        }
            warmup_steps: self.warmup_steps(training),
            lr_scheduler_kwargs: self.lr_scheduler_kwargs(training),
        )
    }

    /// Reads the length of the warm-up. 0 in one of the keys leaves the other one in effect, as in
    /// transformers.
    fn warmup_steps(&mut self, training: &Training<'_>) -> Option<StepCount> {
        let (steps, ratio) = (training.warmup_steps.value, training.warmup_ratio.value);
        let ratio = ratio.map(StepCount::Ratio);
        let both = [steps, ratio].into_iter().flatten().filter(|length| !length.is_zero()).count();
        refuse!(if both == 2; self.findings, &training.warmup_ratio =>
            "is given together with warmup_steps, and only one can set the length of the warm-up"; "remove one of them");
        steps.filter(|steps| !steps.is_zero()).or(ratio).or(steps)
    }

    /// Reads the parameters of `lr_scheduler_type`, and reports those that it does not have.
    fn lr_scheduler_kwargs(&mut self, training: &Training<'_>) -> Option<LrSchedulerParameters> {
        let (kind, kwargs) = (&training.lr_scheduler_type, &training.lr_scheduler_kwargs);
        // An invalid name has already been reported.
        let is_missing = kind.value.is_none() && !kind.is_given();
        refuse!(if is_missing && kwargs.is_given(); self.findings, &**kwargs =>
            "are the parameters of training.lr_scheduler_type, which is not given";
            "add training.lr_scheduler_type, or remove them");
        let kind = kind.value?;
        let known = kind.parameters();
        for (name, value) in kwargs.given().into_iter().flat_map(|node| node.entries()) {
            // Names that no schedule has were reported by the check of the section.
            let is_other = SchedulerKwargs::KEYS.iter().any(|key| key.name == name)
                && !known.contains(&name.as_str());
            let remedy = match known {
                [] => "remove it: it has no parameters".to_owned(),
                known => format!("remove it; \"{}\" has {}", kind.name(), known.join(", ")),
            };
            refuse!(if is_other && !value.is_null(); self.findings, KeyLocation::at(&join(&kwargs.path, name), value) =>
                "is not a parameter of \"{}\"", kind.name(); "{remedy}");
        }
        // A value of another kind has already been reported.
        if kwargs.given().is_none_or(|node| kwargs.key.kind.accepts(node).is_ok()) {
            self.check_parameters(kind, kwargs);
        }
        let section = &kwargs.value;
        Some(filled!(
            LrSchedulerParameters,
            section {
                num_cycles,
                power,
                lr_end,
                timescale,
                min_lr,
                min_lr_rate,
                warmup_lr_rate,
                num_decay_steps,
                num_stable_steps,
                warmup_type,
                decay_type,
                min_lr_ratio,
            }
        ))
    }

    /// Reports required parameters that are missing, and parameters that exclude each other.
    fn check_parameters(
        &mut self,
        kind: LrSchedulerType,
        kwargs: &Setting<'_, SchedulerKwargs<'_>>,
    ) {
        let SchedulerKwargs { min_lr, min_lr_rate, num_decay_steps, .. } = &kwargs.value;
        if matches!(kind, LrSchedulerType::CosineWithMinLr | LrSchedulerType::CosineWarmupWithMinLr)
        {
            let given = usize::from(min_lr.is_given()) + usize::from(min_lr_rate.is_given());
            refuse!(if given == 0; self.findings, &**min_lr =>
                "\"{}\" needs min_lr or min_lr_rate", kind.name();
                "add it: training.lr_scheduler_kwargs.min_lr_rate 0.1 for example");
            refuse!(if given == 2; self.findings, &**min_lr =>
                "is given together with min_lr_rate, and only one can set the lowest learning rate";
                "remove one of them");
        }
        refuse!(if kind == LrSchedulerType::WarmupStableDecay && !num_decay_steps.is_given();
            self.findings, &**num_decay_steps => "is missing, and \"{}\" needs it", kind.name();
            "add it: the number of steps of the decay");
    }
}
