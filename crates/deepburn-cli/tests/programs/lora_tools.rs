//! Tests of adapters outside of a complete run: checkpoints, base models, evaluation without
//! training.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::job::{Job, Trained, tiny_model};
use crate::outputs::{read_json, text_model};
use crate::program::{deepburn, finetune};
use crate::resume::resume;

/// Returns a job that trains an adapter of the tiny GPT-2 and saves two checkpoints.
fn job() -> Job {
    let lora = json!({ "r": 4, "target_modules": ["c_attn"] });
    Job::tiny().with("model.lora", lora).with("training.save_steps", 2)
}

fn files(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        names.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Copies the tiny GPT-2 to `folder`, with each value of its weights changed by `change`.
pub(crate) fn copy_of_tiny(folder: &Path, change: impl Fn(f32) -> f32) {
    fs::create_dir(folder).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(tiny_model().join(name), folder.join(name)).unwrap();
    }
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for value in bytes[8 + header..].chunks_exact_mut(4) {
        let changed = change(f32::from_le_bytes((&*value).try_into().unwrap()));
        value.copy_from_slice(&changed.to_le_bytes());
    }
    let mut permissions = fs::metadata(&path).unwrap().permissions();
    #[allow(clippy::permissions_set_readonly_false, reason = "a copy in a temporary folder")]
    permissions.set_readonly(false);
    fs::set_permissions(&path, permissions).unwrap();
    fs::write(path, bytes).unwrap();
}

/// A checkpoint is exported as the adapter that the run saved at its end, byte for byte.
#[test]
fn checkpoints_are_exported_as_adapters() {
    let whole = json!({ "r": 4, "target_modules": ["c_attn"], "modules_to_save": ["wte"],
                        "ensure_weight_tying": true });
    let embedding = json!({ "r": 4, "target_modules": ["wte", "c_attn"] });
    let tokens = json!({ "r": 4, "target_modules": ["c_attn"], "trainable_token_indices": [7, 3] });
    let untied = json!({ "r": 4, "target_modules": ["c_attn"], "modules_to_save": ["wte"] });
    for (lora, bf16) in [(whole, false), (embedding, false), (tokens, true), (untied, true)] {
        let job = job().with("model.lora", lora.clone());
        let job = if bf16 { job.with("deepspeed.bf16.enabled", true) } else { job };
        job.run().succeeded();
        let arguments = ["consolidate", "output", "exported"];
        let ending = deepburn(job.folder(), &arguments).succeeded();
        assert!(ending.stdout.contains("exported/adapter_model.safetensors"), "{}", ending.stdout);
        let [saved, exported] = ["output/adapter", "exported"].map(|it| job.folder().join(it));
        assert_eq!(files(&exported), files(&saved), "{lora}");
        for name in files(&saved) {
            let [saved, exported] = [&saved, &exported].map(|it| fs::read(it.join(&name)).unwrap());
            assert!(saved == exported, "{lora}: {name} differs");
        }
        let other = deepburn(job.folder(), &["consolidate", "output", "o", "--dtype", "bf16"]);
        other.failed(2, &["--dtype: the checkpoint has an adapter"]);
        let parts = ["exported/", " exists and is not overwritten"];
        deepburn(job.folder(), &arguments).failed(2, &parts);
        let text = deepburn(job.folder(), &["inspect", "output"]).succeeded().stdout;
        assert!(text.contains("\nadapter     LoRA of rank 4 in"), "{text}");
    }
}

