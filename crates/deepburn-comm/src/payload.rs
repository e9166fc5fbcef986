//! What travels between ranks.

use std::borrow::Cow;
use std::fmt::{self, Debug};
use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// How the contributions of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// Elements of each array: of the input of a reduction, of the result of a gather.
    pub numels: Vec<usize>,
    /// Element type of each array, as the sender names it.
    pub dtypes: Vec<Cow<'static, str>>,
}

impl Signature {
    /// The signature of whole arrays.
    pub fn of<T: Payload>(arrays: &[T]) -> Self {
        Self {
            numels: arrays.iter().map(Payload::numel).collect(),
            dtypes: arrays.iter().map(|array| array.dtype().into()).collect(),
        }
    }

    /// Elements of all arrays together.
    pub fn total(&self) -> usize {
        self.numels.iter().sum()
    }
}

/// How the bytes of an array are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// All elements in their flat order, in native byte order.
    Dense,
    /// The rows of a sparse gradient, in a layout that the payload defines.
    Rows,
}

/// An array as bytes that can leave the process.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// How to read the bytes.
    pub form: Form,
    /// The bytes; where the memory allows, those of the array itself.
    pub bytes: Bytes,
}

/// Bytes from another process, in memory that is aligned for the elements they are of, so that an array
/// can be made of them without a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// Elements of one byte, and everything in [`Form::Rows`].
    One(Vec<u8>),
    /// Elements of two bytes.
    Two(Vec<u16>),
    /// Elements of four bytes.
    Four(Vec<u32>),
    /// Elements of eight bytes.
    Eight(Vec<u64>),
}

impl Received {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::One(elements) => elements,
            Self::Two(elements) => bytemuck::cast_slice(elements),
            Self::Four(elements) => bytemuck::cast_slice(elements),
            Self::Eight(elements) => bytemuck::cast_slice(elements),
        }
    }
}

/// One array of elements that a process group can reduce, scatter and gather.
///
/// This is what every engine needs. An engine between processes sends [`parts`](Self::part) of an
/// array as bytes and reduces what it decodes; ranks of one process read each other's parts in
/// place, which takes a [`SharedPayload`]. Both reduce with the same function, so both get the same
/// bits.
///
/// `Clone` must be cheap (a handle). Implemented for host arrays here and for device tensors where
/// they live.
pub trait Payload: Clone + Debug + Send + Sync + 'static {
    /// Number of elements.
    fn numel(&self) -> usize;

    /// Name of the element type.
    fn dtype(&self) -> &'static str;

    /// Bytes of one element.
    fn element_size(&self) -> usize;

    /// Whether arrays of this element type can be reduced with `op`; a group refuses to start a
    /// reduction that cannot be done.
    fn supports(&self, _op: ReduceOp) -> bool {
        true
    }

    /// Elements `range` of the flat order: a view, which may keep the whole array alive.
    fn part(&self, range: Range<usize>) -> Self;

    /// The array as bytes. A sparse array is encoded by its rows, so it costs what they take.
    fn encode(&self) -> Encoded;

    /// Reads `numel` elements that another process [encoded](Self::encode), flat, into the memory
    /// where `self` lives and in its element type. Nothing else of `self` matters.
    ///
    /// # Errors
    /// When the bytes are not those of such an array.
    fn decode(&self, form: Form, received: Received, numel: usize) -> Result<Self, String>;

    /// Reduces parts of equal size, part 0 first, into a fresh array of `padded_len >= numel`
    /// elements in the memory of `parts[home]`, the rest zero. The order of additions is that of
    /// `parts`. Parts that nobody else holds may be written over.
    fn reduce(parts: Vec<Self>, padded_len: usize, op: ReduceOp, home: usize) -> Self;
}

/// A payload that ranks of one process read in place.
pub trait SharedPayload: Payload {
    /// Whether `other` lives in the same memory, so that both ranks can share one result.
    fn shares_home(&self, other: &Self) -> bool;

    /// Concatenates flat chunks in order and keeps the first `numel` elements, in the memory of
    /// `chunks[home]`.
    fn concat(chunks: &[Self], numel: usize, home: usize) -> Self;

    /// The same as [`concat`](Self::concat) for the shards of an array. The result may be a view of memory that the
    /// shards lie in. Then a shard that is changed while somebody holds the result is copied first.
    fn gather(shards: &[Self], numel: usize, home: usize) -> Self {
        Self::concat(shards, numel, home)
    }

    /// The same elements in the memory of `home` (no copy where they already are there).
    fn to_home_of(&self, home: &Self) -> Self;
}
