//! Accelerate's YAML (`accelerate config`) translated to a DeepSpeed configuration.
//!
//! Accelerate fills in what the file leaves out: stage 2, no offload, accumulation and clipping
//! `"auto"`, both batch sizes `"auto"`. Unknown keys are errors here too.

use crate::check::check;
use crate::diagnosis::{ConfigError, Findings};
use crate::keys::accelerate::{Accelerate, DeepSpeedConfig};
use crate::node::{Node, Value};
use crate::section::{Entry, Read, Section, Setting};
use crate::source::parse_yaml;

/// What an Accelerate file says, checked.
pub(crate) struct AccelerateFile {
    /// The DeepSpeed configuration in a file of its own, which the keys of this one would contradict.
    pub(crate) deepspeed_config_file: Option<String>,
    /// Ranks.
    pub(crate) processes: Option<usize>,
    /// The keys in DeepSpeed's own words, for a file that names no other.
    pub(crate) translated: Node,
    /// The section of `mixed_precision`, which DeepSpeed's configuration gets too.
    precision: Option<&'static str>,
}

impl AccelerateFile {
    /// Reads the YAML of the file `name`.
    ///
    /// # Errors
    /// Syntax, and everything that is wrong with its keys in one [`crate::Report`].
    pub(crate) fn parse(text: &str, name: &str) -> Result<Self, ConfigError> {
        let root = parse_yaml(text, name)?;
        let mut findings = Findings::default();
        check(Accelerate::KEYS, &root, &mut findings);
        let top = Accelerate::read(&Entry::document(&root));
        check_kind(&top, &mut findings);
        let config = &top.deepspeed_config.value;
        let precision = precision(&top, &mut findings);
        let file = config.deepspeed_config_file.value;
        if file.is_some() {
            check_alone(config, &mut findings);
        }
        findings.verdict(name)?;
        Ok(Self {
            deepspeed_config_file: file.map(str::to_owned),
            processes: top.num_processes.value,
            translated: Node::map(deepspeed(config)),
            precision,
        })
    }

    /// Switches on the precision of the file `name`, as Accelerate does, where the DeepSpeed configuration leaves it
    /// out or open (`"auto"`).
    ///
    /// # Errors
    /// It switches the other one on.
    pub(crate) fn enable_precision(
        &self,
        deepspeed: &mut Node,
        name: &str,
    ) -> Result<(), ConfigError> {
        self.precision.map_or(Ok(()), |precision| enable(precision, deepspeed, name))
    }
}

/// Refuses a file for something other than DeepSpeed.
fn check_kind(top: &Accelerate<'_>, findings: &mut Findings) {
    let kind = top.distributed_type.value;
    if !kind.eq_ignore_ascii_case("deepspeed") {
        let message = format!("\"{kind}\" is not a DeepSpeed configuration");
        findings.error("distributed_type", message, "run `accelerate config` for DeepSpeed");
    }
}

/// The DeepSpeed section that `mixed_precision` switches on.
fn precision(top: &Accelerate<'_>, findings: &mut Findings) -> Option<&'static str> {
    let node = top.mixed_precision.given()?;
    match (node.as_text(), node.as_flag()) {
        // Unquoted, YAML reads `no` as false.
        (Some("no"), _) | (_, Some(false)) => None,
        (Some("fp16"), _) => Some("fp16"),
        (Some("bf16"), _) => Some("bf16"),
        _ => {
            let message = format!("{node} is not available; must be no, fp16 or bf16");
            findings.error("mixed_precision", message, "write no");
            None
        }
    }
}

/// A DeepSpeed file and the keys it would contradict exclude each other, as in Accelerate.
fn check_alone(config: &DeepSpeedConfig<'_>, findings: &mut Findings) {
    let translated: [&Entry<'_>; 8] = [
        &config.zero_stage,
        &config.gradient_accumulation_steps,
        &config.gradient_clipping,
        &config.offload_optimizer_device,
        &config.offload_param_device,
        &config.offload_optimizer_nvme_path,
        &config.offload_param_nvme_path,
        &config.zero3_save_16bit_model,
    ];
    for key in translated.into_iter().filter(|key| key.is_given()) {
        let message = "contradicts deepspeed_config_file, which says it itself";
        findings.error(key, message, "remove one of them");
    }
}

/// The keys in DeepSpeed's own words.
fn deepspeed(config: &DeepSpeedConfig<'_>) -> Vec<(String, Node)> {
    let named = |name: &str, node: Node| (name.to_owned(), node);
    let given = |key: &Entry<'_>| key.given().cloned().unwrap_or_else(|| Node::text("auto"));
    let stage = Node::new(Value::Number(config.zero_stage.value.to_string()));
    let states = offload(&config.offload_optimizer_device, &config.offload_optimizer_nvme_path);
    let parameters = offload(&config.offload_param_device, &config.offload_param_nvme_path);
    let saves = Node::new(Value::Flag(config.zero3_save_16bit_model.value));
    let zero = vec![
        named("stage", stage),
        named("offload_optimizer", states),
        named("offload_param", parameters),
        named("stage3_gather_16bit_weights_on_model_save", saves),
    ];
    vec![
        named("train_batch_size", Node::text("auto")),
        named("train_micro_batch_size_per_gpu", Node::text("auto")),
        named("gradient_accumulation_steps", given(&config.gradient_accumulation_steps)),
        named("gradient_clipping", given(&config.gradient_clipping)),
        named("zero_optimization", Node::map(zero)),
    ]
}

/// One of the two offload sections, with the path where the file gives one.
fn offload(device: &Setting<'_, &str>, nvme_path: &Entry<'_>) -> Node {
    let mut entries = vec![("device".to_owned(), Node::text(device.value))];
    let path = nvme_path.given().cloned();
    entries.extend(path.map(|path| ("nvme_path".to_owned(), path)));
    Node::map(entries)
}

/// Switches a section of a DeepSpeed configuration on where it is left out or `"auto"`.
fn enable(name: &'static str, deepspeed: &mut Node, source: &str) -> Result<(), ConfigError> {
    let other = if name == "fp16" { "bf16" } else { "fp16" };
    let enabled = deepspeed.get(other).and_then(|section| section.get("enabled"));
    if enabled.and_then(Node::as_flag) == Some(true) {
        let mut findings = Findings::default();
        let message =
            format!("\"{name}\" contradicts {other}.enabled of the DeepSpeed configuration");
        findings.error("mixed_precision", message, "switch on one type");
        findings.verdict(source)?;
    }
    let on = || Node::new(Value::Flag(true));
    if let Some(section) = deepspeed.get_mut(name) {
        if let Some(enabled) = section.get_mut("enabled").filter(|enabled| enabled.is_auto()) {
            *enabled = on();
        }
        return Ok(());
    }
    let mut entries = vec![("enabled".to_owned(), on())];
    if name == "fp16" {
        entries.push(("auto_cast".to_owned(), on()));
    }
    if let Some(top) = deepspeed.entries_mut() {
        top.push((name.to_owned(), Node::map(entries)));
    }
    Ok(())
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
        // What `accelerate config` writes beside a file.
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
            ("- a\n- b", "the file holds a list"),
            ("a: [", "x.yaml"),
        ] {
            let message = read(yaml).expect_err(yaml).to_string();
            assert!(message.contains(part), "{yaml}: {message}");
        }
    }
}
