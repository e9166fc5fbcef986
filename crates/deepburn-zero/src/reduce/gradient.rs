//! The gradient of one parameter, from backward to the optimizer step.
//!
//! Main type: [`GradientState`], which describes everything that this rank holds of it. Whatever
//! holds memory carries its own ledger entry, so a change of state updates the ledger.
//!
//! ```text
//!              first gradient                     all landed
//!  Awaited ───────────────────────► Travelling ◄──────────────► Accumulated
//!     │                                 ▲       next micro-batch     │
//!     └── in no_sync ──► Local ─────────┘                            │
//!                              joins the next reduction              │
//!  Awaited ◄───────────────── the step takes the sum ────────────────┘
//! ```
//!
//! Local and travelling gradients have the sum of earlier micro-batches beside them.

use std::collections::VecDeque;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use deepburn_comm::Partition;
use deepburn_kernels::GradientStats;
use deepburn_nvme::SwapError;
use deepburn_ops::OptimizerOps;

use crate::array::DeviceArray;
use crate::leased::FullTensor;
use crate::ledger::Lease;
use crate::parked::{ParkedArray, ParkedTensor};
use crate::shard_spec::ShardSpec;

/// The gradient of one parameter in a step.
#[derive(Debug)]
pub(super) enum GradientState<B: Backend> {
    /// No micro-batch has given one.
    Awaited,
    /// Added up on this rank alone while synchronisation is off, in the accumulation type. It joins
    /// the next reduction. Holds all elements, or the rows of an embedding.
    Local { gradient: Collected<B>, sum: Option<Accumulated<B>> },
    /// In the bucket or being reduced. Holds all elements or rows of each gradient until its
    /// reduction has landed.
    Travelling { gradients: Travelling<B>, sum: Option<Accumulated<B>> },
    /// The gradients of all micro-batches are in the sum.
    Accumulated(Accumulated<B>),
}

/// Gradients of one parameter that were reported and are not in its sum, oldest first. There are
/// several if one backward pass goes through several forward passes.
#[derive(Debug)]
pub(super) struct Travelling<B: Backend> {
    /// In the bucket, one entry for each occurrence of the parameter in the bucket's list.
    in_bucket: VecDeque<Collected<B>>,
    /// Sent, and kept because other ranks may still read them.
    reducing: VecDeque<Collected<B>>,
}

/// A full gradient of this rank, with its ledger entry.
#[derive(Debug)]
pub(super) struct Collected<B: Backend> {
    pub(super) array: DeviceArray<B>,
    pub(super) _lease: Lease,
}

impl<B: Backend> GradientState<B> {
    /// Returns the state in which nothing but the sum is left.
    fn settled(sum: Option<Accumulated<B>>) -> Self {
        sum.map_or(Self::Awaited, Self::Accumulated)
    }

    /// Returns true if the gradients of all micro-batches are in the sum.
    pub(super) fn is_settled(&self) -> bool {
        match self {
            Self::Awaited | Self::Accumulated(_) => true,
            Self::Local { .. } | Self::Travelling { .. } => false,
        }
    }

    /// Returns the sum of the micro-batches that were reduced.
    pub(super) fn sum(&self) -> Option<&Accumulated<B>> {
        match self {
            Self::Awaited => None,
            Self::Local { sum, .. } | Self::Travelling { sum, .. } => sum.as_ref(),
            Self::Accumulated(sum) => Some(sum),
        }
    }

    /// Takes the sum out. Local and travelling gradients stay.
    pub(super) fn take_sum(&mut self) -> Option<Accumulated<B>> {
        match self {
            Self::Awaited => None,
            Self::Local { sum, .. } | Self::Travelling { sum, .. } => sum.take(),
            Self::Accumulated(_) => match std::mem::replace(self, Self::Awaited) {
                Self::Accumulated(sum) => Some(sum),
                _ => unreachable!("the state was matched just before"),
            },
        }
    }

    /// Replaces the sum. Local and travelling gradients stay.
    pub(super) fn set_sum(&mut self, new: Accumulated<B>) {
        match self {
            Self::Local { sum, .. } | Self::Travelling { sum, .. } => *sum = Some(new),
            Self::Awaited | Self::Accumulated(_) => *self = Self::Accumulated(new),
        }
    }

    /// Keeps a gradient of this rank alone, in place of an earlier one, which the caller has added
    /// to it.
    pub(super) fn keep_local(&mut self, gradient: Collected<B>) {
        let sum = self.take_sum();
        *self = Self::Local { gradient, sum };
    }

