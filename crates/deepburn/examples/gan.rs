//! Trains a GAN on two ranks: two models on the same threads, each with its own engine.
//!
//! ```sh
//! cargo run --release --example gan
//! ```
//!
//! Each engine shards its own model, and a backward pass gives gradients to the model of its own
//! engine alone.

use std::error::Error;
use std::f32::consts::TAU;

use burn::module::Module;
use burn::nn::loss::BinaryCrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::{leaky_relu, relu};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, ElementConversion, Int, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn::prelude::*;

type Backward = Training<Flex>;

const RANKS: usize = 2;
const BATCH: usize = 64;
const STEPS: usize = 2000;
const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.5, 0.99]}},
    "zero_optimization": {"stage": 3}
}"#;

/// Maps noise `[batch, 4]` to points `[batch, 2]`.
#[derive(Module, Debug)]
struct Generator<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Generator<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(4, 64).init(device),
            second: LinearConfig::new(64, 64).init(device),
            output: LinearConfig::new(64, 2).init(device),
        }
    }

    fn points(&self, count: usize) -> Tensor<B, 2> {
        let noise = Distribution::Normal(0.0, 1.0);
        let noise = Tensor::random([count, 4], noise, &B::Device::default());
        let hidden = relu(self.second.forward(relu(self.first.forward(noise))));
        self.output.forward(hidden)
    }
}

/// Distinguishes real points from generated ones.
#[derive(Module, Debug)]
struct Discriminator<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Discriminator<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(2, 64).init(device),
            second: LinearConfig::new(64, 64).init(device),
            output: LinearConfig::new(64, 1).init(device),
        }
    }

    /// Returns the mean cross-entropy if `points` are labeled as real, or as generated.
    fn loss(&self, points: Tensor<B, 2>, real: bool) -> Tensor<B, 1> {
        let hidden = leaky_relu(self.first.forward(points), 0.2);
        let hidden = leaky_relu(self.second.forward(hidden), 0.2);
        let logits = self.output.forward(hidden);
        let answers = Tensor::<B, 2, Int>::full(logits.shape(), i64::from(real), &logits.device());
        let loss = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&logits.device());
        loss.forward(logits, answers)
    }
}

/// Returns `count` points on the unit circle.
fn circle<B: Backend>(count: usize) -> Tensor<B, 2> {
    let turn = Distribution::Uniform(0.0, TAU.into());
    let angle = Tensor::<B, 2>::random([count, 1], turn, &B::Device::default());
    Tensor::cat(vec![angle.clone().cos(), angle.sin()], 1)
}

/// Trains both models for one step. Returns the losses of discriminator and generator.
fn train_step(
    generator: &mut Engine<Flex, Generator<Backward>>,
    discriminator: &mut Engine<Flex, Discriminator<Backward>>,
) -> Result<[f32; 2], Box<dyn Error + Send + Sync>> {
    let made = generator.forward(|generator| generator.points(BATCH))?.detach();
    let loss =
        discriminator.forward(|judge| judge.loss(circle(BATCH), true) + judge.loss(made, false))?;
    let judged = loss.clone().into_scalar();
    discriminator.backward(loss)?;
    discriminator.step()?;

    // The generator learns from a frozen view of the discriminator.
    let judge = discriminator.module().clone().no_grad();
    let loss = generator.forward(|generator| judge.loss(generator.points(BATCH), true))?;
    let fooled = loss.clone().into_scalar();
    generator.backward(loss)?;
    generator.step()?;
    Ok([judged, fooled])
}

fn main() -> Result<(), Box<dyn Error>> {
    let plan = deepburn::plan(CONFIG, RANKS)?;
    // Every run starts with the same weights.
    Flex::seed(&FlexDevice, 1);
    let radii = deepburn::run_ranks(RANKS, |group| {
        let generator = Generator::<Backward>::new(&FlexDevice);
        let mut generator = deepburn::initialize(generator, &plan, group.clone())?;
        let discriminator = Discriminator::<Backward>::new(&FlexDevice);
        let mut discriminator = deepburn::initialize(discriminator, &plan, group)?;
        generator.seed(1);
        discriminator.seed(2);
        for step in 1..=STEPS {
            let [judged, fooled] = train_step(&mut generator, &mut discriminator)?;
            if generator.rank() == 0 && step % 400 == 0 {
                println!("step {step}: discriminator {judged:.3}, generator {fooled:.3}");
            }
        }
        let radius = generator.evaluate(|generator| {
            let squares = generator.points(1000).powf_scalar(2.0).sum_dim(1);
            squares.sqrt().mean().into_scalar().elem::<f32>()
        })?;
        Ok(radius)
    })?;
    println!("mean radius of generated points: {:.2} (the data's is 1)", radii[0]);
    assert!((0.8..1.2).contains(&radii[0]), "generated points lie near the circle");
    Ok(())
}
