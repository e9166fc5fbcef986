//! Tests of the other backends that are compiled in: wgpu, tch and cuda.
//!
//! Run them with `cargo test --release --workspace --features wgpu --test programs backends`, or
//! with `--features tch` or `--features cuda`. For wgpu, a software Vulkan device is enough.

#[cfg(feature = "wgpu")]
mod attention;
#[cfg(feature = "wgpu")]
mod host_optimizer;
#[cfg(feature = "wgpu")]
mod reductions;
#[cfg(feature = "wgpu")]
mod row_kernels;

use std::fs;
use std::path::Path;

use deepburn::metrics::StepRow;
use serde_json::json;

use crate::job::{Job, STAGES, Trained, golden, tensors};
use crate::resume::{long, same_in_pieces};

/// Names of all backends.
const ALL: [&str; 4] = ["flex", "wgpu", "cuda", "tch"];

/// Returns whether a backend is compiled in.
#[allow(clippy::match_like_matches_macro)] // The arms are constants of one build only.
fn compiled(backend: &str) -> bool {
    match backend {
        "wgpu" => cfg!(feature = "wgpu"),
        "cuda" => cfg!(feature = "cuda"),
        "tch" => cfg!(feature = "tch"),
        _ => true,
    }
}

/// Returns whether this machine has an NVIDIA GPU: its driver's device, or the device of Windows in
/// its Linux.
pub(crate) fn has_nvidia_gpu() -> bool {
    cfg!(not(target_os = "linux"))
        || ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists())
}

/// Returns the backends that are compiled in and have a device. Without an NVIDIA GPU, `cuda` is
/// tested by `null_cuda` alone.
pub(crate) fn backends() -> impl Iterator<Item = &'static str> {
    let is_skipped = compiled("cuda") && !has_nvidia_gpu();
    if is_skipped {
        eprintln!("skipped: cuda: this machine has no NVIDIA GPU");
    }
    let has_device = move |backend: &&str| *backend != "cuda" || !is_skipped;
    ALL.into_iter().filter(|backend| compiled(backend)).filter(has_device)
}

/// Returns the backends that are compiled in and have a device, except flex.
fn others() -> impl Iterator<Item = &'static str> {
    backends().filter(|backend| *backend != "flex")
}

/// Trains on a backend. Ranks of one process share its devices.
fn on(job: Job, backend: &str, stage: u8, ranks: usize) -> Trained {
    job.sharded(stage, ranks).with("training.backend", backend).train()
}

#[test]
fn a_backend_that_is_not_compiled_in_names_its_feature() {
    for backend in ALL.into_iter().filter(|backend| !compiled(backend)) {
        let ending = Job::tiny().with("training.backend", backend).run();
        ending.failed(2, &["training.backend", backend, &format!("--features {backend}")]);
    }
}

/// Activations of a device can be offloaded to host memory without changing the numbers.
#[test]
#[cfg_attr(feature = "fusion", ignore = "with fusion nothing is offloaded")]
fn activations_of_a_device_wait_on_the_host() {
    for backend in others().filter(|backend| *backend != "tch") {
        for (stage, ranks, policy) in [(0, 1, "full"), (3, 2, "selective")] {
            let train = |section: serde_json::Value| {
                let job = Job::uneven().with("deepspeed.activation_checkpointing", section);
                on(job, backend, stage, ranks)
            };
            let plain = train(json!({"policy": policy}));
            let offloaded =
                train(json!({"policy": policy, "cpu_checkpointing": true, "offload_threshold": 0}));
            let what = format!("{backend}, stage {stage}, {policy}");
            assert_eq!(offloaded.numbers(), plain.numbers(), "{what}");
            let host = |trained: &Trained| trained.steps[1].memory.host_peak;
            assert_eq!(host(&plain), 0, "{what}");
            assert!(host(&offloaded) > 0, "{what}: nothing was offloaded");
        }
    }
}

#[test]
fn missing_devices_are_refused_by_index() {
    for backend in backends() {
        let job = Job::tiny().with("training.backend", backend);
        let ending = job.with("training.devices", vec![0, 999]).run();
        ending.failed(2, &["training.devices", "999", backend, "\"auto\""]);
    }
}

/// Trains a randomly initialized GPT-2 of two layers with odd sizes.
#[test]
fn two_layers_learn_as_on_flex() {
    for backend in others() {
        for ranks in [1, 2] {
            let flex = on(Job::uneven(), "flex", 0, ranks);
            let other = on(Job::uneven(), backend, 0, ranks);
            for (row, expected) in other.steps.iter().zip(&flex.steps) {
                near(row, expected, &format!("{backend}, {ranks} ranks"));
            }
        }
    }
}

