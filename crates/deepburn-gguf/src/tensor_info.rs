//! The description of a tensor in the header.

use crate::value::encode_string;
use crate::{GgufError, TensorType};

/// Name, type, shape and position of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    name: String,
    tensor_type: TensorType,
    shape: Vec<u64>,
    offset: u64,
    size: u64,
}

impl TensorInfo {
    /// The longest name in bytes (`GGML_MAX_NAME` of llama.cpp, without the final zero).
    pub const MAX_NAME_LEN: usize = 63;
    /// The largest number of dimensions (`GGML_MAX_DIMS` of llama.cpp).
    pub const MAX_DIMS: usize = 4;

    /// Returns the description of a tensor whose values begin at `offset`, in bytes from the start
    /// of all values. `shape` has the outermost dimension first, as in PyTorch, and the row length
    /// last. The file has the reverse order.
    ///
    /// # Errors
    /// Returns an error if the name is empty or too long, if the shape has no or more than four
    /// dimensions or a dimension of 0, if the row length is not a multiple of the block length, or
    /// if there are more than 2^63 - 1 elements or bytes.
    pub(crate) fn new(
        name: String,
        tensor_type: TensorType,
        shape: Vec<u64>,
        offset: u64,
    ) -> Result<Self, GgufError> {
        if name.is_empty() || name.len() > Self::MAX_NAME_LEN {
            let problem =
                format!("a name of {} bytes; allowed are 1 to {}", name.len(), Self::MAX_NAME_LEN);
            return Err(GgufError::tensor(&name, problem));
        }
        if shape.is_empty() || shape.len() > Self::MAX_DIMS || shape.contains(&0) {
            let problem =
                format!("shape {shape:?}; allowed are 1 to {} dimensions from 1", Self::MAX_DIMS);
            return Err(GgufError::tensor(&name, problem));
        }
        let row_len = shape.last().copied().unwrap_or(0);
        if !row_len.is_multiple_of(tensor_type.block_len() as u64) {
            let problem = format!(
                "rows of {row_len} elements; {tensor_type} needs a multiple of {}; use a type with smaller blocks",
                tensor_type.block_len()
            );
            return Err(GgufError::tensor(&name, problem));
        }
        // llama.cpp computes with signed integers.
        let limit = |number: &u64| *number <= i64::MAX as u64;
        let numel = shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
        let size = numel.filter(limit).and_then(|numel| tensor_type.size_of(numel)).filter(limit);
        let Some(size) = size else {
            let problem = format!("shape {shape:?} has more than 2^63 - 1 elements or bytes");
            return Err(GgufError::tensor(&name, problem));
        };
        Ok(Self { name, tensor_type, shape, offset, size })
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of the elements.
    #[must_use]
    pub fn tensor_type(&self) -> TensorType {
        self.tensor_type
    }

    /// Returns the shape, the outermost dimension first, as in PyTorch.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the number of elements of a row, the last dimension.
    #[must_use]
    pub fn row_len(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn num_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the position of the first byte, from the start of all values.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the size in bytes, without padding.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Appends the description in the format of the file.
    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        encode_string(&self.name, into);
        into.extend((self.shape.len() as u32).to_le_bytes());
        into.extend(self.shape.iter().rev().flat_map(|dim| dim.to_le_bytes()));
        into.extend(self.tensor_type.id().to_le_bytes());
        into.extend(self.offset.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_descriptions_are_errors() {
        let info = |name: &str, tensor_type, shape: &[u64]| {
            TensorInfo::new(name.to_owned(), tensor_type, shape.to_vec(), 0)
        };
        let good = info("a", TensorType::Q8_0, &[3, 64]).unwrap();
        assert_eq!((good.row_len(), good.num_elements(), good.size()), (64, 192, 204));
        assert!(info("", TensorType::F32, &[1]).is_err());
        assert!(info(&"n".repeat(63), TensorType::F32, &[1]).is_ok());
        assert!(info(&"n".repeat(64), TensorType::F32, &[1]).is_err());
        for shape in [&[][..], &[0], &[3, 0], &[1, 1, 1, 1, 1]] {
            assert!(info("a", TensorType::F32, shape).is_err());
        }
        // The number of elements is a multiple of the block, but the rows are not.
        let error = info("a", TensorType::Q8_0, &[2, 16]).unwrap_err().to_string();
        assert!(error.contains("`a`") && error.contains("multiple of 32"), "{error}");
        assert!(info("a", TensorType::F32, &[1 << 32, 1 << 32]).is_err());
        assert!(info("a", TensorType::F32, &[1 << 61]).is_err());
        assert!(info("a", TensorType::F32, &[1 << 60]).is_ok());
    }
}
