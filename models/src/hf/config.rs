//! The fields of a `config.json` that are common to the models of `transformers`.
//!
//! Main types: [`ConfigFields`], which reads fields and checks them, and [`ExtraFields`], which
//! keeps the others. There are four kinds of fields:
//!
//! - fields that the model reads;
//! - *harmless* fields, which do not change what the model computes, such as defaults of
//!   generation;
//! - *fixed* fields, which belong to unsupported features and are only accepted with the value of a
//!   model without them;
//! - all other fields. They may change what the model computes (`sliding_window`, `rope_scaling`),
//!   so they are errors.
//!
//! # Removing a field
//!
//! Null means that a field is not set, so a field of the last kind is accepted if it is null. An
//! override that sets it to null removes it from the configuration: the exported file then
//! describes the model that was trained. False is not accepted. It may switch off what the model
//! does without the field: `transformers` computes bidirectional attention if `is_causal` is false.
//!
//! Reading a file only keeps the fields. [`FieldNames::check`] refuses them after the overrides
//! were applied.

use serde_json::{Map, Value};

use super::class_names::{ClassNames, ClassNamesError, ID2LABEL};
use super::config_error::ModelConfigError;
use super::known_fields::{FIXED, FixedField, HARMLESS, LISTS_OF_TOKENS};
use super::problem_type::ProblemType;

/// The maximum width, length or vocabulary size. The limit ensures that the product of two sizes
/// fits in 64 bits.
pub(crate) const MAX_SIZE: usize = 1 << 24;
/// The maximum number of layers. Each layer has a dozen parameters, and all of them are listed
/// before any is read.
pub(crate) const MAX_LAYERS: usize = 1 << 12;

/// Fields of a `config.json` that the model does not use. They are written back unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExtraFields(pub(crate) Map<String, Value>);

impl ExtraFields {
    /// Returns the tokens after which generation stops, from `eos_token_id`.
    #[must_use]
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        match self.0.get("eos_token_id") {
            // Nothing is lost here: `check_token_ids` has refused anything but ids.
            Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the padding token.
    #[must_use]
    pub fn pad_token_id(&self) -> Option<u32> {
        self.0.get("pad_token_id")?.as_u64().and_then(|id| u32::try_from(id).ok())
    }

    /// Returns the names of the fields that hold ids of tokens, such as `pad_token_id`, and are not
    /// null.
    pub fn token_fields(&self) -> impl Iterator<Item = &str> {
        let is_of_tokens =
            |name: &str| name.ends_with("_token_id") || LISTS_OF_TOKENS.contains(&name);
        let given = self.0.iter().filter(|(_, value)| !value.is_null());
        given.map(|(name, _)| name.as_str()).filter(move |name| is_of_tokens(name))
    }

    /// Returns the class names in a classifier's `config.json`; `None` if the classes are only
    /// numbered.
    ///
    /// # Errors
    /// Returns [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
    pub fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        ClassNames::read(&self.0)
    }

    /// Returns the `problem_type` in a classifier's `config.json`; `None` if it is missing or null.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] for an unknown value.
    pub fn problem_type(&self) -> Result<Option<ProblemType>, ModelConfigError> {
        ProblemType::read(&self.0)
    }

    /// Returns the number of outputs of a classifier, as `transformers` reads it: the number of
    /// names in `id2label`, or else `num_labels`.
    #[must_use]
    pub fn num_labels(&self) -> Option<usize> {
        match self.0.get(ID2LABEL).and_then(Value::as_object) {
            Some(names) => Some(names.len()),
            None => self.0.get("num_labels").and_then(as_count),
        }
    }

    /// Returns whether the fields are from a text classifier of `transformers`, and not from a
    /// language model.
    #[must_use]
    pub fn is_sequence_classifier(&self) -> bool {
        is_sequence_classifier(&self.0)
    }

