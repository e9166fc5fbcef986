//! Whether a plan of a tuner fits on this host.
//!
//! Main type: [`HostLimits`]. A plan is forecast as a run is, and compared with the same limits, so
//! that a configuration which the tuner suggests is not refused by the run.

use std::path::{Path, PathBuf};

use deepburn::Forecast;
use deepburn::tune::{MemoryShortage, StepMemory, largest_stage, memory_of};
use deepburn::zero::check_folder;
use deepburn_config::{Plan, counted};
use deepburn_models::BatchShape;

use super::{HostForecast, LocalRanks, Resident, readable};
use crate::job::memory::{MemoryLimit, memory_limits};
use crate::run::preparation::Preparation;

/// The memory of this host that a search may use.
pub(crate) struct HostLimits {
    /// Limits of host memory.
    memory: Vec<MemoryLimit>,
    /// The limit of the memory of each device other than the host; `None` if it is not known.
    device: Option<u64>,
    /// The limit of the files of all ranks on NVMe; `None` for the free space of the disk.
    disk: Option<u64>,
    /// The folder of these files, if there are any.
    nvme: Option<PathBuf>,
}

impl HostLimits {
    /// Returns the limits of this host, and of the command line: `memory` limits each device, or
    /// host memory if tensors are there. Files on NVMe are in the folder `nvme`.
    pub(crate) fn new(
        memory: Option<u64>,
        disk: Option<u64>,
        nvme: Option<&Path>,
        on_host: bool,
    ) -> Self {
        let mut limits = memory_limits();
        if let (Some(bytes), true) = (memory, on_host) {
            limits.push(MemoryLimit { bytes, what: "--memory", of_process: false });
        }
        let device = memory.filter(|_| !on_host);
        Self { memory: limits, device, disk, nvme: nvme.map(Path::to_owned) }
    }

    /// Returns the memory of a run of `preparation` with this plan on rank threads, and what is
    /// missing if it does not fit. `length` is the number of tokens of a sequence, and `stages` are
    /// the plan's forecasts of its pipeline stages.
    ///
    /// The memory of a rank is of the stage that needs the most of it. Host memory has all ranks.
    pub(crate) fn fit(
        &self,
        preparation: &Preparation,
        plan: &Plan,
        length: u64,
        stages: &[Forecast],
    ) -> (StepMemory, Option<MemoryShortage>) {
        let count = plan.mesh.world_size() as u64;
        let backend = preparation.job.training.placement.backend;
        // The tuner measures on rank threads of its own process.
        let local = LocalRanks { first: 0, count, are_threads: true, backend };
        let host = HostForecast::new(&preparation.sizes, stages, plan, local);
        let batch = BatchShape { sequences: plan.batch.micro_batch_size as u64, length };
        let resident = Resident::new(&host, preparation, batch);
        let memory =
            StepMemory { resident: Some(resident.total()), ..memory_of(&largest_stage(stages)) };
        let shortages = [self.host(&host, &resident), self.of_device(&host), self.of_disk(&host)];
        (memory, shortages.into_iter().flatten().max_by_key(|shortage| shortage.bytes))
    }

    /// Compares host memory with its limits.
    fn host(&self, host: &HostForecast, resident: &Resident) -> Option<MemoryShortage> {
        let short = self.memory.iter().filter(|limit| !resident.is_below(limit, &host.local));
        let limit = short.min_by_key(|limit| limit.bytes)?;
        let (needed, margined) =
            (resident.compared(limit, &host.local), resident.with_margin(limit, &host.local));
        // With the margin, so that the run is not refused when it starts.
        let missing = margined.saturating_sub(limit.bytes);
        Some(MemoryShortage {
            reason: format!(
                "host memory: {} with {} and a margin of {}, of {} ({}); {} are missing",
                readable(needed),
                counted(host.local.count as usize, "rank"),
                readable(margined - needed),
                readable(limit.bytes),
                limit.what,
                readable(missing)
            ),
            bytes: missing,
        })
    }

    /// Compares the memory of a device with its limit.
    fn of_device(&self, host: &HostForecast) -> Option<MemoryShortage> {
        let (needed, limit) = (host.largest_rank.device.total, self.device?);
        (needed > limit && !host.local.backend.is_host()).then(|| MemoryShortage {
            reason: format!(
                "device memory: {} of {} (--memory)",
                readable(needed),
                readable(limit)
            ),
            bytes: needed - limit,
        })
    }

    /// Compares the files on NVMe with their limit, or with the free space of the disk.
    fn of_disk(&self, host: &HostForecast) -> Option<MemoryShortage> {
        let needed = host.rank.disk.total.saturating_mul(host.local.count);
        match (self.disk, &self.nvme) {
            _ if needed == 0 => None,
            (Some(limit), _) => (needed > limit).then(|| MemoryShortage {
                reason: format!("NVMe: {} of {} (--disk)", readable(needed), readable(limit)),
                bytes: needed - limit,
            }),
            (None, Some(folder)) => check_folder(folder, needed)
                .err()
                .map(|error| MemoryShortage { reason: error.to_string(), bytes: needed }),
            (None, None) => None,
        }
    }
}
