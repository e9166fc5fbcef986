//! The forecast of the resident set of a process.
//!
//! Main type: [`Resident`]. The bytes of tensors are computed. The memory of the program, of its data and of temporary
//! buffers in kernels was measured with the backend `flex` and the allocator of the programs. The benchmark in
//! `benches/src/tables/forecast.rs` compares forecasts with runs.

use super::{HostForecast, LocalRanks, TrainedModel};
use crate::job::memory::MemoryLimit;
use crate::run::preparation::Preparation;

/// Bytes of a process without tensors: code, tokenizer, thread stacks, and free pages that the allocator keeps.
const PROGRAM: u64 = 60 << 20;

/// Temporary copies of a large gradient in f32, in addition to the tensor that the ledger counts. The loss and the
/// reduction hold up to two copies while they scale, round and add the gradient.
const GRADIENT_COPIES: u64 = 2;

/// Bytes of buffers for NVMe: the parts of offloaded states that are read, updated and written at a time, and the
/// gradients that are being written.
const SWAP_BUFFERS: u64 = 80 << 20;

/// Margin of the forecast, as a divisor: the forecast may be too low by a seventh (15 %). This much memory was lost in
/// gaps of the system allocator's heap if the process has no page heap for large blocks. With the page heap, the
/// forecast is too low by at most 3 % in the benchmark `forecast`.
const DOUBT: u64 = 7;

/// Address space that a process reserves without using it, for thread stacks and the arenas of the allocator.
const ADDRESS_SPACE: u64 = 512 << 20;

/// The resident set of this process, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// Tensors of its ranks in host memory.
    pub(super) tensors: u64,
    /// Logits of the chunk for which the loss of a language model is computed at a time.
    pub(super) logits: u64,
    /// Copies of the largest gradient, and buffers for NVMe.
    pub(super) copies: u64,
}

impl Resident {
    /// Forecasts the resident set of a run with the tensors of `forecast`.
    pub(super) fn new(
        forecast: &HostForecast,
        preparation: &Preparation,
        model: &TrainedModel<'_>,
    ) -> Self {
        let LocalRanks { count, are_threads, .. } = forecast.local;
        let ranks = if are_threads { count } else { 1 };
        let host = forecast.host_memory(forecast.rank.device.total);
        let tensors = if are_threads { host } else { host / count.max(1) };
        let logits = preparation.subject.info().architecture().logits_bytes(model.batch);
        let swap = if forecast.rank.disk.total > 0 { SWAP_BUFFERS } else { 0 };
        let copies = forecast.largest_gradient.saturating_mul(GRADIENT_COPIES).saturating_add(swap);
        // All ranks of the process may have their copies at the same time.
        let copies = copies.saturating_mul(ranks);
        Self { tensors, logits: logits.saturating_mul(ranks), copies }
    }

    /// Returns all bytes of the process.
    pub(super) fn total(&self) -> u64 {
        let beside = self.logits.saturating_add(self.copies).saturating_add(PROGRAM);
        self.tensors.saturating_add(beside)
    }

    /// Returns whether the run stays below `limit`, including the margin of the forecast.
    pub(super) fn is_below(&self, limit: &MemoryLimit, local: &LocalRanks) -> bool {
        let bytes = self.compared(limit, local);
        let reserved = if limit.of_process { ADDRESS_SPACE } else { 0 };
        bytes.saturating_add(bytes / DOUBT).saturating_add(reserved) <= limit.bytes
    }

    /// Returns the bytes to compare with `limit`: the bytes of all processes of this host, or of this process.
    pub(super) fn compared(&self, limit: &MemoryLimit, local: &LocalRanks) -> u64 {
        let is_share = limit.of_process || local.are_threads;
        if is_share { self.total() } else { self.total().saturating_mul(local.count) }
    }
}
