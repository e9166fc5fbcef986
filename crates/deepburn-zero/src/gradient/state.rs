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

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, TensorMetadata};
use deepburn_comm::Partition;
use deepburn_kernels::GradientStats;
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, SumOps};

use crate::group::DeviceArray;
use crate::ledger::Lease;
use crate::offload::{ParkedArray, ParkedTensor};
use crate::parameter::ShardSpec;
use crate::session::FullTensor;

/// The gradient of one parameter in a step.
#[derive(Debug)]
pub(super) enum GradientState<B: SumOps> {
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
pub(super) struct InReduction<B: SumOps> {
    /// The gradients in the bucket, one for each occurrence of the parameter in the bucket's list.
    in_bucket: VecDeque<Collected<B>>,
    /// The sent gradients, which are kept because other ranks may still read them.
    reducing: VecDeque<Collected<B>>,
}

/// A full gradient of this rank, with its ledger entry.
#[derive(Debug)]
pub(super) struct Collected<B: SumOps> {
    pub(super) array: DeviceArray<B>,
    pub(super) _lease: Lease,
}

impl<B: SumOps> GradientState<B> {
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
pub(crate) struct Accumulated<B: SumOps> {
    pub(crate) elements: SumElements<B>,
    /// The largest magnitude that the sum had before the last addition, of shape `[1]`. It is set
    /// only if the overflow check needs it (see `GradientChecker::can_exceed_f16`).
    pub(crate) peak: Option<B::FloatTensorPrimitive>,
    /// The number of micro-batches in the sum.
    pub(crate) count: usize,
}

/// The elements of an accumulated gradient.
#[derive(Debug)]
pub(crate) enum SumElements<B: SumOps> {
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

impl<B: SumOps> Accumulated<B> {
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

/// The kernel that computes the statistics of many gradients, as
/// [`OptimizerOps::gradient_stats`] describes it.
type StatsKernel<B> = fn(usize, &dyn Fn(usize) -> FloatTensor<B>) -> Vec<GradientStats>;

/// Checks accumulated gradients. Its kernels are function pointers, because the reducer's backend
/// is not required to have optimizer kernels.
#[derive(Debug)]
pub(crate) struct GradientChecker<B: SumOps> {
    /// The slices that this rank owns.
    share: ShardSpec,
    /// The type in which ops compute.
    compute: FloatDType,
    /// Returns the sum of squares of each array, and whether all its elements are finite.
    stats: StatsKernel<B>,
    /// Casts a tensor to another type.
    cast: fn(FloatTensor<B>, FloatDType) -> FloatTensor<B>,
}

/// A sum in memory that is to be checked.
pub(super) struct Unchecked<'a, B: SumOps> {
    /// The elements of the sum, as it is kept.
    pub(super) elements: &'a FloatTensor<B>,
    /// The peak of the sum ([`Accumulated::peak`]).
    pub(super) peak: Option<&'a FloatTensor<B>>,
    /// The partition, of which this rank's elements are checked, without padding. `None` if all
    /// elements are checked.
    pub(super) partition: Option<Partition>,
}

impl<B: OptimizerOps> GradientChecker<B> {
    pub(crate) fn new(share: ShardSpec, compute: FloatDType) -> Self {
        Self { share, compute, stats: B::gradient_stats, cast: B::cast }
    }
}

impl<B: SumOps> GradientChecker<B> {
    /// Checks the sums of all parameters; `None` stays `None`. For each sum, `partition` returns
    /// the partition whose owned elements are checked, or `None` if all elements are checked.
    ///
    /// A device is waited for once, or twice in fp16, whatever the number of sums. A parked sum was
    /// already checked when it was written, with the same order of additions.
    pub(super) fn check(
        &self,
        sums: &[Option<Accumulated<B>>],
        partition: impl Fn(usize) -> Option<Partition>,
    ) -> Vec<Option<GradientCheck>> {
        let mut checks = vec![None; sums.len()];
        let (mut indices, mut unchecked) = (Vec::new(), Vec::new());
        for (index, sum) in sums.iter().enumerate() {
            let Some(sum) = sum else { continue };
            let partition = partition(index);
            match &sum.elements {
                SumElements::Device(elements) => {
                    let (elements, peak) = (&elements.tensor, sum.peak.as_ref());
                    indices.push(index);
                    unchecked.push(Unchecked { elements, peak, partition });
                }
                SumElements::Parked { check, .. } if partition.is_some() => {
                    checks[index] = Some(*check);
                }
                // Only 1-bit optimizers check all elements, and they do not support offload.
                SumElements::Parked { .. } => {
                    unreachable!("states are on the device where ranks agree on momenta")
                }
            }
        }
        for (index, check) in indices.into_iter().zip(self.check_in_memory(&unchecked)) {
            checks[index] = Some(check);
        }
        checks
    }

