//! Tests that rank processes started by mpirun compute the same bits as rank threads.
//!
//! Run them with
//! `cargo test --release --workspace --features deepburn-cli/mpi --test programs processes`. They
//! need Open MPI. Without its `mpirun`, the tests print that they are skipped.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::backends::backends;
use crate::batches::budgeted;
use crate::deepspeed;
use crate::determinism::{dropout, fp16};
use crate::hybrid::{replicated, secondary};
use crate::job::{Job, STAGES, Trained, left};
use crate::one_bit::compressed;
use crate::program::{Ending, finetune_processes};
use crate::recomputing::{in_precision, recomputed};
use crate::resume::{STEPS, assert_same, checkpoints, long, resume};
use crate::reviews::test_record;
use crate::swapping::all_swapped;
use crate::traces::{self, BF16, FP16, FP32, Nearness, assert_near};

/// Returns whether processes can be started. If not, prints that the test is skipped.
fn can_launch() -> bool {
    let version = Command::new("mpirun").arg("--version").output();
    let can = version.is_ok_and(|it| String::from_utf8_lossy(&it.stdout).contains("Open MPI"));
    if !can {
        eprintln!("skipped: there is no mpirun of Open MPI");
    }
    can
}

/// Runs the job as `processes` processes.
fn launch(job: &Job, processes: usize, more: &[&str]) -> Ending {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    finetune_processes(job.folder(), processes, &[&["--config", "job.json"], more].concat())
}

/// Trains with one process per rank of the job, in the folder `output`.
#[track_caller]
fn train(job: &Job, more: &[&str]) -> Trained {
    let ranks = job.json()["training"]["ranks"].as_u64().unwrap() as usize;
    launch(job, ranks, more).succeeded();
    Trained::read(&job.folder().join("output"))
}

/// Trains with threads and with processes, and checks that the results have the same bits.
#[track_caller]
fn same(job: &Job, what: &str) -> Trained {
    let output = job.folder().join("output");
    let outcome = |trained: Trained| {
        let test = output.join("test.json").exists().then(|| test_record(job));
        fs::remove_dir_all(&output).unwrap();
        (trained, test)
    };
    let (threads, test) = outcome(job.train());
    let (processes, other_test) = outcome(train(job, &[]));
    assert_same(&processes, &threads, what);
    assert_eq!(other_test, test, "{what}");
    processes
}

/// Returns a job with a precision. Every job has its own folder.
type Precision = fn() -> Job;

const PRECISIONS: [(&str, Precision); 3] = [
    ("fp32", || Job::uneven().with("data.shuffle", true)),
    ("bf16", || Job::tiny().with("deepspeed.bf16.enabled", true)),
    ("fp16", fp16),
];

/// Sizes of buckets, and whether communication overlaps with computation.
fn small_buckets(overlap: bool) -> Value {
    json!({
        "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 50, "overlap_comm": overlap,
    })
}

/// Compares a job with two micro-batches per step, dropout, clipping and a tied embedding.
#[track_caller]
fn same_at(stage: u8, (name, precision): (&str, Precision), ranks: usize, buckets: &Value) {
    let mut job = precision();
    for (key, value) in dropout().as_object().unwrap() {
        job = job.with(&format!("model.config.{key}"), value.clone());
    }
    for (key, value) in buckets.as_object().unwrap() {
        job = job.zero(key, value.clone());
    }
    let what = format!("{name}, stage {stage}, {ranks} processes, {buckets}");
    let trained = same(&job.sharded(stage, ranks), &what);
    let skipped = trained.steps.iter().filter(|row| row.skipped).count();
    assert_eq!(skipped > 0, name == "fp16", "{what}: {skipped} skipped");
    assert!(skipped < trained.steps.len(), "{what}");
}

/// All combinations of stage and precision, each with one number of ranks from 1 to 3.
#[test]
fn processes_and_threads_agree_to_the_bit() {
    if !can_launch() {
        return;
    }
    for stage in STAGES {
        for (index, precision) in PRECISIONS.into_iter().enumerate() {
            let number = stage as usize + index;
            let buckets = match number % 2 {
                0 => json!({}),
                _ => small_buckets(index == 0),
            };
            same_at(stage, precision, 1 + number % 3, &buckets);
        }
    }
}

