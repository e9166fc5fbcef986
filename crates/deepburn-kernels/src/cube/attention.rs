//! Self-attention on a device, forward and backward, without a matrix of scores in memory.
//!
//! The kernels are FlashAttention-2 (Dao 2023): scores exist for a block of queries and 64 keys at
//! a time, in registers. They read queries, keys and values from one matrix, write their gradient
//! in the same layout, and sum in f32:
//!
//! ```text
//! projected, its gradient   [batch * positions, (heads + 2 key_value_heads) * width]
//! output, its gradient      [batch * positions, heads * width]
//! log_sums                  [batch * heads, positions]             f32
//!
//! forward        output, log_sums                 a cube for each sequence, head, block of queries
//! corrections    c = sum(grad * output)           16 units for each sequence, head, query
//! query side     gradients of queries             a cube for each sequence, head, block of queries
//! key side       gradients of keys and values     a cube for each sequence, key head, block of keys
//! ```
//!
//! No two cubes add to the same number, and each adds in the order of positions and heads, so the
//! results have the same bits in every run. Masks and dropout are computed in the kernels.

mod backward;
mod forward;
mod launch;
mod queries;
mod tile;

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, DeviceDType, cubes, with_element};
use backward::{UNITS_OF_ROW, corrections_kernel, keys_kernel, queries_kernel};
use forward::forward_kernel;
pub use launch::MaskList;
use tile::UNITS;

/// The keys that a query attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyMask<'a> {
    /// Keys up to the query's own position.
    Causal,
    /// The query's own position and the positions before it, this many in all. 0 counts as 1.
    Window(usize),
    /// Keys from a first position, one for each query of each sequence, up to the query's own. A
    /// query before its first position attends to itself.
    Since(&'a [usize]),
    /// The first keys of each sequence, this many. 0 counts as 1.
    Lengths(&'a [usize]),
}

/// Which attention weights are dropped: those whose random number is below the threshold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightDropout {
    /// The seed of the random numbers: SplitMix64 of each query, and a hash of 32 bits of each key.
    pub seed: u64,
    /// The probability in units of 2^-32.
    pub threshold: u32,
    /// The factor of the weights that are not dropped.
    pub factor: f32,
}

/// The dimensions and options of an attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceAttention<'a> {
    /// The number of sequences.
    pub batch: usize,
    /// The number of positions of each sequence.
    pub positions: usize,
    /// The number of heads.
    pub heads: usize,
    /// The number of heads of keys, and of values: a divisor of `heads`. Consecutive heads share
    /// keys and values.
    pub key_value_heads: usize,
    /// The number of columns of a head.
    pub width: usize,
    /// The factor of the scores.
    pub scale: f32,
    /// The scores are limited to this value, as `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// The keys that a query attends to.
    pub mask: KeyMask<'a>,
    /// The dropout of weights.
    pub dropout: Option<WeightDropout>,
}

impl DeviceAttention<'_> {
    /// Returns the number of heads in a row of queries, keys and values.
    fn projected_heads(&self) -> usize {
        self.heads + 2 * self.key_value_heads
    }

    /// Returns the number of elements of the projected matrix.
    fn len_of_projected(&self) -> usize {
        self.batch * self.positions * self.projected_heads() * self.width
    }

    /// Returns the number of elements of the output.
    fn len_of_output(&self) -> usize {
        self.len_of_log_sums() * self.width
    }

    /// Returns the number of rows of scores.
    fn len_of_log_sums(&self) -> usize {
        self.batch * self.positions * self.heads
    }
}

/// Returns whether the device can run the kernels for this attention over matrices of type `dtype`.
///
/// There must be at least one sequence, position, head and column. A head has at most 256 columns.
/// The device needs 32 KiB of shared memory for a cube of 128 units, and a grid with as many cubes
/// as there are heads, sequences, and blocks of 32 positions.
pub fn supports_attention<R: Runtime>(
    client: &ComputeClient<R>,
    attention: &DeviceAttention<'_>,
    dtype: DeviceDType,
) -> bool {
    launch::is_supported(client, attention, dtype)
}

/// The result of the forward pass.
#[derive(Debug, Clone)]
pub struct AttentionResult {
    /// `[batch * positions, heads * width]`, in the type of the projected matrix.
    pub output: DeviceBuffer,
    /// The log-sum-exp of each row of scores, `[batch * heads, positions]`, in f32.
    pub log_sums: DeviceBuffer,
}

/// Computes attention. `projected` is `[batch * positions, (heads + 2 * key_value_heads) * width]`:
/// the columns of the queries of all heads, of the keys, and of the values.
///
/// `list` belongs to the attention's mask. The launch is queued, so the host does not wait.
///
/// # Panics
/// Panics if the device does not support this attention ([`supports_attention`]), or if the length
/// of the matrix or of the mask's list does not fit.
pub fn attention_forward<R: Runtime>(
    client: &ComputeClient<R>,
    attention: &DeviceAttention<'_>,
    list: &MaskList,
    projected: &DeviceBuffer,
) -> AttentionResult {
    check(client, attention, list, projected.dtype(), &[("projected", projected)]);
    let output = DeviceBuffer::empty(client, attention.len_of_output(), projected.dtype());
    let log_sums = DeviceBuffer::empty(client, attention.len_of_log_sums(), DeviceDType::F32);
    let vector = launch::vector(attention, &[projected, &output]);
    let tiling = launch::tiling_of_queries(attention.width);
    // SAFETY: units check that their positions and columns exist, and `check` that the matrices
    // have all of them.
    unsafe {
        with_element!(projected.dtype(), T => {
            forward_kernel::launch_unchecked::<T, R>(
                client,
                launch::grid(attention, attention.heads, tiling),
                CubeDim::new_1d(UNITS as u32),
                vector,
                projected.vectors_arg(vector),
                list.arg(),
                output.vectors_arg(vector),
                log_sums.arg(),
                launch::scalars(attention),
                tiling,
                launch::variant(attention),
            );
        });
    }
    AttentionResult { output, log_sums }
}

