//! Tests of the memory forecast.

use deepburn::config::{RawConfig, RunContext, resolve};
use deepburn::zero::estimate::{ActivationOp, BackwardOp, KeptTensor};

use super::*;

const LIMIT: MemoryLimit = MemoryLimit { bytes: 1000, what: "a limit", of_process: false };

/// Forecasts Adam in fp32 on one parameter of `numel` elements.
fn with_forecast<T>(
    stage: u8,
    (ranks, are_threads): (u64, bool),
    numel: u64,
    look: impl Fn(&TrainedModel<'_>, Forecast) -> T,
) -> T {
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": {stage},
            "stage3_param_persistence_threshold": 0}}, "optimizer": {{"type": "Adam"}}}}"#
    );
    let facts = RunContext { hidden_size: Some(1), ..RunContext::on_host(ranks as usize) };
    let plan = resolve(&RawConfig::from_json(&json).unwrap(), &facts).unwrap().plan;
    let model = TrainedModel {
        sizes: vec![ParameterSize::new(numel, Some(&plan.optimizer))],
        activations: Box::new(blocks),
        batch: BatchShape { sequences: 0, length: 1 },
        plan: &plan,
        ranks,
    };
    let local = LocalRanks { count: ranks, are_threads, on_host: true };
    let forecast = model.forecast(&plan.zero, local, PassChange::default());
    look(&model, forecast)
}

/// Ten blocks of ten activations, each of which takes 100 bytes a sequence.
fn blocks(batch: BatchShape) -> ActivationGraph {
    let mut graph = ActivationGraph::new();
    let outputs = [100 * batch.sequences];
    let [mut x] = graph.push(&ActivationOp {
        outputs: &outputs,
        backward: BackwardOp::Lookup { numel: 0 },
        ..ActivationOp::NONE
    });
    for _ in 0..10 {
        graph.start_block();
        for _ in 0..10 {
            [x] = graph.push(&ActivationOp {
                inputs: &[x],
                outputs: &outputs,
                saved: &[KeptTensor::Input(0)],
                backward: BackwardOp::Unary,
                ..ActivationOp::NONE
            });
        }
    }
    graph
}

#[test]
fn threads_share_gathered_parameters() {
    // The parameters, gradients and moments of 100 elements take 400, 400 and 800 bytes.
    for (stage, threads, processes) in [
        (0, 4 * 1600, 4 * 1600),
        (1, 400 + 4 * 400 + 800, 4 * 800 + 800),
        (2, 400 + 400 + 800, 4 * 400 + 400 + 800),
        (3, 1600, 1600),
    ] {
        let bytes = |are_threads| {
            with_forecast(stage, (4, are_threads), 100, |_, forecast| {
                forecast.host_memory(forecast.rank.states.total())
            })
        };
        assert_eq!((bytes(true), bytes(false)), (threads, processes), "stage {stage}");
    }
}

#[test]
fn a_limit_of_processes_is_compared_with_one() {
    let exceeds = |of_process, are_threads| {
        let limit = MemoryLimit { of_process, ..LIMIT };
        with_forecast(3, (4, are_threads), 100, |_, forecast| forecast.exceeds(&limit))
    };
    assert_eq!(
        [exceeds(false, false), exceeds(true, false), exceeds(true, true)],
        [true, false, true]
    );
}

#[test]
fn remedies_make_the_run_fit() {
    let remedy_within = |bytes, numel, ranks| {
        with_forecast(0, ranks, numel, |model, forecast| {
            let limit = MemoryLimit { bytes, ..LIMIT };
            let fits = |zero: &ZeroPlan, change| {
                !model.forecast(zero, forecast.local, change).exceeds(&limit)
            };
            assert!(forecast.exceeds(&limit));
            remedy(model.plan, 0, false, fits).unwrap_or_default()
        })
    };
    assert_eq!(remedy_within(1700, 100, (4, false)), r#"set "stage": 3"#);
    let nvme = r#""offload_optimizer": {"device": "nvme", "nvme_path": "..."}"#;
    assert_eq!(remedy_within(900, 100, (1, true)), format!(r#"set "stage": 1, {nvme}"#));
    assert_eq!(remedy_within(900, 100, (4, false)), format!(r#"set "stage": 3, {nvme}"#));
    let parameters = r#""offload_param": {"device": "nvme", "nvme_path": "...", "max_in_cpu": 0}"#;
    let everything = format!(r#"set "stage": 3, {nvme}, {parameters}"#);
    assert_eq!(remedy_within(300, 100, (4, false)), everything);
}

/// 400 bytes of states, and a bit more than 10 kB of activations a sequence.
#[test]
fn fewer_activations_are_a_remedy() {
    let remedy_within = |bytes, sequences| {
        with_forecast(0, (1, true), 25, |model, forecast| {
            let limit = MemoryLimit { bytes, ..LIMIT };
            let model = TrainedModel {
                sizes: model.sizes.clone(),
                activations: Box::new(blocks),
                batch: BatchShape { sequences, length: 1 },
                ..*model
            };
            let fits = |zero: &ZeroPlan, change| {
                !model.forecast(zero, forecast.local, change).exceeds(&limit)
            };
            assert!(!fits(&model.plan.zero, PassChange::default()));
            remedy(model.plan, sequences, true, fits).unwrap_or_default()
        })
    };
    let full = r#"set deepspeed.activation_checkpointing to {"policy": "full"}"#;
    let lower = "lower deepspeed.train_micro_batch_size_per_gpu to";
    assert_eq!(remedy_within(15_000, 4), full);
    assert_eq!(remedy_within(3_500, 4), format!("{full} and {lower} 1"));
    assert_eq!(remedy_within(100, 4), "");
}

#[test]
fn the_line_names_every_tier() {
    let resident = Resident { tensors: 1 << 30, logits: 0, copies: 0 };
    let line = with_forecast(3, (2, true), 1 << 30, |_, forecast| forecast.line(&resident));
    assert!(line.contains("about 1.1"), "{line}");
    assert!(line.contains("2 ranks") && line.contains("17.18 GB of model states"), "{line}");
}
