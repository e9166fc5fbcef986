//! Tests that runs which resume from a checkpoint have the same bits as uninterrupted runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use deepburn::checkpoint::{Checkpoint, StateKind};
use serde_json::{Value, json};

use crate::batches::budgeted;
use crate::job::{Job, STAGES, Trained, golden, tensors};
use crate::program::{Ending, deepburn, finetune, finetune_command};
use crate::reviews::test_record;

fn dropout() -> Value {
    json!({"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1})
}

pub(crate) fn checkpoints(job: &Job) -> PathBuf {
    job.folder().join("output/checkpoints")
}

fn tags(job: &Job) -> Vec<String> {
    let all = Checkpoint::all(&checkpoints(job)).unwrap();
    all.iter().map(|checkpoint| checkpoint.tag().to_string()).collect()
}

/// Resumes a job.
pub(crate) fn resume(job: &Job, more: &[&str]) -> Ending {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    finetune(job.folder(), &[&["--config", "job.json", "--resume"], more].concat())
}

/// Checks that losses, norms, loss scales and weights have the same bits. Weights are not printed.
#[track_caller]
pub(crate) fn assert_same(run: &Trained, expected: &Trained, what: &str) {
    assert_eq!(run.numbers().0, expected.numbers().0, "{what}");
    assert_eq!(run.evaluations, expected.evaluations, "{what}");
    assert!(run.weights == expected.weights, "{what}: the weights differ");
}

pub(crate) const STEPS: u64 = 6;

/// Returns a job of 6 steps with dropout, shuffling, a learning-rate schedule and an evaluation.
pub(crate) fn long() -> Job {
    Job::uneven()
        .with("data.shuffle", true)
        .with("data.splits", json!({"train": "90%", "eval": "10%"}))
        .with("model.config.resid_pdrop", 0.1)
        .with("training.max_steps", STEPS)
        .with("training.eval_steps", 2)
        .with(
            "deepspeed.scheduler",
            json!({"type": "WarmupDecayLR", "params": {
            "warmup_num_steps": 3, "total_num_steps": STEPS, "warmup_max_lr": 0.01}}),
        )
}

/// Checks that resuming from each checkpoint gives the same result as the uninterrupted run.
#[track_caller]
pub(crate) fn same_in_pieces(name: &str, asynchronous: bool, job: impl Fn() -> Job) {
    let straight = job().train();
    let job = job().with("training.save_steps", 2).with("training.async_save", asynchronous);
    assert_same(&job.train(), &straight, &format!("{name}: saving changes the run"));
    assert_eq!(tags(&job), ["step-00000002", "step-00000004", "step-00000006"]);
    for step in [4, 2] {
        // Later checkpoints are removed. metrics.jsonl still has the rows of their steps.
        for later in (step + 1..=STEPS).map(|step| format!("step-{step:08}")) {
            let _ = fs::remove_dir_all(checkpoints(&job).join(later));
        }
        let _ = fs::remove_file(checkpoints(&job).join("latest"));
        fs::remove_dir_all(job.folder().join("output/model")).unwrap();
        // A checkpoint can be given as its name or as its path.
        let folder = if step == 2 { "output/checkpoints/" } else { "" };
        resume(&job, &[&format!("{folder}step-{step:08}")]).succeeded();
        let resumed = Trained::read(&job.folder().join("output"));
        assert_same(&resumed, &straight, &format!("{name}: from step {step}"));
    }
}

#[test]
fn every_stage_and_precision_resumes_to_the_bit() {
    let precisions = [
        ("fp32", "fp32_is_the_default", json!(null)),
        ("bf16", "bf16", json!({"enabled": true})),
        // The first steps of fp16 overflow, and later steps double the loss scale again.
        (
            "fp16",
            "fp16",
            json!({"enabled": true, "initial_scale_power": 20, "hysteresis": 1,
                "loss_scale_window": 2}),
        ),
    ];
    for (name, key, section) in precisions {
        for stage in STAGES {
            // Half of the jobs save asynchronously.
            let asynchronous = stage % 2 == 1;
            same_in_pieces(&format!("{name}, stage {stage}"), asynchronous, || {
                let job = long().sharded(stage, 3);
                match section.is_null() {
                    true => job,
                    false => job.with(&format!("deepspeed.{key}"), section.clone()),
                }
            });
        }
    }
}

#[test]
fn the_tiny_language_model_resumes_to_the_bit() {
    same_in_pieces("tiny", true, || {
        Job::tiny()
            .with("model.config", dropout())
            .with("training.max_steps", STEPS)
            .with("data.shuffle", true)
    });
}

#[test]
fn dynamic_batching_resumes_to_the_bit() {
    same_in_pieces("dynamic batches", false, || {
        budgeted(2).with("training.max_steps", STEPS).with("training.epochs", 20)
    });
}

/// Returns a job that has saved a checkpoint after its last step and has a test split, with its
/// results.
fn finished(stage: u8, ranks: usize) -> (Job, Trained) {
    let job = long()
        .with("data.splits", json!({"train": "80%", "eval": "10%", "test": "10%"}))
        .with("deepspeed.train_micro_batch_size_per_gpu", 1)
        .with("training.save_steps", STEPS)
        .sharded(stage, ranks);
    let trained = job.train();
    (job, trained)
}

#[test]
fn any_number_of_ranks_and_stage_loads_the_same_model() {
    let (mut job, trained) = finished(3, 4);
    let loss = |job: &Job| test_record(job)["test_loss"].as_f64().unwrap();
    let expected = loss(&job);
    for stage in 0..3 {
        for ranks in [1, 2, 3, 5] {
            job = job.sharded(stage, ranks);
            fs::remove_dir_all(job.folder().join("output/model")).unwrap();
            resume(&job, &[]).succeeded();
            let weights = fs::read(job.folder().join("output/model/model.safetensors")).unwrap();
            assert!(weights == trained.weights, "stage {stage}, {ranks} ranks");
            // With other numbers of ranks, the loss is added up in another order.
            assert!((loss(&job) / expected - 1.0).abs() < 1e-6, "{} {expected}", loss(&job));
        }
    }
    // The loss has no jump when training continues.
    let job = job.with("training.max_steps", 2 * STEPS);
    let ending = resume(&job, &[]).succeeded();
    assert!(
        ending.stderr.contains("training.ranks changes from 4 in the checkpoint"),
        "{}",
        ending.stderr
    );
    let steps = Trained::read(&job.folder().join("output")).steps;
    assert_eq!(steps.len() as u64, 2 * STEPS);
    let losses: Vec<f64> = steps.iter().map(|row| row.loss).collect();
    let jump = losses[STEPS as usize] - losses[STEPS as usize - 1];
    assert!(jump.abs() < 0.3, "{losses:?}");
}

#[test]
fn a_damaged_checkpoint_is_refused_and_an_older_one_offered() {
    let job = long().with("training.save_steps", 2);
    let straight = job.train();
    let file = checkpoints(&job).join("step-00000006/rank-00001.safetensors");
    let whole = fs::read(&file).unwrap();
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 4;
    for bytes in [&damaged[..], &whole[..whole.len() - 1], &[]] {
        fs::write(&file, bytes).unwrap();
        let parts = ["--resume", "rank-00001.safetensors", "damaged", "step-00000004"];
        resume(&job, &[]).failed(2, &parts);
        deepburn(job.folder(), &["inspect", "output"]).failed(2, &parts[1..3]);
    }
    // Resuming from the suggested checkpoint gives the same result. The damaged one is kept under
    // another name.
    resume(&job, &["step-00000004"]).succeeded();
    assert_same(&Trained::read(&job.folder().join("output")), &straight, "from the older one");
    assert!(checkpoints(&job).join("step-00000006.damaged-1").is_dir());

    resume(&job, &["step-00000005"]).failed(2, &["step-00000005", "step-00000002"]);
    resume(&job, &["../no-such-run"]).failed(2, &["--resume", "../no-such-run", "no such folder"]);
    resume(&job, &["x y"]).failed(2, &["--resume", "x y", "bad tag"]);
    resume(&job, &["output"]).failed(2, &["--resume", "DeepBurn checkpoint", "--output-dir"]);
    resume(&Job::tiny(), &[]).failed(2, &["--resume", "no checkpoint"]);

    let foreign = checkpoints(&job).join("global_step7");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("mp_rank_00_model_states.pt"), "PK").unwrap();
    resume(&job, &["global_step7"]).failed(2, &["--resume", "global_step7", "DeepSpeed"]);
}

#[test]
fn earlier_checkpoints_are_never_overwritten() {
    let job = long().with("training.save_steps", 2);
    job.train();
    let before = fs::read(checkpoints(&job).join("step-00000002/manifest.json")).unwrap();
    job.run().failed(2, &["training.output_dir", "earlier run", "--resume"]);
    // A run that resumes from an older checkpoint logs a warning and keeps the newer checkpoints.
    let ending = resume(&job, &["step-00000002"]).succeeded();
    assert!(ending.stderr.contains("step-00000004, step-00000006 stay"), "{}", ending.stderr);
    let expected = ["02", "04", "04.2", "06", "06.2"].map(|end| format!("step-000000{end}"));
    assert_eq!(tags(&job), expected);
    let latest = Checkpoint::open_intact(&checkpoints(&job), None).unwrap();
    assert_eq!(latest.tag().as_str(), "step-00000006.2");
    let after = fs::read(checkpoints(&job).join("step-00000002/manifest.json")).unwrap();
    assert_eq!(before, after);
    resume(&job, &[]).succeeded();
    // If a run is killed before it saves, metrics.jsonl ends before the latest checkpoint.
    let record = job.folder().join("output/metrics.jsonl");
    let rows = fs::read_to_string(&record).unwrap();
    let three: Vec<_> = rows.lines().take(3).collect();
    fs::write(&record, format!("{}\n", three.join("\n"))).unwrap();
    resume(&job, &[])
        .failed(2, &["--resume", "resumed from an older checkpoint", "step-00000006.2"]);
    resume(&job, &["step-00000002"]).succeeded();
    fs::write(&record, "garbage\n").unwrap();
    resume(&job, &[]).failed(2, &["--resume", "metrics.jsonl"]);
}

#[test]
fn two_runs_do_not_share_an_output_folder() {
    let job = Job::uneven().with("training.max_steps", 2000);
    let mut first = start(&job, &[]);
    let started = Instant::now();
    while num_rows(&job) < 1 {
        assert!(started.elapsed() < Duration::from_secs(60), "it does not train");
        sleep(Duration::from_millis(5));
    }
    job.run().failed(2, &["training.output_dir", "another run"]);
    first.kill().unwrap();
    first.wait().unwrap();
    job.with("training.max_steps", 2).run().succeeded();
}

#[test]
fn another_job_is_refused_and_another_rate_is_logged() {
    let (job, _) = finished(2, 2);
    let refusals: [(&str, Value, &str); 5] = [
        ("data.sequence_length", json!(16), "data.sequence_length changed from 32 to 16"),
        ("data.shuffle", json!(false), "data.shuffle changed from true"),
        ("training.seed", json!(1), "training.seed changed from 42"),
        ("model.config.n_layer", json!(1), "n_layer changed from 2"),
        ("deepspeed.optimizer.type", json!("Lion"), "deepspeed.optimizer.type"),
    ];
    for (key, value, part) in refusals {
        let set = format!("{key}={value}");
        resume(&job, &["latest", "--set", &set]).failed(2, &["--resume", "step-00000006", part]);
    }
    // Other files of tokens are found by their hash.
    let copy = job.folder().join("other.bin");
    let tokens = fs::read(job.folder().join("uneven.bin")).unwrap();
    fs::write(&copy, &tokens[128..]).unwrap();
    let set = format!("data.path={}", json!(copy));
    let parts = ["--resume", "data.path changed from", "uneven.bin", "other.bin", "set it back"];
    resume(&job, &["latest", "--set", &set]).failed(2, &parts);
    // What resolves to the same plan is not a change.
    let ending = resume(&job, &["--set", "deepspeed.gradient_predivide_factor=1"]).succeeded();
    assert!(!ending.stderr.contains("in the checkpoint"), "{}", ending.stderr);
    let rate = "deepspeed.optimizer.params.weight_decay=0.2";
    let ending = resume(&job, &["--set", rate]).succeeded();
    assert!(ending.stderr.contains("weight_decay changes from 0.1"), "{}", ending.stderr);
    // The job of the checkpoint does not have this section.
    let ending = resume(&job, &["--set", "deepspeed.bf16.enabled=true"]).succeeded();
    let warning = "deepspeed.bf16.enabled changes from false in the checkpoint to true";
    assert!(ending.stderr.contains(warning), "{}", ending.stderr);
}

#[test]
fn training_continues_after_a_failed_save() {
    let straight = long().train();
    for asynchronous in [false, true] {
        let job = long().with("training.save_steps", 2).with("training.async_save", asynchronous);
        fs::create_dir(job.folder().join("output")).unwrap();
        std::os::unix::fs::symlink("nowhere/checkpoints", checkpoints(&job)).unwrap();
        let ending = job.run().succeeded();
        for step in [2, 4, 6] {
            let warning = format!("step {step}: no checkpoint was saved, training continues");
            assert!(ending.stderr.contains(&warning), "{}", ending.stderr);
        }
        assert_same(&Trained::read(&job.folder().join("output")), &straight, "without checkpoints");
    }
}

/// This test needs a disk that is large enough for five checkpoints and the model. Run
/// `mount -t tmpfs -o size=3m tmpfs DIR`, then
/// `DEEPBURN_SMALL_DISK=DIR cargo test --release -- --ignored a_full_disk`.
#[test]
#[ignore = "needs a small disk, which DEEPBURN_SMALL_DISK names"]
fn a_full_disk_does_not_stop_training() {
    let disk = PathBuf::from(std::env::var_os("DEEPBURN_SMALL_DISK").unwrap());
    let many = || long().with("training.max_steps", 12);
    let straight = many().train();
    let output = disk.join("output");
    for asynchronous in [false, true] {
        let _ = fs::remove_dir_all(&output);
        let job = many()
            .with("training.save_steps", 1)
            .with("training.async_save", asynchronous)
            .with("training.output_dir", output.to_str().unwrap());
        let ending = job.run().succeeded();
        assert_same(&Trained::read(&output), &straight, "on a full disk");
        for part in ["the disk is too full", "training continues", "make room"] {
            assert!(ending.stderr.contains(part), "{}", ending.stderr);
        }
        // The last checkpoint that fitted on the disk is intact.
        let last = Checkpoint::open_intact(&output.join("checkpoints"), None).unwrap();
        assert!((1..12).contains(&last.run().step));
        resume(&job, &[]).succeeded();
        assert_same(&Trained::read(&output), &straight, "resumed on a full disk");
    }
    fs::remove_dir_all(&output).unwrap();
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let job = long()
        .with("training.save_steps", 2)
        .with("training.max_steps", 10)
        .with("training.save_total_limit", 2)
        .with("training.save_best_limit", 1)
        // Training diverges soon, so the first evaluations are the best.
        .with(
            "deepspeed.scheduler",
            json!({"type": "WarmupLR", "params": {
            "warmup_num_steps": 2, "warmup_max_lr": 3.0}}),
        );
    let trained = job.train();
    let best = trained.evaluations.iter().min_by(|a, b| a.eval_loss.total_cmp(&b.eval_loss));
    let mut expected = vec![best.unwrap().step, 8, 10];
    expected.dedup();
    let expected: Vec<_> = expected.iter().map(|step| format!("step-{step:08}")).collect();
    assert_eq!(tags(&job), expected);
}

/// Starts the job, which has many steps.
fn start(job: &Job, more: &[&str]) -> Child {
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let mut command = finetune_command(job.folder(), &[&["--config", "job.json"], more].concat());
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn num_rows(job: &Job) -> usize {
    let text = fs::read_to_string(job.folder().join("output/metrics.jsonl")).unwrap_or_default();
    text.lines().count()
}

#[cfg(unix)]
fn signal(child: &Child, name: &str) {
    // `timeout` sends its signal twice, which counts as one.
    let process = child.id().to_string();
    let arguments = ["-s", name, &process, &process];
    assert!(Command::new("kill").args(arguments).status().unwrap().success());
}

/// Returns whether this process ignores SIGHUP.
#[cfg(unix)]
fn ignores_hangups() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Bit 0 is signal 1, SIGHUP.
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}

/// `nohup` starts a program with SIGHUP ignored.
#[cfg(unix)]
#[test]
fn a_run_under_nohup_survives_a_lost_terminal() {
    let job = Job::uneven().with("training.max_steps", 30);
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let finetune = finetune_command(job.folder(), &["--config", "job.json"]);
    let mut nohup = Command::new("nohup");
    nohup.arg(finetune.get_program()).args(finetune.get_args()).current_dir(job.folder());
    nohup.envs(finetune.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let child = nohup.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while num_rows(&job) < 3 {
        assert!(started.elapsed() < Duration::from_secs(60), "it does not train");
        sleep(Duration::from_millis(5));
    }
    signal(&child, "HUP");
    Ending::of(child.wait_with_output().unwrap()).succeeded();
    assert_eq!(num_rows(&job), 30);
}

#[cfg(unix)]
#[test]
fn a_signal_saves_a_checkpoint_and_explains_how_to_resume() {
    let many = || Job::uneven().with("data.shuffle", true).with("training.max_steps", 300);
    let straight = many().train();
    // The second signal may arrive during a save.
    for (name, status, saves) in [("TERM", 143, false), ("INT", 130, true), ("HUP", 129, false)] {
        // A test that runs under nohup passes it on.
        if name == "HUP" && ignores_hangups() {
            continue;
        }
        let mut job = many();
        if saves {
            job = job
                .with("training.save_steps", 2)
                .with("training.async_save", true)
                .with("training.save_total_limit", 1);
        }
        let child = start(&job, &[]);
        let started = Instant::now();
        while num_rows(&job) < 3 {
            assert!(started.elapsed() < Duration::from_secs(60), "it does not train");
            sleep(Duration::from_millis(5));
        }
        signal(&child, name);
        let ending = Ending::of(child.wait_with_output().unwrap());
        assert_eq!(ending.status, Some(status), "{}", ending.stderr);
        let rows = num_rows(&job);
        assert!(rows < 300);
        let tag = format!("step-{rows:08}");
        assert_eq!(tags(&job), [tag.as_str()]);
        for part in [&format!("SIG{name}"), &tag, "--resume"] {
            assert!(ending.stderr.contains(part), "{}", ending.stderr);
        }
        assert!(!job.folder().join("output/model").exists());
        resume(&job, &[]).succeeded();
        assert_same(&Trained::read(&job.folder().join("output")), &straight, "interrupted");
    }
}

/// Kills the job with SIGKILL after random times, `kills` times in total, and resumes from the
/// latest checkpoint each time. Checks that every completed run has the same result as an
/// uninterrupted run.
fn soak(kills: usize) {
    let job = || {
        let job = Job::uneven().with("data.shuffle", true).with("training.max_steps", 60);
        job.with("model.config.resid_pdrop", 0.1)
            .with("training.save_steps", 1)
            .with("training.save_total_limit", 3)
    };
    let straight = job().train();
    let (mut job, mut killed, mut finished, mut state) = (job(), 0, 0, 12345_u64);
    while killed < kills || finished == 0 {
        let saved = checkpoints(&job).is_dir() && !tags(&job).is_empty();
        // Every second run saves asynchronously.
        let asynchronous = format!("training.async_save={}", killed % 2 == 1);
        let more: &[_] = if saved { &["--resume", "latest"] } else { &[] };
        let mut child = start(&job, &[&["--set", &asynchronous], more].concat());
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let patience =
            Duration::from_millis(if killed < kills { (state >> 33) % 700 } else { 60_000 });
        let started = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if started.elapsed() > patience => break None,
                None => sleep(Duration::from_millis(1)),
            }
        };
        if status.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
            killed += 1;
            continue;
        }
        let ending = Ending::of(child.wait_with_output().unwrap());
        // `try_wait` has already returned the status.
        assert!(status.is_some_and(|status| status.success()), "{}", ending.stderr);
        assert_same(&Trained::read(&job.folder().join("output")), &straight, "interrupted");
        finished += 1;
        fs::remove_dir_all(job.folder().join("output")).unwrap();
        job = job.with("training.logging_steps", 1000);
    }
    eprintln!("{killed} kills, {finished} runs came to their end");
}

