//! Tests of the results of a successful run, and of the tools that read them.

use std::fs;
use std::path::Path;

use burn_flex::{Flex, FlexDevice};
use deepburn_models::gpt2::{Gpt2, PretrainedGpt2};
use serde_json::{Value, json};

use crate::job::{Job, OUTPUTS, STAGES, Trained, left, tensors, tiny_model};
use crate::program::{deepburn, finetune};

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn every_step_has_every_field() {
    let job = Job::tiny();
    let stderr = job.run().succeeded().stderr;
    assert!(!stderr.contains('\u{1b}'), "colors in a file: {stderr}");
    let text = fs::read_to_string(job.folder().join("output/metrics.jsonl")).unwrap();
    assert_eq!(text.lines().count(), 4);
    for (line, step) in text.lines().zip(1..) {
        let row: Value = serde_json::from_str(line).unwrap();
        let keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            [
                "step",
                "loss",
                "lr",
                "grad_norm",
                "loss_scale",
                "skipped",
                "tokens",
                "step_seconds",
                "tokens_per_second",
                "memory",
                "seconds"
            ]
        );
        let memory: Vec<_> = row["memory"].as_object().unwrap().keys().collect();
        assert_eq!(
            memory,
            [
                "parameters",
                "gradients",
                "optimizer",
                "gathered_peak",
                "activations_peak",
                "device_peak",
                "host_peak",
                "disk_peak",
                "rss"
            ]
        );
        let seconds: Vec<_> = row["seconds"].as_object().unwrap().keys().collect();
        assert_eq!(seconds, ["data", "forward", "backward", "optimizer"]);
        assert_eq!(row["step"], json!(step));
        // 2 ranks, 2 micro-batches of 2 sequences of 32.
        assert_eq!(row["tokens"], json!(256));
        assert_eq!(row["skipped"], json!(false));
        let positive = ["loss", "lr", "grad_norm", "step_seconds", "tokens_per_second"];
        assert!(positive.iter().all(|key| row[key].as_f64().unwrap() > 0.0), "{row}");
        assert!(row["memory"]["rss"].as_u64().unwrap() > 1_000_000, "{row}");
    }
}

#[test]
fn the_job_is_recorded_with_its_plan_and_every_auto() {
    let job = Job::tiny()
        .with("deepspeed.train_batch_size", "auto")
        .with("deepspeed.optimizer.params.lr", "auto")
        .with("training.learning_rate", 0.02)
        .with(
            "deepspeed.scheduler",
            json!({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto",
                   "warmup_num_steps": "auto", "warmup_max_lr": "auto"}}),
        )
        .zero("reduce_bucket_size", "auto");
    job.train();
    let record = read_json(&job.folder().join("output/job.json"));
    let (resolved, autos) = (&record["resolved"], &record["resolved"]["autos"]);
    assert_eq!(resolved["plan"]["batch"]["train_batch_size"], json!(8));
    assert_eq!(resolved["plan"]["optimizer"]["lr"], json!(0.02));
    assert_eq!(resolved["plan"]["schedule"]["total_steps"], json!(4));
    assert_eq!(resolved["plan"]["zero"]["stage"], json!("3"));
    // The section as written, and the resolved values.
    assert_eq!(record["deepspeed"]["train_batch_size"], json!("auto"));
    for key in [
        "train_batch_size",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.warmup_max_lr",
        "zero_optimization.reduce_bucket_size",
    ] {
        assert!(autos.to_string().contains(key), "no {key} in {autos:#}");
    }
    assert_eq!(record["training"]["seed"], json!(42));
}

