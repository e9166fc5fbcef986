//! Activation checkpointing: `activation_checkpointing`, and `training.gradient_checkpointing` of a job file.
//!
//! DeepSpeed's section describes checkpoints that the model's code asks for. Here it asks for them itself:
//! whatever differs from the default turns checkpointing on, for all blocks of the model.

use crate::key::{Key, Literal};
use crate::kind::{Integers, Kind};
use crate::plan::RecomputePolicy;
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
    Key::flag("partition_activations", false, "Shard saved activations over model-parallel ranks."),
    Key::flag("cpu_checkpointing", false, "Keep saved activations in host memory."),
    Key::flag("contiguous_memory_optimization", false, "Keep saved activations in one buffer."),
    Key::optional(
        NUMBER,
        Kind::Integer(Integers::COUNT),
        "Size of that buffer, in checkpoints. Every block is a checkpoint.",
    ),
    Key::flag("synchronize_checkpoint_boundary", false, "Wait for the device at each checkpoint."),
    Key::flag("profile", false, "Time each checkpoint."),
];

const NUMBER: &str = "number_checkpoints";

/// Flags of DeepSpeed that ask for checkpointing, and why they do nothing else here.
const FLAGS: [(&str, &str); 5] = [
    ("partition_activations", "there are no model-parallel ranks to shard activations over"),
    ("cpu_checkpointing", "saved activations already live in host memory"),
    ("contiguous_memory_optimization", "saved activations are not copied"),
    ("synchronize_checkpoint_boundary", "nothing has to wait at the boundaries"),
    ("profile", "wall_clock_breakdown and profiling time the passes"),
];

/// What is recomputed.
pub(crate) fn resolve(top: &Section<'_>, context: &mut Context<'_>) -> RecomputePolicy {
    let section = top.section("activation_checkpointing");
    let nth = section.count("every_nth_block");
    note_flags(&section, context);
    let asking = FLAGS.map(|(flag, _)| flag).into_iter().find(|flag| section.flag(flag));
    let asking =
        asking.or(section.optional_count(NUMBER).filter(|count| *count > 0).map(|_| NUMBER));
    let asking = asking.or((nth > 1).then_some("every_nth_block"));
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
    check_job(policy, asking.unwrap_or("policy"), &section, context);
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
        context.findings.push(match flag {
            "cpu_checkpointing" if !context.facts.host_device => {
                let message =
                    "asks for offload of activations, which is not available in this version";
                section.error(flag, message, "set it to false, and policy to \"full\"")
            }
            _ => section.note(flag, format!("turns checkpointing on and nothing else: {reason}")),
        });
    }
    if section.optional_count(NUMBER).is_some_and(|count| count > 0) {
        let message = "turns checkpointing on: every block is a checkpoint, whatever their number";
        context.findings.push(section.note(NUMBER, message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::{Facts, resolve};
    use crate::written::Written;

    fn policy(
        section: &str,
        gradient_checkpointing: Option<bool>,
    ) -> Result<RecomputePolicy, String> {
        let text = format!(
            r#"{{"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {section}}}"#
        );
        let facts = Facts { gradient_checkpointing, ..Facts::on_host(1) };
        let resolved = resolve(&Written::from_json(&text).unwrap(), &facts);
        resolved.map(|resolved| resolved.plan.recompute).map_err(|report| report.to_string())
    }

    #[test]
    fn what_asks_for_checkpointing_turns_it_on() {
        use RecomputePolicy::{EveryNth, Full, Off, Selective};
        for (section, expected) in [
            ("{}", Off),
            (r#"{"partition_activations": false, "number_checkpoints": null}"#, Off),
            (r#"{"partition_activations": true}"#, Full),
            (r#"{"cpu_checkpointing": true}"#, Full),
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
