//! Training in 16 bits with fp32 masters, on a small regression.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::{RankFailure, run_ranks};
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, Step, initialize};
use deepburn_zero::{Group, Training};
use half::{bf16, f16};
use serde_json::{Value, json};

use crate::models::Numbered;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

type Trained = Training<Flex>;
type Trainer = Engine<Flex, Net<Trained>>;

/// Sizes that are not divisible by 2, 3 or 4 ranks.
fn net() -> Net<Trained> {
    let device = &FlexDevice;
    let net = Net {
        up: LinearConfig::new(3, 5).init(device),
        down: LinearConfig::new(5, 1).init(device),
    };
    net.map(&mut Numbered(0))
}

impl<B: Backend> Net<B> {
    /// Mean squared error, computed in f32; inputs are cast to the type of the weights.
    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..12).map(|i| ((seed * 7 + i * 3) % 11) as f32 / 11.0).collect();
        let x = Tensor::<B, 2>::from_data(TensorData::new(values, [4, 3]), &B::Device::default());
        let x = x.cast(self.up.weight.val().dtype());
        let y = self.down.forward(self.up.forward(x)).cast(DType::F32);
        (y - 0.5).powf_scalar(2.0).mean()
    }
}

fn plan(stage: u8, world_size: usize, precision: &Value) -> Plan {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3,
            "warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    });
    for (key, value) in precision.as_object().unwrap() {
        config[key] = value.clone();
    }
    resolve(&RawConfig::from_value(&config).unwrap(), &RunContext::on_host(world_size))
        .unwrap()
        .plan
}

fn fp16(scale_power: u32) -> Value {
    json!({"fp16": {"enabled": true, "initial_scale_power": scale_power, "hysteresis": 1}})
}

fn try_ranks<R: Send>(
    plan: &Plan,
    body: impl Fn(&mut Trainer) -> Result<R, EngineError> + Sync,
) -> Result<Vec<R>, RankFailure<EngineError>> {
    run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        body(&mut initialize(net(), plan, Group::new(member))?)
    })
}

fn on_ranks<R: Send>(
    plan: &Plan,
    body: impl Fn(&mut Trainer) -> Result<R, EngineError> + Sync,
) -> Vec<R> {
    try_ranks(plan, body).unwrap_or_else(|failure| panic!("{failure}"))
}

/// Takes one step. The loss of rank `poisoned` is multiplied by `factor`.
fn step(
    engine: &mut Trainer,
    seed: usize,
    poison: Option<(usize, f32)>,
) -> Result<Step, EngineError> {
    let rank = engine.rank();
    let loss = engine.forward(|net| {
        let loss = net.loss(seed);
        match poison {
            Some((poisoned, factor)) if poisoned == rank => loss.mul_scalar(factor),
            _ => loss,
        }
    })?;
    engine.backward(loss)?;
    Ok(engine.step()?.expect("every micro-batch is a step"))
}

fn masters(engine: &Trainer) -> Result<Vec<f32>, EngineError> {
    let mut all = vec![];
    for index in 0..engine.parameters().len() {
        all.extend(engine.states().master_data(index)?.iter::<f32>());
    }
    Ok(all)
}

fn working(engine: &Trainer) -> Result<Vec<TensorData>, EngineError> {
    let indices = 0..engine.parameters().len();
    indices.map(|index| Ok(engine.states().parameter_data(index)?)).collect()
}

#[test]
fn working_copies_are_the_rounded_masters_at_every_stage() {
    for (precision, dtype) in
        [(fp16(8), DType::F16), (json!({"bf16": {"enabled": true}}), DType::BF16)]
    {
        let ends: Vec<_> = [0, 1, 2, 3]
            .map(|stage| {
                on_ranks(&plan(stage, 3, &precision), |engine| {
                    let start = masters(engine)?;
                    assert_eq!(start[0], 37.0 / 101.0 - 0.5, "masters start in full precision");
                    for seed in 0..4 {
                        step(engine, seed, None)?;
                    }
                    let masters = masters(engine)?;
                    let working = working(engine)?;
                    assert!(working.iter().all(|data| data.dtype == dtype));
                    let rounded = masters.iter().map(|master| match dtype {
                        DType::F16 => f16::from_f32(*master).to_f32(),
                        _ => bf16::from_f32(*master).to_f32(),
                    });
                    let rounded: Vec<f32> = rounded.collect();
                    let working: Vec<f32> =
                        working.iter().flat_map(|data| data.iter::<f32>()).collect();
                    assert_eq!(working, rounded);
                    assert_ne!(masters, start);
                    Ok(masters)
                })
            })
            .into_iter()
            .flatten()
            .collect();
        assert!(ends.iter().all(|end| *end == ends[0]), "stages or ranks differ in {precision}");
    }
}

