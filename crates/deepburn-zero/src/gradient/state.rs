//! The state of one parameter's gradient, from backward to the optimizer step.
//!
//! Main type: [`GradientState`], which describes everything that this rank holds for the gradient.
//! All parts that hold memory have their own ledger entry, so a change of state updates the ledger.
//!
//! ```text
//!              first gradient                       all reduced
//!  Awaited ───────────────────────► InReduction ◄──────────────► Accumulated
//!     │                                 ▲         next micro-batch       │
//!     └── in no_sync ──► Local ─────────┘                                │
//!                              included in the next reduction            │
//!  Awaited ◄───────────────── the step takes the sum ────────────────────┘
//! ```
//!
//! While a gradient is local or in reduction, the state also holds the sum of earlier
//! micro-batches.

use std::collections::VecDeque;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use deepburn_comm::Partition;
use deepburn_kernels::GradientStats;
use deepburn_nvme::SwapError;
use deepburn_ops::OptimizerOps;

use crate::group::DeviceArray;
use crate::ledger::Lease;
use crate::offload::{ParkedArray, ParkedTensor};
use crate::parameter::ShardSpec;
use crate::session::FullTensor;

/// The gradient of one parameter in a step.
#[derive(Debug)]
pub(super) enum GradientState<B: Backend> {
    /// No micro-batch has produced a gradient yet.
    Awaited,
    /// A gradient that was accumulated on this rank alone while synchronization is off. It is in
    /// the accumulation type, has all elements or the rows of an embedding, and is included in the
    /// next reduction.
    Local { gradient: Collected<B>, sum: Option<Accumulated<B>> },
    /// Gradients in the bucket or being reduced. All elements or rows of each gradient are held
    /// until its reduction is complete.
    InReduction { gradients: InReduction<B>, sum: Option<Accumulated<B>> },
    /// The gradients of all micro-batches are in the sum.
    Accumulated(Accumulated<B>),
}

/// The reported gradients of one parameter that are not in its sum yet, oldest first. There are
/// several if one backward pass covers several forward passes.
#[derive(Debug)]
pub(super) struct InReduction<B: Backend> {
    /// The gradients in the bucket, one for each occurrence of the parameter in the bucket's list.
    in_bucket: VecDeque<Collected<B>>,
    /// The sent gradients, which are kept because other ranks may still read them.
    reducing: VecDeque<Collected<B>>,
}

/// A full gradient of this rank, with its ledger entry.
#[derive(Debug)]
pub(super) struct Collected<B: Backend> {
    pub(super) array: DeviceArray<B>,
    pub(super) _lease: Lease,
}

impl<B: Backend> GradientState<B> {
    /// Returns the state with only the sum.
    fn settled(sum: Option<Accumulated<B>>) -> Self {
        sum.map_or(Self::Awaited, Self::Accumulated)
    }

    /// Returns true if the gradients of all micro-batches are in the sum.
    pub(super) fn is_settled(&self) -> bool {
        match self {
            Self::Awaited | Self::Accumulated(_) => true,
            Self::Local { .. } | Self::InReduction { .. } => false,
        }
    }

    /// Returns the sum of the reduced micro-batches.
    pub(super) fn sum(&self) -> Option<&Accumulated<B>> {
        match self {
            Self::Awaited => None,
            Self::Local { sum, .. } | Self::InReduction { sum, .. } => sum.as_ref(),
            Self::Accumulated(sum) => Some(sum),
        }
    }

    /// Takes the sum. Local gradients and gradients in reduction are not changed.
    pub(super) fn take_sum(&mut self) -> Option<Accumulated<B>> {
        match self {
            Self::Awaited => None,
            Self::Local { sum, .. } | Self::InReduction { sum, .. } => sum.take(),
            Self::Accumulated(_) => match std::mem::replace(self, Self::Awaited) {
                Self::Accumulated(sum) => Some(sum),
                _ => unreachable!("the state was matched just before"),
            },
        }
    }

    /// Replaces the sum. Local gradients and gradients in reduction are not changed.
    pub(super) fn set_sum(&mut self, new: Accumulated<B>) {
        match self {
            Self::Local { sum, .. } | Self::InReduction { sum, .. } => *sum = Some(new),
            Self::Awaited | Self::Accumulated(_) => *self = Self::Accumulated(new),
        }
    }

