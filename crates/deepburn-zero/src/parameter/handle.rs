//! A handle to a parameter, which the tensors of the module hold.

use std::sync::Arc;

use burn_backend::{DType, Shape, TensorMetadata};
use deepburn_ops::SumOps;

use super::Parameter;
use crate::parameter::{Storage, View, WeightOperand};
use crate::session;

/// A handle to a parameter with recorded views.
///
/// Computing a view of a sharded parameter would gather it. Views are therefore only recorded,
/// together with the shape and type of their result, and applied when an op reads the data.
/// Autodiff can save such a handle for backward without holding any data.
#[derive(Debug, Clone)]
pub struct ParameterView<B: SumOps> {
    /// The parameter, of this model or of another one on the thread.
    pub(crate) parameter: Arc<Parameter<B>>,
    /// The views in the order in which they are applied to the whole parameter.
    views: Vec<View>,
    /// The shape after all views.
    shape: Shape,
    /// The element type after all views.
    dtype: DType,
}

impl<B: SumOps> ParameterView<B> {
    /// Returns a handle without views.
    pub(crate) fn new(parameter: Arc<Parameter<B>>) -> Self {
        let (shape, dtype) = (parameter.shape().clone(), parameter.dtype());
        Self { parameter, views: Vec::new(), shape, dtype }
    }

    /// Records `view` after the existing views.
    pub(crate) fn viewed(mut self, view: View) -> Self {
        self.shape = view.shape(self.shape);
        self.dtype = view.dtype(self.dtype);
        self.views.push(view);
        self
    }

    /// Returns the parameter if there are no views.
    pub(crate) fn whole(&self) -> Option<&Arc<Parameter<B>>> {
        self.views.is_empty().then_some(&self.parameter)
    }

    /// Reads the parameter for an op, applies the views and counts the read. At stage 3 this
    /// gathers the parameter from all ranks unless there is a gathered copy.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if a collective fails, and with a
    /// message if the engine was dropped or if another thread reads a sharded parameter.
    pub(crate) fn read(self) -> B::FloatTensorPrimitive {
        self.count_read();
        self.read_again()
    }

    /// Reads the parameter as [`read`](Self::read) does, for an op that can use quantized blocks.
    ///
    /// # Panics
    /// Panics for the same reasons as [`read`](Self::read).
    pub(crate) fn read_weight(self) -> WeightOperand<B> {
        self.count_read();
        self.read_weight_again()
    }

    /// Reads the parameter as [`read_again`](Self::read_again) does, for an op that can use
    /// quantized blocks.
    ///
    /// # Panics
    /// Panics for the same reasons as [`read`](Self::read).
    pub(crate) fn read_weight_again(self) -> WeightOperand<B> {
        let storage = self.parameter.storage();
        if storage == Storage::Plain {
            return WeightOperand::Dense(self.read_again());
        }
        // A product can use the blocks of a transposed matrix. Any other view needs the elements.
        let Some(is_transposed) = View::transpositions(&self.views, self.parameter.shape()) else {
            return WeightOperand::Dense(self.read_again());
        };
        session::note_read(self.parameter.ledger());
        let stored = self.parameter.read_stored();
        match storage.matrix::<B>(&stored, self.parameter.shape(), self.dtype) {
            Some(matrix) if is_transposed => WeightOperand::Quantized(matrix.transposed()),
            Some(matrix) => WeightOperand::Quantized(matrix),
            None => WeightOperand::Dense(self.parameter.elements(stored)),
        }
    }

    /// Counts a read in the operations of the current call.
    fn count_read(&self) {
        session::with_counter(|counter| counter.read(self.parameter.path()));
    }

    /// Reads the parameter for an op that is recomputed in backward. The read is not counted,
    /// because model FLOPs do not include recomputation.
    ///
    /// # Panics
    /// Panics for the same reasons as [`read`](Self::read).
    pub(crate) fn read_again(self) -> B::FloatTensorPrimitive {
        session::note_read(self.parameter.ledger());
        let whole = self.parameter.read();
        self.views.iter().fold(whole, |tensor, view| view.apply::<B>(tensor))
    }
}

impl<B: SumOps> TensorMetadata for ParameterView<B> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }
}
