//! `pipeline`: pipeline parallelism.
//!
//! In DeepSpeed, arguments of a Python class set `stages`, `partition` and `seed_layers`, and
//! nothing reads the keys. Here, the keys set them.

use crate::spec::*;

/// The reason why messages between stages are not sharded.
const WHOLE: &str =
    "there are no model-parallel ranks to shard over, and DeepSpeed sends whole tensors then too";

section! {
    /// Pipeline parallelism: each stage of ranks computes its blocks of the model.
    pub(crate) struct Pipeline<'a> {
        /// Number of pipeline stages, which must divide the number of ranks. The same setting as
        /// training.pipeline_stages of a job file. DeepSpeed does not read this key.
        stages: usize = count_in(1, 63, 1).unit("stages").auto(),
        /// Partition of the blocks into stages: "best" (similar numbers of operations),
        /// "parameters" (similar numbers of parameters, as in DeepSpeed), "uniform" (equal numbers
        /// of blocks) or "type:REGEX" (similar numbers of the blocks whose names match, without
        /// regard to case). DeepSpeed does not read this key.
        partition: &'a str = text("best"),
        /// Use a separate random seed for each layer.
        seed_layers = flag(false).inert("random numbers do not depend on the partition into stages"),
        /// Number of layers between activation checkpoints; 0 disables them.
        activation_checkpoint_interval = count(0)
            .unavailable("activation checkpoints of the pipeline", Differs,
                "set it to 0 and activation_checkpointing.policy to \"full\""),
        /// Shard activations that are sent between stages.
        pipe_partitioned = flag(true).inert(WHOLE),
        /// Shard gradients that are sent between stages.
        grad_partitioned = flag(true).inert(WHOLE),
        /// Use PyTorch's reentrant activation checkpointing.
        use_reentrant = flag(true).inert("DeepBurn does not use PyTorch"),
    }
}
