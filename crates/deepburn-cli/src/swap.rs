//! Model states on NVMe: what they need, and what they do to the disk.

use deepburn::zero::estimate::ParameterSize;
use deepburn::zero::{IoStatistics, check_folder, swap_bytes};
use deepburn_config::{NvmePlan, OptimizerOffload, ParameterOffload};

use crate::failure::Failure;
use crate::preparation::Preparation;

/// Checks that the files of `local_ranks` ranks, those of this host, fit into their folder.
///
/// # Errors
/// A user's mistake: the folder is missing, cannot be written, is in memory or too small.
pub(crate) fn check_swap(preparation: &Preparation, local_ranks: usize) -> Result<(), Failure> {
    let Some(nvme) = nvme(preparation) else { return Ok(()) };
    let bytes = file_bytes(preparation).saturating_mul(local_ranks as u64);
    check_folder(&nvme.folder, bytes).map_err(|error| {
        Failure::mistake(format!("zero_optimization.offload_optimizer.nvme_path: {error}"))
    })
}

/// Logs what a step does to the disk.
pub(crate) fn announce_swap(preparation: &Preparation) {
    let Some(nvme) = nvme(preparation) else { return };
    let gigabytes = file_bytes(preparation) as f64 / 1e9;
    let what = match preparation.plan.zero.parameter_shards {
        ParameterOffload::Nvme { .. } => "optimizer states, gradients and parameters",
        ParameterOffload::Device | ParameterOffload::Host => "optimizer states and gradients",
    };
    tracing::info!("{what} are in {}: {gigabytes:.3} GB for each rank", nvme.folder.display());
}

/// Logs what a rank has read and written in `steps` steps.
pub(crate) fn report_swap(statistics: &IoStatistics, steps: u64) {
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    tracing::info!(
        "NVMe: {:.3} GB read and {:.3} GB written by rank 0 in {steps} steps, which waited {:.1} s for the \
         disk",
        gigabytes(statistics.bytes_read),
        gigabytes(statistics.bytes_written),
        statistics.waited.as_secs_f64()
    );
}

fn nvme(preparation: &Preparation) -> Option<&NvmePlan> {
    match &preparation.plan.zero.optimizer_states {
        OptimizerOffload::Nvme(nvme) => Some(nvme),
        OptimizerOffload::Device | OptimizerOffload::Host { .. } => None,
    }
}

/// Bytes of the file of one rank.
fn file_bytes(preparation: &Preparation) -> u64 {
    let plan = &preparation.plan;
    let ranks = preparation.job.training.ranks;
    let parameters = preparation.subject.parameters();
    let sizes: Vec<_> = parameters
        .iter()
        .map(|parameter| ParameterSize {
            numel: parameter.shape.iter().product::<usize>() as u64,
            trainable: true,
        })
        .collect();
    swap_bytes(&sizes, &plan.zero, ranks, &plan.optimizer, &plan.precision)
}
