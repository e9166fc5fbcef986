//! Class names, stored as `id2label` and `label2id` in `config.json`.
//!
//! Main type: [`ClassNames`].
//!
//! ```text
//! "id2label": {"0": "negative", "1": "positive"},
//! "label2id": {"negative": 0, "positive": 1}
//! ```
//!
//! The two fields contain the same information, and only one of them is required. Names must be
//! unique, because they are also used as labels in data files.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use thiserror::Error;

/// The field of `config.json` that maps class numbers to names.
pub(crate) const ID2LABEL: &str = "id2label";
/// The field of `config.json` that maps names to class numbers.
pub(crate) const LABEL2ID: &str = "label2id";

/// The names of all classes of a model, in the order of the class numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassNames(Vec<String>);

/// The reason why class names are rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ClassNamesError {
    /// A field does not have the required format.
    #[error("`{field}` is {found}; it must be {rule}")]
    Field {
        /// `id2label` or `label2id`.
        field: &'static str,
        /// The value found, shortened.
        found: String,
        /// The accepted values.
        rule: &'static str,
    },
    /// The two fields disagree.
    #[error("`id2label` and `label2id` give classes different names; keep one of them")]
    Conflict,
    /// Two classes have the same name, or a name is empty.
    #[error(
        "`id2label` gives class {class} the name `{name}`, which is {reason}; give another name"
    )]
    Name {
        /// The class.
        class: usize,
        /// Its name.
        name: String,
        /// The reason why the name is rejected.
        reason: &'static str,
    },
}

impl ClassNames {
    /// Returns class names from a list in the order of the class numbers.
    ///
    /// # Errors
    /// Returns [`ClassNamesError::Name`] if a name is empty or occurs twice.
    pub fn new(names: Vec<String>) -> Result<Self, ClassNamesError> {
        let mut seen = BTreeSet::new();
        for (class, name) in names.iter().enumerate() {
            let reason = match (name.is_empty(), seen.insert(name)) {
                (true, _) => "empty",
                (_, false) => "the name of another class too",
                _ => continue,
            };
            return Err(ClassNamesError::Name { class, name: name.clone(), reason });
        }
        Ok(Self(names))
    }

    /// Reads the class names from the fields of a `config.json`. Returns `None` if there are no
    /// names or only placeholders: `LABEL_0` and so on, which `transformers` writes, or the class
    /// numbers.
    ///
    /// # Errors
    /// Returns [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
    pub fn read(fields: &Map<String, Value>) -> Result<Option<Self>, ClassNamesError> {
        let by_id = fields.get(ID2LABEL).filter(|it| !it.is_null()).map(of_ids).transpose()?;
        let by_name = fields.get(LABEL2ID).filter(|it| !it.is_null()).map(of_names).transpose()?;
        let names = match (by_id, by_name) {
            (Some(names), Some(others)) if names != others => {
                return Err(ClassNamesError::Conflict);
            }
            (names, others) => names.or(others),
        };
        let Some(names) = names else { return Ok(None) };
        // Placeholders are not names. If they were kept, they would be compared with the labels in
        // the data.
        let is_placeholder = |(class, name): (usize, &String)| {
            *name == placeholder(class) || *name == class.to_string()
        };
        match names.iter().enumerate().all(is_placeholder) {
            true => Ok(None),
            false => Self::new(names).map(Some),
        }
    }

    /// Returns the names in the order of the class numbers.
    #[must_use]
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }

    /// Returns the `config.json` fields for a model with `num_classes` classes. Unnamed classes get
    /// the placeholder names of `transformers`.
    #[must_use]
    pub fn fields(names: Option<&Self>, num_classes: usize) -> Map<String, Value> {
        let names = names.map_or(&[][..], Self::as_slice);
        let name = |class: usize| names.get(class).cloned().unwrap_or_else(|| placeholder(class));
        let classes = || 0..num_classes;
        let id2label: Map<_, _> = classes().map(|it| (it.to_string(), json!(name(it)))).collect();
        let label2id: Map<_, _> = classes().map(|it| (name(it), json!(it))).collect();
        [(ID2LABEL.to_owned(), id2label.into()), (LABEL2ID.to_owned(), label2id.into())]
            .into_iter()
            .collect()
    }
}

/// Returns the placeholder name that `transformers` uses for an unnamed class.
fn placeholder(class: usize) -> String {
    format!("LABEL_{class}")
}