/// The remedies of a run that only has checkpoints lead to its model.
#[test]
fn an_unfinished_run_is_exported_and_merged() {
    let job = job().with("training.max_steps", 2);
    job.run().succeeded();
    let output = job.folder().join("output");
    fs::rename(output.join("adapter"), job.folder().join("saved")).unwrap();
    let parts = ["the run has only saved checkpoints", "`deepburn consolidate`"];
    deepburn(job.folder(), &["merge", "output", "merged"]).failed(2, &parts);
    let generate = ["generate", "--model", "output", "--prompt", "a"];
    deepburn(job.folder(), &generate).failed(2, &parts);
    let next = |from: &str| {
        Job::tiny().with("model.pretrained", job.folder().join(from).display().to_string())
    };
    next("output").run().failed(2, &["model.pretrained: ", parts[0], parts[1]]);
    deepburn(job.folder(), &["consolidate", "output", "exported"]).succeeded();
    for from in ["exported", "saved"] {
        deepburn(job.folder(), &["merge", from, &format!("{from}-merged")]).succeeded();
    }
    let weights = |from: &str| {
        fs::read(job.folder().join(format!("{from}-merged/model.safetensors"))).unwrap()
    };
    assert!(weights("exported") == weights("saved"));
    // An adapter is not a pretrained model.
    fs::rename(job.folder().join("saved"), output.join("adapter")).unwrap();
    let parts = ["model.pretrained: ", "it has a LoRA adapter", "give it as model.adapter"];
    next("output").run().failed(2, &parts);
    next("output/adapter").run().failed(2, &parts);
    for option in [["--base", "nope"], ["--base", "output"]] {
        let start = ["merge", "output", "other"];
        let part = format!("--base: {} has neither config.json", option[1]);
        deepburn(job.folder(), &[&start[..], &option].concat()).failed(2, &[&part]);
    }
}

/// A base of the same shapes with other weights is refused, wherever its folder is.
#[test]
fn an_adapter_of_another_base_model_is_refused() {
    let source = job().with("training.max_steps", 1);
    source.run().succeeded();
    let folder = source.folder();
    copy_of_tiny(&folder.join("same"), |value| value);
    copy_of_tiny(&folder.join("other"), |value| value * 1.05);
    let adapter = folder.join("output/adapter");
    let job = |base: &str| {
        Job::tiny()
            .with("model.pretrained", folder.join(base).display().to_string())
            .with("model.adapter", adapter.display().to_string())
            .with("training.max_steps", 1)
    };
    let parts = ["are not those that the adapter in", "give its base model"];
    let refused = || {
        let other = job("other");
        other.run().failed(2, &[&["model.pretrained: "][..], &parts].concat());
        assert!(!other.folder().join("output").exists());
        let merge = ["merge", "output/adapter", "merged", "--base", "other"];
        deepburn(folder, &merge).failed(2, &[&["--base: "][..], &parts].concat());
        assert!(!folder.join("merged").exists());
    };
    refused();
    job("same").run().succeeded();
    deepburn(folder, &["merge", "output/adapter", "m", "--base", "same"]).succeeded();
    // PEFT saves no hash, but the named folder can be compared.
    fs::remove_file(adapter.join("deepburn.json")).unwrap();
    refused();
    job("same").run().succeeded();
    // A name alone proves nothing, so it is a warning.
    let path = adapter.join("adapter_config.json");
    let rename = |name: &str| {
        let mut fields = read_json(&path);
        fields["base_model_name_or_path"] = json!(name);
        fs::write(&path, fields.to_string()).unwrap();
    };
    for (name, warns) in [("somebody/elsewhere", true), ("somebody/Other", false)] {
        rename(name);
        let ending = job("other").run().succeeded();
        let warning = "names the base model somebody/elsewhere, and this is";
        assert_eq!(ending.stderr.contains(warning), warns, "{}", ending.stderr);
    }
    // The folder that the adapter names may have changed itself.
    let changed = self::job().with("training.max_steps", 1).with("model.pretrained", "base");
    let base = changed.folder().join("base");
    copy_of_tiny(&base, |value| value);
    changed.run().succeeded();
    fs::remove_dir_all(&base).unwrap();
    copy_of_tiny(&base, |value| value * 1.05);
    deepburn(changed.folder(), &["merge", "output", "merged"])
        .failed(2, &[parts[0], "they have changed there since; restore them, give a folder"]);
}

/// Selections of the same modules are the same adapter, and so is a copy of the adapter's folder.
#[test]
fn a_run_resumes_with_another_spelling_of_its_adapter() {
    let job = job().with("training.max_steps", 2);
    job.run().succeeded();
    let job = job
        .with("training.max_steps", 4)
        .with("model.lora.target_modules", r".*\.attn\.c_attn")
        .with("model.lora.lora_alpha", 8);
    resume(&job, &[]).succeeded();
    let other = job.with("model.lora.target_modules", r".*\.mlp\.c_fc");
    let other = other.with("training.max_steps", 6);
    resume(&other, &[]).failed(2, &["the adapter's target_modules changed from"]);
    // An adapter that is trained further, from another place.
    let copies = ["first", "second"].map(|it| other.folder().join(it));
    for copy in &copies {
        fs::create_dir(copy).unwrap();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            let from = other.folder().join("output/adapter").join(name);
            fs::copy(from, copy.join(name)).unwrap();
        }
    }
    let further = |copy: &PathBuf| copy.display().to_string();
    let job = Job::tiny()
        .with("model.adapter", further(&copies[0]))
        .with("training.save_steps", 2)
        .with("training.max_steps", 2);
    job.run().succeeded();
    let job = job.with("model.adapter", further(&copies[1])).with("training.max_steps", 4);
    resume(&job, &[]).succeeded();
}

