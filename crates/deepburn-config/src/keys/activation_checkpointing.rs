//! Activation checkpointing: `activation_checkpointing`, and `training.gradient_checkpointing` of a job file.
//!
//! DeepSpeed's section describes checkpoints that the model's code asks for. Here it asks for them itself:
//! whatever differs from the default turns checkpointing on, for all blocks of the model.
//!
//! `cpu_checkpointing` offloads the activations that checkpointing keeps: to host memory beside a device, and
//! to NVMe where `nvme_path` names a folder, which is the only offload of a backend whose device is the host.

use crate::key::{Key, Literal};
use crate::keys::offload;
use crate::kind::{Integers, Kind};
use crate::plan::{ActivationOffload, ActivationPlan, RecomputePolicy};
use crate::resolve::Context;
use crate::section::Section;

pub(crate) const KEYS: &[Key] = &[
    Key::optional(
        "policy",
        Kind::Choice(&["off", "full", "selective"]),
        "What is recomputed: `full` keeps the inputs of each block, `selective` also every second product of \
            a block, attention included. Not a key of DeepSpeed. `full` where other keys turn checkpointing on.",
    ),
    Key::new(
        "every_nth_block",
        Kind::Integer(Integers::POSITIVE),
        Literal::Integer(1),
        "Recompute every n-th block and keep the activations of the others. Not a key of DeepSpeed.",
    )
    .unit("blocks"),
    Key::optional(
        NVME_PATH,
        Kind::Text,
        "Folder on the NVMe device in which saved activations are kept, rather than in host memory. Not a key of \
            DeepSpeed.",
    ),
    Key::count(
        THRESHOLD,
        262_144,
        "Size from which on a saved activation is offloaded. Not a key of DeepSpeed.",
    )
    .unit("bytes"),
    Key::flag("partition_activations", false, "Shard saved activations over model-parallel ranks."),
    Key::flag(
        OFFLOAD,
        false,
        "Offload saved activations to host memory, or to the folder `nvme_path`.",
    ),
    Key::flag("contiguous_memory_optimization", false, "Keep saved activations in one buffer."),
    Key::optional(
        NUMBER,
        Kind::Integer(Integers::COUNT),
        "Size of that buffer, in checkpoints. Every block is a checkpoint.",
    ),
    Key::flag("synchronize_checkpoint_boundary", false, "Wait for the device at each checkpoint."),
    Key::flag("profile", false, "Time each checkpoint.")
        .ignored("wall_clock_breakdown and profiling time the passes"),
];

const NUMBER: &str = "number_checkpoints";
const OFFLOAD: &str = "cpu_checkpointing";
const NVME_PATH: &str = "nvme_path";
const THRESHOLD: &str = "offload_threshold";

/// Flags of DeepSpeed that ask for checkpointing, and why they do nothing else here.
const FLAGS: [(&str, &str); 3] = [
    ("partition_activations", "there are no model-parallel ranks to shard activations over"),
    ("contiguous_memory_optimization", "saved activations are not copied"),
    ("synchronize_checkpoint_boundary", "nothing has to wait at the boundaries"),
];

/// What is recomputed, and where the rest is kept.
pub(crate) fn resolve(top: &Section<'_>, context: &mut Context<'_>) -> ActivationPlan {
    let section = top.section("activation_checkpointing");
    note_flags(&section, context);
    let recompute = resolve_policy(&section, context);
    let offload = resolve_offload(&section, &offload::aio(top), context);
    if offload == ActivationOffload::Device && section.given(THRESHOLD).is_some() {
        let message = "has no effect: activations are not offloaded";
        context.findings.push(section.note(THRESHOLD, message));
    }
    match recompute {
        // An error where offload was asked for.
        RecomputePolicy::Off => ActivationPlan::default(),
        _ => ActivationPlan { recompute, offload },
    }
}

