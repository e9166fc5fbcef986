//! Lightning's strategy strings, for example `deepspeed_stage_2_offload`, and the configuration that
//! each one stands for.
//!
//! The values come from Lightning's `DeepSpeedStrategy`. They differ from DeepSpeed's own defaults.

use serde_json::{Value, json};

/// What a strategy sets.
struct Strategy {
    name: &'static str,
    stage: u8,
    optimizer: Option<&'static str>,
    parameters: Option<&'static str>,
}

/// A line of the table.
const fn strategy(
    name: &'static str,
    stage: u8,
    optimizer: Option<&'static str>,
    parameters: Option<&'static str>,
) -> Strategy {
    Strategy { name, stage, optimizer, parameters }
}

/// Where Lightning's NVMe strategy puts files.
const NVME_PATH: &str = "/local_nvme";

/// Lightning's registered names.
const STRATEGIES: [Strategy; 8] = [
    strategy("deepspeed", 2, None, None),
    strategy("deepspeed_stage_1", 1, None, None),
    strategy("deepspeed_stage_1_offload", 1, Some("cpu"), None),
    strategy("deepspeed_stage_2", 2, None, None),
    strategy("deepspeed_stage_2_offload", 2, Some("cpu"), None),
    strategy("deepspeed_stage_3", 3, None, None),
    strategy("deepspeed_stage_3_offload", 3, Some("cpu"), Some("cpu")),
    strategy("deepspeed_stage_3_offload_nvme", 3, Some("nvme"), Some("nvme")),
];

/// The DeepSpeed configuration that Lightning makes of `name`; `None` where that is no strategy.
pub(crate) fn configuration(name: &str) -> Option<Value> {
    let strategy = STRATEGIES.iter().find(|strategy| strategy.name == name)?;
    let mut zero = json!({
        "stage": strategy.stage,
        "contiguous_gradients": true,
        "overlap_comm": true,
        "reduce_bucket_size": 200_000_000,
    });
    if strategy.stage < 3 {
        zero["allgather_bucket_size"] = json!(200_000_000);
    }
    if let Some(device) = strategy.optimizer {
        zero["sub_group_size"] = json!(1_000_000_000_000_u64);
        zero["offload_optimizer"] = offload(device);
    }
    if let Some(device) = strategy.parameters {
        zero["offload_param"] = offload(device);
    }
    Some(json!({
        // Lightning's trainer clips only if its settings ask for it.
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }))
}

/// An offload section for a device.
fn offload(device: &str) -> Value {
    match device {
        "nvme" => json!({"device": device, "nvme_path": NVME_PATH}),
        _ => json!({"device": device}),
    }
}

/// The strategies, for messages.
pub(crate) fn names() -> String {
    STRATEGIES.map(|strategy| strategy.name).join(", ")
}

/// Whether `text` looks like a strategy, right or misspelt.
pub(crate) fn looks_like_a_strategy(text: &str) -> bool {
    text == "deepspeed" || text.starts_with("deepspeed_stage") && !text.contains(['.', '/'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RawConfig, RunContext, Severity, resolve};

    #[test]
    fn every_strategy_resolves_without_a_warning_of_its_own() {
        for strategy in &STRATEGIES {
            let json = configuration(strategy.name).unwrap();
            let facts = RunContext {
                micro_batch_size: Some(1),
                host_device: false,
                ..RunContext::on_host(2)
            };
            let resolved = resolve(&RawConfig::from_value(&json).unwrap(), &facts);
            let resolved = resolved.unwrap_or_else(|report| panic!("{report}"));
            assert_eq!(resolved.plan.zero.stage.number(), strategy.stage);
            assert_eq!(resolved.plan.gradient_clipping, None);
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
