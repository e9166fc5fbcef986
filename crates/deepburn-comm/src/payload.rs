//! What travels between ranks.

use std::fmt::{self, Debug};
use std::ops::Range;

/// How the contributions of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum in rank order.
    Sum,
    /// Sum in rank order, divided by the world size.
    Mean,
    /// Element-wise maximum; a NaN of any rank wins, so that an overflow flag cannot get lost.
    Max,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Max => "max",
        })
    }
}

/// What two ranks must agree on before they exchange data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Elements of each array: of the input of a reduction, of the result of a gather.
    pub numels: Vec<usize>,
    /// Element type of each array, as the sender names it.
    pub dtypes: Vec<&'static str>,
}

impl Signature {
    /// The signature of whole arrays.
    pub fn of<T: Payload>(arrays: &[T]) -> Self {
        Self {
            numels: arrays.iter().map(Payload::numel).collect(),
            dtypes: arrays.iter().map(Payload::dtype).collect(),
        }
    }

    /// Elements of all arrays together.
    pub fn total(&self) -> usize {
        self.numels.iter().sum()
    }
}

/// One array of elements that a process group can reduce, scatter and gather.
///
/// `Clone` must be cheap (a handle), because ranks of one process read each other's arrays in
/// place. Implemented for host arrays here and for device tensors where they live.
pub trait Payload: Clone + Debug + Send + Sync + 'static {
    /// Number of elements.
    fn numel(&self) -> usize;

    /// Name of the element type.
    fn dtype(&self) -> &'static str;

    /// Whether arrays of this element type can be reduced with `op`; a group refuses to start a
    /// reduction that cannot be done.
    fn supports(&self, _op: ReduceOp) -> bool {
        true
    }

    /// Whether `other` lives in the same memory, so that both ranks can share one result.
    fn shares_home(&self, other: &Self) -> bool;

    /// Reduces elements `range` (of the flat order) of every input, input 0 first, into a fresh
    /// array of `padded_len >= range.len()` elements in the memory of `inputs[home]`, the rest
    /// zero. The order of additions is that of `inputs`, whatever the range.
    fn reduce_range(
        inputs: &[Self],
        range: Range<usize>,
        padded_len: usize,
        op: ReduceOp,
        home: usize,
    ) -> Self;

    /// Concatenates flat chunks in order and keeps the first `numel` elements, in the memory of
    /// `chunks[home]`.
    fn concat(chunks: &[Self], numel: usize, home: usize) -> Self;

    /// The same elements in the memory of `home` (no copy where they already are there).
    fn to_home_of(&self, home: &Self) -> Self;
}
