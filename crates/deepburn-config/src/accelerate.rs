//! Accelerate's YAML (`accelerate config`) translated to a DeepSpeed configuration.
//!
//! Accelerate fills in what the file leaves out: stage 2, no offload, accumulation and clipping
//! `"auto"`, both batch sizes `"auto"`. Unknown keys are errors here too.

use std::path::{Path, PathBuf};

use crate::check::check;
use crate::diagnosis::{ConfigError, Findings};
use crate::key::{Asks, Key, Literal};

use crate::kind::{Integers, Kind, Reals};
use crate::lookup::find;
use crate::node::{Node, Value};
use crate::section::Section;
use crate::source::parse_yaml;
use crate::written::Written;

const LAUNCH: &str = "the ranks are started by the program itself";
const TPU: &str = "there is no TPU";

const fn free(name: &'static str, doc: &'static str) -> Key {
    Key::optional(name, Kind::Free, doc)
}

const DEVICE: Kind = Kind::Choice(&["none", "cpu", "nvme"]);

/// The part that becomes DeepSpeed keys.
const DEEPSPEED_CONFIG: &[Key] = &[
    Key::optional(
        "deepspeed_config_file",
        Kind::Text,
        "DeepSpeed JSON that takes the place of the other keys.",
    ),
    Key::new(
        "zero_stage",
        Kind::Integer(Integers { min: 0, max: 3 }),
        Literal::Integer(2),
        "zero_optimization.stage.",
    ),
    Key::optional(
        "gradient_accumulation_steps",
        Kind::Integer(Integers::POSITIVE),
        "The same in DeepSpeed; by default \"auto\".",
    )
    .auto(),
    Key::optional(
        "gradient_clipping",
        Kind::Real(Reals::NotNegative),
        "The same in DeepSpeed; by default \"auto\".",
    )
    .auto(),
    Key::new(
        "offload_optimizer_device",
        DEVICE,
        Literal::Text("none"),
        "zero_optimization.offload_optimizer.device.",
    ),
    Key::new(
        "offload_param_device",
        DEVICE,
        Literal::Text("none"),
        "zero_optimization.offload_param.device.",
    ),
    Key::optional(
        "offload_optimizer_nvme_path",
        Kind::Text,
        "zero_optimization.offload_optimizer.nvme_path.",
    ),
    Key::optional(
        "offload_param_nvme_path",
        Kind::Text,
        "zero_optimization.offload_param.nvme_path.",
    ),
    Key::optional("zero3_init_flag", Kind::Flag, "Shard parameters while the model is built.")
        .inert("parameters are always scattered right after the model is built"),
    Key::flag(
        "zero3_save_16bit_model",
        false,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save.",
    ),
    free("deepspeed_hostfile", "Machines.").inert(LAUNCH),
    free("deepspeed_exclusion_filter", "Machines left out.").inert(LAUNCH),
    free("deepspeed_inclusion_filter", "Machines used.").inert(LAUNCH),
    free("deepspeed_multinode_launcher", "Launcher.").inert(LAUNCH),
    free("deepspeed_moe_layer_cls_names", "Expert layers.").inert("layers are never hooked"),
];

/// Keys that say what a DeepSpeed JSON says itself, in the order of the table.
const TRANSLATED: [&str; 8] = [
    "zero_stage",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
];

