//! The resident set of a process.
//!
//! Main type: [`Resident`]. Tensors are computed; what the program, the data and the kernels take beside them is
//! measured on the backend `flex` with the allocator of the programs (`benches/src/tables/forecast.rs`).

use super::{Forecast, LocalRanks, TrainedModel};
use crate::data::recipe::Subject;
use crate::job::activations::logits_bytes;
use crate::job::memory::MemoryLimit;
use crate::run::preparation::Preparation;

/// Bytes of a process without tensors: code, tokenizer, thread stacks, the pages that the allocator keeps.
const PROGRAM: u64 = 60 << 20;

/// Bytes of an element in f32.
const F32: u64 = 4;

/// The loss and the reduction hold the gradient of a large parameter in f32 up to twice besides the tensor that the
/// ledger counts, while they scale, round and add it.
const GRADIENT_COPIES: u64 = 2;

/// Bytes of the pieces of offloaded states that are read, updated and written at a time, and of gradients that are
/// being written.
const SWAP_BUFFERS: u64 = 80 << 20;

/// A forecast may be too low by one part in so many: 15 %, the largest difference but one that the bench `forecast` of
/// the suite has shown.
const DOUBT: u64 = 7;

/// Address space that a process reserves and does not use: thread stacks, arenas of the allocator.
const ADDRESS_SPACE: u64 = 512 << 20;

/// Bytes of the resident set of this process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// Tensors of its ranks.
    pub(super) tensors: u64,
    /// Logits that the loss of a language model computes at a time.
    pub(super) logits: u64,
    /// Copies of the gradient of the largest parameter, and buffers for NVMe.
    pub(super) copies: u64,
}

impl Resident {
    pub(super) fn new(
        forecast: &Forecast,
        preparation: &Preparation,
        model: &TrainedModel<'_>,
    ) -> Self {
        let LocalRanks { count, are_threads, .. } = forecast.local;
        let ranks = if are_threads { count } else { 1 };
        let host = forecast.host_memory(forecast.device());
        let tensors = if are_threads { host } else { host / count.max(1) };
        let logits = match &preparation.subject {
            Subject::Causal(subject) => logits_bytes(&subject.config, model.batch),
            Subject::Encoder(_) | Subject::Gpt2Classifier(_) => 0,
        };
        let largest = model.sizes.iter().map(|size| size.numel).max().unwrap_or(0);
        let swap = if forecast.rank.disk > 0 { SWAP_BUFFERS } else { 0 };
        let copies = largest.saturating_mul(F32 * GRADIENT_COPIES).saturating_add(swap);
        let copies = copies.saturating_mul(ranks);
        Self { tensors, logits: logits.saturating_mul(ranks), copies }
    }

    /// Bytes of the process.
    pub(super) fn total(&self) -> u64 {
        let beside = self.logits.saturating_add(self.copies).saturating_add(PROGRAM);
        self.tensors.saturating_add(beside)
    }

    /// Whether the run stays below `limit`, as far as a forecast can tell.
    pub(super) fn is_below(&self, limit: &MemoryLimit, local: &LocalRanks) -> bool {
        let bytes = self.compared(limit, local);
        let reserved = if limit.of_process { ADDRESS_SPACE } else { 0 };
        bytes.saturating_add(bytes / DOUBT).saturating_add(reserved) <= limit.bytes
    }

    /// Bytes that are compared with `limit`: of all processes of this host, or of this one.
    pub(super) fn compared(&self, limit: &MemoryLimit, local: &LocalRanks) -> u64 {
        let is_share = limit.of_process || local.are_threads;
        if is_share { self.total() } else { self.total().saturating_mul(local.count) }
    }
}
