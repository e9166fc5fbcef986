//! The same job on another backend than flex. Needs the backend's feature, and a device (software
//! Vulkan will do for wgpu).
#![cfg(any(feature = "wgpu", feature = "tch"))]

use serde_json::json;

use crate::job::{Job, STAGES};

const BACKENDS: &[&str] = &[
    #[cfg(feature = "wgpu")]
    "wgpu",
    #[cfg(feature = "tch")]
    "tch",
];

/// A 2-layer GPT-2 with sizes that nothing divides, at 1 and 2 ranks and every stage: other kernels,
/// so other orders of addition, but nothing more; and on one backend the same bits at each stage.
#[test]
fn a_small_gpt2_learns_what_it_learns_on_flex() {
    for backend in BACKENDS {
        for ranks in [1, 2] {
            let flex = Job::uneven().sharded(0, ranks).train();
            let on = |stage| {
                let job = Job::uneven().with("training.backend", *backend);
                job.sharded(stage, ranks).train()
            };
            let plain = on(0);
            for (row, expected) in plain.steps.iter().zip(&flex.steps) {
                let what = format!("{backend}, {ranks} ranks: {row:?} {expected:?}");
                // Four steps of lr 1e-2 on sums of some hundred f32 products.
                assert!((row.loss - expected.loss).abs() < 1e-4, "{what}");
                let (norm, expected) = (row.grad_norm.unwrap(), expected.grad_norm.unwrap());
                assert!((norm - expected).abs() < 1e-3 * expected, "{what}");
            }
            for stage in STAGES {
                assert!(
                    on(stage).numbers() == plain.numbers(),
                    "{backend}, stage {stage}, {ranks} ranks"
                );
            }
        }
    }
}

/// 16 bits where the device has them; where not, a message that says so.
#[test]
fn sixteen_bits_train_or_are_refused_by_name() {
    for backend in BACKENDS {
        for precision in ["fp16", "bf16"] {
            let job = |backend: &str| {
                Job::uneven()
                    .with("training.backend", backend)
                    .with(&format!("deepspeed.{precision}"), json!({"enabled": true}))
            };
            let other = job(backend);
            let ending = other.run();
            if ending.status != Some(0) {
                ending.failed(2, &[&format!("{precision}.enabled"), "does not compute in"]);
                continue;
            }
            let (flex, other) = (job("flex").train(), other.train());
            for (row, expected) in other.steps.iter().zip(&flex.steps) {
                // 8 bits of precision in bf16, rounded in other places.
                assert!((row.loss - expected.loss).abs() < 2e-2, "{row:?} {expected:?}");
            }
        }
    }
}
