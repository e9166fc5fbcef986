//! The sparse gradient of an embedding, which has only the rows that were looked up.
//!
//! A micro-batch may look up a few hundred rows of a vocabulary of 50,000. A dense gradient would
//! fill, add and reduce zeros for all other rows. If the embedding is tied to the output layer, the
//! dense gradient of this layer would also be added to a second array of the same size. A
//! [`RowGradient`] holds both parts separately:
//!
//! ```text
//!  gradient [50257, 768]  =  dense            None, or the gradient of the tied output layer
//!                          + block 0          indices [k0], values [k0, 768]    micro-batch lookup
//!                          + block 1          indices [k1], values [k1, 768]    another lookup
//! ```
//!
//! Adding two such gradients concatenates their blocks. The rows are added to a dense array only
//! when each rank reduces its shard, in rank order and only for the rows of that shard: in host
//! memory by `array/host_sum.rs`, on a device by its kernel ([`SumOps::add_rows`]).
//!
//! A gradient holds the memory of the rows and their indices, and of the dense part if there is
//! one. Between processes, only the rows in the range of the receiver's shard are sent
//! ([`RowGradient::encode`]).

use std::ops::Range;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_ops::{RowBlock, SumOps, float_from_host, int_from_host, int_into_host, read_float};

use crate::group::flat::{flat_range, flattened, in_type};

/// A gradient of shape `[rows, row length]`: an optional dense part plus blocks of rows.
///
/// It may represent a part of a gradient, such as the shard that a collective sends to one rank. A
/// part shares the blocks of the whole gradient and stores the range of flat elements that it
/// covers.
#[derive(Debug, Clone)]
pub struct RowGradient<B: Backend> {
    /// The shape of the whole gradient. A decoded part only has the row length, so its number of
    /// rows is the smallest number that covers the range.
    shape: Shape,
    /// The range of flat elements: all elements for a whole gradient. The blocks of a part may have
    /// rows outside of the range, which are ignored.
    range: Range<usize>,
    /// The type of all values.
    dtype: DType,
    /// The device, which is stored because there may be no tensors.
    device: B::Device,
    /// The dense part. For a whole gradient, it is flat or has the gradient's shape. For a part, it
    /// is the flat range.
    dense: Option<B::FloatTensorPrimitive>,
    /// The rows to add, in the order of their lookups.
    blocks: Vec<RowBlock<B>>,
}

impl<B: SumOps> RowGradient<B> {
    /// Returns the gradient of looking up `indices` of any shape `[..]` in a table of `shape`,
    /// given the gradient `[.., row length]` of the result.
    pub(crate) fn new(
        shape: Shape,
        indices: B::IntTensorPrimitive,
        output_grad: B::FloatTensorPrimitive,
    ) -> Self {
        let count = indices.shape().num_elements();
        let row_len = shape[1];
        let block = RowBlock::<B> {
            indices: B::int_reshape(indices, Shape::from(vec![count])),
            values: B::float_reshape(output_grad, Shape::from(vec![count, row_len])),
        };
        let dtype = block.values.dtype();
        let device = B::float_device(&block.values);
        Self {
            range: 0..shape.num_elements(),
            shape,
            dtype,
            device,
            dense: None,
            blocks: vec![block],
        }
    }

