//! A job that is run for real and without data.

use std::collections::BTreeMap;
use std::time::Duration;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn_flex::{Flex, FlexDevice};
use deepburn::BoxError;
use deepburn::comm::{Count, Statistics, run_ranks};
use deepburn::config::{
    GroupUpdate, ParamGroup, PathPattern, Plan, QuantizationPlan, QuantizedFormat, RawConfig,
    RunContext, resolve,
};
use deepburn::ops::FusedOps;
use deepburn::zero::{Category, Group, ModuleOperations, Tier, Training};
use deepburn_forecast::{Forecast, MemoryPeaks, Meta, MetaDevice, forecast};
use serde_json::{Value, json};

/// A configuration on a number of ranks.
#[derive(Debug)]
pub(crate) struct Case {
    section: Value,
    ranks: usize,
    /// Whether all matrices except in the last block are frozen and in 4 bits.
    quantized: bool,
}

/// A model that is built and run on any backend.
pub(crate) trait ComparedModel {
    /// The module.
    type Module<B: FusedOps>;

    fn build<B: FusedOps>(&self, device: &B::Device) -> Self::Module<B>;

    fn loss<B: FusedOps>(&self, module: &Self::Module<B>, device: &B::Device) -> Tensor<B, 1>;
}

const BF16: &str = r#""bf16": {"enabled": true}"#;

/// At least 24 configurations, which together have every stage, precision, optimizer and kind of
/// offload.
pub(crate) fn cases() -> Vec<Case> {
    let nvme = json!({"device": "nvme", "nvme_path": env!("CARGO_TARGET_TMPDIR")});
    let zero = |stage: u8, mut keys: Value| {
        keys["stage"] = json!(stage);
        json!({"zero_optimization": keys})
    };
    let optimizer = |name: &str, params: Value| json!({"type": name, "params": params});
    let mut cases = Vec::new();
    let mut add = |section: Value, more: Value, ranks: &[usize]| {
        let mut section = section;
        section.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let case = |&ranks: &usize| Case { section: section.clone(), ranks, quantized: false };
        cases.extend(ranks.iter().map(case));
    };
    let types = [
        json!({}),
        serde_json::from_str(&format!("{{{BF16}}}")).unwrap(),
        json!({"fp16": {"enabled": true, "initial_scale_power": 4}}),
        json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}),
    ];
    // Stages, precisions, accumulation and ranks.
    for stage in 0..4 {
        for (index, types) in types.iter().enumerate() {
            let accumulation = json!({"gradient_accumulation_steps": 1 + 4 * (index % 2)});
            add(zero(stage, json!({})), merged(types, &accumulation), &[1, 1 + index]);
        }
    }
    // Buckets, prefetching and persistence.
    add(
        zero(
            3,
            json!({"stage3_param_persistence_threshold": 1000, "reduce_bucket_size": 5000,
            "stage3_prefetch_bucket_size": 6000, "stage3_max_live_parameters": 40_000,
            "stage3_max_reuse_distance": 10_000, "overlap_comm": true}),
        ),
        json!({"bf16": {"enabled": true}}),
        &[1, 2, 3],
    );
    add(zero(2, json!({"reduce_bucket_size": 3000, "overlap_comm": true})), json!({}), &[2, 4]);
    // Activation checkpointing and offload.
    for policy in [
        json!({"policy": "full"}),
        json!({"policy": "selective"}),
        json!({"every_nth_block": 3}),
        json!({"policy": "full", "offload_threshold": 4096, "nvme_path": env!("CARGO_TARGET_TMPDIR")}),
        json!({"policy": "selective", "offload_threshold": 0, "nvme_path": env!("CARGO_TARGET_TMPDIR")}),
    ] {
        for types in &types[..2] {
            let policy = json!({"activation_checkpointing": policy});
            add(zero(3, json!({})), merged(types, &policy), &[2]);
            add(zero(1, json!({})), merged(types, &policy), &[1]);
        }
    }
    // Offloaded states.
    for stage in 1..4 {
        for device in
            [json!({"device": "cpu"}), json!({"device": "cpu", "ratio": 0.4}), nvme.clone()]
        {
            let accumulation = json!({"gradient_accumulation_steps": 2});
            for types in &types[..2] {
                let offload = json!({"offload_optimizer": device});
                add(zero(stage, offload), merged(types, &accumulation), &[2]);
            }
        }
    }
    for (states, parameters) in [
        (json!({"device": "cpu"}), json!({"device": "cpu"})),
        (nvme.clone(), nvme.clone()),
        (nvme.clone(), merged(&nvme, &json!({"max_in_cpu": 30_000}))),
    ] {
        let offload = json!({"offload_optimizer": states, "offload_param": parameters,
            "stage3_param_persistence_threshold": 500});
        add(zero(3, offload.clone()), json!({}), &[1, 3]);
        add(zero(3, offload), types[1].clone(), &[2]);
    }
    // Optimizers.
    for (name, params, stages) in [
        ("Adam", json!({"adam_w_mode": false}), 0..4),
        ("SGD", json!({"lr": 0.1}), 0..4),
        ("SGD", json!({"lr": 0.1, "momentum": 0.9}), 0..4),
        ("Lion", json!({}), 0..4),
        ("Adagrad", json!({}), 0..4),
        ("Lamb", json!({}), 0..4),
        ("Muon", json!({}), 0..4),
        ("OneBitAdam", json!({"freeze_step": 1}), 0..1),
        ("OneBitLamb", json!({"freeze_step": 1}), 0..1),
        ("ZeroOneAdam", json!({"var_freeze_step": 1}), 0..1),
    ] {
        for stage in stages {
            let with = json!({"optimizer": optimizer(name, params.clone())});
            add(zero(stage, json!({})), with.clone(), &[1 + usize::from(stage % 3)]);
            add(zero(stage, json!({})), merged(&types[1], &with), &[2]);
        }
    }
    // Shard groups with replicas, and secondary shards.
    for stage in 0..4 {
        for types in &types[..2] {
            let accumulation = json!({"gradient_accumulation_steps": 1 + 4 * (stage % 2)});
            let groups = zero(stage, json!({"mics_shard_size": 2}));
            add(groups, merged(types, &accumulation), &[4, 6]);
        }
    }
    let offload = json!({"mics_shard_size": 2, "offload_optimizer": nvme, "offload_param": nvme});
    add(zero(3, offload), json!({}), &[4]);
    for (accumulation, distance) in [(1, 0), (5, 10_000)] {
        let secondary = json!({"zero_hpz_partition_size": 2, "stage3_max_reuse_distance": distance,
            "stage3_param_persistence_threshold": 200});
        let accumulation = json!({"gradient_accumulation_steps": accumulation});
        for types in &types[..2] {
            add(zero(3, secondary.clone()), merged(types, &accumulation), &[4]);
        }
    }
    let secondary = json!({"zero_hpz_partition_size": 3, "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"}});
    add(zero(3, secondary), json!({"activation_checkpointing": {"policy": "full"}}), &[6]);
    // Frozen matrices in 4 bits.
    for stage in 0..4 {
        for (types, ranks) in [(&types[0], 1), (&types[1], 3)] {
            let mut section = merged(types, &zero(stage, json!({})));
            if ranks > 1 {
                section["activation_checkpointing"] = json!({"policy": "full"});
            }
            cases.push(Case { section, ranks, quantized: true });
        }
    }
    cases
}

