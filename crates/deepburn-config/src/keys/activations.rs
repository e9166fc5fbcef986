//! `activation_checkpointing`: the activations that backward recomputes, and where the others are
//! stored.
//!
//! `policy`, `every_nth_block`, `nvme_path` and `offload_threshold` are keys of DeepBurn; the
//! others are DeepSpeed's.

use crate::spec::*;

section! {
    /// Activation checkpointing: recompute activations in backward to save memory.
    pub(crate) struct Activations<'a> {
        /// Checkpointing policy: "off", "full" (keep only the inputs of each block) or "selective"
        /// (also keep every second product of a block, including attention; faster, but needs more
        /// memory). Defaults to "full" if another key turns checkpointing on. DeepBurn extension.
        policy: Option<&'a str> = opt_one_of(&["off", "full", "selective"]),
        /// Recompute only every n-th block. A value above 1 turns checkpointing on; larger values
        /// are faster and need more memory. Not supported with policy "selective". DeepBurn
        /// extension.
        every_nth_block: usize = positive(1).unit("blocks"),
        /// Offload saved activations to a file in this folder instead of host memory; aio sets the
        /// I/O options. Turns checkpointing on. DeepBurn extension.
        nvme_path: Option<&'a str> = opt_text(),
        /// Minimum size of a saved activation to be offloaded; smaller ones stay on the device.
        /// DeepBurn extension.
        offload_threshold: usize = count(262_144).unit("bytes"),
        /// Shard saved activations across model-parallel ranks. Model parallelism is not supported:
        /// true only turns checkpointing on.
        partition_activations: bool = flag(false),
        /// Offload saved activations to host memory, or to nvme_path if it is set. Turns
        /// checkpointing on. On CPU backends, only nvme_path offloads.
        cpu_checkpointing: bool = flag(false),
        /// Copy saved activations to a contiguous buffer. DeepBurn does not copy them: true only
        /// turns checkpointing on.
        contiguous_memory_optimization: bool = flag(false),
        /// Number of checkpoints that the contiguous buffer holds. Every block is a checkpoint in
        /// DeepBurn: a value above 0 only turns checkpointing on.
        number_checkpoints: Option<usize> = opt_count(),
        /// Synchronize the device at each checkpoint. DeepBurn needs no synchronization: true only
        /// turns checkpointing on.
        synchronize_checkpoint_boundary: bool = flag(false),
        /// Measure the forward and backward time of each checkpoint.
        profile = flag(false).ignored("use wall_clock_breakdown or profiling to measure times"),
    }
}
