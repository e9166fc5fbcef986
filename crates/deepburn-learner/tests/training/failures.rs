//! An engine after a failure: every call returns the first failure, the module stays usable, and
//! mismatch errors name the parameters.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn_flex::Flex;
use deepburn_comm::{CommError, FailureCause, RankFailure, run_ranks};
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, HalfPrecision, SaveRequest, initialize};
use deepburn_zero::{Group, Training, ZeroError};

type Trained = Training<Flex>;

/// A convolution with running statistics and two heads of one size.
#[derive(Module, Debug)]
struct TwoHeads<B: Backend> {
    stem: Conv2d<B>,
    norm: BatchNorm<B>,
    left: Linear<B>,
    right: Linear<B>,
}

impl<B: Backend> TwoHeads<B> {
    fn new() -> Self {
        let device = &B::Device::default();
        Self {
            stem: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            left: LinearConfig::new(4, 6).init(device),
            right: LinearConfig::new(4, 6).init(device),
        }
    }

    fn features(&self) -> Tensor<B, 2> {
        let image = Tensor::ones([2, 1, 6, 6], &B::Device::default()).cumsum(3);
        let maps = relu(self.norm.forward(self.stem.forward(image)));
        maps.mean_dim(3).mean_dim(2).reshape([2, 4])
    }

    fn loss(&self) -> Tensor<B, 1> {
        let features = self.features();
        (self.left.forward(features.clone()) + self.right.forward(features)).powf_scalar(2.0).mean()
    }
}

fn plan(stage: u8, ranks: usize) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
            "optimizer": {{"type": "SGD", "params": {{"lr": 0.01}}}},
            "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": true}}}}"#
    );
    resolve(&RawConfig::from_json(&text).unwrap(), &RunContext::on_host(ranks)).unwrap().plan
}

type Net = Engine<Flex, TwoHeads<Trained>>;

fn step(engine: &mut Net) -> Result<(), EngineError> {
    let loss = engine.forward(TwoHeads::loss)?;
    engine.backward(loss)?;
    engine.step()?;
    Ok(())
}

/// Makes every call that can fail after a failure, and returns the messages.
fn later_calls(
    engine: &mut Net,
    parameters: usize,
    loss: Tensor<Trained, 1>,
    folder: &Path,
) -> Vec<String> {
    assert_eq!(engine.module().num_params(), parameters, "the module is there");
    let path = folder.join("model.safetensors");
    let messages = vec![
        engine.check_group().unwrap_err().to_string(),
        engine.forward(TwoHeads::loss).map(drop).unwrap_err().to_string(),
        engine.forward(|_| ()).unwrap_err().to_string(),
        engine.evaluate(|net| net.features().into_data()).map(drop).unwrap_err().to_string(),
        engine.backward(loss).unwrap_err().to_string(),
        engine.step().map(drop).unwrap_err().to_string(),
        engine.no_sync(|_| Ok(())).unwrap_err().to_string(),
        engine.save_16bit_model(&path, HalfPrecision::Bf16).map(drop).unwrap_err().to_string(),
        engine.save_checkpoint(folder, SaveRequest::default()).unwrap_err().to_string(),
        // A call that failed fails again.
        engine.forward(TwoHeads::loss).map(drop).unwrap_err().to_string(),
    ];
    assert!(std::fs::read_dir(folder).unwrap().next().is_none(), "nothing was written");
    messages
}

/// How the last rank fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Returns,
    Panics,
}

#[test]
fn after_the_failure_of_a_rank_every_call_of_the_others_names_it() {
    for (stage, ranks) in [(0, 2), (1, 2), (2, 3), (3, 2), (3, 3)] {
        for fault in [Fault::Returns, Fault::Panics] {
            let seen = Mutex::new(Vec::new());
            let plan = plan(stage, ranks);
            let ended = run_ranks::<(), _>(ranks, Duration::from_secs(60), |member| {
                let mut engine = initialize(TwoHeads::new(), &plan, Group::new(member))?;
                // These are computed before, because operations fail after the failure of a rank.
                let parameters = engine.module().num_params();
                let loss = Tensor::ones([1], &Default::default());
                if engine.rank() == ranks - 1 {
                    step(&mut engine)?;
                    if fault == Fault::Panics {
                        engine.forward(|_| -> () { panic!("a layer of this rank is broken") })?;
                    }
                    let when = "of this rank's own making";
                    return Err(EngineError::Order { call: "a call", when });
                }
                // The failed rank does not take part in the collectives of the next step.
                let first = loop {
                    if let Err(error) = step(&mut engine) {
                        break error;
                    }
                };
                let folder = tempfile::tempdir().unwrap();
                // A panic here would be masked by the first failure.
                let later =
                    AssertUnwindSafe(|| later_calls(&mut engine, parameters, loss, folder.path()));
                let messages = catch_unwind(later)
                    .map_err(|panic| panic.downcast_ref::<String>().cloned().unwrap_or_default());
                seen.lock().unwrap().push((first.to_string(), messages));
                Err(first)
            });
            assert!(ended.is_err());
            let seen = seen.into_inner().unwrap();
            assert_eq!(seen.len(), ranks - 1, "stage {stage}, {ranks} ranks, {fault:?}");
            for (first, later) in seen {
                let cause = match fault {
                    Fault::Returns => "of this rank's own making",
                    Fault::Panics => "a layer of this rank is broken",
                };
                let parts = [format!("rank {} failed", ranks - 1), cause.to_owned()];
                assert!(parts.iter().all(|part| first.contains(part)), "{first}");
                for message in later.unwrap() {
                    assert_eq!(message, first, "stage {stage}");
                }
            }
        }
    }
}

