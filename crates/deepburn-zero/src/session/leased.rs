//! Tensors of the inner backend that are counted in the ledger.

use std::sync::Arc;

use burn_backend::{BackendTypes, DType, Shape, TensorMetadata};

use crate::ledger::{Category, Lease, Ledger};
use crate::session;

/// A tensor of the inner backend with its ledger entry. The bytes are counted until the tensor and
/// all its views are dropped. They are counted as activations unless the tensor was created with
/// another lease.
///
/// Clones and views share the entry. Two tensors with the same entry therefore share memory. If an
/// entry has a single owner, no other tensor refers to the memory.
#[derive(Debug, Clone)]
pub struct Leased<T> {
    /// The tensor of the inner backend, possibly a view.
    pub(crate) tensor: T,
    /// The lease for the bytes of the allocation. `None` on a thread without a model, and for
    /// tensors that are counted elsewhere.
    pub(crate) lease: Option<Arc<Lease>>,
}

/// A float tensor of the inner backend with its ledger entry.
pub type FullTensor<B> = Leased<<B as BackendTypes>::FloatTensorPrimitive>;

impl<T: TensorMetadata> Leased<T> {
    /// Wraps the result of an op and counts it as an activation of the current model.
    ///
    /// # Panics
    /// Panics with a [`CommError`](deepburn_comm::CommError) if the process group has ended; see
    /// [`session::hold_activation`].
    pub(crate) fn new(tensor: T) -> Self {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Self { lease: session::hold_activation(bytes), tensor }
    }

    /// Wraps a tensor that is not the result of an op and counts its bytes on the device in
    /// `category`.
    pub(crate) fn held(tensor: T, ledger: &Ledger, category: Category) -> Self {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Self { lease: Some(Arc::new(ledger.hold(category, bytes))), tensor }
    }
}

impl<T> Leased<T> {
    /// Removes the ledger entry, for a parameter, which is counted elsewhere.
    pub(crate) fn uncounted(self) -> Self {
        Self { lease: None, ..self }
    }

    /// Returns the inner backend's tensor and drops this handle's reference to the ledger entry.
    pub fn into_inner(self) -> T {
        self.tensor
    }

    /// Returns a view, which shares the memory and therefore the ledger entry. `view` must not
    /// copy, because the copy would not be counted.
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