/// An evaluation without training has the loss of the run's last evaluation, with an adapter and
/// with the merged model.
#[test]
fn models_are_evaluated_without_training() {
    let splits = json!({ "train": "80%", "eval": "10%", "test": "10%" });
    let trained =
        job().with("data.splits", splits.clone()).with("training.save_merged", true).sharded(2, 2);
    let last = trained.train().evaluations.pop().unwrap();
    let test = read_json(&trained.folder().join("output/test.json"));
    let at = |name: &str| trained.folder().join("output").join(name).display().to_string();
    let evaluated = |key: &str, value: String, ranks: usize| {
        let job =
            Job::tiny().with("data.splits", splits.clone()).sharded(3, ranks).with(key, value);
        fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
        let arguments = ["--config", "job.json", "--evaluate"];
        finetune(job.folder(), &arguments).succeeded();
        let output = job.folder().join("output");
        assert!(!output.join("model").exists() && !output.join("adapter").exists());
        assert!(!output.join("checkpoints").exists());
        finetune(job.folder(), &arguments).failed(2, &["--evaluate: ", "is from an earlier run"]);
        let rows = deepburn::metrics::read_metrics(&output.join("metrics.jsonl")).unwrap();
        let [deepburn::metrics::MetricsRow::Eval(row)] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!(row.step, 0);
        (row.eval_loss, read_json(&output.join("test.json")))
    };
    // The merged model rounds once more, and other ranks add in another order.
    for (key, value, ranks, bound) in [
        ("model.adapter", at("adapter"), 2, 0.0),
        ("model.adapter", at("adapter"), 1, 1e-6),
        ("model.pretrained", at("model"), 2, 1e-6),
    ] {
        let (loss, own) = evaluated(key, value, ranks);
        assert!((loss - last.eval_loss).abs() <= bound, "{key}: {loss} {}", last.eval_loss);
        let difference = own["test_loss"].as_f64().unwrap() - test["test_loss"].as_f64().unwrap();
        assert!(difference.abs() <= bound, "{key}: {own} {test}");
        assert_eq!(own["targets"], test["targets"]);
    }
    let job = Job::tiny();
    fs::write(job.folder().join("job.json"), job.json().to_string()).unwrap();
    finetune(job.folder(), &["--config", "job.json", "--evaluate"])
        .failed(2, &["--evaluate: the job has neither an eval nor a test split"]);
}

/// With an adapter, no remedy is a vocabulary that is refused next.
#[test]
fn larger_vocabularies_are_refused_with_their_remedy() {
    let job = text_model().with("model.lora", json!({}));
    let refused = |job: &Job, parts: &[&str]| {
        let parts = [parts, &["resize the base model first", "trainable_token_indices"]].concat();
        job.run().failed(2, &parts);
    };
    let job = job.with("model.config", json!({ "vocab_size": 400 }));
    refused(&job, &["model.config.vocab_size: adds 100 rows"]);
    let job = job.with("model.config", Value::Null);
    // A tokenizer with more tokens than the embedding has rows.
    let larger = Job::uneven()
        .with("data", json!({ "kind": "synthetic", "sequence_length": 32, "vocab_size": 350 }))
        .with("model.config.vocab_size", 350)
        .with("training.max_steps", 1)
        .sharded(1, 1);
    larger.train();
    let tokenizer = larger.folder().join("output/model").display().to_string();
    let job = job.with("data.tokenizer", tokenizer);
    refused(&job, &["data.tokenizer: has more tokens than the embedding"]);
}

/// Every rank of a larger group ends, although rank 0 alone merges.
#[test]
fn merging_is_no_collective() {
    let job = job().with("training.save_merged", true).sharded(3, 3);
    let trained: Trained = job.train();
    assert!(job.folder().join("output/model/config.json").exists());
    assert!(!trained.weights.is_empty());
}

