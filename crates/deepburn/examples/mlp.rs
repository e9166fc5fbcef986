//! Trains an MLP on two ranks, with parameters, gradients and optimizer states sharded (ZeRO stage
//! 3).
//!
//! ```sh
//! cargo run --release --example mlp
//! ```
//!
//! The model is an ordinary Burn module. Its code does not refer to ranks or sharding.

use std::error::Error;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn::prelude::*;

const RANKS: usize = 2;
const STEPS: usize = 200;
const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3}
}"#;

/// Learns to reproduce its input through 32 hidden features.
#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            up: LinearConfig::new(16, 32).init(device),
            down: LinearConfig::new(32, 16).init(device),
        }
    }

    /// Returns the mean squared error on `x`, `[batch, 16]`.
    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let y = self.down.forward(relu(self.up.forward(x.clone())));
        (y - x).powf_scalar(2.0).mean()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let plan = deepburn::plan(CONFIG, RANKS)?;
    // The closure runs once on each rank, each on a separate thread. Every run starts with the same
    // weights.
    Flex::seed(&FlexDevice, 1);
    let losses = deepburn::run_ranks(RANKS, |group| {
        let model = Mlp::<Training<Flex>>::new(&FlexDevice);
        // From here on each rank holds half of every parameter, gradient and moment.
        let mut engine = deepburn::initialize(model, &plan, group)?;
        engine.seed(1);
        let mut losses = Vec::new();
        for step in 1..=STEPS {
            // Random numbers drawn inside `forward` come from the rank's own stream, so ranks train
            // on different data.
            let loss = engine.forward(|model| {
                model.loss(Tensor::random([32, 16], Distribution::Default, &FlexDevice))
            })?;
            losses.push(loss.clone().into_scalar());
            engine.backward(loss)?;
            engine.step()?;
            if engine.rank() == 0 && step % 50 == 0 {
                println!("step {step:3}: loss {:.4}", losses[step - 1]);
            }
        }
        Ok((losses[0], losses[STEPS - 1]))
    })?;
    for (rank, (first, last)) in losses.into_iter().enumerate() {
        println!("rank {rank}: loss {first:.4} -> {last:.4}");
        assert!(last < first / 4.0, "the loss has fallen on rank {rank}");
    }
    Ok(())
}
