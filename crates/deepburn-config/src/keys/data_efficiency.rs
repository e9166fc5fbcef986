//! `data_efficiency`: batches under a token budget, and what else DeepSpeed files under that name.
//!
//! Dynamic batching is on where its `enabled` and those of the two sections around it are true. It
//! refuses an inner `enabled` in a section that is off, which would leave open what is meant.

use crate::dynamic_batching::{DynamicBatchingPlan, LrScaling, PickingOrderPlan};
use crate::key::{Asks, Key, Literal};
use crate::keys::elsewhere::{ENABLED, free, text};
use crate::kind::{Integers, Kind};
use crate::resolve::Context;
use crate::section::Section;

const MAX_TOKENS: &str = "max_tokens";
const MAX_ROWS: &str = "max_batch_size";

const DYNAMIC_BATCHING: &[Key] = &[
    ENABLED,
    text("metrics_path", "Lengths of the samples, as DeepSpeed's analyzer writes them.")
        .inert("lengths are taken from the samples"),
    Key::new(
        "lr_scaling_method",
        Kind::Choice(&["linear", "sqrt", "none"]),
        Literal::Text("linear"),
        "How the learning rate follows the samples of a step; that of the schedule is for \
            train_batch_size samples.",
    ),
    Key::positive("min_batch_size", 1, "Fewest samples of a micro-batch.").unit("samples"),
    Key::optional(MAX_ROWS, Kind::Integer(Integers::POSITIVE), "Most samples of a micro-batch.")
        .unit("samples"),
    Key::new(
        "sequence_picking_order",
        Kind::Choice(&["dataloader", "random", "seqlen"]),
        Literal::Text("dataloader"),
        "Order of the samples: as they lie, another each epoch, or the shortest first.",
    ),
    Key::optional(
        MAX_TOKENS,
        Kind::Integer(Integers::POSITIVE),
        "Most tokens of a micro-batch, padding included. It takes the place of \
            train_micro_batch_size_per_gpu.",
    )
    .unit("tokens"),
    Key::flag("verbose", false, "Print how the samples of an epoch are batched."),
];

const DATA_SAMPLING: &[Key] = &[
    ENABLED,
    Key::positive("num_epochs", 1000, "Most epochs.").inert("the job says how long to train"),
    Key::count("num_workers", 0, "Workers of the loader.")
        .inert("one thread assembles batches ahead of their use"),
    Key::flag("pin_memory", false, "Page-lock the batches.")
        .inert("batches are handed over as they are"),
    free("curriculum_learning", "Easy samples first, by metrics of an analysis.").unavailable(
        "curricula over analysed metrics",
        Asks::AnyEnabled,
        "set its `enabled` to false; for sequences that grow longer use curriculum_learning at the \
            top level",
    ),
    Key::section("dynamic_batching", DYNAMIC_BATCHING, "As many samples as a token budget holds."),
];

pub(crate) const KEYS: &[Key] = &[
    ENABLED,
    Key::count("seed", 1234, "Seed of the random order of samples."),
    Key::section("data_sampling", DATA_SAMPLING, "Which samples come when."),
    Key::section(
        "data_routing",
        &[ENABLED, free("random_ltd", "Drop tokens in the middle layers.")],
        "Which tokens go where.",
    )
    .unavailable(
        "token dropping (random-LTD)",
        Asks::AnyEnabled,
        "set every `enabled` in it to false",
    ),
];

/// The section's part of the plan; `None` where dynamic batching is off or wrong.
pub(crate) fn resolve(top: &Section<'_>, context: &mut Context<'_>) -> Option<DynamicBatchingPlan> {
    let efficiency = top.section("data_efficiency");
    let sampling = efficiency.section("data_sampling");
    let batching = sampling.section("dynamic_batching");
    let around = [&efficiency, &sampling];
    if !batching.flag(ENABLED.name) {
        let on = around.into_iter().filter(|section| section.flag(ENABLED.name));
        for section in on {
            let message = "true turns nothing on: dynamic_batching.enabled is false";
            context.findings.push(section.note(ENABLED.name, message));
        }
        return None;
    }
    for section in around.into_iter().filter(|section| !section.flag(ENABLED.name)) {
        let outer = section.path_of(ENABLED.name);
        let message = format!("true asks for dynamic batching, but {outer} is false");
        let remedy = format!("set {outer} to true, or this to false");
        context.findings.push(batching.error(ENABLED.name, message, remedy));
    }
    let seed = efficiency.count("seed") as u64;
    let (min_batch_size, max_batch_size) =
        (batching.count("min_batch_size"), batching.optional_count(MAX_ROWS));
    if let Some(max) = max_batch_size.filter(|&max| max < min_batch_size) {
        let message = format!("{max} is below min_batch_size {min_batch_size}");
        let remedy = "raise it or lower min_batch_size";
        context.findings.push(batching.error(MAX_ROWS, message, remedy));
    }
    Some(DynamicBatchingPlan {
        max_tokens: max_tokens(&batching, min_batch_size, context)?,
        min_batch_size,
        max_batch_size,
        order: match batching.choice("sequence_picking_order") {
            "random" => PickingOrderPlan::Random { seed },
            "seqlen" => PickingOrderPlan::Seqlen,
            _ => PickingOrderPlan::Dataloader,
        },
        lr_scaling: match batching.choice("lr_scaling_method") {
            "sqrt" => LrScaling::Sqrt,
            "none" => LrScaling::None,
            _ => LrScaling::Linear,
        },
        verbose: batching.flag("verbose"),
    })
}

/// The budget, which has no default and holds a token of each sample at least.
fn max_tokens(batching: &Section<'_>, min_rows: usize, context: &mut Context<'_>) -> Option<usize> {
    if batching.given(MAX_TOKENS).is_none() {
        let message = "is missing, and dynamic batching needs it";
        let remedy = "add it: an integer of at least 1, the tokens of a micro-batch";
        context.findings.push(batching.error(MAX_TOKENS, message, remedy));
    }
    let tokens = batching.optional_count(MAX_TOKENS)?;
    if tokens < min_rows {
        let message = format!("{tokens} tokens do not hold min_batch_size {min_rows} samples");
        let remedy = "raise it or lower min_batch_size";
        context.findings.push(batching.error(MAX_TOKENS, message, remedy));
    }
    Some(tokens)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{
        DynamicBatchingPlan, Facts, LrScaling, PickingOrderPlan, Resolved, Severity, Written,
    };

    fn resolve(section: Value) -> Result<Resolved, String> {
        let json = json!({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "data_efficiency": section});
        let written = Written::from_value(&json).unwrap();
        crate::resolve(&written, &Facts::on_host(1)).map_err(|report| report.to_string())
    }

    fn enabled(batching: Value) -> Value {
        let mut batching = batching;
        batching["enabled"] = json!(true);
        json!({"enabled": true, "seed": 7,
            "data_sampling": {"enabled": true, "dynamic_batching": batching}})
    }

    #[test]
    fn defaults_are_deepspeeds() {
        let plan = resolve(enabled(json!({"max_tokens": 4096}))).unwrap().plan.dynamic_batching;
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
                assert_eq!(resolve(section).unwrap().plan.dynamic_batching, Some(expected));
            }
        }
        let mut section = enabled(json!({"max_tokens": 1, "sequence_picking_order": "random"}));
        section.as_object_mut().unwrap().remove("seed");
        let plan = resolve(section).unwrap().plan.dynamic_batching.unwrap();
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
        assert_eq!((idle.plan.dynamic_batching, idle.notes.len()), (None, 2));
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