/// What a real run reports.
struct MeasuredRun {
    start: MemoryPeaks,
    step: MemoryPeaks,
    collectives: Statistics,
    operations: Vec<ModuleOperations>,
}

/// Returns `left` with the keys of `right`.
fn merged(left: &Value, right: &Value) -> Value {
    let mut both = left.clone();
    both.as_object_mut().unwrap().extend(right.as_object().unwrap().clone());
    both
}

impl Case {
    fn plan(&self) -> Plan {
        let json = json!({
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
        });
        let json = merged(&json, &self.section);
        let facts = RunContext { hidden_size: Some(64), ..RunContext::on_host(self.ranks) };
        let resolved = resolve(&RawConfig::from_json(&json.to_string()).unwrap(), &facts);
        let mut plan = resolved.unwrap_or_else(|error| panic!("{self:?}: {error}")).plan;
        if self.quantized {
            let params = vec![PathPattern::new(r"^(\D*|\D*[0-2]\..*)$").unwrap()];
            let group = ParamGroup { params, dims: vec![2], update: GroupUpdate::Frozen };
            plan.param_groups.groups.push(group);
            let format = QuantizedFormat::Nf4Double;
            plan.quantization = Some(QuantizationPlan { format, skipped: vec![] });
        }
        plan
    }

