//! Reads DeepSpeed checkpoints: ZeRO stages 0 to 3, any number of ranks, f32, bf16 and f16.
//!
//! ```text
//! ROOT/latest                                        the newest tag
//! ROOT/global_step6/mp_rank_00_model_states.pt       stages 0 to 2: the model, counters; at stage 0
//!                                                    the optimizer, too
//! ROOT/global_step6/zero_pp_rank_R_mp_rank_00_model_states.pt         stage 3: one per rank
//! ROOT/global_step6/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  stages 1 to 3: masters and
//!                                                    the optimizer's arrays, one per rank
//! ROOT/global_step6/layer_NN-model_states.pt         a pipeline: one per layer; its mp_rank_SS is the stage
//! ```
//!
//! ```text
//! stage 0     complete tensors
//! stages 1, 2 | wte ........ | wpe ... | ln_1 | c_attn ......... | padding |   one flat group,
//!             |       rank 0      |      rank 1      |      rank 2         |   cut over ranks
//! stage 3     | wte 1/3 | wpe 1/3 | ln_1 1/3 | c_attn 1/3 |    rank 0: a third of each parameter
//! ```
//!
//! [`DeepSpeedCheckpoint`] reads any range of any [`SavedParameter`] and of the optimizer's arrays,
//! regardless of the ZeRO stage and the number of ranks that wrote the checkpoint. The parameters
//! of a pipeline have the names of their layers, and [`DeepSpeedCheckpoint::layers_in_model`] finds
//! these in a model.
//!
//! The parser of pickles is this crate's own, because it needs the order of dicts, which determines
//! the positions of parameters in flat groups, and the attributes of objects (the loss scaler). A
//! test compares it with `pytorch-reader` on all fixtures, except the files of pipeline layers.
//! Values are read in place, range by range: a flat group is one tensor, and may be larger than
//! memory.
//!
//! ```
//! use std::path::Path;
//! use deepburn_deepspeed::{Array, DeepSpeedCheckpoint};
//!
//! # let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/one_rank");
//! let checkpoint = DeepSpeedCheckpoint::open(&folder, None)?;
//! assert_eq!((checkpoint.stage(), checkpoint.counters().global_steps), (2, 3));
//! let parameter = &checkpoint.parameters()[0];
//! assert_eq!(parameter.name, "transformer.wte.weight");
//! assert_eq!(parameter.aliases, ["lm_head.weight"]);
//! let row = checkpoint.read(&parameter.name, Array::Weights, 0..parameter.shape[1])?;
//! let momentum = checkpoint.read(&parameter.name, Array::Moment("exp_avg"), 0..2)?;
//! # assert_eq!((row.len(), momentum.len()), (6, 2));
//! # Ok::<(), deepburn_deepspeed::DeepSpeedError>(())
//! ```
//!
//! Data is verified against its checksum before it is used. If a checkpoint contains both f32
//! master weights and the model's 16-bit weights, the masters must round to the 16-bit weights.
//! Pickles are parsed, never executed. The following are not supported, and the error names them:
//! tensor parallelism, experts, universal checkpoints, optimizers on NVMe, partitions of ZeRO++ and
//! MiCS, and checkpoints without their frozen parameters. DeepSpeed checkpoints never contain
//! random streams, the position of the data loader, or gradients of an accumulation in progress.

mod archive;
mod checkpoint;
mod contents;
mod error;
mod folder;
mod layer_names;
mod metadata;
mod model_states_file;
mod optim_states_file;
mod partitioned;
mod pickle;
mod pickle_node;
mod pipeline;
mod rank_files;
mod replicated;
mod sharded;
mod stage_layers;
mod stored;
mod tensor;
mod walker;

pub use checkpoint::DeepSpeedCheckpoint;
pub use error::DeepSpeedError;
pub use metadata::{Array, Counters, LossScale, SavedParameter};

pub(crate) use tensor::Tensor;
