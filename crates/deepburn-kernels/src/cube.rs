//! The kernels for GPUs, in CubeCL.
//!
//! The kernels work on [`DeviceBuffer`]s, flat arrays in device memory, with the formulas and the
//! order of operations of the CPU kernels. Results are written in place, so the buffers that a
//! kernel updates must not be shared. Launches are queued and return at once; only
//! [`gradient_stats`] waits for the device.
//!
//! Results can differ from the CPU's in the last bits: a device may fuse a multiplication with an
//! addition, and its square root and division may round differently. A shader compiler may assume
//! that there are no infinities and NaNs, so the kernels test the bits of a number to check whether
//! it is finite.

mod activation;
mod attention;
mod cast;
mod columns;
mod device_buffer;
mod elementwise;
mod loss_head;
mod norm;
mod parts;
mod random;
mod rotary;
mod row_tree;
mod rows;
mod stats;
mod sum;

pub use activation::{ActivationFunction, Gated, gated, gated_gradients, gelu, gelu_gradient};
pub use attention::{
    AttentionGradient, AttentionResult, DeviceAttention, KeyMask, MaskList, WeightDropout,
    attention_backward, attention_forward, supports_attention,
};
pub use cast::cast;
pub use columns::column_sums;
pub use device_buffer::{DeviceBuffer, DeviceDType, MOST_AT_ONCE};
pub use elementwise::{DeviceUpdate, OwnedBuffers};
pub(crate) use elementwise::{ElementKernel, launch, lerp, only_if, place, write};
pub use loss_head::{LogitRows, RowLosses, accumulate, row_losses, scale};
pub use norm::{
    LayerNormRows, NormWeightGradients, NormalizedRows, RmsNormRows, layer_norm,
    norm_weight_gradients, norm_x_gradient, rms_norm,
};
pub use parts::{ColumnRange, add_terms, copy_of_columns, flatten, join_rows, sum_of_parts};
pub use random::{MAX_DRAWN, bernoulli, dropout};
pub use rotary::{RotatedColumns, rotate};
pub use rows::{AddedRows, add_rows};
pub use stats::gradient_stats;
pub use sum::sum;
