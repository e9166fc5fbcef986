//! Layers and tensor operations that users write by hand.

use burn::module::{Module, Param};
use burn::nn::loss::{CosineEmbeddingLossConfig, KLDivLossConfig, PoissonNllLossConfig, Reduction};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig, SwiGlu, SwiGluConfig,
};
use burn::tensor::activation::{log_softmax, mish, relu, silu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{IndexingUpdateOp, Int, Tensor};

use crate::harness::Network;
use crate::samples::Samples;

const VOCABULARY: usize = 9;
const LENGTH: usize = 4;
const WIDTH: usize = 6;

/// A language model with hand-written attention and a tied output layer.
#[derive(Module, Debug)]
pub(crate) struct HandWritten<B: Backend> {
    tokens: Embedding<B>,
    norm: RmsNorm<B>,
    queries: WeightNorm<B>,
    keys: WeightNorm<B>,
    rotary: RotaryEncoding<B>,
    gated: SwiGlu<B>,
    frozen: Linear<B>,
    last: LayerNorm<B>,
    temperature: Param<Tensor<B, 1>>,
    unused: Linear<B>,
}

/// A linear layer with weight normalization: its weight is a direction and a length.
#[derive(Module, Debug)]
struct WeightNorm<B: Backend> {
    direction: Param<Tensor<B, 2>>,
    length: Param<Tensor<B, 1>>,
}

impl<B: Backend> WeightNorm<B> {
    fn new(width: usize, device: &B::Device) -> Self {
        let normal = Initializer::Normal { mean: 0.0, std: 0.3 };
        Self {
            direction: normal.init([width, width], device),
            length: Initializer::Ones.init([width], device),
        }
    }

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let direction = self.direction.val();
        let norm = direction.clone().powi_scalar(2).sum_dim(0).sqrt() + 1e-3;
        let weight = direction / norm * self.length.val().unsqueeze();
        x.matmul(weight.unsqueeze())
    }
}

impl<B: Backend> HandWritten<B> {
    fn attend(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let x = self.norm.forward(x);
        let queries = self.rotary.forward(self.queries.forward(x.clone()));
        let keys = self.rotary.forward(self.keys.forward(x.clone()));
        let scores = queries.matmul(keys.transpose()) / (WIDTH as f64).sqrt();
        // The distances are an f32 constant, which is created again in each pass.
        let places = Tensor::<B, 1, Int>::arange(0..LENGTH as i64, &x.device()).float();
        let places = places.unsqueeze_dim::<2>(0);
        let distances = (places.clone() - places.transpose()).abs().unsqueeze::<3>();
        let causal = Tensor::<B, 2>::ones([LENGTH, LENGTH], &x.device()).triu(1).bool();
        let causal = causal.unsqueeze::<3>().expand(scores.dims());
        let scores = (scores - distances * 0.1) * self.temperature.val().unsqueeze();
        softmax(scores.mask_fill(causal, f32::NEG_INFINITY), 2).matmul(x)
    }
}

impl<B: Backend> Network<B> for HandWritten<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            norm: RmsNormConfig::new(WIDTH).init(device),
            queries: WeightNorm::new(WIDTH, device),
            keys: WeightNorm::new(WIDTH, device),
            rotary: RotaryEncodingConfig::new(LENGTH, WIDTH).init(device),
            gated: SwiGluConfig::new(WIDTH, WIDTH).init(device),
            frozen: LinearConfig::new(WIDTH, WIDTH).init(device).no_grad(),
            last: LayerNormConfig::new(WIDTH).init(device),
            temperature: Initializer::Ones.init([1], device),
            unused: LinearConfig::new(3, 5).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let text = samples.integers::<B, 2>(VOCABULARY as u64, &[LENGTH]);
        let mut x = self.tokens.forward(text.clone());
        x = x.clone() + self.attend(x);
        x = x.clone() + silu(self.frozen.forward(x.clone())) + self.gated.forward(x);
        let head = self.tokens.weight.val().transpose().unsqueeze::<3>();
        let scores = log_softmax(self.last.forward(x).matmul(head), 2);
        let targets = text.roll_dim(-1, 1).unsqueeze_dim::<3>(2);
        scores.gather(2, targets).mean().neg()
    }
}

