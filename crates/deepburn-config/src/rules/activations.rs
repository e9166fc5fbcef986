//! Activation checkpointing: `activation_checkpointing`, and `training.gradient_checkpointing` of a
//! job file.
//!
//! DeepSpeed's section describes checkpoints that the model's code asks for. Here it asks for them
//! itself: whatever differs from the default turns checkpointing on, for all blocks of the model.
//!
//! `cpu_checkpointing` offloads the activations that checkpointing keeps: to host memory beside a
//! device, and to NVMe where `nvme_path` names a folder, which is the only offload of a backend
//! whose device is the host.

use super::offload;
use crate::context::Context;
use crate::keys::DeepSpeed;
use crate::keys::activations::Activations;
use crate::keys::offload::Aio;
use crate::plan::{ActivationOffload, ActivationPlan, RecomputePolicy};
use crate::section::{Entry, Setting};

/// What is recomputed, and where the rest is kept.
pub(crate) fn resolve(top: &DeepSpeed<'_>, context: &mut Context<'_>) -> ActivationPlan {
    let section = &top.activation_checkpointing.value;
    note_flags(section, context);
    let recompute = resolve_policy(section, context);
    let offload = resolve_offload(section, offload::aio(top), context);
    let threshold = &section.offload_threshold;
    if offload == ActivationOffload::Device && threshold.is_given() {
        context.note(threshold, "has no effect: activations are not offloaded");
    }
    match recompute {
        // An error where offload was asked for.
        RecomputePolicy::Off => ActivationPlan::default(),
        _ => ActivationPlan { recompute, offload },
    }
}

