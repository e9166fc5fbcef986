//! The engine's calls, on a small regression.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, initialize};
use deepburn_zero::{Group, Training};

use crate::models::Numbered;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    up: Linear<B>,
    drop: Dropout,
    down: Linear<B>,
}

type Trained = Training<Flex>;

fn net(dropout: f64) -> Net<Trained> {
    let device = &FlexDevice;
    let net = Net {
        up: LinearConfig::new(3, 5).init(device),
        drop: DropoutConfig::new(dropout).init(),
        down: LinearConfig::new(5, 2).init(device),
    };
    net.map(&mut Numbered(0))
}

impl<B: Backend> Net<B> {
    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let values: Vec<f32> = (0..12).map(|i| ((seed * 7 + i * 3) % 11) as f32 / 11.0).collect();
        let data = TensorData::new(values, [4, 3]);
        let x = Tensor::<B, 2>::from_data(data, &B::Device::default());
        let y = self.down.forward(self.drop.forward(self.up.forward(x)));
        (y - 0.5).powf_scalar(2.0).mean()
    }
}

fn plan(stage: u8, gas: usize, world_size: usize) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": {gas},
            "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
            "scheduler": {{"type": "WarmupLR", "params": {{"warmup_num_steps": 3,
                "warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_type": "linear"}}}},
            "zero_optimization": {{"stage": {stage}}}}}"#
    );
    let written = RawConfig::from_json(&text).unwrap();
    resolve(&written, &RunContext::on_host(world_size)).unwrap().plan
}

