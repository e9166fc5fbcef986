//! The net that PyTorch trains in `data/param_groups.py` and `data/optimizers.py`.

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::Plan;
use deepburn_learner::{Engine, EngineError, initialize};
use deepburn_zero::{Group, Training};

pub(crate) type Trained = Training<Flex>;

#[derive(Module, Debug)]
pub(crate) struct Net<B: Backend> {
    first: Linear<B>,
    norm: LayerNorm<B>,
    middle: Linear<B>,
    head: Linear<B>,
}

impl Net<Trained> {
    pub(crate) fn new() -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(&FlexDevice);
        let net = Self {
            first: linear(5, 7),
            norm: LayerNormConfig::new(7).init(&FlexDevice),
            middle: linear(7, 7),
            head: linear(7, 3),
        };
        net.map(&mut Fill { seed: 0 })
    }

    /// Returns the mean squared error of batch number `step`.
    fn loss(&self, step: usize) -> Tensor<Trained, 1> {
        let tensor = |columns: usize, seed| {
            let data = TensorData::new(values(6 * columns, seed), [6, columns]);
            Tensor::<Trained, 2>::from_data(data, &FlexDevice)
        };
        let hidden = self.norm.forward(self.first.forward(tensor(5, 31 * step))).tanh();
        let output = self.head.forward(self.middle.forward(hidden).tanh());
        (output - tensor(3, 17 * step + 5)).powi_scalar(2).mean()
    }
}

fn values(count: usize, seed: usize) -> Vec<f32> {
    (1..=count).map(|i| ((seed + i) * 37 % 101) as f32 / 101.0 - 0.4).collect()
}

/// Fills the parameters with different values.
struct Fill {
    seed: usize,
}

impl ModuleMapper<Trained> for Fill {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Trained, D>>,
    ) -> Param<Tensor<Trained, D>> {
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.shape();
        let data = TensorData::new(values(shape.num_elements(), self.seed), shape);
        self.seed += 1000;
        Param::from_mapped_value(id, Tensor::from_data(data, &FlexDevice).require_grad(), mapper)
    }
}

/// All ranks have the same batch, so that they take the same steps as a single rank.
pub(crate) fn step(
    engine: &mut Engine<Flex, Net<Trained>>,
    number: usize,
) -> Result<f64, EngineError> {
    let loss = engine.forward(|net| net.loss(number))?;
    let value = loss.clone().into_scalar();
    engine.backward(loss)?;
    engine.step()?;
    Ok(f64::from(value))
}

pub(crate) fn losses(plan: &Plan) -> Vec<f64> {
    let ranks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let mut engine = initialize(Net::new(), plan, Group::new(member))?;
        (0..20).map(|number| step(&mut engine, number)).collect::<Result<Vec<_>, EngineError>>()
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}
