//! Trains a [`Network`] on ranks, and with plain Burn.

use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use burn_flex::Flex;
use deepburn::prelude::*;
use deepburn::{BoxError, EngineError, Meta, run_ranks};
use serde_json::json;

use crate::samples::{GLOBAL_BATCH, Samples};
use crate::weights::{Seeded, Value, values};

/// The backend that models train on.
pub(crate) type Trained = Training<Flex>;
/// The backend of forecasts.
pub(crate) type WithoutData = Training<Meta>;
/// The backend that models are evaluated on.
pub(crate) type Inner = <Trained as AutodiffBackend>::InnerBackend;
pub(crate) type Trainer<M> = Engine<Flex, M>;

/// The seed of the initial weights.
pub(crate) const SEED: u64 = 0;

/// The number of steps in a run.
pub(crate) const STEPS: usize = 10;

const LEARNING_RATE: f64 = 3e-3;
const BETAS: [f32; 2] = [0.9, 0.999];
/// Some gradients are zero except for rounding (a bias before a norm, the bias of attention keys).
/// With this epsilon, they do not cause updates of full size.
const EPSILON: f32 = 1e-5;
const WEIGHT_DECAY: f32 = 0.01;

/// A model and its mean loss over samples, written like any Burn model.
pub(crate) trait Network<B: Backend>: Module<B> {
    /// Whether the loss of a batch differs from the mean of its samples' losses, as with batch norm
    /// or if the mean ignores padding.
    const COUPLES_SAMPLES: bool = false;

    /// Whether the loss is refused because of the values of a tensor, which a forecast does not
    /// have.
    const CHECKS_VALUES: bool = false;

    /// Whether the model has running statistics, which a pipeline refuses.
    const HAS_STATISTICS: bool = false;

    fn new(device: &B::Device) -> Self;

    fn loss(&self, samples: &Samples) -> Tensor<B, 1>;
}

/// A network that can be trained and evaluated.
pub(crate) trait Trainable:
    Network<Trained> + AutodiffModule<Trained, InnerModule: Network<Inner>>
{
}

impl<M> Trainable for M
where
    M: Network<Trained> + AutodiffModule<Trained>,
    M::InnerModule: Network<Inner>,
{
}

/// Returns a network with the weights of `seed`.
pub(crate) fn seeded<B: Backend, M: Network<B>>(seed: u64) -> M {
    M::new(&B::Device::default()).map(&mut Seeded::new(seed))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    Fp32,
    Bf16,
    Fp16,
}

/// The options of a run that do not change the code of the model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) precision: Precision,
    pub(crate) stage: u8,
    pub(crate) ranks: usize,
    pub(crate) recompute: Recompute,
}

/// The activations that backward recomputes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recompute {
    Off,
    Full,
    Selective,
    EveryOther,
    /// Selective, with the kept activations offloaded to NVMe.
    Offloaded,
}

impl Job {
    pub(crate) fn new(precision: Precision, stage: u8, ranks: usize) -> Self {
        Self { precision, stage, ranks, recompute: Recompute::Off }
    }

    /// Returns a plan in which the stages differ as much as possible: it has small buckets, and
    /// some parameters are persistent while others are gathered.
    pub(crate) fn plan(&self) -> Plan {
        let mut config = json!({
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH / self.ranks,
            // Plain Burn does not clip gradients.
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "betas": BETAS,
                "eps": EPSILON, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": self.stage, "overlap_comm": true,
                "reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 200,
                "stage3_param_persistence_threshold": 5, "stage3_max_live_parameters": 400,
                "stage3_max_reuse_distance": 100},
        });
        match self.precision {
            Precision::Fp32 => {}
            Precision::Bf16 => config["bf16"] = json!({"enabled": true}),
            // With this scale no gradient of these models overflows, so no step is skipped.
            Precision::Fp16 => {
                config["fp16"] = json!({"enabled": true, "initial_scale_power": 6});
            }
        }
        config["activation_checkpointing"] = match self.recompute {
            Recompute::Off => json!({}),
            Recompute::Full => json!({"policy": "full"}),
            Recompute::Selective => json!({"policy": "selective"}),
            Recompute::EveryOther => json!({"every_nth_block": 2}),
            Recompute::Offloaded => json!({"policy": "selective", "offload_threshold": 0,
                "nvme_path": env!("CARGO_TARGET_TMPDIR")}),
        };
        deepburn::plan(&config.to_string(), self.ranks).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// The results of a rank. Equality is bitwise.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    /// The loss of this rank in each step.
    pub(crate) losses: Vec<f32>,
    pub(crate) evaluation: Evaluation,
}

