//! Sharded training for Burn's `Learner`.
//!
//! [`sharded`] creates a [`TrainingStrategy`] from a DeepSpeed configuration. With it, a program
//! that trains through [`SupervisedTraining`] uses ZeRO stages 0 to 3 on several ranks. Only one
//! line changes, apart from the backend, which is [`Training<B>`](deepburn::zero::Training):
//!
//! ```
//! # use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
//! # use burn::data::dataset::InMemDataset;
//! # use burn::module::Module;
//! # use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
//! # use burn::optim::AdamWConfig;
//! # use burn::tensor::{Int, Tensor, backend::{AutodiffBackend, Backend}};
//! # use burn_flex::{Flex, FlexDevice};
//! # use burn_train::metric::LossMetric;
//! # use burn_train::{ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep};
//! # use deepburn::zero::Training;
//! # #[derive(Module, Debug)]
//! # struct Net<B: Backend> { layer: Linear<B> }
//! # impl<B: Backend> Net<B> {
//! #     fn classify(&self, (x, y): (Tensor<B, 2>, Tensor<B, 1, Int>)) -> ClassificationOutput<B> {
//! #         let output = self.layer.forward(x);
//! #         let loss = CrossEntropyLossConfig::new().init(&y.device());
//! #         ClassificationOutput::new(loss.forward(output.clone(), y.clone()), output, y)
//! #     }
//! # }
//! # impl<B: AutodiffBackend> TrainStep for Net<B> {
//! #     type Input = (Tensor<B, 2>, Tensor<B, 1, Int>);
//! #     type Output = ClassificationOutput<B>;
//! #     fn step(&self, batch: Self::Input) -> TrainOutput<Self::Output> {
//! #         let item = self.classify(batch);
//! #         TrainOutput::new(self, item.loss.backward(), item)
//! #     }
//! # }
//! # impl<B: Backend> InferenceStep for Net<B> {
//! #     type Input = (Tensor<B, 2>, Tensor<B, 1, Int>);
//! #     type Output = ClassificationOutput<B>;
//! #     fn step(&self, batch: Self::Input) -> Self::Output { self.classify(batch) }
//! # }
//! # #[derive(Clone)]
//! # struct Points;
//! # impl<B: Backend> Batcher<B, f32, (Tensor<B, 2>, Tensor<B, 1, Int>)> for Points {
//! #     fn batch(&self, items: Vec<f32>, device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 1, Int>) {
//! #         let classes: Vec<i32> = items.iter().map(|x| i32::from(*x > 0.5)).collect();
//! #         let x = Tensor::<B, 1>::from_floats(items.as_slice(), device).unsqueeze_dim(1);
//! #         (x, Tensor::from_ints(classes.as_slice(), device))
//! #     }
//! # }
//! # let items: Vec<f32> = (0..24).map(|i| i as f32 / 24.0).collect();
//! # let train = DataLoaderBuilder::<Training<Flex>, _, _>::new(Points).batch_size(4)
//! #     .build(InMemDataset::new(items.clone()));
//! # let valid = DataLoaderBuilder::<_, _, _>::new(Points).batch_size(4)
//! #     .build(InMemDataset::new(items));
//! # let net = Net::<Training<Flex>> { layer: LinearConfig::new(1, 2).init(&FlexDevice) };
//! # let folder = tempfile::tempdir()?;
//! # let artifacts = folder.path();
//! let plan = deepburn::plan(r#"{"train_micro_batch_size_per_gpu": 4,
//!     "optimizer": {"type": "AdamW", "params": {"eps": 1e-5, "weight_decay": 1e-4}},
//!     "zero_optimization": {"stage": 3}}"#, 2)?;
//! let learner = Learner::new(net, AdamWConfig::new().init(), 1e-2);
//! let result = SupervisedTraining::new(artifacts, train, valid)
//!     .metrics((LossMetric::new(),))
//!     .num_epochs(2)
//! #   .renderer(Quiet)
//! #   .with_application_logger(None)
//!     .with_training_strategy(deepburn_train::sharded(plan))
//!     .launch(learner);
//! println!("{}", result.model);
//! # use burn_train::renderer::*;
//! # struct Quiet;
//! # impl MetricsRendererTraining for Quiet {
//! #     fn update_train(&mut self, _: MetricState) {}
//! #     fn update_valid(&mut self, _: MetricState) {}
//! #     fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
//! #     fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
//! # }
//! # impl MetricsRendererEvaluation for Quiet {
//! #     fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
//! #     fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
//! # }
//! # impl MetricsRenderer for Quiet {
//! #     fn manual_close(&mut self) {}
//! #     fn register_metric(&mut self, _: burn_train::metric::MetricDefinition) {}
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Settings of the Learner and of the plan
//!
//! - **Ranks**: the plan's world size. Each rank is a thread of this process.
//! - **Data**: the Learner's data loaders. Each rank trains on a slice of the items, and all slices
//!   have the same length. If the items do not divide evenly, up to `ranks - 1` of them are seen
//!   twice per epoch, as with PyTorch's `DistributedSampler`. Validation sees every item exactly
//!   once. A loader with its own `batch_size` should use the plan's
//!   `train_micro_batch_size_per_gpu`.
//! - **Optimizer**: the plan's. Before training starts, the Learner's optimizer is tried on a few
//!   weights, and an error is returned if its updates differ from the plan's. This compares the
//!   kind of optimizer and its hyper-parameters (betas, eps, weight decay, momentum, amsgrad,
//!   clipping inside the optimizer) if they change a weight's path by at least 1 in 5,000 within
//!   sixteen steps. Clip gradients with the plan's `gradient_clipping`, which is 1.0 unless the
//!   plan's configuration sets it.
//! - **Learning rate**: the Learner's scheduler. The plan's `lr` is not used, and a plan with a
//!   `scheduler` is an error. The scheduler advances by one step per update, on any number of
//!   ranks, as in DeepSpeed. Burn's own strategies advance it for every batch, so size the schedule
//!   for the number of updates: batches per epoch, divided by ranks and by accumulated
//!   micro-batches, rounded up.
//! - **Gradient accumulation**: both, and they must be equal. Gradients of micro-batches are
//!   averaged, as in DeepSpeed; Burn's own strategies add them. If the last micro-batches of an
//!   epoch do not fill an update, or training is interrupted, the weights are updated with the mean
//!   over the micro-batches that there are. Burn drops them.
//! - **Precision**: the plan's fp32 or bf16. fp16 is an error, because the loss scale would have to
//!   multiply a loss that is inside `TrainStep::step`.
//! - **Gradients**: `TrainStep::step` must call `backward` once and return all gradients. Gradients
//!   of a second backward pass, or a selection of gradients, are an error.
//! - **`TrainStep::optimize`** is not called.
//!
//! Losses and weights are bit-identical to [`deepburn::Engine`] with the same batches; with
//! accumulation, this requires a number of micro-batches that is a power of two. Burn's loaders
//! with several workers return batches in an order that differs between runs.
//!
//! # Checkpoints
//! Burn's file checkpointer would save complete states, which no rank holds. Set the checkpoint
//! folder in the strategy instead of calling `with_file_checkpointer`. [`ShardedStrategy::keep`]
//! decides which checkpoints are kept; `with_checkpointing_strategy` has no effect. A failed save
//! is printed and skipped, and training continues. Use one folder per run:
//!
//! ```no_run
//! # use deepburn_train::ShardedStrategy;
//! # use burn_flex::Flex;
//! # fn f(plan: deepburn::prelude::Plan) -> ShardedStrategy<Flex> {
//! ShardedStrategy::new(plan).checkpoints("artifacts/checkpoints")
//! # }
//! ```
//!
//! Checkpoints are saved after each epoch's validation and contain the optimizer states and random
//! streams of all ranks. `SupervisedTraining::checkpoint(n)` resumes after epoch `n`, bit-identical
//! to an uninterrupted run, and also with a different number of ranks or stage. By default the last
//! two checkpoints and the one with the lowest validation loss are kept, as in Burn; see
//! [`ShardedStrategy::keep`]. `deepburn consolidate` exports them.
//!
//! # Interruption and failure
//!
//! An interruption (the dashboard's `q`, any call of `Interrupter::stop`, or Ctrl-C as in the
//! example) ends all ranks before the same micro-batch, and `launch` returns the current model. An
//! epoch whose validation was interrupted has no checkpoint. If a rank fails, all ranks end, the
//! renderer is closed, and `launch` panics with the rank and the cause.
//!
//! # Features
//! - `tui`: Burn's terminal dashboard.
#![recursion_limit = "256"]

mod checkpoints;
#[cfg(doctest)]
mod documentation;
mod gradients;
mod loaders;
mod optimizer;
mod outputs;
mod refusal;
mod strategy;
mod worker;

#[cfg(doc)]
use burn_train::SupervisedTraining;
use burn_train::{LearningComponentsTypes, TrainingStrategy};
use deepburn::config::Plan;
use deepburn::ops::{OptimizerOps, StreamOps};
use deepburn::zero::Training;

pub use strategy::ShardedStrategy;

/// Returns a strategy that trains sharded with `plan`, for
/// [`SupervisedTraining::with_training_strategy`]. Use [`ShardedStrategy`] to change its settings.
pub fn sharded<B, LC>(plan: Plan) -> TrainingStrategy<LC>
where
    B: OptimizerOps + StreamOps,
    LC: LearningComponentsTypes<Backend = Training<B>> + Send + 'static,
{
    ShardedStrategy::new(plan).into()
}