/// Runs `body` with an engine on each rank.
fn with_engine<R: Send>(
    plan: &Plan,
    dropout: f64,
    body: impl Fn(&mut Engine<Flex, Net<Trained>>) -> Result<R, EngineError> + Sync,
) -> Vec<R> {
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let mut engine = initialize(net(dropout), plan, Group::new(member))?;
        body(&mut engine)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

fn micro_batch(engine: &mut Engine<Flex, Net<Trained>>, seed: usize) -> Result<f32, EngineError> {
    let loss = engine.forward(|net| net.loss(seed))?;
    let value = loss.clone().into_scalar();
    engine.backward(loss)?;
    Ok(value)
}

fn weights(engine: &Engine<Flex, Net<Trained>>) -> Result<Vec<Vec<f32>>, EngineError> {
    let indices = 0..engine.parameters().len();
    let data = indices.map(|index| Ok(engine.states().parameter_data(index)?.to_vec().unwrap()));
    data.collect()
}

#[test]
fn only_the_step_at_a_boundary_updates() {
    with_engine(&plan(2, 3, 2), 0.0, |engine| {
        let start = weights(engine)?;
        for micro_step in 1..=6 {
            micro_batch(engine, micro_step)?;
            assert_eq!(engine.is_gradient_accumulation_boundary(), micro_step % 3 == 0);
            let step = engine.step()?;
            assert_eq!(step.is_some(), micro_step % 3 == 0);
            assert_eq!(weights(engine)? == start, micro_step < 3);
        }
        assert_eq!((engine.global_steps(), engine.micro_steps()), (2, 6));
        assert_eq!(engine.global_samples(), 2 * 24);
        assert_eq!(engine.skipped_steps(), 0);
        Ok(())
    });
}

#[test]
fn the_schedule_moves_with_applied_steps() {
    let rates = with_engine(&plan(3, 2, 1), 0.0, |engine| {
        let mut rates = vec![];
        for seed in 0..10 {
            micro_batch(engine, seed)?;
            rates.extend(engine.step()?.map(|step| step.learning_rate));
        }
        Ok(rates)
    });
    // Linear from 0.001 to 0.01 in three steps, the first two at the minimum.
    let expected = [0.001, 0.001, 0.004, 0.007, 0.01];
    for (rate, expected) in rates[0].iter().zip(expected) {
        assert!((rate - expected).abs() < 1e-12, "{rate} {expected}");
    }
}

#[test]
fn no_sync_gives_the_same_gradients_up_to_rounding() {
    let norms = |stage, quiet: bool| {
        with_engine(&plan(stage, 3, 2), 0.0, |engine| {
            let rank = engine.rank();
            if quiet {
                engine.no_sync(|engine| {
                    for seed in 0..2 {
                        micro_batch(engine, seed * 2 + rank)?;
                        engine.step()?;
                    }
                    Ok(())
                })?;
            } else {
                for seed in 0..2 {
                    micro_batch(engine, seed * 2 + rank)?;
                    engine.step()?;
                }
            }
            micro_batch(engine, 4 + rank)?;
            engine.step()?;
            Ok(engine.global_gradient_norm())
        })
    };
    for stage in [0, 1] {
        let (quiet, synced) = (norms(stage, true), norms(stage, false));
        assert_eq!(quiet[0], quiet[1], "both ranks see one norm");
        let (Some(quiet), Some(synced)) = (quiet[0], synced[0]) else {
            panic!("a step was taken");
        };
        // The three micro-batches are added before the two ranks instead of after: a few rounding
        // errors of 6e-8.
        assert!((quiet - synced).abs() < 1e-6 * synced, "{quiet} {synced}");
    }
}

#[test]
fn a_step_right_after_no_sync_reduces_the_pending_gradients() {
    let norms = |quiet: bool| {
        with_engine(&plan(0, 2, 2), 0.0, |engine| {
            let rank = engine.rank();
            micro_batch(engine, rank)?;
            engine.step()?;
            if quiet {
                engine.no_sync(|engine| micro_batch(engine, 2 + rank))?;
            } else {
                micro_batch(engine, 2 + rank)?;
            }
            engine.step()?;
            Ok(engine.global_gradient_norm())
        })
    };
    // There is only one micro-batch, so the order of additions is the same too.
    assert_eq!(norms(true), norms(false));
}

#[test]
fn no_sync_is_refused_where_gradients_are_sharded() {
    for stage in [2, 3] {
        with_engine(&plan(stage, 1, 2), 0.0, |engine| {
            let error = engine.no_sync(|_| Ok(())).unwrap_err();
            assert!(matches!(error, EngineError::NoSync { .. }), "{error}");
            Ok(())
        });
    }
}

#[test]
fn the_train_batch_size_changes_the_accumulation() {
    with_engine(&plan(1, 1, 2), 0.0, |engine| {
        assert!(engine.set_train_batch_size(12).is_err());
        assert!(engine.set_train_batch_size(0).is_err());
        engine.set_train_batch_size(24)?;
        assert_eq!(engine.batch().gradient_accumulation_steps, 3);
        micro_batch(engine, 0)?;
        assert!(engine.step()?.is_none());
        assert!(engine.set_train_batch_size(8).is_err(), "in the middle of an accumulation");
        Ok(())
    });
}

#[test]
fn step_needs_a_backward() {
    with_engine(&plan(0, 1, 1), 0.0, |engine| {
        assert!(matches!(engine.step(), Err(EngineError::Order { .. })));
        micro_batch(engine, 0)?;
        engine.zero_grad();
        assert!(matches!(engine.step(), Err(EngineError::Order { .. })));
        Ok(())
    });
}

#[test]
fn backward_needs_a_forward_through_the_engine() {
    with_engine(&plan(3, 1, 1), 0.0, |engine| {
        let loss = engine.module().loss(0);
        assert!(matches!(engine.backward(loss), Err(EngineError::Order { .. })));
        Ok(())
    });
}

#[test]
fn a_loss_without_parameters_is_an_error() {
    let failure = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine = initialize(net(0.0), &plan(2, 1, 2), Group::<Flex>::new(member))?;
        let loss =
            engine.forward(|_| Tensor::<Trained, 1>::ones([1], &FlexDevice).require_grad())?;
        engine.backward(loss)?;
        engine.step().map(|_| ())
    });
    let message = failure.unwrap_err().to_string();
    assert!(message.contains("no parameter got a gradient"), "{message}");
}

