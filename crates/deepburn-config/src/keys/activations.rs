//! `activation_checkpointing`: which activations backward computes again, and where the others are
//! kept.
//!
//! `policy`, `every_nth_block`, `nvme_path` and `offload_threshold` are keys of DeepBurn; the
//! others are DeepSpeed's.

use crate::spec::*;

section! {
    /// Recompute activations in backward.
    pub(crate) struct Activations<'a> {
        /// What is recomputed: `full` keeps the inputs of each block, `selective` also every second
        /// product of a block, attention included. Not a key of DeepSpeed. `full` where other keys
        /// turn checkpointing on.
        policy: Option<&'a str> = opt_one_of(&["off", "full", "selective"]),
        /// Recompute every n-th block and keep the activations of the others. Not a key of
        /// DeepSpeed.
        every_nth_block: usize = positive(1).unit("blocks"),
        /// Folder on the NVMe device in which saved activations are kept, rather than in host
        /// memory. Not a key of DeepSpeed.
        nvme_path: Option<&'a str> = opt_text(),
        /// Size from which on a saved activation is offloaded. Not a key of DeepSpeed.
        offload_threshold: usize = count(262_144).unit("bytes"),
        /// Shard saved activations over model-parallel ranks.
        partition_activations: bool = flag(false),
        /// Offload saved activations to host memory, or to the folder `nvme_path`.
        cpu_checkpointing: bool = flag(false),
        /// Keep saved activations in one buffer.
        contiguous_memory_optimization: bool = flag(false),
        /// Size of that buffer, in checkpoints. Every block is a checkpoint.
        number_checkpoints: Option<usize> = opt_count(),
        /// Wait for the device at each checkpoint.
        synchronize_checkpoint_boundary: bool = flag(false),
        /// Time each checkpoint.
        profile = flag(false).ignored("wall_clock_breakdown and profiling time the passes"),
    }
}