/// Applies losses and indexing to the outputs of two layers.
#[derive(Module, Debug)]
pub(crate) struct Selections<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
    scores: Linear<B>,
}

const FEATURES: usize = 5;
const INNER: usize = 8;

impl<B: Backend> Selections<B> {
    /// Sorts, sums, selects and assigns activations.
    fn rearranged(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let batch = x.dims()[0];
        let device = &x.device();
        let sorted = x.clone().sort(1) + x.clone().cumsum(1) / INNER as f32;
        let (top, _) = x.clone().topk_with_indices(3, 1);
        let picked = Tensor::<B, 1, Int>::from_data([6, 1, 3], device);
        let base = Tensor::<B, 2>::zeros([batch, INNER], device);
        let written = base.clone().slice_assign([0..batch, 2..5], top.clone());
        let added = written.select_assign(1, picked.clone(), top.clone(), IndexingUpdateOp::Add);
        let places = picked.unsqueeze::<2>().expand([batch, 3]);
        let scattered = base.scatter(1, places, top.exp() * 0.1, IndexingUpdateOp::Add);
        let positive = x.clone().greater_elem(0.0);
        let bent = x.clone().erf().mask_where(positive, x.clone().tanh());
        let stacked = Tensor::stack::<3>(vec![sorted, added + scattered, bent], 1);
        let [low, high] = [x.clone().min_dim(1), x.max_dim(1)];
        stacked.mean_dim(1).squeeze_dim::<2>(1) + (high - low) * 0.1
    }

    /// Combines activations, inputs and constants.
    fn arithmetic(&self, x: Tensor<B, 2>, y: Tensor<B, 2>) -> Tensor<B, 2> {
        let gram = x.clone().unsqueeze_dim::<3>(2).matmul(y.clone().unsqueeze_dim::<3>(1));
        let gram = gram.sum_dim(2).squeeze_dim::<2>(2);
        let powers = x.clone().abs().add_scalar(0.1).powf_scalar(1.5);
        let roots = (y.clone().square() + 1.0).sqrt().log();
        let waves = x.clone().sin() + y.clone().cos() + (x * 0.5).clamp(-0.4, 0.4);
        Tensor::cat(vec![gram, powers, roots, waves.max_pair(y)], 1)
    }
}

impl<B: Backend> Network<B> for Selections<B> {
    /// The Poisson loss reads its targets and checks their sign.
    const CHECKS_VALUES: bool = true;

    fn new(device: &B::Device) -> Self {
        Self {
            up: LinearConfig::new(FEATURES, INNER).init(device),
            down: LinearConfig::new(INNER, FEATURES).init(device),
            scores: LinearConfig::new(4 * FEATURES, FEATURES).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let x = samples.floats::<B, 2>(&[FEATURES]);
        let device = &x.device();
        let y = self.down.forward(self.rearranged(mish(self.up.forward(x.clone()))));
        let scores = self.scores.forward(self.arithmetic(x.clone(), y.clone()));
        let wanted = softmax(x.clone() * 2.0, 1);
        let divergence = KLDivLossConfig::new().init();
        let divergence =
            divergence.forward(log_softmax(scores.clone(), 1), wanted, Reduction::BatchMean);
        let rates = relu(x.clone()) * 3.0;
        let counts = PoissonNllLossConfig::new().init().forward(scores, rates, Reduction::Mean);
        let alike = Tensor::<B, 1, Int>::ones([samples.len()], device);
        let angles = CosineEmbeddingLossConfig::new().init().forward(y, x, alike);
        divergence + counts + angles
    }
}

crate::test_model!(hand_written, HandWritten);
crate::test_model!(selections, Selections);