/// Inputs in the places of results are refused: the run would replace or remove them.
#[test]
fn a_run_does_not_replace_its_inputs() {
    let job = job().with("training.max_steps", 1).with("training.save_merged", true);
    job.run().succeeded();
    let folder = job.folder().to_owned();
    fs::rename(folder.join("output"), folder.join("run")).unwrap();
    // Checkpoints of an earlier run have an error of their own.
    fs::remove_dir_all(folder.join("run/checkpoints")).unwrap();
    let model = folder.join("run/model");
    let weights = fs::read(model.join("model.safetensors")).unwrap();
    let refused = |job: &Job, parts: &[&str]| {
        let parts = [&["training.output_dir: ", "give another folder"], parts].concat();
        job.run().failed(2, &parts);
    };
    let job = job.with("training.output_dir", "run");
    // The run as the pretrained model, and its model, with and without an adapter of its own.
    for pretrained in ["run", "run/model"] {
        let job = Job::tiny()
            .with("model.pretrained", folder.join(pretrained).display().to_string())
            .with("training.output_dir", folder.join("run").display().to_string());
        refused(&job, &["run/model is the folder of model.pretrained"]);
        let adapted = job.with("model.lora", json!({ "target_modules": ["c_attn"] }));
        refused(&adapted, &["run/model is the folder of model.pretrained"]);
    }
    let further = job.with("model.lora", Value::Null);
    let further = further.with("model.adapter", "run/adapter");
    refused(&further, &["run/adapter is the folder of model.adapter"]);
    assert!(fs::read(model.join("model.safetensors")).unwrap() == weights);
    // A run with a merged model has the adapter too.
    let other = further.with("model.adapter", "run").with("training.output_dir", "other");
    other.run().succeeded();
    let missing = other.with("model.adapter", "run/model").with("training.output_dir", "o");
    let parts = ["model.adapter: run/model has neither", "a whole model, which needs no adapter"];
    missing.run().failed(2, &parts);
    // The job file, and the data of a split.
    let here = Job::tiny().with("training.output_dir", ".");
    refused(&here, &["job.json is the job file"]);
    let data = fs::read(crate::job::data("tokens.bin")).unwrap();
    let test = here.folder().join("results/test.json");
    fs::create_dir(here.folder().join("results")).unwrap();
    fs::write(&test, &data).unwrap();
    let train = crate::job::data("tokens.bin").display().to_string();
    let split = here
        .with("training.output_dir", "results")
        .with("data.path", Value::Null)
        .with("data.splits", json!({ "train": train, "test": "results/test.json" }));
    refused(&split, &["results/test.json is data.splits.test"]);
    assert!(fs::read(&test).unwrap() == data);
}

/// A model in the folder of a run would be taken for the run's, even after it has trained further.
#[test]
fn exports_do_not_hide_a_run() {
    let job = job().with("training.max_steps", 2);
    job.run().succeeded();
    let before = files(&job.folder().join("output"));
    for tool in ["merge", "consolidate"] {
        let parts = ["output is the output folder of a run", "give another folder"];
        deepburn(job.folder(), &[tool, "output", "output"]).failed(2, &parts);
    }
    let parts = ["output/adapter/adapter_config.json exists and is not overwritten"];
    deepburn(job.folder(), &["merge", "output", "output/adapter"]).failed(2, &parts);
    assert_eq!(files(&job.folder().join("output")), before);
    deepburn(job.folder(), &["merge", "output", "output/model"]).succeeded();
}

/// The run of an adapter names its base model, so its memory is known.
#[test]
fn estimates_read_the_adapter_of_a_run() {
    let job = job().with("training.max_steps", 1);
    job.run().succeeded();
    let base = tiny_model().display().to_string();
    let fields = r#"{"r": 4, "target_modules": ["c_attn"]}"#;
    let estimate = |model: &str, more: &[&str]| {
        let start = ["estimate", "--model", model, "--stage", "0", "--json"];
        deepburn(job.folder(), &[&start[..], more].concat())
    };
    let new = estimate(&base, &["--lora", fields]).succeeded().stdout;
    assert_eq!(estimate("output", &[]).succeeded().stdout, new);
    estimate("output", &["--lora", fields]).failed(2, &["--lora: ", "is an adapter already"]);
    fs::rename(job.folder().join("output/checkpoints"), job.folder().join("checkpoints")).unwrap();
    estimate(".", &[]).failed(2, &["export one with `deepburn consolidate`"]);
}
