//! The configuration of an encoder.
//!
//! Main type: [`EncoderConfig`], which is read from and written to `config.json` by serde. Unlike
//! in GPT-2's `config.json`, unknown fields are errors, because no other program writes this file.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::architecture::SavedConfig;
use crate::hf::{
    ClassNames, ClassNamesError, ID2LABEL, LABEL2ID, MAX_LAYERS, MAX_SIZE, ModelConfigError,
    ProblemType, unquoted,
};
use crate::texts::TextLimits;

/// An encoder's architecture. Fields that are missing from `config.json` default to the values of
/// [`EncoderConfig::guide`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EncoderConfig {
    /// `deepburn_encoder`.
    pub model_type: ModelType,
    /// Number of tokens in the vocabulary; token ids are smaller.
    pub vocab_size: usize,
    /// Width of the residual stream. It must be even, because the position encodings consist of
    /// sine and cosine pairs.
    pub embed_dim: usize,
    /// Number of attention heads per layer; must divide `embed_dim`.
    pub num_heads: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// Hidden width of the feed-forward network of each layer, and of the classification head.
    pub hidden_dim: usize,
    /// Maximum text length in tokens.
    pub max_len: usize,
    /// Dropout probability for attention weights, sublayer outputs, hidden activations and
    /// embeddings.
    pub dropout: f64,
    /// Number of classes, or of numbers to predict.
    pub num_classes: usize,
    /// Epsilon added to the variance in layer normalization.
    pub layer_norm_epsilon: f64,
    /// Standard deviation of the initial embeddings. The embedding of a rare word hardly changes
    /// during training and adds noise to the mean over a text. A smaller deviation adds less noise.
    pub initializer_range: f64,
    /// Class names by class number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id2label: Option<Map<String, Value>>,
    /// Class numbers by class name. Only one of `id2label` and `label2id` is required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label2id: Option<Map<String, Value>>,
    /// What the model predicts.
    #[serde(
        deserialize_with = "ProblemType::deserialize_nullable",
        skip_serializing_if = "ProblemType::is_single_label"
    )]
    pub problem_type: ProblemType,
}

/// The name of this model in `config.json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelType {
    /// `deepburn_encoder`.
    #[default]
    #[serde(rename = "deepburn_encoder")]
    Encoder,
}

impl Default for EncoderConfig {
    fn default() -> Self {
        Self::guide()
    }
}

impl EncoderConfig {
    /// Returns a configuration with six layers of width 256 and a byte-pair vocabulary of GPT-2's
    /// size. It is the model of a published guide to training on IMDB reviews.
    #[must_use]
    pub fn guide() -> Self {
        Self {
            model_type: ModelType::Encoder,
            vocab_size: 50257,
            embed_dim: 256,
            num_heads: 8,
            num_layers: 6,
            hidden_dim: 1024,
            max_len: 1024,
            dropout: 0.2,
            num_classes: 2,
            layer_norm_epsilon: 1e-5,
            initializer_range: 1.0,
            id2label: None,
            label2id: None,
            problem_type: ProblemType::default(),
        }
    }

    /// Returns the configuration with the given `config.json` fields overridden.
    ///
    /// The result is not validated. Call [`validate`](Self::validate) after all fields are set.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Field`] if a field is unknown or has the wrong type.
    pub fn with_overrides(&self, fields: &Map<String, Value>) -> Result<Self, ModelConfigError> {
        let wrong = |error: serde_json::Error| ModelConfigError::Field(error.to_string());
        let Value::Object(own) = serde_json::to_value(self).map_err(wrong)? else {
            unreachable!("a struct with named fields is an object");
        };
        let with = |fields: &Map<String, Value>| {
            let all = own.clone().into_iter().chain(fields.clone());
            serde_json::from_value::<Self>(Value::Object(all.collect()))
        };
        with(fields).map_err(|error| {
            // serde names a field only if it is unknown.
            let accepts = |name: &str, value: &Value| {
                with(&Map::from_iter([(name.to_owned(), value.clone())])).is_ok()
            };
            let message = error.to_string();
            let mistyped = fields
                .iter()
                .find(|(name, value)| !accepts(name, value))
                .filter(|(name, _)| !message.contains(&format!("`{name}`")));
            let Some((name, value)) = mistyped else { return wrong(error) };
            let meant = unquoted(value).filter(|meant| accepts(name, meant));
            let remedy = meant.map_or(String::new(), |meant| format!("; write {meant}"));
            ModelConfigError::Field(format!("`{name}` is {value}: {message}{remedy}"))
        })
    }

