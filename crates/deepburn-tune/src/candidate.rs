//! A configuration that may be the fastest one.

use std::path::Path;

use deepburn_config::{RecomputePolicy, Stage};
use serde_json::{Map, Value, json};

/// The settings of a candidate. All other settings are the user's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CandidateConfig {
    /// Number of ranks, of all pipeline stages together.
    pub ranks: usize,
    /// Number of pipeline stages, which divides the ranks; 1 without a pipeline.
    pub pipeline_stages: usize,
    /// ZeRO stage.
    pub stage: Stage,
    /// Where the model states of a rank are.
    pub states: StatePlacement,
    /// Activation checkpointing.
    pub recompute: RecomputePolicy,
    /// Sizes of communication buffers.
    pub buffers: Buffers,
    /// Samples of a rank in one forward and backward pass.
    pub micro_batch: usize,
    /// Forward and backward passes of an optimizer step: the micro-batches of a pipeline.
    pub accumulation: usize,
}

/// Where the model states of a rank are, from the fastest to the slowest place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatePlacement {
    /// All on the device.
    Device,
    /// Optimizer states in host memory.
    OptimizerOnHost,
    /// Optimizer states and parameter shards in host memory. Needs stage 3.
    AllOnHost,
    /// Optimizer states on NVMe.
    OptimizerOnNvme,
    /// Optimizer states and parameter shards on NVMe. Needs stage 3.
    AllOnNvme,
}

/// Sizes of communication buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Buffers {
    /// The sizes in the user's configuration.
    AsConfigured,
    /// Buckets and gathered parameters of at most [`Buffers::SMALL`] elements.
    Small,
}

impl Buffers {
    /// The number of elements of small buffers, 40 MB in f32. It is enough for most models.
    pub const SMALL: u64 = 10_000_000;

    /// The keys of the buffers in `zero_optimization`.
    const KEYS: [&'static str; 4] = [
        "reduce_bucket_size",
        "allgather_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_max_live_parameters",
    ];
}

impl StatePlacement {
    /// Every placement, from the fastest to the slowest.
    pub const ALL: [Self; 5] = [
        Self::Device,
        Self::OptimizerOnHost,
        Self::AllOnHost,
        Self::OptimizerOnNvme,
        Self::AllOnNvme,
    ];

    /// Returns the devices of optimizer states and of parameter shards in a configuration.
    fn devices(self) -> [Option<&'static str>; 2] {
        match self {
            Self::Device => [None, None],
            Self::OptimizerOnHost => [Some("cpu"), None],
            Self::AllOnHost => [Some("cpu"), Some("cpu")],
            Self::OptimizerOnNvme => [Some("nvme"), None],
            Self::AllOnNvme => [Some("nvme"), Some("nvme")],
        }
    }

    /// Returns whether states at `stage` can be placed here.
    pub(crate) fn fits(self, stage: Stage) -> bool {
        // Only states that a stage shards can be offloaded.
        let [optimizer, parameters] = self.devices();
        (optimizer.is_none() || stage.shards_optimizer())
            && (parameters.is_none() || stage.shards_parameters())
    }

    /// Returns the description for a table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Device => "none",
            Self::OptimizerOnHost => "optimizer cpu",
            Self::AllOnHost => "all cpu",
            Self::OptimizerOnNvme => "optimizer nvme",
            Self::AllOnNvme => "all nvme",
        }
    }
}

/// Returns the name of a policy in tables and in names of experiments.
pub fn policy_name(policy: RecomputePolicy) -> String {
    match policy {
        RecomputePolicy::Off => "off".to_owned(),
        RecomputePolicy::Selective => "selective".to_owned(),
        RecomputePolicy::Full => "full".to_owned(),
        RecomputePolicy::EveryNth(n) => format!("every-{n}"),
    }
}

/// Returns the share of the forward pass that a policy repeats, in percent. Selective recomputation
/// repeats element-wise ops and some products.
fn repeated(policy: RecomputePolicy) -> usize {
    match policy {
        RecomputePolicy::Off => 0,
        RecomputePolicy::Selective => 30,
        RecomputePolicy::EveryNth(n) => 100 / n.max(1),
        RecomputePolicy::Full => 100,
    }
}

impl CandidateConfig {
    /// Returns the number of ranks that have samples of their own: the ranks of a pipeline stage.
    pub(crate) fn data_parallel_ranks(&self) -> usize {
        self.ranks / self.pipeline_stages.max(1)
    }

    /// Returns the samples of an optimizer step over all ranks.
    pub fn batch_size(&self) -> usize {
        self.data_parallel_ranks() * self.micro_batch * self.accumulation
    }

