//! The forecast of the resident set of a process.
//!
//! Main type: [`Resident`]. The bytes of tensors are computed. The memory of the program, of its
//! data and of temporary buffers in kernels was measured with the backend `flex` and the allocator
//! of the programs. The benchmark in `benches/src/tables/forecast.rs` compares forecasts with runs.

use deepburn::zero::Category;
use deepburn_config::Backend;
use deepburn_models::BatchShape;

use super::{HostForecast, LocalRanks, Tensors};
use crate::job::memory::MemoryLimit;
use crate::run::preparation::Preparation;

/// Bytes of a process without tensors: code, thread stacks, and free pages that the allocator
/// keeps.
const PROGRAM: u64 = 36 << 20;

/// Bytes that the training of a tokenizer takes. The allocator keeps them. A job with a pretrained
/// model reads its tokenizer.
const TOKENIZER: u64 = 16 << 20;

/// Bytes of buffers for NVMe: the parts of offloaded states that are read, updated and written at a
/// time, and the gradients that are being written.
const SWAP_BUFFERS: u64 = 80 << 20;

/// Margin of the forecast, as a divisor: the forecast may be too low by a seventh (15 %). This much
/// memory was lost in gaps of the system allocator's heap if the process has no page heap for large
/// blocks. With the page heap, it was too low by at most 12 %, with optimizer states or parameters
/// on NVMe, and by at most 6 % without.
const DOUBT: u64 = 7;

/// Address space that a process reserves without using it, for thread stacks and the arenas of the
/// allocator.
const ADDRESS_SPACE: u64 = 512 << 20;

/// The resident set of this process, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// Tensors of its ranks in host memory, and temporary arrays of a training pass that the ledger
    /// does not count.
    pub(super) tensors: u64,
    /// Buffers for NVMe. Their memory is not reused for tensors.
    pub(super) buffers: u64,
    /// Everything that does not depend on the model.
    pub(super) program: u64,
}

impl Resident {
    /// Forecasts the resident set of a run with the tensors of `forecast` and micro-batches of this
    /// shape.
    pub(super) fn new(
        forecast: &HostForecast,
        preparation: &Preparation,
        batch: BatchShape,
    ) -> Self {
        let LocalRanks { count, are_threads, backend, .. } = forecast.local;
        // Ranks in this process.
        let ranks = if are_threads { count } else { 1 };
        let of_process = |bytes: u64| if are_threads { bytes } else { bytes / count.max(1) };
        let has_disk = forecast.rank.disk.of(Category::Parameters) > 0;
        let tensors = match are_threads {
            // A single rank gathers parameters on NVMe in the buffers into which it reads them.
            true if has_disk && count == 1 && backend == Backend::Flex => {
                forecast.rank.device.ungathered + forecast.rank.host.total
            }
            true => forecast.host_memory(Tensors::All),
            false => forecast.process_memory(Tensors::All),
        };
        let logits = preparation.subject.info().architecture().logits_bytes(batch);
        // Buffers of reads are kept for the next one. Several ranks, or another backend than flex,
        // copy their shards from them to one array.
        let gathered = forecast.rank.device.of(Category::Gathered);
        let read = if has_disk { of_process(gathered) } else { 0 };
        // The logits are freed before backward begins, which copies gradients.
        let pass = logits.saturating_mul(ranks).max(forecast.gradient_copies(ranks));
        let swap = if forecast.rank.disk.total > 0 { SWAP_BUFFERS } else { 0 };
        let tokenizer = if preparation.pretrained.is_none() { TOKENIZER } else { 0 };
        // Memory that was freed after the start is reused, so only the larger of the two counts.
        let tensors = tensors.saturating_add(pass).max(forecast.initial());
        let buffers = read.max(forecast.masters_read()).saturating_add(swap.saturating_mul(ranks));
        Self { tensors, buffers, program: PROGRAM.saturating_add(tokenizer) }
    }

    /// Returns all bytes of the process.
    pub(super) fn total(&self) -> u64 {
        self.tensors.saturating_add(self.buffers).saturating_add(self.program)
    }

    /// Returns whether the run stays below `limit`, including the margin of the forecast.
    pub(super) fn is_below(&self, limit: &MemoryLimit, local: &LocalRanks) -> bool {
        self.with_margin(limit, local) <= limit.bytes
    }

    /// Returns the bytes to compare with `limit`, with the margin of the forecast.
    pub(super) fn with_margin(&self, limit: &MemoryLimit, local: &LocalRanks) -> u64 {
        let bytes = self.compared(limit, local);
        let reserved = if limit.of_process { ADDRESS_SPACE } else { 0 };
        bytes.saturating_add(bytes / DOUBT).saturating_add(reserved)
    }

    /// Returns the bytes to compare with `limit`: the bytes of all processes of this host, or of
    /// this process.
    pub(super) fn compared(&self, limit: &MemoryLimit, local: &LocalRanks) -> u64 {
        let is_share = limit.of_process || local.are_threads;
        if is_share { self.total() } else { self.total().saturating_mul(local.count) }
    }
}
