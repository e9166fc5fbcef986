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
    /// Element-wise maximum. The result is NaN if any value is NaN, so an overflow on any rank is
    /// detected.
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
    /// The number of elements of each array. For a reduction this is the size of the input, and for
    /// a gather the size of the result.
    pub numels: Vec<usize>,
    /// The element type of each array, as returned by [`Payload::dtype`].
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

    /// Returns the total number of elements of all arrays.
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
    /// The bytes. They are not copied if the array's memory can be shared.
    pub bytes: Bytes,
}

/// Bytes from another process. The memory is aligned for the element type, so that it can be
/// converted to an array without a copy.
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
/// All engines require this trait. The MPI engine sends [`parts`](Self::part) of an array as bytes
/// and reduces the decoded arrays. Rank threads of one process read each other's parts in place,
/// which requires a [`SharedPayload`]. Both engines use the same `reduce` function, so their
/// results are bit-identical.
///
/// `Clone` must be cheap, for example a reference count.
pub trait Payload: Clone + Debug + Send + Sync + 'static {
    /// Returns the number of elements.
    fn numel(&self) -> usize;

    /// Returns the name of the element type.
    fn dtype(&self) -> &'static str;

    /// Returns the size of an element in bytes.
    fn element_size(&self) -> usize;

    /// Returns true if arrays of this element type can be reduced with `op`. Unsupported reductions
    /// fail before data is exchanged.
    fn supports(&self, _op: ReduceOp) -> bool {
        true
    }

    /// Returns the bytes that a rank contributes to a reduction of this array. A sparse array
    /// contributes its rows.
    fn contributed_bytes(&self) -> usize {
        self.numel() * self.element_size()
    }

    /// Returns the elements `range`, in flat order, as a view. The view may keep the whole array
    /// alive.
    fn part(&self, range: Range<usize>) -> Self;

    /// Encodes the array as bytes. A sparse array is encoded as its rows.
    fn encode(&self) -> Encoded;

    /// Decodes `numel` elements that another process [encoded](Self::encode), as a flat array in
    /// the memory and element type of `self`. The values of `self` are not used.
    ///
    /// # Errors
    /// Returns an error if the bytes do not encode such an array.
    fn decode(&self, form: Form, received: Received, numel: usize) -> Result<Self, String>;

    /// Reduces parts of equal size into a new array of `padded_len >= numel` elements in the same
    /// memory as `parts[home]`. Padding elements are zero.
    ///
    /// Parts are added in the order of the list. The memory of a part may be reused if nothing else
    /// refers to it.
    fn reduce(parts: Vec<Self>, padded_len: usize, op: ReduceOp, home: usize) -> Self;
}

/// A payload that rank threads of one process can read in place.
pub trait SharedPayload: Payload {
    /// Returns true if `other` is in the same memory (for example on the same device), so that both
    /// ranks can share a result.
    fn shares_home(&self, other: &Self) -> bool;

    /// Concatenates flat chunks in order and keeps the first `numel` elements. The result is in the
    /// same memory as `chunks[home]`.
    fn concat(chunks: &[Self], numel: usize, home: usize) -> Self;

    /// Concatenates the shards of an array, like [`concat`](Self::concat). The result may be a view
    /// of the memory of the shards. In this case, a shard that is modified while the result is
    /// alive is copied first.
    fn gather(shards: &[Self], numel: usize, home: usize) -> Self {
        Self::concat(shards, numel, home)
    }

    /// Reduces `count` parts that are all equal to `self`, like [`reduce`](Payload::reduce). A
    /// [`SimulatedGroup`](crate::SimulatedGroup) calls it.
    fn reduce_alike(&self, count: usize, padded_len: usize, op: ReduceOp) -> Self {
        // Clones are cheap, so all parts share one array.
        Self::reduce(vec![self.clone(); count], padded_len, op, 0)
    }

    /// Concatenates `count` chunks that are all equal to `self`, like [`concat`](Self::concat).
    fn concat_alike(&self, count: usize, numel: usize) -> Self {
        Self::concat(&vec![self.clone(); count], numel, 0)
    }

    /// Returns the same elements in the memory of `home`, without a copy if they are already there.
    fn to_home_of(&self, home: &Self) -> Self;
}
