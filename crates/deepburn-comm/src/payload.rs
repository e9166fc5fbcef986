//! Arrays that ranks exchange.

use std::borrow::Cow;
use std::fmt::{self, Debug};
use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// The arithmetic of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// Sum in rank order.
    Sum,
    /// Sum in rank order, divided by the world size.
    Mean,
    /// Element-wise maximum. NaN wins, so an overflow on any rank is never
    /// lost.
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

/// The sizes and element types on which ranks must agree before an exchange.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The number of elements of each array: of the input for a reduction, of
    /// the result for a gather.
    pub numels: Vec<usize>,
    /// The element type of each array, as the payload names it.
    pub dtypes: Vec<Cow<'static, str>>,
}

impl Signature {
    /// Returns the signature of complete arrays.
    pub fn of<T: Payload>(arrays: &[T]) -> Self {
        Self {
            numels: arrays.iter().map(Payload::numel).collect(),
            dtypes: arrays.iter().map(|array| array.dtype().into()).collect(),
        }
    }

    /// Returns the number of elements of all arrays together.
    pub fn total(&self) -> usize {
        self.numels.iter().sum()
    }
}

/// The encoding of an array's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// All elements in flat order and native byte order.
    Dense,
    /// The rows of a sparse gradient, in a layout that the payload defines.
    SparseRows,
}

/// An array as bytes that can be sent to another process.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// The encoding of the bytes.
    pub form: Form,
    /// The bytes, without a copy if the memory allows it.
    pub bytes: Bytes,
}

/// Bytes from another process, in memory that is aligned for their element
/// type, so that they can become an array without a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// Elements of one byte, and every array in [`Form::SparseRows`].
    One(Vec<u8>),
    /// Elements of two bytes.
    Two(Vec<u16>),
    /// Elements of four bytes.
    Four(Vec<u32>),
    /// Elements of eight bytes.
    Eight(Vec<u64>),
}

impl Received {
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::One(elements) => elements,
            Self::Two(elements) => bytemuck::cast_slice(elements),
            Self::Four(elements) => bytemuck::cast_slice(elements),
            Self::Eight(elements) => bytemuck::cast_slice(elements),
        }
    }
}

/// An array that a process group can reduce, scatter and gather.
///
/// All engines need this trait. The MPI engine sends [`parts`](Self::part) of
/// an array as bytes and reduces what it decodes. Ranks of one process read
/// each other's parts in place, which requires a [`SharedPayload`]. Both use
/// the same `reduce`, so both return the same bits.
///
/// `Clone` must be cheap, such as a handle.
pub trait Payload: Clone + Debug + Send + Sync + 'static {
    /// Returns the number of elements.
    fn numel(&self) -> usize;

    /// Returns the name of the element type.
    fn dtype(&self) -> &'static str;

    /// Returns the size of an element in bytes.
    fn element_size(&self) -> usize;

    /// Returns true if arrays of this element type can be reduced with `op`.
    /// Unsupported reductions fail before anything is exchanged.
    fn supports(&self, _op: ReduceOp) -> bool {
        true
    }

    /// Returns the elements `range` of the flat order as a view, which may keep
    /// the whole array alive.
    fn part(&self, range: Range<usize>) -> Self;

    /// Encodes the array as bytes. A sparse array is encoded as its rows.
    fn encode(&self) -> Encoded;

    /// Decodes `numel` elements that another process [encoded](Self::encode),
    /// as a flat array in the memory and element type of `self`. The values of
    /// `self` are not used.
    ///
    /// # Errors
    ///
    /// Returns an error if the bytes do not encode such an array.
    fn decode(&self, form: Form, received: Received, numel: usize) -> Result<Self, String>;

    /// Reduces parts of equal size in order into a new array of `padded_len >=
    /// numel` elements, in the memory of `parts[home]`; the rest is zero.
    ///
    /// Parts are added in the order of the list. The memory of a part may be
    /// reused if nothing else refers to it.
    fn reduce(parts: Vec<Self>, padded_len: usize, op: ReduceOp, home: usize) -> Self;
}

/// A payload that ranks of one process read in place.
pub trait SharedPayload: Payload {
    /// Returns true if `other` is in the same memory, so that both ranks can
    /// share a result.
    fn shares_home(&self, other: &Self) -> bool;

    /// Concatenates flat chunks in order and keeps the first `numel` elements,
    /// in the memory of `chunks[home]`.
    fn concat(chunks: &[Self], numel: usize, home: usize) -> Self;

    /// The same as [`concat`](Self::concat) for the shards of an array. The result may be a view of memory that the
    /// shards lie in. Then a shard that is changed while somebody holds the result is copied first.
    fn gather(shards: &[Self], numel: usize, home: usize) -> Self {
        Self::concat(shards, numel, home)
    }

    /// The same elements in the memory of `home` (no copy where they already are there).
    fn to_home_of(&self, home: &Self) -> Self;
}
