//! A linear model with exact gradients: the gradient of its loss is the input.

use std::time::Duration;

use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, initialize};
use deepburn_zero::{Group, Training};
use serde_json::{Value, json};

pub(crate) type Trained = Training<Flex>;
pub(crate) type LineEngine = Engine<Flex, Line<Trained>>;

/// The number of weights, which 2 ranks cannot divide evenly.
pub(crate) const WIDTH: usize = 5;

/// The weights of a scalar product. They start at 0.
#[derive(Module, Debug)]
pub(crate) struct Line<B: Backend> {
    weights: Param<Tensor<B, 1>>,
}

impl<B: Backend> Line<B> {
    pub(crate) fn new(weights: Param<Tensor<B, 1>>) -> Self {
        Self { weights }
    }

    /// Returns the scalar product of the weights and `x`, whose gradient is `x`.
    pub(crate) fn product(&self, x: [f32; WIDTH]) -> Tensor<B, 1> {
        let x = Tensor::from_data(TensorData::from(x), &B::Device::default());
        (self.weights.val() * x).sum()
    }

    /// Returns the scalar product of the detached weights and `x`, which has no gradient.
    pub(crate) fn detached_product(&self, x: [f32; WIDTH]) -> Tensor<B, 1> {
        let x = Tensor::from_data(TensorData::from(x), &B::Device::default());
        (self.weights.val().detach() * x).sum()
    }
}

/// Returns the input of micro-batch `number` of a rank: small integers.
pub(crate) fn input(rank: usize, number: usize) -> [f32; WIDTH] {
    std::array::from_fn(|i| ((rank * 7 + number * 3 + i * 5) % 11) as f32 - 4.0)
}

/// Returns a plan with SGD and a learning rate of 1, so that an update subtracts the gradient.
pub(crate) fn plan(stage: u8, accumulation: usize, ranks: usize) -> Plan {
    plan_with(stage, accumulation, ranks, json!({}))
}

/// Returns a plan with more keys.
pub(crate) fn plan_with(stage: u8, accumulation: usize, ranks: usize, more: Value) -> Plan {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    let written = RawConfig::from_value(&config).unwrap();
    resolve(&written, &RunContext::on_host(ranks)).unwrap().plan
}

/// Runs `body` with an engine on each rank.
pub(crate) fn with_engine<R: Send, E>(
    plan: &Plan,
    body: impl Fn(&mut LineEngine) -> Result<R, E> + Sync,
) -> Vec<R>
where
    E: std::error::Error + Send + Sync + From<deepburn_learner::EngineError> + 'static,
{
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let weights = Param::from_tensor(Tensor::zeros([WIDTH], &FlexDevice));
        body(&mut initialize(Line::new(weights), plan, Group::new(member))?)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

/// Returns the weights of an engine. All ranks call this together.
pub(crate) fn weights(engine: &LineEngine) -> Vec<f32> {
    engine.states().parameter_data(0).unwrap().to_vec().unwrap()
}

/// Returns the mean over ranks and inputs, negated: the weights after one update with these inputs.
pub(crate) fn after_update(ranks: usize, numbers: &[usize]) -> Vec<f32> {
    let count = (ranks * numbers.len()) as f64;
    let sum = |i: usize| -> f64 {
        let of_rank = |rank| numbers.iter().map(move |number| f64::from(input(rank, *number)[i]));
        (0..ranks).flat_map(of_rank).sum()
    };
    (0..WIDTH).map(|i| (-sum(i) / count) as f32).collect()
}
