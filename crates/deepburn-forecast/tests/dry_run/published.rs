//! Models that do not fit on this machine, and published figures.

use deepburn::config::{RawConfig, RunContext, resolve};
use deepburn::zero::Training;
use deepburn_forecast::{Forecast, Meta, MetaDevice, forecast};
use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
use deepburn_models::gpt2::{Gpt2, Gpt2Config};
use serde_json::json;

/// Forecasts training in bf16 on `ranks` ranks with one sequence of `length` tokens each.
fn of(config: &Gpt2Config, stage: u8, ranks: usize, length: usize) -> Forecast {
    let json = json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": true},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    let facts = RunContext { hidden_size: Some(config.n_embd), ..RunContext::on_host(ranks) };
    let plan = resolve(&RawConfig::from_json(&json.to_string()).unwrap(), &facts).unwrap().plan;
    let ids = vec![0; length];
    let run = forecast(
        &plan,
        |device| Ok(Gpt2::<Training<Meta>>::zeros(config, device)?),
        |model| {
            let batch = CausalBatch::new(config, &ids, None, [1, length], &MetaDevice)?;
            Ok(model.loss(&batch).mean())
        },
    );
    run.unwrap_or_else(|error| panic!("{error}"))
}

/// Rajbhandari et al. (2020), figure 1: a model of 7.5 billion parameters in mixed precision with
/// Adam on 64 devices.
#[test]
fn a_decoder_of_7_5_billion_parameters_needs_the_published_memory() {
    let config = Gpt2Config { n_embd: 4096, n_head: 32, n_layer: 36, ..Gpt2Config::small() };
    for (stage, gigabytes) in [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)] {
        let states = of(&config, stage, 64, 2).step.device.model_states() as f64;
        let parameters = of(&config, 0, 1, 2).step.device.model_states() as f64 / 16.0;
        let ratio = states / parameters / (gigabytes / 7.5);
        // The figures have three digits.
        assert!((ratio - 1.0).abs() < 0.004, "stage {stage}: {ratio}");
    }
}

/// The states of one rank shrink with the number of ranks, and nothing else of this size is
/// allocated here.
#[test]
fn gpt2_xl_is_forecast_on_1024_ranks() {
    let config = Gpt2Config { n_embd: 1600, n_head: 25, n_layer: 48, ..Gpt2Config::small() };
    let (one, many) = (of(&config, 3, 1, 1024).step.device, of(&config, 3, 1024, 1024).step.device);
    let ratio = one.model_states() as f64 / many.model_states() as f64;
    assert!((1000.0..=1024.0).contains(&ratio), "{ratio}");
    assert_eq!(
        one.of(deepburn::zero::Category::Activations),
        many.of(deepburn::zero::Category::Activations)
    );
}
