//! Compares runs with traces of PyTorch and DeepSpeed on the same model, data and configuration.

use std::fs;

use deepburn::metrics::StepRow;
use serde_json::{Value, json};

use crate::backends::backends;
use crate::job::{Job, STAGES, Trained, data, golden};

/// Returns the job that must reproduce `trace`.
pub(crate) fn job(trace: &Value) -> Job {
    Job::tiny()
        .with("deepspeed", trace["ds"].clone())
        .with("data.sequence_length", trace["seq"].clone())
        .with("training.ranks", trace["world"].clone())
        // DeepSpeed applies weight decay to all parameters.
        .with("training.no_decay", "nothing")
        .with("training.max_steps", trace["rows"].as_array().unwrap().len())
}

/// The tolerances of a comparison with a trace. Learning rates, loss scales and skipped steps have
/// to be equal.
pub(crate) struct Nearness {
    pub(crate) loss: f64,
    /// Relative.
    pub(crate) norm: f64,
    /// Rows that are compared.
    pub(crate) steps: usize,
}

/// In fp32, only the order of additions differs over a dozen steps.
pub(crate) const FP32: Nearness = Nearness { loss: 1e-4, norm: 1e-3, steps: usize::MAX };

/// bfloat16 has 8 bits of precision, and products are rounded in another order than in PyTorch.
pub(crate) const BF16: Nearness = Nearness { loss: 5e-3, norm: 2e-2, steps: usize::MAX };

/// In bfloat16, PyTorch computes attention, norms and rotations in several rounded ops.
const BF16_DECODERS: Nearness = Nearness { loss: 5e-2, norm: 5e-2, steps: usize::MAX };

/// fp16 has 11 bits of precision. The loss scale first grows after step 12. From then on, DeepSpeed
/// divides the gradients of steps in which the scale grows by twice their scale.
pub(crate) const FP16: Nearness = Nearness { loss: 3e-3, norm: 1e-2, steps: 12 };

/// Reads the trace of this name.
pub(crate) fn read(name: &str) -> Value {
    let trace = fs::read_to_string(data(&format!("traces/{name}.json"))).unwrap();
    serde_json::from_str(&trace).unwrap()
}

fn reproduces(name: &str, nearness: Nearness) {
    for backend in backends() {
        for stage in STAGES {
            reproduces_on(backend, stage, name, &nearness);
        }
    }
}

fn reproduces_on(backend: &str, stage: u8, name: &str, nearness: &Nearness) {
    let trace = read(name);
    let expected = trace["rows"].as_array().unwrap();
    let job = job(&trace).zero("stage", stage).with("training.backend", backend);
    let Some(Trained { steps, .. }) = job.train_if_typed() else {
        return;
    };
    assert_near(&steps, expected, nearness, &format!("{name} on {backend} at stage {stage}"));
}

/// Compares the steps of a run with the rows of a trace.
#[track_caller]
pub(crate) fn assert_near(steps: &[StepRow], expected: &[Value], nearness: &Nearness, what: &str) {
    assert_eq!(steps.len(), expected.len(), "{what}");
    for (row, expected) in steps.iter().zip(expected).take(nearness.steps) {
        let number = |key: &str| expected[key].as_f64();
        let what = format!("{what}, step {}: {row:?}, expected {expected}", row.step);
        assert_eq!(Some(row.step as f64), number("step"), "{what}");
        assert!((row.loss - number("loss").unwrap()).abs() < nearness.loss, "{what}");
        assert!((row.lr - number("lr").unwrap()).abs() < 1e-9, "{what}");
        // The engine of DeepSpeed's pipelines shows neither the loss scale nor the norm.
        if let Some(scale) = number("loss_scale") {
            assert_eq!(row.loss_scale, scale, "{what}");
        }
        assert_eq!(Some(row.skipped), expected["skipped"].as_bool(), "{what}");
        assert_eq!(row.grad_norm.is_none(), row.skipped, "{what}");
        // DeepSpeed does not store the norm at stage 0.
        if let Some(norm) = number("grad_norm") {
            assert!((row.grad_norm.unwrap() - norm).abs() < nearness.norm * norm, "{what}");
        }
    }
}

//= torch 2.9.0 optim/adam.py _single_tensor_adam
#[test]
fn one_rank_without_sharding() {
    reproduces("s0_n1", FP32);
}

//= torch 2.9.0 nn/utils/clip_grad.py clip_grad_norm_
#[test]
fn two_ranks_with_accumulation_and_clipping() {
    reproduces("s3_n2_g2_clip", FP32);
}

#[test]
fn bf16() {
    reproduces("s2_n2_bf16", BF16);
}

#[test]
fn fp16_with_a_dynamic_scale() {
    reproduces("s1_n2_fp16", FP16);
}

/// Muon and LAMB. The gradients of most steps are clipped, and the learning rate warms up.
#[test]
fn optimizers_that_look_at_whole_tensors() {
    let traces = fs::read_to_string(data("optimizer_traces.json")).unwrap();
    let traces: Value = serde_json::from_str(&traces).unwrap();
    for name in ["muon", "lamb", "lamb_fast"] {
        let (trace, rows) = (&traces[name], traces[name]["rows"].as_array().unwrap());
        for backend in backends() {
            // On other backends only stage 3 is tested, because each run compiles the kernels of
            // the device again.
            let stages = if backend == "flex" { &STAGES[..] } else { &STAGES[3..] };
            for &stage in stages {
                let job = job(trace).zero("stage", stage).with("training.backend", backend);
                let Some(Trained { steps, .. }) = job.train_if_typed() else { continue };
                let what = format!("{name} on {backend} at stage {stage}");
                assert_near(&steps, rows, &FP32, &what);
            }
        }
    }
}

/// Llama and its kin. PyTorch and DeepSpeed train the models of `golden/llm`, which is beside the
/// folder that `DEEPBURN_TEST_DATA` names. All stages and numbers of ranks have the same trace.
#[test]
fn decoders_of_transformers() {
    let Some(golden) = golden("llm") else { return };
    for file in fs::read_dir(golden.join("traces")).unwrap() {
        let file = file.unwrap().path();
        let trace: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let model = golden.join("models").join(trace["model"].as_str().unwrap());
        let is_bf16 = trace["ds"]["bf16"]["enabled"] == true;
        for stage in [0, 3] {
            let job = job(&trace)
                .with("model", json!({ "pretrained": model }))
                .with("data.path", model.join("tokens.bin").display().to_string())
                .zero("stage", stage);
            let steps = job.train().steps;
            let nearness = if is_bf16 { BF16_DECODERS } else { FP32 };
            let what = format!("{} at stage {stage}", file.display());
            assert_near(&steps, trace["rows"].as_array().unwrap(), &nearness, &what);
        }
    }
}