/// The first key that asks for checkpointing.
fn asking_key(section: &Section<'_>) -> Option<&'static str> {
    let flags = FLAGS.map(|(flag, _)| flag);
    let flag = flags.into_iter().chain([OFFLOAD]).find(|flag| section.flag(flag));
    flag.or(nvme_path(section).map(|_| NVME_PATH))
        .or(section.optional_count(NUMBER).filter(|count| *count > 0).map(|_| NUMBER))
        .or((section.count("every_nth_block") > 1).then_some("every_nth_block"))
}

fn nvme_path<'a>(section: &Section<'a>) -> Option<&'a str> {
    section.text(NVME_PATH).filter(|path| !path.is_empty())
}

fn resolve_policy(section: &Section<'_>, context: &mut Context<'_>) -> RecomputePolicy {
    let (nth, asking) = (section.count("every_nth_block"), asking_key(section));
    let policy = match (section.optional_choice("policy"), asking) {
        (Some("selective"), _) => RecomputePolicy::Selective,
        (Some("full"), _) => RecomputePolicy::Full,
        (Some(_), Some(key)) => {
            let message = "\"off\" contradicts this key, which turns checkpointing on";
            context.findings.push(section.error(key, message, "remove one of them"));
            RecomputePolicy::Off
        }
        (None, Some(_)) => RecomputePolicy::Full,
        (Some(_), None) => RecomputePolicy::Off,
        (None, None) if context.facts.gradient_checkpointing == Some(true) => RecomputePolicy::Full,
        (None, None) => RecomputePolicy::Off,
    };
    check_job(policy, asking.unwrap_or("policy"), section, context);
    match policy {
        RecomputePolicy::Full if nth > 1 => RecomputePolicy::EveryNth(nth),
        RecomputePolicy::Selective if nth > 1 => {
            let message = format!("{nth} is only supported with policy \"full\"");
            context.findings.push(section.error("every_nth_block", message, "remove one of them"));
            policy
        }
        _ => policy,
    }
}

fn resolve_offload(
    section: &Section<'_>,
    aio: &Section<'_>,
    context: &mut Context<'_>,
) -> ActivationOffload {
    let threshold = section.count(THRESHOLD);
    if section.text(NVME_PATH) == Some("") {
        let remedy = "name a folder on a local disk, or remove it";
        context.findings.push(section.error(NVME_PATH, "is empty", remedy));
    }
    let wanted = section.given(OFFLOAD).map(|_| section.flag(OFFLOAD));
    match (nvme_path(section), wanted) {
        (Some(_), Some(false)) => {
            let message = "contradicts cpu_checkpointing: false";
            context.findings.push(section.error(NVME_PATH, message, "remove one of them"));
            ActivationOffload::Device
        }
        (Some(folder), _) => {
            ActivationOffload::Nvme { file: offload::swap_file(folder, aio), threshold }
        }
        (None, Some(true)) if context.facts.host_device => {
            let message = "turns checkpointing on and nothing else: saved activations already live in host \
                           memory; nvme_path offloads them to a folder on NVMe";
            context.findings.push(section.note(OFFLOAD, message));
            ActivationOffload::Device
        }
        (None, Some(true)) => ActivationOffload::Host { threshold },
        (None, _) => ActivationOffload::Device,
    }
}

/// The job file may say whether, and the section how.
fn check_job(policy: RecomputePolicy, key: &str, section: &Section<'_>, context: &mut Context<'_>) {
    let is_on = policy != RecomputePolicy::Off;
    if context.facts.gradient_checkpointing.is_some_and(|wanted| wanted != is_on) {
        let message = format!(
            "contradicts training.gradient_checkpointing: {}",
            context.facts.gradient_checkpointing == Some(true)
        );
        context.findings.push(section.error(key, message, "remove one of them"));
    }
}

