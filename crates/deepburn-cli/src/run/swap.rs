//! Model states on NVMe: what they need, and what they do to the disk.

use deepburn::zero::{IoStatistics, check_folder, swap_bytes};
use deepburn_config::{NvmePlan, OptimizerOffload, ParameterOffload, SwapFilePlan, ZeroPlan};

use crate::counted::counted;
use crate::failure::Failure;
use crate::run::preparation::Preparation;

/// Checks that the files of `local_ranks` ranks, those of this host, fit into their folders. Each rank parks
/// `activations` bytes of activations at a time.
///
/// # Errors
/// A user's mistake: a folder is missing, cannot be written, is in memory or too small.
pub(crate) fn check_swap(
    preparation: &Preparation,
    local_ranks: usize,
    activations: u64,
) -> Result<(), Failure> {
    let check = |key: &str, file: &SwapFilePlan, bytes: u64| {
        check_folder(&file.folder, bytes.saturating_mul(local_ranks as u64))
            .map_err(|error| Failure::mistake(format!("{key}: {error}")))
    };
    let states = nvme(preparation).map(|nvme| &nvme.file);
    let state_bytes = file_bytes(preparation, &preparation.plan.zero);
    if let Some(file) = states {
        check("zero_optimization.offload_optimizer.nvme_path", file, state_bytes)?;
    }
    let Some(file) = preparation.plan.activations.offload.swap_file() else { return Ok(()) };
    let shared = states.is_some_and(|states| states.folder == file.folder);
    let bytes = activations.saturating_add(if shared { state_bytes } else { 0 });
    check("activation_checkpointing.nvme_path", file, bytes)
}

/// Logs what is in the files of each rank, and warns of what makes them large or leaves them without
/// parameters.
pub(crate) fn announce_swap(preparation: &Preparation) {
    if let Some(file) = preparation.plan.activations.offload.swap_file() {
        tracing::info!("saved activations are in {}", file.folder.display());
    }
    let Some(nvme) = nvme(preparation) else { return };
    let zero = &preparation.plan.zero;
    let bytes = file_bytes(preparation, zero);
    let on_device = ZeroPlan { parameter_shards: ParameterOffload::Device, ..zero.clone() };
    let has_parameters = bytes > file_bytes(preparation, &on_device);
    let what = match has_parameters {
        true => "optimizer states, gradients and parameters",
        false => "optimizer states and gradients",
    };
    tracing::info!(
        "{what} are in {}: {:.3} GB for each rank",
        nvme.file.folder.display(),
        gigabytes(bytes)
    );
    if let ParameterOffload::Nvme { max_in_cpu, .. } = zero.parameter_shards
        && !has_parameters
    {
        tracing::warn!(
            "offload_param: all parameters stay in memory, because max_in_cpu is {max_in_cpu} elements; set it \
             to 0 to move them to NVMe"
        );
    }
    let whole_pieces = file_bytes(preparation, &with_pieces_of(usize::MAX, zero));
    if bytes > whole_pieces.saturating_mul(2) {
        tracing::warn!(
            "zero_optimization.sub_group_size: pieces of {} elements make the file {:.0} times as large as \
             their contents, and slow; use 1e6 or more",
            nvme.sub_group_size,
            bytes as f64 / whole_pieces.max(1) as f64
        );
    }
}

/// The plan with another `sub_group_size`.
fn with_pieces_of(sub_group_size: usize, zero: &ZeroPlan) -> ZeroPlan {
    let mut zero = zero.clone();
    if let OptimizerOffload::Nvme(nvme) = &mut zero.optimizer_states {
        nvme.sub_group_size = sub_group_size;
    }
    zero
}

/// What a common drive of 1 TB may be written before its warranty ends.
const RATED_TERABYTES: f64 = 600.0;

/// Logs what a rank has read and written in `steps` steps, and how long a drive lasts at that rate.
pub(crate) fn report_swap(statistics: &IoStatistics, steps: u64) {
    let written = gigabytes(statistics.bytes_written);
    tracing::info!(
        "NVMe: {:.3} GB read and {written:.3} GB written by rank 0 in {}, which waited {:.1} s for \
         the disk",
        gigabytes(statistics.bytes_read),
        counted(steps as usize, "step"),
        statistics.waited.as_secs_f64()
    );
    let a_step = written / steps.max(1) as f64;
    if a_step > 0.0 {
        tracing::info!(
            "NVMe: {a_step:.3} GB written a step and rank; a drive rated for {RATED_TERABYTES} TB lasts {:.0} \
             such steps",
            RATED_TERABYTES * 1e3 / a_step
        );
    }
}

fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

fn nvme(preparation: &Preparation) -> Option<&NvmePlan> {
    match &preparation.plan.zero.optimizer_states {
        OptimizerOffload::Nvme(nvme) => Some(nvme),
        OptimizerOffload::Device | OptimizerOffload::Host { .. } => None,
    }
}

/// Bytes of the file of one rank under the plan `zero`.
fn file_bytes(preparation: &Preparation, zero: &ZeroPlan) -> u64 {
    let plan = &preparation.plan;
    let ranks = preparation.job.training.ranks;
    let sizes = &preparation.sizes;
    swap_bytes(sizes, zero, ranks, &plan.precision)
}
