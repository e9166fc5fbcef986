//! Tests of monitors, profiles, the FLOPs profiler and plots of several runs.

use std::fs;

use serde_json::{Value, json};

use crate::job::Job;
use crate::program::deepburn;

/// The tiny GPT-2: 3 layers of width 48, 512 tokens.
const LAYERS: u64 = 3;
const WIDTH: u64 = 48;
const VOCABULARY: u64 = 512;

#[test]
fn monitors_have_a_point_for_every_step() {
    let section = json!({"enabled": true, "job_name": "tiny"});
    let job = Job::tiny()
        .with("deepspeed.tensorboard", section.clone())
        .with("deepspeed.csv_monitor", section)
        .with("data.splits", json!({"train": "90%", "eval": "10%"}));
    let trained = job.train();
    let folder = job.folder().join("output/tiny");
    let text = fs::read_to_string(folder.join("Train_Samples_train_loss.csv")).unwrap();
    let rows: Vec<(u64, f64)> = text
        .lines()
        .skip(1)
        .map(|line| {
            let (samples, loss) = line.split_once(',').unwrap();
            (samples.parse().unwrap(), loss.parse().unwrap())
        })
        .collect();
    // 2 ranks, 2 micro-batches of 2 sequences.
    let expected: Vec<(u64, f64)> =
        trained.steps.iter().map(|row| (8 * row.step, row.loss)).collect();
    assert_eq!(rows, expected);
    assert!(!folder.join("Train_Samples_loss_scale.csv").exists(), "only fp16 has one");
    let evaluations = fs::read_to_string(folder.join("Eval_Samples_eval_loss.csv")).unwrap();
    assert_eq!(evaluations.lines().count(), 1 + trained.evaluations.len());
    let events = fs::read_dir(folder).unwrap().filter(|file| {
        file.as_ref().unwrap().file_name().to_string_lossy().starts_with("events.out.tfevents.")
    });
    assert_eq!(events.count(), 1);
}

