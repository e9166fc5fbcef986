//! The gradient of one parameter, from backward to the optimizer step.
//!
//! Main type: [`GradientState`], which says all that this rank holds of it. Whatever holds memory in it
//! carries its own entry in the ledger.

use std::collections::VecDeque;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use deepburn_comm::Partition;
use deepburn_kernels::GradientStats;
use deepburn_nvme::SwapError;
use deepburn_ops::OptimizerOps;

use crate::array::DeviceArray;
use crate::ledger::Lease;
use crate::parked::{ParkedArray, ParkedTensor};
use crate::shard_spec::ShardSpec;
use crate::tensor::FullTensor;

/// The gradient of one parameter in a step.
#[derive(Debug)]
pub(super) enum GradientState<B: Backend> {
    /// No micro-batch has given one.
    Awaited,
    /// Added up on this rank alone, while synchronisation is off. It joins the next reduction. Holds all
    /// elements, or the rows of an embedding.
    Local { gradient: Collected<B>, sum: Option<Accumulated<B>> },
    /// In the bucket, or being reduced. Holds all elements or rows of each gradient until its reduction is over.
    Travelling { gradients: Travelling<B>, sum: Option<Accumulated<B>> },
    /// All that micro-batches gave is in the sum.
    Accumulated(Accumulated<B>),
}

/// Gradients of one parameter that were reported and are not in its sum, oldest first. There are several where
/// one backward pass goes through several forward passes.
#[derive(Debug)]
pub(super) struct Travelling<B: Backend> {
    in_bucket: VecDeque<Collected<B>>,
    reducing: VecDeque<Collected<B>>,
}

/// A full gradient of this rank.
#[derive(Debug)]
pub(super) struct Collected<B: Backend> {
    pub(super) array: DeviceArray<B>,
    pub(super) _lease: Lease,
}

impl<B: Backend> GradientState<B> {
    /// The state in which nothing but the sum is left.
    fn settled(sum: Option<Accumulated<B>>) -> Self {
        sum.map_or(Self::Awaited, Self::Accumulated)
    }

    /// Whether all that micro-batches gave is in the sum.
    pub(super) fn is_settled(&self) -> bool {
        match self {
            Self::Awaited | Self::Accumulated(_) => true,
            Self::Local { .. } | Self::Travelling { .. } => false,
        }
    }

    /// What the micro-batches have given that were reduced.
    pub(super) fn sum(&self) -> Option<&Accumulated<B>> {
        match self {
            Self::Awaited => None,
            Self::Local { sum, .. } | Self::Travelling { sum, .. } => sum.as_ref(),
            Self::Accumulated(sum) => Some(sum),
        }
    }

    /// Takes the sum out.
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

    /// Replaces the sum.
    pub(super) fn set_sum(&mut self, new: Accumulated<B>) {
        match self {
            Self::Local { sum, .. } | Self::Travelling { sum, .. } => *sum = Some(new),
            Self::Awaited | Self::Accumulated(_) => *self = Self::Accumulated(new),
        }
    }

    /// Keeps a gradient of this rank alone, in place of an earlier one.
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

    /// A gradient enters the bucket.
    pub(super) fn enter_bucket(&mut self, gradient: Collected<B>) {
        if let Self::Travelling { gradients, .. } = self {
            gradients.in_bucket.push_back(gradient);
            return;
        }
        let sum = self.take_sum();
        let gradients = Travelling { in_bucket: [gradient].into(), reducing: VecDeque::new() };
        *self = Self::Travelling { gradients, sum };
    }

    /// The oldest gradient in the bucket leaves it to be reduced; gives what is sent of it.
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

    /// The oldest reduction is over: what was sent is let go.
    pub(super) fn finish_reduction(&mut self) {
        let Self::Travelling { gradients, sum } = self else {
            unreachable!("a reduction that is over was under way")
        };
        gradients.reducing.pop_front();
        if gradients.reducing.is_empty() && gradients.in_bucket.is_empty() {
            *self = Self::settled(sum.take());
        }
    }

    /// Forgets the sum and what is of this rank alone.
    pub(super) fn clear(&mut self) {
        match self {
            Self::Travelling { sum, .. } => *sum = None,
            Self::Awaited | Self::Local { .. } | Self::Accumulated(_) => *self = Self::Awaited,
        }
    }
}

