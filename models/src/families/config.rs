//! The configuration of a model of a family.
//!
//! Main types: [`FamilyConfig`], and [`Family`], which reads its fields.

use std::fmt;
use std::marker::PhantomData;

use serde_json::{Map, Value, json};

use super::settings::FamilySettings;
use crate::decoder::{DecoderConfig, DecoderParts};
use crate::hf::{ConfigFields, ExtraFields, FieldNames, ModelConfigError};

/// A family of models.
pub trait Family: Clone + fmt::Debug + PartialEq + Send + Sync + 'static {
    /// `model_type` in `config.json`.
    const MODEL_TYPE: &'static str;
    /// The name in logs.
    const NAME: &'static str;
    /// The class of `transformers` that loads the model.
    const CLASS: &'static str;
    /// The fields of `config.json`.
    const FIELDS: FieldNames;

    /// Reads the fields. Missing fields have the defaults of `transformers`.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] for a field that has the wrong type, is out of range, or
    /// contradicts another field.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError>;
}

/// The configuration of a model of a family: the fields of a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilyConfig<F> {
    /// All fields, as written.
    fields: Map<String, Value>,
    /// The values of the fields that the model reads.
    settings: FamilySettings,
    /// The fields that it does not read.
    extra: ExtraFields,
    family: PhantomData<F>,
}

impl<F: Family> FamilyConfig<F> {
    /// Returns what the fields of `config.json` say.
    #[must_use]
    pub fn settings(&self) -> &FamilySettings {
        &self.settings
    }
}

impl<F: Family> DecoderConfig for FamilyConfig<F> {
    const MODEL_TYPE: &'static str = F::MODEL_TYPE;
    const NAME: &'static str = F::NAME;
    const CLASS: &'static str = F::CLASS;
    const MAX_LEN_FIELD: &'static str = "max_position_embeddings";
    const FIELDS: FieldNames = F::FIELDS;

    /// Returns the default of `transformers`.
    fn default_size() -> Self {
        Self::from_known(Map::new()).expect("the defaults are consistent")
    }

    fn from_known(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        let mut all = fields.clone();
        // Old files lack it, but readers of the exported file need it.
        all.insert("model_type".into(), json!(F::MODEL_TYPE));
        let mut fields = ConfigFields::new(fields, F::FIELDS, F::MODEL_TYPE)?;
        let settings = F::settings(&mut fields)?;
        let extra = fields.into_extra()?;
        Ok(Self { fields: all, settings, extra, family: PhantomData })
    }

    fn to_fields(&self) -> Map<String, Value> {
        let mut fields = self.fields.clone();
        fields.sort_keys();
        fields
    }

    fn check_values(&self) -> Result<(), ModelConfigError> {
        self.settings.check()
    }

    fn parts(&self) -> DecoderParts {
        self.settings.parts(self.extra.pad_token_id())
    }

    fn set_vocab_size(&mut self, vocab_size: usize) {
        self.settings.vocab_size = vocab_size;
        // The fields are what is written, so both have to change.
        self.fields.insert("vocab_size".into(), json!(vocab_size));
    }

    fn extra(&self) -> &ExtraFields {
        &self.extra
    }
}
