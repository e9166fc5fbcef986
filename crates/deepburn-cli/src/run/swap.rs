//! Checks and reports of model states and activations that are offloaded to NVMe.
//!
//! The size and the folder of each swap file are checked before training, because a run cannot
//! continue if the disk becomes full in the middle of a step. The report at the end relates the
//! bytes written to the endurance of a drive.

use deepburn::zero::{IoStatistics, check_folder, swap_bytes};
use deepburn_config::{
    NvmePlan, OptimizerOffload, ParameterOffload, SwapFilePlan, ZeroPlan, counted,
};

use crate::failure::Failure;
use crate::run::preparation::Preparation;

/// Checks that the swap files of the `local_ranks` ranks on this host fit in their folders. Each
/// rank offloads up to `activations` bytes of activations.
///
/// # Errors
/// Returns a user's mistake if a folder is missing, cannot be written to, is on a file system in
/// memory, or has too little free space.
pub(crate) fn check_swap(
    preparation: &Preparation,
    local_ranks: usize,
    activations: u64,
) -> Result<(), Failure> {
    let check = |key: &str, file: &SwapFilePlan, bytes: u64| {
        check_folder(&file.folder, bytes.saturating_mul(local_ranks as u64))
            .map_err(Failure::of_key(key))
    };
    let states = nvme(preparation).map(|nvme| &nvme.file);
    let state_bytes = file_bytes(preparation, &preparation.plan.zero);
    if let Some(file) = states {
        check("deepspeed.zero_optimization.offload_optimizer.nvme_path", file, state_bytes)?;
    }
    let Some(file) = preparation.plan.backward.activations.offload.swap_file() else {
        return Ok(());
    };
    // If both files are in one folder, the sum of their sizes has to fit.
    let shared = states.is_some_and(|states| states.folder == file.folder);
    let bytes = activations.saturating_add(if shared { state_bytes } else { 0 });
    check("deepspeed.activation_checkpointing.nvme_path", file, bytes)
}

/// Logs the contents of each rank's swap file. Warns if `max_in_cpu` keeps all parameters in
/// memory, or if `sub_group_size` makes the file much larger than its contents.
///
/// Every process calls it once, before training starts.
pub(crate) fn announce_swap(preparation: &Preparation) {
    if let Some(file) = preparation.plan.backward.activations.offload.swap_file() {
        tracing::info!("saved activations are in {}", file.folder.display());
    }
    let Some(nvme) = nvme(preparation) else { return };
    let zero = &preparation.plan.zero;
    let bytes = file_bytes(preparation, zero);
    // `max_in_cpu` may keep every parameter in memory, which shows as the same size of the file.
    let on_device = ZeroPlan { parameter_shards: ParameterOffload::Device, ..zero.clone() };
    let has_parameters = bytes > file_bytes(preparation, &on_device);
    let what = match has_parameters {
        true => "optimizer states, gradients and parameters",
        false => "optimizer states and gradients",
    };
    tracing::info!(
        "{what} are in {}: {:.3} GB per rank",
        nvme.file.folder.display(),
        gigabytes(bytes)
    );
    if let ParameterOffload::Nvme { max_in_cpu, .. } = zero.parameter_shards
        && !has_parameters
    {
        tracing::warn!(
            "deepspeed.zero_optimization.offload_param: all parameters stay in memory, because max_in_cpu is \
             {max_in_cpu} elements; set it to 0 to offload them to NVMe"
        );
    }
    // Each group is padded to whole blocks, so the blocks of small groups are mostly empty.
    let unpadded = file_bytes(preparation, &with_sub_group_size(usize::MAX, zero));
    if bytes > unpadded.saturating_mul(2) {
        tracing::warn!(
            "deepspeed.zero_optimization.sub_group_size: groups of {} elements make the swap file slow and {:.0} times \
             as large as its contents; use 1e6 or more",
            nvme.sub_group_size,
            bytes as f64 / unpadded.max(1) as f64
        );
    }
}

/// Returns the plan with another `sub_group_size`.
///
/// Only the size of the file depends on it, through the padding of each group to whole blocks.
fn with_sub_group_size(sub_group_size: usize, zero: &ZeroPlan) -> ZeroPlan {
    let mut zero = zero.clone();
    if let OptimizerOffload::Nvme(nvme) = &mut zero.optimizer_states {
        nvme.sub_group_size = sub_group_size;
    }
    zero
}

/// Terabytes written (TBW) that the warranty of a common 1 TB drive covers.
///
/// Larger drives have a proportionally higher rating. The figure is an example and not a limit.
const RATED_TERABYTES: f64 = 600.0;

/// Logs the bytes that a rank has read and written in `steps` steps, and how long a drive lasts at
/// that rate.
///
/// GB are 1e9 bytes. `waited` is the time in which the rank was blocked by the disk.
pub(crate) fn report_swap(statistics: &IoStatistics, steps: u64) {
    let written = gigabytes(statistics.bytes_written);
    tracing::info!(
        "NVMe: rank 0 read {:.3} GB and wrote {written:.3} GB in {}, and waited {:.1} s for the disk",
        gigabytes(statistics.bytes_read),
        counted(steps as usize, "step"),
        statistics.waited.as_secs_f64()
    );
    let per_step = written / steps.max(1) as f64;
    if per_step > 0.0 {
        tracing::info!(
            "NVMe: {per_step:.3} GB written per step and rank; a drive rated for {RATED_TERABYTES} TB lasts {:.0} steps",
            RATED_TERABYTES * 1e3 / per_step
        );
    }
}

/// Converts bytes to GB.
fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// Returns the plan of the NVMe offload of optimizer states, if they are offloaded to NVMe.
///
/// Gradients and parameter shards on NVMe are in the same file.
fn nvme(preparation: &Preparation) -> Option<&NvmePlan> {
    match &preparation.plan.zero.optimizer_states {
        OptimizerOffload::Nvme(nvme) => Some(nvme),
        OptimizerOffload::Device | OptimizerOffload::Host { .. } => None,
    }
}

/// Returns the size of one rank's swap file with the plan `zero`.
///
/// It is 0 if the plan keeps all states in memory. Frozen parameters have neither optimizer states
/// nor gradients in the file.
fn file_bytes(preparation: &Preparation, zero: &ZeroPlan) -> u64 {
    let plan = &preparation.plan;
    // Every replica has a file for each of its shards.
    let ranks = preparation.job.training.placement.ranks / plan.mesh.replicate;
    let sizes = &preparation.sizes;
    swap_bytes(sizes, zero, ranks, &plan.precision)
}
