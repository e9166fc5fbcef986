//! Builds the modules of decoders, with random, zero or stored weights.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::backend::Backend;

use super::any::AnyDecoder;
use super::config::DecoderConfig;
use super::merge::Merge;
use super::model::Decoder;
use super::pretrained::{DecoderFiles, PretrainedDecoder};
use crate::architecture::{Architecture, BuildModel, LanguageModelConfig};
use crate::hf::{ModelConfigError, ModelFolderError};
use crate::weights::{ReadWeights, WeightInit};

/// Modules with random, zero or stored weights.
impl<B: Backend> BuildModel<B> for AnyDecoder {
    type Model = Decoder<B>;

    fn init(&self, seed: u64, device: &B::Device) -> Result<Decoder<B>, ModelConfigError> {
        let init = WeightInit::new(self.parts().weight_map(), seed, device);
        let init = self.adapted(init, seed).map_err(|error| unusable(&error))?;
        Decoder::with(self, init)
    }

    fn zeros(&self, device: &B::Device) -> Result<Decoder<B>, ModelConfigError> {
        let init = WeightInit::zeros(self.parts().weight_map(), device);
        let init = self.adapted(init, 0).map_err(|error| unusable(&error))?;
        Decoder::with(self, init)
    }

    fn load(&self, folder: &Path, device: &B::Device) -> Result<Decoder<B>, ModelFolderError> {
        if self.adapter().is_none() {
            let files = self.open(folder)?;
            files.weights.log_prefix();
            return files.load(self, device);
        }
        // The values of an adapted model are read when they are first used, when an error could
        // only be a panic.
        self.check_weights(folder)?;
        let is_trained = self.trained_adapter().is_some();
        // With autodiff, the adapter may be trained further, so it has to stay separate.
        if !is_trained || B::ad_enabled(device) || self.check_mergeable().is_err() {
            return self.load_lazily(folder, 0, device);
        }
        // Nothing is trained, so the adapter is merged while the weights are read.
        let named = |source| ModelFolderError::config(folder, source);
        let merge = Merge::open(self, folder)?;
        let config = merge.config().map_err(named)?;
        let read = merge.into_reader(config.weight_map());
        Decoder::with(&config, WeightInit::reading(config.weight_map(), read, device))
            .map_err(named)
    }

    /// Reads each weight when it is first used. The seed is used for an adapter that is not trained
    /// yet, because a language-model folder contains all other weights.
    fn load_lazily(
        &self,
        folder: &Path,
        seed: u64,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        self.open(folder)?.load_lazily(self, seed, device)
    }
}

/// Returns the error for a trained adapter whose files cannot be used.
fn unusable(error: &ModelFolderError) -> ModelConfigError {
    ModelConfigError::Field(error.to_string())
}

impl AnyDecoder {
    /// Returns the model without its adapter. `read` is called with the path of a parameter when it
    /// is first used, and returns its values in row-major order. The first use panics with the
    /// error of `read`, because Burn's lazy parameters cannot return errors.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the configuration is inconsistent.
    pub fn reading<B: Backend>(
        &self,
        read: impl Fn(&str) -> Result<Vec<f32>, String> + Send + Sync + 'static,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelConfigError> {
        let read: Arc<ReadWeights> =
            Arc::new(move |path: &str| read(path).unwrap_or_else(|error| panic!("{error}")));
        let base = self.base();
        Decoder::with(&base, WeightInit::reading(base.weight_map(), read, device))
    }
}

impl<C: DecoderConfig> PretrainedDecoder<C> {
    /// Returns a model with the given `config` and the checkpoint's weights, converted to f32.
    /// `config` is the checkpoint's config or derived from it. If its vocabulary is larger than the
    /// checkpoint's, the new rows of the embedding and of an untied head are the mean of the
    /// existing rows. In addition to the model, one tensor is in memory at a time.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit,
    /// [`ModelFolderError::SmallerVocabulary`], or an I/O error.
    pub fn load<B: Backend>(
        self,
        config: &C,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        self.files.load(&AnyDecoder::new(config.clone()), device)
    }

    /// Loads the same model as [`load`](Self::load), but reads each weight when it is first used.
    /// Names, shapes and types are checked immediately. [`check_values`](Self::check_values) checks
    /// the values.
    ///
    /// If a weight cannot be read later or is not finite, the first use panics with the error
    /// message, because Burn's lazy parameters cannot return errors. Sharded training converts the
    /// panic to an error.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit, or
    /// [`ModelFolderError::SmallerVocabulary`].
    pub fn load_lazily<B: Backend>(
        self,
        config: &C,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        self.files.load_lazily(&AnyDecoder::new(config.clone()), 0, device)
    }
}

/// [`PretrainedDecoder`]'s methods, without its type.
impl DecoderFiles {
    fn load<B: Backend>(
        mut self,
        decoder: &AnyDecoder,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        // The zeros are lazy, so they take no memory before `fill` replaces them.
        let model = decoder.zeros(device).map_err(|source| self.misconfigured(source))?;
        self.check_fit(&decoder.parts())?;
        self.weights.fill(model)
    }

    /// The seed is used for an adapter that is not trained yet.
    fn load_lazily<B: Backend>(
        mut self,
        decoder: &AnyDecoder,
        seed: u64,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        // The folder has the weights of the base model. A trained adapter has a folder of its own.
        let base = decoder.base();
        base.validate().map_err(|source| self.misconfigured(source))?;
        self.check_shapes(&base.parts())?;
        let folder = self.weights.folder().to_owned();
        let init = WeightInit::reading(base.weight_map(), self.weights.into_reader(), device);
        Decoder::with(decoder, decoder.adapted(init, seed)?)
            .map_err(|source| ModelFolderError::config(&folder, source))
    }
}