/// A device drops the elements that flex drops, also when activations are computed again.
#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion depends on earlier ops")]
fn dropout_drops_the_elements_of_flex() {
    let job = || {
        let probabilities = ["embd_pdrop", "resid_pdrop", "attn_pdrop"];
        probabilities
            .iter()
            .fold(Job::uneven(), |job, it| job.with(&format!("model.config.{it}"), 0.2))
    };
    for backend in others() {
        let flex = on(job(), "flex", 0, 1);
        let other = on(job(), backend, 0, 1);
        for (row, expected) in other.steps.iter().zip(&flex.steps) {
            near(row, expected, backend);
        }
        let full = json!({"policy": "full"});
        let again = on(job().with("deepspeed.activation_checkpointing", full), backend, 0, 1);
        assert_eq!(again.numbers(), other.numbers(), "{backend}");
    }
}

/// Another order of additions changes a loss of 5 by about 1e-6 per step, and the first steps of
/// AdamW amplify the difference.
#[track_caller]
fn near(row: &StepRow, expected: &StepRow, what: &str) {
    let what = format!("{what}: {row:?} {expected:?}");
    assert!((row.loss - expected.loss).abs() < 1e-4, "{what}");
    let [norm, expected] = [row, expected].map(|row| row.grad_norm.unwrap());
    assert!((norm - expected).abs() < 1e-3 * expected, "{what}");
}

/// Documents of a packed sequence train as if each were a sequence of its own. A step of gradient
/// descent shows all gradients; its rate is so large that rounding the weights hides nothing.
#[test]
fn packed_documents_train_as_if_alone() {
    const RATE: f64 = 1000.0;
    let Some(golden) = golden("llm") else { return };
    // Mistral has windows that are shorter than the documents.
    let models = ["qwen2", "mistral_window"];
    for (backend, model) in backends().flat_map(|it| models.map(|model| (it, model))) {
        // Relative to the largest element of a gradient. The sums over positions have another
        // order. The largest difference that was seen on flex is 4e-7. Kernels of devices are
        // chosen at run time, with an order of their own: 1e-6 to 5e-6 on wgpu in software. A token
        // of another document would change more than 1e-3.
        let bound = if backend == "flex" { 1e-6 } else { 1e-5 };
        let folder = golden.join("models").join(model);
        let train = |packing: bool| {
            let trained = Job::tiny()
                .with("model.pretrained", json!(folder))
                .with(
                    "data",
                    json!({
                        "kind": "chat", "path": golden.join("sft/data/messages.jsonl"), "packing": packing,
                        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
                    }),
                )
                .with("training.max_steps", 1)
                .with("deepspeed.train_micro_batch_size_per_gpu", 12)
                .with("deepspeed.gradient_accumulation_steps", 1)
                .with("deepspeed.gradient_clipping", 0.0)
                .with("deepspeed.optimizer", json!({"type": "SGD", "params": {"lr": RATE}}));
            on(trained, backend, 0, 1)
        };
        let (packed, alone) = (train(true), train(false));
        let [step, expected] = [&packed, &alone].map(|it| &it.steps[0]);
        let loss = f64::from(bound) * expected.loss;
        assert!((step.loss - expected.loss).abs() < loss, "{step:?} {expected:?}");
        let before = tensors(&fs::read(folder.join("model.safetensors")).unwrap());
        for (((name, before), (_, packed)), (_, alone)) in
            before.iter().zip(packed.tensors()).zip(alone.tensors())
        {
            let distance = |left: &[f32], right: &[f32]| {
                left.iter()
                    .zip(right)
                    .fold(0.0_f32, |most, (left, right)| most.max((left - right).abs()))
            };
            let (difference, size) = (distance(&packed, &alone), distance(before, &alone));
            assert!(
                difference <= bound * size,
                "{backend}, {model}, {name}: {difference} of {size}"
            );
        }
    }
}

/// For a fixed number of ranks, all stages have the same bits, as on flex.
#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion depends on earlier ops")]
fn stages_agree_to_the_bit() {
    for backend in others() {
        for job in [Job::tiny, Job::uneven] {
            let plain = on(job(), backend, 0, 2);
            for stage in STAGES {
                let other = on(job(), backend, stage, 2);
                let same = other.numbers() == plain.numbers();
                assert!(same, "{backend}, stage {stage}:\n{other:?}\n{plain:?}");
            }
        }
    }
}

/// Resuming from a checkpoint that was saved asynchronously gives the same result.
#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion depends on earlier ops")]
fn interrupted_runs_resume_to_the_bit() {
    for backend in others() {
        same_in_pieces(backend, true, || long().sharded(3, 2).with("training.backend", backend));
    }
}

/// A device either supports a 16-bit type, or the error names the key of the type.
#[test]
fn sixteen_bits_train_or_are_refused_by_name() {
    for backend in others() {
        for precision in ["fp16", "bf16"] {
            let job = |backend: &str| {
                Job::uneven()
                    .with("training.backend", backend)
                    .with(&format!("deepspeed.{precision}.enabled"), true)
            };
            let Some(other) = job(backend).train_if_typed() else { continue };
            for (row, expected) in other.steps.iter().zip(&job("flex").train().steps) {
                // bf16 has 8 bits of precision, and other backends round at other operations.
                assert!((row.loss - expected.loss).abs() < 2e-2, "{row:?} {expected:?}");
            }
        }
    }
}
