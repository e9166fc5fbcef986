//! The tensors of [`Sharded`](crate::Sharded): data, or handles that can
//! produce data.

use std::sync::Arc;

use burn_backend::{Backend, BackendTypes, DType, Shape, TensorMetadata};

use crate::ledger::{Category, Lease, Ledger};
use crate::parameter::Parameter;
use crate::recompute::tape::RecordedTensor;
use crate::recompute::{self, note_read};
use crate::rows::RowGradient;
use crate::session;
use crate::view::View;

/// A float tensor of the decorated backend.
///
/// Autodiff keeps these values for the backward pass, so they determine the
/// memory of training: a parameter that forward saves is a handle, not data.
#[derive(Debug, Clone)]
pub enum ZeroTensor<B: Backend> {
    /// Ordinary data, completely on this rank.
    Full(FullTensor<B>),
    /// A parameter under recorded views. It holds no data; an op that needs the
    /// data reads the parameter, which is gathered if it is sharded.
    Parameter(ParameterView<B>),
    /// An activation of a block that backward may recompute. It holds data
    /// until the block ends, and again once backward reads the block.
    Recorded(RecordedTensor<B>),
    /// The gradient of an embedding as rows. It holds only the rows that were
    /// looked up.
    SparseRows(RowGradient<B>),
    /// A gradient that was passed on for reduction. It holds nothing.
    Reduced(ReducedGradient<B>),
}

/// A tensor of the inner backend with its ledger entry, which lives as long as
/// the tensor or a view of it. It counts as an activation unless it has another
/// lease.
#[derive(Debug, Clone)]
pub struct Leased<T> {
    pub(crate) tensor: T,
    pub(crate) lease: Option<Arc<Lease>>,
}

/// Float data.
pub type FullTensor<B> = Leased<<B as BackendTypes>::FloatTensorPrimitive>;

impl<T: TensorMetadata> Leased<T> {
    /// Wraps the result of an op.
    pub(crate) fn new(tensor: T) -> Self {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Self { lease: session::hold_activation(bytes), tensor }
    }

    /// Enters a tensor that is not the result of an op under `category`.
    pub(crate) fn held(tensor: T, ledger: &Ledger, category: Category) -> Self {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Self { lease: Some(Arc::new(ledger.hold(category, bytes))), tensor }
    }
}

impl<T> Leased<T> {
    /// The same tensor without an entry, for a parameter, which the ledger counts elsewhere.
    pub(crate) fn uncounted(self) -> Self {
        Self { lease: None, ..self }
    }

    /// Returns the inner backend's tensor. The ledger entry ends with the last
    /// other handle.
    pub fn into_inner(self) -> T {
        self.tensor
    }

    /// Returns a view that shares the memory and therefore the ledger entry.
    pub(crate) fn viewed(self, view: impl FnOnce(T) -> T) -> Self {
        Self { tensor: view(self.tensor), lease: self.lease }
    }
}

impl<T: TensorMetadata> TensorMetadata for Leased<T> {
    fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    fn shape(&self) -> Shape {
        self.tensor.shape()
    }
}

/// A parameter under recorded views.
#[derive(Debug, Clone)]
pub struct ParameterView<B: Backend> {
    pub(crate) parameter: Arc<Parameter<B>>,
    views: Vec<View>,
    shape: Shape,
    dtype: DType,
}

/// The marker in autodiff's container for a gradient that was passed on for
/// reduction.
#[derive(Debug, Clone)]
pub struct ReducedGradient<B: Backend> {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: B::Device,
    pub(crate) path: Arc<str>,
}

impl<B: Backend> ParameterView<B> {
    pub(crate) fn new(parameter: Arc<Parameter<B>>) -> Self {
        let (shape, dtype) = (parameter.shape().clone(), parameter.dtype());
        Self { parameter, views: Vec::new(), shape, dtype }
    }

    pub(crate) fn viewed(mut self, view: View) -> Self {
        self.shape = view.shape(self.shape);
        self.dtype = view.dtype(self.dtype);
        self.views.push(view);
        self
    }

