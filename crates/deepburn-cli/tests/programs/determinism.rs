//! Tests that results have the same bits at every stage, with every bucket size, and in every run.

use serde_json::{Value, json};

use crate::job::{Job, STAGES};

pub(crate) fn dropout() -> Value {
    json!({"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1})
}

/// A constructor of a job. Every job has its own folder, so it has to be created for each run.
type NewJob = fn() -> Job;

/// Returns a job in fp16 whose first steps overflow, so that skipped steps are compared too.
pub(crate) fn fp16() -> Job {
    let fp16 = json!({"enabled": true, "initial_scale_power": 24, "hysteresis": 1});
    Job::uneven().with("deepspeed.fp16", fp16).with("training.max_steps", 9)
}

const KINDS: [(&str, NewJob); 7] = [
    ("bf16", || Job::uneven().with("deepspeed.bf16.enabled", true)),
    ("bf16, accumulated in bf16 with dropout", || {
        Job::tiny()
            .with("deepspeed.bf16.enabled", true)
            .with("deepspeed.data_types.grad_accum_dtype", "bf16")
            .with("model.config", dropout())
    }),
    ("fp16", fp16),
    ("tiny", Job::tiny),
    ("tiny with dropout", || Job::tiny().with("model.config", dropout())),
    ("uneven", || Job::uneven().with("data.shuffle", true)),
    ("uneven, untied", || Job::uneven().with("model.config.tie_word_embeddings", false)),
];

#[test]
fn stages_and_runs_agree_to_the_bit() {
    for (name, kind) in KINDS {
        for ranks in [2, 3, 4] {
            let plain = kind().sharded(0, ranks).train();
            assert!(plain.steps.iter().all(|row| row.loss.is_finite()), "{plain:?}");
            for stage in STAGES {
                let other = kind().sharded(stage, ranks).train();
                let same = other.numbers() == plain.numbers();
                assert!(same, "{name}, stage {stage}, {ranks} ranks:\n{other:?}\n{plain:?}");
            }
        }
    }
}

/// Returns keys of `zero_optimization` that affect communication but not the numbers.
fn ways_to_travel() -> Vec<Value> {
    vec![
        json!({"reduce_bucket_size": 1}),
        json!({"reduce_bucket_size": 1000, "overlap_comm": true}),
        json!({"reduce_bucket_size": 7001, "overlap_comm": false}),
        json!({"reduce_bucket_size": 50_000, "overlap_comm": true, "contiguous_gradients": false}),
        json!({"contiguous_gradients": false, "overlap_comm": false}),
        json!({"reduce_scatter": false}),
        json!({"reduce_scatter": false, "reduce_bucket_size": 333}),
        json!({"allgather_bucket_size": 2}),
        json!({"allgather_bucket_size": 5000}),
        json!({"sub_group_size": 100}),
        json!({"sub_group_size": 4097}),
        json!({"round_robin_gradients": true}),
        json!({"stage3_prefetch_bucket_size": 0}),
        json!({"stage3_prefetch_bucket_size": 3000}),
        json!({"stage3_param_persistence_threshold": 0}),
        json!({"stage3_param_persistence_threshold": 50}),
        json!({"stage3_param_persistence_threshold": 1_000_000}),
        json!({"stage3_param_persistence_threshold": 3000,
               "stage3_model_persistence_threshold": 4000}),
        json!({"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0}),
        json!({"stage3_max_live_parameters": 9000, "stage3_param_persistence_threshold": 0}),
        json!({"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}),
        json!({"stage3_max_reuse_distance": 12_000, "stage3_param_persistence_threshold": 0}),
        json!({"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0,
               "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
               "reduce_bucket_size": 1, "overlap_comm": true}),
        json!({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ]
}

#[test]
fn communication_settings_change_no_number() {
    let kind = || Job::uneven().with("model.config.resid_pdrop", 0.1);
    let plain = kind().sharded(0, 3).train();
    for keys in ways_to_travel() {
        for stage in [1, 2, 3] {
            let mut job = kind();
            for (key, value) in keys.as_object().unwrap() {
                job = job.zero(key, value.clone());
            }
            let other = job.sharded(stage, 3).train();
            let same = other.numbers() == plain.numbers();
            assert!(same, "{keys} at stage {stage}:\n{other:?}\n{plain:?}");
        }
    }
}

#[test]
fn the_seed_decides() {
    let with_seed = |seed: u64| Job::uneven().with("training.seed", seed).train();
    assert_ne!(with_seed(1).numbers(), with_seed(2).numbers());
}

/// Every rank has its own random numbers for dropout. Otherwise, ranks with the same sample would
/// drop the same elements.
#[test]
fn ranks_drop_differently() {
    let one_sample = |ranks: usize| {
        let job = Job::uneven().with("model.config.embd_pdrop", 0.5).sharded(2, ranks);
        let sample: Vec<u8> = (0..32 * 4).flat_map(|at| (at % 32_u16).to_le_bytes()).collect();
        std::fs::write(job.folder().join("uneven.bin"), sample).unwrap();
        let job = job.with("deepspeed.train_micro_batch_size_per_gpu", 1);
        job.with("deepspeed.gradient_accumulation_steps", 1).train().steps[0].loss
    };
    assert_ne!(one_sample(1), one_sample(2));
}
