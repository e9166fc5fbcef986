//! Tensors of the inner backend that count in the ledger.

use std::sync::Arc;

use burn_backend::{BackendTypes, DType, Shape, TensorMetadata};

use crate::ledger::{Category, Lease, Ledger};
use crate::session;

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