/// All combinations. Run this test with `cargo test --release --workspace --features
/// deepburn-cli/mpi --test programs
/// -- --ignored all_processes`.
#[test]
#[ignore = "takes minutes: all stages, precisions, buckets and 1 to 4 ranks, and once 8"]
fn all_processes_and_threads_agree_to_the_bit() {
    if !can_launch() {
        return;
    }
    for precision in PRECISIONS {
        for buckets in [json!({}), small_buckets(true), small_buckets(false)] {
            for (stage, ranks) in STAGES.iter().flat_map(|&it| [1, 2, 3, 4].map(|n| (it, n))) {
                same_at(stage, precision, ranks, &buckets);
            }
        }
        same_at(3, precision, 8, &small_buckets(true));
    }
}

/// Model states are on NVMe, and activations are recomputed.
#[test]
fn processes_and_threads_agree_with_little_memory() {
    if !can_launch() {
        return;
    }
    for (ranks, precision) in [(1, None), (2, None), (3, Some("bf16")), (2, Some("fp16"))] {
        let policy = if ranks == 2 { "full" } else { "selective" };
        let job = recomputed(in_precision(precision), json!({"policy": policy}));
        let job = all_swapped(job.sharded(3, ranks), 0);
        same(&job, &format!("{ranks} processes, {precision:?}, {policy}"));
    }
}

#[test]
fn meshes_agree_with_threads_to_the_bit() {
    if !can_launch() {
        return;
    }
    for stage in STAGES {
        let trained = same(&replicated(stage), &format!("groups at stage {stage}"));
        assert!(!trained.steps.is_empty());
    }
    same(&secondary(), "hpZ");
}

/// Messages between stages, late rows of the tied embedding, and deferred weight gradients.
#[test]
fn pipelines_agree_with_threads_to_the_bit() {
    if !can_launch() {
        return;
    }
    let runs = [
        ("1f1b", 2, 1, 4, "fp32"),
        ("zb-h1", 2, 3, 4, "bf16"),
        ("gpipe", 3, 0, 3, "fp32"),
        ("zb-h1", 3, 0, 3, "fp32"),
    ];
    for (schedule, stages, zero, ranks, precision) in runs {
        let job = Job::uneven()
            .sharded(zero, ranks)
            .in_precision(precision)
            .with("deepspeed.gradient_accumulation_steps", 5)
            .with("training.pipeline_stages", stages)
            .with("training.pipeline_schedule", schedule);
        let what = format!("{schedule}, {stages} stages, ZeRO {zero}, {ranks} ranks, {precision}");
        assert!(!same(&job, &what).steps.is_empty(), "{what}");
    }
}

/// On other backends, tensors are sent through host memory.
#[test]
fn backends_agree_to_the_bit() {
    if !can_launch() {
        return;
    }
    for backend in backends().filter(|backend| *backend != "flex") {
        for stage in [2, 3] {
            let job = Job::tiny().sharded(stage, 2).with("training.backend", backend);
            same(&job.with("training.max_steps", 3), &format!("{backend}, stage {stage}"));
        }
    }
}

/// With dynamic batching, ranks have different numbers of samples. The job has an evaluation and a
/// test.
#[test]
fn classifiers_agree_to_the_bit() {
    if can_launch() {
        let job = budgeted(2).with("training.max_steps", 3).with("training.eval_steps", 2);
        let trained = same(&job, "dynamic batches");
        assert!(!trained.evaluations.is_empty());
    }
}

#[test]
fn processes_reproduce_the_traces_of_deepspeed() {
    if !can_launch() {
        return;
    }
    let traces: [(&str, Nearness); 4] =
        [("s0_n1", FP32), ("s3_n2_g2_clip", FP32), ("s2_n2_bf16", BF16), ("s1_n2_fp16", FP16)];
    for (name, nearness) in traces {
        let trace = traces::read(name);
        for stage in STAGES {
            let steps = train(&traces::job(&trace).zero("stage", stage), &[]).steps;
            let what = format!("{name} in processes at stage {stage}");
            assert_near(&steps, trace["rows"].as_array().unwrap(), &nearness, &what);
        }
    }
}

/// Removes the checkpoints after `step`, as if the run had ended there.
fn forget_after(job: &Job, step: u64) {
    for later in step + 1..=STEPS {
        let _ = fs::remove_dir_all(checkpoints(job).join(format!("step-{later:08}")));
    }
    let _ = fs::remove_file(checkpoints(job).join("latest"));
    fs::remove_dir_all(job.folder().join("output/model")).unwrap();
}

