//! How fast a rank computes.

/// The speed of one rank. The figures are what kernels reach, not the peaks of a data sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Floating-point operations per second of matrix products, in the element type of the run.
    pub flops: f64,
    /// Bytes per second that ops read and write in memory, both counted.
    pub memory_bandwidth: f64,
}

impl Machine {
    /// The speed of each of `ranks` ranks that share this one.
    pub fn shared_by(self, ranks: u64) -> Self {
        let ranks = ranks as f64;
        Self { flops: self.flops / ranks, memory_bandwidth: self.memory_bandwidth / ranks }
    }

    /// Seconds of an op with so many floating-point operations that moves so many bytes: the longer of the two
    /// (Williams et al. 2009).
    pub(super) fn seconds(&self, flops: u64, bytes: u64) -> f64 {
        (flops as f64 / self.flops).max(self.transfer_seconds(bytes))
    }

    /// Seconds in which memory moves so many bytes.
    pub(super) fn transfer_seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.memory_bandwidth
    }
}
