//! A small model whose sizes are not divisible by the number of ranks, with its data and plans.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use deepburn::prelude::*;

pub(crate) const ROWS: usize = 3;
const VOCAB: usize = 11;
const WIDTH: usize = 5;

/// Predicts numbers from tokens.
#[derive(Module, Debug)]
pub(crate) struct Net<B: Backend> {
    tokens: Embedding<B>,
    up: Linear<B>,
    norm: LayerNorm<B>,
    down: Linear<B>,
}

impl<B: Backend> Net<B> {
    /// Creates the model with fixed weights and an inner width of `inner`.
    pub(crate) fn new(inner: usize) -> Self {
        let device = &B::Device::default();
        let net = Self {
            tokens: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            up: LinearConfig::new(WIDTH, inner).init(device),
            norm: LayerNormConfig::new(inner).init(device),
            down: LinearConfig::new(inner, 1).init(device),
        };
        net.map(&mut Numbered(1))
    }

    /// Returns the mean square of the prediction minus 1. `between` is called between the first and
    /// the last layers.
    pub(crate) fn loss(&self, batch: [i64; ROWS], between: impl FnOnce()) -> Tensor<B, 1> {
        let device = &B::Device::default();
        let batch = TensorData::new(batch.to_vec(), [1, ROWS]);
        let hidden = self.tokens.forward(Tensor::<B, 2, Int>::from_data(batch, device));
        let hidden = gelu(self.up.forward(hidden));
        between();
        let error = self.down.forward(self.norm.forward(hidden)) - 1.0;
        error.clone().mul(error).mean()
    }
}

/// Fills parameters with small numbers that depend only on their position.
struct Numbered(u64);

impl<B: Backend> ModuleMapper<B> for Numbered {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let values: Vec<f32> =
            (0..tensor.shape().num_elements()).map(|_| random(&mut self.0) - 0.5).collect();
        let data = TensorData::new(values, tensor.shape());
        let tensor = Tensor::from_data(data, &tensor.device()).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Returns a number in [0, 1), drawn with xorshift64 (Marsaglia 2003).
pub(crate) fn random(state: &mut u64) -> f32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 40) as f32 / (1_u64 << 24) as f32
}

/// Returns the tokens of a micro-batch.
pub(crate) fn batch(state: &mut u64) -> [i64; ROWS] {
    std::array::from_fn(|_| (random(state) * VOCAB as f32) as i64)
}

/// Returns a plan with buckets so small that a step needs several of them.
pub(crate) fn plan(stage: u8, ranks: usize, accumulation: usize) -> Plan {
    plan_at_rate(stage, ranks, accumulation, 1e-3)
}

/// Returns the same plan with another learning rate.
pub(crate) fn plan_at_rate(stage: u8, ranks: usize, accumulation: usize, lr: f64) -> Plan {
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": {ROWS},
            "gradient_accumulation_steps": {accumulation},
            "optimizer": {{"type": "AdamW", "params": {{"lr": {lr}}}}},
            "zero_optimization": {{
                "stage": {stage}, "overlap_comm": true, "reduce_bucket_size": 40,
                "stage3_param_persistence_threshold": 6, "stage3_prefetch_bucket_size": 50,
                "stage3_max_live_parameters": 60, "stage3_max_reuse_distance": 30}}}}"#
    );
    deepburn::plan(&json, ranks).unwrap()
}
