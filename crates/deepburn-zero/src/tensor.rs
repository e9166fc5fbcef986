//! The tensors of [`Sharded`](crate::Sharded): data, or handles that can
//! produce data.
//!
//! Autodiff, the model and the optimizer all hold the same type,
//! [`ZeroTensor`]. Its variants differ in what they keep in memory:
//!
//! ```text
//!  variant      made by                                   memory held
//!  Full         any op, data from outside                 the tensor
//!  Parameter    the module's handles, views of them       none; a read gathers
//!  Recorded     ops of a block that may be recomputed     until the block ends
//!  SparseRows   the backward pass of an embedding         the looked-up rows
//!  Reduced      the gradient hook, in autodiff's map      none
//! ```
//!
//! Data carries a ledger entry ([`Leased`]) that counts its bytes once, even if
//! several views share the memory. An op that needs data calls
//! [`ZeroTensor::into_full`]. All variants except `Reduced` therefore behave
//! like an ordinary tensor to the ops of `crates/deepburn-zero/src/ops`.

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
///
/// Clones share the entry. Two tensors with the same entry therefore share
/// memory, and an entry with one holder means that nobody else holds the
/// memory.
#[derive(Debug, Clone)]
pub struct Leased<T> {
    /// The tensor of the inner backend, possibly a view.
    pub(crate) tensor: T,
    /// The bytes of the allocation. `None` without a model on the thread, and
    /// for tensors that the ledger counts elsewhere.
    pub(crate) lease: Option<Arc<Lease>>,
}

/// Float data.
pub type FullTensor<B> = Leased<<B as BackendTypes>::FloatTensorPrimitive>;

impl<T: TensorMetadata> Leased<T> {
    /// Wraps the result of an op, which counts as an activation of the current
    /// model.
    ///
    /// # Panics
    ///
    /// Panics with a [`CommError`](deepburn_comm::CommError) if the group has
    /// ended; see [`session::hold_activation`].
    pub(crate) fn new(tensor: T) -> Self {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Self { lease: session::hold_activation(bytes), tensor }
    }

    /// Enters a tensor that is not the result of an op under `category`. The
    /// entry is on the device tier and has the bytes of the tensor's shape and
    /// type.
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
    /// `view` must not copy, or the copy is not counted.
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
///
/// A view of a sharded parameter cannot be computed without gathering it. The
/// views are therefore recorded, with the shape and type of their result, and
/// applied when an op reads the data. Backward can keep such a handle for free.
#[derive(Debug, Clone)]
pub struct ParameterView<B: Backend> {
    /// The parameter, of this model or of another one on the thread.
    pub(crate) parameter: Arc<Parameter<B>>,
    /// The views in the order in which they are applied to the whole parameter.
    views: Vec<View>,
    /// The shape after all views.
    shape: Shape,
    /// The element type after all views.
    dtype: DType,
}

/// The marker in autodiff's container for a gradient that was passed on for
/// reduction. It keeps the metadata that autodiff may ask for, and no data.
#[derive(Debug, Clone)]
pub struct ReducedGradient<B: Backend> {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: B::Device,
    /// The module path of the parameter, for the message of a read.
    pub(crate) path: Arc<str>,
}

impl<B: Backend> ParameterView<B> {
    /// Returns a handle without views.
    pub(crate) fn new(parameter: Arc<Parameter<B>>) -> Self {
        let (shape, dtype) = (parameter.shape().clone(), parameter.dtype());
        Self { parameter, views: Vec::new(), shape, dtype }
    }

    /// Records `view` on top of the existing views.
    pub(crate) fn viewed(mut self, view: View) -> Self {
        self.shape = view.shape(self.shape);
        self.dtype = view.dtype(self.dtype);
        self.views.push(view);
        self
    }

    /// Reads the parameter for an op, applies the views and counts the read. At
    /// stage 3 this gathers the parameter from all ranks if no copy is kept.
    ///
    /// # Panics
    ///
    /// Panics with a [`CommError`](deepburn_comm::CommError) if a collective
    /// fails, and with a message if the engine is gone or another thread reads
    /// a sharded parameter.
    pub(crate) fn read(self) -> B::FloatTensorPrimitive {
        session::with_counter(|counter| counter.read(self.parameter.path()));
        self.read_again()
    }

    /// Reads the parameter for an op that runs again in backward. The operation
    /// counter does not see this read, because recomputation is not part of a
    /// model's operations.
    ///
    /// # Panics
    ///
    /// Panics like [`read`](Self::read).
    pub(crate) fn read_again(self) -> B::FloatTensorPrimitive {
        session::note_read(self.parameter.ledger());
        let whole = self.parameter.read();
        self.views.iter().fold(whole, |tensor, view| view.apply::<B>(tensor))
    }
}

impl<B: Backend> ZeroTensor<B> {
    /// Wraps the result of an op, which enters the ledger as an activation.
    pub(crate) fn full(tensor: B::FloatTensorPrimitive) -> Self {
        Self::Full(Leased::new(tensor))
    }

    /// Returns the handle of a parameter.
    pub(crate) fn parameter(parameter: Arc<Parameter<B>>) -> Self {
        Self::Parameter(ParameterView::new(parameter))
    }

    /// Returns the data, gathered from all ranks if it is sharded and
    /// recomputed if it was freed. The result no longer carries a ledger entry.
    ///
    /// # Panics
    ///
    /// Panics with a [`CommError`](deepburn_comm::CommError) as payload if a
    /// collective fails, because tensor ops cannot return errors.
    /// [`run_ranks`](deepburn_comm::run_ranks) converts it back to an error.
    /// Panics with a message for a gradient that was passed on for reduction.
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

    /// Returns the data with its ledger entry, for an op that keeps it. Data
    /// that is made here (a gathered parameter, a dense gradient) enters as an
    /// activation.
    ///
    /// # Panics
    ///
    /// Panics like [`into_full`](Self::into_full).
    pub(crate) fn into_leased(self) -> FullTensor<B> {
        match self {
            Self::Full(full) => full,
            Self::Recorded(recorded) => recorded.into_leased(),
            other => Leased::new(other.into_full()),
        }
    }

    /// Applies a view. On a parameter it is recorded; on data it shares memory.
    /// A cast to another type creates new data. Other variants become data
    /// first.
    pub(crate) fn view(self, view: View) -> Self {
        match self {
            Self::Full(full) => Self::Full(view.share::<B>(full)),
            Self::Parameter(parameter) => Self::Parameter(parameter.viewed(view)),
            Self::Recorded(recorded) => recompute::view(recorded, view),
            other => Self::full(view.apply::<B>(other.into_full())),
        }
    }

    /// Returns true for a parameter of any sharded model, also under views.
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
