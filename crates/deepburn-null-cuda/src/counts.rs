//! [`DriverCounts`]: what a program asked of the driver.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a process asked of the driver, from its start to its exit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverCounts {
    /// Launched kernels.
    pub launches: u64,
    /// Launches of each kernel, by its name in the PTX.
    pub kernels: BTreeMap<String, u64>,
    /// Copies from the host to the device.
    pub to_device: CopyCounts,
    /// Copies from the device to the host.
    pub to_host: CopyCounts,
    /// Calls in which the host waits for the device.
    pub waits: WaitCounts,
    /// Device memory.
    pub device_memory: AllocationCounts,
    /// Page-locked host memory.
    pub pinned_memory: AllocationCounts,
    /// Loaded modules; CubeCL makes one of each kernel.
    pub modules: u64,
    /// Recorded events.
    pub events: u64,
    /// Created streams.
    pub streams: u64,
    /// Waits of a stream for an event of another one.
    pub stream_waits: u64,
}

/// Copies in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyCounts {
    /// Number of copies.
    pub copies: u64,
    /// Copied bytes, without the padding of rows.
    pub bytes: u64,
}

/// Waits of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitCounts {
    /// Waits for an event.
    pub for_events: u64,
    /// Waits for all work of a stream.
    pub for_streams: u64,
}

/// Allocations of one kind of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationCounts {
    /// Number of allocations of at least one byte.
    pub allocations: u64,
    /// Bytes that are allocated now.
    pub bytes: u64,
    /// Largest number of bytes that were allocated at once.
    pub peak_bytes: u64,
}

impl WaitCounts {
    /// Returns the number of all waits.
    pub fn total(&self) -> u64 {
        self.for_events + self.for_streams
    }
}

impl AllocationCounts {
    /// Counts an allocation.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.allocations += 1;
        self.bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.bytes);
    }

    /// Counts the release of an allocation.
    pub(crate) fn remove(&mut self, bytes: u64) {
        self.bytes -= bytes;
    }
}

impl DriverCounts {
    /// Returns what this process asked more than `other`, which did less of the same.
    ///
    /// The difference of a run of three steps and one of two is a step. Bytes of memory are not
    /// subtracted, because they are not a sum over steps.
    pub fn beyond(&self, other: &Self) -> Self {
        let copies = |all: CopyCounts, part: CopyCounts| CopyCounts {
            copies: all.copies.saturating_sub(part.copies),
            bytes: all.bytes.saturating_sub(part.bytes),
        };
        let memory = |all: AllocationCounts, part: AllocationCounts| AllocationCounts {
            allocations: all.allocations.saturating_sub(part.allocations),
            ..all
        };
        let kernels = self.kernels.iter().map(|(name, count)| {
            let before = other.kernels.get(name).copied().unwrap_or(0);
            (name.clone(), count.saturating_sub(before))
        });
        Self {
            launches: self.launches.saturating_sub(other.launches),
            kernels: kernels.filter(|(_, count)| *count > 0).collect(),
            to_device: copies(self.to_device, other.to_device),
            to_host: copies(self.to_host, other.to_host),
            waits: WaitCounts {
                for_events: self.waits.for_events.saturating_sub(other.waits.for_events),
                for_streams: self.waits.for_streams.saturating_sub(other.waits.for_streams),
            },
            device_memory: memory(self.device_memory, other.device_memory),
            pinned_memory: memory(self.pinned_memory, other.pinned_memory),
            modules: self.modules.saturating_sub(other.modules),
            events: self.events.saturating_sub(other.events),
            streams: self.streams.saturating_sub(other.streams),
            stream_waits: self.stream_waits.saturating_sub(other.stream_waits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_of_two_runs_is_a_step() {
        let run = |launches, bytes| DriverCounts {
            launches,
            kernels: [("add".to_owned(), launches), ("init".to_owned(), 1)].into(),
            to_host: CopyCounts { copies: 1, bytes },
            device_memory: AllocationCounts { allocations: 2, bytes, peak_bytes: bytes },
            ..DriverCounts::default()
        };
        let step = run(7, 30).beyond(&run(4, 20));
        assert_eq!((step.launches, step.to_host.bytes, step.to_host.copies), (3, 10, 0));
        assert_eq!(step.kernels, [("add".to_owned(), 3)].into());
        let memory = AllocationCounts { allocations: 0, bytes: 30, peak_bytes: 30 };
        assert_eq!(step.device_memory, memory);
    }

    #[test]
    fn the_peak_remains_after_a_release() {
        let mut memory = AllocationCounts::default();
        memory.add(10);
        memory.add(5);
        memory.remove(10);
        memory.add(1);
        assert_eq!(memory, AllocationCounts { allocations: 3, bytes: 6, peak_bytes: 15 });
    }
}
