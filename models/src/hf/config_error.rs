//! The reason why a field of a `config.json` is rejected.
//!
//! Main type: [`ModelConfigError`].

use serde_json::Value;
use thiserror::Error;

/// The reason why a configuration is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelConfigError {
    /// The text is not a JSON object.
    #[error("the config is not a JSON object: {0}")]
    Syntax(String),
    /// A field has the wrong type.
    #[error("{0}")]
    Field(String),
    /// The model does not have this field.
    #[error("unknown field `{name}` (value {value}){hint}")]
    Unknown {
        /// The field.
        name: String,
        /// Its value, as JSON.
        value: String,
        /// "; did you mean ..?" with the nearest known name, or the list of all names that the
        /// model reads.
        hint: String,
    },
    /// The model does not read this field, which may change what the model computes.
    #[error(
        "`{name}` is {value}, but the model does not read this field, so its outputs may be wrong; set it to null to use \
         the model without it"
    )]
    Unread {
        /// The field.
        name: String,
        /// Its value, as JSON.
        value: String,
    },
    /// A value is out of range or has the wrong type.
    #[error("`{name}` is {value}, but it must be {rule}")]
    Value {
        /// The field.
        name: &'static str,
        /// What was found.
        value: String,
        /// The accepted values.
        rule: String,
    },
    /// `transformers` supports this value, but this implementation does not.
    #[error("`{name}` = {value} is not supported: {remedy}")]
    Unsupported {
        /// The field.
        name: &'static str,
        /// What was found.
        value: String,
        /// How to fix the problem.
        remedy: &'static str,
    },
    /// A field is given under two names with different values.
    #[error(
        "`{alias}` is {alias_value} and `{name}` is {value}, but they name the same field; keep one"
    )]
    Conflict {
        /// The alias.
        alias: &'static str,
        /// Its value, as JSON.
        alias_value: String,
        /// The field.
        name: &'static str,
        /// Its value, as JSON.
        value: String,
    },
}

/// Constructors that are shared by the models, and the field of an error.
impl ModelConfigError {
    /// Returns the field that the model does not read or support, and that an override can
    /// therefore remove or replace; `None` for an error of another kind.
    #[must_use]
    pub fn unsupported_field(&self) -> Option<&str> {
        match self {
            Self::Unread { name, .. } => Some(name),
            Self::Unsupported { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Returns the error for a value that violates `rule`, the end of a sentence that starts with
    /// "it must be".
    pub(crate) fn value(name: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Value { name, value: value.to_string(), rule: rule.into() }
    }

    /// Returns the error of [`value`](Self::value) unless the value `fits`.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if it does not fit.
    pub(crate) fn unless(
        fits: bool,
        name: &'static str,
        value: impl ToString,
        rule: impl Into<String>,
    ) -> Result<(), Self> {
        match fits {
            true => Ok(()),
            false => Err(Self::value(name, value, rule)),
        }
    }

    /// Returns the error for a value that `accepts` rejects, like [`value`](Self::value). It
    /// proposes a number or a boolean in quotes without them, if `accepts` accepts it then.
    pub(super) fn mistyped(
        name: &'static str,
        value: &Value,
        rule: &str,
        accepts: impl Fn(&Value) -> bool,
    ) -> Self {
        match unquoted(value).filter(accepts) {
            Some(meant) => Self::value(name, value, format!("{rule}; write {meant}")),
            None => Self::value(name, value, rule),
        }
    }
}

/// Returns the number or boolean that a string contains.
pub(crate) fn unquoted(value: &Value) -> Option<Value> {
    let text = value.as_str()?.trim().to_ascii_lowercase();
    serde_json::from_str(&text).ok().filter(|inner: &Value| inner.is_number() || inner.is_boolean())
}