    /// Checks sums in memory and returns one result for each.
    pub(super) fn check_in_memory(&self, sums: &[Unchecked<'_, B>]) -> Vec<GradientCheck> {
        // Made when it is needed, because it may be a copy.
        let elements = |sum: &Unchecked<'_, B>| match sum.partition {
            Some(partition) => self.share.owned_gradient::<B>(sum.elements, partition),
            None => sum.elements.clone(),
        };
        let stats = (self.stats)(sums.len(), &|index| elements(&sums[index]));
        let check = |stats: GradientStats| GradientCheck {
            sum_of_squares: stats.sum_of_squares,
            fits: stats.finite,
        };
        let mut checks: Vec<_> = stats.into_iter().map(check).collect();
        // Most overflows are infinite in the sum itself, so the other checks rarely run for a
        // skipped step.
        let finite = sums.iter().enumerate().filter(|(index, _)| checks[*index].fits);
        let watched = finite.filter(|(_, sum)| self.can_exceed_f16(sum.elements.dtype()));
        let watched: Vec<(usize, bool)> = watched
            .flat_map(|(index, sum)| {
                let peak = sum.peak.is_some().then_some((index, true));
                peak.into_iter().chain([(index, false)])
            })
            .collect();
        if watched.is_empty() {
            return checks;
        }
        let rounded = |place: usize| {
            let (index, is_peak) = watched[place];
            let sum = &sums[index];
            let tensor = match sum.peak {
                Some(peak) if is_peak => peak.clone(),
                _ => elements(sum),
            };
            (self.cast)(tensor, FloatDType::F16)
        };
        let stats = (self.stats)(watched.len(), &rounded);
        for ((index, _), stats) in watched.iter().zip(stats) {
            checks[*index].fits &= stats.finite;
        }
        checks
    }

    /// Returns true if a finite sum of this type may have exceeded the range of the type in which
    /// ops compute, so that the sum and its peak must be checked in f16.
    ///
    /// DeepSpeed accumulates fp16 gradients in fp16 and skips a step if they overflow. The same
    /// steps are skipped here, although the f32 sum can represent larger values. The peak detects
    /// an overflow that a later micro-batch has canceled.
    fn can_exceed_f16(&self, dtype: DType) -> bool {
        // An overflow of a sum in f16 is an infinity, which the caller has found. bf16 has the
        // range of f32.
        self.compute == FloatDType::F16 && dtype != DType::F16
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use burn_backend::TensorData;
    use burn_flex::{Flex, FlexDevice};
    use deepburn_config::Stage;
    use deepburn_ops::float_from_host;

    use super::*;

    thread_local! {
        /// The number of times that statistics were computed, each of which a device waits for.
        static WAITS: Cell<usize> = const { Cell::new(0) };
    }

    fn counted(count: usize, gradient: &dyn Fn(usize) -> FloatTensor<Flex>) -> Vec<GradientStats> {
        WAITS.set(WAITS.get() + 1);
        Flex::gradient_stats(count, gradient)
    }

    fn checker(compute: FloatDType) -> GradientChecker<Flex> {
        let share = ShardSpec { stage: Stage::Disabled, rank: 1, cuts_gradients: false };
        GradientChecker { share, compute, stats: counted, cast: Flex::cast }
    }

    fn tensor(values: &[f32]) -> FloatTensor<Flex> {
        float_from_host::<Flex>(TensorData::new(values.to_vec(), [values.len()]), &FlexDevice)
    }

    /// Returns the checks of all sums, and the number of waits of a device.
    fn checked(
        compute: FloatDType,
        sums: &[(FloatTensor<Flex>, Option<FloatTensor<Flex>>)],
    ) -> (Vec<GradientCheck>, usize) {
        let unchecked: Vec<_> = sums
            .iter()
            .map(|(elements, peak)| Unchecked { elements, peak: peak.as_ref(), partition: None })
            .collect();
        let before = WAITS.get();
        let checks = checker(compute).check_in_memory(&unchecked);
        (checks, WAITS.get() - before)
    }

    #[test]
    fn a_device_is_waited_for_once_whatever_the_number_of_gradients() {
        let sums: Vec<_> = (1..=100).map(|i| (tensor(&vec![0.1; i]), None)).collect();
        let (checks, waits) = checked(FloatDType::BF16, &sums);
        assert_eq!(waits, 1);
        let each = sums.chunks(1).flat_map(|sum| checked(FloatDType::BF16, sum).0);
        assert_eq!(checks, each.collect::<Vec<_>>());
    }

    #[test]
    fn sums_beyond_fp16_and_their_peaks_are_found_with_two_waits() {
        let (low, high) = (tensor(&[1.0, 2.0]), tensor(&[1.0, 1e6]));
        let half = Flex::cast(low.clone(), FloatDType::F16);
        let sums = [
            (low.clone(), None),
            (high.clone(), None),
            (low.clone(), Some(tensor(&[1e6]))),
            (low, Some(tensor(&[3.0]))),
            (half, None),
            (tensor(&[f32::NAN]), None),
        ];
        let (checks, waits) = checked(FloatDType::F16, &sums);
        let fits: Vec<_> = checks.iter().map(|check| check.fits).collect();
        assert_eq!((fits, waits), (vec![true, false, false, true, true, false], 2));
        let (checks, waits) = checked(FloatDType::F32, &sums);
        let fits: Vec<_> = checks.iter().map(|check| check.fits).collect();
        assert_eq!((fits, waits), (vec![true, true, true, true, true, false], 1));
    }

    #[test]
    fn only_owned_elements_count() {
        // Rank 1 of 2 owns the last two of five elements, which two ranks share as 3 + 2.
        let sum = tensor(&[100.0, 100.0, 100.0, 3.0, 4.0]);
        let partition = Some(Partition::new(5, 2));
        let unchecked = [Unchecked { elements: &sum, peak: None, partition }];
        let checks = checker(FloatDType::F32).check_in_memory(&unchecked);
        assert_eq!(checks, [GradientCheck { sum_of_squares: 25.0, fits: true }]);
    }
}