    /// Stores the local gradient of this rank. It replaces an earlier local gradient, which the
    /// caller has already added.
    pub(super) fn keep_local(&mut self, gradient: Collected<B>) {
        let sum = self.take_sum();
        *self = Self::Local { gradient, sum };
    }

    /// Takes the local gradient of this rank, if there is one.
    pub(super) fn take_local(&mut self) -> Option<Collected<B>> {
        match std::mem::replace(self, Self::Awaited) {
            Self::Local { gradient, sum } => {
                *self = Self::settled(sum);
                Some(gradient)
            }
            other => {
                *self = other;
                None
            }
        }
    }

    /// Adds a gradient to the bucket.
    pub(super) fn enter_bucket(&mut self, gradient: Collected<B>) {
        if let Self::InReduction { gradients, .. } = self {
            gradients.in_bucket.push_back(gradient);
            return;
        }
        let sum = self.take_sum();
        // The caller has added a local gradient to this one, so only the sum is left.
        let gradients = InReduction { in_bucket: [gradient].into(), reducing: VecDeque::new() };
        *self = Self::InReduction { gradients, sum };
    }

    /// Moves the oldest gradient from the bucket to the gradients being reduced, and returns the
    /// array to send. `scale` multiplies it by the factor before the sum.
    pub(super) fn leave_bucket(
        &mut self,
        scale: impl FnOnce(DeviceArray<B>) -> DeviceArray<B>,
    ) -> DeviceArray<B> {
        let Self::InReduction { gradients: InReduction { in_bucket, reducing }, .. } = self else {
            unreachable!("a bucket lists gradients that are in it")
        };
        let Some(mut gradient) = in_bucket.pop_front() else {
            unreachable!("a bucket lists a gradient once for each time it was reported")
        };
        gradient.array = scale(gradient.array);
        let sent = gradient.array.clone();
        reducing.push_back(gradient);
        sent
    }

    /// Frees the oldest gradient that was being reduced. Reductions complete in the order in which
    /// they were started.
    pub(super) fn finish_reduction(&mut self) {
        let Self::InReduction { gradients, sum } = self else {
            unreachable!("a reduction that is over was under way")
        };
        gradients.reducing.pop_front();
        if gradients.reducing.is_empty() && gradients.in_bucket.is_empty() {
            *self = Self::settled(sum.take());
        }
    }
}

/// The location of a parameter's accumulated gradient. It is the same as for its optimizer states.
#[derive(Debug, Clone)]
pub(crate) enum SumHome {
    /// On the device, as long as there is a sum.
    Device,
    /// In the store of the optimizer states, in an array that exists for the whole run.
    Parked(Arc<ParkedArray>),
}

/// A flat accumulated gradient: this rank's shard or all elements.
///
/// The gradient of a single micro-batch stays in the communication type, if the accumulation type
/// represents the same values. Widening it would take memory and time, and the optimizer reads
/// either type.
#[derive(Debug)]
pub(crate) struct Accumulated<B: Backend> {
    pub(crate) elements: SumElements<B>,
    /// The largest magnitude that the sum had before the last addition, of shape `[1]`. It is set
    /// only if the overflow check needs it (see `GradientChecker::fits`).
    pub(crate) peak: Option<B::FloatTensorPrimitive>,
    /// The number of micro-batches in the sum.
    pub(crate) count: usize,
}

/// The elements of an accumulated gradient.
#[derive(Debug)]
pub(crate) enum SumElements<B: Backend> {
    /// On the device.
    Device(FullTensor<B>),
    /// In a parked array, until the next sum of this parameter is written.
    Parked {
        array: Arc<ParkedArray>,
        dtype: DType,
        /// The check of the sum, computed while it was in memory, so that the step does not have to
        /// read it again.
        check: GradientCheck,
    },
}

impl<B: Backend> Accumulated<B> {
    /// Returns the type of the elements.
    pub(crate) fn dtype(&self) -> DType {
        match &self.elements {
            SumElements::Device(sum) => sum.dtype(),
            SumElements::Parked { dtype, .. } => *dtype,
        }
    }

