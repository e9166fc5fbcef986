//! Fuzzing of training checkpoints: the states are mutated and the checksum of the manifest is
//! corrected. Loading is refused or training continues, and nothing panics.
//!
//! CONTRIBUTING.md has the command of the long run.

use std::fs;
use std::path::Path;
use std::time::Duration;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Distribution, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn_checkpoint::Checkpoint;
use deepburn_comm::{FailureCause, run_ranks};
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_fuzz::{SeedCorpus, fuzz, patched, replay, scratch_folder};
use deepburn_learner::{Engine, LoadPlan, SaveRequest, TrainingCheckpointError, initialize};
use deepburn_zero::{Group, Training};
use serde_json::json;

type Trained = Training<Flex>;
type Trainer = Engine<Flex, Linear<Trained>>;

/// The text of a manifest between its fields and its checksum.
const SEAL: &str = ",\n  \"checksum\": \"";

/// Returns a plan in fp16 with two micro-batches per step, so that checkpoints contain a loss scale
/// and gradients of a step in progress.
fn plan() -> Plan {
    let config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": true, "initial_scale_power": 8, "loss_scale_window": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}},
        "zero_optimization": {"stage": 2},
    });
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(1)).unwrap().plan
}

fn train(engine: &mut Trainer, micro_batches: usize) -> Result<(), TrainingCheckpointError> {
    for _ in 0..micro_batches {
        let loss = engine.forward(|net| {
            let input = Tensor::<_, 2>::random([2, 3], Distribution::Default, &FlexDevice);
            let output = net.forward(input.cast(net.weight.val().dtype())).cast(DType::F32);
            output.powf_scalar(2.0).mean()
        })?;
        engine.backward(loss)?;
        engine.step()?;
    }
    Ok(())
}

/// Runs `body` with an engine. Errors are allowed, panics are not.
fn with_engine(body: impl Fn(&mut Trainer) -> Result<(), TrainingCheckpointError> + Sync) {
    let outcome = run_ranks(1, Duration::from_secs(60), |member| {
        let net = LinearConfig::new(3, 2).init(&FlexDevice);
        let mut engine = initialize(net, &plan(), Group::new(member))?;
        engine.seed(11);
        body(&mut engine)
    });
    if let Err(failure) = outcome {
        assert!(!matches!(failure.cause, FailureCause::Panic { .. }), "{failure}");
    }
}

/// Saves a checkpoint in the middle of an accumulation, and returns the text of its manifest before
/// the checksum.
fn save(root: &Path) -> String {
    with_engine(|engine| {
        train(engine, 3)?;
        engine.size_next_step(4, 1.0);
        engine.save_checkpoint(root, SaveRequest::default())?;
        Ok(())
    });
    let manifest = fs::read_to_string(root.join("step-00000001/manifest.json")).unwrap();
    manifest.rsplit_once(SEAL).unwrap().0.to_owned()
}

#[test]
fn fuzzed_training_states_are_refused_or_trained_on() {
    let root = scratch_folder();
    let fields = save(root.path());
    let folder = root.path().join("step-00000001");
    // The positions of the engine's state and the rank's state. Each ends at the client state.
    let parts = ["\"progress\": {", "\"random\": {"].map(|start| fields.find(start).unwrap());
    let corpus = SeedCorpus::of_crate(env!("CARGO_MANIFEST_DIR"));
    let with = |patch: &[u8]| patched(format!("{fields}\n}}").as_bytes(), patch);
    let resume = |manifest: &[u8]| {
        let mut text = manifest.strip_suffix(b"\n}").unwrap_or(manifest).to_vec();
        let checksum = blake3::hash(&text);
        text.extend(format!("{SEAL}{checksum}\"\n}}\n").into_bytes());
        fs::write(folder.join("manifest.json"), text).unwrap();
        let Ok(checkpoint) = Checkpoint::open(&folder, None) else { return };
        with_engine(|engine| {
            engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
            train(engine, 3)
        });
    };
    replay(&corpus, |patch| resume(&with(&patch.bytes)));
    fuzz(500, |mutator| {
        if let Some(patch) = corpus.sometimes(mutator) {
            let mut manifest = with(&patch.bytes);
            mutator.mutate_json(&mut manifest);
            return resume(&manifest);
        }
        let start = *mutator.pick(&parts);
        let len = fields[start..].find("\"client\"").unwrap();
        let mut state = fields.as_bytes()[start..start + len].to_vec();
        mutator.mutate_json(&mut state);
        let mut text = fields.as_bytes().to_vec();
        text.splice(start..start + len, state);
        resume(&text);
    });
}
