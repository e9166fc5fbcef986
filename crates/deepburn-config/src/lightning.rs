//! Lightning's strategy strings, for example `deepspeed_stage_2_offload`, and the configuration
//! that each one stands for.
//!
//! The values come from Lightning's `DeepSpeedStrategy`. They differ from DeepSpeed's own defaults.

use serde_json::{Value, json};

/// The folder of Lightning's NVMe strategy.
const NVME_PATH: &str = "/local_nvme";

/// The strategy names that Lightning registers. A name contains the stage (2 if it has none) and
/// whether the optimizer states are offloaded, and at stage 3 also the parameters.
pub(crate) const STRATEGIES: [&str; 8] = [
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_1_offload",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
    "deepspeed_stage_3_offload_nvme",
];

/// Returns the DeepSpeed configuration that Lightning creates for `name`; `None` if it is not a
/// strategy.
pub(crate) fn configuration(name: &str) -> Option<Value> {
    let name = STRATEGIES.into_iter().find(|known| *known == name)?;
    let stage = name.chars().find_map(|c| c.to_digit(10)).unwrap_or(2);
    let mut zero = json!({
        "stage": stage,
        "contiguous_gradients": true,
        "overlap_comm": true,
        "reduce_bucket_size": 200_000_000,
    });
    if stage < 3 {
        zero["allgather_bucket_size"] = json!(200_000_000);
    }
    if name.contains("offload") {
        let section = match name.ends_with("nvme") {
            true => json!({"device": "nvme", "nvme_path": NVME_PATH}),
            false => json!({"device": "cpu"}),
        };
        // Lightning's default, which is larger than any model.
        zero["sub_group_size"] = json!(1_000_000_000_000_u64);
        zero["offload_optimizer"] = section.clone();
        if stage == 3 {
            zero["offload_param"] = section;
        }
    }
    Some(json!({
        // Lightning's trainer clips only if its settings ask for it.
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }))
}

/// Returns whether `text` looks like a strategy, even if it is misspelt.
pub(crate) fn looks_like_a_strategy(text: &str) -> bool {
    text == "deepspeed" || text.starts_with("deepspeed_stage") && !text.contains(['.', '/'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RawConfig, RunContext, Severity, resolve};

    #[test]
    fn every_strategy_resolves_without_a_warning_of_its_own() {
        for (name, stage) in STRATEGIES.into_iter().zip([2, 1, 1, 2, 2, 3, 3, 3]) {
            let json = configuration(name).unwrap();
            let facts = RunContext {
                micro_batch_size: Some(1),
                host_device: false,
                ..RunContext::on_host(2)
            };
            let resolved = resolve(&RawConfig::from_value(&json).unwrap(), &facts);
            let resolved = resolved.unwrap_or_else(|report| panic!("{report}"));
            assert_eq!(resolved.plan.zero.stage.number(), stage);
            assert_eq!(resolved.plan.backward.gradient_clipping, None);
            let warned = resolved.notes.iter().filter(|note| note.severity == Severity::Warning);
            assert!(warned.clone().all(|note| note.key == "optimizer"), "{:?}", resolved.notes);
        }
    }

    #[test]
    fn other_names_are_none() {
        assert!(configuration("deepspeed_stage_4").is_none());
        assert!(looks_like_a_strategy("deepspeed_stage_4"));
        assert!(!looks_like_a_strategy("deepspeed_stage_2.json"));
    }
}
