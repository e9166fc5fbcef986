//! The five published guides' configurations: each is accepted, or rejected with the expected
//! diagnosis.

use std::path::{Path, PathBuf};

use deepburn_config::{
    DynamicScalePlan, LossScalePlan, OptimizerPlan, OverflowPlan, Precision, RawConfig, Resolved,
    RunContext, ScaleGrowth, Severity, Stage, resolve,
};

fn guide(name: &str) -> RawConfig {
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/guides");
    RawConfig::from_file(&folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn outcome(written: &RawConfig, world_size: usize) -> Result<Resolved, String> {
    let facts = RunContext { micro_batch_size: Some(2), ..RunContext::on_host(world_size) };
    resolve(written, &facts).map_err(|report| report.to_string())
}

/// Checks that a guide is rejected with a message that contains every part.
fn refused(name: &str, world_size: usize, parts: &[&str]) {
    let message = outcome(&guide(name), world_size).expect_err(name);
    for part in parts {
        assert!(message.contains(part), "{name} on {world_size}: no {part:?} in\n{message}");
    }
}

const MISMATCH: &str =
    "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size";

/// Returns the guide with one section replaced, to check that the remedy works.
fn mended(name: &str, mend: impl FnOnce(&mut serde_json::Value)) -> RawConfig {
    let mut json = guide(name).to_json();
    mend(&mut json);
    RawConfig::from_value(&json).unwrap()
}

fn warns(resolved: &Resolved, key: &str, part: &str) {
    let found = resolved.notes.iter().any(|note| {
        note.severity == Severity::Warning && note.key == key && note.message.contains(part)
    });
    assert!(found, "no warning about {key} with {part:?} in {:#?}", resolved.notes);
}

#[test]
fn s0_trains_in_fp16_and_disagrees_on_two_ranks() {
    let alias = "zero_optimization.overlap_reduce (line 30, column 23): is taken as overlap_comm";
    refused(
        "S0.json",
        2,
        &[": 1 problem\n", MISMATCH, "32 != 4 * 8 * 2", "set one of: train_batch_size 64", alias],
    );
    let resolved = outcome(&guide("S0.json"), 1).unwrap();
    assert_eq!(resolved.plan.zero.stage, Stage::Parameters);
    assert!(resolved.plan.zero.gradients.overlap_comm);
    assert_eq!(resolved.plan.zero.parameters.persistence_threshold, 10_000);
    assert_eq!(resolved.plan.precision.compute, Precision::Fp16);
    warns(&resolved, "fp16.initial_scale_power", "about 17 updates will be skipped");
    warns(&resolved, "zero_optimization.overlap_reduce", "is taken as overlap_comm");
    assert!(resolved.notes.iter().any(|note| note.message.contains("already in host memory")));
}

#[test]
fn s1_profiles_ten_steps_and_disagrees_on_two_ranks() {
    let ignored =
        "warning: zero_optimization.offload_param.device (line 19, column 17): \"cpu\" is ignored";
    refused("S1.json", 2, &[": 1 problem\n", MISMATCH, ignored]);
    let resolved = outcome(&guide("S1.json"), 1).unwrap();
    assert_eq!(resolved.plan.precision.overflow, OverflowPlan::Skip);
    warns(&resolved, "zero_optimization.offload_param.device", "is ignored");
    let profile = resolved.plan.outputs.monitor.profile.unwrap();
    assert_eq!(profile.steps, [1..=10]);
    assert_eq!(profile.under(Path::new("out")), Path::new("profiling_output"));
}

#[test]
fn s2_asks_for_1_bit_adam_at_zero_stage_2() {
    for world_size in [1, 2] {
        let parts = [
            ": 1 problem\n",
            "optimizer.type (line 5, column 13): OneBitAdam is not compatible with ZeRO stage 2: after freeze_step",
            "each rank needs its whole gradient and momentum; set zero_optimization.stage to 0 or 1, or use AdamW",
        ];
        refused("S2.json", world_size, &parts);
        for stage in [0, 1] {
            let written =
                mended("S2.json", |json| json["zero_optimization"]["stage"] = stage.into());
            let resolved = outcome(&written, world_size).unwrap();
            assert_eq!(resolved.plan.zero.stage, Stage::Disabled);
            let OptimizerPlan::OneBitAdam(plan) = resolved.plan.optimizer else {
                panic!("{:?}", resolved.plan.optimizer)
            };
            assert_eq!(plan.freeze_step, 100_000);
            assert_eq!((plan.adam.betas, plan.adam.eps), ([0.998, 0.999], 1e-5));
            assert_eq!((plan.adam.lr, plan.adam.weight_decay), (3e-5, 1e-9));
            assert!(!plan.adam.bias_correction);
        }
        let written = mended("S2.json", |json| json["optimizer"]["type"] = "AdamW".into());
        let plan = outcome(&written, world_size).unwrap().plan;
        assert_eq!(plan.batch.train_batch_size, 32 * world_size);
        assert_eq!(plan.zero.allgather_bucket_size, 200_000_000);
        assert_eq!(plan.optimizer.lr(), 3e-5);
    }
}

#[test]
fn s3_trains_in_fp16_through_accelerate() {
    let written = guide("S3.yaml");
    assert_eq!(written.processes(), Some(2));
    for world_size in [1, 2] {
        let resolved = outcome(&written, world_size).unwrap();
        assert_eq!(resolved.plan.zero.stage, Stage::Parameters);
        assert_eq!(resolved.plan.batch.train_batch_size, 2 * world_size);
        assert_eq!(resolved.autos["train_batch_size"].value, 2 * world_size);
        assert_eq!(resolved.plan.precision.compute, Precision::Fp16);
        // Accelerate enables fp16.auto_cast.
        assert_eq!(resolved.plan.precision.autocast, Some(Precision::Fp16));
        assert_eq!(
            resolved.plan.precision.loss_scale,
            LossScalePlan::Dynamic(DynamicScalePlan {
                initial_scale: 65536.0,
                window: 1000,
                hysteresis: 2,
                consecutive_hysteresis: false,
                min_scale: 1.0,
                growth: ScaleGrowth::AfterWindow,
            })
        );
        warns(&resolved, "optimizer", "AdamW with lr 0.001");
    }
}

//= deepspeed 0.19.8 runtime/precision_config.py DeepSpeedFP16Config
#[test]
fn s4_loads_on_one_rank_and_disagrees_on_two() {
    let resolved = outcome(&guide("S4.json"), 1).unwrap();
    assert_eq!(resolved.plan.zero.stage, Stage::Gradients);
    assert_eq!(resolved.plan.batch.gradient_accumulation_steps, 4);
    assert_eq!(resolved.plan.outputs.report.steps_per_print, Some(2000));
    assert_eq!(resolved.autos["fp16.enabled"].value, false);
    warns(&resolved, "zero_optimization.offload_param.device", "is ignored");
    warns(&resolved, "zero_optimization.stage3_prefetch_bucket_size", "no effect at stage 2");
    refused(
        "S4.json",
        2,
        &[": 1 problem\n", MISMATCH, "4 != 1 * 4 * 2", "gradient_accumulation_steps 2"],
    );
}

/// Without a loss scale, small gradients are below the range of fp16.
#[test]
fn narrow_gradients_are_warned_of() {
    for (keys, key) in [
        (r#""communication_data_type": "fp16""#, "communication_data_type"),
        (r#""data_types": {"grad_accum_dtype": "fp16"}"#, "data_types.grad_accum_dtype"),
    ] {
        let text = format!(r#"{{"train_batch_size": 1, "bf16": {{"enabled": true}}, {keys}}}"#);
        let written = RawConfig::from_json(&text).unwrap();
        let resolved = resolve(&written, &RunContext::on_host(1)).unwrap();
        warns(&resolved, key, "fewer magnitudes than bf16");
    }
}

/// Scales with which nearly every step is skipped are reported before the run.
#[test]
fn scales_that_cannot_work_are_warned_of() {
    for (fp16, key, part) in [
        (r#""loss_scale": 1099511627776"#, "fp16.loss_scale", "never changes"),
        (r#""initial_scale_power": 4, "min_loss_scale": 16"#, "fp16.min_loss_scale", "not below"),
        (
            r#""initial_scale_power": 40, "hysteresis": 9223372036854775807"#,
            "fp16.initial_scale_power",
            "about 9223372036854775807 updates",
        ),
    ] {
        let text = format!(r#"{{"train_batch_size": 1, "fp16": {{"enabled": true, {fp16}}}}}"#);
        let written = RawConfig::from_json(&text).unwrap();
        warns(&resolve(&written, &RunContext::on_host(1)).unwrap(), key, part);
    }
}
