//! Tensors that some stages of a pipeline hold and others know by shape and type.
//!
//! Main type: [`PlacedTensor`]. All stages run the same program, so each of them knows which stages
//! hold a tensor. A tensor that is moved to another stage is held by both from then on. Clones and
//! reshaped or transposed views refer to one [`SharedValue`], so that a value is sent once,
//! whatever views of it are read.
//!
//! ```text
//!                    stage 0           stage 1
//!  token ids         Everywhere        Everywhere
//!  block 0 output    own, held by 0    shape
//!  read by block 1   own, held by 0 1  received, held by 0 1
//!  block 1 output    shape             own, held by 1
//! ```

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use burn_backend::{DType, Shape, TensorMetadata};
use deepburn_comm::{CommError, MessageTag};
use deepburn_ops::SumOps;

use crate::holders::Holders;
use crate::parameter::View;
use crate::pipeline::Stages;

/// The kind of a tensor: floats, integers or bools.
pub trait TensorKind<B: SumOps>: Clone + Debug + Send + Sync + 'static {
    /// The tensor of a stage that holds the value.
    type Tensor: TensorMetadata + 'static;

    /// Returns the stages that hold a tensor which was not computed on a single stage.
    fn homes(tensor: &Self::Tensor) -> Holders;

    /// Applies a view that keeps all elements.
    fn viewed(tensor: Self::Tensor, view: View) -> Self::Tensor;

    /// Sends a value to the same rank of another stage.
    ///
    /// # Errors
    /// Returns an error if the group has ended.
    fn send(
        tensor: Self::Tensor,
        stages: &Stages<B>,
        to: usize,
        tag: MessageTag,
    ) -> Result<(), CommError>;

    /// Receives a value of this shape and type from the same rank of another stage.
    ///
    /// # Errors
    /// Returns an error if the sender has failed, or sends something else.
    fn receive(
        stages: &Stages<B>,
        from: usize,
        tag: MessageTag,
        shape: &Shape,
        dtype: DType,
    ) -> Result<Self::Tensor, CommError>;
}

/// A tensor and the stages that hold its value.
#[derive(Debug, Clone)]
pub enum PlacedTensor<B: SumOps, K: TensorKind<B>> {
    /// Every stage holds the value: inputs, constants, and everything without a pipeline. A
    /// parameter is a handle, which its stages can read.
    Everywhere(K::Tensor),
    /// Some stages hold the value.
    Staged(Box<StagedTensor<B, K>>),
}

/// A tensor that some stages hold.
#[derive(Debug, Clone)]
pub struct StagedTensor<B: SumOps, K: TensorKind<B>> {
    /// The value before the views.
    shared: Arc<SharedValue<B, K>>,
    /// The views since then, which keep all elements.
    views: Vec<View>,
    /// The value after the views, if an op of this stage computed it.
    own: Option<K::Tensor>,
    shape: Shape,
    dtype: DType,
    device: B::Device,
}

/// A value that all views and clones of a tensor share.
#[derive(Debug)]
struct SharedValue<B: SumOps, K: TensorKind<B>> {
    /// The stages that hold it, as bits.
    holders: AtomicU64,
    shape: Shape,
    /// The value on a stage that has received it.
    received: OnceLock<K::Tensor>,
}

impl<B: SumOps, K: TensorKind<B>> PlacedTensor<B, K> {
    /// Returns the result of an op of this stage, which `holders` hold.
    pub(super) fn held(tensor: K::Tensor, holders: Holders, device: B::Device) -> Self {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        Self::Staged(Box::new(StagedTensor::new(Some(tensor), shape, dtype, holders, device)))
    }

    /// Returns the result of an op of another stage.
    pub(super) fn absent(shape: Shape, dtype: DType, holders: Holders, device: B::Device) -> Self {
        Self::Staged(Box::new(StagedTensor::new(None, shape, dtype, holders, device)))
    }

    /// Returns the stages that hold the value.
    #[inline]
    pub(crate) fn holders(&self) -> Holders {
        match self {
            Self::Everywhere(tensor) => K::homes(tensor),
            Self::Staged(staged) => staged.holders(),
        }
    }

    /// Returns the value on a stage that holds it.
    ///
    /// # Panics
    /// Panics on a stage that does not hold the value, with the stages that do.
    // Inlined for the usual case, because a call would copy the tensor.
    #[inline(always)]
    pub fn into_value(self) -> K::Tensor {
        match self {
            Self::Everywhere(tensor) => tensor,
            Self::Staged(staged) => staged.held_value(),
        }
    }

    /// Returns the value, if this stage holds it.
    pub(crate) fn value(self) -> Option<K::Tensor> {
        match self {
            Self::Everywhere(tensor) => Some(tensor),
            Self::Staged(staged) => staged.value(),
        }
    }

    /// Reshapes or transposes a tensor that some stages hold.
    pub(super) fn viewed(self, view: View) -> Self {
        match self {
            Self::Everywhere(tensor) => Self::Everywhere(K::viewed(tensor, view)),
            Self::Staged(mut staged) => {
                staged.shape = view.shape(staged.shape);
                staged.own = staged.own.map(|own| K::viewed(own, view.clone()));
                staged.views.push(view);
                Self::Staged(staged)
            }
        }
    }

