//! `deepburn tune`, and `deepburn launch --autotuning`.

use std::fs;
use std::path::Path;

use deepburn_config::{RawConfig, RunContext, resolve};
use serde_json::{Value, json};

use crate::job::Job;
use crate::program::{Ending, deepburn, finetune};

/// A job of a small model, in the file `job.json` of a new folder.
fn folder(deepspeed: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let job = json!({
        "model": {"architecture": "gpt2", "config": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32}},
        "data": {"sequence_length": 32},
        "training": {"max_steps": 2, "ranks": 2, "output_dir": "output", "gradient_checkpointing": false},
        "deepspeed": deepspeed,
    });
    fs::write(folder.path().join("job.json"), job.to_string()).unwrap();
    folder
}

fn config() -> Value {
    json!({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"reduce_bucket_size": "auto"},
        "autotuning": {"enabled": true, "start_profile_step": 2, "end_profile_step": 2}})
}

fn tune(folder: &Path, arguments: &[&str]) -> Ending {
    deepburn(folder, &[&["tune", "--config", "job.json"][..], arguments].concat())
}

fn read(folder: &Path, file: &str) -> String {
    let path = folder.join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_best_configuration_trains() {
    let folder = folder(&config());
    let ending = tune(folder.path(), &[]).succeeded();
    assert!(
        ending.stdout.contains("best: z") && ending.stderr.contains("1 of at most 6"),
        "{ending:?}"
    );
    let best: Value =
        serde_json::from_str(&read(folder.path(), "autotuning_results/ds_config_optimal.json"))
            .unwrap();
    // DeepSpeed itself does not know "auto".
    assert!(!best.to_string().contains("auto"), "{best}");
    assert_eq!(best["train_batch_size"], 8);
    resolve(&RawConfig::from_value(&best).unwrap(), &RunContext::on_host(2)).unwrap();
    // The command trains, although the job itself sets gradient_checkpointing.
    let command = read(folder.path(), "autotuning_results/cmd_optimal.txt");
    let words: Vec<_> = command.split_whitespace().skip(1).collect();
    finetune(folder.path(), &words).succeeded();
    let summary = read(folder.path(), "autotuning_results/summary.txt");
    assert!(summary.contains("| global |"), "{summary}");
    let trials: Value =
        serde_json::from_str(&read(folder.path(), "autotuning_results/summary.json")).unwrap();
    let measured =
        trials.as_array().unwrap().iter().filter(|trial| trial["measured_seconds"].is_number());
    let mut count = 0;
    for trial in measured {
        count += 1;
        let name = trial["name"].as_str().unwrap();
        for file in ["exp.json", "ds_config.json", "metrics.json", "cmd.txt"] {
            read(folder.path(), &format!("autotuning_results/{name}/{file}"));
        }
        read(folder.path(), &format!("autotuning_exps/{name}.json"));
        let [forecast, peak] =
            ["predicted_memory", "measured_memory"].map(|it| trial[it]["device"].as_f64().unwrap());
        assert!((forecast / peak - 1.0).abs() < 0.05, "{trial}");
    }
    assert!((3..=6).contains(&count), "{trials}");
}

#[test]
fn adapters_and_several_numbers_of_ranks_are_tuned() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = Job::tiny().json().clone();
    job["model"]["lora"] = json!({"r": 4, "target_modules": "all-linear"});
    job["deepspeed"]["bf16"] = json!({"enabled": true});
    fs::write(folder.path().join("job.json"), job.to_string()).unwrap();
    let arguments = ["--ranks", "1,2", "--trials", "2"];
    tune(folder.path(), &arguments).succeeded();
    let trials: Value =
        serde_json::from_str(&read(folder.path(), "autotuning_results/summary.json")).unwrap();
    let ranks = |ranks| trials.as_array().unwrap().iter().any(|trial| trial["ranks"] == ranks);
    assert!(ranks(1) && ranks(2));
    let measured =
        trials.as_array().unwrap().iter().filter(|it| it["measured_seconds"].is_number());
    assert_eq!(measured.count(), 2);
}

/// Returns the candidates of a search.
fn trials(folder: &Path) -> Vec<Value> {
    let summary = read(folder, "autotuning_results/summary.json");
    serde_json::from_str::<Value>(&summary).unwrap().as_array().unwrap().clone()
}

/// Runs the command of the best configuration, and returns its end.
fn train_best(folder: &Path) -> Ending {
    let command = read(folder, "autotuning_results/cmd_optimal.txt");
    let words: Vec<_> = command.split_whitespace().skip(1).collect();
    finetune(folder, &words).succeeded()
}

