//! The job file: defaults, paths, command line and errors.

use std::fs;
use std::path::{Path, PathBuf};

use deepburn_config::{
    Architecture, Backend, DataKind, Float32MatmulPrecision, Job, JobRequest, RawConfig,
    ResolvedJob, SplitPlan, StepCount, resolve,
};
use serde_json::json;

fn parse(text: &str, folder: &Path, sets: &[&str]) -> Result<(Job, RawConfig), String> {
    let request = JobRequest {
        sets: sets.iter().map(|set| set.to_string()).collect(),
        ..JobRequest::default()
    };
    Job::parse(text, "job.json", folder, &request).map_err(|error| error.to_string())
}

fn job(text: &str, sets: &[&str]) -> Job {
    parse(text, Path::new(""), sets).unwrap_or_else(|error| panic!("{error}")).0
}

#[test]
fn everything_has_a_default() {
    let job = job("{} // nothing", &[]);
    assert_eq!(job.model.pretrained, None);
    assert_eq!(job.data.kind, DataKind::Synthetic);
    assert_eq!(job.data.splits, SplitPlan::Shares { path: None, train: 1.0, eval: 0.0, test: 0.0 });
    assert_eq!((job.data.sequence_length, job.data.vocab_size), (128, 512));
    assert!(job.data.shuffle && !job.data.drop_last);
    assert_eq!((job.training.length.epochs, job.training.length.max_steps), (Some(1.0), None));
    assert_eq!(
        (job.training.seed, job.training.placement.ranks, job.training.placement.backend),
        (42, 1, Backend::Flex)
    );
    assert_eq!(job.training.output_dir, PathBuf::from("output"));
    assert_eq!(
        (job.training.evaluation.eval_steps, job.training.logging.logging_steps),
        (None, None)
    );
}

