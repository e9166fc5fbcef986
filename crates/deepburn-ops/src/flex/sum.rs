//! Sums of all elements of a tensor, in a fixed order.
//!
//! burn-flex divides the sum of a large f32 tensor among threads, and rayon chooses the order in
//! which the sums of the parts are added. The last bits of such a sum differ from run to run, so it
//! is computed here:
//!
//! ```text
//! elements   | part 0 | part 1 | part 2 | ...     64 Ki elements each, by any thread
//!                 v        v        v
//! sums       |   s0   |   s1   |   s2   | ...
//!                 '--------+--------'-> sum       by one thread
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, Shape, Slice, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use rayon::prelude::*;

use super::array::{blocks, contiguous};
use crate::host::{float_from_host, float_into_host};
use crate::sum::SumOps;

/// The number of elements from which on burn-flex divides a sum of f32 elements among threads.
const LARGE: usize = 4 * 1024 * 1024;

/// The number of elements of a part, the same as burn-flex's.
const PART: usize = 64 * 1024;

/// burn-flex adds the elements of tensors that are smaller or of other types on one thread.
impl SumOps for Flex {
    /// Copies a large tensor that is not contiguous.
    fn sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_divided(&tensor) {
            return Self::float_sum(tensor);
        }
        let len = tensor.shape().num_elements();
        let flat = Self::float_reshape(contiguous(&tensor), Shape::from(vec![len]));
        let sums: Vec<f32> = blocks(len, PART)
            .map(|part| {
                let part = Self::float_slice(flat.clone(), &[Slice::from(part)]);
                float_into_host::<Self>(Self::float_sum(part))[0]
            })
            .collect();
        let count = sums.len();
        Self::sum(float_from_host::<Self>(TensorData::new(sums, vec![count]), &FlexDevice))
    }

    fn mean(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_divided(&tensor) {
            return Self::float_mean(tensor);
        }
        let len = tensor.shape().num_elements() as f32;
        Self::float_div_scalar(Self::sum(tensor), len.into())
    }
}

/// Returns whether burn-flex divides the sum of this tensor among threads.
fn is_divided(tensor: &FlexTensor) -> bool {
    tensor.dtype() == DType::F32 && tensor.shape().num_elements() >= LARGE
}