    /// Returns the class names; `None` if the classes are only numbered.
    ///
    /// # Errors
    /// Returns [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
    pub fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        let mut fields = Map::new();
        fields.extend(self.id2label.clone().map(|it| (ID2LABEL.to_owned(), it.into())));
        fields.extend(self.label2id.clone().map(|it| (LABEL2ID.to_owned(), it.into())));
        ClassNames::read(&fields)
    }

    /// Returns the configuration with these class names.
    #[must_use]
    pub fn with_class_names(mut self, names: Option<&ClassNames>) -> Self {
        let mut fields = ClassNames::fields(names, self.num_classes);
        let mut take = |name| fields.remove(name).and_then(|it| it.as_object().cloned());
        (self.id2label, self.label2id) = (take(ID2LABEL), take(LABEL2ID));
        self
    }

    /// Returns the limits on texts and labels.
    #[must_use]
    pub fn limits(&self) -> TextLimits {
        let &Self { vocab_size, max_len, num_classes, .. } = self;
        TextLimits { vocab_size, max_len, num_classes }
    }

    /// Checks that the values are consistent.
    ///
    /// Sizes have upper limits so that their products cannot overflow.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] for the first invalid field.
    pub fn validate(&self) -> Result<(), ModelConfigError> {
        for (name, value, range) in [
            ("vocab_size", self.vocab_size, 1..=MAX_SIZE),
            ("embed_dim", self.embed_dim, 1..=MAX_SIZE),
            ("num_heads", self.num_heads, 1..=MAX_SIZE),
            ("num_layers", self.num_layers, 1..=MAX_LAYERS),
            ("hidden_dim", self.hidden_dim, 1..=MAX_SIZE),
            ("max_len", self.max_len, 1..=MAX_SIZE),
            ("num_classes", self.num_classes, self.problem_type.min_outputs()..=MAX_SIZE),
        ] {
            let rule = format!("from {} to {}", range.start(), range.end());
            ModelConfigError::unless(range.contains(&value), name, value, rule)?;
        }
        let (width, heads) = (self.embed_dim, self.num_heads);
        // Position encodings have a sine and a cosine for each frequency.
        ModelConfigError::unless(width.is_multiple_of(2), "embed_dim", width, "even")?;
        let rule = format!("a divisor of embed_dim {width}");
        ModelConfigError::unless(width.is_multiple_of(heads), "num_heads", heads, rule)?;
        let (dropout, rule) = (self.dropout, "at least 0 and below 1");
        ModelConfigError::unless((0.0..1.0).contains(&dropout), "dropout", dropout, rule)?;
        for (name, value) in [
            ("layer_norm_epsilon", self.layer_norm_epsilon),
            ("initializer_range", self.initializer_range),
        ] {
            ModelConfigError::unless(value > 0.0 && value.is_finite(), name, value, "above 0")?;
        }
        Ok(())
    }
}

impl SavedConfig for EncoderConfig {
    const MODEL_TYPE: &'static str = "deepburn_encoder";

    /// Reads the fields of a saved `config.json`.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if a field is unknown, has the wrong type or is out of range.
    fn from_fields(mut fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        // These fields describe the file, not the model, and are read by other programs.
        for name in ["architectures", "dtype"] {
            fields.remove(name);
        }
        // As in files of other models, null means that a field is not set. A field that always has
        // a value keeps its null, which is then reported as a wrong type.
        let own = serde_json::to_value(Self::guide()).unwrap_or_default();
        fields.retain(|name, value| !value.is_null() || own.get(name).is_some());
        let config = Self::guide().with_overrides(&fields)?;
        config.validate()?;
        let wrong = |error: ClassNamesError| ModelConfigError::Field(error.to_string());
        let names = config.class_names().map_err(wrong)?;
        let count = names.map_or(0, |names| names.as_slice().len());
        let num_classes = config.num_classes;
        let rule = format!("at least {count}, for the names in `id2label`");
        ModelConfigError::unless(count <= num_classes, "num_classes", num_classes, rule)?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn overridden(fields: Value) -> Result<EncoderConfig, ModelConfigError> {
        let Value::Object(fields) = fields else { panic!("not an object") };
        EncoderConfig::guide().with_overrides(&fields)
    }

    #[test]
    fn fields_are_read_or_named() {
        let config = overridden(json!({"num_layers": 2, "model_type": "deepburn_encoder"}));
        assert_eq!(config.unwrap(), EncoderConfig { num_layers: 2, ..EncoderConfig::guide() });
        for (fields, named) in [
            (json!({"n_layer": 2}), "n_layer"),
            (json!({"num_layers": "two"}), "`num_layers` is \"two\": invalid type"),
            (json!({"dropout": 0.1, "vocab_size": "512"}), "`vocab_size` is \"512\": invalid type"),
            (json!({"vocab_size": "512"}), "; write 512"),
            (json!({"model_type": "gpt2"}), "gpt2"),
        ] {
            let message = overridden(fields).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn other_fields_of_a_file_must_be_null() {
        let read = |fields: Value| EncoderConfig::from_fields(fields.as_object().unwrap().clone());
        let described = json!({"architectures": ["DeepBurnEncoder"], "dtype": "float32",
            "sliding_window": null, "id2label": null, "problem_type": null});
        assert_eq!(read(described).unwrap(), EncoderConfig::guide());
        for (fields, named) in [
            (json!({"sliding_window": 8}), "unknown field `sliding_window`"),
            (json!({"tie_embeddings": false}), "unknown field `tie_embeddings`"),
            (json!({"num_layers": null}), "null"),
        ] {
            let message = read(fields).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn values_that_do_not_hold_together_are_named() {
        assert_eq!(EncoderConfig::guide().validate(), Ok(()));
        for (fields, named) in [
            (json!({"num_heads": 3}), "num_heads"),
            (json!({"embed_dim": 0}), "embed_dim"),
            (json!({"embed_dim": 9, "num_heads": 3}), "embed_dim"),
            (json!({"max_len": 1_u64 << 40}), "max_len"),
            (json!({"num_layers": 4097}), "num_layers"),
            (json!({"dropout": 1.0}), "dropout"),
            (json!({"num_classes": 1}), "num_classes"),
            (json!({"layer_norm_epsilon": 0.0}), "layer_norm_epsilon"),
            (json!({"initializer_range": 0.0}), "initializer_range"),
        ] {
            let message = overridden(fields).unwrap().validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{named}` is ")), "{message}");
        }
    }
}
