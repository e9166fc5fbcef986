//! Reads checkpoints that DeepSpeed wrote and compares them with the state of its engine at the
//! time of the save.

use std::path::{Path, PathBuf};

use deepburn_deepspeed::{Array, DeepSpeedCheckpoint, DeepSpeedError, LossScale};
use serde::Deserialize;
use sha2::{Digest, Sha256};

#[derive(Deserialize)]
struct Expected {
    version: String,
    stage: u8,
    world_size: usize,
    /// Missing without a pipeline.
    pipeline_stages: Option<usize>,
    global_steps: u64,
    skipped_steps: u64,
    global_samples: u64,
    steps: Vec<u64>,
    schedule: Option<i64>,
    loss_scale: Option<ExpectedScale>,
    moments: Vec<String>,
    parameters: Vec<ExpectedParameter>,
}

#[derive(Deserialize)]
struct ExpectedScale {
    scale: f64,
    hysteresis: u64,
    last_overflow: i64,
    iteration: u64,
}

#[derive(Deserialize)]
struct ExpectedParameter {
    name: String,
    shape: Vec<usize>,
    trainable: bool,
    aliases: Vec<String>,
    weights: String,
    first: Vec<f32>,
    moments: std::collections::HashMap<String, String>,
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn expected(name: &str) -> Expected {
    let text = std::fs::read_to_string(data().join(name).join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn digest(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks that everything in the checkpoint `name` equals the engine's state.
fn check(name: &str) {
    let checkpoint = DeepSpeedCheckpoint::open(&data().join(name), None).unwrap();
    let expected = expected(name);
    assert_eq!(checkpoint.version(), expected.version);
    assert_eq!(
        (checkpoint.stage(), checkpoint.world_size()),
        (expected.stage, expected.world_size)
    );
    assert_eq!(checkpoint.pipeline_stages(), expected.pipeline_stages);
    let counters = checkpoint.counters();
    let (steps, skipped) = (expected.global_steps, expected.skipped_steps);
    let found = (counters.global_steps, counters.skipped_steps, counters.global_samples);
    assert_eq!(found, (steps, skipped, expected.global_samples));
    let counted = expected.steps.last().copied().unwrap_or(steps - skipped);
    assert_eq!(counters.optimizer_steps, counted, "{name}");
    // After the same number of steps, the index of a PyTorch schedule is larger by one than
    // DeepSpeed's.
    let schedule = if name == "s0_sgd" { Some(2) } else { expected.schedule };
    assert_eq!(checkpoint.schedule(), schedule);
    let scale = expected.loss_scale.map(|it| LossScale {
        scale: it.scale,
        hysteresis: it.hysteresis,
        last_overflow: it.last_overflow,
        iteration: it.iteration,
    });
    assert_eq!(checkpoint.loss_scale(), scale);
    let (mut left, mut right) = (checkpoint.moments().to_vec(), expected.moments);
    left.sort();
    right.sort();
    assert_eq!(left, right);
    assert_eq!(checkpoint.parameters().len(), expected.parameters.len());
    for it in &expected.parameters {
        check_parameter(&checkpoint, it);
    }
}

fn check_parameter(checkpoint: &DeepSpeedCheckpoint, it: &ExpectedParameter) {
    let found = checkpoint.parameters().iter().find(|found| found.name == it.name).unwrap();
    assert_eq!((&found.shape, &found.aliases), (&it.shape, &it.aliases), "{}", it.name);
    assert_eq!(found.trainable, it.trainable, "{}", it.name);
    let numel = found.numel();
    let weights = checkpoint.read(&it.name, Array::Weights, 0..numel).unwrap();
    assert_eq!(weights[..2.min(numel)], it.first, "{}", it.name);
    assert_eq!(digest(&weights), it.weights, "{}", it.name);
    for alias in &it.aliases {
        assert_eq!(checkpoint.read(alias, Array::Weights, 0..numel).unwrap(), weights);
    }
    for moment in checkpoint.moments() {
        let array = Array::Moment(moment);
        let read = checkpoint.read(&it.name, array, 0..numel);
        match it.moments.get(moment) {
            None => assert!(matches!(read, Err(DeepSpeedError::NotInside { .. })), "{}", it.name),
            Some(expected) => {
                let whole = read.unwrap();
                assert_eq!(digest(&whole), *expected, "{} {moment}", it.name);
                // Partial reads return the same values.
                for range in [0..0, 0..1, numel / 3..numel - numel / 4, numel - 1..numel] {
                    let part = checkpoint.read(&it.name, array, range.clone()).unwrap();
                    assert_eq!(part, whole[range]);
                }
            }
        }
    }
}

macro_rules! fixtures {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { check(stringify!($name)); })*

        #[test]
        fn every_fixture_is_checked() {
            let checked = [$(stringify!($name)),*, "s2_excluded"];
            let folders = std::fs::read_dir(data()).unwrap().map(|entry| entry.unwrap());
            for folder in folders.filter(|folder| folder.path().join("latest").exists()) {
                let name = folder.file_name().into_string().unwrap();
                assert!(checked.contains(&name.as_str()), "{name}");
            }
        }
    };
}

//= deepspeed 0.19.8 runtime/engine.py _get_ckpt_name
//= deepspeed 0.19.8 runtime/engine.py _get_rank_zero_ckpt_name
//= deepspeed 0.19.8 runtime/pipe/module.py ckpt_layer_path
//= deepspeed 0.19.8 utils/zero_to_fp32.py _zero2_merge_trainable_params
//= deepspeed 0.19.8 utils/zero_to_fp32.py _zero3_merge_trainable_params
fixtures! {
    s0, s1, s2, s3, s0_fp16, s0_fp16_fused, s2_fp16, s1_bf16, s3_bf16, s2_groups, s3_groups, one_rank,
    one_rank_s3, s0_bf16, s0_groups, s0_frozen, s0_sgd, s1_bf16_f32_gradients, s1_frozen, s2_frozen,
    s3_frozen, s2_sgd, s3_adagrad, s2_adagrad, s2_lion, s2_round_robin, s2_aligned, s2_elastic,
    s2_offload, s3_fp16, p2_s0, p2_s0_untied, p2_s1, p2_s1_frozen, p3_s0_fp16, p3_s1_bf16,
}

//= deepspeed 0.19.8 runtime/pipe/module.py ckpt_layer_path
/// The embedding and the output layer have the same names and shapes.
#[test]
fn layers_of_an_untied_pipeline_are_found_in_the_model() {
    let checkpoint = DeepSpeedCheckpoint::open(&data().join("p2_s0_untied"), None).unwrap();
    let prefixes = ["wte.", "wpe.", "h.0.", "h.1.", "ln_f.", "lm_head."];
    let in_model = |name: &str| {
        let (layer, name) = name.split_once('.').unwrap();
        format!("{}{name}", prefixes[layer.parse::<usize>().unwrap()])
    };
    let mut parameters: Vec<_> = checkpoint.parameters().iter().collect();
    parameters.sort_by_key(|it| it.name.split_once('.').unwrap().0.to_owned());
    let names: Vec<_> = parameters.iter().map(|it| in_model(&it.name)).collect();
    let model: Vec<_> =
        names.iter().zip(&parameters).map(|(name, it)| (name.as_str(), &it.shape[..])).collect();
    let found = checkpoint.layers_in_model(&model).unwrap();
    for (name, parameter) in names.iter().zip(parameters) {
        assert_eq!(found[name.as_str()].name, parameter.name, "{name}");
    }
}