    /// Reads the parameter for an op, applies the views and counts the read.
    pub(crate) fn read(self) -> B::FloatTensorPrimitive {
        session::with_counter(|counter| counter.read(self.parameter.path()));
        self.read_again()
    }

    /// Reads the parameter for an op that runs again and was already counted.
    pub(crate) fn read_again(self) -> B::FloatTensorPrimitive {
        session::note_read(self.parameter.ledger());
        let whole = self.parameter.read();
        self.views.iter().fold(whole, |tensor, view| view.apply::<B>(tensor))
    }
}

impl<B: Backend> ZeroTensor<B> {
    /// Wraps the result of an op.
    pub(crate) fn full(tensor: B::FloatTensorPrimitive) -> Self {
        Self::Full(Leased::new(tensor))
    }

    /// Returns the handle of a parameter.
    pub(crate) fn parameter(parameter: Arc<Parameter<B>>) -> Self {
        Self::Parameter(ParameterView::new(parameter))
    }

    /// Returns the data, gathered from all ranks if it is sharded.
    ///
    /// # Panics
    ///
    /// Panics with a [`CommError`](deepburn_comm::CommError) as payload if a
    /// collective fails, because tensor ops cannot return errors.
    /// [`run_ranks`](deepburn_comm::run_ranks) converts it back to an error.
    pub fn into_full(self) -> B::FloatTensorPrimitive {
        match self {
            Self::Full(full) => full.tensor,
            Self::Parameter(view) => view.read(),
            Self::Recorded(recorded) => {
                note_read(&recorded);
                recorded.into_leased().tensor
            }
            Self::SparseRows(rows) => rows.into_dense(),
            Self::Reduced(gradient) => panic!(
                "the gradient of parameter {} was handed over for reduction during backward; \
                 read it through the engine, not through autodiff's container",
                gradient.path
            ),
        }
    }

    /// Returns the data with its ledger entry, for an op that keeps it.
    pub(crate) fn into_leased(self) -> FullTensor<B> {
        match self {
            Self::Full(full) => full,
            Self::Recorded(recorded) => recorded.into_leased(),
            other => Leased::new(other.into_full()),
        }
    }

    /// Applies a view. On a parameter it is recorded; on data it shares memory.
    /// A cast to another type creates new data.
    pub(crate) fn view(self, view: View) -> Self {
        match self {
            Self::Full(full) => Self::Full(view.share::<B>(full)),
            Self::Parameter(parameter) => Self::Parameter(parameter.viewed(view)),
            Self::Recorded(recorded) => recompute::view(recorded, view),
            other => Self::full(view.apply::<B>(other.into_full())),
        }
    }

    pub(crate) fn is_parameter(&self) -> bool {
        matches!(self, Self::Parameter(_))
    }

    pub(crate) fn device(&self) -> B::Device {
        match self {
            Self::Full(full) => B::float_device(&full.tensor),
            Self::Parameter(view) => view.parameter.device().clone(),
            Self::Recorded(recorded) => recorded.device(),
            Self::SparseRows(rows) => rows.device(),
            Self::Reduced(gradient) => gradient.device.clone(),
        }
    }
}

impl<B: Backend> TensorMetadata for ZeroTensor<B> {
    fn dtype(&self) -> DType {
        match self {
            Self::Full(full) => full.tensor.dtype(),
            Self::Parameter(view) => view.dtype,
            Self::Recorded(recorded) => recorded.dtype(),
            Self::SparseRows(rows) => rows.dtype(),
            Self::Reduced(gradient) => gradient.dtype,
        }
    }

    fn shape(&self) -> Shape {
        match self {
            Self::Full(full) => full.tensor.shape(),
            Self::Parameter(view) => view.shape.clone(),
            Self::Recorded(recorded) => recorded.shape(),
            Self::SparseRows(rows) => rows.shape().clone(),
            Self::Reduced(gradient) => gradient.shape.clone(),
        }
    }
}