/// The top level of an Accelerate file.
pub(crate) const KEYS: &[Key] = &[
    Key::section("deepspeed_config", DEEPSPEED_CONFIG, "What becomes the DeepSpeed configuration."),
    Key::new(
        "distributed_type",
        Kind::Text,
        Literal::Text("DEEPSPEED"),
        "How training is distributed; must be DEEPSPEED.",
    ),
    Key::new("mixed_precision", Kind::Free, Literal::Text("no"), "no, fp16, bf16 or fp8."),
    Key::optional(
        "num_processes",
        Kind::Integer(Integers { min: 1, max: 64 }),
        "Ranks over all machines.",
    )
    .unit("ranks"),
    Key::positive("num_machines", 1, "Machines.").unit("machines").unavailable(
        "more than one machine",
        Asks::Differs,
        "set it to 1",
    ),
    free("compute_environment", "Where it runs.").inert(LAUNCH),
    free("debug", "Check collectives.").inert("collectives are always checked against each other"),
    free("downcast_bf16", "bfloat16 on TPU.").inert(TPU),
    free("enable_cpu_affinity", "Bind ranks to cores.").inert(LAUNCH),
    free("gpu_ids", "Devices used.").inert(LAUNCH),
    free("machine_rank", "Rank of this machine.").inert(LAUNCH),
    free("main_process_ip", "Address of the first machine.").inert(LAUNCH),
    free("main_process_port", "Port of the first machine.").inert(LAUNCH),
    free("main_training_function", "Python function that trains.").inert("there is no Python"),
    free("rdzv_backend", "How ranks find each other.").inert(LAUNCH),
    free("same_network", "Whether machines share a network.").inert(LAUNCH),
    free("tpu_env", "Environment of the TPU.").inert(TPU),
    free("tpu_name", "Name of the TPU.").inert(TPU),
    free("tpu_zone", "Zone of the TPU.").inert(TPU),
    free("tpu_use_cluster", "A cluster of TPUs.").inert(TPU),
    free("tpu_use_sudo", "Rights on the TPU.").inert(TPU),
    free("commands", "Commands on the TPU.").inert(TPU),
    free("command_file", "File of commands on the TPU.").inert(TPU),
    free("use_cpu", "Train on the CPU.").inert("training.backend chooses the device"),
    free("ipex_config", "Intel's extension.").inert("there is no PyTorch"),
    free("mpirun_config", "MPI.").inert(LAUNCH),
    Key::new("dynamo_backend", Kind::Free, Literal::Text("no"), "Compiler of the model.")
        .unavailable("compilation", Asks::NotOneOf(&["no"]), "write 'NO'"),
    free("dynamo_config", "Compilation of the model.").unavailable(
        "compilation",
        Asks::NotEmpty,
        "remove it",
    ),
    free("fp8_config", "fp8 training.").unavailable("fp8 training", Asks::NotEmpty, "remove it"),
    free("fsdp_config", "PyTorch's FSDP.").unavailable("FSDP", Asks::NotEmpty, "remove it"),
    free("megatron_lm_config", "Megatron-LM.").unavailable(
        "Megatron-LM",
        Asks::NotEmpty,
        "remove it",
    ),
    free("parallelism_config", "Other parallelism.").unavailable(
        "parallelism beside ZeRO",
        Asks::NotEmpty,
        "remove it",
    ),
];

/// The DeepSpeed configuration that an Accelerate file means. `folder` is where
/// `deepspeed_config_file` is looked for.
pub(crate) fn translate(text: &str, name: &str, folder: &Path) -> Result<Written, ConfigError> {
    let root = parse_yaml(text, name)?;
    let mut findings = Findings::default();
    check(KEYS, &root, &mut findings);
    let top = Section::new(KEYS, Some(&root), "");
    check_kind(&top, &mut findings);
    let config = top.section("deepspeed_config");
    let precision = precision(&top, &mut findings);
    let file = config.text("deepspeed_config_file");
    if file.is_some() {
        check_alone(&config, &mut findings);
    }
    findings.verdict(name)?;
    let mut written = match file {
        Some(file) => {
            Written::from_file(&find(Path::new(file), &[PathBuf::new(), folder.into()], "file")?)?
        }
        None => Written::new(Node::map(deepspeed(&config)), name),
    };
    enable(precision, &mut written, name)?;
    Ok(written.with_processes(top.optional_count("num_processes")))
}

fn check_kind(top: &Section<'_>, findings: &mut Findings) {
    if let Some(kind) =
        top.text("distributed_type").filter(|kind| !kind.eq_ignore_ascii_case("deepspeed"))
    {
        let message = format!("\"{kind}\" is no DeepSpeed configuration");
        findings.error("distributed_type", message, "run `accelerate config` for DeepSpeed");
    }
}