/// Notes what the flags of DeepSpeed mean here.
fn note_flags(section: &Section<'_>, context: &mut Context<'_>) {
    for (flag, reason) in FLAGS.into_iter().filter(|(flag, _)| section.flag(flag)) {
        let message = format!("turns checkpointing on and nothing else: {reason}");
        context.findings.push(section.note(flag, message));
    }
    if section.optional_count(NUMBER).is_some_and(|count| count > 0) {
        let message = "turns checkpointing on: every block is a checkpoint, whatever their number";
        context.findings.push(section.note(NUMBER, message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::SwapFilePlan;
    use crate::resolve::{Facts, resolve};
    use crate::written::Written;

    fn plan(section: &str, facts: &Facts) -> Result<ActivationPlan, String> {
        let text = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {section}}}"#
        );
        let resolved = resolve(&Written::from_json(&text).unwrap(), facts);
        resolved.map(|resolved| resolved.plan.activations).map_err(|report| report.to_string())
    }

    fn policy(
        section: &str,
        gradient_checkpointing: Option<bool>,
    ) -> Result<RecomputePolicy, String> {
        let facts = Facts { gradient_checkpointing, ..Facts::on_host(1) };
        plan(section, &facts).map(|plan| plan.recompute)
    }

    #[test]
    fn what_asks_for_checkpointing_turns_it_on() {
        use RecomputePolicy::{EveryNth, Full, Off, Selective};
        for (section, expected) in [
            ("{}", Off),
            (r#"{"partition_activations": false, "number_checkpoints": null}"#, Off),
            (r#"{"offload_threshold": 1, "nvme_path": null}"#, Off),
            (r#"{"partition_activations": true}"#, Full),
            (r#"{"cpu_checkpointing": true}"#, Full),
            (r#"{"nvme_path": "/nvme"}"#, Full),
            (r#"{"contiguous_memory_optimization": true, "number_checkpoints": 4}"#, Full),
            (r#"{"number_checkpoints": 4}"#, Full),
            (r#"{"profile": true, "policy": "selective"}"#, Selective),
            (r#"{"policy": "full", "every_nth_block": 1}"#, Full),
            (r#"{"every_nth_block": 3}"#, EveryNth(3)),
            (r#"{"policy": "off"}"#, Off),
        ] {
            assert_eq!(policy(section, None).unwrap(), expected, "{section}");
        }
    }

    #[test]
    fn activations_go_where_the_file_says() {
        let nvme = |threshold| ActivationOffload::Nvme {
            file: SwapFilePlan { folder: "/nvme".into(), block_size: 1 << 20, queue_depth: 8 },
            threshold,
        };
        let (device, host) =
            (ActivationOffload::Device, |threshold| ActivationOffload::Host { threshold });
        for (section, on_host, beside) in [
            (r#"{"policy": "full"}"#, device.clone(), device.clone()),
            (r#"{"cpu_checkpointing": true}"#, device.clone(), host(262_144)),
            (r#"{"nvme_path": "/nvme"}"#, nvme(262_144), nvme(262_144)),
            (
                r#"{"cpu_checkpointing": true, "nvme_path": "/nvme", "offload_threshold": 0}"#,
                nvme(0),
                nvme(0),
            ),
        ] {
            for (host_device, expected) in [(true, on_host), (false, beside)] {
                let facts = Facts { host_device, ..Facts::on_host(1) };
                assert_eq!(plan(section, &facts).unwrap().offload, expected, "{section}");
            }
        }
        for (section, key) in [
            (r#"{"nvme_path": "/nvme", "cpu_checkpointing": false}"#, "nvme_path"),
            (r#"{"nvme_path": "/nvme", "policy": "off"}"#, "nvme_path"),
            (r#"{"nvme_path": ""}"#, "is empty"),
            (r#"{"cpu_checkpointing": true, "policy": "off"}"#, "cpu_checkpointing"),
        ] {
            let error = plan(section, &Facts::on_host(1)).unwrap_err();
            assert!(error.contains(key), "{section}: {error}");
        }
    }

    #[test]
    fn the_job_file_says_whether() {
        let selective = r#"{"policy": "selective"}"#;
        assert_eq!(policy("{}", Some(true)).unwrap(), RecomputePolicy::Full);
        assert_eq!(policy("{}", Some(false)).unwrap(), RecomputePolicy::Off);
        assert_eq!(policy(selective, Some(true)).unwrap(), RecomputePolicy::Selective);
        for (section, wanted) in [(selective, false), (r#"{"policy": "off"}"#, true)] {
            let error = policy(section, Some(wanted)).unwrap_err();
            assert!(error.contains("training.gradient_checkpointing"), "{error}");
        }
    }
}