/// Updates far below the spacing of bf16 numbers add up in the masters.
#[test]
fn small_updates_are_not_lost() {
    let precision = json!({"bf16": {"enabled": true}, "scheduler": {"type": "WarmupLR", "params":
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-5}}});
    on_ranks(&plan(2, 2, &precision), |engine| {
        let seen = |engine: &Trainer| -> Result<Vec<f32>, EngineError> {
            Ok(working(engine)?.iter().flat_map(|data| data.iter::<f32>()).collect())
        };
        let changed = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a != b).count();
        let start = (masters(engine)?, seen(engine)?);
        step(engine, 0, None)?;
        // All masters changed, but almost none of them crossed the midpoint of two bf16 numbers.
        assert_eq!(changed(&masters(engine)?, &start.0), 26);
        assert!(changed(&seen(engine)?, &start.1) <= 2);
        for _ in 0..400 {
            step(engine, 0, None)?;
        }
        assert!(changed(&seen(engine)?, &start.1) >= 24);
        Ok(())
    });
}

//= deepspeed 0.19.8 runtime/engine.py _take_model_step
#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    for stage in 0..=3 {
        let ranks = on_ranks(&plan(stage, 3, &fp16(4)), |engine| {
            step(engine, 0, None)?;
            let before = (masters(engine)?, engine.learning_rate(), engine.loss_scale());
            assert_eq!(before.2, 16.0);
            for bad in [f32::INFINITY, f32::NAN] {
                let scale = engine.loss_scale();
                let skipped = step(engine, 1, Some((1, bad)))?;
                assert!(skipped.is_skipped() && !engine.was_step_applied());
                assert_eq!((skipped.gradient_norm, skipped.loss_scale), (None, scale));
                assert_eq!(engine.global_gradient_norm(), None);
                assert_eq!(engine.loss_scale(), scale / 2.0);
            }
            assert_eq!((masters(engine)?, engine.learning_rate()), (before.0, before.1));
            assert_eq!((engine.global_steps(), engine.skipped_steps()), (3, 2));
            assert_eq!(engine.global_samples(), 3 * 12);
            let applied = step(engine, 1, None)?;
            assert_eq!((applied.is_skipped(), applied.loss_scale), (false, 4.0));
            masters(engine)
        });
        // The result is the same as without the skipped steps, including Adam's bias correction.
        let twin = on_ranks(&plan(stage, 3, &fp16(4)), |engine| {
            step(engine, 0, None)?;
            step(engine, 1, None)?;
            masters(engine)
        });
        // Scales that are powers of two do not change the rounding of values in fp16's range.
        for (rank, twin) in ranks.iter().zip(&twin) {
            for (value, twin) in rank.iter().zip(twin) {
                assert!((value - twin).abs() < 1e-5, "stage {stage}: {value} {twin}");
            }
        }
    }
}

#[test]
fn the_norm_is_unscaled_and_the_scale_changes_no_update() {
    let steps = |precision: &Value| {
        on_ranks(&plan(2, 2, precision), |engine| {
            let norms: Result<Vec<_>, _> = (0..3)
                .map(|seed| Ok::<_, EngineError>(step(engine, seed, None)?.gradient_norm.unwrap()))
                .collect();
            Ok((norms?, masters(engine)?))
        })
        .swap_remove(0)
    };
    let static_scale = |scale: f64| steps(&json!({"fp16": {"enabled": true, "loss_scale": scale}}));
    let (plain, scaled) = (static_scale(1.0), static_scale(1024.0));
    let exact = steps(&json!({}));
    for ((norm, scaled), exact) in plain.0.iter().zip(&scaled.0).zip(&exact.0) {
        // fp16 has a precision of 11 bits, and the norm depends on a few products.
        assert!((norm - scaled).abs() < 1e-3 * norm && (norm - exact).abs() < 5e-3 * norm);
    }
    for (value, scaled) in plain.1.iter().zip(&scaled.1) {
        assert!((value - scaled).abs() < 1e-4, "{value} {scaled}");
    }
}

