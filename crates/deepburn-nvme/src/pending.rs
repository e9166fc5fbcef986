//! A read or write in progress.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use crate::statistics::WaitClock;
use crate::{AlignedBuffer, SwapError};

/// A read or write in progress, which owns its buffer until it is complete.
///
/// Dropping it neither cancels the transfer nor waits for it: the transfer completes, and its
/// buffer is returned to the pool. If a dropped write fails, the next call on its
/// [`SwapFile`](crate::SwapFile) returns the error.
#[derive(Debug)]
#[must_use = "only `wait` returns the buffer and the outcome"]
pub struct PendingIo {
    /// The channel on which the queue sends the result.
    outcome: Receiver<Result<AlignedBuffer, SwapError>>,
    /// The total time that callers have been blocked.
    clock: Arc<WaitClock>,
}

impl PendingIo {
    pub(crate) fn new(
        outcome: Receiver<Result<AlignedBuffer, SwapError>>,
        clock: Arc<WaitClock>,
    ) -> Self {
        Self { outcome, clock }
    }

    /// Waits until the transfer is complete and returns its buffer. After a read, the buffer
    /// contains the data; after a write, it is unchanged.
    ///
    /// # Errors
    /// Returns an error if the transfer or an earlier write failed. The buffer is then returned to
    /// the pool.
    pub fn wait(self) -> Result<AlignedBuffer, SwapError> {
        // If the transfer is already complete, the clock is not read and no waiting time is
        // counted.
        match self.outcome.try_recv() {
            Ok(outcome) => return outcome,
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => {}
        }
        let started = Instant::now();
        let outcome = self.outcome.recv().expect("workers complete every transfer before they end");
        self.clock.add(started.elapsed());
        outcome
    }
}