#[test]
fn pipelines_are_tuned_and_train() {
    let folder = folder(&json!({"train_batch_size": 8, "optimizer": {"type": "AdamW"}}));
    let arguments =
        ["--pipeline-stages", "1,2", "--stages", "1", "--recompute", "off", "--exhaustive"];
    let ending = tune(folder.path(), &arguments).succeeded();
    assert!(ending.stdout.contains("ranks  pipe stage"), "{}", ending.stdout);
    let measured = |stages: usize| {
        let trials = trials(folder.path()).into_iter();
        let of_stages = trials
            .filter(|it| it["pipeline_stages"] == stages && it["measured_seconds"].is_number());
        of_stages.collect::<Vec<_>>()
    };
    // Two stages share 8 samples of one data-parallel rank, and two ranks have 4 samples each.
    assert_eq!([measured(1).len(), measured(2).len()], [3, 4], "{}", ending.stdout);
    for trial in measured(2) {
        let [micro, steps] = ["micro_batch_size", "gradient_accumulation_steps"]
            .map(|key| trial[key].as_u64().unwrap());
        assert_eq!(micro * steps, 8, "{trial}");
        let name = trial["name"].as_str().unwrap();
        assert_eq!(name, format!("z1_gas{steps}_tmbspg{micro}_pp2_ranks2"));
        let [forecast, peak] =
            ["predicted_memory", "measured_memory"].map(|it| trial[it]["device"].as_f64().unwrap());
        assert!((forecast / peak - 1.0).abs() < 0.05, "{trial}");
    }
    let only_pipelines = ["--pipeline-stages", "2", "--trials", "1"];
    tune(folder.path(), &only_pipelines).succeeded();
    let best = read(folder.path(), "autotuning_results/ds_config_optimal.json");
    let best: Value = serde_json::from_str(&best).unwrap();
    assert_eq!(best["pipeline"]["stages"], 2, "{best}");
    assert!(train_best(folder.path()).stderr.contains("pipeline stage 1:"));
}

#[test]
fn a_job_with_pipeline_stages_is_tuned() {
    let folder = folder(&json!({"train_batch_size": 8, "pipeline": {"partition": "parameters"}}));
    let of_job =
        ["--set", "training.pipeline_stages=2", "--set", "training.pipeline_schedule=gpipe"];
    tune(folder.path(), &[&of_job[..], &["--trials", "1"]].concat()).succeeded();
    assert!(trials(folder.path()).iter().all(|trial| trial["pipeline_stages"] == 2));
    let best = read(folder.path(), "autotuning_results/ds_config_optimal.json");
    let best: Value = serde_json::from_str(&best).unwrap();
    assert_eq!(best["pipeline"], json!({"partition": "parameters", "stages": 2}));
    assert!(train_best(folder.path()).stderr.contains("pipeline stage 1:"));
    // The job's own number does not contradict another one.
    let one = ["--pipeline-stages", "1", "--trials", "1", "--set", "training.output_dir=one"];
    tune(folder.path(), &[&of_job[..2], &one[..]].concat()).succeeded();
    assert!(!train_best(folder.path()).stderr.contains("pipeline stage"));
}

/// A job without train_batch_size has 2 ranks x 2 micro-batches x 2 samples, whatever numbers of
/// ranks are tried.
#[test]
fn several_numbers_of_ranks_keep_the_batch_size() {
    let folder =
        folder(&json!({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}));
    tune(folder.path(), &["--ranks", "1,2,3,4", "--trials", "1"]).succeeded();
    let summary = read(folder.path(), "autotuning_results/summary.json");
    let trials: Value = serde_json::from_str(&summary).unwrap();
    let mut ranks = Vec::new();
    for trial in trials.as_array().unwrap() {
        let [count, micro, steps] = ["ranks", "micro_batch_size", "gradient_accumulation_steps"]
            .map(|key| trial[key].as_u64().unwrap());
        assert_eq!(count * micro * steps, 8, "{trial}");
        ranks.push(count);
    }
    assert!([1, 2, 4].iter().all(|count| ranks.contains(count)) && !ranks.contains(&3));
}

#[test]
fn an_exhaustive_search_compares_forecasts() {
    let folder =
        folder(&json!({"train_batch_size": 2, "autotuning": {"enabled": true, "fast": true}}));
    let ending = tune(folder.path(), &["--exhaustive", "--results-dir", "r"]).succeeded();
    assert!(ending.stdout.contains("rank correlation of 4 forecasts"), "{}", ending.stdout);
    assert!(read(folder.path(), "r/report.html").contains("<svg"));
}