    /// Returns the name of the experiment: DeepSpeed's, followed by the settings that DeepSpeed
    /// does not tune.
    pub fn name(&self) -> String {
        let Self { stage, accumulation, micro_batch, .. } = self;
        let mut name = format!("z{}_gas{accumulation}_tmbspg{micro_batch}", stage.number());
        if self.states != StatePlacement::Device {
            name.push_str(&format!("_offload-{}", self.states.name().replace(' ', "-")));
        }
        if self.recompute != RecomputePolicy::Off {
            name.push_str(&format!("_recompute-{}", policy_name(self.recompute)));
        }
        if self.buffers == Buffers::Small {
            name.push_str("_small-buffers");
        }
        if self.pipeline_stages > 1 {
            name.push_str(&format!("_pp{}", self.pipeline_stages));
        }
        format!("{name}_ranks{}", self.ranks)
    }

    /// Returns whether a step of this candidate takes no longer than one of `other` whatever the
    /// machine: both are the same except that this one transfers no more states, repeats no more
    /// work, and exchanges its data in no smaller parts.
    pub(crate) fn is_never_slower(&self, other: &Self) -> bool {
        // Equal in all other settings, which are compared through a copy of `other`.
        let same = Self {
            states: self.states,
            recompute: self.recompute,
            buffers: self.buffers,
            ..*other
        };
        *self == same
            && self.states <= other.states
            && repeated(self.recompute) <= repeated(other.recompute)
            && self.buffers <= other.buffers
    }

    /// Returns the configuration `base` with the settings of this candidate. States on NVMe are in
    /// the folder `nvme`.
    ///
    /// The section `autotuning` is left out, so the result is a configuration of a training run.
    pub fn apply(&self, base: &Value, nvme: Option<&Path>) -> Value {
        let mut config = base.as_object().cloned().unwrap_or_default();
        // A training run refuses the section.
        config.remove("autotuning");
        // All three, because any of the user's would contradict the two others.
        config.insert("train_batch_size".to_owned(), json!(self.batch_size()));
        config.insert("train_micro_batch_size_per_gpu".to_owned(), json!(self.micro_batch));
        config.insert("gradient_accumulation_steps".to_owned(), json!(self.accumulation));
        self.apply_pipeline(&mut config);
        self.apply_zero(section(&mut config, "zero_optimization"), nvme);
        self.apply_recompute(&mut config);
        Value::Object(config)
    }

    /// Writes the number of pipeline stages. The user's partition into stages is kept.
    fn apply_pipeline(&self, config: &mut Map<String, Value>) {
        const SECTION: &str = "pipeline";
        if self.pipeline_stages == 1 {
            // Other keys of the section have no effect without stages.
            config.remove(SECTION);
            return;
        }
        section(config, SECTION).insert("stages".to_owned(), json!(self.pipeline_stages));
    }

    /// Writes stage, offload and buffers.
    fn apply_zero(&self, zero: &mut Map<String, Value>, nvme: Option<&Path>) {
        zero.insert("stage".to_owned(), json!(self.stage.number()));
        // Names of earlier versions of DeepSpeed for the same settings.
        zero.remove("cpu_offload");
        zero.remove("cpu_offload_param");
        for (key, device) in
            ["offload_optimizer", "offload_param"].into_iter().zip(self.states.devices())
        {
            let Some(device) = device else {
                zero.remove(key);
                continue;
            };
            let written = section(zero, key);
            if written.get("device").and_then(Value::as_str) != Some(device) {
                // The fields of another device have no effect or are refused.
                written.clear();
            }
            written.insert("device".to_owned(), json!(device));
            if !self.stage.shards_parameters() {
                // A part of the states can be offloaded at stage 3 only.
                written.remove("ratio");
            }
            if let Some(folder) = nvme.filter(|_| device == "nvme") {
                written.insert("nvme_path".to_owned(), json!(folder));
            }
        }
        if self.buffers == Buffers::Small {
            for key in Buffers::KEYS {
                // A size of the user that is smaller already is kept.
                let smaller = zero
                    .get(key)
                    .and_then(Value::as_f64)
                    .is_some_and(|size| size < Buffers::SMALL as f64);
                if !smaller {
                    zero.insert(key.to_owned(), json!(Buffers::SMALL));
                }
            }
        }
    }

    /// Writes activation checkpointing.
    fn apply_recompute(&self, config: &mut Map<String, Value>) {
        const SECTION: &str = "activation_checkpointing";
        if self.recompute == RecomputePolicy::Off {
            // Most keys of the section turn checkpointing on.
            config.remove(SECTION);
            return;
        }
        let written = section(config, SECTION);
        // The interval of the user's policy would turn this one into another.
        written.remove("every_nth_block");
        let policy = match self.recompute {
            // Every nth block is a full policy with an interval, which follows.
            RecomputePolicy::Selective => "selective",
            _ => "full",
        };
        written.insert("policy".to_owned(), json!(policy));
        if let RecomputePolicy::EveryNth(n) = self.recompute {
            written.insert("every_nth_block".to_owned(), json!(n));
        }
    }
}