/// After a panic that is caught, the engine is usable if all ranks panicked at the same point.
#[test]
fn training_continues_after_a_panic_that_all_ranks_catch() {
    for stage in 0..=3 {
        let plan = plan(stage, 2);
        let ranks = run_ranks(2, Duration::from_secs(60), |member| {
            let mut engine = initialize(TwoHeads::new(), &plan, Group::new(member))?;
            step(&mut engine)?;
            let caught = catch_unwind(AssertUnwindSafe(|| {
                engine.forward(|net| {
                    let _ = net.features();
                    panic!("a shape that does not fit")
                })
            }));
            assert!(caught.is_err());
            let loss = engine.backward(Tensor::ones([1], &Default::default()));
            assert!(loss.unwrap_err().to_string().contains("without a forward pass"));
            if stage < 2 {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    engine.no_sync::<()>(|_| panic!("in a pass without synchronization"))
                }));
                assert!(caught.is_err());
            }
            step(&mut engine)?;
            let sum = engine.evaluate(|net| net.left.weight.val().sum().into_scalar())?;
            engine.step().unwrap_err();
            Ok::<_, EngineError>(sum.to_bits())
        });
        let sums = ranks.unwrap_or_else(|failure| panic!("stage {stage}: {failure}"));
        assert_eq!(sums[0], sums[1], "the panicking pass reached no rank's weights");
    }
}

/// Without the check, autodiff would differentiate the sum of the elements.
#[test]
fn a_loss_with_several_elements_is_refused_and_training_continues() {
    let plan = plan(3, 2);
    let ranks = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine: Net = initialize(TwoHeads::new(), &plan, Group::new(member))?;
        let loss = engine.forward(|net| net.features().reshape([-1]))?;
        let numel = loss.shape().num_elements();
        assert!(numel > 1);
        let refused = engine.backward(loss.clone()).unwrap_err();
        assert!(matches!(refused, EngineError::LossElements { numel: found } if found == numel));
        engine.backward(loss.mean())?;
        engine.step()
    });
    assert!(ranks.unwrap().iter().all(Option::is_some));
}

#[test]
fn a_detached_loss_is_refused_and_training_continues() {
    let plan = plan(3, 2);
    let ranks = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine: Net = initialize(TwoHeads::new(), &plan, Group::new(member))?;
        let loss = engine.forward(|net| net.features().mean())?;
        let refused = engine.backward(loss.clone().detach()).unwrap_err();
        assert!(matches!(refused, EngineError::DetachedLoss), "{refused}");
        engine.backward(loss)?;
        engine.step()
    });
    assert!(ranks.unwrap().iter().all(Option::is_some));
}

/// The mismatch error of ranks that run different parts of the model.
fn disagreement(
    stage: u8,
    part: impl Fn(&TwoHeads<Trained>, usize) -> Tensor<Trained, 1> + Sync,
) -> String {
    let plan = plan(stage, 2);
    let ended = run_ranks(2, Duration::from_secs(60), |member| {
        let mut engine = initialize(TwoHeads::new(), &plan, Group::new(member))?;
        let rank = engine.rank();
        let loss = engine.forward(|net| part(net, rank))?;
        engine.backward(loss)?;
        engine.step()?;
        Ok::<_, EngineError>(())
    });
    match ended {
        Err(RankFailure {
            cause: FailureCause::Error(EngineError::Zero(ZeroError::Comm(error))),
            ..
        })
        | Err(RankFailure { cause: FailureCause::Comm(error), .. }) => {
            assert!(matches!(error, CommError::Mismatch { .. }), "{error}");
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_that_use_different_parameters_are_told_which() {
    let heads = |net: &TwoHeads<Trained>, rank: usize| {
        let head = if rank == 0 { &net.left } else { &net.right };
        head.forward(net.features()).mean()
    };
    for (stage, what) in
        [(0, "gradients ("), (1, "gradients ("), (2, "gradients ("), (3, "gather (")]
    {
        let message = disagreement(stage, heads);
        for part in [what, "left.", "right."] {
            assert!(message.contains(part), "stage {stage}, no {part:?} in: {message}");
        }
        assert!(!message.contains('#'), "stage {stage}: {message}");
    }
}
