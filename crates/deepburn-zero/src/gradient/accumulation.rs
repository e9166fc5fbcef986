//! Accumulates reduced gradients over the micro-batches of a step, on the device or in a parked
//! array.
//!
//! ```text
//!  micro-batch 1    no sum yet            keep the gradient in the communication type
//!  micro-batch 2    sum + gradient        in the accumulation type
//!  parked           read, add, write      squares and finiteness are computed while the sum is in memory
//!  step             take                  parked elements stay readable until the next backward pass
//! ```
//!
//! Both types are the plan's. By default, 16-bit training sends gradients in 16 bits and
//! accumulates them in f32 as soon as there are two. A sum on the device is counted as
//! [`Category::Gradients`]. The array of a parked sum is counted on its tier. While a parked sum is
//! in memory, it is also counted as [`Category::Buckets`]. So are, on a device, the sums that wait
//! to be parked or added to together, with few launches and waits. The additions are the same in
//! both places. Local gradients of `no_sync` passes are never parked.

use std::sync::Arc;

use burn_backend::{DType, FloatDType, TensorMetadata};
use deepburn_comm::CommError;
use deepburn_nvme::SwapError;
use deepburn_ops::{SumOps, each_float_bytes, is_in_host_memory, is_without_data};

use super::state::{Accumulated, GradientCheck, GradientState, SumElements, SumHome, Unchecked};
use super::{GradientReducer, Types};
use crate::group::flat::in_type;
use crate::group::maximum;
use crate::ledger::{Category, Lease};
use crate::offload::{ParkedArray, ParkedTensor};
use crate::session::Leased;

impl<B: SumOps> GradientReducer<B> {
    /// Takes the flat accumulated gradients by parameter index; `None` for a parameter without a
    /// gradient. A gradient has this rank's shard, or all elements at stages 0 and 1. Parked
    /// elements stay readable until the next backward pass.
    pub(crate) fn take(&mut self) -> Vec<Option<Accumulated<B>>> {
        self.gradients.iter_mut().map(GradientState::take_sum).collect()
    }

    /// Returns the flat accumulated gradient of one parameter, as [`take`](Self::take) does.
    pub(crate) fn accumulated(&self, index: usize) -> Option<&Accumulated<B>> {
        self.gradients[index].sum()
    }

    /// Checks the accumulated gradients by parameter index, as [`take`](Self::take) returns them.
    /// If gradients are averaged, only the elements that this rank owns are checked. Otherwise
    /// (1-bit optimizers) all elements are checked.
    pub(crate) fn check(&self, sums: &[Option<Accumulated<B>>]) -> Vec<Option<GradientCheck>> {
        let partition = |index: usize| self.mean.then(|| self.parameters[index].partition());
        self.policy.checker.check(sums, partition)
    }

    /// Returns true if an accumulated gradient of `count` micro-batches has type `dtype`. A
    /// checkpoint in the middle of a step can only be resumed with the same types.
    pub(crate) fn accumulates_in(&self, dtype: DType, count: usize) -> bool {
        let Types { communication, accumulation } = self.policy.types;
        // These are the conditions of `land` and `enter`: only an unscaled mean of a single
        // micro-batch stays in the communication type.
        let scaled = self.scaling.after != 1.0 || !self.policy.types.widens();
        let kept = if count > 1 || scaled || !self.mean { accumulation } else { communication };
        DType::from(kept) == dtype
    }

    /// Stores sums, to which later micro-batches are added. Each is of another parameter.
    ///
    /// A device is waited for once for the checks of the parked sums, or twice in fp16, and once
    /// for each 16 MiB of them.
    ///
    /// # Errors
    /// Returns an error if a parked sum cannot be written.
    pub(crate) fn keep(&mut self, sums: Vec<NewSum<B>>) -> Result<(), CommError> {
        let (mut parked, mut tensors) = (Vec::<ToPark<B>>::new(), Vec::new());
        for NewSum { index, elements: tensor, peak, count } in with_terms(sums) {
            match self.sums.homes[index].clone() {
                SumHome::Device => {
                    let held = Leased::held(tensor, &self.ledger, Category::Gradients);
                    let elements = SumElements::Device(held);
                    self.gradients[index].set_sum(Accumulated { elements, peak, count });
                }
                SumHome::Parked(array) => {
                    // The sum is counted as bucket memory until it is written.
                    let Leased { tensor, lease } =
                        Leased::held(tensor, &self.ledger, Category::Buckets);
                    let dtype = tensor.dtype();
                    parked.push(ToPark { index, array, dtype, peak, count, lease });
                    tensors.push(tensor);
                }
            }
        }
        if parked.is_empty() {
            return Ok(());
        }
        let unchecked = parked.iter().zip(&tensors).map(|(to_park, elements)| Unchecked {
            elements,
            peak: to_park.peak.as_ref(),
            partition: Some(self.parameters[to_park.index].partition()),
        });
        let unchecked: Vec<_> = unchecked.collect();
        let checks = self.policy.checker.check_in_memory(&unchecked);
        let mut parked = parked.into_iter().zip(checks);
        each_float_bytes::<B, _>(tensors, |bytes| {
            let Some((ToPark { index, array, dtype, peak, count, lease }, check)) = parked.next()
            else {
                unreachable!("each sum is read once")
            };
            let written = array.write(&bytes, dtype, &mut self.sums.writes);
            written.map_err(|error| self.failed("write", index, error))?;
            drop(lease);
            let elements = SumElements::Parked { array, dtype, check };
            self.gradients[index].set_sum(Accumulated { elements, peak, count });
            Ok(())
        })
    }