    /// Returns the fields of `generation_config.json`, which holds the special tokens for
    /// generation.
    pub(crate) fn generation_config(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        // `transformers` marks files that it derives from config.json in this way.
        fields.insert("_from_model_config".into(), true.into());
        for name in ["bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"] {
            if let Some(value) = self.0.get(name).filter(|value| !value.is_null()) {
                fields.insert(name.into(), value.clone());
            }
        }
        fields
    }

    /// Checks the special tokens, which are used for generation.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if a special token is neither a token id nor null.
    /// `eos_token_id` may also be a list of ids.
    fn check_token_ids(&self) -> Result<(), ModelConfigError> {
        let is_id = |value: &Value| value.as_u64().is_some_and(|id| u32::try_from(id).is_ok());
        for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            let fits = |value: &Value| match value {
                Value::Null => true,
                Value::Array(ids) => name == "eos_token_id" && ids.iter().all(is_id),
                id => is_id(id),
            };
            let Some(value) = self.0.get(name).filter(|value| !fits(value)) else { continue };
            return Err(ModelConfigError::mistyped(name, value, "a token id or null", fits));
        }
        Ok(())
    }
}

/// Returns whether the fields of a `config.json` are from a text classifier of `transformers`, and
/// not from a language model.
#[must_use]
pub fn is_sequence_classifier(fields: &Map<String, Value>) -> bool {
    let all = fields.get("architectures").and_then(Value::as_array).into_iter().flatten();
    all.filter_map(Value::as_str).any(|name| name.ends_with("ForSequenceClassification"))
}

/// The names of the fields that a model knows.
#[derive(Clone, Copy, Debug)]
pub struct FieldNames {
    /// The fields that the model reads, in lists that models share.
    pub read: &'static [&'static [&'static str]],
    /// Aliases of these fields: `(alias, name)`.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Fields that do not change what the model computes, in addition to the fields that are
    /// harmless in any model.
    pub harmless: &'static [&'static str],
    /// Fields that change nothing at one value, in addition to the fixed fields of any model.
    pub fixed: &'static [FixedField],
}

impl FieldNames {
    /// Replaces aliases by the main names of the fields. Both names may be present if their values
    /// are equal.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Conflict`] if both names are given with different values.
    fn canonical(
        self,
        mut fields: Map<String, Value>,
    ) -> Result<Map<String, Value>, ModelConfigError> {
        for &(alias, name) in self.aliases {
            let Some(alias_value) = fields.remove(alias) else { continue };
            match fields.get(name) {
                Some(value) if *value != alias_value => {
                    let (value, alias_value) = (value.to_string(), alias_value.to_string());
                    return Err(ModelConfigError::Conflict { alias, alias_value, name, value });
                }
                _ => _ = fields.insert(name.to_owned(), alias_value),
            }
        }
        Ok(fields)
    }

    /// Returns the fields of a config with `overrides` applied. Null removes a field that the model
    /// does not know.
    ///
    /// # Errors
    /// Returns an error if neither the model nor the config has a field with this name.
    pub fn overridden(
        self,
        mut fields: Map<String, Value>,
        overrides: &Map<String, Value>,
    ) -> Result<Map<String, Value>, ModelConfigError> {
        for (name, value) in self.canonical(overrides.clone())? {
            let is_known = self.has(&name);
            if !is_known && !fields.contains_key(&name) {
                return Err(self.refusal(&name, &value));
            }
            match is_known || !value.is_null() {
                true => _ = fields.insert(name, value),
                false => _ = fields.remove(&name),
            }
        }
        Ok(fields)
    }

    /// Returns the fields that the model reads.
    fn reads(self) -> impl Iterator<Item = &'static &'static str> {
        self.read.iter().copied().flatten()
    }

    /// Returns whether the model knows a field with this name.
    fn has(self, name: &str) -> bool {
        self.reads().any(|own| *own == name) || self.is_harmless(name) || self.fixed(name).is_some()
    }

    /// Returns whether a field never changes what the model computes.
    fn is_harmless(self, name: &str) -> bool {
        HARMLESS.contains(&name) || self.harmless.contains(&name)
    }

