//! Backends other than the CPU's own, those that this build has.
//!
//! `cargo test --release --workspace --features wgpu --test programs backends` (a software device of
//! Vulkan will do); likewise `--features tch` and `--features cuda`.

#[cfg(feature = "wgpu")]
mod host_optimizer;

use deepburn::metrics::StepRow;
use serde_json::json;

use crate::job::{Job, STAGES, Trained};
use crate::resume::{long, same_in_pieces};

/// Names of all backends.
const ALL: [&str; 4] = ["flex", "wgpu", "cuda", "tch"];

/// Whether this build has a backend.
#[allow(clippy::match_like_matches_macro)] // The arms are constants of one build only.
fn compiled(backend: &str) -> bool {
    match backend {
        "wgpu" => cfg!(feature = "wgpu"),
        "cuda" => cfg!(feature = "cuda"),
        "tch" => cfg!(feature = "tch"),
        _ => true,
    }
}

/// The backends of this build.
pub(crate) fn backends() -> impl Iterator<Item = &'static str> {
    ALL.into_iter().filter(|backend| compiled(backend))
}

/// Backends other than flex.
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

/// Activations of a device wait in host memory, and the numbers stay what they are.
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

/// A GPT-2 of two layers in which no size is even, from seeded weights.
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

/// Orders of addition that differ leave some 1e-6 of a loss of 5 a step, and AdamW's first steps
/// amplify them.
#[track_caller]
fn near(row: &StepRow, expected: &StepRow, what: &str) {
    let what = format!("{what}: {row:?} {expected:?}");
    assert!((row.loss - expected.loss).abs() < 1e-4, "{what}");
    let [norm, expected] = [row, expected].map(|row| row.grad_norm.unwrap());
    assert!((norm - expected).abs() < 1e-3 * expected, "{what}");
}

/// As on flex, for a number of ranks.
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

/// A checkpoint that was saved in the background resumes to the same result.
#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion depends on earlier ops")]
fn interrupted_runs_resume_to_the_bit() {
    for backend in others() {
        same_in_pieces(backend, true, || long().sharded(3, 2).with("training.backend", backend));
    }
}

/// 16 bits where the device has them; where not, a message that says so.
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
                // 8 bits of precision in bf16, rounded in other places.
                assert!((row.loss - expected.loss).abs() < 2e-2, "{row:?} {expected:?}");
            }
        }
    }
}