    /// Converts a disk failure to a `CommError`, because backward can only return errors of
    /// collectives. `what` is the operation, "read" or "write".
    pub(super) fn failed(&self, what: &str, index: usize, error: SwapError) -> CommError {
        let path = self.parameters[index].path();
        self.groups
            .world()
            .failed(format!("cannot {what} the gradient of parameter {path}: {error}"))
    }

    /// Adds a reduced flat gradient to the sum of earlier micro-batches, which is no longer kept.
    ///
    /// # Errors
    /// Returns an error if a parked sum cannot be read.
    fn added(
        &mut self,
        index: usize,
        gradient: B::FloatTensorPrimitive,
    ) -> Result<NewSum<B>, CommError> {
        let Some(earlier) = self.gradients[index].take_sum() else {
            return Ok(NewSum::whole(index, gradient, None, 1));
        };
        let Accumulated { elements, peak, count } = earlier;
        let (sum, is_shared) = match elements {
            // The ledger entry ends here, because the next sum overwrites this one.
            SumElements::Device(sum) => (sum.into_inner(), false),
            SumElements::Parked { array, dtype, .. } => {
                let sum = ParkedTensor { array: &array, dtype };
                let sum = sum.read::<B>(self.parameters[index].device());
                (sum.map_err(|error| self.failed("read", index, error))?, true)
            }
        };
        let _lease = is_shared.then(|| {
            let bytes = sum.shape().num_elements() * sum.dtype().size();
            self.ledger.hold(Category::Buckets, bytes)
        });
        // This comes before the addition, which may cancel an overflow of the sum so far.
        let (peak, count) = (self.peak(count, peak, &sum), count + 1);
        let sum = in_type::<B>(sum, self.policy.types.accumulation);
        if kept_at_once::<B>() > 0 {
            let elements = NewElements::Terms { sum, term: gradient };
            return Ok(NewSum { index, elements, peak, count });
        }
        let gradient = in_type::<B>(gradient, self.policy.types.accumulation);
        // An addition overwrites its left operand if the operand is not shared. A sum in a file
        // buffer is shared, so the gradient becomes the left operand. Addition is commutative, so
        // the result is the same.
        let tensor = match is_shared {
            true => B::float_add(gradient, sum),
            false => B::float_add(sum, gradient),
        };
        Ok(NewSum::whole(index, tensor, peak, count))
    }

    /// Adds a reduced flat gradient to the sum of earlier micro-batches. On a device, the new sum
    /// waits for others, with which it is kept at the end of the pass or once they are large.
    ///
    /// # Errors
    /// Returns an error if a parked sum cannot be read or written.
    pub(super) fn accumulate(
        &mut self,
        index: usize,
        gradient: B::FloatTensorPrimitive,
    ) -> Result<(), CommError> {
        // A pass may have several gradients of a parameter.
        if self.sums.waiting.sums.iter().any(|sum| sum.index == index) {
            self.keep_waiting()?;
        }
        let sum = self.added(index, gradient)?;
        self.keep_with_others(sum)
    }

    /// Keeps a sum, or lets it wait for others until [`keep_waiting`](Self::keep_waiting). No sum
    /// of the parameter waits already.
    ///
    /// # Errors
    /// Returns an error if a parked sum cannot be written.
    pub(super) fn keep_with_others(&mut self, sum: NewSum<B>) -> Result<(), CommError> {
        let limit = kept_at_once::<B>();
        let is_kept_alone = matches!(
            (&self.sums.homes[sum.index], &sum.elements),
            (SumHome::Device, NewElements::Whole(_))
        );
        if limit == 0 || is_kept_alone {
            return self.keep(vec![sum]);
        }
        let waiting = &mut self.sums.waiting;
        waiting.sums.push(sum);
        let bytes: usize = waiting.sums.iter().map(NewSum::bytes).sum();
        // The old entry ends before the new one begins.
        waiting.lease = None;
        waiting.lease = Some(self.ledger.hold(Category::Buckets, bytes));
        if bytes < limit { Ok(()) } else { self.keep_waiting() }
    }

    /// Keeps the sums that wait for others.
    ///
    /// # Errors
    /// Returns an error if a parked sum cannot be written.
    pub(super) fn keep_waiting(&mut self) -> Result<(), CommError> {
        let WaitingSums { sums, lease } = std::mem::take(&mut self.sums.waiting);
        drop(lease);
        self.keep(sums)
    }