/// The results of the model without autodiff.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Evaluation {
    /// The loss on samples that are the same on every rank.
    pub(crate) loss: f32,
    /// All values of the module.
    pub(crate) values: Vec<Value>,
}

/// Builds a network on each rank and runs `body` on its engine. Rank 0 has the weights of `seed`,
/// and each other rank has different weights.
pub(crate) fn on_ranks<M: Trainable, R: Send>(
    job: Job,
    seed: u64,
    body: impl Fn(&mut Trainer<M>) -> Result<R, BoxError> + Sync,
) -> Vec<R> {
    let plan = job.plan();
    let ranks = run_ranks(job.ranks, |group| {
        let model = seeded::<Trained, M>(seed + group.rank() as u64);
        let mut engine = deepburn::initialize(model, &plan, group)?;
        engine.seed(11);
        body(&mut engine)
    });
    ranks.unwrap_or_else(|failure| panic!("{job:?}: {failure}"))
}

/// Takes `count` steps and returns their losses.
pub(crate) fn take_steps<M: Trainable>(
    engine: &mut Trainer<M>,
    count: usize,
) -> Result<Vec<f32>, EngineError> {
    let (rank, world_size) = (engine.rank(), engine.group().world_size());
    let mut take_step = || {
        let samples = Samples::of_step(engine.global_steps(), rank, world_size);
        let loss = engine.forward(|model| model.loss(&samples))?;
        let value = loss.clone().into_scalar();
        engine.backward(loss)?;
        let step = engine.step()?.expect("every micro-batch is a step");
        assert!(!step.is_skipped(), "step {} overflowed", step.number);
        Ok(value)
    };
    (0..count).map(|_| take_step()).collect()
}

/// Evaluates the model on held-out samples and reads all of its values.
pub(crate) fn evaluate<M: Trainable>(engine: &Trainer<M>) -> Result<Evaluation, EngineError> {
    engine.evaluate(Evaluation::of)
}

impl Evaluation {
    /// Asserts bitwise equality. The message names the value that differs.
    #[track_caller]
    pub(crate) fn assert_same(&self, other: &Self, what: &str) {
        assert_eq!(self.values.len(), other.values.len(), "{what}");
        for ((path, left), (_, right)) in self.values.iter().zip(&other.values) {
            assert!(left == right, "{path}, {what}: {left} is not {right}");
        }
        assert_eq!(self.loss, other.loss, "evaluation, {what}");
    }

    /// Asserts that running statistics stay f32. In 16 bits, small updates would be lost to
    /// rounding.
    #[track_caller]
    pub(crate) fn assert_statistics_in_f32(&self, what: &str) {
        for (path, data) in self.values.iter().filter(|(path, _)| path.contains("running_")) {
            assert_eq!(data.dtype, DType::F32, "{path}, {what}");
        }
    }

    fn of<B: Backend, M: Network<B>>(model: &M) -> Self {
        let loss = model.loss(&Samples::held_out()).into_data().iter::<f32>().next();
        Self { loss: loss.expect("a loss has one element"), values: values(model) }
    }
}

/// Trains for [`STEPS`] steps and returns the outcome of each rank.
pub(crate) fn train<M: Trainable>(job: Job) -> Vec<Outcome> {
    on_ranks::<M, _>(job, SEED, |engine| {
        let losses = take_steps(engine, STEPS)?;
        Ok(Outcome { losses, evaluation: evaluate(engine)? })
    })
}

/// Trains with Burn's own optimizer on the global batch, without an engine.
pub(crate) fn train_with_burn<M: Trainable>() -> Outcome {
    let mut model: M = seeded::<Trained, M>(SEED);
    let mut optimizer = AdamWConfig::new()
        .with_beta_1(BETAS[0])
        .with_beta_2(BETAS[1])
        .with_epsilon(EPSILON)
        .with_weight_decay(WEIGHT_DECAY)
        .init::<Trained, M>();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = model.loss(&Samples::of_step(step as u64, 0, 1));
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    Outcome { losses, evaluation: Evaluation::of(&model.valid()) }
}

/// Returns the loss of the global batch in each step.
pub(crate) fn mean_losses(ranks: &[Outcome]) -> Vec<f32> {
    let step = |step: usize| ranks.iter().map(|rank| rank.losses[step]).sum::<f32>();
    (0..ranks[0].losses.len()).map(|at| step(at) / ranks.len() as f32).collect()
}
