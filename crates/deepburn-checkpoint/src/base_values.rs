//! The values of a parameter that a checkpoint omits.
//!
//! Main type: [`BaseValues`]. A frozen parameter has the same values in every checkpoint of a run:
//! the base model's. A checkpoint that omits it stores a hash of these values, with which other
//! values are refused.

use serde::{Deserialize, Serialize};

use crate::{CheckpointError, ElementType};

/// The element type and a hash of a frozen parameter's values. A base model has the values
/// themselves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseValues {
    /// The type in which the run held the parameter.
    pub element: ElementType,
    /// The BLAKE3 hash of all values in this type, as hexadecimal digits. It does not depend on
    /// ranks and shards.
    pub checksum: String,
}

impl BaseValues {
    /// Hashes all values of a parameter, which are given in row-major order and little-endian.
    pub fn of(element: ElementType, values: &[u8]) -> Self {
        Self::with_hash(element, *blake3::hash(values).as_bytes())
    }

    /// Returns the values of which `hash` is the BLAKE3 hash.
    pub fn with_hash(element: ElementType, hash: [u8; 32]) -> Self {
        Self { element, checksum: blake3::Hash::from_bytes(hash).to_hex().to_string() }
    }

    /// Checks that `found` are these values of the parameter `path`.
    ///
    /// # Errors
    /// Returns [`CheckpointError::OtherBase`] for another type or other values.
    pub fn check(&self, path: &str, found: &Self) -> Result<(), CheckpointError> {
        let Self { element, checksum } = self;
        let reason = if found.element != *element {
            format!(
                "its values were hashed as {element} and are {} here, which cannot be compared; use the same precision",
                found.element
            )
        } else if found.checksum != *checksum {
            format!(
                "its values have the hash {checksum} there and {} here; give the base model with which the checkpoint was \
                 trained, unchanged",
                found.checksum
            )
        } else {
            return Ok(());
        };
        Err(CheckpointError::OtherBase { path: path.to_owned(), reason })
    }
}