/// Returns the section `key`, which is created if it is missing.
fn section<'a>(parent: &'a mut Map<String, Value>, key: &str) -> &'a mut Map<String, Value> {
    let value = parent.entry(key).or_insert_with(|| json!({}));
    // A value of another kind, such as `null`, is replaced.
    if !value.is_object() {
        *value = json!({});
    }
    match value {
        Value::Object(section) => section,
        _ => unreachable!("it was replaced"),
    }
}

#[cfg(test)]
mod tests {
    use deepburn_config::{
        OptimizerOffload, ParameterOffload, RawConfig, RunContext, StagePartition, resolve,
    };

    use super::*;
    use crate::SearchSpace;

    fn space() -> SearchSpace {
        SearchSpace {
            ranks: vec![1, 2],
            pipeline_stages: vec![1, 2],
            batch_sizes: vec![8],
            states: StatePlacement::ALL.to_vec(),
            buffers: vec![Buffers::AsConfigured, Buffers::Small],
            ..SearchSpace::default()
        }
    }

    /// Whatever the user's configuration is, the plan of a candidate has its settings.
    #[test]
    fn the_plan_of_a_candidate_has_its_settings() {
        let bases = [
            json!({}),
            json!({"train_batch_size": 32, "autotuning": {"enabled": true}, "zero_optimization": {"stage": 1, "cpu_offload": true}}),
            json!({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000,
                "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "nvme", "nvme_path": "/old"}},
                "activation_checkpointing": {"partition_activations": true, "every_nth_block": 3}}),
            json!({"pipeline": {"stages": 4, "partition": "uniform"}}),
        ];
        for base in &bases {
            for candidate in space().candidates() {
                let config = candidate.apply(base, Some(Path::new("/nvme")));
                let raw = RawConfig::from_value(&config).unwrap();
                let run = RunContext { host_device: false, ..RunContext::on_host(candidate.ranks) };
                let plan =
                    resolve(&raw, &run).unwrap_or_else(|report| panic!("{config}: {report}")).plan;
                assert_eq!(plan.batch.train_batch_size, 8);
                assert_eq!(plan.batch.micro_batch_size, candidate.micro_batch);
                assert_eq!(plan.mesh.pipeline_stages, candidate.pipeline_stages, "{config}");
                if let (Some(pipeline), false) = (&plan.pipeline, base["pipeline"].is_null()) {
                    assert_eq!(pipeline.partition, StagePartition::Uniform);
                }
                assert_eq!(
                    (plan.zero.stage, plan.backward.activations.recompute),
                    (candidate.stage, candidate.recompute)
                );
                let optimizer = match plan.zero.optimizer_states {
                    OptimizerOffload::Device => None,
                    OptimizerOffload::Host { .. } => Some("cpu"),
                    OptimizerOffload::Nvme(_) => Some("nvme"),
                };
                let parameters = match plan.zero.parameter_shards {
                    ParameterOffload::Device => None,
                    ParameterOffload::Host => Some("cpu"),
                    ParameterOffload::Nvme { .. } => Some("nvme"),
                };
                assert_eq!([optimizer, parameters], candidate.states.devices(), "{config}");
                if candidate.buffers == Buffers::Small {
                    let bucket = config["zero_optimization"]["reduce_bucket_size"].as_u64();
                    assert!(bucket.is_some_and(|size| size <= Buffers::SMALL));
                }
            }
        }
    }

    #[test]
    fn names_are_different() {
        let mut names: Vec<_> = space().candidates().iter().map(CandidateConfig::name).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(
            names.iter().any(|name| name
                == "z3_gas2_tmbspg2_offload-all-nvme_recompute-full_small-buffers_ranks2")
        );
        for name in ["z0_gas8_tmbspg1_ranks1", "z0_gas4_tmbspg2_pp2_ranks2"] {
            assert!(names.iter().any(|it| it == name), "{name}");
        }
    }

    #[test]
    fn cheaper_settings_are_never_slower() {
        let base = CandidateConfig {
            ranks: 2,
            pipeline_stages: 1,
            stage: Stage::Parameters,
            states: StatePlacement::OptimizerOnNvme,
            recompute: RecomputePolicy::Selective,
            buffers: Buffers::AsConfigured,
            micro_batch: 2,
            accumulation: 2,
        };
        let other = |change: fn(&mut CandidateConfig)| {
            let mut other = base;
            change(&mut other);
            base.is_never_slower(&other)
        };
        assert!(other(|it| it.recompute = RecomputePolicy::Full));
        assert!(other(|it| it.states = StatePlacement::AllOnNvme));
        assert!(!other(|it| it.recompute = RecomputePolicy::Off));
        assert!(!other(|it| it.states = StatePlacement::Device));
        assert!(!other(|it| it.stage = Stage::Gradients));
        assert!(!other(|it| it.micro_batch = 4));
        assert!(!other(|it| it.pipeline_stages = 2));
    }
}