#[test]
fn an_overflow_at_the_smallest_scale_ends_the_run_with_the_parameters_name() {
    for stage in 0..=3 {
        let failure = try_ranks(&plan(stage, 2, &fp16(0)), |engine| {
            step(engine, 0, Some((0, f32::NAN)))?;
            Ok(())
        });
        let message = failure.unwrap_err().to_string();
        for part in ["already at minimum", "up.weight", "loss scale of 1"] {
            assert!(message.contains(part), "{part} is not in {message}");
        }
    }
}

#[test]
fn bf16_skips_or_ends_as_configured_at_every_stage() {
    for stage in 0..=3 {
        let bf16 = |check| json!({"bf16": {"enabled": true, "check_grad_overflow": check}});
        on_ranks(&plan(stage, 2, &bf16(true)), |engine| {
            let before = masters(engine)?;
            assert!(step(engine, 0, Some((1, f32::NAN)))?.is_skipped());
            assert_eq!((masters(engine)?, engine.loss_scale()), (before, 1.0));
            Ok(())
        });
        let failure = try_ranks(&plan(stage, 2, &bf16(false)), |engine| {
            step(engine, 0, Some((1, f32::NAN))).map(|_| ())
        });
        let message = failure.unwrap_err().to_string();
        assert!(message.contains("up.weight") && message.contains("not finite"), "{message}");
    }
}

/// 16-bit sums over micro-batches lose small addends; fp32 sums do not.
#[test]
fn gradients_accumulate_in_the_configured_type() {
    let end = |dtype: Option<&str>| {
        let mut precision = json!({"bf16": {"enabled": true}, "gradient_accumulation_steps": 16});
        if let Some(dtype) = dtype {
            precision["data_types"] = json!({"grad_accum_dtype": dtype});
        }
        on_ranks(&plan(1, 2, &precision), |engine| {
            for seed in 0..16 {
                let loss = engine.forward(|net| net.loss(seed))?;
                engine.backward(loss)?;
                engine.step()?;
            }
            let bytes = engine.ledger().usage(deepburn_zero::Category::Gradients).peak;
            Ok((engine.global_gradient_norm().unwrap(), bytes))
        })
        .swap_remove(0)
    };
    let (default, in_fp32, in_bf16) = (end(None), end(Some("fp32")), end(Some("bf16")));
    assert_eq!(default, in_fp32);
    assert_ne!(default.0, in_bf16.0);
    // There are 26 elements, with 4 and 2 bytes each.
    assert_eq!((default.1, in_bf16.1), (26 * 4, 26 * 2));
}

/// Messages in 16 bits have half as many bytes. Gathers send the working copy.
#[test]
fn gathers_and_reductions_use_the_types_of_the_plan() {
    for (precision, gathered, reduced) in [
        (json!({}), "f32", "f32"),
        (json!({"bf16": {"enabled": true}}), "bf16", "bf16"),
        (json!({"bf16": {"enabled": true}, "communication_data_type": "fp32"}), "bf16", "f32"),
        (json!({"communication_data_type": "fp16"}), "f32", "f16"),
    ] {
        let plan = plan(3, 2, &precision);
        let ranks = run_ranks(2, Duration::from_secs(60), |member| {
            let mut engine: Trainer = initialize(net(), &plan, Group::new(member.clone()))?;
            step(&mut engine, 0, None)?;
            Ok::<_, EngineError>(member.statistics())
        });
        for statistics in ranks.unwrap_or_else(|failure| panic!("{failure}")) {
            assert_eq!(statistics.element_types("gather"), [gathered], "{precision}");
            assert_eq!(statistics.element_types("gradients"), [reduced], "{precision}");
        }
    }
}
