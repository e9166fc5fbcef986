//! Implementation of the model traits for the configurations of decoders.
//!
//! [`BuildModel`](crate::BuildModel) is implemented for [`AnyDecoder`](super::AnyDecoder) only.

use std::path::Path;

use deepburn_files::safetensors::FloatType;
use deepburn_weights::WeightMap;
use serde_json::{Map, Value};

use super::config::{DecoderConfig, document};
use super::pretrained::PretrainedDecoder;
use crate::architecture::{Architecture, LanguageModelConfig, MatrixUse, SavedConfig, TokenLimits};
use crate::batch_shape::BatchShape;
use crate::hf::{
    CONFIG, ExtraFields, GENERATION_CONFIG, JsonFiles, ModelConfigError, ModelFolderError,
};

impl<C: DecoderConfig> Architecture for C {
    fn name(&self) -> &'static str {
        C::NAME
    }

    /// Maps all parameters to the names of `transformers`. Files without the prefix can also be
    /// read.
    fn weight_map(&self) -> WeightMap {
        self.parts().weight_map()
    }

    fn matrix_use(&self, path: &str) -> MatrixUse {
        self.parts().matrix_use(path)
    }

    fn width(&self) -> usize {
        self.parts().width
    }

    fn max_len(&self) -> usize {
        self.parts().max_len
    }

    /// Returns `config.json`, and `generation_config.json` with the special tokens.
    fn documents(&self, float: FloatType) -> JsonFiles {
        vec![
            (CONFIG, document(self.to_fields(), C::CLASS, float)),
            (GENERATION_CONFIG, self.extra().generation_config()),
        ]
    }

    /// Reads every tensor in blocks, using at most 8 MiB of memory.
    fn check_weights(&self, folder: &Path) -> Result<(), ModelFolderError> {
        // The folder is read by its own configuration, because `self` may have more tokens.
        PretrainedDecoder::open(folder)?.check_values(self)
    }

    /// Returns the size of one chunk of logits. The fused loss computes f32 logits for a chunk of
    /// rows and frees them before it computes the next chunk.
    fn logits_bytes(&self, batch: BatchShape) -> u64 {
        batch.logits_bytes(self.parts().vocab_size)
    }
}

impl<C: DecoderConfig> SavedConfig for C {
    const MODEL_TYPE: &'static str = C::MODEL_TYPE;

    fn from_fields(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        let config = C::from_known(fields)?;
        config.validate()?;
        Ok(config)
    }
}

impl<C: DecoderConfig> LanguageModelConfig for C {
    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ModelConfigError> {
        // Only the result is validated: the override may remove a field for which `self` is
        // refused.
        C::from_fields(C::FIELDS.overridden(self.to_fields(), overrides)?)
    }

    fn validate(&self) -> Result<(), ModelConfigError> {
        C::FIELDS.check(self.extra())?;
        self.check_values()
    }

    fn limits(&self) -> TokenLimits {
        let parts = self.parts();
        let (vocab_size, max_len) = (parts.vocab_size, parts.longest());
        TokenLimits { vocab_size, max_len, max_len_field: C::MAX_LEN_FIELD }
    }

    /// Sets the number of rows of the embedding and the head. If stored weights have fewer rows,
    /// the new rows are the mean of the stored ones; weights with more rows can no longer be
    /// loaded.
    fn set_vocab_size(&mut self, vocab_size: usize) {
        DecoderConfig::set_vocab_size(self, vocab_size);
    }

    fn extra(&self) -> &ExtraFields {
        DecoderConfig::extra(self)
    }
}
