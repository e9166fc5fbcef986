//! Configurations that other projects publish: each is accepted, or rejected for the same reason as
//! in DeepSpeed.
//!
//! `data/published.json` restates their keys and values, each with the address and license of its
//! source.

use std::fs;
use std::path::Path;

use deepburn_config::{RawConfig, Resolved, RunContext, Stage, resolve};
use serde_json::Value;

fn published() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/published.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The configuration as its users give it: a file, an Accelerate YAML with its file, a strategy.
fn read(entry: &Value, all: &[Value]) -> RawConfig {
    let config = &entry["config"];
    match entry["form"].as_str() {
        Some("strategy") => RawConfig::from_argument(config.as_str().unwrap()).unwrap(),
        Some("accelerate") => {
            let folder = tempfile::tempdir().unwrap();
            if let Some(path) = entry["file"]["path"].as_str() {
                let beside = folder.path().join(path);
                fs::create_dir_all(beside.parent().unwrap()).unwrap();
                let named = all.iter().find(|other| other["name"] == entry["file"]["config"]);
                fs::write(beside, named.unwrap()["config"].to_string()).unwrap();
            }
            // JSON is YAML.
            let yaml = folder.path().join("default_config.yaml");
            fs::write(&yaml, config.to_string()).unwrap();
            RawConfig::from_file(&yaml).unwrap()
        }
        _ => RawConfig::from_json(&config.to_string()).unwrap(),
    }
}

/// Resolves a configuration on one GPU of two, with the values that the trainers of these projects
/// set.
fn outcome(written: &RawConfig) -> Result<Resolved, String> {
    let facts = RunContext {
        host_device: false,
        hidden_size: Some(768),
        total_steps: Some(1000),
        micro_batch_size: Some(2),
        ..RunContext::on_host(2)
    };
    resolve(written, &facts).map_err(|report| report.to_string())
}

/// The expected result of each: its stage, or the reason why DeepSpeed rejects it too.
const EXPECTED: [(&str, Result<Stage, &str>); 26] = [
    ("transformers_zero2", Ok(Stage::Gradients)),
    ("transformers_zero3", Ok(Stage::Parameters)),
    ("accelerate_zero2_offload", Ok(Stage::Gradients)),
    ("accelerate_zero3_offload", Ok(Stage::Parameters)),
    ("accelerate_tests_zero3", Ok(Stage::Parameters)),
    ("trl_zero2", Ok(Stage::Gradients)),
    ("trl_zero3", Ok(Stage::Parameters)),
    ("accelerate_docs_offload", Ok(Stage::Parameters)),
    ("llama_factory_accelerate", Ok(Stage::Parameters)),
    ("lightning_stage_2_offload", Ok(Stage::Gradients)),
    ("lightning_stage_3_offload", Ok(Stage::Parameters)),
    ("axolotl_zero1", Ok(Stage::OptimizerStates)),
    ("axolotl_zero2_torch_compile", Ok(Stage::Gradients)),
    ("axolotl_zero3", Ok(Stage::Parameters)),
    ("axolotl_zero3_cpuoffload_all", Ok(Stage::Parameters)),
    ("llama_factory_z0", Ok(Stage::Disabled)),
    ("llama_factory_z2_offload", Ok(Stage::Gradients)),
    ("llama_factory_z3", Ok(Stage::Parameters)),
    ("llama_factory_z3_offload", Ok(Stage::Parameters)),
    ("alpaca_offload", Ok(Stage::Parameters)),
    ("fastchat_s2", Ok(Stage::Gradients)),
    ("fastchat_s3", Ok(Stage::Parameters)),
    // DeepSpeed: "'max_grad_norm' is not supported as an optimizer parameter".
    ("deepspeed_examples_squad", Err("'max_grad_norm' is not supported as an optimizer parameter")),
    // The section rejects unknown names in DeepSpeed too.
    ("deepspeed_examples_infinity", Err("did you mean stage3_param_persistence_threshold?")),
    ("deepspeed_examples_megatron_zero2", Ok(Stage::Gradients)),
    ("deepspeed_examples_autotuning_z3", Ok(Stage::Parameters)),
];

#[test]
fn published_configurations_load_or_are_refused_as_in_deepspeed() {
    let all = published();
    assert_eq!(all.len(), EXPECTED.len());
    for (name, expected) in EXPECTED {
        let entry = all.iter().find(|entry| entry["name"] == name);
        let entry = entry.unwrap_or_else(|| panic!("no {name}"));
        assert!(entry["source"].as_str().unwrap().starts_with("https://"), "{name}");
        assert_eq!(entry["licence"], "Apache-2.0", "{name}");
        match (outcome(&read(entry, &all)), expected) {
            (Ok(resolved), Ok(stage)) => assert_eq!(resolved.plan.zero.stage, stage, "{name}"),
            (Err(message), Err(part)) => {
                assert!(message.contains(": 1 problem\n"), "{name}: {message}");
                assert!(message.contains(part), "{name}: {message}");
            }
            (got, _) => panic!("{name}: {got:#?}"),
        }
    }
}
