//! The gradient of one parameter between backward and step.

use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use deepburn_comm::Partition;
use deepburn_kernels::GradientStats;
use deepburn_nvme::SwapError;
use deepburn_ops::OptimizerOps;

use super::Collected;
use crate::ledger::Lease;
use crate::parked::{ParkedArray, ParkedTensor};
use crate::share::Share;

/// The gradient of one parameter between backward and step, less what is in a bucket.
#[derive(Debug)]
pub(super) struct Gradient<B: Backend> {
    /// The sum of this rank alone, made while synchronisation was off.
    pub(super) local: Option<Collected<B>>,
    /// What the micro-batches have given that were reduced.
    pub(super) sum: Option<Accumulated<B>>,
    /// Where that sum is kept.
    pub(super) home: SumHome,
}

/// Where the sum of a parameter's gradients is kept.
#[derive(Debug, Clone)]
pub(crate) enum SumHome {
    /// On the device, for as long as there is one.
    Device,
    /// Beside the optimizer states, in an array of its own.
    Parked(Arc<ParkedArray>),
}

/// A flat reduced gradient: this rank's shard of it, or all of it. That of a single micro-batch is
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
    Device { tensor: B::FloatTensorPrimitive, _lease: Lease },
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
            SumElements::Device { tensor, .. } => tensor.dtype(),
            SumElements::Parked { dtype, .. } => *dtype,
        }
    }

    /// The elements on the device.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn tensor(&self, device: &B::Device) -> Result<B::FloatTensorPrimitive, SwapError> {
        match &self.elements {
            SumElements::Device { tensor, .. } => Ok(tensor.clone()),
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
    share: Share,
    /// Type that ops use.
    compute: FloatDType,
    stats: fn(B::FloatTensorPrimitive) -> GradientStats,
    cast: fn(B::FloatTensorPrimitive, FloatDType) -> B::FloatTensorPrimitive,
}

impl<B: OptimizerOps> GradientChecker<B> {
    pub(crate) fn new(share: Share, compute: FloatDType) -> Self {
        Self { share, compute, stats: B::gradient_stats, cast: B::cast }
    }
}

impl<B: Backend> GradientChecker<B> {
    /// Checks the sum of a parameter. That of one that is parked was checked when it was written, by the
    /// same additions.
    pub(crate) fn check(&self, sum: &Accumulated<B>, partition: Partition) -> GradientCheck {
        match &sum.elements {
            SumElements::Device { tensor, .. } => {
                self.check_tensor(tensor, sum.peak.as_ref(), partition)
            }
            SumElements::Parked { check, .. } => *check,
        }
    }

    /// Checks a sum in memory.
    pub(super) fn check_tensor(
        &self,
        sum: &B::FloatTensorPrimitive,
        peak: Option<&B::FloatTensorPrimitive>,
        partition: Partition,
    ) -> GradientCheck {
        let owned = self.share.owned_gradient::<B>(sum, partition);
        let stats = (self.stats)(owned.clone());
        let fits = stats.finite && self.fits(owned, peak);
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
