//! The gradient of an embedding, kept as the rows that were looked up.
//!
//! A vocabulary of 50,000 rows of which a micro-batch touches a few hundred would otherwise be
//! filled with zeros, added to and reduced as a whole; and where the embedding is tied to the
//! output layer, a second array as large would be added to the first. Nothing is whole here until
//! each owner reduces its shard.

use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata};

use crate::array::in_type;

/// Rows of a gradient: row `indices[i]` gets `values[i]`.
#[derive(Debug, Clone)]
pub(crate) struct RowBlock<B: Backend> {
    /// Row numbers, shape `[k]`; a number may occur more than once.
    pub(crate) indices: B::IntTensorPrimitive,
    /// Rows to add, shape `[k, row length]`.
    pub(crate) values: B::FloatTensorPrimitive,
}

/// A gradient of shape `[rows, row length]`: an optional dense part plus blocks of rows.
#[derive(Debug, Clone)]
pub struct RowGradient<B: Backend> {
    shape: Shape,
    dense: Option<B::FloatTensorPrimitive>,
    blocks: Vec<RowBlock<B>>,
}

impl<B: Backend> RowGradient<B> {
    /// The gradient of looking up `indices` of any shape `[..]` in a table of `shape`, given the
    /// gradient `[.., row length]` of what was looked up.
    pub(crate) fn new(
        shape: Shape,
        indices: B::IntTensorPrimitive,
        output_grad: B::FloatTensorPrimitive,
    ) -> Self {
        let count = indices.shape().num_elements();
        let row_len = shape[1];
        let block = RowBlock {
            indices: B::int_reshape(indices, Shape::from(vec![count])),
            values: B::float_reshape(output_grad, Shape::from(vec![count, row_len])),
        };
        Self { shape, dense: None, blocks: vec![block] }
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(crate) fn dtype(&self) -> DType {
        self.blocks[0].values.dtype()
    }

    pub(crate) fn device(&self) -> B::Device {
        B::float_device(&self.blocks[0].values)
    }

    pub(crate) fn dense(&self) -> Option<&B::FloatTensorPrimitive> {
        self.dense.as_ref()
    }

    pub(crate) fn blocks(&self) -> &[RowBlock<B>] {
        &self.blocks
    }

    /// Adds an ordinary gradient.
    pub(crate) fn add_dense(mut self, tensor: B::FloatTensorPrimitive) -> Self {
        self.dense = Some(match self.dense {
            Some(dense) => B::float_add(dense, tensor),
            None => tensor,
        });
        self
    }

    /// Adds another gradient of rows.
    pub(crate) fn add_rows(mut self, other: Self) -> Self {
        self.blocks.extend(other.blocks);
        match other.dense {
            Some(dense) => self.add_dense(dense),
            None => self,
        }
    }

    /// Multiplies every element.
    pub(crate) fn scale(mut self, factor: f64) -> Self {
        self.dense = self.dense.map(|dense| B::float_mul_scalar(dense, factor.into()));
        for block in &mut self.blocks {
            block.values = B::float_mul_scalar(block.values.clone(), factor.into());
        }
        self
    }

    /// The gradient in elements of `dtype`.
    pub(crate) fn in_type(mut self, dtype: FloatDType) -> Self {
        self.dense = self.dense.map(|dense| in_type::<B>(dense, dtype));
        for block in &mut self.blocks {
            block.values = in_type::<B>(block.values.clone(), dtype);
        }
        self
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        let values = self.blocks.iter().map(|block| block.values.shape().num_elements());
        let dense = self.dense.as_ref().map_or(0, |dense| dense.shape().num_elements());
        (values.sum::<usize>() + dense) * self.dtype().size()
    }

    /// The gradient as an ordinary tensor.
    pub(crate) fn into_dense(self) -> B::FloatTensorPrimitive {
        let start = match self.dense {
            Some(dense) => dense,
            None => B::float_zeros(
                self.shape.clone(),
                &B::float_device(&self.blocks[0].values),
                self.blocks[0].values.dtype().into(),
            ),
        };
        self.blocks
            .into_iter()
            .fold(start, |sum, block| B::float_select_add(sum, 0, block.indices, block.values))
    }
}
