//! How fast a rank computes.

/// The speed of one rank. The figures are what kernels reach, not the peaks of a data sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankSpeed {
    /// Floating-point operations per second of matrix products, in the element type of the run.
    pub flops: f64,
    /// Bytes per second that ops read and write in memory, both counted.
    pub memory_bandwidth: f64,
}

impl RankSpeed {
    /// Returns the speed of each of `ranks` ranks that share this speed evenly.
    pub fn shared_by(self, ranks: u64) -> Self {
        let ranks = ranks as f64;
        Self { flops: self.flops / ranks, memory_bandwidth: self.memory_bandwidth / ranks }
    }

    /// Returns the seconds of an op with `flops` floating-point operations that moves `bytes`
    /// bytes: the longer of both times (Williams et al. 2009, the roofline model).
    pub(super) fn seconds(&self, flops: u64, bytes: u64) -> f64 {
        (flops as f64 / self.flops).max(self.transfer_seconds(bytes))
    }

    /// Returns the seconds in which memory moves `bytes` bytes.
    pub(super) fn transfer_seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.memory_bandwidth
    }
}
