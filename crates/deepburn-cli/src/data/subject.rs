//! The subject of a run: its model and its data.
//!
//! Main type: [`Subject`]. A recipe is generic over the backend, which is chosen at run time. What
//! trains it is therefore generic too, and is called with [`with_recipe`] for the recipe that the
//! job has. It is compiled for each pair of recipe and backend. A tuner measures steps of the same
//! model on made-up micro-batches.

use burn::tensor::Tensor;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::tune::{MeasuredSteps, Measurement, Tunable, measure_steps};
use deepburn::zero::Training;
use deepburn::{BoxError, Forecast, ForecastError, Meta, MetaDevice, PipelineLayout, Ranks, Task};
use deepburn_config::Plan;
use deepburn_models::BatchShape;
use deepburn_models::encoder::EncoderConfig;
use deepburn_models::gpt2::ClassifierConfig;

use crate::data::causal::Causal;
use crate::data::classification::Classification;
use crate::data::recipe::{ExampleTask, InitialWeights, Recipe, SubjectInfo, forecast_task};

/// The model and the data of a job: one recipe for all language models, and one for each kind of
/// classifier.
pub(crate) enum Subject {
    /// A language model.
    Causal(Box<Causal>),
    /// A text encoder that classifies.
    Encoder(Box<Classification<EncoderConfig>>),
    /// GPT-2 with a classification head.
    Gpt2Classifier(Box<Classification<ClassifierConfig>>),
}

/// Evaluates an expression that is generic over the recipe, a reference, for the recipe of a
/// [`Subject`].
macro_rules! with_recipe {
    ($subject:expr, $recipe:ident => $body:expr) => {
        // Each arm has another type, so the expression is compiled three times.
        match $subject {
            $crate::data::subject::Subject::Causal(boxed) => {
                let $recipe = &**boxed;
                $body
            }
            $crate::data::subject::Subject::Encoder(boxed) => {
                let $recipe = &**boxed;
                $body
            }
            $crate::data::subject::Subject::Gpt2Classifier(boxed) => {
                let $recipe = &**boxed;
                $body
            }
        }
    };
}
pub(crate) use with_recipe;

impl Subject {
    /// Returns the properties that do not depend on the backend.
    pub(crate) fn info(&self) -> &dyn SubjectInfo {
        with_recipe!(self, recipe => recipe)
    }

    /// Forecasts training with micro-batches of this shape, on a rank of each pipeline stage.
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the model.
    pub(crate) fn forecast(
        &self,
        plan: &Plan,
        shape: BatchShape,
    ) -> Result<Vec<Forecast>, ForecastError> {
        with_recipe!(self, recipe => {
            let task = Recipe::<Meta>::task(recipe, MetaDevice);
            forecast_task(&task, plan, shape, |device| without_weights(recipe, device))
        })
    }

    /// Divides the model into the pipeline stages of the plan, for micro-batches of this shape.
    ///
    /// # Errors
    /// Returns an error if the model has too few parts.
    pub(crate) fn pipeline_layout(
        &self,
        plan: &Plan,
        shape: BatchShape,
    ) -> Result<PipelineLayout, ForecastError> {
        with_recipe!(self, recipe => pipeline_layout(recipe, plan, shape))
    }

    /// Measures steps of `plan` on made-up sequences of `length` tokens, on rank threads.
    ///
    /// # Errors
    /// Returns the failure of a rank.
    pub(crate) fn measure<B: FusedOps + OptimizerOps>(
        &self,
        plan: &Plan,
        length: u64,
        devices: &[B::Device],
        steps: MeasuredSteps,
    ) -> Result<Measurement, String> {
        let shape = BatchShape { sequences: plan.batch.micro_batch_size as u64, length };
        let layout = plan.pipeline.is_some().then(|| self.pipeline_layout(plan, shape)).transpose();
        let layout = layout.map_err(|error| error.to_string())?;
        with_recipe!(self, recipe => {
            let model = RecipeModel { recipe, length };
            measure_steps::<B, _>(&model, plan, layout.as_ref(), &Ranks::threads(), devices, steps)
        })
    }
}

/// As [`Subject::pipeline_layout`].
fn pipeline_layout<R>(
    recipe: &R,
    plan: &Plan,
    shape: BatchShape,
) -> Result<PipelineLayout, ForecastError>
where
    R: Recipe<Meta, Task: ExampleTask<Meta, <R as Recipe<Meta>>::Model>>,
{
    let task = recipe.task(MetaDevice);
    let loss = |model: &_| task.loss(model, &task.example(shape));
    deepburn::pipeline_layout(plan, |device| without_weights(recipe, device), loss, None)
}

/// Builds the model of a recipe on the backend without data.
fn without_weights<R: Recipe<Meta>>(recipe: &R, device: &MetaDevice) -> Result<R::Model, BoxError> {
    recipe.model(InitialWeights::Zeros, device).map_err(|failure| failure.to_string().into())
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
