//! Tests of the supported models: the architecture that follows from a pretrained model, and the
//! fields of its `config.json`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::{Job, tiny_model};
use crate::outputs::read_json;
use crate::program::{Ending, deepburn};
use crate::reviews::reviews;

/// Copies the tiny model to `folder`, with these fields changed in its `config.json`.
fn copy_model(folder: &Path, fields: &Value) {
    fs::create_dir(folder).unwrap();
    fs::copy(tiny_model().join("model.safetensors"), folder.join("model.safetensors")).unwrap();
    let mut config = read_json(&tiny_model().join("config.json"));
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Returns a job of one step with a copy of the tiny model in its folder `given`.
fn job_with(fields: Value) -> Job {
    let job = Job::tiny().with("training.max_steps", 1).with("model.pretrained", "given");
    copy_model(&job.folder().join("given"), &fields);
    job
}

fn tool(job: &Job, arguments: &[&str]) -> Ending {
    deepburn(job.folder(), arguments)
}

#[test]
fn the_architecture_is_the_pretrained_models() {
    let job = job_with(json!({}));
    job.run().succeeded();
    let record = read_json(&job.folder().join("output/job.json"));
    assert_eq!(record["model"]["architecture"], "gpt2");
    // A job without a pretrained model, and one that names the architecture too.
    let job = Job::uneven().with("training.max_steps", 1);
    job.run().succeeded();
    let record = read_json(&job.folder().join("output/job.json"));
    assert_eq!(record["model"]["architecture"], "gpt2");
    job_with(json!({})).with("model.architecture", "GPT2").run().succeeded();
}

#[test]
fn models_that_are_not_supported_are_named_with_the_supported_ones() {
    for model_type in ["mamba", "qwen2_moe", "gemma3", "mixtral", "phi", "GPT2"] {
        let job = job_with(json!({ "model_type": model_type }));
        let found = format!("given/config.json has model_type \"{model_type}\"");
        let parts = ["model.pretrained: ", &found, "not supported; supported: gpt2"];
        job.run().failed(2, &parts);
        tool(&job, &["check-config", "job.json"]).failed(2, &parts);
        let refused = format!(
            "`model_type` is \"{model_type}\", but it must be one of gpt2, llama, qwen2, qwen3, mistral, phi3, gemma2, \
             gemma3_text, deepburn_encoder"
        );
        tool(&job, &["estimate", "--model", "given"]).failed(2, &["--model: ", &refused]);
        tool(&job, &["generate", "--model", "given", "--prompt", "a"]).failed(2, &[&refused]);
        tool(&job, &["predict", "--model", "given", "--text", "a"]).failed(2, &[&refused]);
    }
}

#[test]
fn an_architecture_that_contradicts_the_model_is_an_error() {
    for model_type in ["mamba", "deepburn_encoder"] {
        let job = job_with(json!({ "model_type": model_type })).with("model.architecture", "gpt2");
        let found = format!("given/config.json has model_type \"{model_type}\"");
        let remedy = "give a gpt2 model as model.pretrained";
        let parts = ["model.architecture: is \"gpt2\", but ", &found, remedy];
        job.run().failed(2, &parts);
        tool(&job, &["check-config", "job.json"]).failed(2, &parts);
        assert!(!job.folder().join("output").exists());
    }
}

#[test]
fn an_encoder_is_not_a_pretrained_model() {
    let first = reviews().with("training.max_steps", 1);
    first.run().succeeded();
    let pretrained = first.folder().join("output");
    for job in [reviews(), Job::tiny()] {
        let job = job.with("model", json!({ "pretrained": pretrained }));
        let parts = ["model.pretrained: ", "deepburn_encoder", "weights are not supported", "gpt2"];
        job.run().failed(2, &parts);
    }
    let job = reviews().with("model.pretrained", pretrained.display().to_string());
    job.run().failed(2, &["model.pretrained: encoder does not support pretrained weights"]);
}

#[test]
fn the_former_name_of_the_encoder_is_noted() {
    let job = reviews().with("training.max_steps", 1);
    let ending = job.run().succeeded();
    assert!(!ending.stderr.contains("imdb_encoder"), "{}", ending.stderr);
    let exported = read_json(&job.folder().join("output/model/config.json"));
    let job = reviews().with("training.max_steps", 1).with("model.architecture", "imdb_encoder");
    let ending = job.run().succeeded();
    let note =
        "INFO model.architecture (line 1, column 26): \"imdb_encoder\" is the former name of";
    assert_eq!(ending.stderr.matches(note).count(), 1, "{}", ending.stderr);
    assert_eq!(read_json(&job.folder().join("output/model/config.json")), exported);
    assert_eq!(exported["model_type"], "deepburn_encoder");
    let record = read_json(&job.folder().join("output/job.json"));
    assert_eq!(record["model"]["architecture"], "encoder");
}

#[test]
fn a_field_that_may_change_the_outputs_is_refused_until_it_is_removed() {
    for (name, value) in [
        ("sliding_window", json!(4096)),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0})),
        ("attention_bias", json!(false)),
        ("n_heads_kv", json!(2)),
    ] {
        let job = job_with(json!({ name: value }));
        let refused = format!("`{name}` is {value}, but the model does not read this field");
        let key = format!("model.config.{name}");
        job.run().failed(2, &["given/config.json: ", &refused, "set it to null", &key]);
        tool(&job, &["estimate", "--model", "given"]).failed(2, &["--model: ", &refused]);
        tool(&job, &["generate", "--model", "given", "--prompt", "a"]).failed(2, &[&refused]);

        // Null in the job removes it, and the exported model does not have it.
        let removed = job.with(&key, Value::Null);
        removed.run().succeeded();
        let exported = read_json(&removed.folder().join("output/model/config.json"));
        assert!(exported.get(name).is_none(), "{exported}");

        // So does null in the file, for tools too.
        let job = job_with(json!({ name: null }));
        job.run().succeeded();
        tool(&job, &["estimate", "--model", "output"]).succeeded();
    }
    // Another value in the job is refused under its key.
    let job = job_with(json!({"sliding_window": null})).with("model.config.sliding_window", 8);
    job.run().failed(2, &["model.config: `sliding_window` is 8, but the model does not read"]);
}

#[test]
fn a_feature_can_be_switched_off_in_the_job() {
    let job = job_with(json!({"is_causal": false}));
    job.run().failed(2, &["given/config.json: `is_causal` = false", "model.config.is_causal"]);
    job.with("model.config.is_causal", true).run().succeeded();
    let job = job_with(json!({"add_cross_attention": true}));
    job.run().failed(2, &["given/config.json: `add_cross_attention` = true"]);
    let job = job.with("model.config.add_cross_attention", false);
    job.run().succeeded();
    let exported = read_json(&job.folder().join("output/model/config.json"));
    assert_eq!(exported["add_cross_attention"], false);
}

#[test]
fn harmless_fields_are_exported_without_a_message() {
    let fields = json!({
        "_num_labels": 1, "task_specific_params": {"text-generation": {"do_sample": true}},
        "is_decoder": true, "unsloth_version": "2025.1", "length_penalty": 0.5, "rope_scaling": null,
    });
    let job = job_with(fields.clone());
    let ending = job.run().succeeded();
    let exported = read_json(&job.folder().join("output/model/config.json"));
    for (name, value) in fields.as_object().unwrap() {
        assert_eq!(&exported[name], value);
        assert!(!ending.stderr.contains(name.as_str()), "{}", ending.stderr);
    }
}