    /// Returns the fixed field with this name.
    fn fixed(self, name: &str) -> Option<&'static FixedField> {
        FIXED.iter().chain(self.fixed).find(|field| field.name == name)
    }

    /// Checks the fields that the model does not read.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Unread`] for a field that may change what the model computes,
    /// [`ModelConfigError::Unknown`] for a field that looks like a misspelt field of the model, and
    /// [`ModelConfigError::Unsupported`] for an unsupported feature.
    pub fn check(self, extra: &ExtraFields) -> Result<(), ModelConfigError> {
        for (name, value) in &extra.0 {
            if self.is_harmless(name) {
                continue;
            }
            if let Some(FixedField { name, accepted, remedy }) = self.fixed(name) {
                if !accepted.accepts(value) {
                    let value = value.to_string();
                    return Err(ModelConfigError::Unsupported { name, value, remedy });
                }
            } else if !value.is_null() {
                return Err(match self.is_misspelt(name) {
                    true => self.refusal(name, value),
                    false => {
                        ModelConfigError::Unread { name: name.clone(), value: value.to_string() }
                    }
                });
            }
        }
        Ok(())
    }

    /// Returns whether `name` looks like a misspelt field of the model.
    ///
    /// Names are compared by their optimal string alignment distance, which counts insertions,
    /// deletions, substitutions and transpositions of adjacent letters. The maximum distance is 1
    /// for names with fewer than 8 letters and 2 for longer names.
    fn is_misspelt(self, name: &str) -> bool {
        let allowed = if name.len() < 8 { 1 } else { 2 };
        let aliases = self.aliases.iter().map(|(alias, _)| alias);
        let mut own = self.reads().chain(aliases);
        own.any(|own| strsim::osa_distance(name, own) <= allowed)
    }

    /// Returns the error for an unknown field.
    fn refusal(self, name: &str, value: &Value) -> ModelConfigError {
        let (name, value) = (name.to_owned(), value.to_string());
        ModelConfigError::Unknown { hint: self.nearest(&name), name, value }
    }

    /// Returns "; did you mean `x`?" with the known name that is most similar to `name`. If no name
    /// is similar, returns a list of all names that the model reads.
    ///
    /// Names are compared by Jaro-Winkler similarity, which favors a common prefix. The similarity
    /// must exceed 0.8.
    fn nearest(self, name: &str) -> String {
        let aliases = self.aliases.iter().map(|(alias, _)| alias);
        let known = self.reads().chain(aliases).chain(self.harmless).chain(HARMLESS);
        known
            .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
            .filter(|(similarity, _)| *similarity > 0.8)
            .max_by(|(a, _), (b, _)| a.total_cmp(b))
            .map(|(_, candidate)| format!("; did you mean `{candidate}`?"))
            .unwrap_or_else(|| {
                format!("; remove it, or use one of {}", self.read.concat().join(", "))
            })
    }
}

/// The fields of a `config.json` that have not been read yet.
pub struct ConfigFields {
    /// The remaining fields. Reading a field removes it.
    fields: Map<String, Value>,
    /// The names that the model reads, for hints.
    names: FieldNames,
}

impl ConfigFields {
    /// Starts reading the fields of a model with the given `model_type`.
    ///
    /// # Errors
    /// Returns an error if the config belongs to another model, or gives two values for one field.
    pub fn new(
        fields: Map<String, Value>,
        names: FieldNames,
        model_type: &str,
    ) -> Result<Self, ModelConfigError> {
        let fields = names.canonical(fields)?;
        // Old files have no `model_type`. Another type means another model, whose fields would be
        // misinterpreted.
        match fields.get("model_type") {
            None => {}
            Some(Value::String(kind)) if kind == model_type => {}
            Some(other) => {
                return Err(ModelConfigError::value(
                    "model_type",
                    other,
                    format!("\"{model_type}\""),
                ));
            }
        }
        Ok(Self { fields, names })
    }

    /// Returns whether a field is given.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// Returns whether a field is missing or null.
    pub(crate) fn is_unset(&self, name: &str) -> bool {
        self.fields.get(name).is_none_or(Value::is_null)
    }

