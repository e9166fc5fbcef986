//! The subject of a run: its model and its data.
//!
//! Main type: [`Subject`]. A recipe is generic over the backend, which is chosen at run time. A subject is therefore
//! [`TrainableOn`] on every backend that this build has, and [`train`](TrainableOn::train) is compiled for each pair of
//! recipe and backend. A tuner measures steps of the same model on made-up micro-batches.

use burn::tensor::Tensor;
use burn_flex::Flex;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::tune::{MeasuredSteps, Measurement, Tunable, measure_steps};
use deepburn::zero::Training;
use deepburn::{BoxError, Forecast, ForecastError, Meta, MetaDevice, PipelineLayout, Ranks, Task};
use deepburn_config::Plan;
use deepburn_models::BatchShape;

use crate::data::recipe::{ExampleTask, InitialWeights, Recipe, SubjectInfo, forecast_task};
use crate::failure::Failure;
use crate::run::finetune::Run;

/// A model and its data, which backend `B` can train.
pub(crate) trait TrainableOn<B: FusedOps + OptimizerOps> {
    /// Trains the model. Ranks use the `visible` devices that the job selects.
    ///
    /// # Errors
    /// Returns a user's mistake before training, or a failure while running.
    fn train(&self, run: &Run<'_>, visible: &[B::Device]) -> Result<(), Failure>;

    /// Measures steps of `plan` on made-up sequences of `length` tokens, on rank threads.
    ///
    /// # Errors
    /// Returns the failure of a rank.
    fn measure(
        &self,
        plan: &Plan,
        length: u64,
        devices: &[B::Device],
        steps: MeasuredSteps,
    ) -> Result<Measurement, String>;
}

impl<B, R> TrainableOn<B> for R
where
    B: FusedOps + OptimizerOps,
    R: Recipe<B, Task: ExampleTask<B, <R as Recipe<B>>::Model>>,
{
    fn train(&self, run: &Run<'_>, visible: &[B::Device]) -> Result<(), Failure> {
        run.train_recipe(self, visible)
    }

    fn measure(
        &self,
        plan: &Plan,
        length: u64,
        devices: &[B::Device],
        steps: MeasuredSteps,
    ) -> Result<Measurement, String> {
        let model = RecipeModel { recipe: self, length };
        measure_steps(&model, plan, &Ranks::threads(), devices, steps)
    }
}

/// The model of a recipe, whose loss is computed on made-up sequences of `length` tokens.
struct RecipeModel<'a, R> {
    recipe: &'a R,
    length: u64,
}

impl<B, R> Tunable<B> for RecipeModel<'_, R>
where
    B: FusedOps + OptimizerOps,
    R: Recipe<B, Task: ExampleTask<B, <R as Recipe<B>>::Model>>,
{
    type Model = R::Model;

    fn model(&self, device: &B::Device) -> Result<R::Model, BoxError> {
        let model = self.recipe.model(InitialWeights::OfJob, device);
        model.map_err(|failure| failure.to_string().into())
    }

    fn loss(
        &self,
        model: &R::Model,
        samples: usize,
        device: &B::Device,
    ) -> Result<Tensor<Training<B>, 1>, BoxError> {
        let shape = BatchShape { sequences: samples as u64, length: self.length };
        let task = self.recipe.task(device.clone());
        task.loss(model, &task.example(shape))
    }
}

/// The model and the data of a job, which every backend of this build can train.
pub(crate) trait Subject:
    TrainableOn<Flex> + TrainableOnCuda + TrainableOnTch + TrainableOnWgpu + Sync
{
    /// Returns the properties that do not depend on the backend.
    fn info(&self) -> &dyn SubjectInfo;

    /// Forecasts training with micro-batches of this shape, on a rank of each pipeline stage.
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the model.
    fn forecast(&self, plan: &Plan, shape: BatchShape) -> Result<Vec<Forecast>, ForecastError>;

    /// Divides the model into the pipeline stages of the plan, for micro-batches of this shape.
    ///
    /// # Errors
    /// Returns an error if the model has too few parts.
    fn pipeline_layout(
        &self,
        plan: &Plan,
        shape: BatchShape,
    ) -> Result<PipelineLayout, ForecastError>;
}

impl<S> Subject for S
where
    S: SubjectInfo
        + Recipe<Meta, Task: ExampleTask<Meta, <S as Recipe<Meta>>::Model>>
        + TrainableOn<Flex>
        + TrainableOnCuda
        + TrainableOnTch
        + TrainableOnWgpu
        + Sync,
{
    fn info(&self) -> &dyn SubjectInfo {
        self
    }

    fn forecast(&self, plan: &Plan, shape: BatchShape) -> Result<Vec<Forecast>, ForecastError> {
        forecast_task(&self.task(MetaDevice), plan, shape, |device| {
            self.model(InitialWeights::Zeros, device).map_err(|failure| failure.to_string().into())
        })
    }

    fn pipeline_layout(
        &self,
        plan: &Plan,
        shape: BatchShape,
    ) -> Result<PipelineLayout, ForecastError> {
        let task = self.task(MetaDevice);
        let build = |device: &MetaDevice| {
            self.model(InitialWeights::Zeros, device).map_err(|failure| failure.to_string().into())
        };
        let loss = |model: &_| Task::<Meta, _>::loss(&task, model, &task.example(shape));
        deepburn::pipeline_layout(plan, build, loss, None)
    }
}

/// Defines a trait for each backend that is compiled in by a cargo feature. Without the feature, the trait requires
/// nothing, because bounds cannot have a `cfg` attribute.
macro_rules! optional_backends {
    ($($Trait:ident, $feature:literal: $Backend:ty;)+) => {$(
        /// A subject that the backend can train, if this build has it.
        #[cfg(feature = $feature)]
        pub(crate) trait $Trait: TrainableOn<$Backend> {}
        #[cfg(feature = $feature)]
        impl<S: TrainableOn<$Backend>> $Trait for S {}

        /// Any subject, because this build does not have the backend.
        #[cfg(not(feature = $feature))]
        pub(crate) trait $Trait {}
        #[cfg(not(feature = $feature))]
        impl<S> $Trait for S {}
    )+};
}

optional_backends! {
    TrainableOnCuda, "cuda": burn_cuda::Cuda<f32, i32>;
    TrainableOnTch, "tch": burn_tch::LibTorch<f32>;
    TrainableOnWgpu, "wgpu": burn_wgpu::Wgpu<f32, i32>;
}
