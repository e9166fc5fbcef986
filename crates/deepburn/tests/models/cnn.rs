//! An image classifier with batch normalization.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d, Relu,
};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::harness::Network;
use crate::samples::Samples;

const CLASSES: usize = 3;

#[derive(Module, Debug)]
pub(crate) struct Cnn<B: Backend> {
    first: Block<B>,
    pool: MaxPool2d,
    second: Block<B>,
    average: AdaptiveAvgPool2d,
    dropout: Dropout,
    hidden: Linear<B>,
    norm: BatchNorm<B>,
    head: Linear<B>,
    activation: Relu,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    activation: Relu,
}

impl<B: Backend> Block<B> {
    fn new(channels: [usize; 2], device: &B::Device) -> Self {
        let conv = Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same);
        let norm = BatchNormConfig::new(channels[1]);
        Self { conv: conv.init(device), norm: norm.init(device), activation: Relu::new() }
    }

    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        self.activation.forward(self.norm.forward(self.conv.forward(x)))
    }
}

impl<B: Backend> Network<B> for Cnn<B> {
    const COUPLES_SAMPLES: bool = true;
    const HAS_STATISTICS: bool = true;

    fn new(device: &B::Device) -> Self {
        Self {
            first: Block::new([2, 4], device),
            pool: MaxPool2dConfig::new([2, 2]).init(),
            second: Block::new([4, 5], device),
            average: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
            dropout: DropoutConfig::new(0.0).init(),
            hidden: LinearConfig::new(5 * 2 * 2, 7).with_bias(false).init(device),
            norm: BatchNormConfig::new(7).init(device),
            head: LinearConfig::new(7, CLASSES).init(device),
            activation: Relu::new(),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let images = samples.floats::<B, 4>(&[2, 6, 6]);
        let labels = samples.integers::<B, 1>(CLASSES as u64, &[]);
        let x = self.second.forward(self.pool.forward(self.first.forward(images)));
        let x = self.average.forward(x).flatten::<2>(1, 3);
        let x = self.norm.forward(self.hidden.forward(self.dropout.forward(x)));
        let logits = self.head.forward(self.activation.forward(x));
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}

crate::test_model!(cnn, Cnn);
