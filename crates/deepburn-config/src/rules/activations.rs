//! Activation checkpointing: `activation_checkpointing`, and `training.gradient_checkpointing` of a
//! job file.
//!
//! DeepSpeed's section configures checkpoints that the model's code requests. In DeepBurn, the
//! section itself requests them: any value other than the default turns checkpointing on, for all
//! blocks of the model.
//!
//! `cpu_checkpointing` offloads the activations that checkpointing keeps: to host memory, or to
//! NVMe if `nvme_path` names a folder. A backend whose device is the host can only offload to NVMe.

use super::*;

/// Resolves which activations are recomputed, and where the others are stored.
pub(crate) fn resolve(context: &mut Context<'_>) -> ActivationPlan {
    let section = &context.top.activation_checkpointing.value;
    let asking = asking_key(context);
    let recompute = resolve_policy(asking, context);
    let offload = resolve_offload(section, context);
    let threshold = &section.offload_threshold;
    note!(if offload == ActivationOffload::Device && threshold.is_given();
        context, threshold => "has no effect: activations are not offloaded");
    match recompute {
        // If an offload was requested, an error has been reported.
        RecomputePolicy::Off => ActivationPlan::default(),
        _ => ActivationPlan { recompute, offload },
    }
}

/// Returns the first key that requests checkpointing. Adds a note for each of DeepSpeed's keys that
/// has no other effect.
fn asking_key<'a>(context: &mut Context<'a>) -> Option<&'a ConfigEntry<'a>> {
    let section = &context.top.activation_checkpointing.value;
    let flags = [
        (
            &section.partition_activations,
            "there are no model-parallel ranks to shard activations over",
        ),
        (&section.contiguous_memory_optimization, "saved activations are not copied"),
        (&section.synchronize_checkpoint_boundary, "nothing has to wait at the boundaries"),
    ];
    for (flag, reason) in flags.into_iter().filter(|(flag, _)| flag.value) {
        note!(context, flag => "turns checkpointing on and nothing else: {reason}");
    }
    let number = &section.number_checkpoints;
    let has_number = number.value.is_some_and(|count| count > 0);
    note!(if has_number;
        context, number => "turns checkpointing on: every block is a checkpoint, whatever their number");
    let asking: [(&ConfigEntry<'_>, bool); 4] = [
        (&section.cpu_checkpointing, section.cpu_checkpointing.value),
        (&section.nvme_path, offload::folder(&section.nvme_path).is_some()),
        (number, has_number),
        (&section.every_nth_block, section.every_nth_block.value > 1),
    ];
    let flags = flags.into_iter().map(|(flag, _)| (&**flag, flag.value));
    flags.chain(asking).find_map(|(entry, asks)| asks.then_some(entry))
}

/// Resolves the recomputation policy: the key `policy` first, then DeepSpeed's keys, of which one
/// is `asking`, then `training.gradient_checkpointing`.
fn resolve_policy(asking: Option<&ConfigEntry<'_>>, context: &mut Context<'_>) -> RecomputePolicy {
    let section = &context.top.activation_checkpointing.value;
    let nth = &section.every_nth_block;
    let wanted = context.run.gradient_checkpointing;
    let policy = match (section.policy.value, asking) {
        (Some("selective"), _) => RecomputePolicy::Selective,
        (Some("full"), _) | (None, Some(_)) => RecomputePolicy::Full,
        (Some(_), Some(key)) => {
            refuse!(context, key =>
                "\"off\" contradicts this key, which turns checkpointing on"; "remove one of them");
            RecomputePolicy::Off
        }
        (None, None) if wanted == Some(true) => RecomputePolicy::Full,
        (_, None) => RecomputePolicy::Off,
    };
    let is_on = policy != RecomputePolicy::Off;
    let wanted = wanted.unwrap_or(is_on);
    refuse!(if wanted != is_on; context, asking.unwrap_or(&section.policy) =>
        "contradicts training.gradient_checkpointing: {wanted}"; "remove one of them");
    match policy {
        RecomputePolicy::Full if nth.value > 1 => RecomputePolicy::EveryNth(nth.value),
        RecomputePolicy::Selective if nth.value > 1 => {
            refuse!(context, nth =>
                "{} is only supported with policy \"full\"", nth.value; "remove one of them");
            policy
        }
        _ => policy,
    }
}

/// Resolves where saved activations are stored. A path takes precedence over host memory, where
/// they already are on a host device.
fn resolve_offload(section: &Activations<'_>, context: &mut Context<'_>) -> ActivationOffload {
    let threshold = section.offload_threshold.value;
    let (path, to_host) = (&section.nvme_path, &section.cpu_checkpointing);
    refuse!(if path.value == Some(""); context, path => "is empty"; "name a folder on a local disk, or remove it");
    match offload::folder(path) {
        Some(_) if to_host.is_given() && !to_host.value => {
            refuse!(context, path => "contradicts cpu_checkpointing: false"; "remove one of them");
        }
        Some(folder) => {
            let file = offload::swap_file(folder, context.top);
            return ActivationOffload::Nvme { file, threshold };
        }
        None if to_host.value && context.run.host_device => note!(context, to_host =>
            "turns checkpointing on and nothing else: saved activations are already in host memory; nvme_path \
             offloads them to a folder on NVMe"),
        None if to_host.value => return ActivationOffload::Host { threshold },
        None => {}
    }
    ActivationOffload::Device
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
        resolved
            .map(|resolved| resolved.plan.backward.activations)
            .map_err(|report| report.to_string())
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
