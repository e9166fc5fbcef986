//! Translates Accelerate's YAML (`accelerate config`) to a DeepSpeed configuration.
//!
//! Missing keys have Accelerate's defaults: stage 2, no offload, and `"auto"` for accumulation,
//! clipping and both batch sizes. Unknown keys are errors.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::check::check;
use crate::diagnosis::{ConfigError, Findings, refuse};
use crate::key::{Key, Status};
use crate::keys::accelerate::{Accelerate, DeepSpeedConfig};
use crate::node::{Node, Value};
use crate::place::find;
use crate::raw_config::RawConfig;
use crate::section::{ConfigEntry, FromEntry, Section, Setting};
use crate::source::{parse_yaml, read_text};

/// The key that names a separate DeepSpeed configuration file.
const FILE: &str = "deepspeed_config_file";

impl RawConfig {
    /// Parses Accelerate's YAML from the file `name`. `deepspeed_config_file` is searched for in
    /// the current folder and in `folder`.
    ///
    /// # Errors
    /// Returns an error if the syntax is invalid, or all problems of the keys in one
    /// [`crate::ConfigReport`].
    pub(crate) fn from_accelerate(
        text: &str,
        name: &str,
        folder: &Path,
    ) -> Result<Self, ConfigError> {
        let root = parse_yaml(text, name)?;
        let mut findings = Findings::default();
        check(Accelerate::KEYS, &root, &mut findings);
        let top = Accelerate::read(&ConfigEntry::document(&root));
        let kind = top.distributed_type.value;
        refuse!(if !kind.eq_ignore_ascii_case("deepspeed");
            findings, "distributed_type" => "\"{kind}\" is not a DeepSpeed configuration";
            "run `accelerate config` for DeepSpeed");
        let translated = &top.deepspeed_config.value;
        let precision = precision(&top, &mut findings);
        let file = translated.deepspeed_config_file.value;
        if file.is_some() {
            check_alone(&top.deepspeed_config, &mut findings);
        }
        findings.verdict(name)?;
        let mut config = match file {
            Some(path) => {
                let path = find(Path::new(path), &[PathBuf::new(), folder.into()], "file")?;
                // Parsed as JSON only, because another Accelerate file could refer back to this
                // one.
                Self::parse(&read_text(&path)?, &path.display().to_string())?
            }
            None => Self::of(&deepspeed(translated), name)?,
        };
        if let Some(precision) = precision {
            enable_precision(precision, &mut config.root, name)?;
        }
        config.processes = top.num_processes.value;
        Ok(config)
    }
}

//= accelerate 1.15.0 utils/dataclasses.py set_mixed_precision
/// Enables the precision `name` of the file `source`, as Accelerate does, if the DeepSpeed
/// configuration does not set it or has `"auto"`.
///
/// # Errors
/// Returns an error if the DeepSpeed configuration enables the other precision.
fn enable_precision(name: &str, deepspeed: &mut Node, source: &str) -> Result<(), ConfigError> {
    let other = if name == "fp16" { "bf16" } else { "fp16" };
    let enabled = deepspeed.get(other).and_then(|section| section.get("enabled"));
    let mut findings = Findings::default();
    refuse!(if enabled.and_then(Node::as_flag) == Some(true); findings, "mixed_precision" =>
        "\"{name}\" contradicts {other}.enabled of the DeepSpeed configuration"; "switch on one type");
    findings.verdict(source)?;
    let on = |key: &str| (key.to_owned(), Node::new(Value::Flag(true)));
    if let Some(section) = deepspeed.get_mut(name) {
        if let Some(enabled) = section.get_mut("enabled").filter(|enabled| enabled.is_auto()) {
            *enabled = on("enabled").1;
        }
    } else if let Some(top) = deepspeed.entries_mut() {
        // Accelerate writes `auto_cast` for fp16 only.
        let keys = if name == "fp16" { &["enabled", "auto_cast"][..] } else { &["enabled"] };
        top.push((name.to_owned(), Node::map(keys.iter().copied().map(on).collect())));
    }
    Ok(())
}

