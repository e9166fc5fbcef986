//! Gradients with parts that arrive after the backward pass in which they belong.
//!
//! The last pipeline stage that reads a parameter owns it. An embedding that is tied to the output
//! layer is read by the first stage, too, whose part of the gradient is computed at the end of its
//! backward pass: when the last stage has begun with other micro-batches. The owner does not wait
//! for it. It keeps its own part, and when the gradient is complete, adds it to the sum of earlier
//! micro-batches:
//!
//! ```text
//!  stage 0   F0 F1    B0 ─rows─┐    F2    B1 ─rows─┐
//!  stage 1      F0 B0    F1 B1 └► add 0    F2 B2   └► add 1
//! ```
//!
//! The rows that a micro-batch has looked up are a fraction of the gradient of the output layer,
//! which would otherwise be sent in the other direction. The additions are the same as on one
//! stage, in the same order.

use std::collections::VecDeque;

use burn_backend::Shape;
use deepburn_comm::{CommError, Pending};
use deepburn_ops::SumOps;

use super::state::Collected;
use crate::group::DeviceArray;

/// A gradient of which a part may be late.
#[derive(Debug)]
pub(super) struct LateGradient<B: SumOps> {
    /// The index of the parameter.
    pub(super) index: usize,
    /// What autodiff has reported.
    reported: LatePart<B>,
    /// The rows of lookups, in the order of the backward pass.
    rows: Vec<LatePart<B>>,
}

/// A part of a late gradient.
#[derive(Debug)]
pub(super) enum LatePart<B: SumOps> {
    /// This stage has computed it.
    Here(Collected<B>),
    /// An earlier stage sends it.
    Coming(Pending<DeviceArray<B>>),
}

impl<B: SumOps> LatePart<B> {
    /// Returns the part, and waits for it if it has not arrived.
    fn wait(self) -> Result<DeviceArray<B>, CommError> {
        match self {
            Self::Here(Collected { array, .. }) => Ok(array),
            Self::Coming(message) => Ok(message.wait()?.swap_remove(0)),
        }
    }
}

impl<B: SumOps> LateGradient<B> {
    /// Waits for the parts that have not arrived, and returns the sum in the parameter's `shape`.
    ///
    /// # Errors
    /// Returns an error if a stage that sends a part fails or does not send it in time.
    pub(super) fn wait(self, shape: &Shape) -> Result<DeviceArray<B>, CommError> {
        // A part that was sent may be flat, but rows are added to a table of the parameter's shape.
        let reported = match self.reported.wait()? {
            DeviceArray::Dense(tensor) => {
                DeviceArray::Dense(B::float_reshape(tensor, shape.clone()))
            }
            rows => rows,
        };
        // Autodiff adds the sum of earlier gradients to a new one.
        self.rows.into_iter().try_fold(reported, |sum, rows| Ok(super::add(rows.wait()?, sum)))
    }
}

/// The late gradients of a stage.
#[derive(Debug, Default)]
pub(super) struct LateGradients<B: SumOps> {
    /// The rows of lookups in the backward pass in progress, with the index of their table.
    rows: Vec<(usize, LatePart<B>)>,
    /// The late gradients of the pass in progress.
    pass: Vec<LateGradient<B>>,
    /// The late gradients of earlier passes, oldest first. A pass without them has an empty list.
    passes: VecDeque<Vec<LateGradient<B>>>,
}

impl<B: SumOps> LateGradients<B> {
    /// Adds the rows of a lookup in table `index`, before autodiff reports the gradient of the
    /// table.
    pub(super) fn add_rows(&mut self, index: usize, rows: LatePart<B>) {
        self.rows.push((index, rows));
    }

    /// Adds the gradient that autodiff has reported for parameter `index`, with the rows of its
    /// lookups.
    pub(super) fn add(&mut self, index: usize, reported: LatePart<B>) {
        let is_own = |(of, _): &mut (usize, LatePart<B>)| *of == index;
        let rows = self.rows.extract_if(.., is_own).map(|(_, rows)| rows).collect();
        self.pass.push(LateGradient { index, reported, rows });
    }

    /// Ends a backward pass. Returns the index of a table with rows whose gradient autodiff has not
    /// reported, if there is one.
    #[must_use]
    pub(super) fn end_pass(&mut self) -> Option<usize> {
        // A pass without late gradients gets an entry too, because `take_due` counts passes.
        self.passes.push_back(std::mem::take(&mut self.pass));
        self.rows.first().map(|(index, _)| *index)
    }

    /// Removes and returns the gradients of all but the last `open` passes, oldest first.
    pub(super) fn take_due(&mut self, open: usize) -> Vec<LateGradient<B>> {
        let due = self.passes.len().saturating_sub(open);
        self.passes.drain(..due).flatten().collect()
    }

    /// Drops all gradients and rows. Their messages are discarded.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns true if there is no late gradient.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.pass.is_empty() && self.passes.iter().all(Vec::is_empty)
    }
}