/// Flags of DeepSpeed that ask for checkpointing, and why they do nothing else here.
fn flags<'a, 'b>(section: &'b Activations<'a>) -> [(&'b Setting<'a, bool>, &'static str); 3] {
    [
        (
            &section.partition_activations,
            "there are no model-parallel ranks to shard activations over",
        ),
        (&section.contiguous_memory_optimization, "saved activations are not copied"),
        (&section.synchronize_checkpoint_boundary, "nothing has to wait at the boundaries"),
    ]
}

/// The first key that asks for checkpointing.
fn asking_key<'a, 'b>(section: &'b Activations<'a>) -> Option<&'b Entry<'a>> {
    let Activations { cpu_checkpointing, nvme_path, number_checkpoints, every_nth_block, .. } =
        section;
    let flags = flags(section).into_iter().map(|(flag, _)| flag).chain([cpu_checkpointing]);
    let mut asking: Vec<(&Entry<'_>, bool)> = flags.map(|flag| (&**flag, flag.value)).collect();
    asking.push((nvme_path, offload::folder(nvme_path).is_some()));
    asking.push((number_checkpoints, number_checkpoints.value.is_some_and(|count| count > 0)));
    asking.push((every_nth_block, every_nth_block.value > 1));
    asking.into_iter().find_map(|(entry, asks)| asks.then_some(entry))
}

/// Resolves what is recomputed. The section's own key comes first, then DeepSpeed's keys, then the
/// job file.
fn resolve_policy(section: &Activations<'_>, context: &mut Context<'_>) -> RecomputePolicy {
    let (nth, asking) = (&section.every_nth_block, asking_key(section));
    let policy = match (section.policy.value, asking) {
        (Some("selective"), _) => RecomputePolicy::Selective,
        (Some("full"), _) => RecomputePolicy::Full,
        (Some(_), Some(key)) => {
            let message = "\"off\" contradicts this key, which turns checkpointing on";
            context.error(key, message, "remove one of them");
            RecomputePolicy::Off
        }
        (None, Some(_)) => RecomputePolicy::Full,
        (Some(_), None) => RecomputePolicy::Off,
        (None, None) if context.run.gradient_checkpointing == Some(true) => RecomputePolicy::Full,
        (None, None) => RecomputePolicy::Off,
    };
    check_job(policy, asking.unwrap_or(&section.policy), context);
    match policy {
        RecomputePolicy::Full if nth.value > 1 => RecomputePolicy::EveryNth(nth.value),
        RecomputePolicy::Selective if nth.value > 1 => {
            let message = format!("{} is only supported with policy \"full\"", nth.value);
            context.error(nth, message, "remove one of them");
            policy
        }
        _ => policy,
    }
}

/// Where saved activations are kept. A path comes before host memory, which on a host device they
/// never leave.
fn resolve_offload(
    section: &Activations<'_>,
    aio: &Aio<'_>,
    context: &mut Context<'_>,
) -> ActivationOffload {
    let threshold = section.offload_threshold.value;
    let (path, to_host) = (&section.nvme_path, &section.cpu_checkpointing);
    if path.value == Some("") {
        let remedy = "name a folder on a local disk, or remove it";
        context.error(path, "is empty", remedy);
    }
    let wanted = to_host.is_given().then_some(to_host.value);
    match (offload::folder(path), wanted) {
        (Some(_), Some(false)) => {
            let message = "contradicts cpu_checkpointing: false";
            context.error(path, message, "remove one of them");
            ActivationOffload::Device
        }
        (Some(folder), _) => {
            ActivationOffload::Nvme { file: offload::swap_file(folder, aio), threshold }
        }
        (None, Some(true)) if context.run.host_device => {
            let message = "turns checkpointing on and nothing else: saved activations already live in host \
                           memory; nvme_path offloads them to a folder on NVMe";
            context.note(to_host, message);
            ActivationOffload::Device
        }
        (None, Some(true)) => ActivationOffload::Host { threshold },
        (None, _) => ActivationOffload::Device,
    }
}

/// The job file may say whether, and the section how.
fn check_job(policy: RecomputePolicy, key: &Entry<'_>, context: &mut Context<'_>) {
    let is_on = policy != RecomputePolicy::Off;
    if let Some(wanted) = context.run.gradient_checkpointing.filter(|wanted| *wanted != is_on) {
        let message = format!("contradicts training.gradient_checkpointing: {wanted}");
        context.error(key, message, "remove one of them");
    }
}

/// Notes what the flags of DeepSpeed mean here.
fn note_flags(section: &Activations<'_>, context: &mut Context<'_>) {
    for (flag, reason) in flags(section).into_iter().filter(|(flag, _)| flag.value) {
        let message = format!("turns checkpointing on and nothing else: {reason}");
        context.note(flag, message);
    }
    let number = &section.number_checkpoints;
    if number.value.is_some_and(|count| count > 0) {
        let message = "turns checkpointing on: every block is a checkpoint, whatever their number";
        context.note(number, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::RunContext;
    use crate::plan::SwapFilePlan;
    use crate::raw_config::RawConfig;
    use crate::resolve::resolve;

    fn plan(section: &str, facts: &RunContext) -> Result<ActivationPlan, String> {
        let text = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {section}}}"#
        );
        let resolved = resolve(&RawConfig::from_json(&text).unwrap(), facts);
        resolved.map(|resolved| resolved.plan.activations).map_err(|report| report.to_string())
    }

    fn policy(
        section: &str,
        gradient_checkpointing: Option<bool>,
    ) -> Result<RecomputePolicy, String> {
        let facts = RunContext { gradient_checkpointing, ..RunContext::on_host(1) };
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
                let facts = RunContext { host_device, ..RunContext::on_host(1) };
                assert_eq!(plan(section, &facts).unwrap().offload, expected, "{section}");
            }
        }
        for (section, key) in [
            (r#"{"nvme_path": "/nvme", "cpu_checkpointing": false}"#, "nvme_path"),
            (r#"{"nvme_path": "/nvme", "policy": "off"}"#, "nvme_path"),
            (r#"{"nvme_path": ""}"#, "is empty"),
            (r#"{"cpu_checkpointing": true, "policy": "off"}"#, "cpu_checkpointing"),
        ] {
            let error = plan(section, &RunContext::on_host(1)).unwrap_err();
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
