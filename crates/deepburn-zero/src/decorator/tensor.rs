//! The float tensors of [`Sharded`](crate::Sharded): data, or handles that produce data on demand.
//!
//! Autodiff, the model and the optimizer all use the type [`ZeroTensor`]. Its variants differ in
//! the memory that they hold:
//!
//! ```text
//!  variant      created by                                memory held
//!  Full         any op, data from outside                 the tensor
//!  Parameter    the module's handles, views of them       none; a read gathers
//!  Recorded     ops of a block that may be recomputed     until the block ends
//!  SparseRows   the backward pass of an embedding         the looked-up rows
//!  Deferred     weight gradients of a pipeline stage      the operands of the op
//!  Reduced      the gradient hook, in autodiff's map      none
//! ```
//!
//! Data has a ledger entry ([`Leased`]) that counts its bytes once, even if several views share the
//! memory. An op that needs the data calls [`ZeroTensor::into_full`]. All variants except `Reduced`
//! therefore behave like ordinary tensors in all ops. Reading a `Reduced` tensor panics with the
//! path of its parameter.

use std::sync::Arc;

use burn_backend::{Backend, DType, Shape, TensorMetadata};
use deepburn_ops::SumOps;

use crate::deferred::DeferredTensor;
use crate::gradient::ReportedGradient;
use crate::group::{DeviceArray, RowGradient};
use crate::parameter::{Parameter, ParameterView, View, WeightOperand};
use crate::recompute::tape::{Operand, RecordedTensor};
use crate::recompute::{BlockRecorder, Cost, note_read, recorder};
use crate::session::{FullTensor, Leased};

/// A float tensor of the decorated backend.
///
/// Autodiff saves these tensors for the backward pass, so they determine the training memory. A
/// saved parameter is a handle without data.
#[derive(Debug, Clone)]
pub enum ZeroTensor<B: SumOps> {
    /// Ordinary data, completely on this rank.
    Full(FullTensor<B>),
    /// A parameter with recorded views. It holds no data. An op that needs the data reads the
    /// parameter, which is gathered if it is sharded.
    Parameter(ParameterView<B>),
    /// An activation of a block that backward may recompute. It holds data until the block ends,
    /// and again after backward has read the block.
    Recorded(RecordedTensor<B>),
    /// The sparse gradient of an embedding. It holds only the rows that were looked up. It is
    /// boxed, because every op moves tensors, and unboxed it would double their size.
    SparseRows(Box<RowGradient<B>>),
    /// The gradient of a weight that a pipeline stage computes later. It holds the operands of its
    /// op.
    Deferred(DeferredTensor<B>),
    /// A gradient that was passed on for reduction. It holds no data.
    Reduced(ReducedGradient<B>),
}

/// The marker in autodiff's container for a gradient that was passed on for reduction. It only has
/// the metadata that autodiff may request.
#[derive(Debug, Clone)]
pub struct ReducedGradient<B: Backend> {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: B::Device,
    /// The module path of the parameter, for the error message of a read.
    pub(crate) path: Arc<str>,
}

impl<B: SumOps> ZeroTensor<B> {
    /// Wraps the result of an op and counts it in the ledger as an activation.
    pub(crate) fn full(tensor: B::FloatTensorPrimitive) -> Self {
        Self::Full(Leased::new(tensor))
    }

    /// Returns the sparse gradient of an embedding.
    pub(crate) fn sparse_rows(rows: RowGradient<B>) -> Self {
        Self::SparseRows(Box::new(rows))
    }

    /// Returns the handle of a parameter.
    pub(crate) fn parameter(parameter: Arc<Parameter<B>>) -> Self {
        Self::Parameter(ParameterView::new(parameter))
    }

    /// Returns the data. It is gathered from all ranks if it is sharded, and recomputed if it was
    /// freed. The result no longer has a ledger entry.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) as payload if a collective fails,
    /// because tensor ops cannot return errors. [`run_ranks`](deepburn_comm::run_ranks) converts it
    /// back to an error. Panics with a message if the gradient was passed on for reduction.
    // Inlined for the usual case, because a call would copy the tensor.
    #[inline(always)]
    pub fn into_full(self) -> B::FloatTensorPrimitive {
        match self {
            Self::Full(full) => full.tensor,
            other => other.produce(),
        }
    }

