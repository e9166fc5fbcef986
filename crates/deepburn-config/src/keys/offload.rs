//! Offload of optimizer states and parameters: `offload_optimizer`, `offload_param`, `aio`.
//!
//! The sections look alike in DeepSpeed and share their first keys. Buffers, threads and pinned
//! memory are choices of DeepSpeed's implementation: these keys are accepted and noted.

use crate::spec::*;

/// Where a section's tensors go.
const DEVICE: Spec<&str> = one_of(&["none", "cpu", "nvme"], "none").auto().doc(
    "Where they are kept. Accumulated gradients are kept with the optimizer states; parameters are offloaded only \
     where optimizer states are.",
);
/// Where the files are for the device `nvme`.
const NVME_PATH: Spec<Option<&str>> =
    opt_text().auto().doc("Folder on the NVMe device, for `nvme`.");
/// Page-locked memory, which only copies to a GPU use.
const PIN_MEMORY: Spec<bool> = flag(true)
    .inert("nothing is copied between a host and a device")
    .doc("Keep them in page-locked memory, which copies faster to a GPU.");
/// Why there are no buffers for parameters.
const STRAIGHT: &str = "shards are read into the memory that ops use, as far ahead as \
     stage3_prefetch_bucket_size says";
/// Why settings of DeepSpeed's thread pool change nothing.
const THREADS: &str = "each request under way has a thread of its own";

section! {
    /// Where optimizer states are kept.
    pub(crate) struct OffloadOptimizer<'a> {
        device: &'a str = DEVICE,
        nvme_path: Option<&'a str> = NVME_PATH,
        pin_memory = PIN_MEMORY,
        /// Buffers for NVMe.
        buffer_count = count(4).unit("buffers").inert("buffers are as many and as large as the pieces need"),
        /// Older name for both pipelines.
        pipeline: Option<bool> = opt_flag(),
        /// Read the next piece while one is updated (NVMe).
        pipeline_read: Option<bool> = opt_flag(),
        /// Write a piece while the next one is updated (NVMe).
        pipeline_write: Option<bool> = opt_flag(),
        /// Initialise faster on NVMe.
        fast_init = flag(false).inert("nothing is written to initialise moments"),
        /// Share of the states that is offloaded, taken from the last parameters (`cpu`, stage 3).
        ratio: f64 = real(Share, 1.0),
        /// Update on the host during the backward pass.
        super_offload = flag(false).inert("there is no staging between host and device"),
        /// Share of the cores for the update on the host.
        cpuadam_cores_perc = real(Share, 0.8).inert("the update uses the cores of its rank"),
    }

    /// Where sharded parameters are kept (stage 3).
    pub(crate) struct OffloadParam<'a> {
        device: &'a str = DEVICE,
        nvme_path: Option<&'a str> = NVME_PATH,
        pin_memory = PIN_MEMORY,
        /// Buffers for NVMe.
        buffer_count = count(5).unit("buffers")
            .inert(STRAIGHT),
        /// Size of each buffer.
        buffer_size = count(100_000_000).unit("elements")
            .inert(STRAIGHT),
        /// Elements of a rank's shards that stay in host memory rather than on NVMe, from the first
        /// parameter on.
        max_in_cpu: usize = count(1_000_000_000).unit("elements"),
    }

    /// Asynchronous reads and writes of NVMe offload.
    pub(crate) struct Aio<'a> {
        /// Bytes of one read or write.
        block_size: usize = positive(1_048_576).unit("bytes"),
        /// Requests under way, each by a thread.
        queue_depth: usize = positive(8),
        /// Threads of one request.
        intra_op_parallelism = positive(1).inert(THREADS),
        /// Older name of intra_op_parallelism.
        thread_count = opt_positive().inert(THREADS),
        /// Submit requests one by one.
        single_submit = flag(false).inert(THREADS),
        /// Submit and wait at the same time.
        overlap_events = flag(true).inert(THREADS),
        /// Copy between NVMe and GPU without the host.
        use_gds: bool = flag(false),
    }
}
