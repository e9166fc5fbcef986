//! The model of a `config.json`. Its parameters and memory can be computed from the configuration
//! alone.
//!
//! Main type: [`KnownModel`]. [`models`](crate::models) lists the supported models.

use std::path::Path;

use burn::module::AutodiffModule;
use burn_flex::{Flex, FlexDevice};
use deepburn::kernels::RowEncoding;
use deepburn::ops::FusedOps;
use deepburn::zero::{Training, Zero};
use deepburn::{Forecast, ForecastError, Meta, MetaDevice};
use deepburn_config::Plan;
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::{
    Architecture, BatchShape, BuildModel, LanguageModelConfig, TextBatch, TextBatchError,
    TextClassifier, TextClassifierConfig, TextLimits,
};

use crate::data::causal_task::{CausalTask, Objective};
use crate::data::classification::TextClass;
use crate::data::recipe::forecast_task;
use crate::failure::Failure;
use crate::job::held_matrices::hold;

/// A trained classifier. It maps padded token ids and the lengths of texts to their logits, text by
/// text.
pub(crate) type Classify = Box<dyn Fn(&[u32], &[usize]) -> Result<Vec<f32>, TextBatchError>>;

/// A model that `finetune` trains.
///
/// Its configuration is complete: fields that are missing in the file have their defaults.
pub(crate) enum KnownModel {
    /// A language model.
    LanguageModel(AnyDecoder),
    /// A model that classifies texts.
    Classifier(Box<dyn KnownClassifier>),
}

impl KnownModel {
    /// Returns the number of tokens of the longest sequence that can be trained.
    pub(crate) fn longest(&self) -> usize {
        match self {
            Self::LanguageModel(model) => model.limits().max_len,
            Self::Classifier(model) => model.limits().max_len,
        }
    }
}

/// The configuration of a classifier of any architecture.
pub(crate) trait KnownClassifier: TextClassifierConfig {
    /// Reads the weights in `folder`, and holds matrices in the type `held`.
    ///
    /// # Errors
    /// Returns a user's mistake if the weights do not fit, or if a matrix cannot be encoded.
    fn open(&self, folder: &Path, held: Option<RowEncoding>) -> Result<Classify, Failure>;

    /// Forecasts training with micro-batches of this shape, on a rank of each pipeline stage.
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the model.
    fn forecast(&self, plan: &Plan, shape: BatchShape) -> Result<Vec<Forecast>, ForecastError>;
}

/// Returns a function that classifies texts with `model`, which it owns.
fn logits_of<B, M>(model: M, limits: TextLimits) -> Classify
where
    B: FusedOps<Device = FlexDevice>,
    M: TextClassifier<B> + 'static,
{
    Box::new(move |input_ids, lengths| {
        // The labels do not affect the logits.
        let labels = vec![0; lengths.len()];
        let batch = TextBatch::new(limits, input_ids, lengths, &labels, &FlexDevice)?;
        Ok(model.forward(&batch).into_data().iter::<f32>().collect())
    })
}

impl<C> KnownClassifier for C
where
    C: TextClassifierConfig
        + BuildModel<Flex, Model: TextClassifier<Flex> + 'static>
        + BuildModel<Zero<Flex>, Model: TextClassifier<Zero<Flex>> + 'static>
        + BuildModel<
            Training<Meta>,
            Model: TextClassifier<Training<Meta>>
                       + AutodiffModule<Training<Meta>, InnerModule: TextClassifier<Zero<Meta>>>,
        >,
{
    /// Loads the model on the plain CPU backend.
    fn open(&self, folder: &Path, held: Option<RowEncoding>) -> Result<Classify, Failure> {
        let Some(held) = held else {
            let model = BuildModel::<Flex>::load(self, folder, &FlexDevice);
            let model = model.map_err(Failure::mistake)?;
            return Ok(logits_of(model, self.limits()));
        };
        // All problems at once. Below, weights are read one after the other, and the first problem
        // would be the only one.
        self.check_weights(folder).map_err(Failure::mistake)?;
        let model = BuildModel::<Zero<Flex>>::load_lazily(self, folder, 0, &FlexDevice);
        let model = hold(held, self, model.map_err(Failure::mistake)?)?;
        Ok(logits_of(model, self.limits()))
    }

    /// Forecasts the mean loss over the texts.
    fn forecast(&self, plan: &Plan, shape: BatchShape) -> Result<Vec<Forecast>, ForecastError> {
        // A configuration alone has no label smoothing.
        let task = TextClass::new(self, MetaDevice, 0.0);
        forecast_task(&task, plan, shape, |device| {
            Ok(BuildModel::<Training<Meta>>::zeros(self, device)?)
        })
    }
}

impl KnownModel {
    /// Forecasts training with micro-batches of this shape, on a rank of each pipeline stage.
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the model.
    pub(crate) fn forecast(
        &self,
        plan: &Plan,
        shape: BatchShape,
    ) -> Result<Vec<Forecast>, ForecastError> {
        match self {
            Self::LanguageModel(config) => {
                // A configuration alone has no label smoothing.
                let objective = Objective::NextToken { label_smoothing: 0.0 };
                let task = CausalTask::new(config.clone(), MetaDevice, objective, None);
                forecast_task(&task, plan, shape, |device| {
                    Ok(BuildModel::<Training<Meta>>::zeros(config, device)?)
                })
            }
            Self::Classifier(config) => config.forecast(plan, shape),
        }
    }

    /// Returns the configuration.
    pub(crate) fn architecture(&self) -> &dyn Architecture {
        match self {
            Self::LanguageModel(config) => config,
            Self::Classifier(config) => &**config,
        }
    }
}
