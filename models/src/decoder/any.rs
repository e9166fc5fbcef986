//! The configuration of a decoder of any family.
//!
//! Main type: [`AnyDecoder`]. Modules are built from it, so that programs which train decoders of
//! many families are compiled once.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use deepburn_files::safetensors::FloatType;
use deepburn_lora::{Adapter, LoraConfig, LoraError};
use deepburn_weights::WeightMap;
use serde_json::{Map, Value};

use super::config::DecoderConfig;
use super::parts::DecoderParts;
use super::pretrained::{DecoderFiles, PretrainedDecoder};
use crate::architecture::{Architecture, LanguageModelConfig, MatrixUse, TokenLimits};
use crate::batch_shape::BatchShape;
use crate::hf::{
    AdapterFolder, BaseModel, ExtraFields, JsonFiles, ModelConfigError, ModelFolderError,
    TensorProblem, Weights,
};
use crate::weights::{Paths, WeightInit};

/// The relative difference between a parameter and its copy in an adapter that rounding to bf16
/// causes.
const COPY_ERROR: f32 = 1.0 / 128.0;

/// The configuration of a decoder, whose family is known when the program runs.
#[derive(Clone)]
pub struct AnyDecoder {
    config: Arc<dyn ErasedConfig>,
    adapter: Option<DecoderAdapter>,
    /// Whether training has the dropout of the configuration and of the adapter.
    has_dropout: bool,
}

/// The adapter of a decoder.
#[derive(Clone)]
struct DecoderAdapter {
    adapter: Arc<Adapter>,
    /// The folder with its values; `None` for an adapter that is not trained yet.
    folder: Option<Arc<AdapterFolder>>,
}

/// The methods of a [`DecoderConfig`] without its type.
trait ErasedConfig: LanguageModelConfig {
    fn model_type(&self) -> &'static str;
    fn parts(&self) -> DecoderParts;
    fn overridden(
        &self,
        overrides: &Map<String, Value>,
    ) -> Result<Arc<dyn ErasedConfig>, ModelConfigError>;
    fn with_vocab_size(&self, vocab_size: usize) -> Arc<dyn ErasedConfig>;
    /// Opens the files of a model of the same family.
    fn open(&self, folder: &Path) -> Result<DecoderFiles, ModelFolderError>;
}

impl<C: DecoderConfig> ErasedConfig for C {
    fn model_type(&self) -> &'static str {
        C::MODEL_TYPE
    }

    fn parts(&self) -> DecoderParts {
        self.parts()
    }

    fn overridden(
        &self,
        overrides: &Map<String, Value>,
    ) -> Result<Arc<dyn ErasedConfig>, ModelConfigError> {
        Ok(Arc::new(self.with_overrides(overrides)?))
    }

    fn with_vocab_size(&self, vocab_size: usize) -> Arc<dyn ErasedConfig> {
        let mut config = self.clone();
        DecoderConfig::set_vocab_size(&mut config, vocab_size);
        Arc::new(config)
    }

    fn open(&self, folder: &Path) -> Result<DecoderFiles, ModelFolderError> {
        Ok(PretrainedDecoder::<C>::open(folder)?.files)
    }
}

impl AnyDecoder {
    /// Returns a configuration without its type.
    pub fn new(config: impl DecoderConfig) -> Self {
        Self { config: Arc::new(config), adapter: None, has_dropout: true }
    }

    /// Returns the model without dropout in training. Its files keep the probabilities.
    #[must_use]
    pub fn without_dropout(self) -> Self {
        Self { has_dropout: false, ..self }
    }

    /// Returns the model with a new adapter.
    ///
    /// # Errors
    /// Returns [`LoraError`] if a field of the adapter does not fit the model.
    pub fn with_adapter(self, config: LoraConfig) -> Result<Self, LoraError> {
        // The parts of the base model: `Self::parts` already takes the adapter into account.
        let parts = self.config.parts();
        let adapter =
            Adapter::new(config, &parts.modules(), &parts.default_targets(), &parts.weight_map())?;
        Ok(Self {
            adapter: Some(DecoderAdapter { adapter: Arc::new(adapter), folder: None }),
            ..self
        })
    }