    /// Trains rank threads with values, and reports rank 0.
    fn measured<M: ComparedModel + Sync>(&self, model: &M) -> MeasuredRun
    where
        M::Module<Training<Flex>>: AutodiffModule<Training<Flex>>,
    {
        let plan = self.plan();
        let runs = run_ranks(self.ranks, Duration::from_secs(60), |member| {
            let module = model.build::<Training<Flex>>(&FlexDevice);
            let mut engine =
                deepburn::initialize(module, &plan, Group::<Flex>::new(member.clone()))?;
            let start = MemoryPeaks::of(engine.ledger());
            let mut run = None;
            for _ in 0..2 {
                engine.ledger().reset_peaks();
                engine.states().start_counting();
                let before = member.statistics();
                for _ in 0..plan.batch.gradient_accumulation_steps {
                    let loss = engine.forward(|module| model.loss(module, &FlexDevice))?;
                    engine.backward(loss)?;
                    engine.step()?;
                }
                run = Some(MeasuredRun {
                    start,
                    step: MemoryPeaks::of(engine.ledger()),
                    collectives: member.statistics().since(&before),
                    operations: engine.states().stop_counting(),
                });
            }
            Ok::<_, BoxError>(run.unwrap())
        });
        runs.unwrap_or_else(|failure| panic!("{self:?}: {failure}")).remove(0)
    }

    fn forecast<M: ComparedModel + Sync>(&self, model: &M) -> Forecast
    where
        M::Module<Training<Meta>>: AutodiffModule<Training<Meta>>,
    {
        let run = forecast(
            &self.plan(),
            |device| Ok(model.build::<Training<Meta>>(device)),
            |module| Ok(model.loss(module, &MetaDevice)),
        );
        run.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// Returns everything in which the dry run differs from the real one.
    pub(crate) fn differences<M: ComparedModel + Sync>(&self, model: &M) -> Vec<String>
    where
        M::Module<Training<Flex>>: AutodiffModule<Training<Flex>>,
        M::Module<Training<Meta>>: AutodiffModule<Training<Meta>>,
    {
        let (real, dry) = (self.measured(model), self.forecast(model));
        let mut differences = Vec::new();
        let mut compare = |what: String, real: u64, dry: u64| {
            if real != dry {
                let Self { section, ranks, .. } = self;
                let ratio = dry as f64 / real as f64;
                differences.push(format!(
                    "{section}, {ranks} ranks: {what} {real}, dry {dry} ({ratio:.4})"
                ));
            }
        };
        for (phase, real, dry) in [("start", real.start, dry.start), ("step", real.step, dry.step)]
        {
            for tier in [Tier::Device, Tier::Host, Tier::Disk] {
                let (real, dry) = (real.on(tier), dry.on(tier));
                for category in Category::ALL {
                    let what = format!("{phase}, {tier:?}, {category:?}");
                    compare(what, real.of(category), dry.of(category));
                }
                compare(format!("{phase}, {tier:?}, total"), real.total, dry.total);
            }
        }
        let (real_counts, dry_counts) = (counts(&real.collectives), counts(&dry.collectives));
        for purpose in real_counts.keys().chain(dry_counts.keys()) {
            let of =
                |counts: &BTreeMap<String, Count>| counts.get(purpose).copied().unwrap_or_default();
            let (real, dry) = (of(&real_counts), of(&dry_counts));
            compare(format!("calls of {purpose}"), real.calls, dry.calls);
            compare(format!("elements of {purpose}"), real.elements, dry.elements);
        }
        let flops = real.operations.iter().map(|module| module.forward + module.backward).sum();
        compare("operations".to_owned(), flops, dry.flops());
        assert_eq!(real.operations, dry.operations, "{self:?}");
        differences
    }
}

/// Counts by operation, purpose and element type.
fn counts(statistics: &Statistics) -> BTreeMap<String, Count> {
    let mut counts = BTreeMap::<String, Count>::new();
    for (operation, purpose, count) in statistics.iter() {
        let sum = counts.entry(format!("{operation} {purpose}")).or_default();
        sum.calls += count.calls;
        sum.elements += count.elements;
    }
    for group in ["shard group", "replicas", "secondary shard group"] {
        let inside = statistics.in_group(Some(group), |_, _| true);
        counts.insert(format!("all in the group {group}"), inside);
    }
    counts
}

/// Runs all cases and fails with all differences.
#[track_caller]
pub(crate) fn check<M: ComparedModel + Sync>(model: &M)
where
    M::Module<Training<Flex>>: AutodiffModule<Training<Flex>>,
    M::Module<Training<Meta>>: AutodiffModule<Training<Meta>>,
{
    let differences: Vec<_> = cases().iter().flat_map(|case| case.differences(model)).collect();
    assert!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences.join("\n")
    );
}