#[test]
fn killed_runs_resume_to_the_same_result() {
    soak(4);
}

/// A longer soak test. Run it with `DEEPBURN_SOAK=100 cargo test --release -- --ignored soak`.
#[test]
#[ignore = "takes minutes; DEEPBURN_SOAK says how often to kill"]
fn soak_of_many_kills() {
    let kills = std::env::var("DEEPBURN_SOAK").ok().and_then(|kills| kills.parse().ok());
    soak(kills.unwrap_or(100));
}

#[test]
fn consolidated_weights_match_the_model() {
    let (job, trained) = finished(3, 3);
    let folder = job.folder();
    deepburn(folder, &["consolidate", "output", "whole"]).succeeded();
    assert_eq!(
        tensors(&fs::read(folder.join("whole/model.safetensors")).unwrap()),
        trained.tensors()
    );
    let read = |path: &Path| -> Value {
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    };
    for name in ["config.json", "generation_config.json", "deepburn.json"] {
        let model = folder.join("output/model").join(name);
        assert_eq!(read(&folder.join("whole").join(name)), read(&model), "{name}");
    }
    // Existing files are not replaced, and nothing is written to the folder of checkpoints.
    let inside = ["consolidate", "output", "output/checkpoints"];
    deepburn(folder, &inside).failed(2, &["a folder of checkpoints"]);
    fs::create_dir(folder.join("taken")).unwrap();
    fs::write(folder.join("taken/config.json"), "{}").unwrap();
    deepburn(folder, &["consolidate", "output", "taken"])
        .failed(2, &["config.json exists and is not overwritten"]);
    deepburn(folder, &["consolidate", "output", "whole"])
        .failed(2, &["config.json exists and is not overwritten"]);
    for name in ["config.json", "generation_config.json", "deepburn.json"] {
        fs::remove_file(folder.join("whole").join(name)).unwrap();
    }
    deepburn(folder, &["consolidate", "output", "whole"]).failed(2, &["model.safetensors"]);

    let arguments = ["consolidate", "output/checkpoints/step-00000006", "bf16", "--dtype", "bf16"];
    deepburn(folder, &[&arguments[..], &["--max-shard-size", "10KB"]].concat()).succeeded();
    let index = read(&folder.join("bf16/model.safetensors.index.json"));
    let names = index["weight_map"].as_object().unwrap();
    assert_eq!(names.len(), trained.tensors().len());
    assert_eq!(read(&folder.join("bf16/config.json"))["dtype"], "bfloat16");
    let arguments = ["consolidate", "output", "other", "--max-shard-size", "much"];
    let ending = deepburn(folder, &arguments);
    assert_eq!(ending.status, Some(2), "{}", ending.stderr);
    assert!(ending.stderr.contains("invalid size"), "{}", ending.stderr);
}

