//! Adds reduced gradients up over micro-batches, where their sums are kept.

use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use deepburn_comm::{CommError, Partition};
use deepburn_nvme::SwapError;
use deepburn_ops::float_bytes;

use super::gradient::{Accumulated, GradientCheck, GradientState, SumElements, SumHome};
use super::{GradientReducer, Types};
use crate::array::{in_type, maximum};
use crate::ledger::Category;
use crate::parked::ParkedTensor;
use crate::tensor::Leased;

impl<B: Backend> GradientReducer<B> {
    /// The accumulated gradients by parameter index, flat: this rank's shard, or all elements at
    /// stages 0 and 1. `None` for a parameter that got no gradient. Clears the accumulation; elements that
    /// are parked stay readable until the next backward pass.
    pub(crate) fn take(&mut self) -> Vec<Option<Accumulated<B>>> {
        self.gradients.iter_mut().map(GradientState::take_sum).collect()
    }

    /// The accumulated gradient of one parameter, flat, as in [`take`](Self::take).
    pub(crate) fn accumulated(&self, index: usize) -> Option<&Accumulated<B>> {
        self.gradients[index].sum()
    }

    /// Checks an accumulated gradient: what this rank owns of a mean, or all of a gradient of its own.
    pub(crate) fn check(&self, sum: &Accumulated<B>, partition: Partition) -> GradientCheck {
        if self.mean { self.checker.check(sum, partition) } else { self.checker.check_whole(sum) }
    }

    /// Whether an accumulated gradient of `count` micro-batches is in `dtype`.
    pub(crate) fn accumulates_in(&self, dtype: DType, count: usize) -> bool {
        let Types { communication, accumulation } = self.types;
        let scaled = self.scaling.after != 1.0 || !self.types.widens();
        let kept = if count > 1 || scaled { accumulation } else { communication };
        DType::from(kept) == dtype
    }

    /// Keeps a sum over `count` micro-batches, which later ones are added to.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn keep(
        &mut self,
        index: usize,
        tensor: B::FloatTensorPrimitive,
        peak: Option<B::FloatTensorPrimitive>,
        count: usize,
    ) -> Result<(), CommError> {
        let elements = match self.homes[index].clone() {
            SumHome::Device => {
                SumElements::Device(Leased::held(tensor, &self.ledger, Category::Gradients))
            }
            SumHome::Parked(array) => {
                // In memory until it is written.
                let Leased { tensor, lease: _lease } =
                    Leased::held(tensor, &self.ledger, Category::Buckets);
                let partition = self.parameters[index].partition();
                let check = self.checker.check_tensor(&tensor, peak.as_ref(), partition);
                let dtype = tensor.dtype();
                let written = array.write(&float_bytes::<B>(tensor), dtype, &mut self.writes);
                written.map_err(|error| self.failed("write", index, error))?;
                SumElements::Parked { array, dtype, check }
            }
        };
        self.gradients[index].set_sum(Accumulated { elements, peak, count });
        Ok(())
    }

    /// The failure of a disk as a `CommError`: backward can only return errors of collectives.
    fn failed(&self, what: &str, index: usize, error: SwapError) -> CommError {
        let path = self.parameters[index].path();
        self.group.failed(format!("cannot {what} the gradient of parameter {path}: {error}"))
    }

    /// Adds a reduced gradient to what earlier micro-batches gave.
    pub(super) fn accumulate(
        &mut self,
        index: usize,
        gradient: B::FloatTensorPrimitive,
    ) -> Result<(), CommError> {
        let Some(earlier) = self.gradients[index].take_sum() else {
            return self.keep(index, gradient, None, 1);
        };
        let Accumulated { elements, peak, count } = earlier;
        let (sum, is_shared) = match elements {
            // Leaves the ledger here: the next sum is written over it.
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
        let peak = self.watches_peaks(count).then(|| {
            let magnitude = B::float_max_abs(sum.clone());
            match peak {
                Some(peak) => maximum::<B>(peak, magnitude),
                None => magnitude,
            }
        });
        let [sum, gradient] =
            [sum, gradient].map(|part| in_type::<B>(part, self.types.accumulation));
        // An addition writes over its left operand, and would copy one that lies in a buffer of the file
        // first. Two numbers have the same sum in either order.
        let sum = match is_shared {
            true => B::float_add(gradient, sum),
            false => B::float_add(sum, gradient),
        };
        self.keep(index, sum, peak, count + 1)
    }

    /// Whether a sum over `count` micro-batches may have left fp16 although what travelled did not.
    fn watches_peaks(&self, count: usize) -> bool {
        let Types { communication, accumulation } = self.types;
        count > 1 && communication == FloatDType::F16 && accumulation == FloatDType::F32
    }
}