    /// Returns the elements on the device.
    ///
    /// # Errors
    /// Returns an error if a parked sum cannot be read.
    pub(crate) fn tensor(&self, device: &B::Device) -> Result<B::FloatTensorPrimitive, SwapError> {
        match &self.elements {
            SumElements::Device(sum) => Ok(sum.tensor.clone()),
            SumElements::Parked { array, dtype, .. } => {
                ParkedTensor { array, dtype: *dtype }.read::<B>(device)
            }
        }
    }
}

/// The properties of an accumulated gradient that a step needs before it changes anything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GradientCheck {
    /// The sum of the squares of the elements that this rank owns, still multiplied by the loss
    /// scale.
    pub(crate) sum_of_squares: f64,
    /// Whether the elements are finite and never exceeded the range of the type in which ops
    /// compute.
    pub(crate) fits: bool,
}

/// Checks accumulated gradients. Its kernels are function pointers, because the reducer's backend
/// is not required to have optimizer kernels.
#[derive(Debug)]
pub(crate) struct GradientChecker<B: Backend> {
    /// The slices that this rank owns.
    share: ShardSpec,
    /// The type in which ops compute.
    compute: FloatDType,
    /// Returns the sum of squares and whether all elements are finite.
    stats: fn(B::FloatTensorPrimitive) -> GradientStats,
    /// Casts a tensor to another type.
    cast: fn(B::FloatTensorPrimitive, FloatDType) -> B::FloatTensorPrimitive,
}

impl<B: OptimizerOps> GradientChecker<B> {
    pub(crate) fn new(share: ShardSpec, compute: FloatDType) -> Self {
        Self { share, compute, stats: B::gradient_stats, cast: B::cast }
    }
}

impl<B: Backend> GradientChecker<B> {
    /// Checks the elements of a sum that this rank owns. A parked sum was already checked when it
    /// was written, with the same order of additions.
    pub(crate) fn check(&self, sum: &Accumulated<B>, partition: Partition) -> GradientCheck {
        match &sum.elements {
            SumElements::Device(elements) => {
                self.check_tensor(&elements.tensor, sum.peak.as_ref(), partition)
            }
            SumElements::Parked { check, .. } => *check,
        }
    }

    /// Checks all elements of a sum. Only 1-bit optimizers need this, and they do not support
    /// offload.
    pub(super) fn check_whole(&self, sum: &Accumulated<B>) -> GradientCheck {
        match &sum.elements {
            SumElements::Device(elements) => {
                self.check_elements(elements.tensor.clone(), sum.peak.as_ref())
            }
            SumElements::Parked { .. } => {
                unreachable!("states are on the device where ranks agree on momenta")
            }
        }
    }

    /// Checks the owned elements of a sum in memory, without padding.
    pub(super) fn check_tensor(
        &self,
        sum: &B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
        partition: Partition,
    ) -> GradientCheck {
        self.check_elements(self.share.owned_gradient::<B>(sum, partition), peak)
    }

    /// Checks the given elements.
    fn check_elements(
        &self,
        elements: B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
    ) -> GradientCheck {
        let stats = (self.stats)(elements.clone());
        // Most overflows are infinite in the sum itself, so the other checks rarely run for a
        // skipped step.
        let fits = stats.finite && self.fits(elements, peak);
        GradientCheck { sum_of_squares: stats.sum_of_squares, fits }
    }

    /// Returns true if an accumulated gradient never exceeded the range of the type in which ops
    /// compute.
    ///
    /// DeepSpeed accumulates fp16 gradients in fp16 and skips a step if they overflow. The same
    /// steps are skipped here, although the f32 sum can represent larger values. `peak` detects an
    /// overflow that a later micro-batch has canceled.
    fn fits(
        &self,
        gradient: B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
    ) -> bool {
        // An overflow of a sum in f16 is an infinity, which the caller has found. bf16 has the
        // range of f32.
        if self.compute != FloatDType::F16 || gradient.dtype() == DType::F16 {
            return true;
        }
        let fits = |tensor| (self.stats)((self.cast)(tensor, FloatDType::F16)).finite;
        peak.is_none_or(|peak| fits(peak.clone())) && fits(gradient)
    }
}