#[test]
fn a_job_that_cannot_be_tuned_is_refused() {
    let refused = |deepspeed: Value, arguments: &[&str], parts: &[&str]| {
        let folder = folder(&deepspeed);
        tune(folder.path(), arguments).failed(2, parts);
        assert!(!folder.path().join("autotuning_results").exists());
    };
    let section = |section: Value| json!({"train_batch_size": 8, "autotuning": section});
    refused(
        section(json!({"enabled": true, "metrics": 1})),
        &[],
        &["deepspeed.autotuning.metrics"],
    );
    refused(section(json!({"enabled": true, "mp_size": 2})), &[], &["autotuning.mp_size"]);
    let contradiction =
        json!({"enabled": true, "min_train_batch_size": 9, "max_train_batch_size": 4});
    refused(section(contradiction), &[], &["autotuning.min_train_batch_size", "no size is left"]);
    let none = json!({"enabled": true, "min_train_micro_batch_size_per_gpu": 5});
    refused(section(none), &[], &["min_train_micro_batch_size_per_gpu", "widen"]);
    refused(
        json!({"train_batch_size": 8}),
        &["--memory", "1MB"],
        &["comes closest", "host memory", "--memory", "are missing"],
    );
    refused(json!({"train_batch_size": 8}), &["--nvme", "missing"], &["--nvme", "missing"]);
    refused(json!({"train_batch_size": 8}), &["--ranks", "3"], &["3"]);
    let pipeline = |stages| ["--pipeline-stages", stages];
    refused(json!({"train_batch_size": 8}), &pipeline("3"), &["pipeline stages: 3", "2 ranks"]);
    refused(json!({"train_batch_size": 8}), &pipeline("0"), &["--pipeline-stages"]);
    let more = [&pipeline("9")[..], &["--ranks", "9"]].concat();
    refused(
        json!({"train_batch_size": 9}),
        &more,
        &["9 pipeline stages for a model of", "use at most"],
    );
    let one_bit =
        json!({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}});
    refused(one_bit, &pipeline("2"), &["OneBitAdam is not supported with pipeline stages"]);
    let profile = json!({"train_batch_size": 8, "flops_profiler": {"enabled": true}});
    refused(profile, &pipeline("1,2"), &["flops_profiler.enabled", "one stage"]);
    let schedule =
        ["--set", r#"training.batch_size_schedule={"from_step": [2], "train_batch_size": [16]}"#];
    refused(
        json!({"train_batch_size": 8}),
        &schedule,
        &["training.batch_size_schedule", "remove it"],
    );
}

#[test]
fn earlier_results_are_kept_if_asked() {
    let folder = folder(
        &json!({"train_batch_size": 2, "autotuning": {"enabled": true, "overwrite": false}}),
    );
    tune(folder.path(), &["--trials", "1"]).succeeded();
    let before = read(folder.path(), "autotuning_results/summary.txt");
    tune(folder.path(), &["--trials", "1"]).failed(2, &["autotuning_results", "overwrite"]);
    assert_eq!(read(folder.path(), "autotuning_results/summary.txt"), before);
}

#[test]
fn a_training_run_refuses_the_section() {
    let folder = folder(&config());
    finetune(folder.path(), &["--config", "job.json"])
        .failed(2, &["autotuning.enabled", "deepburn tune"]);
}

#[test]
fn the_launcher_tunes_jobs_of_finetune_on_one_host() {
    let folder = folder(&json!({"train_batch_size": 4}));
    let launch = |arguments: &[&str], command: &[&str]| {
        deepburn(
            folder.path(),
            &[&["launch", "--autotuning", "tune"][..], arguments, &["--"], command].concat(),
        )
    };
    let job = ["finetune", "--config", "job.json", "--set", "training.seed=3"];
    launch(&["--num_gpus", "2"], &job).succeeded();
    let command = read(folder.path(), "autotuning_results/cmd_optimal.txt");
    assert!(command.contains("--ranks 2 --set training.seed=3"), "{command}");
    launch(&["--num_gpus", "2"], &["./train"]).failed(2, &["--autotuning", "deepburn::tune"]);
    let other = [&job[..], &["--ranks", "4"]].concat();
    launch(&["--num_gpus", "2"], &other).failed(2, &["--ranks 4", "remove it"]);
    fs::write(folder.path().join("hosts"), "one slots=1\ntwo slots=1\n").unwrap();
    launch(&["-H", "hosts"], &job).failed(2, &["--autotuning", "2 hosts"]);
}