    /// Returns the data of a tensor that may not hold it.
    #[inline(never)]
    fn produce(self) -> B::FloatTensorPrimitive {
        match self {
            Self::Full(full) => full.tensor,
            Self::Parameter(view) => view.read(),
            Self::Recorded(recorded) => {
                note_read(&recorded);
                recorded.into_leased().tensor
            }
            Self::SparseRows(rows) => rows.into_dense(),
            Self::Deferred(deferred) => deferred.into_leased().tensor,
            Self::Reduced(gradient) => panic!(
                "the gradient of parameter {} was handed over for reduction during backward; \
                 read it through the engine, not through autodiff's container",
                gradient.path
            ),
        }
    }

    /// Returns the operand of an op that can use the blocks of a quantized parameter.
    ///
    /// # Panics
    /// Panics for the same reasons as [`into_full`](Self::into_full).
    #[inline(always)]
    pub(crate) fn into_weight(self) -> WeightOperand<B> {
        match self {
            Self::Parameter(view) => view.read_weight(),
            other => WeightOperand::Dense(other.into_full()),
        }
    }

    /// Returns the data with its ledger entry, for an op that keeps the data. Data that is created
    /// here (a gathered parameter, a dense gradient) is counted as an activation.
    ///
    /// # Panics
    /// Panics for the same reasons as [`into_full`](Self::into_full).
    pub(crate) fn into_leased(self) -> FullTensor<B> {
        match self {
            Self::Full(full) => full,
            Self::Recorded(recorded) => recorded.into_leased(),
            Self::Deferred(deferred) => deferred.into_leased(),
            other => Leased::new(other.into_full()),
        }
    }

    /// Applies a view. A view of a parameter or of a deferred gradient is recorded. A view of data
    /// shares its memory, except that a cast to another type creates new data. Other variants are
    /// first converted to data.
    pub(crate) fn view(self, view: View) -> Self {
        match self {
            Self::Full(full) => Self::Full(view.share::<B>(full)),
            Self::Parameter(parameter) => Self::Parameter(parameter.viewed(view)),
            Self::Recorded(recorded) => view_recorded(recorded, view),
            Self::Deferred(deferred) => Self::Deferred(deferred.viewed(view)),
            other => Self::full(view.apply::<B>(other.into_full())),
        }
    }

    /// Notes a parameter as an operand of an op, which may start a block.
    pub(crate) fn note_parameter(&self, recorder: &BlockRecorder<B>) {
        if let Self::Parameter(view) = self {
            recorder.note_parameter(&view.parameter);
        }
    }

    /// Notes an activation as an operand of an op. A value of another block is kept for backward.
    pub(crate) fn note_value(&self, recorder: &BlockRecorder<B>) {
        if let Self::Recorded(recorded) = self {
            recorder.note_value(recorded);
        }
    }

    /// Returns the marker for a gradient that was passed on for reduction.
    pub(crate) fn passed_on(
        gradient: &impl TensorMetadata,
        device: B::Device,
        path: Arc<str>,
    ) -> Self {
        let (shape, dtype) = (gradient.shape(), gradient.dtype());
        Self::Reduced(ReducedGradient { shape, dtype, device, path })
    }

    /// Takes a final gradient out of an entry of autodiff's container, and replaces it with a
    /// marker that holds no memory. `path` is the parameter's module path.
    pub(crate) fn take_gradient(&mut self, path: Arc<str>) -> ReportedGradient<B> {
        // The marker replaces the gradient in autodiff's container, so the bucket holds the only
        // reference. Otherwise all gradients would stay in memory until the end of backward.
        let marker = Self::passed_on(&*self, self.device(), path);
        match std::mem::replace(self, marker) {
            Self::Deferred(deferred) => ReportedGradient::Deferred(deferred),
            gradient => ReportedGradient::Array(gradient.into_array()),
        }
    }