    /// Takes the value of a field, or returns `default` if the field is missing.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if `read` rejects the value; `rule` describes the
    /// accepted values.
    pub fn take<T>(
        &mut self,
        name: &'static str,
        default: T,
        rule: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, ModelConfigError> {
        let Some(value) = self.fields.remove(name) else { return Ok(default) };
        let accepts = |value: &Value| read(value).is_some();
        read(&value).ok_or_else(|| ModelConfigError::mistyped(name, &value, rule, accepts))
    }

    /// Takes the value of a field that may be null, or returns `default` if the field is missing.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is not null and `read` rejects it.
    pub(crate) fn take_nullable<T>(
        &mut self,
        name: &'static str,
        default: Option<T>,
        rule: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ModelConfigError> {
        self.take(name, default, rule, |value| match value {
            Value::Null => Some(None),
            value => read(value).map(Some),
        })
    }

    /// Takes a non-negative integer. Its range is not checked.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is not a non-negative integer.
    pub fn count(&mut self, name: &'static str, default: usize) -> Result<usize, ModelConfigError> {
        self.take(name, default, "a positive integer", as_count)
    }

    /// Takes a non-negative integer or null.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is neither a non-negative integer nor null.
    pub fn optional_count(
        &mut self,
        name: &'static str,
    ) -> Result<Option<usize>, ModelConfigError> {
        self.take_nullable(name, None, "a positive integer or null", as_count)
    }

    /// Takes a number.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is not a JSON number.
    pub fn number(&mut self, name: &'static str, default: f64) -> Result<f64, ModelConfigError> {
        self.take(name, default, "a number", Value::as_f64)
    }

    /// Takes a boolean. 0 and 1 are rejected, because `transformers` writes `false` and `true`.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is neither `true` nor `false`.
    pub fn flag(&mut self, name: &'static str, default: bool) -> Result<bool, ModelConfigError> {
        self.take(name, default, "true or false", Value::as_bool)
    }

    /// Returns the remaining fields, which the model does not read, without fixed fields that
    /// change nothing.
    ///
    /// # Errors
    /// Returns an error if a special token is not a token id.
    pub fn into_extra(self) -> Result<ExtraFields, ModelConfigError> {
        let Self { mut fields, names } = self;
        fields
            .retain(|name, value| !names.fixed(name).is_some_and(|it| it.accepted.accepts(value)));
        let extra = ExtraFields(fields);
        extra.check_token_ids()?;
        Ok(extra)
    }
}

/// Returns the value if it is a non-negative integer that fits in a `usize`.
fn as_count(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|count| usize::try_from(count).ok())
}

/// Checks the range of a width, a length or a number of layers.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is 0 or above `max`.
pub(crate) fn check_size(
    name: &'static str,
    value: usize,
    max: usize,
) -> Result<(), ModelConfigError> {
    let rule = format!("an integer from 1 to {max}");
    ModelConfigError::unless((1..=max).contains(&value), name, value, rule)
}

/// Checks a dropout probability.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is not in [0, 1).
pub(crate) fn check_probability(name: &'static str, value: f64) -> Result<(), ModelConfigError> {
    let fits = (0.0..1.0).contains(&value);
    ModelConfigError::unless(fits, name, value, "a probability in [0, 1)")
}

/// Checks a number that models use as f32, in which it must not underflow or overflow.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is not positive, or if f32 cannot hold it.
pub(crate) fn check_positive(name: &'static str, value: f64) -> Result<(), ModelConfigError> {
    let fits = (value as f32).is_normal() && value > 0.0;
    ModelConfigError::unless(fits, name, value, "a positive number that f32 can hold")
}

/// Checks the standard deviation of initial weights.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is not in [0, 1000).
pub(crate) fn check_deviation(name: &'static str, value: f64) -> Result<(), ModelConfigError> {
    ModelConfigError::unless((0.0..1e3).contains(&value), name, value, "in [0, 1000)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::known_fields::Accepted;
    use serde_json::json;

    const NAMES: FieldNames = FieldNames {
        read: &[&["n_head", "n_positions"]],
        aliases: &[("n_ctx", "n_positions")],
        harmless: &["n_special"],
        fixed: &[FixedField {
            name: "is_causal",
            accepted: Accepted::True,
            remedy: "attention is causal; set it to true",
        }],
    };

    fn extra(fields: Value) -> Result<ExtraFields, ModelConfigError> {
        let fields = fields.as_object().unwrap().clone();
        let extra = ConfigFields::new(fields, NAMES, "test")?.into_extra()?;
        NAMES.check(&extra).map(|()| extra)
    }

    fn refused(fields: Value) -> String {
        let message = extra(fields.clone()).expect_err(&fields.to_string());
        message.to_string()
    }

    #[test]
    fn harmless_fields_and_nulls_are_kept() {
        let fields = json!({
            "top_k": 3, "n_special": 1, "task_specific_params": {"a": [1]}, "is_decoder": true,
            "rope_scaling": null, "sliding_window": null, "n_heads": null,
        });
        assert_eq!(Value::from(extra(fields.clone()).unwrap().0), fields);
    }

    #[test]
    fn other_fields_are_refused_at_any_other_value() {
        for value in [json!(4096), json!(false), json!(0), json!({}), json!(""), json!([])] {
            let message = refused(json!({ "sliding_window": value }));
            let expected = format!("`sliding_window` is {value}, but the model does not read");
            assert!(message.starts_with(&expected), "{message}");
            assert!(message.contains("set it to null"), "{message}");
        }
        for name in ["n_heads", "nhead", "n_cxt", "n_postions", "n_position"] {
            let message = refused(json!({ name: 1 }));
            assert!(message.contains(&format!("unknown field `{name}`")), "{message}");
        }
    }

    #[test]
    fn fixed_fields_are_accepted_at_one_value_and_not_kept() {
        let off = [json!(null), json!(false), json!(0), json!(0.0), json!({})];
        for FixedField { name, remedy, .. } in FIXED {
            for value in &off {
                let kept = extra(json!({ *name: value })).unwrap();
                assert_eq!(kept, ExtraFields::default(), "{name}");
            }
            for value in [json!(true), json!(1), json!({"a": 1}), json!([]), json!("")] {
                let message = refused(json!({ *name: value }));
                assert!(message.starts_with(&format!("`{name}` = {value} is not")), "{message}");
                assert!(message.ends_with(remedy), "{message}");
            }
        }
        assert_eq!(extra(json!({"is_causal": true})).unwrap(), ExtraFields::default());
        for value in [json!(false), json!(null), json!(1)] {
            let message = refused(json!({ "is_causal": value }));
            assert!(message.ends_with("attention is causal; set it to true"), "{message}");
        }
    }

    #[test]
    fn a_field_is_in_one_list() {
        let fixed = FIXED.iter().map(|field| field.name);
        let mut all: Vec<_> = HARMLESS.iter().copied().chain(fixed).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn overrides_must_be_known_or_replace_a_field() {
        let own = json!({"rope_theta": 1e4, "pad_token_id": 1, "quantization_config": {"bits": 4}});
        let overridden = |fields: Value| {
            NAMES.overridden(own.as_object().unwrap().clone(), fields.as_object().unwrap())
        };
        assert_eq!(overridden(json!({"rope_theta": 2})).unwrap()["rope_theta"], 2);
        assert_eq!(overridden(json!({"n_ctx": 8})).unwrap()["n_positions"], 8);
        // Null removes a field that the model does not know, and is a value of the others.
        assert!(!overridden(json!({"rope_theta": null})).unwrap().contains_key("rope_theta"));
        for name in ["pad_token_id", "quantization_config"] {
            assert_eq!(overridden(json!({ name: null })).unwrap()[name], Value::Null);
        }
        for value in [json!(0.1), json!(null)] {
            let message = overridden(json!({ "dropout": value })).unwrap_err().to_string();
            assert!(message.contains("unknown field `dropout`"), "{message}");
        }
    }
}