#[test]
fn inspect_shows_what_is_inside() {
    let (job, _) = finished(1, 2);
    let shown = deepburn(job.folder(), &["inspect", "output"]).succeeded().stdout;
    for part in ["step-00000006", "intact", "stage       1, 2 ranks", "exp_avg_sq", "wte.weight"] {
        assert!(shown.contains(part), "{shown}");
    }
    let checkpoint = Checkpoint::open(&checkpoints(&job), None).unwrap();
    let numel = checkpoint.layout().numel(0);
    let path = &checkpoint.layout().entries()[0].path;
    assert_eq!(checkpoint.read(path, &StateKind::Weights, 0..numel).unwrap().len(), numel);
    deepburn(job.folder(), &["inspect", "nowhere"]).failed(2, &["nowhere", "no such folder"]);
}

/// An epoch of 9 conversations has 3 steps of 4, the last of which has a single one. A run that
/// resumes after 2 epochs in steps of another size trains 2 more.
#[test]
fn a_resumed_chat_ends_after_its_epochs() {
    let Some(golden) = golden("llm") else { return };
    let folder = tempfile::tempdir().unwrap();
    let row = |i: usize| {
        let turn = |role: &str, content: String| json!({"role": role, "content": content});
        json!({"messages": [turn("user", format!("{i}")), turn("assistant", "one".repeat(i + 1))]})
            .to_string()
    };
    let rows: Vec<_> = (0..9).map(row).collect();
    fs::write(folder.path().join("chats.jsonl"), rows.join("\n")).unwrap();
    let job = json!({
        "model": {"pretrained": golden.join("models/qwen3")},
        "data": {"kind": "chat", "path": "chats.jsonl"},
        "training": {"epochs": 4, "save_steps": 6, "ranks": 1, "output_dir": "output"},
        "deepspeed": {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    });
    fs::write(folder.path().join("job.json"), job.to_string()).unwrap();
    let run = |more: &[&str]| {
        finetune(folder.path(), &[&["--config", "job.json"], more].concat()).succeeded();
        let text = fs::read_to_string(folder.path().join("output/metrics.jsonl")).unwrap();
        let rows: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let tokens: u64 = rows.iter().filter_map(|row| row["tokens"].as_u64()).sum();
        (rows.last().unwrap()["step"].as_u64().unwrap(), tokens)
    };
    let (steps, tokens) = run(&[]);
    assert_eq!(steps, 12);
    let one = "deepspeed.gradient_accumulation_steps=1";
    for (change, steps) in [(["--set", one], 6 + 2 * 9), (["--ranks", "2"], 6 + 2 * 2)] {
        let more = [&["--resume", "step-00000006"], &change[..]].concat();
        assert_eq!(run(&more), (steps, tokens), "{change:?}");
    }
}