#[test]
fn the_architecture_is_gpt2_unless_a_checkpoint_has_its_own() {
    let architecture =
        |model: &str| job(&format!("{{\"model\": {model}}}"), &[]).model.architecture;
    assert_eq!(architecture("{}"), Some(Architecture::Gpt2));
    assert_eq!(architecture(r#"{"architecture": null}"#), Some(Architecture::Gpt2));
    assert_eq!(architecture(r#"{"pretrained": null}"#), Some(Architecture::Gpt2));
    let pretrained = r#"{"pretrained": "openai-community/gpt2"}"#;
    assert_eq!(architecture(pretrained), None);
    let both = r#"{"architecture": "gpt2", "pretrained": "openai-community/gpt2"}"#;
    assert_eq!(architecture(both), Some(Architecture::Gpt2));
}

#[test]
fn an_invalid_value_is_the_only_finding_about_it() {
    for (data, expected) in [
        (r#"{"path": 3, "token_cache": false, "text_field": "x", "name": "z"}"#, "data.path "),
        (r#"{"path": "no file", "token_cache": true}"#, "data.path: "),
        (r#"{"kind": "texts", "join": "nothing", "text_field": "x"}"#, "data.kind "),
        (r#"{"path": "src", "splits": {"train": "101%"}}"#, "data.splits.train "),
        (r#"{"path": "src", "splits": {"train": 0.8}}"#, "write \"80%\""),
        (r#"{"path": "src", "splits": {"train": 0.8, "eval": "20%"}}"#, "write \"80%\""),
        (r#"{"splits": {"train": 0.8}, "kind": "tokens"}"#, "data.splits.train "),
        (r#"{"path": "src", "splits": {"train": "90%", "eval": "x%"}}"#, "data.splits.eval "),
    ] {
        let text = format!(r#"{{"data": {data}, "training": {{"max_steps": 1}}}}"#);
        let report = parse(&text, Path::new(""), &[]).unwrap_err();
        let findings: Vec<_> = report.lines().skip(1).collect();
        assert!(findings.len() == 1 && findings[0].contains(expected), "{report}");
    }
    let of_model =
        |model: &str| format!(r#"{{"model": {model}, "data": {{"kind": "chat", "path": "src"}}}}"#);
    let adapted = |fields: &str| {
        let model = r#""pretrained": "src", "quantization_config": {"load_in_4bit": true}"#;
        let training = r#""max_steps": 1, "save_merged": true, "checkpoint_scope": "trained""#;
        format!(r#"{{"model": {{{model}, {fields}}}, "training": {{{training}}}}}"#)
    };
    for (text, expected) in [
        (of_model(r#"{"pretrained": "nope"}"#), "model.pretrained: "),
        (of_model(r#"{"pretrained": "nope", "lora": {}}"#), "model.pretrained: "),
        (
            r#"{"data": {"kind": "chat", "path": "src", "tokenizer": "nope"}}"#.to_owned(),
            "data.tokenizer: ",
        ),
        (r#"{"training": {"objective": "sft", "max_steps": 1}}"#.to_owned(), "training.objective "),
        (adapted(r#""adapter": "nope""#), "model.adapter: "),
        (adapted(r#""lora": 4"#), "model.lora "),
    ] {
        let report = parse(&text, Path::new(""), &[]).unwrap_err();
        let errors: Vec<_> = report.lines().filter(|line| line.contains("  error: ")).collect();
        assert!(errors.len() == 1 && errors[0].contains(expected), "{report}");
        assert!(!report.contains("neither model.lora nor"), "{report}");
    }
}

#[test]
fn the_former_name_of_the_encoder_is_accepted_with_a_note() {
    let with = |name: &str| {
        let text = json!({"model": {"architecture": name}, "data": {"kind": "classification"},
            "training": {"max_steps": 1}});
        let job = job(&text.to_string(), &[]);
        let record = serde_json::to_value(&job).unwrap();
        assert_eq!(record["model"]["architecture"], "encoder");
        job.notes.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(with("encoder"), [""; 0]);
    for name in ["imdb_encoder", "IMDB_Encoder"] {
        let notes = with(name);
        assert_eq!(notes.len(), 1, "{notes:?}");
        let expected = "\"imdb_encoder\" is the former name of \"encoder\"";
        assert!(notes[0].starts_with("note: model.architecture "), "{notes:?}");
        assert!(notes[0].ends_with(expected), "{notes:?}");
    }
}

#[test]
fn the_command_line_wins_and_options_come_last() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.json");
    fs::write(&other, "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 1}}").unwrap();
    let config = folder.path().join("job.json");
    fs::write(&config, "{\"training\": {\"ranks\": 3}, \"deepspeed\": {\"train_batch_size\": 1}}")
        .unwrap();
    let request = JobRequest {
        config,
        sets: vec![
            "training.ranks=4".into(),
            "training.max_steps=1e2".into(),
            "deepspeed.zero_optimization.stage=2".into(),
        ],
        deepspeed: Some(other),
        ranks: Some(2),
        launched: Some(2),
        backend: Some("TCH".into()),
        output_dir: Some("runs/a".into()),
    };
    let (job, written) = Job::load(&request).unwrap();
    assert_eq!((job.training.placement.ranks, job.training.placement.backend), (2, Backend::Tch));
    assert_eq!((job.training.length.max_steps, job.training.length.epochs), (Some(100), None));
    assert_eq!(job.training.output_dir, PathBuf::from("runs/a"));
    assert_eq!(
        written.to_json(),
        json!({"train_batch_size": 8, "zero_optimization": {"stage": 2}})
    );
    let facts = job.run_context();
    assert_eq!((facts.world_size, facts.host_device, facts.total_steps), (2, true, Some(100)));
}

#[test]
fn a_launcher_says_how_many_ranks_there_are() {
    let parse = |text: &str, ranks: Option<usize>| {
        let request = JobRequest { ranks, launched: Some(4), ..JobRequest::default() };
        Job::parse(text, "job.json", std::path::Path::new(""), &request)
            .map(|(job, _)| job.training.placement.ranks)
            .map_err(|error| error.to_string())
    };
    assert_eq!(parse("{}", None), Ok(4));
    assert_eq!(parse("{\"training\": {\"ranks\": 4}}", None), Ok(4));
    assert_eq!(parse("{\"training\": {\"ranks\": 2}}", Some(4)), Ok(4));
    for (text, ranks) in [("{\"training\": {\"ranks\": 2}}", None), ("{}", Some(2))] {
        let error = parse(text, ranks).unwrap_err();
        assert!(error.contains("is 2, but the launcher started 4"), "{error}");
    }
}

#[test]
fn deepspeed_files_are_found_beside_the_job() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("ds.json"),
        "{\"dataloader_drop_last\": true, \"steps_per_print\": 7}",
    )
    .unwrap();
    fs::write(folder.path().join("acc.yaml"), "num_processes: 3\ndeepspeed_config: {}\n").unwrap();
    let (job, _) = parse("{\"deepspeed\": \"ds.json\"}", folder.path(), &[]).unwrap();
    assert!(job.data.drop_last);
    assert_eq!(job.training.logging.logging_steps, Some(StepCount::Steps(7)));
    let (job, _) = parse("{\"deepspeed\": \"acc.yaml\"}", folder.path(), &[]).unwrap();
    assert_eq!(job.training.placement.ranks, 3);
    let (job, _) =
        parse("{\"deepspeed\": \"acc.yaml\"}", folder.path(), &["training.ranks=2"]).unwrap();
    assert_eq!(job.training.placement.ranks, 2);
}

#[test]
fn data_that_is_in_no_split_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let notes = |splits: &str| {
        let text = format!("{{\"data\": {{\"splits\": {splits}}}}}");
        let (job, _) = parse(&text, folder.path(), &[]).unwrap();
        job.notes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let note = notes(r#"{"train": "50%", "eval": "7.5%"}"#);
    assert!(note.contains("data.splits: 42.5% of the data is in no split"), "{note}");
    for whole in [r#"{"train": "100%"}"#, r#"{"train": "33.3%", "eval": "33.3%", "test": "33.4%"}"#]
    {
        assert!(!notes(whole).contains("in no split"), "{whole}");
    }
}

#[test]
fn held_out_data_that_is_trained_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["train.txt", "eval.txt"] {
        fs::write(folder.path().join(name), "text").unwrap();
    }
    let keys = |splits: &str| {
        let text = format!("{{\"data\": {{\"splits\": {splits}}}}}");
        let (job, _) = parse(&text, folder.path(), &[]).unwrap();
        let said =
            job.notes.into_iter().filter(|note| note.message.contains("also the train split"));
        said.map(|note| note.key).collect::<Vec<_>>()
    };
    assert_eq!(keys(r#"{"train": "train.txt", "eval": "train.txt"}"#), ["data.splits.eval"]);
    assert_eq!(
        keys(r#"{"train": "train.txt", "eval": "eval.txt", "test": " train.txt"}"#),
        ["data.splits.test"]
    );
    for other in [
        r#"{"train": "train.txt", "eval": "eval.txt", "test": "eval.txt"}"#,
        r#"{"train": "50%", "eval": "50%"}"#,
        r#"{"train": "train.txt"}"#,
    ] {
        assert_eq!(keys(other), [""; 0], "{other}");
    }
}

#[test]
fn splits_are_shares_or_paths() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["train.txt", "eval.txt"] {
        fs::write(folder.path().join(name), "text").unwrap();
    }
    let splits = |text: &str| parse(text, folder.path(), &[]).map(|(job, _)| job.data.splits);
    assert_eq!(
        splits(r#"{"data": {"splits": {"train": "90%", "eval": "7.5 %"}}}"#),
        Ok(SplitPlan::Shares { path: None, train: 0.9, eval: 0.075, test: 0.0 })
    );
    assert_eq!(
        splits(r#"{"data": {"splits": {"train": "train.txt", "eval": "eval.txt"}}}"#),
        Ok(SplitPlan::Paths {
            train: folder.path().join("train.txt"),
            eval: Some(folder.path().join("eval.txt")),
            eval_share: 0.0,
            test: None
        })
    );
    let (job, _) = parse(r#"{"data": {"path": "train.txt"}}"#, folder.path(), &[]).unwrap();
    assert!(matches!(job.data.kind, DataKind::Text { .. }));
}

#[test]
fn devices_are_auto_or_a_list_of_indices() {
    let devices = |value: &str, backend: &str| {
        let text = format!(r#"{{"training": {{"devices": {value}, "backend": "{backend}"}}}}"#);
        job(&text, &[]).training.placement.devices
    };
    for auto in ["null", "\"auto\""] {
        assert_eq!(devices(auto, "cuda"), None);
    }
    assert_eq!(job("{}", &[]).training.placement.devices, None);
    assert_eq!(devices("[2, 0]", "cuda"), Some(vec![2, 0]));
    assert_eq!(devices("[0]", "flex"), Some(vec![0]));
    let set = ["training.backend=wgpu", "training.devices=[1]"];
    assert_eq!(job("{}", &set).training.placement.devices, Some(vec![1]));
}

/// `torch.set_float32_matmul_precision` has the same names and the same default.
#[test]
fn float32_products_have_all_bits_unless_the_job_allows_tf32() {
    let precision = |training: &str| {
        let text = format!(r#"{{"training": {{"backend": "cuda"{training}}}}}"#);
        job(&text, &[]).training.placement.float32_matmul_precision
    };
    assert_eq!(precision(""), Float32MatmulPrecision::Highest);
    for (name, allows) in [("highest", false), ("high", true), ("medium", true)] {
        let given = precision(&format!(r#", "float32_matmul_precision": "{name}""#));
        assert_eq!((given.name(), given.allows_tf32()), (name, allows));
    }
}

#[test]
fn null_means_not_given() {
    let text = r#"{"model": null, "data": {"path": null, "splits": null, "tokenizer": null}, "training": {"max_steps": null, "save_steps": null}, "deepspeed": null}"#;
    assert_eq!(job(text, &["model.config=null", "data.kind=text"]).data.kind, DataKind::Synthetic);
}

/// transformers writes these values into its own files.
#[test]
fn trainer_defaults_mean_not_given() {
    let plain = job("{}", &[]);
    for training in [
        r#"{"max_steps": -1, "report_to": "none", "lr_scheduler_kwargs": {}}"#,
        r#"{"max_steps": -1.0, "report_to": ["none"]}"#,
    ] {
        assert_eq!(job(&format!(r#"{{"training": {training}}}"#), &[]), plain, "{training}");
    }
    assert_eq!(job("{}", &["training.max_steps=-1"]), plain);
    let trained = job(r#"{"training": {"max_steps": -1, "num_train_epochs": 3}}"#, &[]).training;
    assert_eq!((trained.length.max_steps, trained.length.epochs), (None, Some(3.0)));
    for training in [
        r#"{"max_steps": -2}"#,
        r#"{"report_to": ["none", "wandb"]}"#,
        r#"{"report_to": ["wandb", "mlflow"]}"#,
        r#"{"report_to": {"wandb": true}}"#,
    ] {
        let text = format!(r#"{{"training": {training}}}"#);
        assert!(parse(&text, Path::new(""), &[]).is_err(), "{training}");
    }
}

#[test]
fn model_fields_are_handed_on() {
    let job = job(
        r#"{"model": {"config": {"n_layer": 2, "extra": [1, null]}}}"#,
        &["model.config.n_embd=48e0"],
    );
    assert_eq!(json!(job.model.config), json!({"n_layer": 2, "extra": [1, null], "n_embd": 48}));
}

#[test]
fn job_json_holds_everything() {
    let text = r#"{"training": {"max_steps": 5, "micro_batch_size": 2}, "deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}}"#;
    let (job, written) = parse(text, Path::new(""), &[]).unwrap();
    let resolved = resolve(&written, &job.run_context()).unwrap();
    let json = serde_json::to_value(ResolvedJob::new(job, &written, resolved)).unwrap();
    assert_eq!(json["training"]["max_steps"], 5);
    assert_eq!(json["data"]["splits"]["from"], "shares");
    assert_eq!(json["deepspeed"]["zero_optimization"]["stage"], 3);
    assert_eq!(json["resolved"]["plan"]["batch"]["train_batch_size"], 2);
    assert_eq!(json["resolved"]["plan"]["zero"]["stage"], "3");
    assert_eq!(json["resolved"]["autos"]["train_micro_batch_size_per_gpu"]["value"], 2);
    assert_eq!(json["resolved"]["notes"][0]["severity"], "warning");
}

#[test]
fn mistakes_name_the_key_the_value_and_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), "text").unwrap();
    fs::write(folder.path().join("x.gguf"), "GGUF").unwrap();
    let refused = |text: &str, parts: &[&str]| {
        let message = match parse(text, folder.path(), &[]) {
            Err(message) => message,
            Ok((job, written)) => match resolve(&written, &job.run_context()) {
                Err(report) => report.to_string(),
                Ok(_) => panic!("accepted {text}"),
            },
        };
        for part in parts {
            assert!(message.contains(part), "{text}\nno {part:?} in\n{message}");
        }
    };
    let within = |inner: String, name: &str| format!("{{\"{name}\": {inner}}}");
    for (path, value, [problem, remedy]) in [
        ("modle", "{}", ["unknown key", "did you mean model?"]),
        ("lr", "1e-4", ["unknown key", "did you mean deepspeed.optimizer.params.lr?"]),
        ("training.frozen", "true", ["unknown key", "did you mean training.param_groups.frozen?"]),
        ("training.max_step", "3", ["unknown key", "did you mean max_steps?"]),
        ("training.ranks", "0", ["0 is out of range", "from 1 to 1024"]),
        ("training.ranks", "1025", ["1025 is out of range", "from 1 to 1024"]),
        ("training.ranks", r#""two""#, ["\"two\" is a string", "from 1 to 1024"]),
        (
            "training.backend",
            r#""cpu""#,
            ["\"cpu\" is not a known value", "one of flex, wgpu, cuda, tch"],
        ),
        ("training.max_steps", "0", ["0 is out of range", "at least 1"]),
        ("training.epochs", "0", ["0 is out of range", "above 0"]),
        ("training.seed", "-1", ["-1 is out of range", "leave the key out for 42"]),
        ("training.learning_rate", "NaN", ["NaN is not a number", "at least 0"]),
        ("training.learning_rate", "Infinity", ["Infinity is not finite", "at least 0"]),
        ("training.output_dir", r#"" ""#, ["names no folder", "give a folder"]),
        ("training.output_dir", "null", ["null", "leave the key out for \"output\""]),
        ("training.save_total_limit", "2", ["no checkpoints are saved", "add training.save_steps"]),
        (
            "training.resume",
            "true",
            ["is a command-line option", "--resume TAG on the command line"],
        ),
        ("training.eval_steps", "5", ["nothing to evaluate", "add data.splits"]),
        ("training.fp16", "true", ["not a key of the job file", "deepspeed.fp16.enabled"]),
        (
            "training.gradient_accumulation_steps",
            "2",
            ["not a key of the job", "deepspeed.gradient_accumulation_steps"],
        ),
        ("training", "[]", ["[] is a list", "{ ... }"]),
        ("model.architecture", r#""mamba""#, ["\"mamba\" is not a known value", "one of gpt2"]),
        (
            "model.pretrained",
            r#""./openai-community/gpt2""#,
            ["\"./openai-community/gpt2\"", "owner/name"],
        ),
        ("model.pretrained", r#""a.txt""#, ["is a file; must be a folder", "model.safetensors"]),
        (
            "model.pretrained",
            r#""x.gguf""#,
            ["is a file; must be a folder", "a GGUF file can generate but not train"],
        ),
        ("model.pretrained", r#""""#, ["\"\"", "folder"]),
        ("model.config", "3", ["3 is a number", "n_layer"]),
        (
            "model.config.problem_type",
            r#""regression""#,
            ["has no effect on a language model", "\"classification\""],
        ),
        (
            "data.kind",
            r#""images""#,
            ["\"images\" is not a known value", "one of text, chat, preference, tokens"],
        ),
        ("data.path", r#""nowhere.txt""#, ["\"nowhere.txt\"", "no such file or folder"]),
        (
            "data.name",
            r#""wikitext-2-raw-v1""#,
            ["data.path is not a data set", "remove data.name"],
        ),
        ("data.join", r#""space""#, ["\"space\"", "blank_line"]),
        (
            "training.devices",
            "[0, 2]",
            ["2 does not exist: backend \"flex\" has one device", "\"auto\""],
        ),
        (
            "data.sequence_length",
            "0",
            ["0 is out of range", "leave the key out for 128 (1024 for chat and preference)"],
        ),
        (
            "training.checkpoint_scope",
            r#""some""#,
            [
                "\"some\" is not a known value",
                "leave the key out for \"all\" (\"trained\" with model.lora and model.adapter)",
            ],
        ),
        (
            "data.assistant_only_loss",
            r#""true""#,
            ["must be true or false, without quotes, or \"turns\"; ", "write true"],
        ),
        (
            "model.config",
            r#""{\"n_embd\": 32}""#,
            ["is a string; must be a section", "write { \"n_embd\": 32 }"],
        ),
        ("model", r#""gpt2""#, ["\"gpt2\" is a string", "write { \"architecture\": \"gpt2\" }"]),
        ("data.vocab_size", "10", ["10 is out of range", "from 257"]),
        ("data.tokenizer", r#""nowhere""#, ["\"nowhere\"", "tokenizer.json"]),
        ("data.shuffle", "1", ["1 is a number", "true or false"]),
        (
            "training.metric_for_best_model",
            r#""bleu""#,
            [
                "\"bleu\" is not a known value; must be one of loss, eval_loss, accuracy, eval_accuracy, f1, eval_f1, mae, \
                 eval_mae",
                "choose one of them, or leave the key out for \"loss\"",
            ],
        ),
        (
            "data.splits.train",
            "0.9",
            ["0.9 is a number; must be a string: a percentage", "write \"90%\""],
        ),
        ("data.splits.train", r#""90""#, ["\"90\"", "existing file"]),
        ("data.splits.train", r#""110%""#, ["\"110%\" is not a share", "\"90%\""]),
        ("data.splits.train", r#""NaN%""#, ["\"NaN%\" is not a share", "\"90%\""]),
        ("data.splits", r#"{"train": "90%", "eval": "20%"}"#, ["add up to 110.0000%", "\"90%\""]),
        (
            "data.splits",
            r#"{"train": "90%", "eval": "a.txt"}"#,
            ["partly shares and partly not", "paths for all"],
        ),
        ("data.splits.trian", r#""90%""#, ["unknown key", "did you mean train?"]),
    ] {
        let text = path.rsplit('.').fold(value.to_owned(), within);
        refused(&text, &[path, problem, remedy]);
    }
    for (text, parts) in [
        (
            r#"{"train_batch_size": 8, "zero_optimization": {"stage": 3}}"#,
            [
                "job.json: 1 problem\n",
                "error: this looks like a DeepSpeed configuration",
                "pass it with --deepspeed together with a job file",
            ],
        ),
        (
            r#"{"$schema": "x", "train_batch_size": 8}"#,
            ["job.json: 1 problem\n", "this looks like a DeepSpeed configuration", "--deepspeed"],
        ),
        (
            r#"{"deepspeed": {"train_batch_size": 8, "optimizer": {"type": "AdamW", "lr": 1}}}"#,
            ["deepspeed section of job.json", "error: deepspeed.optimizer.lr (line 1,", "params"],
        ),
        (
            r#"{"training": {"ranks": 2}}"#,
            [
                "deepspeed section of job.json",
                "error: deepspeed.train_micro_batch_size_per_gpu",
                "training.micro_batch_size",
            ],
        ),
        (
            r#"{"training": {"checkpoint_scope": "trained",
                "param_groups": [{"params": "wte", "frozen": true}]}}"#,
            ["training.checkpoint_scope", "has no pretrained model", "write \"all\""],
        ),
        (
            r#"{"model": {"architecture": "encoder"}}"#,
            ["data.kind", "texts with a class each", "write \"classification\""],
        ),
        (
            r#"{"model": {"architecture": "imdb_encoder", "pretrained": "openai-community/gpt2"},
                "data": {"kind": "classification"}}"#,
            ["model.pretrained", "encoder does not support pretrained weights", "remove it"],
        ),
        (
            r#"{"model": {"config": {"problem_type": "regression"}}, "data": {"kind": "classification"},
                "training": {"metric_for_best_model": "accuracy"}}"#,
            [
                "training.metric_for_best_model",
                "which problem_type \"regression\" does not have",
                "write \"loss\"",
            ],
        ),
        (
            r#"{"training": {"backend": "cuda", "devices": "[0, 1]"}}"#,
            ["training.devices", "is a string", "write [0,1]"],
        ),
        (
            r#"{"training": {"backend": "cuda", "devices": ["1"]}}"#,
            ["training.devices", "\"1\" is not a device index", "write [1]"],
        ),
        (r#"{"data": {"kind": "tokens"}}"#, ["data.path", "is missing", "give a .bin file"]),
        (
            r#"{"data": {"kind": "synthetic", "path": "a.txt"}}"#,
            ["data.path", "reads no files", "remove the path"],
        ),
        (
            r#"{"data": {"path": "a.txt", "name": "plain_text"}}"#,
            ["data.name", "data.path is not a data set", "folder or repository"],
        ),
        (
            r#"{"data": {"kind": "tokens", "path": "owner/name"}}"#,
            ["data.path", "is a repository", ".bin file"],
        ),
        (
            r#"{"data": {"path": "owner/name", "splits": {"test": "test"}}}"#,
            ["data.splits.train", "nothing would train", "\"90%\""],
        ),
        (
            r#"{"data": {"path": "owner/name", "splits": {"train": "train", "eval": "10%"}}}"#,
            ["data.splits.eval", "only kind \"classification\"", "fractions of data.path"],
        ),
        (
            r#"{"training": {"batch_size_schedule": {"from_step": [3], "train_batch_size": []}}}"#,
            ["training.batch_size_schedule.from_step", "has 1 step for 0 batch sizes", "one step"],
        ),
        (
            r#"{"training": {"backend": "cuda", "devices": 2}}"#,
            ["training.devices", "2 is a number; must be \"auto\" or a list", "write [2]"],
        ),
        (
            r#"{"training": {"backend": "cuda", "devices": "all"}}"#,
            ["training.devices", "\"all\" is a string; must be \"auto\" or a list", "write [0, 1]"],
        ),
        (
            r#"{"training": {"backend": "cuda", "devices": [0, -1]}}"#,
            ["training.devices", "-1 is not a device index", "from 0 to 65535"],
        ),
        (
            r#"{"training": {"backend": "cuda", "devices": [1, 0, 1]}}"#,
            ["training.devices", "1 is listed twice", "list each device once"],
        ),
        (
            r#"{"training": {"backend": "cuda", "float32_matmul_precision": "tf32"}}"#,
            ["training.float32_matmul_precision", "\"tf32\"", "highest, high, medium"],
        ),
        (
            r#"{"training": {"backend": "cuda", "devices": []}}"#,
            ["training.devices", "[] lists no device", "write \"auto\""],
        ),
        (
            r#"{"training": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": "{\"min_lr\": 1e-5}"}}"#,
            ["1 problem", "training.lr_scheduler_kwargs", "write { \"min_lr\": 1e-5 }"],
        ),
        (
            r#"{"deepspeed": "{\"train_micro_batch_size_per_gpu\": 2}"}"#,
            [
                "job.json: 1 problem\n  error: deepspeed (line 1, column 15)",
                "must be a section, { ... }, or the path of a file",
                "write { \"train_micro_batch_size_per_gpu\": 2 }",
            ],
        ),
        (
            r#"{"data": {"splits": {"eval": "10%"}}}"#,
            ["data.splits.train", "nothing would train", "\"90%\""],
        ),
        (
            r#"{"data": {"splits": {"eval": "a.txt"}}}"#,
            ["data.splits.train", "nothing would train", "\"90%\""],
        ),
        (
            r#"{"data": {"path": "a.txt", "splits": {"train": "a.txt"}}}"#,
            ["data.splits", "data.path is a file", "no data.path"],
        ),
        (
            r#"{"deepspeed": "nowhere.json"}"#,
            ["nowhere.json", "no such file", "configs/nowhere.json"],
        ),
        (
            r#"{"deepspeed": 3}"#,
            ["deepspeed section of job.json", "the file contains a number", "{ ... }"],
        ),
        (
            r#"{"training": {"seed": 1, "seed": 2}}"#,
            ["Duplicate keys in job file: [training.seed]", "line 1", "keep one"],
        ),
        (r#"[]"#, ["job.json", "a list", "{ ... }"]),
        ("", ["job.json", "line 1, column 1", "write JSON"]),
    ] {
        refused(text, &parts);
    }
}

#[test]
fn a_missing_job_file_names_every_place() {
    let request = JobRequest { config: "nowhere.json".into(), ..JobRequest::default() };
    let message = Job::load(&request).unwrap_err().to_string();
    assert_eq!(
        message,
        "nowhere.json: no such file; looked for nowhere.json, configs/nowhere.json"
    );
}

#[test]
fn parameter_groups_are_read_and_their_mistakes_named() {
    let text = r#"{"training": {"no_decay": "nothing", "param_groups": [
        {"params": "^wte", "lr": 1e-5, "weight_decay": 0},
        {"params": ["^h\\.0\\.", "^wpe"], "dims": [1, 2], "betas": [0.8, 0.9], "lr_factor": 2},
        {"dims": [1], "frozen": true}]}}"#;
    let record = serde_json::to_value(job(text, &[]).training).unwrap();
    assert_eq!(record["no_decay"], "nothing");
    let trained = |rate: serde_json::Value, decay: Option<f64>, betas: serde_json::Value| json!({"trained": {"rate": rate, "weight_decay": decay, "betas": betas}});
    let expected = json!([
        {"params": ["^wte"], "dims": [], "update": trained(json!({"own": 1e-5}), Some(0.0), json!(null))},
        {"params": ["^h\\.0\\.", "^wpe"], "dims": [1, 2],
            "update": trained(json!({"factor": 2.0}), None, json!([0.8, 0.9]))},
        {"params": [], "dims": [1], "update": "frozen"},
    ]);
    assert_eq!(record["param_groups"], expected);
    assert_eq!(
        serde_json::to_value(job("{}", &[]).training).unwrap()["no_decay"],
        "biases_and_norms"
    );

    for (groups, parts) in [
        (r#"{"params": "wte"}"#, ["training.param_groups", "must be a list of sections"]),
        (r#"[{"param": "wte"}]"#, ["param_groups[0].param", "did you mean params?"]),
        (r#"[{"params": "("}]"#, ["param_groups[0].params", "unclosed group"]),
        (r#"[{"params": [1]}]"#, ["param_groups[0].params", "a string or a list of strings"]),
        (r#"[{"params": "a", "lr": -1}]"#, ["param_groups[0].lr", "at least 0"]),
        (
            r#"[{"params": "a", "lr": 1, "lr_factor": 1}]"#,
            ["param_groups[0].lr", "remove one of them"],
        ),
        (
            r#"[{"params": "a", "lr": 1, "frozen": true}]"#,
            ["param_groups[0].lr", "or remove frozen"],
        ),
        (r#"[{"params": "a"}, {"dims": [0]}]"#, ["param_groups[1].dims", "at least 1"]),
    ] {
        let set = format!("training.param_groups={groups}");
        let error = parse("{}", Path::new(""), &[&set]).unwrap_err();
        for part in parts {
            assert!(error.contains(part), "{groups}: {error}");
        }
    }
}

#[test]
fn parameter_groups_fit_the_optimizer() {
    for (optimizer, group, expected) in [
        (
            r#"{"type": "SGD", "params": {"lr": 1}}"#,
            r#"{"dims": [1], "betas": [0, 0]}"#,
            "betas are of Adam",
        ),
        (r#"{"type": "SGD", "params": {"lr": 0}}"#, r#"{"dims": [1], "lr": 1}"#, "which is 0"),
        (r#"{"type": "AdamW"}"#, "{}", "selects every parameter"),
    ] {
        let text = format!(
            r#"{{"training": {{"param_groups": [{group}]}},
                "deepspeed": {{"train_batch_size": 1, "optimizer": {optimizer}}}}}"#
        );
        let (job, written) = parse(&text, Path::new(""), &[]).unwrap();
        let error = resolve(&written, &job.run_context()).unwrap_err().to_string();
        assert!(error.contains("training.param_groups[0]") && error.contains(expected), "{error}");
    }
}

#[test]
fn keys_of_a_vocabulary_that_change_nothing_are_warnings() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.bin"), "").unwrap();
    let warned = |text: &str| -> Vec<String> {
        let (job, _) = parse(text, folder.path(), &[]).unwrap();
        job.notes.iter().map(|note| note.key.clone()).collect()
    };
    let has = |text: &str, key: &str| warned(text).iter().any(|it| it == key);
    let key = "data.new_vocabulary";
    assert!(has(r#"{"data": {"new_vocabulary": true}}"#, key));
    let pretrained = r#"{"model": {"pretrained": "owner/name"}, "data": {"new_vocabulary": true}}"#;
    assert!(!has(pretrained, key));
    let key = "data.eos_token";
    let tokens = r#""kind": "tokens", "path": "a.bin", "eos_token": "</s>""#;
    assert!(has(&format!("{{\"data\": {{{tokens}}}}}"), key));
    assert!(!has(&format!("{{\"data\": {{{tokens}, \"tokenizer\": \"owner/name\"}}}}"), key));
    assert!(!has(r#"{"data": {"eos_token": "</s>"}}"#, key));
}

#[test]
fn records_have_the_keys_of_the_section_in_one_order() {
    let text = r#"{"data": {"kind": "preference", "path": "owner/pairs"},
        "model": {"pretrained": "owner/model"},
        "training": {"pipeline_stages": 2, "ranks": 4, "pipeline_schedule": "gpipe"}}"#;
    let record = serde_json::to_value(job(text, &[]).training).unwrap();
    let keys: Vec<_> = record.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = "epochs max_steps seed ranks pipeline_stages pipeline_schedule backend \
        float32_matmul_precision devices collective_timeout output_dir eval_steps \
        eval_max_samples per_device_eval_batch_size load_best_model_at_end metric_for_best_model early_stopping_patience \
        early_stopping_threshold save_steps async_save save_total_limit save_best_limit \
        save_merged checkpoint_scope batch_size_schedule report_to logging_steps learning_rate \
        micro_batch_size gradient_checkpointing warmup_steps lr_scheduler_type \
        lr_scheduler_kwargs label_smoothing_factor dpo no_decay param_groups";
    assert_eq!(keys, expected.split_whitespace().collect::<Vec<_>>());
}