    /// Moves the value from the stage `from` to the stage `to`, which then hold it both. Every
    /// stage calls this; the sender sends and the receiver waits.
    ///
    /// # Errors
    /// Returns an error if the message cannot be sent or received.
    pub(super) fn carry(
        self,
        stages: &Stages<B>,
        from: usize,
        to: usize,
        tag: MessageTag,
    ) -> Result<Self, CommError> {
        let (is_sender, is_receiver) = (stages.stage() == from, stages.stage() == to);
        let staged = match self {
            // A parameter that an op reads on a stage other than its own.
            Self::Everywhere(tensor) => {
                let (shape, dtype) = (tensor.shape(), tensor.dtype());
                let holders = K::homes(&tensor);
                let own = holders.contains(stages.stage()).then_some(tensor);
                let device = stages.device().clone();
                Box::new(StagedTensor::new(own, shape, dtype, holders, device))
            }
            Self::Staged(staged) => staged,
        };
        if is_sender {
            K::send(staged.base(), stages, to, tag)?;
        } else if is_receiver {
            let value = K::receive(stages, from, tag, &staged.shared.shape, staged.dtype)?;
            // A value is moved to a stage at most once.
            let _ = staged.shared.received.set(value);
        }
        // Every stage records the new holder, also if it neither sends nor receives.
        staged.shared.holders.fetch_or(Holders::one(to).bits(), Relaxed);
        Ok(Self::Staged(staged))
    }

    /// Returns the device without reading data.
    pub(crate) fn device_or(&self, of_value: impl FnOnce(&K::Tensor) -> B::Device) -> B::Device {
        match self {
            Self::Everywhere(tensor) => of_value(tensor),
            Self::Staged(staged) => staged.device.clone(),
        }
    }
}

impl<B: SumOps> PlacedTensor<B, super::Floats> {
    /// Returns true for a parameter of any sharded model, with or without views.
    pub(crate) fn is_parameter(&self) -> bool {
        match self {
            Self::Everywhere(tensor) => tensor.is_parameter(),
            Self::Staged(_) => false,
        }
    }

    /// Takes part in reading the values on another rank, and drops them. Every rank calls this or
    /// reads the values, in a call of the engine.
    ///
    /// # Panics
    /// Panics with a [`CommError`] if a gather or a message fails.
    pub fn take_part_in_reading(self) {
        drop(super::site::everywhere(self).into_full());
    }
}

impl<B: SumOps, K: TensorKind<B>> StagedTensor<B, K> {
    /// Returns a tensor without views, which `holders` hold.
    fn new(
        own: Option<K::Tensor>,
        shape: Shape,
        dtype: DType,
        holders: Holders,
        device: B::Device,
    ) -> Self {
        let holders = AtomicU64::new(holders.bits());
        let shared = SharedValue { holders, shape: shape.clone(), received: OnceLock::new() };
        Self { shared: Arc::new(shared), views: Vec::new(), own, shape, dtype, device }
    }

    /// Returns the stages that hold the value.
    fn holders(&self) -> Holders {
        Holders::of_bits(self.shared.holders.load(Relaxed))
    }

    /// Returns the value after the views, if this stage holds it.
    fn value(self) -> Option<K::Tensor> {
        // A result of this stage already has the views. A received value gets them here.
        self.own.or_else(|| {
            let received = self.shared.received.get()?.clone();
            Some(self.views.iter().fold(received, |tensor, view| K::viewed(tensor, view.clone())))
        })
    }

    /// Returns the value after the views on a stage that holds it.
    ///
    /// # Panics
    /// Panics on a stage that does not hold the value, with the stages that do.
    #[inline(never)]
    fn held_value(self) -> K::Tensor {
        let holders = self.holders();
        self.value().unwrap_or_else(|| {
            panic!(
                "the value of a tensor was read outside of a pass; pipeline stages {holders} hold it"
            )
        })
    }

    /// Returns the value before the views. Only called on a stage that holds it.
    fn base(&self) -> K::Tensor {
        // A stage may pass on a value that it has received itself.
        if let Some(received) = self.shared.received.get() {
            return received.clone();
        }
        let own = self.own.clone().expect("a stage that sends a value holds it");
        let mut shapes = vec![self.shared.shape.clone()];
        for view in &self.views {
            shapes.push(view.shape(shapes[shapes.len() - 1].clone()));
        }
        // The receiver applies its own views, so the value is sent in its original shape and order.
        let undo = self.views.iter().zip(&shapes).rev();
        undo.fold(own, |tensor, (view, before)| K::viewed(tensor, view.inverse(before)))
    }
}

impl<B: SumOps, K: TensorKind<B>> TensorMetadata for PlacedTensor<B, K> {
    fn dtype(&self) -> DType {
        match self {
            Self::Everywhere(tensor) => tensor.dtype(),
            Self::Staged(staged) => staged.dtype,
        }
    }

    fn shape(&self) -> Shape {
        match self {
            Self::Everywhere(tensor) => tensor.shape(),
            Self::Staged(staged) => staged.shape.clone(),
        }
    }

    fn rank(&self) -> usize {
        match self {
            Self::Everywhere(tensor) => tensor.rank(),
            Self::Staged(staged) => staged.shape.num_dims(),
        }
    }
}
