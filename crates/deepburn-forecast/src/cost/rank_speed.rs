//! The compute speed of a rank.

/// The speed of one rank. Use the throughput that kernels achieve, not the peak values of a data
/// sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankSpeed {
    /// The floating-point operations per second of matrix products, in the compute type of the run.
    pub flops: f64,
    /// The memory bandwidth in bytes per second. Reads and writes both count.
    pub memory_bandwidth: f64,
}

impl RankSpeed {
    /// Returns the speed of each of `ranks` ranks that share this speed evenly.
    pub fn shared_by(self, ranks: u64) -> Self {
        let ranks = ranks as f64;
        Self { flops: self.flops / ranks, memory_bandwidth: self.memory_bandwidth / ranks }
    }

    /// Returns the seconds of an op with `flops` floating-point operations that reads and writes
    /// `bytes` bytes: the longer of the two times (roofline model, Williams et al. 2009).
    pub(crate) fn seconds(&self, flops: u64, bytes: u64) -> f64 {
        (flops as f64 / self.flops).max(self.transfer_seconds(bytes))
    }

    /// Returns the seconds to read or write `bytes` bytes in memory.
    pub(crate) fn transfer_seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.memory_bandwidth
    }
}