/// Parses a map from class numbers to names. JSON object keys are strings, so the numbers are
/// stored as text.
///
/// # Errors
/// Returns [`ClassNamesError::Field`] if the value is not an object with a name for each class.
fn of_ids(field: &Value) -> Result<Vec<String>, ClassNamesError> {
    let pairs = field.as_object().into_iter().flatten();
    let pairs = pairs.map(|(id, name)| Some((id.parse().ok()?, name.as_str()?.to_owned())));
    let rule = "an object with a name for each class: {\"0\": \"bad\", \"1\": \"good\"}";
    in_order(pairs, ID2LABEL, field, rule)
}

/// Parses a map from names to class numbers.
///
/// # Errors
/// Returns [`ClassNamesError::Field`] if the value is not an object with the number of each class
/// from 0.
fn of_names(field: &Value) -> Result<Vec<String>, ClassNamesError> {
    let pairs = field.as_object().into_iter().flatten();
    let pairs = pairs.map(|(name, id)| Some((usize::try_from(id.as_u64()?).ok()?, name.clone())));
    let rule = "an object with the class of each name: {\"bad\": 0, \"good\": 1}";
    in_order(pairs, LABEL2ID, field, rule)
}

/// Returns the names in the order of the class numbers. The class numbers must be 0, 1, 2 and so
/// on, each exactly once.
fn in_order(
    pairs: impl Iterator<Item = Option<(usize, String)>>,
    field: &'static str,
    found: &Value,
    rule: &'static str,
) -> Result<Vec<String>, ClassNamesError> {
    let pairs: Option<Vec<_>> = pairs.collect();
    let sorted = pairs.map(|mut pairs| {
        // As texts, 10 comes before 2.
        pairs.sort();
        pairs
    });
    let complete = |pairs: &Vec<(usize, String)>| {
        !pairs.is_empty() && pairs.iter().map(|(class, _)| *class).eq(0..pairs.len())
    };
    match sorted.filter(complete) {
        Some(pairs) => Ok(pairs.into_iter().map(|(_, name)| name).collect()),
        None => {
            let found = found.to_string().chars().take(80).collect();
            Err(ClassNamesError::Field { field, found, rule })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: Value) -> Result<Option<ClassNames>, ClassNamesError> {
        let Value::Object(fields) = fields else { panic!("not an object") };
        ClassNames::read(&fields)
    }

    fn names(names: &[&str]) -> ClassNames {
        ClassNames::new(names.iter().map(|&name| name.to_owned()).collect()).unwrap()
    }

    #[test]
    fn names_are_read_in_the_order_of_their_classes() {
        let expected = Some(names(&["bad", "good"]));
        assert_eq!(read(json!({"id2label": {"1": "good", "0": "bad"}})).unwrap(), expected);
        assert_eq!(read(json!({"label2id": {"good": 1, "bad": 0}})).unwrap(), expected);
        let both = ClassNames::fields(expected.as_ref(), 2);
        assert_eq!(ClassNames::read(&both).unwrap(), expected);
        assert_eq!(both["id2label"], json!({"0": "bad", "1": "good"}));
        let more: Vec<_> = (0..12).map(|class| format!("name {class}")).collect();
        let fields = ClassNames::fields(Some(&ClassNames::new(more.clone()).unwrap()), 12);
        assert_eq!(ClassNames::read(&fields).unwrap().unwrap().as_slice(), more);
    }

    #[test]
    fn placeholders_are_no_names() {
        assert_eq!(read(json!({})).unwrap(), None);
        assert_eq!(read(json!({"id2label": null})).unwrap(), None);
        assert_eq!(read(json!({"id2label": {"0": "0", "1": "1"}})).unwrap(), None);
        assert_eq!(ClassNames::read(&ClassNames::fields(None, 3)).unwrap(), None);
        assert_eq!(ClassNames::fields(None, 2)["label2id"], json!({"LABEL_0": 0, "LABEL_1": 1}));
    }

    #[test]
    fn what_does_not_name_each_class_once_is_refused() {
        for (fields, expected) in [
            (json!({"id2label": ["bad", "good"]}), "`id2label` is [\"bad\",\"good\"]; it must be"),
            (json!({"id2label": {}}), "it must be an object with a name for each class"),
            (json!({"id2label": {"1": "a", "2": "b"}}), "it must be"),
            (json!({"id2label": {"0": 5}}), "it must be"),
            (json!({"label2id": {"a": -1}}), "`label2id` is"),
            (
                json!({"id2label": {"0": "a", "1": "a"}}),
                "class 1 the name `a`, which is the name of",
            ),
            (json!({"id2label": {"0": ""}}), "which is empty"),
            (json!({"id2label": {"0": "a"}, "label2id": {"b": 0}}), "different names"),
        ] {
            let message = read(fields).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
