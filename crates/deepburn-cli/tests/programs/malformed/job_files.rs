//! Tests of invalid job files, DeepSpeed configurations and Accelerate configurations.

use std::fs;

use serde_json::json;

use super::{Job, fault, fault_of_job, none};

fn nested(levels: usize) -> Vec<u8> {
    format!("{}1{}", "[".repeat(levels), "]".repeat(levels)).into_bytes()
}

fn nested_sections(levels: usize) -> Vec<u8> {
    format!("{}1{}", "{\"model\":".repeat(levels), "}".repeat(levels)).into_bytes()
}

fn texts() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("empty", vec![]),
        ("blank", b" \n\t \n".to_vec()),
        ("byte-order mark alone", b"\xef\xbb\xbf".to_vec()),
        ("UTF-16", b"\xff\xfe{\0}\0".to_vec()),
        ("invalid UTF-8", b"{\"model\": \"\xc3\x28\"}".to_vec()),
        ("binary", (0..=255).collect()),
        ("zeros", vec![0; 4096]),
        ("a list", b"[]".to_vec()),
        ("a number", b"17".to_vec()),
        ("a string", b"\"gpt2\"".to_vec()),
        ("null", b"null".to_vec()),
        ("a comment alone", b"// nothing".to_vec()),
        ("an open comment", b"{} /* ".to_vec()),
        ("an open brace", b"{\"model\": {".to_vec()),
        ("an open string", b"{\"model".to_vec()),
        ("one brace too many", b"{}}".to_vec()),
        ("two objects", b"{} {}".to_vec()),
        ("no comma", b"{\"model\": {} \"data\": {}}".to_vec()),
        ("no colon", b"{\"model\" {}}".to_vec()),
        ("single quotes", b"{'model': {}}".to_vec()),
        ("no quotes", b"{model: {}}".to_vec()),
        ("a bad escape", b"{\"model\": \"\\x\"}".to_vec()),
        ("half a surrogate", b"{\"model\": {\"pretrained\": \"\\ud800\"}}".to_vec()),
        ("hexadecimal", b"{\"training\": {\"seed\": 0x10}}".to_vec()),
        ("Python", b"{\"data\": {\"shuffle\": True}}".to_vec()),
        ("a section twice", b"{\"model\": {}, \"model\": {}}".to_vec()),
        ("a key twice", b"{\"training\": {\"seed\": 1, \"seed\": 1}}".to_vec()),
        ("lists in lists", nested(100)),
        ("very many lists in lists", nested(200_000)),
        ("sections in sections", nested_sections(100)),
        ("very many sections in sections", nested_sections(200_000)),
        ("too large", [b"{\"model\": {}, \"x\": \"".to_vec(), vec![b'a'; 5 << 20]].concat()),
        ("YAML", b"model:\n  architecture: gpt2\n".to_vec()),
        ("a checkpoint", fs::read(crate::job::tiny_model().join("model.safetensors")).unwrap()),
    ]
}

#[test]
fn rejects_invalid_job_files() {
    let faults = texts().into_iter().map(|(case, text)| {
        let job = Job::tiny();
        fs::write(job.folder().join("wrong.json"), text).unwrap();
        (case.to_owned(), fault(&job, &["--config", "wrong.json"], &["wrong.json"]))
    });
    none(faults.collect());
}

#[test]
fn rejects_invalid_deepspeed_files() {
    let faults = texts().into_iter().map(|(case, text)| {
        let job = Job::tiny().with("deepspeed", "wrong_ds.json");
        fs::write(job.folder().join("wrong_ds.json"), text).unwrap();
        (case.to_owned(), fault_of_job(&job, &["wrong_ds.json"]))
    });
    none(faults.collect());
}

#[test]
fn rejects_invalid_accelerate_files() {
    let faults = [
        ("distributed_type: MULTI_GPU", "distributed_type"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: [1, 2]", "deepspeed_config"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 7", "zero_stage"),
        ("distributed_type: DEEPSPEED\nnum_processes: 0", "num_processes"),
        ("distributed_type: DEEPSPEED\nmixed_precision: fp8", "fp16"),
        ("distributed_type: DEEPSPEED\nnum_machines: 4", "num_machines"),
        ("a: b: c: d", "wrong.yaml"),
        ("a: &x [*x]", "wrong.yaml"),
        ("a: [1, 2", "wrong.yaml"),
        ("\t- a", "wrong.yaml"),
        ("- 1\n- 2", "wrong.yaml"),
        ("a: 1\na: 2", "wrong.yaml"),
    ]
    .into_iter()
    .map(|(text, part)| {
        let job = Job::tiny().with("deepspeed", "wrong.yaml");
        let job = job.with("training.micro_batch_size", 1).with("training.ranks", json!(null));
        fs::write(job.folder().join("wrong.yaml"), text).unwrap();
        (text.to_owned(), fault_of_job(&job, &[part]))
    });
    none(faults.collect());
}

/// Each key is valid, but they contradict each other.
#[test]
fn rejects_contradictory_settings() {
    let faults = [
        ("shares and a path", vec![("data.splits", json!({"train": "a.bin", "eval": "10%"}))]),
        (
            "the older form of offload and the newer",
            vec![(
                "deepspeed.zero_optimization",
                json!({"stage": 2, "cpu_offload": false, "offload_optimizer": {"device": "cpu"}}),
            )],
        ),
        (
            "two spellings of a key",
            vec![(
                "deepspeed.zero_optimization",
                json!({"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 2}),
            )],
        ),
        (
            "fp16 and bf16",
            vec![("deepspeed.fp16.enabled", json!(true)), ("deepspeed.bf16.enabled", json!(true))],
        ),
        ("evaluation without data", vec![("training.eval_steps", json!(1))]),
        (
            "nesterov without momentum",
            vec![(
                "deepspeed.optimizer",
                json!({"type": "SGD", "params": {"lr": 0.1, "nesterov": true}}),
            )],
        ),
        (
            "batches larger than an epoch, all dropped",
            vec![
                ("training.max_steps", json!(null)),
                ("training.epochs", json!(1)),
                ("data.drop_last", json!(true)),
                ("deepspeed.gradient_accumulation_steps", json!(100_000)),
            ],
        ),
        (
            "a batch that ranks cannot share",
            vec![("deepspeed", json!({"train_batch_size": 7})), ("training.ranks", json!(2))],
        ),
    ]
    .into_iter()
    .map(|(case, values)| {
        let named = values[0].0.rsplit('.').next().unwrap().to_owned();
        let job = values.into_iter().fold(Job::tiny(), |job, (path, value)| job.with(path, value));
        let named = match case {
            "fp16 and bf16" => "fp16",
            "batches larger than an epoch, all dropped" => "training.epochs",
            "a batch that ranks cannot share" => "train_batch_size",
            _ => &named,
        };
        (case.to_owned(), fault_of_job(&job, &[named]))
    });
    none(faults.collect());
}