    /// Returns the model with a trained adapter.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Format`] if a field of the adapter does not fit the model.
    pub fn with_trained_adapter(self, folder: AdapterFolder) -> Result<Self, ModelFolderError> {
        let adapted = self.with_adapter(folder.config().clone());
        let mut adapted = adapted.map_err(|error| folder.misfit(&error))?;
        if let Some(adapter) = &mut adapted.adapter {
            adapter.folder = Some(Arc::new(folder));
        }
        // The shapes are checked at once, because the model may be built without values first.
        if let Some((folder, map)) = adapted.trained_adapter().zip(adapted.adapter_map()) {
            folder.weights(&map)?;
        }
        Ok(adapted)
    }

    /// Returns another configuration with the same adapter.
    ///
    /// # Errors
    /// Returns [`LoraError`] if a field of the adapter does not fit it.
    fn reattached(&self, config: Arc<dyn ErasedConfig>) -> Result<Self, LoraError> {
        let other = Self { config, adapter: None, has_dropout: self.has_dropout };
        let Some(DecoderAdapter { adapter, folder }) = &self.adapter else { return Ok(other) };
        // The shapes of an adapter follow from the model, so it is made again from its fields.
        let mut other = other.with_adapter(adapter.config().clone())?;
        if let Some(new) = &mut other.adapter {
            new.folder.clone_from(folder);
        }
        Ok(other)
    }

    /// Returns the settings of the adapter that select nothing, so that they have no effect.
    ///
    /// # Errors
    /// Returns [`LoraError`] for an expression that takes too long.
    pub fn unused_settings(&self) -> Result<Vec<String>, LoraError> {
        let modules = self.config.parts().modules();
        self.adapter().map_or(Ok(Vec::new()), |adapter| adapter.unused_settings(&modules))
    }