#[test]
fn a_boundary_can_be_set_manually() {
    with_engine(&plan(3, 4, 1), 0.0, |engine| {
        micro_batch(engine, 0)?;
        engine.set_gradient_accumulation_boundary(Some(true));
        assert!(engine.step()?.is_some());
        engine.set_gradient_accumulation_boundary(None);
        micro_batch(engine, 1)?;
        assert!(engine.step()?.is_none());
        Ok(())
    });
}

#[test]
fn a_plan_for_another_world_size_is_refused() {
    let plan = plan(3, 1, 2);
    let failure = run_ranks(3, Duration::from_secs(60), |member| {
        initialize(net(0.0), &plan, Group::<Flex>::new(member)).map(|_| ())
    });
    let message = failure.unwrap_err().to_string();
    assert!(message.contains("2 ranks") && message.contains('3'), "{message}");
}

#[test]
fn evaluation_sees_the_trained_weights_and_no_dropout() {
    for stage in 0..=3 {
        with_engine(&plan(stage, 1, 2), 0.5, |engine| {
            engine.seed(3);
            let before = engine.evaluate(|net| net.loss(1).into_scalar())?;
            assert_eq!(before, engine.evaluate(|net| net.loss(1).into_scalar())?);
            for seed in 0..30 {
                micro_batch(engine, seed)?;
                engine.step()?;
            }
            let after = engine.evaluate(|net| net.loss(1).into_scalar())?;
            assert!(after < before, "stage {stage}: {before} to {after}");
            Ok(())
        });
    }
}

#[test]
fn dropout_differs_between_ranks_and_repeats_between_stages() {
    let losses = |stage, seed| {
        with_engine(&plan(stage, 1, 3), 0.5, |engine| {
            // All stages start with the same random state, regardless of the random numbers used to
            // create the module.
            engine.seed(seed);
            let drawn = engine.forward(|_| {
                let ones = Tensor::<Trained, 1>::ones([64], &FlexDevice);
                DropoutConfig::new(0.5).init().forward(ones).into_data()
            })?;
            Ok(drawn.to_vec::<f32>().unwrap())
        })
    };
    let plain = losses(0, 9);
    assert_ne!(plain[0], plain[1]);
    assert_ne!(plain[1], plain[2]);
    assert_ne!(plain, losses(0, 10));
    for stage in 1..=3 {
        assert_eq!(losses(stage, 9), plain);
    }
}

#[test]
fn a_rank_that_computes_for_long_notices_the_failure_of_another() {
    let finished = AtomicBool::new(false);
    let failure = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine = initialize(net(0.0), &plan(0, 1, 2), Group::<Flex>::new(member))?;
        let rank = engine.rank();
        engine.forward(|_| {
            assert!(rank == 0, "rank 1 gives up");
            let mut sum = Tensor::<deepburn_zero::Zero<Flex>, 1>::ones([1], &FlexDevice);
            // These operations take minutes and include no collective.
            for _ in 0..500_000_000u64 {
                sum = sum + 1.0;
            }
            finished.store(true, Ordering::SeqCst);
        })
    });
    let message = failure.unwrap_err().to_string();
    assert!(message.contains("rank 1") && message.contains("gives up"), "{message}");
    assert!(!finished.load(Ordering::SeqCst));
}

#[test]
fn a_gradient_that_is_not_finite_ends_the_run_and_is_named() {
    for stage in 0..=3 {
        let failure = run_ranks(2, Duration::from_secs(60), |member| {
            let mut engine = initialize(net(0.0), &plan(stage, 1, 2), Group::<Flex>::new(member))?;
            let rank = engine.rank();
            let loss = engine.forward(|net| {
                let loss = net.loss(0);
                // Only one rank has NaN, but all ranks must report it.
                if rank == 1 { loss.mul_scalar(f32::NAN) } else { loss }
            })?;
            engine.backward(loss)?;
            engine.step().map(|_| ())
        });
        let message = failure.unwrap_err().to_string();
        assert!(message.contains("up.weight") && message.contains("not finite"), "{message}");
    }
}