/// A run takes two steps with threads, two with processes and two with threads again, or the other
/// way round.
#[test]
fn a_run_changes_between_threads_and_processes() {
    if !can_launch() {
        return;
    }
    for (stage, ranks) in [(1, 2), (3, 4)] {
        let job = || long().sharded(stage, ranks);
        let straight = job().train();
        let job = job().with("training.save_steps", 2).with("training.async_save", stage == 1);
        let output = job.folder().join("output");
        let in_threads = |from: &str| {
            resume(&job, &[from]).succeeded();
            Trained::read(&output)
        };
        let in_processes = |from: &str| train(&job, &["--resume", from]);
        let same = |run: &Trained, what: &str| {
            assert_same(run, &straight, &format!("{what} at stage {stage} on {ranks} ranks"));
        };
        same(&job.train(), "threads");
        forget_after(&job, 2);
        same(&in_processes("step-00000002"), "threads, processes");
        forget_after(&job, 4);
        same(&in_threads("step-00000004"), "threads, processes, threads");

        fs::remove_dir_all(&output).unwrap();
        same(&train(&job, &[]), "processes");
        forget_after(&job, 2);
        same(&in_threads("step-00000002"), "processes, threads");
        forget_after(&job, 4);
        same(&in_processes("step-00000004"), "processes, threads, processes");
    }
}

/// A checkpoint of 4 threads resumes on 2 ranks, with the same bits for processes and threads.
#[test]
fn processes_resume_with_another_number_of_ranks() {
    if !can_launch() {
        return;
    }
    let job = long().with("training.save_steps", 2).sharded(3, 4);
    job.train();
    let job = job.sharded(2, 2);
    forget_after(&job, 2);
    resume(&job, &["step-00000002"]).succeeded();
    let threads = Trained::read(&job.folder().join("output"));
    forget_after(&job, 2);
    assert_same(&train(&job, &["--resume", "step-00000002"]), &threads, "2 processes of 4 threads");
}

#[test]
fn processes_resume_from_deepspeed_checkpoints() {
    if !can_launch() {
        return;
    }
    for (name, nearness) in [("s2", FP32), ("s3_bf16", BF16)] {
        let folder = deepspeed::small(name);
        let job = deepspeed::small_job(&folder);
        let steps = train(&job, &["--resume", folder.to_str().unwrap()]).steps;
        let trace = deepspeed::trace(&folder);
        assert_near(&steps, trace["resumed"].as_array().unwrap(), &nearness, name);
    }
}

/// With any number of processes there is one message, and nothing is written.
#[test]
fn invalid_jobs_of_processes_are_refused_once() {
    if !can_launch() {
        return;
    }
    let refused = |job: Job, more: &[&str], parts: &[&str]| {
        let ending = launch(&job, 3, more).failed(2, parts);
        assert!(!job.folder().join("output").exists(), "{}", ending.stderr);
    };
    let other_number = ["training.ranks", "is 2", "started 3 processes", "--ranks 3"];
    refused(Job::tiny(), &[], &other_number);
    refused(Job::tiny(), &["--ranks", "2"], &other_number);
    let unknown = Job::tiny().with("training.ranks", 3).with("deepspeed.train_batchsize", 1);
    refused(unknown, &[], &["train_batchsize", "train_batch_size"]);
    refused(Job::tiny(), &["--nonsense"], &["--nonsense"]);
}

/// Without `training.ranks`, the launcher sets the number of ranks. Only rank 0 prints and writes.
#[test]
fn the_launcher_sets_the_number_of_ranks() {
    if !can_launch() {
        return;
    }
    let job = Job::uneven().with("training.ranks", Value::Null);
    let output = job.folder().join("output");
    let ending = launch(&job, 3, &[]).succeeded();
    let processes = Trained::read(&output);
    assert_eq!(ending.stderr.matches("step 4/4").count(), 1, "{}", ending.stderr);
    assert_eq!(ending.stderr.matches("3 ranks, 4 steps").count(), 1, "{}", ending.stderr);
    assert_eq!(left(&output).len(), fs::read_dir(&output).unwrap().count());
    assert_same(&processes, &Job::uneven().sharded(3, 3).train(), "3 ranks");

    let help = finetune_processes(job.folder(), 3, &["--help"]).succeeded().stdout;
    assert_eq!(help.matches("Usage:").count(), 1, "{help}");
}

/// 1-bit Adam exchanges momenta before and after a change from threads to processes.
#[test]
fn processes_exchange_momenta_as_threads_do() {
    if !can_launch() {
        return;
    }
    same(&compressed(Job::uneven()), "1-bit Adam on 3 processes");
    let straight = compressed(long()).train();
    let job = compressed(long()).with("training.save_steps", 4);
    job.train();
    forget_after(&job, 4);
    let resumed = train(&job, &["--resume", "step-00000004"]);
    assert_same(&resumed, &straight, "1-bit Adam in threads, then in processes");
}
