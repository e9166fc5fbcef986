//! Gradients that are computed and reduced after the backward pass in which they belong.
//!
//! On a pipeline stage that defers the gradients of its weights, autodiff reports a gradient as an
//! op that has not run. It is kept with the others of its pass, and computed and entered in the
//! bucket when the schedule says so ([`GradientReducer::reduce_deferred`]):
//!
//! ```text
//!  last of 2 stages   F0  B0  F1  B1  W0  F2  B2  W1  W2
//!  deferred                0      0 1   1      1 2   2
//! ```
//!
//! The schedule does not depend on time, so all ranks of the stage enter the same gradients at the
//! same point. A pass is computed after all earlier ones. The gradients of a parameter are
//! therefore added in the order of micro-batches, and their sum has the bits of plain accumulation.

use std::collections::VecDeque;

use deepburn_comm::CommError;
use deepburn_ops::SumOps;

use super::GradientReducer;
use super::state::Collected;
use crate::deferred::DeferredTensor;
use crate::group::DeviceArray;

/// A gradient that autodiff has reported.
#[derive(Debug)]
pub(crate) enum ReportedGradient<B: SumOps> {
    /// It is computed.
    Array(DeviceArray<B>),
    /// Its op has not run.
    Deferred(DeferredTensor<B>),
}

impl<B: SumOps> ReportedGradient<B> {
    /// Returns the gradient, and computes it if its op has not run.
    pub(super) fn into_array(self) -> DeviceArray<B> {
        match self {
            Self::Array(array) => array,
            Self::Deferred(tensor) => DeviceArray::Dense(tensor.into_leased().into_inner()),
        }
    }
}

/// A gradient that waits for its turn.
#[derive(Debug)]
enum DeferredGradient<B: SumOps> {
    /// Its op has not run.
    Op(DeferredTensor<B>),
    /// It is computed. It waits for the gradient of an earlier micro-batch, which is not.
    Computed(Collected<B>),
}

/// The deferred gradients of a stage.
#[derive(Debug, Default)]
pub(super) struct DeferredGradients<B: SumOps> {
    /// The gradients of the pass in progress, with the index of their parameter.
    pass: Vec<(usize, DeferredGradient<B>)>,
    /// The gradients of earlier passes, oldest first. A pass without them has an empty list.
    passes: VecDeque<Vec<(usize, DeferredGradient<B>)>>,
}

impl<B: SumOps> DeferredGradients<B> {
    /// Returns true if a gradient of parameter `index` waits.
    fn contains(&self, index: usize) -> bool {
        let mut all = self.passes.iter().chain([&self.pass]).flatten();
        all.any(|(of, _)| *of == index)
    }

    /// Ends a backward pass.
    pub(super) fn end_pass(&mut self) {
        // A pass without deferred gradients gets an entry too, because `reduce_deferred` counts
        // passes.
        self.passes.push_back(std::mem::take(&mut self.pass));
    }

    /// Drops all gradients.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns true if there is no deferred gradient.
    pub(super) fn is_empty(&self) -> bool {
        self.pass.is_empty() && self.passes.iter().all(Vec::is_empty)
    }
}

impl<B: SumOps> GradientReducer<B> {
    /// Defers a reported gradient if its op has not run, or if an earlier gradient of its parameter
    /// waits. Returns any other gradient.
    pub(super) fn defer(
        &mut self,
        index: usize,
        gradient: ReportedGradient<B>,
    ) -> Option<DeviceArray<B>> {
        let waiting = match gradient {
            ReportedGradient::Deferred(tensor) => DeferredGradient::Op(tensor),
            // A model may use a parameter once in one micro-batch and twice in the next, where
            // autodiff has computed the sum. Entered now, it would be added before the other one.
            ReportedGradient::Array(array) if self.postponed.deferred.contains(index) => {
                DeferredGradient::Computed(self.collected(array))
            }
            ReportedGradient::Array(array) => return Some(array),
        };
        self.postponed.deferred.pass.push((index, waiting));
        None
    }

    /// Computes the deferred gradients of the oldest backward pass that has not been computed, and
    /// reduces them.
    ///
    /// # Errors
    /// Returns an error if a collective fails or a parked sum cannot be read or written.
    ///
    /// # Panics
    /// Panics with a [`CommError`] if the process group has ended.
    pub(crate) fn reduce_deferred(&mut self) -> Result<(), CommError> {
        for (index, gradient) in self.postponed.deferred.passes.pop_front().unwrap_or_default() {
            let array = match gradient {
                DeferredGradient::Op(tensor) => ReportedGradient::Deferred(tensor).into_array(),
                DeferredGradient::Computed(Collected { array, .. }) => array,
            };
            self.add_own(index, array)?;
        }
        self.drain()
    }

    /// Computes and reduces the deferred gradients of all backward passes.
    ///
    /// # Errors
    /// Returns the errors of [`reduce_deferred`](Self::reduce_deferred).
    pub(super) fn reduce_all_deferred(&mut self) -> Result<(), CommError> {
        while !self.postponed.deferred.passes.is_empty() {
            self.reduce_deferred()?;
        }
        Ok(())
    }
}
