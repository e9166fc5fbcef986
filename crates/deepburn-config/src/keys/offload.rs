//! Offload of optimizer states and parameters: `offload_optimizer`, `offload_param`, `aio`.
//!
//! Both sections have the same first keys. Keys about buffers, threads and pinned memory are
//! specific to DeepSpeed's implementation; they are accepted with a note.

use crate::spec::*;

shared! {
    // The device of the offloaded tensors.
    /// Device to offload to: "none", "cpu" (host memory) or "nvme". Accumulated gradients are
    /// offloaded with the optimizer states, and parameters only if optimizer states are. On CPU
    /// backends, "cpu" changes nothing.
    DEVICE: &str = one_of(&["none", "cpu", "nvme"], "none").auto();

    // The folder of the files for the device `nvme`.
    /// Folder for offloaded data, on a local disk. Required by offload_optimizer with device
    /// "nvme"; offload_param uses the same folder.
    NVME_PATH: Option<&str> = opt_text().auto();

    // Only copies to a GPU use page-locked memory.
    /// Keep offloaded data in page-locked memory, which a GPU copies faster.
    PIN_MEMORY: bool = flag(true).inert("offloaded data is never page-locked");
}

/// The reason why parameters have no buffers.
const STRAIGHT: &str = "shards are read directly into the memory of operations; \
     stage3_prefetch_bucket_size limits how far ahead";
/// The reason why settings of DeepSpeed's thread pool have no effect.
const THREADS: &str = "each request in flight has its own thread";

section! {
    /// Offload of optimizer states and accumulated gradients (stages 1 to 3).
    pub(crate) struct OffloadOptimizer<'a>: auto {
        device: &'a str = DEVICE,
        nvme_path: Option<&'a str> = NVME_PATH,
        pin_memory = PIN_MEMORY,
        /// Number of buffers for NVMe transfers.
        buffer_count = count(4).unit("buffers").inert("buffers are allocated as needed"),
        /// Older name for pipeline_read and pipeline_write together.
        pipeline: Option<bool> = opt_flag(),
        /// Read the next piece of the states while the CPU updates the current one ("nvme"). On by
        /// default, unlike in DeepSpeed.
        pipeline_read: Option<bool> = opt_flag(),
        /// Write the previous piece of the states while the CPU updates the current one ("nvme").
        /// On by default, unlike in DeepSpeed.
        pipeline_write: Option<bool> = opt_flag(),
        /// Initialize NVMe offload faster.
        fast_init = flag(false).inert("initial moments are never written"),
        /// Fraction of the optimizer states to offload; the states of the first parameters stay on
        /// the device. Smaller values update faster and need more device memory. Below 1.0 only for
        /// device "cpu" at stage 3.
        ratio: f64 = real(Fraction, 1.0),
        /// Overlap the CPU update with backward (SuperOffload).
        super_offload = flag(false).inert("the CPU update starts after backward"),
        /// Fraction of the CPU cores for the update.
        cpuadam_cores_perc = real(Fraction, 0.8).inert("the update uses all cores of its rank"),
    }

    /// Offload of parameter shards (stage 3). Requires offload_optimizer.
    pub(crate) struct OffloadParam<'a>: auto {
        device: &'a str = DEVICE,
        nvme_path: Option<&'a str> = NVME_PATH,
        pin_memory = PIN_MEMORY,
        /// Number of buffers for NVMe transfers.
        buffer_count = count(5).unit("buffers")
            .inert(STRAIGHT),
        /// Size of each buffer.
        buffer_size = count(100_000_000).unit("elements")
            .inert(STRAIGHT),
        /// Elements of each rank's shards to keep in host memory instead of NVMe, starting with the
        /// first parameter. The default keeps models of up to a billion parameters per rank in
        /// memory; 0 offloads all.
        max_in_cpu: usize = count(1_000_000_000).unit("elements"),
    }

    /// I/O options of NVMe offload.
    pub(crate) struct Aio<'a> {
        /// Size of a read or write request; a multiple of 4096. Larger requests have less overhead.
        block_size: usize = positive(1_048_576).unit("bytes"),
        /// Maximum number of requests in flight, each in its own thread; at most 1024. Larger
        /// values can use more of the device's bandwidth.
        queue_depth: usize = positive(8),
        /// Number of threads per request.
        intra_op_parallelism = positive(1).inert(THREADS),
        /// Older name for intra_op_parallelism.
        thread_count = opt_positive().inert(THREADS),
        /// Submit requests one at a time.
        single_submit = flag(false).inert(THREADS),
        /// Overlap submission and completion of requests.
        overlap_events = flag(true).inert(THREADS),
        /// Use NVIDIA GPUDirect Storage. Not supported: true is an error if NVMe offload is used.
        use_gds: bool = flag(false),
    }
}