    /// Returns the gradient of a table in which nothing was looked up.
    pub(crate) fn empty(shape: Shape, dtype: DType, device: B::Device) -> Self {
        let range = 0..shape.num_elements();
        Self { shape, range, dtype, device, dense: None, blocks: Vec::new() }
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Removes the dense part and returns it, so that it can be added like an ordinary gradient.
    pub(crate) fn take_dense(&mut self) -> Option<B::FloatTensorPrimitive> {
        self.dense.take()
    }

    /// Returns the range of flat elements that the gradient covers.
    pub(crate) fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// Returns elements `range` of a whole gradient. The blocks are shared, and rows are selected
    /// only when the part is reduced or encoded.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        let dense = self.dense.as_ref().map(|dense| flat_range::<B>(dense, range.clone()));
        Self { range, dense, ..self.clone() }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn device(&self) -> B::Device {
        self.device.clone()
    }

    /// Returns the blocks, which may have rows outside of [`range`](Self::range).
    pub(crate) fn blocks(&self) -> &[RowBlock<B>] {
        &self.blocks
    }

    /// Adds an ordinary gradient of the same shape to the dense part.
    pub(crate) fn add_dense(mut self, tensor: B::FloatTensorPrimitive) -> Self {
        self.dense = Some(match self.dense {
            Some(dense) => B::float_add(dense, tensor),
            None => tensor,
        });
        self
    }

    /// Returns the gradient with a flat dense part. No gradient may be added to the result, because
    /// the shapes would not match.
    pub(crate) fn flattened(mut self) -> Self {
        self.dense = self.dense.map(flattened::<B>);
        self
    }

    /// Adds another gradient of the same table. Blocks are appended, not merged.
    pub(crate) fn add_rows(mut self, other: Self) -> Self {
        self.blocks.extend(other.blocks);
        match other.dense {
            Some(dense) => self.add_dense(dense),
            None => self,
        }
    }

    /// Multiplies every element by `factor`.
    pub(crate) fn scale(mut self, factor: f64) -> Self {
        self.dense = self.dense.map(|dense| B::float_mul_scalar(dense, factor.into()));
        for block in &mut self.blocks {
            block.values = B::float_mul_scalar(block.values.clone(), factor.into());
        }
        self
    }

    /// Returns the gradient with elements of `dtype`.
    pub(crate) fn in_type(mut self, dtype: FloatDType) -> Self {
        self.dtype = dtype.into();
        self.dense = self.dense.map(|dense| in_type::<B>(dense, dtype));
        for block in &mut self.blocks {
            block.values = in_type::<B>(block.values.clone(), dtype);
        }
        self
    }

    /// Returns the size of the values in bytes. The indices are not counted.
    pub(crate) fn bytes(&self) -> usize {
        let values = self.blocks.iter().map(|block| block.values.shape().num_elements());
        let dense = self.dense.as_ref().map_or(0, |dense| dense.shape().num_elements());
        (values.sum::<usize>() + dense) * self.dtype().size()
    }

    /// Converts the gradient to a dense tensor of [`shape`](Self::shape), which takes the memory of
    /// the whole table. It is used by stages that keep a whole gradient, and when a gradient is
    /// read.
    pub(crate) fn into_dense(self) -> B::FloatTensorPrimitive {
        // The dense part first, then rows in the order of lookups, as when a shard is reduced.
        let start = match self.dense {
            Some(dense) => B::float_reshape(dense, self.shape.clone()),
            None => B::float_zeros(self.shape.clone(), &self.device, self.dtype.into()),
        };
        self.blocks
            .into_iter()
            .fold(start, |sum, block| B::float_select_add(sum, 0, block.indices, block.values))
    }

    /// Encodes the range as bytes in native byte order. Rows outside of the range are omitted, so
    /// the size depends only on the rows of the part.
    ///
    /// ```text
    ///  4 × u64    number of rows k, length of a row, number of dense elements, start of the range
    ///  k × i64    row numbers in the whole gradient
    ///  k rows     values; a row that crosses an end of the range is sent whole
    ///  dense      the dense elements of the range, or nothing
    /// ```
    pub(crate) fn encode(&self) -> Vec<u8> {
        let row_len = self.shape[1];
        let row_bytes = row_len * self.dtype.size();
        let (mut indices, mut values) = (Vec::new(), Vec::new());
        for block in &self.blocks {
            let rows = read_float::<B>(block.values.clone());
            let numbers = int_into_host::<B>(block.indices.clone());
            for (number, row) in numbers.iter().zip(rows.bytes.chunks_exact(row_bytes.max(1))) {
                let start = *number as usize * row_len;
                // The row overlaps the range. A row that crosses an end of the range is sent whole;
                // the receiver cuts it.
                if start < self.range.end && self.range.start < start + row_len {
                    indices.push(*number);
                    values.extend_from_slice(row);
                }
            }
        }
        let dense = self.dense.clone().map(read_float::<B>);
        let dense = dense.as_ref().map_or(&[][..], |dense| &dense.bytes);
        let counts = [indices.len(), row_len, dense.len() / self.dtype.size(), self.range.start];
        let counts = counts.iter().flat_map(|count| (*count as u64).to_ne_bytes());
        let numbers = indices.iter().flat_map(|number| number.to_ne_bytes());
        counts.chain(numbers).chain(values).chain(dense.iter().copied()).collect()
    }

    /// Decodes the bytes that another process has [encoded](Self::encode) for `numel` elements of
    /// the same gradient.
    ///
    /// # Errors
    /// Returns an error if the lengths in the header do not match the number of bytes or `numel`.
    pub(crate) fn decode(
        bytes: &[u8],
        numel: usize,
        dtype: DType,
        device: &B::Device,
    ) -> Result<Self, String> {
        let wrong = || format!("{} bytes are not a row gradient of {numel} elements", bytes.len());
        let (counts, rest) = bytes.split_at_checked(32).ok_or_else(wrong)?;
        let counts = counts.chunks_exact(8).filter_map(|word| word.try_into().ok());
        let counts: Vec<usize> = counts.map(|word| u64::from_ne_bytes(word) as usize).collect();
        let [rows, row_len, dense_len, start] = counts[..] else { return Err(wrong()) };
        let size = dtype.size();
        // Each length of the header is compared with the bytes before memory is allocated for it.
        let values_len = rows.checked_mul(row_len).ok_or_else(wrong)?;
        let (indices, rest) = rest.split_at_checked(rows.saturating_mul(8)).ok_or_else(wrong)?;
        let (values, dense) =
            rest.split_at_checked(values_len.saturating_mul(size)).ok_or_else(wrong)?;
        // A dense part has all elements of the range or is absent. Otherwise the bytes are invalid.
        let whole = dense_len == 0 || dense_len == numel;
        if !whole || dense.len() != dense_len * size {
            return Err(wrong());
        }
        let tensor = |bytes: &[u8], shape: Vec<usize>| {
            float_from_host::<B>(TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype), device)
        };
        let indices = indices.chunks_exact(8).filter_map(|word| word.try_into().ok());
        let indices: Vec<i64> = indices.map(i64::from_ne_bytes).collect();
        let block = |indices| RowBlock {
            indices: int_from_host::<B>(indices, device),
            values: tensor(values, vec![rows, row_len]),
        };
        let range = start..start.checked_add(numel).ok_or_else(wrong)?;
        Ok(Self {
            // The encoded part only has the row length of the whole gradient.
            shape: Shape::from(vec![range.end.div_ceil(row_len.max(1)), row_len]),
            dtype,
            device: device.clone(),
            dense: (dense_len > 0).then(|| tensor(dense, vec![dense_len])),
            blocks: if rows > 0 { vec![block(indices)] } else { Vec::new() },
            range,
        })
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::{Flex, FlexDevice};
    use deepburn_comm::{Encoded, Form, Payload, Received, ReduceOp};
    use deepburn_ops::float_into_host;

    use super::*;
    use crate::DeviceArray;

    fn floats(
        values: &[f32],
        shape: &[usize],
    ) -> <Flex as burn_backend::BackendTypes>::FloatTensorPrimitive {
        float_from_host::<Flex>(TensorData::new(values.to_vec(), shape.to_vec()), &FlexDevice)
    }

    /// Returns a gradient of shape `[4, 3]` whose rows 2, 0 and 2 were looked up.
    fn gradient(first: f32, dense: bool) -> DeviceArray<Flex> {
        let values: Vec<f32> = (0..9).map(|i| first + i as f32).collect();
        let indices = int_from_host::<Flex>(vec![2, 0, 2], &FlexDevice);
        let rows =
            RowGradient::<Flex>::new(Shape::from(vec![4, 3]), indices, floats(&values, &[3, 3]));
        match dense {
            true => DeviceArray::SparseRows(rows.add_dense(floats(&[0.5; 12], &[4, 3]))),
            false => DeviceArray::SparseRows(rows),
        }
    }

    fn sum(parts: Vec<DeviceArray<Flex>>) -> Vec<f32> {
        float_into_host::<Flex>(DeviceArray::reduce(parts, 5, ReduceOp::Sum, 0).into_flat())
    }

    #[test]
    fn a_part_of_rows_reduces_to_the_same_bits_after_it_was_sent() {
        for (range, dense) in [(0..5, true), (5..10, false), (10..12, true), (3..6, false)] {
            let near = [gradient(1.0, dense), gradient(100.0, false)];
            let parts = near.each_ref().map(|array| array.part(range.clone()));
            let received = parts.each_ref().map(|part| {
                let Encoded { form, bytes } = part.encode();
                assert_eq!(form, Form::SparseRows);
                // A rank without its own rows also receives the rows of others.
                let home = DeviceArray::Dense(floats(&[0.0], &[1]));
                home.decode(form, Received::One(bytes.to_vec()), range.len()).unwrap()
            });
            let [expected, received] = [sum(parts.to_vec()), sum(received.to_vec())];
            assert_eq!(received, expected);
            let whole: Vec<f32> = near
                .map(|array| float_into_host::<Flex>(array.into_flat()))
                .into_iter()
                .reduce(|sum, other| sum.iter().zip(&other).map(|(a, b)| a + b).collect())
                .unwrap();
            assert_eq!(expected[..range.len()], whole[range]);
        }
    }

    /// The backend's ops reduce a dense part that is not contiguous, and its kernel adds the rows.
    #[test]
    fn rows_beside_any_dense_part_reduce_to_the_same_bits() {
        let values: Vec<f32> = (0..12).map(|i| 0.1 * i as f32).collect();
        let view = Flex::float_transpose(floats(&values, &[3, 4]));
        let copy = floats(&float_into_host::<Flex>(view.clone()), &[4, 3]);
        let sums = [view, copy].map(|dense| {
            let DeviceArray::SparseRows(rows) = gradient(1.7, false) else { unreachable!() };
            let parts = vec![DeviceArray::SparseRows(rows.add_dense(dense)), gradient(0.3, false)];
            float_into_host::<Flex>(DeviceArray::reduce(parts, 13, ReduceOp::Mean, 0).into_flat())
        });
        assert_eq!(sums[0], sums[1]);
    }

    #[test]
    fn only_rows_of_the_range_are_sent() {
        let size = |range| gradient(1.0, false).part(range).encode().bytes.len();
        let words = 4 * 8;
        let row = 8 + 3 * 4;
        let (row_0, none, row_2_twice) = (size(0..3), size(9..12), size(6..9));
        assert_eq!((row_0, none, row_2_twice), (words + row, words, words + 2 * row));
    }

    #[test]
    fn bytes_of_something_else_are_an_error() {
        let part = gradient(1.0, true).part(0..5);
        let bytes = part.encode().bytes;
        for len in [0, 31, 40, bytes.len() - 1] {
            assert!(
                part.decode(Form::SparseRows, Received::One(bytes[..len].to_vec()), 5).is_err(),
                "{len} bytes"
            );
        }
        assert!(part.decode(Form::SparseRows, Received::One(bytes.to_vec()), 6).is_err());
    }
}
