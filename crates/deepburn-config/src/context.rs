//! What a configuration is resolved for, and what the rules of its sections share.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value as Json;

use crate::diagnosis::{Findings, Severity, Site};
use crate::keys::DeepSpeed;
use crate::plan::ParamGroups;
use crate::section::Entry;

/// What a configuration is resolved for.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunContext {
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
    /// Parameters with settings of their own, which a DeepSpeed configuration cannot name.
    pub param_groups: ParamGroups,
}

impl RunContext {
    /// A run on the host about which nothing else is known.
    ///
    /// What is known later is filled in beside it. Here the width of the model decides what `"auto"`
    /// means for a bucket:
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

/// What an `"auto"` became, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AutoAnswer {
    /// The value.
    pub value: Json,
    /// Where it comes from.
    pub from: String,
}

/// What the rules of all sections share.
pub(crate) struct Context<'a> {
    /// The sections.
    pub(crate) top: &'a DeepSpeed<'a>,
    /// What the configuration is resolved for.
    pub(crate) run: &'a RunContext,
    /// What was found so far.
    pub(crate) findings: Findings,
    /// Answers to `"auto"`, by the full path of the key.
    pub(crate) autos: BTreeMap<String, AutoAnswer>,
}

impl Context<'_> {
    /// Records what the `"auto"` of a key became, where the key says so.
    pub(crate) fn answer(&mut self, key: &Entry<'_>, value: impl Into<Json>, from: &str) {
        if key.is_auto() {
            let answer = AutoAnswer { value: value.into(), from: from.to_owned() };
            self.autos.insert(key.path.clone(), answer);
        }
    }

    /// Adds a finding.
    pub(crate) fn add(&mut self, severity: Severity, site: Site, message: String, remedy: String) {
        self.findings.add(severity, site, message, remedy);
    }
}
