//! Arithmetic on flat host buffers: the optimizer updates of the elements that a rank owns,
//! reductions, conversions and matrix products.
//!
//! The kernels take one slice per quantity, all of equal length ([`OwnedSlice`]): the master
//! weights and the optimizer states in single precision, the gradient in its own type
//! ([`FloatSlice`]), and optionally the 16-bit copy that the forward and backward passes use
//! ([`WorkingCopy`]). A file per optimizer has its arithmetic, which is compiled for the CPU and,
//! with the feature `cube`, for devices. Tests compare it with a plain reference in f64, which
//! follows the formulas of its source.
//!
//! - Optimizers: [`Adam`], [`Sgd`], [`Lion`], [`Adagrad`]. A step takes two calls:
//!   `XStep::new(&rule, t)` computes the scalars in `f64` and rounds them once, and
//!   [`ElementwiseStep::update`] processes the elements in one pass, in which it also multiplies
//!   the gradient by a factor ([`unscale_and_clip`]).
//! - Element-wise parts of optimizers that also depend on complete tensors: [`Lamb`],
//!   [`MuonMomentum`], [`DescentStep`]; [`TreeSum`] computes norms over several ranks.
//! - 1-bit Adam: [`LocalMomentumStep`] and [`FrozenAdamStep`], and between them [`compress`] to one
//!   bit per element, [`add_signs`] and [`decompress`]. 1-bit LAMB: [`FrozenLambStep`],
//!   [`frozen_lamb_sums`] and [`FactorRule`]. 0/1 Adam: [`LocalAdamStep`], and around the exchange
//!   [`LocalMovementStep`] and [`AgreedMovementStep`].
//! - Gradients: [`gradient_stats`] returns the sum of squares and whether all elements are finite.
//! - Formats: [`Element`], [`cast`], [`widen`]. Buckets: [`flatten`].
//! - Frozen matrices in 8 or 4 bits: [`BlockFormat`], [`QuantizedSlice`]. Matrices in the formats
//!   of GGUF files, and their products with one vector: [`RowEncoding`], [`EncodedRows`].
//! - Matrix products: [`gemm`].
//! - Kernels on GPUs: the module `cube` and `ElementwiseStep::launch`, with the feature `cube`.
//!
//! The loops are plain iterations that the compiler vectorizes. If a loop would be slower than
//! memory with the baseline instruction set, it is compiled for several instruction sets and one of
//! them is selected at run time ([`Instructions`], which `DEEPBURN_INSTRUCTIONS` limits). Long
//! slices are divided into blocks of 16,384 elements, which run on the current rayon pool; slices
//! below 65,536 elements stay on the calling thread.
//!
//! | Optimizer | f32 states per parameter, besides the master weight |
//! |---|---|
//! | [`Sgd`] | 0, or 1 with momentum |
//! | [`Lion`], [`Adagrad`], [`MuonMomentum`] | 1 |
//! | [`Adam`], [`Lamb`], [`FrozenAdam`] | 2 |
//! | [`FrozenLamb`] | 3 |
//! | [`LocalAdamStep`] | 4 |
//!
//! LAMB, Muon and the 1-bit steps also need one temporary array for the direction or the local
//! momentum. The 1-bit exchange also keeps its compression errors.
//!
//! # Guarantees
//!
//! - Results are bitwise identical on every machine and with every number of threads. Updates are
//!   element-wise and use no fused multiply-add, conversions are implemented explicitly, and sums
//!   have a fixed order ([`sum_of_squares`]). There are two exceptions: matrix products are bitwise
//!   identical only on machines with the same instruction sets, and the powers in a bias correction
//!   are computed by the platform's math library, in `f64` before they are rounded to `f32`.
//! - Zero padding stays zero: an element whose parameter, gradient and states are 0 remains 0.
//! - An element that is not finite never affects its neighbors.
//!
//! # Panics
//! Slices of different lengths and a step number below 1 are programming errors and cause a panic.

mod adagrad;
mod adam;
mod blocks;
mod chacha;
mod clip;
#[cfg(feature = "cube")]
pub mod cube;
mod descent;
mod element;
mod elementwise;
mod elementwise_step;
mod flat;
mod float_slice;
pub mod gemm;
mod instructions;
mod lamb;
mod lion;
mod muon;
mod norm;
mod one_bit;
mod one_bit_adam;
mod one_bit_lamb;
mod quantized;
mod sgd;
#[cfg(test)]
mod tests;
mod tree_sum;
mod working;
mod zero_one_adam;

pub use adagrad::{Adagrad, AdagradStep, adagrad_reference};
pub use adam::{Adam, AdamStep, WeightDecay, adam_reference};
pub use chacha::ChaChaPosition;
pub use clip::unscale_and_clip;
pub use descent::DescentStep;
pub use element::Element;
pub use elementwise::OwnedSlice;
pub use elementwise_step::ElementwiseStep;
pub use flat::flatten;
pub use float_slice::{FloatSlice, widen};
pub use instructions::{Instructions, InstructionsError};
pub use lamb::{Lamb, LambStep, lamb_step_size, trust_ratio};
pub use lion::{Lion, LionStep, lion_reference};
pub use muon::{MuonMomentum, MuonMomentumStep};
pub use norm::{GradientStats, gradient_stats, sum_of_squares};
pub use one_bit::{
    LiveSquares, Signs, add_error, add_signs, compress, decompress, live_elements, take_signs,
};
pub use one_bit_adam::{FrozenAdam, FrozenAdamStep, LocalMomentumStep};
pub use one_bit_lamb::{FactorRule, FrozenLamb, FrozenLambStep, FrozenLambSums, frozen_lamb_sums};
pub use quantized::{
    BlockFormat, EncodedRows, EncodedSlice, Encoding, QUANTIZED_BLOCK, QuantizedSlice, RowEncoding,
};
pub use sgd::{Sgd, SgdMomentumStep, SgdStep, sgd_reference};
pub use tree_sum::TreeSum;
pub use working::{WorkingCopy, cast};
pub use zero_one_adam::{AgreedMovementStep, LocalAdamStep, LocalMovementStep};
