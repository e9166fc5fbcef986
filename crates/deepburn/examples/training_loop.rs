//! A training loop that saves checkpoints, and resumes from one at another ZeRO stage.
//!
//! ```sh
//! cargo run --release --example training_loop
//! ```
//!
//! The first run trains two ranks at stage 3 and saves a checkpoint half-way. The second run
//! resumes from it at stage 1 and repeats the losses of the first one to the last bit.

use std::error::Error;
use std::path::Path;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::tanh;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn::checkpoint::Checkpoint;
use deepburn::prelude::*;
use deepburn::{LoadPlan, SaveRequest};

const RANKS: usize = 2;
const BATCH: usize = 8;
const STEPS: u64 = 20;
/// The step after which a checkpoint is saved.
const SAVED: u64 = 10;

/// Fits a curve.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    hidden: Linear<B>,
    dropout: Dropout,
    output: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(1, 64).init(device),
            dropout: DropoutConfig::new(0.1).init(),
            output: LinearConfig::new(64, 1).init(device),
        }
    }

    /// Returns the mean squared error on `x` and `y`, both `[batch, 1]`.
    fn loss(&self, [x, y]: [Tensor<B, 2>; 2]) -> Tensor<B, 1> {
        let hidden = self.dropout.forward(tanh(self.hidden.forward(x)));
        (self.output.forward(hidden) - y).powf_scalar(2.0).mean()
    }
}

/// Returns the batch of a rank in a step: points on a sine curve. The batch depends only on rank
/// and step, so a resumed run needs no position in the data.
fn batch<B: Backend>(step: u64, rank: usize) -> [Tensor<B, 2>; 2] {
    let first = (step as usize * RANKS + rank) * BATCH;
    // Multiples of the golden ratio cover the interval evenly.
    let x: Vec<f32> =
        (first..first + BATCH).map(|i| (i as f32 * 0.618_034).fract() * 6.0).collect();
    let y: Vec<f32> = x.iter().map(|x| x.sin()).collect();
    [x, y]
        .map(|values| Tensor::from_data(TensorData::new(values, [BATCH, 1]), &B::Device::default()))
}

/// Trains to step [`STEPS`] at a ZeRO stage: from the start with a checkpoint at step [`SAVED`], or
/// from that checkpoint. Returns the losses of rank 0.
fn train(stage: u8, folder: &Path, resume: bool) -> Result<Vec<f32>, Box<dyn Error>> {
    let config = format!(
        r#"{{
            "train_micro_batch_size_per_gpu": {BATCH},
            "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2}}}},
            "zero_optimization": {{"stage": {stage}}}
        }}"#
    );
    let plan = deepburn::plan(&config, RANKS)?;
    let losses = deepburn::run_ranks(RANKS, |group| {
        let model = Net::<Training<Flex>>::new(&FlexDevice);
        let mut engine = deepburn::initialize(model, &plan, group)?;
        engine.seed(1);
        if resume {
            // Loads weights, moments, step counters and the random streams of dropout.
            engine.load_checkpoint(&Checkpoint::open_intact(folder, None)?, LoadPlan::ALL)?;
        }
        let mut losses = Vec::new();
        while engine.global_steps() < STEPS {
            let batch = batch(engine.global_steps(), engine.rank());
            let loss = engine.forward(|model| model.loss(batch))?;
            losses.push(loss.clone().into_scalar());
            engine.backward(loss)?;
            engine.step()?;
            if engine.global_steps() == SAVED && !resume {
                // All ranks save together, and each writes its own shard.
                engine.save_checkpoint(folder, SaveRequest::default())?;
            }
        }
        Ok(losses)
    })?;
    Ok(losses.into_iter().next().unwrap_or_default())
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let whole = train(3, folder.path(), false)?;
    let resumed = train(1, folder.path(), true)?;
    println!("step: uninterrupted at stage 3, resumed at stage 1");
    for (step, (whole, resumed)) in (SAVED + 1..).zip(whole[SAVED as usize..].iter().zip(&resumed))
    {
        println!("{step:4}: {whole:.6}, {resumed:.6}");
    }
    assert_eq!(whole[SAVED as usize..], resumed, "a resumed run repeats every bit");
    Ok(())
}
