//! What a classifier predicts, stored as `problem_type` in `config.json`.
//!
//! Main type: [`ProblemType`], with the values and the losses of `transformers`.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::config_error::ModelConfigError;

/// What a classifier predicts for each text. It determines the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemType {
    /// Numbers. The loss is the mean squared error.
    Regression,
    /// One class. The loss is the softmax cross-entropy.
    #[default]
    SingleLabelClassification,
    /// A set of classes. The loss is the binary cross-entropy of each class.
    MultiLabelClassification,
}

impl ProblemType {
    /// The field of `config.json`.
    pub const FIELD: &'static str = "problem_type";
    /// All values.
    pub const ALL: [Self; 3] =
        [Self::Regression, Self::SingleLabelClassification, Self::MultiLabelClassification];

    /// Returns the value of the field.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Regression => "regression",
            Self::SingleLabelClassification => "single_label_classification",
            Self::MultiLabelClassification => "multi_label_classification",
        }
    }

    /// Returns whether a text has one class. This is the only type that older versions of the
    /// program have.
    #[must_use]
    pub fn is_single_label(&self) -> bool {
        *self == Self::SingleLabelClassification
    }

    /// Returns the smallest number of outputs of a model.
    #[must_use]
    pub fn min_outputs(self) -> usize {
        match self {
            Self::SingleLabelClassification => 2,
            Self::Regression | Self::MultiLabelClassification => 1,
        }
    }

    /// Reads the field of a `config.json`. Returns `None` if it is missing or null.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] for another value.
    pub fn read(fields: &Map<String, Value>) -> Result<Option<Self>, ModelConfigError> {
        let value = match fields.get(Self::FIELD) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        match Self::ALL.into_iter().find(|it| value.as_str() == Some(it.name())) {
            Some(found) => Ok(Some(found)),
            None => {
                let names = Self::ALL.map(|it| format!("\"{}\"", it.name())).join(", ");
                Err(ModelConfigError::value(Self::FIELD, value, format!("one of {names}")))
            }
        }
    }

    /// Reads the field with serde. Null is the default, as in the files of `transformers`.
    ///
    /// # Errors
    /// Returns an error for another value.
    pub(crate) fn deserialize_nullable<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Self, D::Error> {
        let fields = Map::from_iter([(Self::FIELD.to_owned(), Value::deserialize(deserializer)?)]);
        Ok(Self::read(&fields).map_err(D::Error::custom)?.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<Option<ProblemType>, ModelConfigError> {
        ProblemType::read(json!({ "problem_type": value }).as_object().unwrap())
    }

    #[test]
    fn values_are_read_or_named() {
        assert_eq!(ProblemType::read(&Map::new()).unwrap(), None);
        assert_eq!(read(Value::Null).unwrap(), None);
        for value in ProblemType::ALL {
            assert_eq!(read(json!(value.name())).unwrap(), Some(value));
            assert_eq!(serde_json::to_value(value).unwrap(), value.name());
        }
        for value in [json!("multi_label"), json!(1), json!("Regression")] {
            let message = read(value).unwrap_err().to_string();
            assert!(message.contains("`problem_type` is") && message.contains("\"regression\", "));
        }
    }
}
