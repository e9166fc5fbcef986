//! Compares training with `torch_autocast` with the same run in PyTorch.
//!
//! The trace is in `autocast_types.json` of the crate deepburn-zero. The header of the script that
//! recorded it describes the net.

use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{EngineError, initialize};
use deepburn_zero::{Group, Training};
use serde_json::Value;

/// The net of the script. The fields are in the order in which the generator fills them.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    conv: Conv2d<B>,
    embed: Linear<B>,
    norm: LayerNorm<B>,
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    head: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let device = &B::Device::default();
        let square = || LinearConfig::new(16, 16).with_bias(false).init(device);
        let padding = PaddingConfig2d::Explicit(1, 1, 1, 1);
        Self {
            conv: Conv2dConfig::new([2, 6], [3, 3]).with_padding(padding).init(device),
            embed: LinearConfig::new(6, 16).init(device),
            norm: LayerNormConfig::new(16).init(device),
            q: square(),
            k: square(),
            v: square(),
            head: LinearConfig::new(16, 5).init(device),
        }
    }

    /// Returns the logits `[4, 5]` of images `[4, 2, 8, 8]`.
    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = activation::gelu(self.conv.forward(images));
        let x = self.embed.forward(x.reshape([4, 6, 64]).swap_dims(1, 2));
        let x = self.norm.forward(x);
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|layer| layer.forward(x.clone()));
        let scores = activation::softmax(q.matmul(k.transpose()) * 0.25, 2);
        let x = x + scores.matmul(v);
        self.head.forward(x.mean_dim(1).squeeze_dim::<2>(1))
    }
}

/// The generator of the script.
struct Numbers(u64);

impl Numbers {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f64 / (1u64 << 24) as f64
    }

    fn values(&mut self, count: usize, bound: f64) -> Vec<f32> {
        (0..count).map(|_| ((2.0 * self.uniform() - 1.0) * bound) as f32).collect()
    }
}

/// Fills each parameter with the next random numbers, within the bound of this parameter.
struct Fill<'a> {
    numbers: &'a mut Numbers,
    bounds: std::vec::IntoIter<f64>,
}

impl<B: Backend> ModuleMapper<B> for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let bound = self.bounds.next().unwrap();
        let mut shape = tensor.dims();
        let values = self.numbers.values(shape.iter().product(), bound);
        // PyTorch stores the weight of a linear layer transposed.
        if D == 2 {
            shape.swap(0, 1);
        }
        let filled = Tensor::<B, D>::from_data(TensorData::new(values, shape), &tensor.device());
        let filled = if D == 2 { filled.swap_dims(0, 1) } else { filled };
        Param::from_mapped_value(id, filled.require_grad(), mapper)
    }
}

fn plan(world_size: usize, stage: u8, autocast: &str) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
            "torch_autocast": {autocast}, "zero_optimization": {{"stage": {stage}}},
            "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01, "betas": [0.9, 0.999],
                "eps": 1e-8, "weight_decay": 0.01}}}}}}"#
    );
    let written = RawConfig::from_json(&text).unwrap();
    resolve(&written, &RunContext::on_host(world_size)).unwrap().plan
}

fn trace() -> Value {
    let text = include_str!("../../../deepburn-zero/tests/data/autocast_types.json");
    serde_json::from_str::<Value>(text).unwrap()["training"].take()
}

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

/// Returns the losses of ten steps. All ranks have the same batch, so their mean loss equals the
/// loss of one rank.
fn losses(world_size: usize, stage: u8, autocast: &str) -> Vec<f32> {
    let (plan, trace) = (plan(world_size, stage, autocast), trace());
    let results = run_ranks(world_size, Duration::from_secs(60), |member| {
        let mut numbers = Numbers(trace["seed"].as_u64().unwrap());
        let parameters = trace["parameters"].as_array().unwrap().iter();
        let bounds: Vec<f64> = parameters.map(|p| p["bound"].as_f64().unwrap()).collect();
        let mut fill = Fill { numbers: &mut numbers, bounds: bounds.into_iter() };
        let net = Net::<Training<Flex>>::new().map(&mut fill);
        let mut engine = initialize(net, &plan, Group::new(member))?;
        let step = |_| {
            let images = TensorData::new(numbers.values(4 * 2 * 8 * 8, 1.0), [4, 2, 8, 8]);
            let targets: Vec<i64> = (0..4).map(|_| (numbers.uniform() * 5.0) as i64).collect();
            let loss = engine.forward(|net| {
                let logits = net.forward(Tensor::from_data(images, &FlexDevice));
                assert_eq!(
                    logits.dtype(),
                    if autocast.contains("true") { DType::BF16 } else { DType::F32 }
                );
                let targets = Tensor::<_, 1, Int>::from_data(&targets[..], &FlexDevice);
                CrossEntropyLossConfig::new().init(&FlexDevice).forward(logits, targets)
            })?;
            assert_eq!(loss.dtype(), DType::F32);
            let value = loss.clone().into_scalar();
            engine.backward(loss)?;
            engine.step()?;
            Ok(value)
        };
        (0..10).map(step).collect::<Result<Vec<f32>, EngineError>>()
    });
    results.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}

fn largest_difference(left: &[f32], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

const BF16: &str = r#"{"enabled": true, "dtype": "bfloat16"}"#;

#[test]
fn losses_follow_pytorchs_autocast() {
    let trace = trace();
    let found = losses(1, 0, BF16);
    // PyTorch's own bf16 losses are within 5e-3 of its fp32 losses; the points at which products
    // are rounded differ between kernels.
    let difference = largest_difference(&found, &numbers(&trace["losses"]));
    assert!(difference < 1e-2, "{difference}: {found:?}");
    // Without autocast the losses match PyTorch's fp32 losses.
    let found = losses(1, 0, r#"{"enabled": false}"#);
    let difference = largest_difference(&found, &numbers(&trace["fp32_losses"]));
    assert!(difference < 1e-4, "{difference}: {found:?}");
}

#[test]
fn stages_agree_under_autocast() {
    for world_size in [1, 2, 3] {
        let expected = losses(world_size, 0, BF16);
        for stage in 1..=3 {
            assert_eq!(losses(world_size, stage, BF16), expected, "stage {stage}");
        }
    }
}
