//! The run for which a configuration is resolved, and the shared state of the section rules.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value as Json;

use crate::diagnosis::{Diagnosis, Findings};
use crate::job_plan::PipelineRequest;
use crate::keys::DeepSpeed;
use crate::plan::{LrScheduler, ParamGroups, QuantizationPlan};
use crate::section::ConfigEntry;
use crate::step_count::StepCount;

/// The properties of the run for which a configuration is resolved.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunContext {
    /// Number of ranks, at least 1.
    pub world_size: usize,
    /// The pipeline that the job file asks for.
    pub pipeline: PipelineRequest,
    /// Whether tensors are in host memory anyway, so that an offload to host memory changes
    /// nothing.
    pub host_device: bool,
    /// Hidden size of the model, which determines `"auto"` bucket sizes.
    pub hidden_size: Option<usize>,
    /// Number of optimizer steps of the run, for schedules that depend on it.
    pub total_steps: Option<usize>,
    /// Length of the warm-up if the file has `"auto"`, and of a schedule of transformers.
    pub warmup_steps: Option<StepCount>,
    /// The schedule of transformers that the job asks for, instead of one in the file.
    pub lr_scheduler: Option<LrScheduler>,
    /// Learning rate if the file has none or `"auto"`.
    pub learning_rate: Option<f64>,
    /// Samples per micro-batch if the file has none or `"auto"`.
    pub micro_batch_size: Option<usize>,
    /// Whether activations are recomputed; `None` if the job file does not set it.
    pub gradient_checkpointing: Option<bool>,
    /// Parameter groups, which a DeepSpeed configuration cannot define.
    pub param_groups: ParamGroups,
    /// Frozen matrices in 8 or 4 bits, which a DeepSpeed configuration cannot define.
    pub quantization: Option<QuantizationPlan>,
}

impl RunContext {
    /// Returns the length of the warm-up; `None` if the job does not set it, or if it is a ratio of
    /// an unknown number of steps.
    pub(crate) fn warmup(&self) -> Option<usize> {
        match self.warmup_steps? {
            StepCount::Steps(steps) => Some(steps),
            ratio => self.total_steps.map(|total| ratio.of(total)),
        }
    }

    /// Creates the context of a run in host memory, without further settings.
    ///
    /// Other fields can be set as needed. In this example, the hidden size of the model determines
    /// the `"auto"` size of a bucket:
    ///
    /// ```
    /// use deepburn_config::{RawConfig, RunContext, resolve};
    ///
    /// let config = RawConfig::from_json(
    ///     r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}"#,
    /// )?;
    /// let run = RunContext { hidden_size: Some(768), ..RunContext::on_host(2) };
    /// let resolved = resolve(&config, &run)?;
    /// assert_eq!(resolved.plan.zero.gradients.reduce_bucket_size, 768 * 768);
    /// let answer = &resolved.autos["zero_optimization.reduce_bucket_size"];
    /// assert_eq!(answer.from, "hidden size squared");
    /// # Ok::<(), deepburn_config::ConfigError>(())
    /// ```
    pub fn on_host(world_size: usize) -> Self {
        Self { world_size, host_device: true, ..Self::default() }
    }
}

/// The value of a key that was `"auto"`, and its source.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AutoAnswer {
    /// The value.
    pub value: Json,
    /// The source of the value.
    pub from: String,
}

/// The shared state of the rules of all sections.
pub(crate) struct Context<'a> {
    /// The sections.
    pub(crate) top: &'a DeepSpeed<'a>,
    /// The run for which the configuration is resolved.
    pub(crate) run: &'a RunContext,
    /// The findings so far.
    pub(crate) findings: Findings,
    /// Resolved `"auto"` values, by the full path of the key.
    pub(crate) autos: BTreeMap<String, AutoAnswer>,
}

impl Context<'_> {
    /// Records the resolved value of a key, if the key is `"auto"`.
    pub(crate) fn answer(&mut self, key: &ConfigEntry<'_>, value: impl Into<Json>, from: &str) {
        if key.is_auto() {
            let answer = AutoAnswer { value: value.into(), from: from.to_owned() };
            self.autos.insert(key.path.clone(), answer);
        }
    }

    /// Adds a finding.
    pub(crate) fn add(&mut self, finding: Diagnosis) {
        self.findings.add(finding);
    }
}
