//! `data_efficiency`: batches under a token budget.
//!
//! Dynamic batching is on if `enabled` is true in its section and in the two sections around it. An
//! inner `enabled` in a section that is off is an error, because its meaning would be ambiguous.

use super::*;

/// Resolves the section; `None` if dynamic batching is off or invalid.
pub(crate) fn resolve(context: &mut Context<'_>) -> Option<DynamicBatchingPlan> {
    let efficiency = &context.top.data_efficiency.value;
    let sampling = &efficiency.data_sampling.value;
    let batching = &sampling.dynamic_batching.value;
    let enabled = &batching.enabled;
    for outer in [&efficiency.enabled, &sampling.enabled] {
        let path = &outer.path;
        note!(if outer.value && !enabled.value;
            context, outer => "true has no effect: dynamic_batching.enabled is false");
        refuse!(if enabled.value && !outer.value;
            context, enabled => "true asks for dynamic batching, but {path} is false";
            "set {path} to true, or this to false");
    }
    if !enabled.value {
        return None;
    }
    let (min, max) = (batching.min_batch_size.value, &batching.max_batch_size);
    let size = max.value.unwrap_or(usize::MAX);
    refuse!(if size < min; context, max =>
        "{size} is below min_batch_size {min}"; "raise it or lower min_batch_size");
    // The budget has no default, and must allow at least one token per sample.
    let key = &batching.max_tokens;
    refuse!(if !key.is_given(); context, key => "is missing, and dynamic batching needs it";
        "add it: an integer of at least 1, the tokens of a micro-batch");
    let max_tokens = key.value?;
    refuse!(if max_tokens < min; context, key => "{} cannot hold the {min} samples of min_batch_size", counted(max_tokens, "token");
        "raise it or lower min_batch_size");
    Some(
        filled!(DynamicBatchingPlan, batching { min_batch_size, max_batch_size, lr_scaling, verbose }
            max_tokens,
            order: match batching.sequence_picking_order.value {
                "random" => PickingOrderPlan::Random { seed: efficiency.seed.value as u64 },
                "seqlen" => PickingOrderPlan::Seqlen,
                _ => PickingOrderPlan::Dataloader,
            },
        ),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{
        DynamicBatchingPlan, LrScaling, PickingOrderPlan, RawConfig, Resolved, RunContext, Severity,
    };

    fn resolve(section: Value) -> Result<Resolved, String> {
        let json = json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "data_efficiency": section});
        let written = RawConfig::from_value(&json).unwrap();
        crate::resolve(&written, &RunContext::on_host(1)).map_err(|report| report.to_string())
    }

    fn enabled(batching: Value) -> Value {
        let mut batching = batching;
        batching["enabled"] = json!(true);
        json!({"enabled": true, "seed": 7,
            "data_sampling": {"enabled": true, "dynamic_batching": batching}})
    }

    #[test]
    fn defaults_are_deepspeeds() {
        let plan = resolve(enabled(json!({"max_tokens": 4096})))
            .unwrap()
            .plan
            .data_efficiency
            .dynamic_batching;
        let expected = DynamicBatchingPlan {
            max_tokens: 4096,
            min_batch_size: 1,
            max_batch_size: None,
            order: PickingOrderPlan::Dataloader,
            lr_scaling: LrScaling::Linear,
            verbose: false,
        };
        assert_eq!(plan, Some(expected));
    }

    #[test]
    fn every_key_is_read() {
        for (order, expected) in [
            ("random", PickingOrderPlan::Random { seed: 7 }),
            ("seqlen", PickingOrderPlan::Seqlen),
            ("dataloader", PickingOrderPlan::Dataloader),
        ] {
            for (method, lr_scaling) in [
                ("linear", LrScaling::Linear),
                ("sqrt", LrScaling::Sqrt),
                ("None", LrScaling::None),
            ] {
                let section = enabled(json!({"max_tokens": 9e3, "min_batch_size": 2,
                    "max_batch_size": 5, "sequence_picking_order": order,
                    "lr_scaling_method": method, "verbose": true}));
                let expected = DynamicBatchingPlan {
                    max_tokens: 9000,
                    min_batch_size: 2,
                    max_batch_size: Some(5),
                    order: expected,
                    lr_scaling,
                    verbose: true,
                };
                assert_eq!(
                    resolve(section).unwrap().plan.data_efficiency.dynamic_batching,
                    Some(expected)
                );
            }
        }
        let mut section = enabled(json!({"max_tokens": 1, "sequence_picking_order": "random"}));
        section.as_object_mut().unwrap().remove("seed");
        let plan = resolve(section).unwrap().plan.data_efficiency.dynamic_batching.unwrap();
        assert_eq!(plan.order, PickingOrderPlan::Random { seed: 1234 });
    }

    #[test]
    fn what_changes_nothing_is_noted() {
        let mut section = enabled(json!({"max_tokens": 8, "metrics_path": "x"}));
        for (key, value) in
            [("num_epochs", json!(3)), ("num_workers", json!(2)), ("pin_memory", json!(true))]
        {
            section["data_sampling"][key] = value;
        }
        let notes = resolve(section).unwrap().notes;
        assert_eq!(notes.len(), 4, "{notes:?}");
        assert!(notes.iter().all(|note| note.severity == Severity::Note));
        let idle = resolve(json!({"enabled": true, "data_sampling": {"enabled": true}})).unwrap();
        assert_eq!((idle.plan.data_efficiency.dynamic_batching, idle.notes.len()), (None, 2));
    }

    #[test]
    fn wrong_or_missing_keys_are_refused() {
        let inner = json!({"enabled": true, "max_tokens": 8});
        let outer_off = json!({"data_sampling": {"enabled": true, "dynamic_batching": inner}});
        let middle_off = json!({"enabled": true, "data_sampling": {"dynamic_batching": inner}});
        let metrics = json!({"data_sampling": {"curriculum_learning": {"enabled": true}}});
        for (wrong, parts) in [
            (enabled(json!({})), ["dynamic_batching.max_tokens", "is missing"]),
            (enabled(json!({"max_tokens": 0})), ["max_tokens", "at least 1"]),
            (enabled(json!({"max_tokens": 2, "min_batch_size": 3})), ["max_tokens", "2 tokens"]),
            (
                enabled(json!({"max_tokens": 9, "min_batch_size": 3, "max_batch_size": 2})),
                ["max_batch_size", "2 is below min_batch_size 3"],
            ),
            (
                enabled(json!({"max_tokens": 9, "sequence_picking_order": "longest"})),
                ["sequence_picking_order", "dataloader, random, seqlen"],
            ),
            (
                enabled(json!({"max_tokens": 9, "lr_scaling_method": "cubic"})),
                ["lr_scaling_method", "linear, sqrt, none"],
            ),
            (enabled(json!({"max_token": 9})), ["max_token", "did you mean max_tokens?"]),
            (outer_off, ["dynamic_batching.enabled", "set data_efficiency.enabled to true"]),
            (middle_off, ["dynamic batching", "data_efficiency.data_sampling.enabled is false"]),
            (metrics, ["data_sampling.curriculum_learning", "at the top level"]),
            (json!({"data_routing": {"enabled": true}}), ["data_routing", "random-LTD"]),
        ] {
            let message = resolve(wrong.clone()).expect_err(&wrong.to_string());
            for part in parts {
                assert!(message.contains(part), "{wrong}: {message}");
            }
        }
    }
}