/// The DeepSpeed section that `mixed_precision` switches on.
fn precision(top: &Section<'_>, findings: &mut Findings) -> Option<&'static str> {
    let node = top.given("mixed_precision")?;
    match (node.as_text(), node.as_flag()) {
        // Unquoted, YAML reads `no` as false.
        (Some("no"), _) | (_, Some(false)) => None,
        (Some("fp16"), _) => Some("fp16"),
        (Some("bf16"), _) => Some("bf16"),
        _ => {
            let message = format!("{node} is not available, must be no, fp16 or bf16");
            findings.error("mixed_precision", message, "write no");
            None
        }
    }
}

/// A DeepSpeed file and the keys it would contradict exclude each other, as in Accelerate.
fn check_alone(config: &Section<'_>, findings: &mut Findings) {
    for name in TRANSLATED {
        if config.given(name).is_some() {
            let message = "contradicts deepspeed_config_file, which says it itself";
            findings.push(config.error(name, message, "remove one of them"));
        }
    }
}

/// The keys in DeepSpeed's own words.
fn deepspeed(config: &Section<'_>) -> Vec<(String, Node)> {
    let named = |name: &str, node: Node| (name.to_owned(), node);
    let given = |name: &str| config.given(name).cloned();
    let auto = || Node::text("auto");
    let zero = vec![
        named("stage", Node::new(Value::Number(config.integer("zero_stage").to_string()))),
        named(
            "offload_optimizer",
            offload(config, "offload_optimizer_device", "offload_optimizer_nvme_path"),
        ),
        named("offload_param", offload(config, "offload_param_device", "offload_param_nvme_path")),
        named(
            "stage3_gather_16bit_weights_on_model_save",
            Node::new(Value::Flag(config.flag("zero3_save_16bit_model"))),
        ),
    ];
    vec![
        named("train_batch_size", auto()),
        named("train_micro_batch_size_per_gpu", auto()),
        named(
            "gradient_accumulation_steps",
            given("gradient_accumulation_steps").unwrap_or_else(auto),
        ),
        named("gradient_clipping", given("gradient_clipping").unwrap_or_else(auto)),
        named("zero_optimization", Node::map(zero)),
    ]
}

fn offload(config: &Section<'_>, device: &str, nvme_path: &str) -> Node {
    let mut entries = vec![("device".to_owned(), Node::text(config.choice(device)))];
    let path = config.given(nvme_path).cloned();
    entries.extend(path.map(|path| ("nvme_path".to_owned(), path)));
    Node::map(entries)
}

/// Switches a precision on, as Accelerate does, if the configuration leaves it out or open (`"auto"`).
///
/// # Errors
/// It switches the other one on.
fn enable(
    precision: Option<&'static str>,
    written: &mut Written,
    source: &str,
) -> Result<(), ConfigError> {
    let Some(name) = precision else { return Ok(()) };
    let other = if name == "fp16" { "bf16" } else { "fp16" };
    let enabled = |name| written.node().get(name).and_then(|section| section.get("enabled"));
    if enabled(other).and_then(Node::as_flag) == Some(true) {
        let mut findings = Findings::default();
        let message =
            format!("\"{name}\" contradicts {other}.enabled of the DeepSpeed configuration");
        findings.error("mixed_precision", message, "switch on one type");
        findings.verdict(source)?;
    }
    if written.node().get(name).is_some() {
        let entries = written.node_mut().entries_mut().into_iter().flatten();
        let section = entries.filter(|(key, _)| key == name).find_map(|(_, it)| it.entries_mut());
        let enabled = section.into_iter().flatten().find(|(key, _)| key == "enabled");
        if let Some((_, value)) = enabled.filter(|(_, value)| value.as_text() == Some("auto")) {
            *value = Node::new(Value::Flag(true));
        }
        return Ok(());
    }
    let mut entries = vec![("enabled".to_owned(), Node::new(Value::Flag(true)))];
    if name == "fp16" {
        entries.push(("auto_cast".to_owned(), Node::new(Value::Flag(true))));
    }
    if let Some(top) = written.node_mut().entries_mut() {
        top.push((name.to_owned(), Node::map(entries)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Result<Written, ConfigError> {
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
            ("distributed_type: FSDP", "\"FSDP\" is no DeepSpeed configuration"),
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