    /// Takes the gradient of this rank alone out, if there is one.
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

    /// Adds a gradient to the ones in the bucket.
    pub(super) fn enter_bucket(&mut self, gradient: Collected<B>) {
        if let Self::Travelling { gradients, .. } = self {
            gradients.in_bucket.push_back(gradient);
            return;
        }
        let sum = self.take_sum();
        let gradients = Travelling { in_bucket: [gradient].into(), reducing: VecDeque::new() };
        *self = Self::Travelling { gradients, sum };
    }

    /// Moves the oldest gradient from the bucket to the ones being reduced, and returns the array
    /// to send. `scale` multiplies it by the factor before the sum.
    pub(super) fn leave_bucket(
        &mut self,
        scale: impl FnOnce(DeviceArray<B>) -> DeviceArray<B>,
    ) -> DeviceArray<B> {
        let Self::Travelling { gradients: Travelling { in_bucket, reducing }, .. } = self else {
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

    /// Frees the oldest gradient that was being reduced. Reductions land in the order in which they
    /// were started.
    pub(super) fn finish_reduction(&mut self) {
        let Self::Travelling { gradients, sum } = self else {
            unreachable!("a reduction that is over was under way")
        };
        gradients.reducing.pop_front();
        if gradients.reducing.is_empty() && gradients.in_bucket.is_empty() {
            *self = Self::settled(sum.take());
        }
    }

    /// Drops the sum and a local gradient. Travelling gradients stay, because other ranks may read
    /// them.
    pub(super) fn clear(&mut self) {
        match self {
            Self::Travelling { sum, .. } => *sum = None,
            Self::Awaited | Self::Local { .. } | Self::Accumulated(_) => *self = Self::Awaited,
        }
    }
}

/// The location of the sum of a parameter's gradients. It is the same as for its optimizer states.
#[derive(Debug, Clone)]
pub(crate) enum SumHome {
    /// On the device, as long as there is a sum.
    Device,
    /// Beside the optimizer states, in an array of its own, which exists for the whole run.
    Parked(Arc<ParkedArray>),
}

/// A flat reduced gradient: this rank's shard of it, or all of it.
///
/// The gradient of a single micro-batch stays in the type in which it travelled, if the
/// accumulation type represents the same values. Widening it would cost memory and a pass, and the
/// optimizer reads either type.
#[derive(Debug)]
pub(crate) struct Accumulated<B: Backend> {
    pub(crate) elements: SumElements<B>,
    /// The largest magnitude, `[1]`, that the sum had before the last addition; only where it
    /// decides whether a step overflows (see `GradientChecker::fits`).
    pub(crate) peak: Option<B::FloatTensorPrimitive>,
    /// The number of micro-batches in it.
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
        /// Computed while the sum was in memory, so that the step needs no second read.
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
    ///
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
    /// Whether they are finite, and never exceeded the range of the type in which ops compute.
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
    /// Checks the elements that this rank owns of a sum. A parked sum was checked when it was
    /// written, with the same additions.
    pub(crate) fn check(&self, sum: &Accumulated<B>, partition: Partition) -> GradientCheck {
        match &sum.elements {
            SumElements::Device(elements) => {
                self.check_tensor(&elements.tensor, sum.peak.as_ref(), partition)
            }
            SumElements::Parked { check, .. } => *check,
        }
    }

    /// Checks all elements of a sum. Only 1-bit optimizers need it, and they do not support
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
        let fits = stats.finite && self.fits(elements, peak);
        GradientCheck { sum_of_squares: stats.sum_of_squares, fits }
    }

    /// Returns true if an accumulated gradient never exceeded the range of the type in which ops
    /// compute.
    ///
    /// DeepSpeed adds fp16 gradients up in fp16 and skips a step in which they overflow. The same
    /// steps are skipped here, although the sum in f32 holds larger values. The `peak` finds an
    /// overflow that a later micro-batch has cancelled.
    fn fits(
        &self,
        gradient: B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
    ) -> bool {
        if self.compute != FloatDType::F16 || gradient.dtype() == DType::F16 {
            return true;
        }
        let fits = |tensor| (self.stats)((self.cast)(tensor, FloatDType::F16)).finite;
        peak.is_none_or(|peak| fits(peak.clone())) && fits(gradient)
    }
}