    /// Returns the array to reduce or send: sparse rows as they are, otherwise the data.
    ///
    /// # Panics
    /// Panics for the same reasons as [`into_full`](Self::into_full).
    pub(crate) fn into_array(self) -> DeviceArray<B> {
        match self {
            Self::SparseRows(rows) => DeviceArray::SparseRows(*rows),
            other => DeviceArray::Dense(other.into_full()),
        }
    }

    /// Returns the parameter of a handle without views.
    pub(crate) fn whole_parameter(&self) -> Option<&Arc<Parameter<B>>> {
        match self {
            Self::Parameter(view) => view.whole(),
            _ => None,
        }
    }

    /// Returns true for a parameter of any sharded model, with or without views.
    pub(crate) fn is_parameter(&self) -> bool {
        matches!(self, Self::Parameter(_))
    }

    /// Returns the device without reading any data.
    pub(crate) fn device(&self) -> B::Device {
        match self {
            Self::Full(full) => B::float_device(&full.tensor),
            Self::Parameter(view) => view.parameter.device().clone(),
            Self::Recorded(recorded) => recorded.device(),
            Self::SparseRows(rows) => rows.device(),
            Self::Deferred(deferred) => deferred.device(),
            Self::Reduced(gradient) => gradient.device.clone(),
        }
    }
}

impl<B: SumOps> TensorMetadata for ZeroTensor<B> {
    fn dtype(&self) -> DType {
        match self {
            Self::Full(full) => full.tensor.dtype(),
            Self::Parameter(view) => view.dtype(),
            Self::Recorded(recorded) => recorded.dtype(),
            Self::SparseRows(rows) => rows.dtype(),
            Self::Deferred(deferred) => deferred.dtype(),
            Self::Reduced(gradient) => gradient.dtype,
        }
    }

    fn shape(&self) -> Shape {
        match self {
            Self::Full(full) => full.tensor.shape(),
            Self::Parameter(view) => view.shape(),
            Self::Recorded(recorded) => recorded.shape(),
            Self::SparseRows(rows) => rows.shape().clone(),
            Self::Deferred(deferred) => deferred.shape(),
            Self::Reduced(gradient) => gradient.shape.clone(),
        }
    }

    /// The default copies the shape.
    fn rank(&self) -> usize {
        match self {
            Self::Full(full) => full.tensor.rank(),
            other => other.shape().num_dims(),
        }
    }
}

/// Converts a tensor to an operand of a recorded op.
impl<B: SumOps> From<ZeroTensor<B>> for Operand<B> {
    fn from(tensor: ZeroTensor<B>) -> Self {
        match tensor {
            ZeroTensor::Parameter(view) => Self::Parameter(view),
            ZeroTensor::Recorded(recorded) => Self::Recorded(recorded),
            ZeroTensor::SparseRows(rows) => Self::SparseRows(*rows),
            other => Self::Full(other.into_leased()),
        }
    }
}

/// Applies a view to an activation. While ops are recorded, the view is recorded as an op of the
/// current block. Otherwise it is applied to the data.
fn view_recorded<B: SumOps>(recorded: RecordedTensor<B>, view: View) -> ZeroTensor<B> {
    if let Some(recorder) = recorder::<B>() {
        recorder.note_value(&recorded);
        if let Some(mut op) = recorder.begin_op(Cost::Low) {
            let operand = op.operand(Operand::Recorded(recorded));
            let [viewed] = op.run(move |reader| [view.share::<B>(reader.read(&operand))]);
            return ZeroTensor::Recorded(viewed);
        }
    }
    ZeroTensor::Full(view.share::<B>(recorded.into_leased()))
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;
    use crate::decorator::{Floats, PlacedTensor};

    /// Every op moves its tensors several times. The compiler moves up to 128 bytes without a call.
    #[test]
    fn a_tensor_is_as_small_as_its_data_with_a_ledger_entry() {
        let size = size_of::<FullTensor<Flex>>();
        assert_eq!(
            [size_of::<ZeroTensor<Flex>>(), size_of::<PlacedTensor<Flex, Floats>>()],
            [size; 2]
        );
    }
}
