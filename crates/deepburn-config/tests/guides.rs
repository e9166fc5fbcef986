//! The five published guides' configurations: each loads, or is refused with the named diagnosis.

use std::path::{Path, PathBuf};

use deepburn_config::{Facts, Resolved, Severity, Stage, Written, resolve};

fn guide(name: &str) -> Written {
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/guides");
    Written::from_file(&folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn outcome(written: &Written, world_size: usize) -> Result<Resolved, String> {
    let facts = Facts { micro_batch_size: Some(2), ..Facts::on_host(world_size) };
    resolve(written, &facts).map_err(|report| report.to_string())
}

/// Every part must be in the refusal of a guide.
fn refused(name: &str, world_size: usize, parts: &[&str]) {
    let message = outcome(&guide(name), world_size).expect_err(name);
    for part in parts {
        assert!(message.contains(part), "{name} on {world_size}: no {part:?} in\n{message}");
    }
}

const FP16: &str = "fp16.enabled (line ";
const MISMATCH: &str =
    "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size";

/// The guide with one section replaced, to see that the remedy is one.
fn mended(name: &str, mend: impl FnOnce(&mut serde_json::Value)) -> Written {
    let mut json = guide(name).to_json();
    mend(&mut json);
    Written::from_value(&json).unwrap()
}

fn warns(resolved: &Resolved, key: &str, part: &str) {
    let found = resolved.notes.iter().any(|note| {
        note.severity == Severity::Warning && note.key == key && note.message.contains(part)
    });
    assert!(found, "no warning about {key} with {part:?} in {:#?}", resolved.notes);
}

#[test]
fn s0_asks_for_fp16_and_disagrees_on_two_ranks() {
    let fp16 = "true asks for fp16 training, which is not available in this version; set fp16.enabled to false";
    let skips = "about 17 updates will be skipped";
    let alias = "zero_optimization.overlap_reduce (line 30, column 23): is taken as overlap_comm";
    refused("S0.json", 1, &[": 1 problem\n", FP16, fp16, skips, alias]);
    refused(
        "S0.json",
        2,
        &[": 2 problems\n", MISMATCH, "32 != 4 * 8 * 2", "set one of: train_batch_size 64"],
    );
    let written = mended("S0.json", |json| json["fp16"]["enabled"] = false.into());
    let resolved = outcome(&written, 1).unwrap();
    assert_eq!(resolved.plan.zero.stage, Stage::Parameters);
    assert!(resolved.plan.zero.gradients.overlap_comm);
    assert_eq!(resolved.plan.zero.parameters.persistence_threshold, 10_000);
    warns(&resolved, "zero_optimization.overlap_reduce", "is taken as overlap_comm");
    assert!(resolved.notes.iter().any(|note| note.message.contains("already live in host memory")));
}

#[test]
fn s1_asks_for_fp16_and_a_profiler_no_version_has() {
    let profiler = "profiling.enabled (line 35, column 16): true asks for the step profiler";
    let ignored =
        "warning: zero_optimization.offload_param.device (line 19, column 17): \"cpu\" is ignored";
    refused(
        "S1.json",
        1,
        &[": 2 problems\n", FP16, profiler, "set profiling.enabled to false", ignored],
    );
    refused("S1.json", 2, &[": 3 problems\n", FP16, profiler, MISMATCH]);
    let written = mended("S1.json", |json| {
        json["fp16"]["enabled"] = false.into();
        json["profiling"]["enabled"] = false.into();
    });
    warns(&outcome(&written, 1).unwrap(), "zero_optimization.offload_param.device", "is ignored");
}

#[test]
fn s2_asks_for_an_optimizer_that_zero_excludes() {
    for world_size in [1, 2] {
        let parts = [
            "1bit-Adam is not compatible with ZeRO (zero_optimization.stage is 2); use AdamW",
            "\"OneBitAdam\" asks for 1-bit Adam, which is not available in this version; use AdamW",
            ": 2 problems\n",
        ];
        refused("S2.json", world_size, &parts);
        let written = mended("S2.json", |json| json["optimizer"]["type"] = "AdamW".into());
        let plan = outcome(&written, world_size).unwrap().plan;
        assert_eq!(plan.batch.train_batch_size, 32 * world_size);
        assert_eq!(plan.zero.allgather_bucket_size, 200_000_000);
        assert_eq!(plan.optimizer.lr(), 3e-5);
    }
}

#[test]
fn s3_asks_for_fp16_through_accelerate() {
    let written = guide("S3.yaml");
    assert_eq!(written.processes(), Some(2));
    for world_size in [1, 2] {
        refused(
            "S3.yaml",
            world_size,
            &[": 1 problem\n", "fp16.enabled: true asks for fp16 training"],
        );
        let written = mended("S3.yaml", |json| json["fp16"]["enabled"] = false.into());
        let resolved = outcome(&written, world_size).unwrap();
        assert_eq!(resolved.plan.zero.stage, Stage::Parameters);
        assert_eq!(resolved.plan.batch.train_batch_size, 2 * world_size);
        assert_eq!(resolved.autos["train_batch_size"].value, 2 * world_size);
        warns(&resolved, "optimizer", "AdamW with lr 0.001");
    }
}

#[test]
fn s4_loads_on_one_rank_and_disagrees_on_two() {
    let resolved = outcome(&guide("S4.json"), 1).unwrap();
    assert_eq!(resolved.plan.zero.stage, Stage::Gradients);
    assert_eq!(resolved.plan.batch.gradient_accumulation_steps, 4);
    assert_eq!(resolved.plan.report.steps_per_print, Some(2000));
    assert_eq!(resolved.autos["fp16.enabled"].value, false);
    warns(&resolved, "zero_optimization.offload_param.device", "is ignored");
    warns(&resolved, "zero_optimization.stage3_prefetch_bucket_size", "no effect at stage 2");
    refused(
        "S4.json",
        2,
        &[": 1 problem\n", MISMATCH, "4 != 1 * 4 * 2", "gradient_accumulation_steps 2"],
    );
}