    /// Returns the largest magnitude of `sum`, of `count` micro-batches, and of earlier sums,
    /// before something is added to it; `None` if no overflow can be missed.
    pub(super) fn peak(
        &self,
        count: usize,
        earlier: Option<B::FloatTensorPrimitive>,
        sum: &B::FloatTensorPrimitive,
    ) -> Option<B::FloatTensorPrimitive> {
        self.watches_peaks(count).then(|| {
            let magnitude = B::float_max_abs(sum.clone());
            match earlier {
                Some(earlier) => maximum::<B>(earlier, magnitude),
                None => magnitude,
            }
        })
    }

    /// Returns true if a sum over `count` micro-batches may exceed the fp16 range although the
    /// communicated gradients do not. With one micro-batch, the sum is the gradient itself.
    fn watches_peaks(&self, count: usize) -> bool {
        let Types { communication, accumulation } = self.policy.types;
        count > 1 && communication == FloatDType::F16 && accumulation == FloatDType::F32
    }
}

/// Sums that are kept together, so that a device is waited for once.
#[derive(Debug)]
pub(super) struct WaitingSums<B: SumOps> {
    /// The sums, of different parameters.
    sums: Vec<NewSum<B>>,
    /// Counts their elements.
    lease: Option<Lease>,
}

impl<B: SumOps> WaitingSums<B> {
    /// Returns true if no sum waits.
    pub(super) fn is_empty(&self) -> bool {
        self.sums.is_empty()
    }
}

impl<B: SumOps> Default for WaitingSums<B> {
    fn default() -> Self {
        Self { sums: Vec::new(), lease: None }
    }
}

/// A sum of gradients that is not stored yet.
#[derive(Debug)]
pub(crate) struct NewSum<B: SumOps, E = NewElements<B>> {
    /// The index of the parameter.
    index: usize,
    /// The flat sum.
    elements: E,
    /// The largest magnitude so far, if the overflow check needs it.
    peak: Option<B::FloatTensorPrimitive>,
    /// The number of micro-batches in the sum.
    count: usize,
}

/// The elements of a sum that is not stored yet.
#[derive(Debug)]
pub(crate) enum NewElements<B: SumOps> {
    /// The sum.
    Whole(B::FloatTensorPrimitive),
    /// A sum and what is added to it when it is stored, together with the terms of other sums.
    Terms { sum: B::FloatTensorPrimitive, term: B::FloatTensorPrimitive },
}

impl<B: SumOps> NewSum<B> {
    /// Returns a sum over `count` micro-batches. `peak` is the largest magnitude so far, if the
    /// overflow check needs it.
    pub(crate) fn whole(
        index: usize,
        sum: B::FloatTensorPrimitive,
        peak: Option<B::FloatTensorPrimitive>,
        count: usize,
    ) -> Self {
        Self { index, elements: NewElements::Whole(sum), peak, count }
    }

    /// Returns the size of the elements.
    fn bytes(&self) -> usize {
        let size = |tensor: &B::FloatTensorPrimitive| {
            tensor.shape().num_elements() * tensor.dtype().size()
        };
        match &self.elements {
            NewElements::Whole(sum) => size(sum),
            NewElements::Terms { sum, term } => size(sum) + size(term),
        }
    }
}

/// Adds the terms of all sums.
fn with_terms<B: SumOps>(
    sums: Vec<NewSum<B>>,
) -> impl Iterator<Item = NewSum<B, B::FloatTensorPrimitive>> {
    // Moved out of the sums, so that they are added to in place.
    let (mut earlier, mut terms) = (Vec::new(), Vec::new());
    let mut divided: Vec<NewSum<B, _>> = Vec::with_capacity(sums.len());
    for NewSum { index, elements, peak, count } in sums {
        let elements = match elements {
            NewElements::Whole(sum) => Some(sum),
            NewElements::Terms { sum, term } => {
                earlier.push(sum);
                terms.push(term);
                None
            }
        };
        divided.push(NewSum { index, elements, peak, count });
    }
    let mut added = B::add_terms(earlier, terms).into_iter();
    divided.into_iter().map(move |NewSum { index, elements, peak, count }| {
        let Some(elements) = elements.or_else(|| added.next()) else {
            unreachable!("every term was added to a sum")
        };
        NewSum { index, elements, peak, count }
    })
}

/// A sum that is written to a parked array.
struct ToPark<B: SumOps> {
    index: usize,
    array: Arc<ParkedArray>,
    dtype: DType,
    peak: Option<B::FloatTensorPrimitive>,
    count: usize,
    lease: Option<Arc<Lease>>,
}

/// Returns the bytes of sums, and of what is added to them, after which they are kept together. In
/// host memory, each is kept alone, which takes less memory.
fn kept_at_once<B: SumOps>() -> usize {
    if is_in_host_memory::<B>() || is_without_data::<B>() { 0 } else { 16 << 20 }
}
