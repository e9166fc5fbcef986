//! Errors of adapters.

use serde_json::Value;
use thiserror::Error;

/// The reason why an adapter cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LoraError {
    /// A field has the wrong type, is out of range, or contradicts another field.
    #[error("`{name}` is {value}, but it must be {rule}")]
    Value {
        /// The field.
        name: String,
        /// Its value as JSON.
        value: String,
        /// The accepted values.
        rule: String,
    },
    /// A field does not exist.
    #[error("`{name}` is not a field of LoRA; {hint}")]
    Unknown {
        /// The field.
        name: String,
        /// The nearest field, or a list of all fields.
        hint: String,
    },
    /// A feature of PEFT that is not supported.
    #[error("`{name}` is {value}, which is not supported: {consequence}")]
    Unsupported {
        /// The field.
        name: String,
        /// Its value as JSON.
        value: String,
        /// What would be computed wrongly, and the remedy.
        consequence: String,
    },
    /// A field selects no module, or a module that cannot be adapted.
    #[error("`{name}`: {reason}")]
    Module {
        /// The field.
        name: String,
        /// The problem and the remedy.
        reason: String,
    },
}

impl LoraError {
    /// Returns the error for a value that `read` does not accept. It proposes a value in quotes
    /// without them if `read` accepts it.
    pub(crate) fn mistyped<T>(
        name: &str,
        value: &Value,
        rule: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Self {
        let text = value.as_str().map(|text| text.trim().to_ascii_lowercase());
        let meant = text.and_then(|text| serde_json::from_str::<Value>(&text).ok());
        match meant.filter(|meant| read(meant).is_some()) {
            Some(meant) => Self::value(name, value, format!("{rule}; write {meant}")),
            None => Self::value(name, value, rule),
        }
    }

    /// Returns the error for a value that is not accepted.
    pub(crate) fn value(name: &str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Value { name: name.to_owned(), value: value.to_string(), rule: rule.into() }
    }

    /// Returns the error for the modules that a field selects.
    pub(crate) fn module(name: &str, reason: impl Into<String>) -> Self {
        Self::Module { name: name.to_owned(), reason: reason.into() }
    }
}
