//! DeepSpeed's own estimators, for comparison.
//!
//! They assume mixed precision with fp32 master copies: 18 bytes an element, of which 2 are 16-bit
//! parameters, 2 16-bit gradients, 4 fp32 gradients, 4 fp32 parameters and 8 Adam's moments.

/// DeepSpeed's allowance for buffers in host memory.
const BUFFER_FACTOR: f64 = 1.5;

/// The machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cluster {
    /// Machines.
    pub nodes: u64,
    /// Accelerators of each, one rank on each.
    pub gpus_per_node: u64,
}

impl Cluster {
    fn gpus(self) -> u64 {
        self.nodes.saturating_mul(self.gpus_per_node)
    }
}

/// What is kept in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offload {
    /// Nothing.
    Nothing,
    /// Optimizer states.
    Optimizer,
    /// Optimizer states and parameters (stage 3).
    OptimizerAndParameters,
}

/// Bytes of model states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// In the memory of each accelerator.
    pub per_gpu: u64,
    /// In the host memory of each machine.
    pub per_node: u64,
}

/// Stage 2 with `params` elements; parameters are never offloaded at this stage.
///
/// # Panics
/// When the cluster is empty.
pub fn zero2(params: u64, cluster: Cluster, offload: Offload) -> Needs {
    let (per_gpu, host_bytes) = match offload {
        Offload::Nothing => (
            share(params, 2, 1).saturating_add(share(params, 18, cluster.gpus())),
            4.0 * cluster.gpus_per_node as f64,
        ),
        Offload::Optimizer | Offload::OptimizerAndParameters => {
            (share(params, 2, 1), (4.0 * cluster.gpus() as f64).max(16.0))
        }
    };
    Needs { per_gpu, per_node: host(params as f64 * host_bytes) }
}

/// Stage 3 with `params` elements, `largest_layer` of them in the largest layer; `zero_init`
/// when the model is built sharded rather than whole on each rank.
///
/// # Panics
/// When the cluster is empty.
pub fn zero3(
    params: u64,
    largest_layer: u64,
    cluster: Cluster,
    offload: Offload,
    zero_init: bool,
) -> Needs {
    let gathered = share(largest_layer, 4, 1);
    let whole_model_per_rank = 4.0 * cluster.gpus_per_node as f64;
    // Bytes per element of the share that this machine keeps.
    let kept = |bytes: f64| {
        let share = bytes / cluster.nodes as f64;
        if zero_init { share } else { share.max(whole_model_per_rank) }
    };
    match offload {
        Offload::OptimizerAndParameters => {
            Needs { per_gpu: gathered, per_node: host(params as f64 * kept(18.0)) }
        }
        Offload::Optimizer => Needs {
            per_gpu: gathered.saturating_add(share(params, 2, cluster.gpus())),
            per_node: host(params as f64 * kept(16.0)),
        },
        Offload::Nothing => {
            let built = if zero_init { largest_layer } else { params };
            Needs {
                per_gpu: gathered.saturating_add(share(params, 18, cluster.gpus())),
                per_node: host(built as f64 * whole_model_per_rank),
            }
        }
    }
}

fn share(elements: u64, bytes: u64, ranks: u64) -> u64 {
    elements.saturating_mul(bytes) / ranks
}

fn host(bytes: f64) -> u64 {
    (bytes * BUFFER_FACTOR) as u64
}