/// The arrays of a backward pass.
#[derive(Debug)]
pub struct AttentionGradient<'a> {
    /// The gradient of the output.
    pub grad: &'a DeviceBuffer,
    /// The argument of the forward pass.
    pub projected: &'a DeviceBuffer,
    /// The result of the forward pass.
    pub result: &'a AttentionResult,
}

/// Returns the gradient of `projected`, in the same layout and type.
///
/// The weights are computed again from the saved log-sums. With `c = sum(grad * output)` of a
/// query, weights `p`, dropout factors `m` and values `v`, the gradient of a score is
/// `p (m (grad v^T) - c)` (Dao et al. 2022, appendix B.2).
///
/// The three launches are queued, so the host does not wait.
///
/// # Panics
/// Panics if the device does not support this attention ([`supports_attention`]), or if the lengths
/// or types of the arrays or of the mask's list do not fit.
pub fn attention_backward<R: Runtime>(
    client: &ComputeClient<R>,
    attention: &DeviceAttention<'_>,
    list: &MaskList,
    arrays: &AttentionGradient<'_>,
) -> DeviceBuffer {
    let &AttentionGradient { grad, projected, result } = arrays;
    let AttentionResult { output, log_sums } = result;
    let dtype = projected.dtype();
    check(
        client,
        attention,
        list,
        dtype,
        &[("projected", projected), ("grad", grad), ("output", output), ("log_sums", log_sums)],
    );
    let corrections = corrections(client, attention, grad, output);
    let gradient = DeviceBuffer::empty(client, projected.len(), dtype);
    let vector = launch::vector(attention, &[projected, grad, &gradient]);
    let of_queries = launch::tiling_of_queries(attention.width);
    let of_keys = launch::tiling_of_keys(attention.width);
    /// Launches a kernel with a cube for each head out of `heads` and block of rows.
    macro_rules! launch_side {
        ($kernel:ident, $heads:expr, $tiling:expr, $T:ident) => {
            $kernel::launch_unchecked::<$T, R>(
                client,
                launch::grid(attention, $heads, $tiling),
                CubeDim::new_1d(UNITS as u32),
                vector,
                projected.vectors_arg(vector),
                grad.vectors_arg(vector),
                log_sums.arg(),
                corrections.arg(),
                list.arg(),
                gradient.vectors_arg(vector),
                launch::scalars(attention),
                $tiling,
                launch::variant(attention),
            )
        };
    }
    // SAFETY: as in the forward pass. The kernels write different columns of the gradient.
    unsafe {
        with_element!(dtype, T => {
            launch_side!(queries_kernel, attention.heads, of_queries, T);
            launch_side!(keys_kernel, attention.key_value_heads, of_keys, T);
        });
    }
    gradient
}

/// Returns `sum(grad * output)` of each query of each head, `[batch * heads, positions]`.
fn corrections<R: Runtime>(
    client: &ComputeClient<R>,
    attention: &DeviceAttention<'_>,
    grad: &DeviceBuffer,
    output: &DeviceBuffer,
) -> DeviceBuffer {
    let corrections = DeviceBuffer::empty(client, attention.len_of_log_sums(), DeviceDType::F32);
    let vector = launch::vector(attention, &[grad, output]);
    let (count, dim) = cubes(client, corrections.len() * UNITS_OF_ROW);
    // SAFETY: units check that their query exists, and `check` that the matrices have all of them.
    unsafe {
        with_element!(grad.dtype(), T => {
            corrections_kernel::launch_unchecked::<T, R>(
                client,
                count,
                dim,
                vector,
                grad.vectors_arg(vector),
                output.vectors_arg(vector),
                corrections.arg(),
                attention.positions,
                attention.heads,
                attention.width,
            );
        });
    }
    corrections
}

/// Checks that the device supports an attention and that its arrays fit.
///
/// # Panics
/// Panics if they do not.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    attention: &DeviceAttention<'_>,
    list: &MaskList,
    dtype: DeviceDType,
    arrays: &[(&str, &DeviceBuffer)],
) {
    assert!(
        supports_attention(client, attention, dtype),
        "the kernels of this device do not support {attention:?} in {dtype:?}"
    );
    assert!(list.fits(attention), "{list:?} is not the list of {attention:?}");
    for (name, array) in arrays {
        let (len, dtype) = match *name {
            "projected" => (attention.len_of_projected(), dtype),
            "log_sums" => (attention.len_of_log_sums(), DeviceDType::F32),
            _ => (attention.len_of_output(), dtype),
        };
        assert!(
            (array.len(), array.dtype()) == (len, dtype),
            "attention: `{name}` has {} elements of {:?}, must have {len} of {dtype:?}",
            array.len(),
            array.dtype()
        );
    }
}
