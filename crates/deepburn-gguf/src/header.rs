//! The header of a GGUF file.

use std::collections::HashMap;

use crate::metadata::ALIGNMENT;
use crate::{GgufError, Metadata, TensorInfo, TensorType, Value};

/// The first bytes of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
/// The version of the format.
pub(crate) const VERSION: u32 = 3;
/// The alignment of files that do not set it.
const DEFAULT_ALIGNMENT: u32 = 32;
/// The largest supported alignment.
const MAX_ALIGNMENT: u32 = 1 << 16;

/// Metadata and the list of tensors, in file order.
///
/// ```text
/// | GGUF | 3 | tensors | pairs | metadata | descriptions of tensors | pad | values | pad | values | pad | …
/// ```
///
/// Each tensor begins at a multiple of the alignment (32 bytes, or `general.alignment`) after the
/// header.
#[derive(Debug, Clone)]
pub struct GgufHeader {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// The index of each tensor by name.
    positions: HashMap<String, usize>,
    alignment: u64,
    data_len: u64,
}

impl GgufHeader {
    /// The largest number of tensors.
    pub const MAX_TENSORS: usize = 1 << 16;

    /// Returns a header without tensors.
    ///
    /// # Errors
    /// Returns an error if `general.alignment` is in `metadata` and is not a `u32` that is a power
    /// of two from 8 to 65536.
    pub fn new(metadata: Metadata) -> Result<Self, GgufError> {
        let alignment = match metadata.get(ALIGNMENT) {
            None => DEFAULT_ALIGNMENT,
            Some(Value::U32(alignment))
                if alignment.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(alignment) =>
            {
                *alignment
            }
            Some(Value::U32(other)) => {
                let problem =
                    format!("is {other}; it must be a power of two from 8 to {MAX_ALIGNMENT}");
                return Err(GgufError::metadata(ALIGNMENT, problem));
            }
            Some(_) => return Err(GgufError::metadata(ALIGNMENT, "must be a u32")),
        };
        Ok(Self {
            metadata,
            tensors: Vec::new(),
            positions: HashMap::new(),
            alignment: alignment.into(),
            data_len: 0,
        })
    }

    /// Appends a tensor. `shape` has the outermost dimension first, as in PyTorch, and the row
    /// length last.
    ///
    /// # Errors
    /// Returns an error that names the tensor if its name is empty, longer than 63 bytes or not
    /// new, if the shape has no or more than four dimensions or a dimension of 0, if the row length
    /// is not a multiple of the type's block length, or if the file would have more than 2^63 - 1
    /// bytes or [`MAX_TENSORS`](Self::MAX_TENSORS) tensors.
    pub fn push(
        &mut self,
        name: impl Into<String>,
        tensor_type: TensorType,
        shape: &[u64],
    ) -> Result<(), GgufError> {
        // The values begin where the padded values before end: files have no gaps.
        let info = TensorInfo::new(name.into(), tensor_type, shape.to_vec(), self.data_len)?;
        let name = info.name();
        if self.positions.contains_key(name) {
            return Err(GgufError::tensor(name, "occurs twice; names must be unique"));
        }
        if self.tensors.len() == Self::MAX_TENSORS {
            let problem =
                format!("is one tensor too many; at most {} are supported", Self::MAX_TENSORS);
            return Err(GgufError::tensor(name, problem));
        }
        // Both are below 2^63, so their sum does not overflow, but the padding may.
        let end = (self.data_len + info.size()).checked_next_multiple_of(self.alignment);
        let Some(end) = end.filter(|end| *end <= i64::MAX as u64) else {
            return Err(GgufError::tensor(name, "ends after 2^63 - 1 bytes"));
        };
        self.data_len = end;
        self.positions.insert(name.to_owned(), self.tensors.len());
        self.tensors.push(info);
        Ok(())
    }

    /// Returns the metadata.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the tensors in file order.
    #[must_use]
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the tensor with a name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(self.position(name)?)
    }

    /// Returns the index of the tensor with a name.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.positions.get(name).copied()
    }

    /// Returns the alignment of tensors in bytes.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Returns the size of all values in bytes, with the padding after each tensor.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Returns the size of the file in bytes.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.to_bytes().len() as u64 + self.data_len
    }

    /// Returns the start of the file up to the first tensor, including the padding.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        // The number of tensors comes before the number of pairs, although the tensors'
        // descriptions come after the pairs.
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        self.metadata.encode(&mut bytes);
        self.tensors.iter().for_each(|info| info.encode(&mut bytes));
        bytes.resize(bytes.len().next_multiple_of(self.alignment as usize), 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_aligned() {
        let mut metadata = Metadata::new();
        metadata.push(ALIGNMENT, 64_u32).unwrap();
        let mut header = GgufHeader::new(metadata).unwrap();
        header.push("a", TensorType::F32, &[3]).unwrap();
        header.push("b", TensorType::F16, &[2, 33]).unwrap();
        header.push("c", TensorType::Q8_0, &[32]).unwrap();
        let offsets: Vec<_> = header.tensors().iter().map(TensorInfo::offset).collect();
        assert_eq!(offsets, [0, 64, 256]);
        assert_eq!(header.data_len(), 320);
        assert_eq!(header.to_bytes().len() % 64, 0);
        assert!(header.push("a", TensorType::F32, &[3]).is_err());
        assert!(header.push("d", TensorType::F32, &[1 << 60]).is_ok());
        assert!(header.push("e", TensorType::F32, &[1 << 60]).is_err());
    }

    #[test]
    fn alignments_are_checked() {
        for (value, allowed) in [
            (Value::U32(8), true),
            (Value::U32(0), false),
            (Value::U32(48), false),
            (Value::U32(1 << 31), false),
            (Value::U64(32), false),
        ] {
            let mut metadata = Metadata::new();
            metadata.push(ALIGNMENT, value.clone()).unwrap();
            assert_eq!(GgufHeader::new(metadata).is_ok(), allowed, "{value:?}");
        }
    }
}