    /// Returns the adapter.
    #[must_use]
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref().map(|it| &*it.adapter)
    }

    /// Returns the folder of the adapter, if it is trained.
    #[must_use]
    pub fn trained_adapter(&self) -> Option<&AdapterFolder> {
        self.adapter.as_ref()?.folder.as_deref()
    }

    /// Returns the number of rows that the vocabulary of the configuration adds to the embedding in
    /// `folder`.
    ///
    /// # Errors
    /// Returns an error if a file is missing, unreadable or malformed, or if the vocabulary is
    /// smaller.
    pub fn new_rows(&self, folder: &Path) -> Result<usize, ModelFolderError> {
        self.open(folder)?.new_rows(&self.config.parts()).map(|(new_rows, _)| new_rows)
    }

    /// Opens the files of a model of the same family.
    ///
    /// # Errors
    /// Returns an error if a file is missing, unreadable or malformed.
    pub(super) fn open(&self, folder: &Path) -> Result<DecoderFiles, ModelFolderError> {
        self.config.open(folder)
    }

    /// Returns a hash of the values of the base model in `folder`, as [`BaseModel::fingerprint`]
    /// computes it.
    ///
    /// # Errors
    /// Returns an error if a file is missing, unreadable or malformed, or if its tensors do not fit
    /// the model.
    pub fn base_fingerprint(&self, folder: &Path) -> Result<String, ModelFolderError> {
        // Rows that the configuration adds to the vocabulary are not in the folder.
        let vocab_size = self.config.limits().vocab_size - self.new_rows(folder)?;
        let map = self.config.with_vocab_size(vocab_size).weight_map();
        BaseModel::open(folder, map)?.fingerprint()
    }

    /// Returns a hash of the values of a trained adapter, as [`BaseModel::fingerprint`] computes
    /// it; `None` for a model without one.
    ///
    /// # Errors
    /// Returns an error if the files of the adapter cannot be read.
    pub fn adapter_fingerprint(&self) -> Result<Option<String>, ModelFolderError> {
        let Some((folder, map)) = self.trained_adapter().zip(self.adapter_map()) else {
            return Ok(None);
        };
        let weights = folder.weights(&map)?;
        BaseModel::of_weights(weights, map).fingerprint().map(Some)
    }

    /// Returns whether the output projection may be trained, alone or with the embedding that it is
    /// tied to.
    pub(super) fn trains_head(&self) -> bool {
        // Without an adapter, the whole model is trained.
        let Some(adapter) = self.adapter() else { return true };
        let parts = self.parts();
        let is_tied_to = parts.head.is_tied.then(|| parts.embedding_path());
        is_tied_to.into_iter().chain([parts.head_path()]).any(|path| adapter.trains(&path))
    }

    /// Returns the model without its adapter.
    #[must_use]
    pub fn base(&self) -> Self {
        Self { config: self.config.clone(), adapter: None, has_dropout: self.has_dropout }
    }

    /// Returns the `model_type` in `config.json`.
    #[must_use]
    pub fn model_type(&self) -> &'static str {
        self.config.model_type()
    }

    /// Returns the parts of the model. An adapter that trains a tied embedding or head as a whole
    /// unties them.
    #[must_use]
    pub fn parts(&self) -> DecoderParts {
        let mut parts = self.config.parts();
        if self.adapter().is_some_and(Adapter::unties) {
            parts.head.is_tied = false;
        }
        // The dropout of the adapter's input is removed in `adapted`.
        if !self.has_dropout {
            parts.embedding.dropout = 0.0;
            for layer in &mut parts.layers {
                (layer.dropout, layer.attention.dropout) = (0.0, 0.0);
            }
        }
        parts
    }

    /// Returns the public paths of the parameters.
    pub(super) fn paths(&self) -> Paths {
        match self.adapter() {
            Some(adapter) => self.parts().adapted_paths(adapter),
            None => self.parts().paths(),
        }
    }

    /// Returns the path of the tied head if the adapter trains it with the parameter at `path`, its
    /// embedding. The adapter's file has a copy of it.
    #[must_use]
    pub fn twin_of(&self, path: &str) -> Option<String> {
        let (parts, adapter) = (self.parts(), self.adapter()?);
        let is_twin = parts.head.is_tied && path == parts.embedding_path();
        (is_twin && adapter.trains(&parts.head_path())).then(|| parts.head_path())
    }

    /// Returns the map of `adapter_model.safetensors`; `None` without an adapter.
    #[must_use]
    pub fn adapter_map(&self) -> Option<WeightMap> {
        let map = self.adapter()?.file_map(&self.weight_map());
        Some(map.expect("the sizes of the model were checked"))
    }

    /// Returns `init`, which has the values of the base model, with the values of the adapter.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] if the weights of a trained adapter do not fit.
    pub(super) fn adapted<'a, B: Backend>(
        &self,
        mut init: WeightInit<'a, B>,
        seed: u64,
    ) -> Result<WeightInit<'a, B>, ModelFolderError> {
        let Some(DecoderAdapter { adapter, folder }) = &self.adapter else { return Ok(init) };
        let parts = self.parts();
        if adapter.unties() {
            // The base model has no separate head. An untied head starts as a copy of the
            // embedding.
            init = init.with_copy(parts.head_path(), parts.embedding_path());
        }
        // Without a folder the adapter is new, and its factors are drawn from the seed.
        let weights = folder.as_ref().zip(self.adapter_map()).map(|(it, map)| it.weights(&map));
        let read = weights.transpose()?.map(Weights::into_reader);
        let init = init.with_adapter(adapter.clone(), self.weight_map(), seed, read);
        Ok(if self.has_dropout { init } else { init.without_dropout() })
    }

    /// Checks the values of a trained adapter, and that its copies of parameters of the base model
    /// in `folder` are equal to them.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit or is not
    /// finite, or an I/O error.
    pub(super) fn check_adapter(&self, folder: &Path) -> Result<(), ModelFolderError> {
        let trained = (self.adapter(), self.trained_adapter(), self.adapter_map());
        let (Some(adapter), Some(own), Some(map)) = trained else { return Ok(()) };
        let mut weights = own.weights(&map)?;
        // First, because this error names every tensor that is not finite. The comparison below
        // ends at the first copy that differs.
        weights.check_values()?;
        let mut base = BaseModel::open(folder, self.config.weight_map())?;
        let parts = self.config.parts();
        // A tied head that is trained with its embedding has the same values.
        let twin = (parts.head.is_tied && !adapter.unties())
            .then(|| map.get(&parts.embedding_path()))
            .flatten();
        for copy in map.parameters() {
            let is_head = copy.path() == parts.head_path();
            let values = match (twin, adapter.trains(copy.path())) {
                (Some(twin), _) if is_head => weights.read_required(twin)?,
                // It was trained as a whole, so it differs from the base model on purpose.
                (_, true) => continue,
                (_, false) => base.read(copy.path())?,
            };
            let copied = weights.read_required(copy)?;
            // A copy may have been rounded to another type. A relative bound alone would refuse
            // subnormal values that were rounded to 0.
            let bound = |value: &f32| (value.abs() * COPY_ERROR).max(f32::MIN_POSITIVE);
            let differ = copied.iter().zip(&values).filter(|(a, b)| (*a - *b).abs() > bound(b));
            let count = differ.count();
            if count > 0 {
                weights.refuse(vec![TensorProblem {
                    name: copy.stored_name(),
                    expected: format!("the values of `{}` in the base model", copy.path()),
                    found: format!("{count} of {} values that differ", values.len()),
                }])?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for AnyDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.config.fmt(f)
    }
}

impl Architecture for AnyDecoder {
    fn name(&self) -> &'static str {
        self.config.name()
    }

    fn weight_map(&self) -> WeightMap {
        let base = self.parts().weight_map();
        match self.adapter() {
            Some(adapter) => adapter.extended(&base).expect("the sizes of the model were checked"),
            None => base,
        }
    }

    fn matrix_use(&self, path: &str) -> MatrixUse {
        self.parts().matrix_use(path)
    }

    fn width(&self) -> usize {
        self.config.width()
    }

    fn max_len(&self) -> usize {
        self.config.max_len()
    }

    fn documents(&self, float: FloatType) -> JsonFiles {
        self.config.documents(float)
    }

    fn check_weights(&self, folder: &Path) -> Result<(), ModelFolderError> {
        self.config.check_weights(folder)?;
        self.check_adapter(folder)
    }

    fn base_model(&self, folder: &Path) -> Result<BaseModel, ModelFolderError> {
        let base = BaseModel::open(folder, self.weight_map())?;
        let parts = self.parts();
        Ok(match self.adapter().is_some_and(Adapter::unties) {
            true => base.with_copy(parts.head_path(), parts.embedding_path()),
            false => base,
        })
    }

    fn logits_bytes(&self, batch: BatchShape) -> u64 {
        self.config.logits_bytes(batch)
    }
}

impl LanguageModelConfig for AnyDecoder {
    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ModelConfigError> {
        let config = self.config.overridden(overrides)?;
        self.reattached(config).map_err(|error| ModelConfigError::Field(error.to_string()))
    }

    fn validate(&self) -> Result<(), ModelConfigError> {
        self.config.validate()
    }

    fn limits(&self) -> TokenLimits {
        self.config.limits()
    }

    fn set_vocab_size(&mut self, vocab_size: usize) {
        let config = self.config.with_vocab_size(vocab_size);
        *self = self.reattached(config).expect("the same modules are adapted");
    }

    fn extra(&self) -> &ExtraFields {
        self.config.extra()
    }
}
