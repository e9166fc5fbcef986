//! The compute speed of a rank.

use deepburn_meta::Work;

use super::UnknownBandwidth;

/// The speed of one rank. Use the throughput that kernels achieve, not the peak values of a data
/// sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankSpeed {
    /// The floating-point operations per second of matrix products, in the compute type of the run.
    pub flops: f64,
    /// The bytes per second of a product's operands and result, in addition to its operations: a
    /// kernel packs operands before it multiplies them. Infinite if it does so meanwhile, or if it
    /// is not known.
    pub operand_bandwidth: f64,
    /// The memory bandwidth in bytes per second. Reads and writes both count.
    pub memory_bandwidth: f64,
    /// The seconds that an op takes in addition to its work: the time to call or launch it.
    pub op_seconds: f64,
    /// The bandwidth of copies between the device and host memory in bytes per second; `None` if it
    /// is not known. Needed for states or activations that are offloaded to host memory.
    pub host_bandwidth: Option<f64>,
    /// The bandwidth of the disk in bytes per second. Reads and writes both count. `None` if it is
    /// not known. Needed for states or activations that are offloaded to NVMe.
    pub disk_bandwidth: Option<f64>,
}

impl RankSpeed {
    /// Creates a speed without overhead of ops and operands, and without known bandwidths of
    /// offload.
    pub const fn new(flops: f64, memory_bandwidth: f64) -> Self {
        Self {
            flops,
            operand_bandwidth: f64::INFINITY,
            memory_bandwidth,
            op_seconds: 0.0,
            host_bandwidth: None,
            disk_bandwidth: None,
        }
    }

    /// Returns the speed of each of `ranks` rank threads that share a machine of this speed evenly.
    /// A thread calls its ops on one of the `cores`, so the overhead of ops grows only if there are
    /// more threads than cores.
    pub fn shared_by(self, ranks: u64, cores: u64) -> Self {
        let waiting = (ranks as f64 / cores.max(1) as f64).max(1.0);
        let ranks = ranks as f64;
        Self {
            flops: self.flops / ranks,
            operand_bandwidth: self.operand_bandwidth / ranks,
            memory_bandwidth: self.memory_bandwidth / ranks,
            op_seconds: self.op_seconds * waiting,
            host_bandwidth: self.host_bandwidth.map(|rate| rate / ranks),
            disk_bandwidth: self.disk_bandwidth.map(|rate| rate / ranks),
        }
    }

    /// Returns the seconds of an op: its overhead, and the longer of the times for its
    /// floating-point operations and for its bytes (roofline model, Williams et al. 2009).
    /// Operations of a product wait for its operands as far as
    /// [`operand_bandwidth`](Self::operand_bandwidth) says.
    pub(crate) fn seconds(&self, work: &Work) -> f64 {
        let operations = match work.operations {
            // Element-wise ops pack nothing.
            0 => 0.0,
            operations => {
                operations as f64 / self.flops + work.bytes as f64 / self.operand_bandwidth
            }
        };
        self.op_seconds + operations.max(self.transfer_seconds(work.bytes))
    }

    /// Returns the seconds of transfers to and from host memory and the disk.
    ///
    /// # Errors
    /// Returns an error if a bandwidth that the transfers need is not known.
    pub(crate) fn offload_seconds(&self, work: &Work) -> Result<f64, UnknownBandwidth> {
        let seconds = |bytes: u64, rate: Option<f64>, unknown| match (bytes, rate) {
            (0, _) => Ok(0.0),
            (bytes, Some(rate)) => Ok(bytes as f64 / rate),
            (_, None) => Err(unknown),
        };
        Ok(seconds(work.copied, self.host_bandwidth, UnknownBandwidth::Host)?
            + seconds(work.swapped, self.disk_bandwidth, UnknownBandwidth::Disk)?)
    }

    /// Returns the seconds to read or write `bytes` bytes in memory.
    pub(crate) fn transfer_seconds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.memory_bandwidth
    }
}