/// Where the sum of a parameter's gradients is kept.
#[derive(Debug, Clone)]
pub(crate) enum SumHome {
    /// On the device, for as long as there is one.
    Device,
    /// Beside the optimizer states, in an array of its own.
    Parked(Arc<ParkedArray>),
}

/// A flat reduced gradient: this rank's shard of it, or all of it. The gradient of a single micro-batch is
/// in the type in which it travelled, if the type of sums holds the same values: widening it would
/// cost memory and a pass, and the optimizer reads either.
#[derive(Debug)]
pub(crate) struct Accumulated<B: Backend> {
    pub(crate) elements: SumElements<B>,
    /// Largest magnitude, `[1]`, that the sum had on its way; only where that decides something.
    pub(crate) peak: Option<B::FloatTensorPrimitive>,
    /// Micro-batches in it.
    pub(crate) count: usize,
}

/// The elements of an accumulated gradient.
#[derive(Debug)]
pub(crate) enum SumElements<B: Backend> {
    /// On the device.
    Device(FullTensor<B>),
    /// Outside of it, until the next sum of this parameter is written.
    Parked {
        array: Arc<ParkedArray>,
        dtype: DType,
        /// Found while the sum was in memory.
        check: GradientCheck,
    },
}

impl<B: Backend> Accumulated<B> {
    /// Type of the elements.
    pub(crate) fn dtype(&self) -> DType {
        match &self.elements {
            SumElements::Device(sum) => sum.dtype(),
            SumElements::Parked { dtype, .. } => *dtype,
        }
    }

    /// The elements on the device.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn tensor(&self, device: &B::Device) -> Result<B::FloatTensorPrimitive, SwapError> {
        match &self.elements {
            SumElements::Device(sum) => Ok(sum.tensor.clone()),
            SumElements::Parked { array, dtype, .. } => {
                ParkedTensor { array, dtype: *dtype }.read::<B>(device)
            }
        }
    }
}

/// What a step has to know of an accumulated gradient before it changes anything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GradientCheck {
    /// Of the elements that this rank owns.
    pub(crate) sum_of_squares: f64,
    /// Whether they are finite, and had a place in the type that ops use all the time.
    pub(crate) fits: bool,
}

/// Checks accumulated gradients.
#[derive(Debug)]
pub(crate) struct GradientChecker<B: Backend> {
    share: ShardSpec,
    /// Type that ops use.
    compute: FloatDType,
    stats: fn(B::FloatTensorPrimitive) -> GradientStats,
    cast: fn(B::FloatTensorPrimitive, FloatDType) -> B::FloatTensorPrimitive,
}

impl<B: OptimizerOps> GradientChecker<B> {
    pub(crate) fn new(share: ShardSpec, compute: FloatDType) -> Self {
        Self { share, compute, stats: B::gradient_stats, cast: B::cast }
    }
}

impl<B: Backend> GradientChecker<B> {
    /// Checks the sum of a parameter. A parked sum was checked when it was written, by the
    /// same additions.
    pub(crate) fn check(&self, sum: &Accumulated<B>, partition: Partition) -> GradientCheck {
        match &sum.elements {
            SumElements::Device(elements) => {
                self.check_tensor(&elements.tensor, sum.peak.as_ref(), partition)
            }
            SumElements::Parked { check, .. } => *check,
        }
    }

    /// Checks all of a sum.
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

    /// Checks a sum in memory.
    pub(super) fn check_tensor(
        &self,
        sum: &B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
        partition: Partition,
    ) -> GradientCheck {
        self.check_elements(self.share.owned_gradient::<B>(sum, partition), peak)
    }

    fn check_elements(
        &self,
        elements: B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
    ) -> GradientCheck {
        let stats = (self.stats)(elements.clone());
        let fits = stats.finite && self.fits(elements, peak);
        GradientCheck { sum_of_squares: stats.sum_of_squares, fits }
    }

    /// Whether an accumulated gradient had a place in the type that ops use, all the time. In fp16
    /// DeepSpeed adds gradients up in that type and skips a step in which they overflow; so it is
    /// here, although a sum in f32 holds them.
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