/// Returns the DeepSpeed section that `mixed_precision` enables.
fn precision(top: &Accelerate<'_>, findings: &mut Findings) -> Option<&'static str> {
    let node = top.mixed_precision.given()?;
    // Accelerate converts the name to lower case.
    let name = node.as_text().map(str::to_lowercase);
    match (name.as_deref(), node.as_flag()) {
        // Unquoted, YAML reads `no` as false.
        (Some("no"), _) | (_, Some(false)) => None,
        (Some("fp16"), _) => Some("fp16"),
        (Some("bf16"), _) => Some("bf16"),
        _ => {
            refuse!(findings, "mixed_precision" =>
                "{node} is not available; must be no, fp16 or bf16"; "choose one of them");
            None
        }
    }
}

/// Reports keys that contradict a DeepSpeed file. As in Accelerate, the file and the keys exclude
/// each other.
fn check_alone(config: &ConfigEntry<'_>, findings: &mut Findings) {
    let translated = |key: &&Key| matches!(key.status, Status::Honored) && key.name != FILE;
    let keys = DeepSpeedConfig::KEYS.iter().filter(translated).map(|key| config.child(key));
    for key in keys.filter(|key| key.is_given()) {
        refuse!(findings, &key =>
            "contradicts deepspeed_config_file, which says it itself"; "remove one of them");
    }
}

//= accelerate 1.15.0 utils/dataclasses.py DeepSpeedPlugin
/// Translates the keys to a DeepSpeed configuration.
fn deepspeed(config: &DeepSpeedConfig<'_>) -> Json {
    let given = |key: &ConfigEntry<'_>| key.given().map_or(json!("auto"), Node::to_json);
    let offload = |device: &Setting<'_, &str>, nvme_path: &ConfigEntry<'_>| {
        let mut section = json!({"device": device.value});
        if let Some(path) = nvme_path.given() {
            section["nvme_path"] = path.to_json();
        }
        section
    };
    json!({
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": given(&config.gradient_accumulation_steps),
        "gradient_clipping": given(&config.gradient_clipping),
        "zero_optimization": {
            "stage": config.zero_stage.value,
            "offload_optimizer":
                offload(&config.offload_optimizer_device, &config.offload_optimizer_nvme_path),
            "offload_param": offload(&config.offload_param_device, &config.offload_param_nvme_path),
            "stage3_gather_16bit_weights_on_model_save": config.zero3_save_16bit_model.value,
        },
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::raw_config::RawConfig;

    fn translate(text: &str, name: &str, folder: &Path) -> Result<RawConfig, ConfigError> {
        RawConfig::from_accelerate(text, name, folder)
    }

    fn read(text: &str) -> Result<RawConfig, ConfigError> {
        translate(text, "x.yaml", Path::new(""))
    }

    //= accelerate 1.15.0 utils/dataclasses.py set_mixed_precision
    #[test]
    fn mixed_precision_answers_what_the_deepspeed_file_leaves_open() {
        let folder = tempfile::tempdir().unwrap();
        let read = |file: serde_json::Value, precision: &str| {
            std::fs::write(folder.path().join("ds.json"), file.to_string()).unwrap();
            let yaml = format!(
                "deepspeed_config:\n  deepspeed_config_file: ds.json\nmixed_precision: {precision}\n"
            );
            translate(&yaml, "x.yaml", folder.path())
        };
        let auto = json!({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}});
        for (precision, bf16, fp16) in
            [("bf16", json!(true), json!("auto")), ("fp16", json!("auto"), json!(true))]
        {
            let written = read(auto.clone(), precision).unwrap().node().to_json();
            assert_eq!([&written["bf16"]["enabled"], &written["fp16"]["enabled"]], [&bf16, &fp16]);
        }
        let error = read(json!({"bf16": {"enabled": true}}), "fp16").unwrap_err().to_string();
        assert!(error.contains("mixed_precision") && error.contains("bf16.enabled"), "{error}");
    }

    //= accelerate 1.15.0 utils/dataclasses.py DeepSpeedPlugin
    #[test]
    fn what_is_left_out_is_what_accelerate_fills_in() {
        let written = read("deepspeed_config: {}\nmixed_precision: no\n").unwrap();
        assert_eq!(
            written.to_json(),
            json!({
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "none"},
                    "offload_param": {"device": "none"},
                    "stage3_gather_16bit_weights_on_model_save": false,
                },
            })
        );
        assert_eq!(written.processes(), None);
    }

    //= accelerate 1.15.0 utils/dataclasses.py set_mixed_precision
    #[test]
    fn precision_and_processes_are_carried_over() {
        let written =
            read("deepspeed_config: {zero_stage: 3}\nmixed_precision: fp16\nnum_processes: 4\n")
                .unwrap();
        assert_eq!(written.processes(), Some(4));
        assert_eq!(written.to_json()["fp16"], json!({"enabled": true, "auto_cast": true}));
    }

    #[test]
    fn a_config_file_stands_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ds.json"), "{\"train_batch_size\": 8} // eight")
            .unwrap();
        let yaml =
            |more: &str| format!("deepspeed_config:\n  deepspeed_config_file: ds.json\n{more}");
        let written = translate(&yaml(""), "x.yaml", folder.path()).unwrap();
        assert_eq!(written.to_json(), json!({"train_batch_size": 8}));
        let error =
            translate(&yaml("  zero_stage: 3\n"), "x.yaml", folder.path()).unwrap_err().to_string();
        assert!(error.contains("deepspeed_config.zero_stage: contradicts"), "{error}");
        // Keys that `accelerate config` writes next to `deepspeed_config_file`.
        let both = translate(
            &yaml("  zero3_init_flag: true\nfsdp_config: {}\ndynamo_backend: 'NO'\n"),
            "x.yaml",
            folder.path(),
        );
        assert_eq!(both.unwrap().to_json(), json!({"train_batch_size": 8}));
        let missing = read("deepspeed_config: {deepspeed_config_file: nowhere.json}")
            .unwrap_err()
            .to_string();
        assert!(missing.contains("nowhere.json"), "{missing}");
    }

    #[test]
    fn mistakes_are_named() {
        for (yaml, part) in [
            ("deepspeed_config: {zero_stag: 3}", "did you mean zero_stage?"),
            ("deepspeed_config: {zero_stage: 4}", "4 is out of range"),
            ("distributed_type: FSDP", "\"FSDP\" is not a DeepSpeed configuration"),
            ("mixed_precision: fp8", "must be no, fp16 or bf16"),
            ("fsdp_config: {a: 1}", "asks for FSDP"),
            ("num_machines: 2", "more than one machine"),
            ("dynamo_backend: INDUCTOR", "asks for compilation"),
            ("- a\n- b", "the file contains a list"),
            ("a: [", "x.yaml"),
        ] {
            let message = read(yaml).expect_err(yaml).to_string();
            assert!(message.contains(part), "{yaml}: {message}");
        }
    }
}
