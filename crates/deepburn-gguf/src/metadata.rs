//! The key-value pairs of a file.

use std::collections::HashMap;

use crate::value::encode_string;
use crate::{GgufError, Value};

/// The key of the alignment of tensors, a `u32`.
pub(crate) const ALIGNMENT: &str = "general.alignment";

/// Metadata: values with unique keys, in file order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    pairs: Vec<(String, Value)>,
    /// The position of each key.
    positions: HashMap<String, usize>,
}

impl Metadata {
    /// The largest number of pairs. The largest models have about a hundred.
    pub const MAX_LEN: usize = 1 << 16;
    /// The longest key in bytes, which the format defines.
    pub const MAX_KEY_LEN: usize = (1 << 16) - 1;

    /// Returns metadata without pairs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a pair.
    ///
    /// # Errors
    /// Returns an error if the key is empty, longer than [`MAX_KEY_LEN`](Self::MAX_KEY_LEN) or not
    /// new, or if there are [`MAX_LEN`](Self::MAX_LEN) pairs.
    pub fn push(
        &mut self,
        key: impl Into<String>,
        value: impl Into<Value>,
    ) -> Result<(), GgufError> {
        let (key, value) = (key.into(), value.into());
        if key.is_empty() || key.len() > Self::MAX_KEY_LEN {
            let problem =
                format!("a key of {} bytes; allowed are 1 to {}", key.len(), Self::MAX_KEY_LEN);
            return Err(GgufError::metadata(&key, problem));
        }
        if self.pairs.len() == Self::MAX_LEN {
            let problem = format!("is one key too many; at most {} are supported", Self::MAX_LEN);
            return Err(GgufError::metadata(&key, problem));
        }
        if self.positions.contains_key(&key) {
            return Err(GgufError::metadata(&key, "occurs twice; keys must be unique"));
        }
        self.positions.insert(key.clone(), self.pairs.len());
        self.pairs.push((key, value));
        Ok(())
    }

    /// Returns the value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        let (_, value) = self.pairs.get(*self.positions.get(key)?)?;
        Some(value)
    }

    /// Returns the pairs in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.pairs.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Returns the number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Returns whether there are no pairs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Appends all pairs in the format of the file.
    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        for (key, value) in &self.pairs {
            encode_string(key, into);
            into.extend(value.type_id().to_le_bytes());
            value.encode(into);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique_and_short() {
        let mut metadata = Metadata::new();
        metadata.push("a", 1_u32).unwrap();
        assert!(metadata.push("", 1_u32).is_err());
        assert!(metadata.push("k".repeat(1 << 16), 1_u32).is_err());
        let error = metadata.push("a", 2_u32).unwrap_err().to_string();
        assert!(error.contains("`a`") && error.contains("unique"), "{error}");
        assert_eq!(metadata.get("a"), Some(&Value::U32(1)));
        assert_eq!(metadata.len(), 1);
    }
}
