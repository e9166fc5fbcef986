//! The configuration of a decoder of any family.
//!
//! Main type: [`AnyDecoder`]. Modules are built from it, so that programs which train decoders of many families are
//! compiled once.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use deepburn_safetensors::FloatType;
use deepburn_weights::WeightMap;
use serde_json::{Map, Value};

use super::config::DecoderConfig;
use super::model::Decoder;
use super::parts::DecoderParts;
use super::pretrained::{DecoderFiles, PretrainedDecoder};
use crate::architecture::{Architecture, BuildModel, LanguageModelConfig, TokenLimits};
use crate::batch_shape::BatchShape;
use crate::hf::{ExtraFields, JsonFiles, ModelConfigError, ModelFolderError};
use crate::weights::WeightInit;

/// The configuration of a decoder, whose family is known when the program runs.
#[derive(Clone)]
pub struct AnyDecoder {
    config: Arc<dyn ErasedConfig>,
}

/// The methods of a [`DecoderConfig`] without its type.
trait ErasedConfig: Architecture {
    fn parts(&self) -> DecoderParts;
    fn limits(&self) -> TokenLimits;
    fn validate(&self) -> Result<(), ModelConfigError>;
    fn extra(&self) -> &ExtraFields;
    fn with_overrides(
        &self,
        overrides: &Map<String, Value>,
    ) -> Result<Arc<dyn ErasedConfig>, ModelConfigError>;
    fn with_vocab_size(&self, vocab_size: usize) -> Arc<dyn ErasedConfig>;
    /// Opens the files of a model of the same family.
    fn open(&self, folder: &Path) -> Result<DecoderFiles, ModelFolderError>;
}

impl<C: DecoderConfig> ErasedConfig for C {
    fn parts(&self) -> DecoderParts {
        self.parts()
    }

    fn limits(&self) -> TokenLimits {
        DecoderConfig::limits(self)
    }

    fn validate(&self) -> Result<(), ModelConfigError> {
        DecoderConfig::validate(self)
    }

    fn extra(&self) -> &ExtraFields {
        DecoderConfig::extra(self)
    }

    fn with_overrides(
        &self,
        overrides: &Map<String, Value>,
    ) -> Result<Arc<dyn ErasedConfig>, ModelConfigError> {
        Ok(Arc::new(DecoderConfig::with_overrides(self, overrides)?))
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
        Self { config: Arc::new(config) }
    }

    /// Returns the parts of the model.
    #[must_use]
    pub fn parts(&self) -> DecoderParts {
        self.config.parts()
    }

    /// Opens the files of a model of the same family, and logs a prefix of the names in them.
    fn open(&self, folder: &Path) -> Result<DecoderFiles, ModelFolderError> {
        let files = self.config.open(folder)?;
        files.weights.log_prefix();
        Ok(files)
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
        self.config.weight_map()
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
        self.config.check_weights(folder)
    }

    fn logits_bytes(&self, batch: BatchShape) -> u64 {
        self.config.logits_bytes(batch)
    }
}

impl LanguageModelConfig for AnyDecoder {
    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ModelConfigError> {
        Ok(Self { config: self.config.with_overrides(overrides)? })
    }

    fn validate(&self) -> Result<(), ModelConfigError> {
        self.config.validate()
    }

    fn limits(&self) -> TokenLimits {
        self.config.limits()
    }

    fn set_vocab_size(&mut self, vocab_size: usize) {
        self.config = self.config.with_vocab_size(vocab_size);
    }

    fn extra(&self) -> &ExtraFields {
        self.config.extra()
    }
}

/// Modules with random, zero or stored weights.
impl<B: Backend> BuildModel<B> for AnyDecoder {
    type Model = Decoder<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Decoder<B>, ModelConfigError> {
        Decoder::with(self, WeightInit::new(self.weight_map(), seed, device))
    }

    fn zeros(&self, device: &B::Device) -> Result<Decoder<B>, ModelConfigError> {
        Decoder::with(self, WeightInit::zeros(self.weight_map(), device))
    }

    fn load(&self, folder: &Path, device: &B::Device) -> Result<Decoder<B>, ModelFolderError> {
        self.open(folder)?.load(self, device)
    }

    /// Reads each weight when it is first used. A language-model folder contains all weights, so the seed is not used.
    fn load_lazily(
        &self,
        folder: &Path,
        _seed: u64,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        self.config.open(folder)?.load_lazily(self, device)
    }
}

/// Modules of a family, which do not depend on its type.
impl<B: Backend, C: DecoderConfig> BuildModel<B> for C {
    type Model = Decoder<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Decoder<B>, ModelConfigError> {
        AnyDecoder::new(self.clone()).init(seed, device)
    }

    fn zeros(&self, device: &B::Device) -> Result<Decoder<B>, ModelConfigError> {
        AnyDecoder::new(self.clone()).zeros(device)
    }

    fn load(&self, folder: &Path, device: &B::Device) -> Result<Decoder<B>, ModelFolderError> {
        AnyDecoder::new(self.clone()).load(folder, device)
    }

    fn load_lazily(
        &self,
        folder: &Path,
        seed: u64,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        AnyDecoder::new(self.clone()).load_lazily(folder, seed, device)
    }
}
