//! Trains an image classifier with batch normalization in bf16 on two ranks, and measures its
//! accuracy.
//!
//! ```sh
//! cargo run --release --example images
//! ```
//!
//! Master weights and moments stay in f32. Inputs may be f32 too: products cast them. The running
//! statistics of batch normalization are averaged over the ranks after every backward pass.

use std::error::Error;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn::prelude::*;

const RANKS: usize = 2;
const BATCH: usize = 16;
const STEPS: usize = 60;
const SIDE: usize = 12;
const TEST_IMAGES: usize = 120;
const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 16,
    "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
    "zero_optimization": {"stage": 2}
}"#;

/// Classifies the direction of a bar.
#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    first: Conv2d<B>,
    first_norm: BatchNorm<B>,
    second: Conv2d<B>,
    second_norm: BatchNorm<B>,
    pool: AdaptiveAvgPool2d,
    head: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    fn new(device: &B::Device) -> Self {
        let conv =
            |channels| Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same);
        Self {
            first: conv([1, 8]).init(device),
            first_norm: BatchNormConfig::new(8).init(device),
            second: conv([8, 16]).init(device),
            second_norm: BatchNormConfig::new(16).init(device),
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(16, 3).init(device),
        }
    }

    /// Returns `[batch, 3]` logits of `[batch, 1, SIDE, SIDE]` images.
    fn logits(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = relu(self.first_norm.forward(self.first.forward(images)));
        let x = relu(self.second_norm.forward(self.second.forward(x)));
        self.head.forward(self.pool.forward(x).flatten(1, 3))
    }
}

/// Returns images `first..first + count` of an endless data set, and their classes: 0 for a
/// horizontal bar, 1 for a vertical and 2 for a diagonal one, on a noisy background.
fn images<B: Backend>(first: usize, count: usize) -> (Tensor<B, 4>, Tensor<B, 1, Int>) {
    let classes: Vec<i32> = (first..first + count).map(|image| (image % 3) as i32).collect();
    let mut pixels = Vec::with_capacity(count * SIDE * SIDE);
    for (image, class) in (first..).zip(&classes) {
        let place = image.wrapping_mul(2_654_435_761) % SIDE;
        for (row, column) in (0..SIDE * SIDE).map(|pixel| (pixel / SIDE, pixel % SIDE)) {
            let is_bar = match class {
                0 => row == place,
                1 => column == place,
                _ => (row + place) % SIDE == column,
            };
            let noise = ((image * 31 + row * 17 + column * 7) * 7919 % 101) as f32 / 202.0;
            pixels.push(if is_bar { 1.0 } else { noise });
        }
    }
    let images = TensorData::new(pixels, [count, 1, SIDE, SIDE]);
    (
        Tensor::from_data(images, &B::Device::default()),
        Tensor::from_ints(&classes[..], &B::Device::default()),
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    let plan = deepburn::plan(CONFIG, RANKS)?;
    // Every run starts with the same weights.
    Flex::seed(&FlexDevice, 1);
    let accuracies = deepburn::run_ranks(RANKS, |group| {
        let model = Classifier::<Training<Flex>>::new(&FlexDevice);
        let mut engine = deepburn::initialize(model, &plan, group)?;
        for step in 0..STEPS {
            // Each rank trains on its part of the global batch.
            let first = (step * RANKS + engine.rank()) * BATCH;
            let loss = engine.forward(|model| {
                let (images, classes) = images(first, BATCH);
                let loss = CrossEntropyLossConfig::new().init(&FlexDevice);
                loss.forward(model.logits(images), classes)
            })?;
            if engine.rank() == 0 && step % 20 == 0 {
                println!("step {step:2}: loss {:.4}", loss.clone().into_scalar());
            }
            engine.backward(loss)?;
            engine.step()?;
        }
        // All ranks must evaluate together, because the evaluation gathers parameters. Here, they
        // use the same images.
        let correct: i64 = engine.evaluate(|model| {
            let (images, classes) = images(1_000_000, TEST_IMAGES);
            let predicted = model.logits(images).argmax(1).flatten::<1>(0, 1);
            predicted.equal(classes).int().sum().into_scalar().elem()
        })?;
        Ok(correct as f64 / TEST_IMAGES as f64)
    })?;
    println!("test accuracy {:.1} %", 100.0 * accuracies[0]);
    assert!(accuracies[0] > 0.9, "the classifier has learnt the three directions");
    assert!(
        accuracies.iter().all(|accuracy| *accuracy == accuracies[0]),
        "all ranks have one model"
    );
    Ok(())
}