#[test]
fn the_report_is_self_contained() {
    let job = Job::tiny();
    job.train();
    let page = fs::read_to_string(job.folder().join("output/report.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("</html>"));
    for outside in ["src=\"http", "href=\"http", "url(http", "<script src", "<link rel", "@import"]
    {
        assert!(!page.contains(outside), "{outside}");
    }
    // Loss, lr, norm, throughput and memory.
    for curve in ["loss", "learning rate", "norm", "tokens", "memory"] {
        assert!(page.to_lowercase().contains(curve), "{curve}");
    }
}

/// With a learning rate of 0, the exported weights are the initial weights at any stage and number
/// of ranks.
#[test]
fn saving_changes_no_bit() {
    let original = tensors(&fs::read(tiny_model().join("model.safetensors")).unwrap());
    for stage in STAGES {
        for ranks in [1, 3] {
            let job = Job::tiny().sharded(stage, ranks);
            let optimizer = json!({"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.1}});
            let trained = job.with("deepspeed.optimizer", optimizer).train();
            let saved = trained.tensors();
            assert_eq!(saved.len(), original.len());
            for ((name, saved), (expected_name, expected)) in saved.iter().zip(&original) {
                assert_eq!(name, expected_name);
                let bits =
                    |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
                assert!(bits(saved) == bits(expected), "{name} at stage {stage}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn the_model_loads_and_training_continues_from_it() {
    let job = Job::tiny();
    let before = job.train();
    let folder = job.folder().join("output/model");
    let checkpoint = PretrainedGpt2::open(&folder).unwrap();
    let config = checkpoint.config().clone();
    let _: Gpt2<Flex> = checkpoint.load(&config, &FlexDevice).unwrap();
    let given = read_json(&tiny_model().join("config.json"));
    let saved = read_json(&folder.join("config.json"));
    for (key, value) in given.as_object().unwrap() {
        if key != "transformers_version" {
            assert_eq!(&saved[key], value, "{key}");
        }
    }
    let next =
        job.with("model.pretrained", "output/model").with("training.output_dir", "continued");
    next.run().succeeded();
    let continued = Trained::read(&next.folder().join("continued"));
    let (first, last) = (continued.steps[0], before.steps[0]);
    assert!(first.loss < last.loss, "{first:?} {last:?}");
}

#[test]
fn evaluations_are_rows_of_their_own() {
    let job = Job::tiny()
        .with("data.splits", json!({"train": "80%", "eval": "10%", "test": "10%"}))
        .with("training.eval_steps", 2)
        .with("training.max_steps", 5);
    let at = |stage, ranks| {
        Job::tiny()
            .with("data.splits", json!({"train": "80%", "eval": "10%"}))
            .with("training.eval_steps", 2)
            .with("deepspeed.optimizer.params.lr", 0.0)
            .sharded(stage, ranks)
            .train()
            .evaluations[0]
            .eval_loss
    };
    let steps: Vec<_> = job.train().evaluations.iter().map(|row| row.step).collect();
    assert_eq!(steps, [2, 4, 5]);
    // Every sequence is evaluated once with any number of ranks.
    let alone = at(0, 1);
    for (stage, ranks) in [(1, 2), (2, 3), (3, 4)] {
        let shared = at(stage, ranks);
        assert!((alone - shared).abs() < 1e-6, "{alone} on one rank, {shared} on {ranks}");
    }
}

#[test]
fn a_text_model_writes_text() {
    let job = Job::uneven()
        .with("data", json!({"kind": "synthetic", "sequence_length": 32, "vocab_size": 300}))
        .with("model.config.vocab_size", 300)
        .with("model.config.n_positions", 64)
        .sharded(3, 2);
    job.train();
    let model = job.folder().join("output/model");
    assert!(model.join("tokenizer.json").is_file());
    let generate = |more: &[&str]| {
        let start =
            ["generate", "--model", "output/model", "--prompt", "The cat", "--max-new-tokens", "8"];
        deepburn(job.folder(), &[&start, more].concat()).succeeded().stdout
    };
    let greedy = generate(&[]);
    assert!(greedy.starts_with("The cat"), "{greedy}");
    assert_eq!(greedy, generate(&[]));
    let drawn =
        generate(&["--top-k", "50", "--top-p", "0.9", "--temperature", "1.5", "--seed", "7"]);
    assert_eq!(
        drawn,
        generate(&["--top-k", "50", "--top-p", "0.9", "--temperature", "1.5", "--seed", "7"])
    );
}

/// Trains a tiny text model and returns the job, whose model folder is copied to `base`.
pub(crate) fn text_model() -> Job {
    let job = Job::uneven()
        .with("data", json!({"kind": "synthetic", "sequence_length": 32, "vocab_size": 300}))
        .with("model.config.vocab_size", 300)
        .with("model.config.n_positions", 64)
        .with("training.max_steps", 1)
        .sharded(1, 1);
    job.train();
    fs::rename(job.folder().join("output/model"), job.folder().join("base")).unwrap();
    fs::remove_dir_all(job.folder().join("output")).unwrap();
    job.with("model", json!({"pretrained": "base"}))
        .with("data", json!({"kind": "synthetic", "sequence_length": 32}))
}

#[test]
fn files_of_a_pretrained_folder_are_exported_with_the_trained_model() {
    let job = text_model();
    let base = job.folder().join("base");
    let kept =
        ["LICENSE", "chat_template.jinja", "additional_chat_templates/rag.jinja", "modeling.py"];
    let left = [
        "README.md",
        "pytorch_model.bin",
        "training_args.bin",
        ".gitattributes",
        "onnx/config.json",
    ];
    for name in kept.iter().chain(&left) {
        let path = base.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{name} of the base model")).unwrap();
    }
    let generation = json!({"eos_token_id": [0, 7], "temperature": 0.6, "do_sample": true});
    fs::write(base.join("generation_config.json"), generation.to_string()).unwrap();
    let job = job.with("training.max_steps", 2).with("training.save_steps", 1).sharded(3, 2);
    let stderr = job.run().succeeded().stderr;
    assert!(stderr.contains("exported unchanged with the model: LICENSE, "), "{stderr}");
    let check = |folder: &str| {
        let folder = job.folder().join(folder);
        for name in kept {
            let text = fs::read_to_string(folder.join(name));
            assert_eq!(text.unwrap(), format!("{name} of the base model"), "{}", folder.display());
        }
        assert!(left.iter().all(|name| !folder.join(name).exists()), "{}", folder.display());
        assert_eq!(read_json(&folder.join("generation_config.json")), generation);
        assert!(folder.join("tokenizer.json").is_file() && folder.join("vocab.json").is_file());
    };
    check("output/model");
    deepburn(job.folder(), &["consolidate", "output", "whole"]).succeeded();
    check("whole");
    deepburn(job.folder(), &["consolidate", "output", "whole"])
        .failed(2, &["whole/config.json exists"]);

    // A run that has not saved its model yet: the files are copied from the pretrained model.
    fs::remove_dir_all(job.folder().join("output/model")).unwrap();
    deepburn(job.folder(), &["consolidate", "output", "early", "--tag", "step-00000001"])
        .succeeded();
    check("early");

    // The same tokenizer elsewhere: the template beside it is exported, and the ids of the
    // generation config are right.
    fs::create_dir(job.folder().join("other")).unwrap();
    fs::copy(base.join("tokenizer.json"), job.folder().join("other/tokenizer.json")).unwrap();
    fs::write(job.folder().join("other/chat_template.jinja"), "another template").unwrap();
    let other = job.with("data.tokenizer", "other").with("training.output_dir", "replaced");
    let stderr = other.run().succeeded().stderr;
    let part = "not exported: additional_chat_templates/rag.jinja, chat_template.jinja";
    assert!(stderr.contains(part), "{stderr}");
    let model = other.folder().join("replaced/model");
    assert_eq!(fs::read_to_string(model.join("chat_template.jinja")).unwrap(), "another template");
    assert_eq!(read_json(&model.join("generation_config.json")), generation);
    // Another vocabulary: the ids of the generation config are wrong.
    let new = other
        .with("data.tokenizer", json!(null))
        .with("data.new_vocabulary", true)
        .with("data.vocab_size", 257)
        .with("training.output_dir", "new");
    let stderr = new.run().succeeded().stderr;
    assert!(stderr.contains("generation_config.json is replaced"), "{stderr}");
    let model = new.folder().join("new/model");
    assert_eq!(read_json(&model.join("generation_config.json"))["eos_token_id"], json!(0));
    assert!(model.join("LICENSE").is_file() && !model.join("additional_chat_templates").exists());
}

/// Rewrites the weights of a model folder with other names.
fn rename_weights(folder: &Path, name: impl Fn(&str) -> String) {
    let path = folder.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let renamed = file.iter().map(|(own, view)| (name(own), view));
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let bytes = safetensors::serialize(renamed, Some(metadata)).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn weights_saved_from_a_wrapper_are_fine_tuned() {
    let plain = Job::tiny().with("training.max_steps", 1);
    let expected = plain.train();
    let job = Job::tiny().with("training.max_steps", 1).with("model.pretrained", "given");
    let given = job.folder().join("given");
    fs::create_dir(&given).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(tiny_model().join(name), given.join(name)).unwrap();
    }
    rename_weights(&given, |name| format!("module._orig_mod.{name}"));
    let stderr = job.run().succeeded().stderr;
    assert_eq!(
        stderr.matches("start with `module._orig_mod.`, which is removed").count(),
        1,
        "{stderr}"
    );
    assert_eq!(
        crate::job::Trained::read(&job.folder().join("output")).numbers(),
        expected.numbers()
    );
    rename_weights(&given, |name| name.replace("module._orig_mod", "policy"));
    let ending =
        job.run().failed(2, &["unknown prefix `policy.`: ", "such as `policy.transformer."]);
    assert!(!ending.stderr.contains("found nothing"), "{}", ending.stderr);
}

/// Each guide is loaded, or fails with the error that `configs/guides/README.md` describes.
#[test]
fn guides_load_or_are_diagnosed() {
    let guides = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/guides");
    for (file, ranks, refused) in [
        ("S0.json", "1", None),
        ("S0.json", "2", Some("32 != 4 * 8 * 2")),
        ("S1.json", "1", None),
        ("S1.json", "2", Some("32 != 4 * 8 * 2")),
        ("S2.json", "1", Some("AdamW")),
        ("S2.json", "2", Some("OneBitAdam is not compatible with ZeRO stage 2")),
        ("S3.yaml", "2", Some("train_micro_batch_size_per_gpu")),
        ("S4.json", "1", None),
        ("S4.json", "2", Some("4 != 1 * 4 * 2")),
    ] {
        let ending = deepburn(&guides, &["check-config", file, "--ranks", ranks, "--json"]);
        match refused {
            Some(part) => {
                ending.failed(2, &[part]);
            }
            None => {
                let plan: Value = serde_json::from_str(&ending.succeeded().stdout).unwrap();
                let stage = if file == "S0.json" { "3" } else { "2" };
                assert_eq!(plan["plan"]["zero"]["stage"], json!(stage));
            }
        }
    }
}

/// S4 is a published guide, which trains unchanged.
#[test]
fn a_guide_trains() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/guides/S4.json");
    let job = Job::tiny().with("deepspeed", guide.to_str().unwrap()).with("training.ranks", 1);
    assert_eq!(job.train().steps.len(), 4);
}

#[test]
fn a_job_is_found_in_configs_and_its_files_beside_it() {
    let job = Job::tiny();
    let configs = job.folder().join("configs");
    fs::create_dir(&configs).unwrap();
    fs::write(configs.join("ds.json"), job.json()["deepspeed"].to_string()).unwrap();
    fs::copy(crate::job::data("tokens.bin"), configs.join("own.bin")).unwrap();
    let job = job.with("deepspeed", "ds.json").with("data.path", "own.bin");
    fs::write(configs.join("mine.json"), job.json().to_string()).unwrap();
    finetune(job.folder(), &["--config", "mine.json", "--output-dir", "results/deep/er"])
        .succeeded();
    assert_eq!(left(&job.folder().join("results/deep/er")), OUTPUTS);
    assert_eq!(left(&job.folder().join("output")), [""; 0]);
    // In another folder it is not found, and the message names both paths.
    let other = tempfile::tempdir().unwrap();
    let ending = finetune(other.path(), &["--config", "mine.json"]);
    ending.failed(2, &["mine.json", "configs/mine.json"]);
}

/// Options take precedence over `--set`, and `--set` over the file.
#[test]
fn the_command_line_wins() {
    let job = Job::tiny();
    let file = job.folder().join("job.json");
    fs::write(&file, job.json().to_string()).unwrap();
    let deepspeed = json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}});
    fs::write(job.folder().join("other.json"), deepspeed.to_string()).unwrap();
    let arguments = [
        "--config",
        "job.json",
        "--set",
        "training.max_steps=2",
        "--set",
        "training.ranks=2",
        "--set",
        "deepspeed.gradient_accumulation_steps=3",
        "--num_gpus",
        "3",
        "--deepspeed",
        "other.json",
        "--backend",
        "flex",
        "--output-dir",
        "elsewhere",
    ];
    finetune(job.folder(), &arguments).succeeded();
    let record = read_json(&job.folder().join("elsewhere/job.json"));
    assert_eq!(record["training"]["ranks"], json!(3));
    assert_eq!(record["training"]["max_steps"], json!(2));
    assert_eq!(record["resolved"]["plan"]["batch"]["train_batch_size"], json!(9));
    assert_eq!(record["resolved"]["plan"]["zero"]["stage"], json!("1"));
}

/// `finetune ... 2>&1 | head` still trains to the end.
#[test]
fn a_closed_pipe_does_not_stop_training() {
    let job = Job::tiny();
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_finetune"));
    let program = program.args(["--config", "job.json"]).current_dir(job.folder()).stderr(full);
    assert!(program.status().unwrap().success());
    assert_eq!(left(&job.folder().join("output")), OUTPUTS);
}

/// If standard output is a file on a full disk, the program fails.
#[test]
fn a_result_that_cannot_be_written_is_a_failure() {
    for arguments in [&["keys", "--schema"][..], &["env"], &["estimate", "--ranks", "4"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_deepburn"));
        let output = program.args(arguments).stdout(full).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert!(message.contains("standard output cannot be written"), "{message}");
    }
}