/// The format is tested in `deepburn-monitor`.
#[test]
fn a_wandb_run_is_written_and_continued() {
    let job = Job::tiny()
        .with("training.report_to", json!(["wandb"]))
        .with("training.save_steps", 2)
        .with("data.splits", json!({"train": "80%", "eval": "10%", "test": "10%"}));
    let wandb = job.folder().join("output/wandb");
    let folders = || {
        let folders = fs::read_dir(&wandb).unwrap();
        let names = folders.map(|it| it.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let log = |folder: &str| {
        let id = folder.rsplit_once('-').unwrap().1;
        let bytes = fs::read(wandb.join(folder).join(format!("run-{id}.wandb"))).unwrap();
        assert!(bytes.starts_with(b":W&B"));
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let ending = job.run().succeeded();
    let [first] = &folders()[..] else { panic!("{:?}", folders()) };
    assert!(
        ending.stderr.contains(&format!("wandb sync output/wandb/{first}")),
        "{}",
        ending.stderr
    );
    let written = log(first);
    for part in
        ["train/loss", "train/grad_norm", "eval/loss", "test/loss", "max_steps", "deepspeed"]
    {
        assert!(written.contains(part), "no {part}");
    }
    assert!(!written.contains("train/loss_scale"), "only fp16 has one");

    let ending = crate::resume::resume(&job, &["step-00000002"]).succeeded();
    let both = folders();
    let id = first.rsplit_once('-').unwrap().1;
    assert!(both.len() == 2 && both.iter().all(|folder| folder.ends_with(id)), "{both:?}");
    assert!(ending.stderr.contains("wandb sync output/wandb\n"), "{}", ending.stderr);
    assert!(log(&both[0]).len() < written.len(), "repeated rows are removed");
    assert!(log(&both[1]).contains("train/loss"));
}

#[test]
fn a_profile_has_the_phases_and_collectives_of_every_rank() {
    let profiling = json!({"enabled": true, "profile_steps": [2, 3], "output_folder": "profile"});
    let tiny = || Job::tiny().zero("stage3_param_persistence_threshold", 0);
    let job = tiny().with("deepspeed.profiling", profiling);
    let plain = tiny().train();
    assert_eq!(job.train().numbers(), plain.numbers());
    let text = fs::read_to_string(job.folder().join("profile/trace.json")).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |name: &str| {
        events.iter().filter(|event| event["name"] == name && event["ph"] == "X").count()
    };
    // 2 ranks, 2 steps, 2 micro-batches.
    assert_eq!([count("step"), count("data"), count("optimizer step")][..], [4, 4, 4][..]);
    assert_eq!((count("forward"), count("backward")), (8, 8));
    let collectives = [count("all_gather"), count("reduce_scatter")];
    // Each pass has all-gathers and reductions on each rank.
    assert!(collectives.iter().all(|count| *count >= 8), "{collectives:?}");
    let named =
        |name: &str| events.iter().any(|event| event["ph"] == "M" && event["args"]["name"] == name);
    assert!(named("rank 0") && named("rank 1"));
    let memory = fs::read_to_string(job.folder().join("profile/memory.csv")).unwrap();
    // Three phases of each micro-batch.
    assert!(memory.lines().count() > 2 * 2 * 2 * 3, "{memory}");
    assert!(job.folder().join("profile/memory.html").exists());
}

/// The FLOPs of the model's products, computed by hand: the projections, the two products of
/// attention, and the output layer on the positions that predict a token. Backward has twice as
/// many.
#[test]
fn operations_match_the_formula_at_every_stage() {
    let (rows, length) = (2 * 32, 32);
    let projections = 2 * rows * LAYERS * 12 * WIDTH * WIDTH;
    let attention = LAYERS * 2 * 2 * (rows * length) * WIDTH;
    let head = 2 * 2 * (length - 1) * WIDTH * VOCABULARY;
    // 2 micro-batches per step.
    let forward = 2 * (projections + attention + head);
    for stage in [0, 3] {
        let section = json!({
            "enabled": true, "profile_step": 2, "output_file": "flops/tiny.txt",
            "peak_tflops": 0.1,
        });
        let job = Job::tiny().with("deepspeed.flops_profiler", section).sharded(stage, 2);
        job.train();
        let text = fs::read_to_string(job.folder().join("flops/tiny.txt")).unwrap();
        assert!(text.contains("step 2"), "{text}");
        for operations in [forward, 2 * forward, 2 * (projections + attention) / LAYERS] {
            let shown = format!("{:.2} MFLOP", operations as f64 / 1e6);
            assert!(text.contains(&shown), "{shown}\n{text}");
        }
        assert!(text.contains("MFU"), "{text}");
    }
}

/// The error is reported before training, and nothing is written to the invalid paths.
#[test]
fn unwritable_paths_are_refused() {
    let job = || Job::tiny().with("data.splits", json!({"train": "90%", "test": "10%"}));
    let enabled = |key: &str, value: &str| json!({"enabled": true, key: value});
    let profile =
        |folder: &str| json!({"enabled": true, "profile_steps": [1, 2], "output_folder": folder});
    for (section, value, parts) in [
        (
            "csv_monitor",
            enabled("job_name", "test.json"),
            &["csv_monitor", "its own test.json"][..],
        ),
        ("tensorboard", enabled("job_name", "model"), &["tensorboard", "its own model"]),
        ("tensorboard", enabled("output_path", "job.json"), &["tensorboard", "job.json"]),
        ("csv_monitor", enabled("job_name", "wandb"), &["csv_monitor", "its own wandb"]),
        ("profiling", profile("/proc/x"), &["profiling.output_folder", "/proc/x"]),
        ("profiling", profile("output/model/p"), &["profiling", "its own model"]),
        ("flops_profiler", enabled("output_file", "job.json"), &["output_file", "the job file"]),
        (
            "flops_profiler",
            enabled("output_file", "output/metrics.jsonl"),
            &["its own metrics.jsonl"],
        ),
        ("flops_profiler", enabled("output_file", "/proc/x/f"), &["output_file", "/proc/x/f"]),
    ] {
        let job = job().with(&format!("deepspeed.{section}"), value);
        let ending = job.run().failed(2, parts);
        assert!(!job.folder().join("output/metrics.jsonl").exists(), "{}", ending.stderr);
        let kept = fs::read_to_string(job.folder().join("job.json")).unwrap();
        assert_eq!(kept, job.json().to_string());
    }
}

#[test]
fn plots_several_runs() {
    let folder = tempfile::tempdir().unwrap();
    for (name, rate) in [("fast", 1e-2), ("slow", 1e-3)] {
        let job = Job::tiny().with("deepspeed.optimizer.params.lr", rate);
        job.train();
        fs::create_dir(folder.path().join(name)).unwrap();
        let from = job.folder().join("output/metrics.jsonl");
        fs::copy(from, folder.path().join(name).join("metrics.jsonl")).unwrap();
    }
    let ending = deepburn(folder.path(), &["plot", "fast", "slow", "--output", "both.html"]);
    ending.succeeded();
    let page = fs::read_to_string(folder.path().join("both.html")).unwrap();
    assert!(page.contains("fast") && page.contains("slow") && page.contains("<svg"));
    let ending = deepburn(folder.path(), &["plot", "fast", "nowhere"]);
    ending.failed(2, &["nowhere"]);
    let ending = deepburn(folder.path(), &["plot", "fast", "--output", "fast/metrics.jsonl"]);
    ending.failed(2, &["--output", "fast/metrics.jsonl", ".html"]);
    assert!(!folder.path().join("plot.html").exists());
}
