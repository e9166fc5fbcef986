//! Device tensors as the payload of collectives.
//!
//! A collective operates on flat arrays, which are partitioned over the ranks. [`DeviceArray`]
//! presents a tensor of any backend as a flat array:
//!
//! ```text
//!  tensor [rows, columns]         flat order      e0 e1 e2 … e(n-1)
//!  split by Partition             rank 0 │ rank 1 │ rank 2 + zero padding
//!
//!  rank threads    part()                     a view that other ranks read in place
//!  processes       part() → encode() → bytes → decode()
//!  both            reduce(parts of all ranks) → a new array of the padded length
//! ```
//!
//! Rank threads and processes call the same [`reduce`](Payload::reduce), so their results are
//! bitwise equal. Parts are added in rank order. 16-bit elements are summed in f32, and the sum is
//! rounded once. If the elements are in host memory, `host_sum` adds them in one pass. Otherwise
//! a kernel of the backend adds them, or its ops where it has none.
//!
//! A part is a view of its tensor wherever possible (`flat.rs`).

mod host_sum;

use std::ops::Range;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_comm::{Encoded, Form, Payload, Received, ReduceOp, SharedPayload};
use deepburn_ops::{
    RowBlock, SumOps, float_bytes, float_from_host, int_from_host, int_into_host, is_without_data,
    join_shards, read_float,
};

use crate::group::RowGradient;
use crate::group::flat::{flat_range, flattened, in_type, narrow, pad};
use host_sum::HostSum;

/// A device tensor that ranks exchange in collectives.
///
/// Ranks of one process read each other's tensors in place, so no copy is made to send a tensor.
/// The result of a collective is a new allocation, not a view that would keep the sender's memory
/// alive, with these exceptions:
///
/// - An all-gather of shards that are adjacent in memory returns a view of this memory
///   ([`join_shards`]).
/// - A concatenation of a single shard returns a view of the shard.
/// - A reduction over a single rank returns a view of its input.
/// - A broadcast to a rank on the root's device returns the root's tensor.
#[derive(Debug, Clone)]
pub enum DeviceArray<B: SumOps> {
    /// An ordinary tensor of any shape, read in its flat order.
    Dense(B::FloatTensorPrimitive),
    /// The gradient of an embedding, as rows. Only the part that a rank owns becomes dense, when
    /// that rank reduces it.
    SparseRows(RowGradient<B>),
}

impl<B: SumOps> DeviceArray<B> {
    pub(crate) fn device(&self) -> B::Device {
        match self {
            Self::Dense(tensor) => B::float_device(tensor),
            Self::SparseRows(rows) => rows.device(),
        }
    }

    /// Returns all elements as a tensor with one axis. Sparse rows become dense, which takes as
    /// much memory as the complete embedding table.
    pub(crate) fn into_flat(self) -> B::FloatTensorPrimitive {
        let tensor = match self {
            Self::Dense(tensor) => tensor,
            Self::SparseRows(rows) => rows.into_dense(),
        };
        flattened::<B>(tensor)
    }

    /// Returns the array with its dense elements flat, so that parts are views and not copies.
    pub(crate) fn flattened(self) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(flattened::<B>(tensor)),
            Self::SparseRows(rows) => Self::SparseRows(rows.flattened()),
        }
    }

    /// Returns the array in elements of `dtype`, unchanged if it already has that type.
    pub(crate) fn in_type(self, dtype: FloatDType) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(in_type::<B>(tensor, dtype)),
            Self::SparseRows(rows) => Self::SparseRows(rows.in_type(dtype)),
        }
    }

    /// Returns a flat array of this length and of the same type and device, with undefined values.
    fn empty(&self, len: usize) -> Self {
        let shape = Shape::from(vec![len]);
        Self::Dense(B::float_empty(shape, &self.device(), self.element_type()))
    }

    /// Returns the type of the elements. Sparse rows have one even if no row was looked up.
    fn element_type(&self) -> FloatDType {
        match self {
            Self::Dense(tensor) => tensor.dtype(),
            Self::SparseRows(rows) => rows.dtype(),
        }
        .into()
    }
}

/// Sizes are in dense elements: sparse rows count all elements of their table, or all elements of a
/// part of the table.
impl<B: SumOps> Payload for DeviceArray<B> {
    fn numel(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.shape().num_elements(),
            Self::SparseRows(rows) => rows.range().len(),
        }
    }

    fn dtype(&self) -> &'static str {
        DType::from(self.element_type()).name()
    }

    fn element_size(&self) -> usize {
        DType::from(self.element_type()).size()
    }

    fn contributed_bytes(&self) -> usize {
        match self {
            Self::Dense(_) => self.numel() * self.element_size(),
            Self::SparseRows(rows) => rows.bytes(),
        }
    }

    /// Returns elements `range`, as a view if the tensor is flat. For other shapes, the rows that
    /// overlap the range may be copied.
    fn part(&self, range: Range<usize>) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(flat_range::<B>(tensor, range)),
            Self::SparseRows(rows) => Self::SparseRows(rows.part(range)),
        }
    }

    /// Reads the elements into host memory. On the flex backend, the bytes of a contiguous tensor
    /// are shared and not copied.
    fn encode(&self) -> Encoded {
        match self {
            Self::Dense(tensor) => {
                Encoded { form: Form::Dense, bytes: float_bytes::<B>(tensor.clone()) }
            }
            Self::SparseRows(rows) => {
                Encoded { form: Form::SparseRows, bytes: rows.encode().into() }
            }
        }
    }

    /// Decodes an array to the device and element type of `self`. The form may be sparse rows even
    /// if `self` is dense: a rank whose micro-batch did not use the embedding still reduces the
    /// rows of other ranks.
    fn decode(&self, form: Form, received: Received, numel: usize) -> Result<Self, String> {
        let dtype = DType::from(self.element_type());
        if form == Form::SparseRows {
            let rows = RowGradient::decode(received.bytes(), numel, dtype, &self.device())?;
            return Ok(Self::SparseRows(rows));
        }
        let found = received.bytes().len();
        // The bytes come from another process, so they are checked before they become a tensor.
        if found != numel * dtype.size() {
            return Err(format!("{found} bytes instead of {numel} elements of {}", dtype.name()));
        }
        // The memory is aligned for the elements, so the tensor uses it without a copy.
        let bytes = match received {
            Received::One(elements) => burn_backend::Bytes::from_elems(elements),
            Received::Two(elements) => burn_backend::Bytes::from_elems(elements),
            Received::Four(elements) => burn_backend::Bytes::from_elems(elements),
            Received::Eight(elements) => burn_backend::Bytes::from_elems(elements),
        };
        let data = TensorData::from_bytes(bytes, vec![numel], dtype);
        Ok(Self::Dense(float_from_host::<B>(data, &self.device())))
    }

    /// Reduces parts in rank order on the device of `parts[home]`, and pads the result with zeros.
    ///
    /// Dense parts are added first, then sparse rows, both in rank order. The order is the same in
    /// host memory and on a device.
    fn reduce(parts: Vec<Self>, padded_len: usize, op: ReduceOp, home: usize) -> Self {
        let (device, dtype) = (parts[home].device(), parts[home].element_type());
        let (numel, count) = (parts[home].numel(), parts.len());
        if numel == 0 {
            let zeros = B::float_zeros(Shape::from(vec![padded_len]), &device, dtype);
            return Self::Dense(zeros);
        }
        // The sum, mean and maximum over one rank are its input. Converting it to f32 and back
        // would only take time.
        if let [Self::Dense(only)] = &parts[..] {
            return Self::Dense(pad::<B>(flat_range::<B>(only, 0..numel), padded_len));
        }
        // A gradient of a tied embedding has a dense part and rows. They are separated, because
        // rows touch few elements and are added last.
        let (mut dense, mut rows) = (Vec::with_capacity(count), Vec::new());
        for part in parts {
            match part {
                Self::Dense(tensor) => dense.push(tensor),
                Self::SparseRows(mut gradient) => {
                    dense.extend(gradient.take_dense());
                    rows.push(gradient);
                }
            }
        }
        let mean_of = (op == ReduceOp::Mean).then_some(count);
        // `HostSum` computes no maximum. It returns `None` for arrays that are not in host memory.
        if op != ReduceOp::Max
            && let Some(sum) = HostSum::new(&dense, &rows, numel, dtype, mean_of)
        {
            return Self::Dense(float_from_host::<B>(sum.compute(padded_len), &device));
        }
        let on_device = dense.into_iter().map(|tensor| moved::<B>(tensor, &device));
        let dense: Vec<_> = on_device.map(flattened::<B>).collect();
        if op != ReduceOp::Max
            && rows.is_empty()
            && let Some(sum) = B::sum_of_parts(&dense, mean_of.unwrap_or(1) as f32, padded_len)
        {
            return Self::Dense(sum);
        }
        let dense = reduced::<B>(dense, op, home == 0, dtype);
        let mut result = with_rows(&rows, dense, numel, &device);
        if op == ReduceOp::Mean && count > 1 {
            result = B::float_div_scalar(result, (count as f64).into());
        }
        Self::Dense(pad::<B>(in_type::<B>(result, dtype), padded_len))
    }
}

/// Rank threads read the arrays of other ranks in place.
impl<B: SumOps> SharedPayload for DeviceArray<B> {
    fn shares_home(&self, other: &Self) -> bool {
        self.device() == other.device()
    }

    /// Concatenates shards without their padding: only the first `numel` elements of all shards
    /// together count. A single shard is returned as a view.
    fn concat(chunks: &[Self], numel: usize, home: usize) -> Self {
        let device = chunks[home].device();
        let mut missing = numel;
        let parts: Vec<_> = chunks
            .iter()
            // The shards after the last element are padding, so the first empty one ends the list.
            .map_while(|chunk| {
                let len = chunk.numel().min(missing);
                missing -= len;
                let flat = chunk.clone().into_flat();
                (len > 0).then(|| moved::<B>(narrow::<B>(flat, 0..len), &device))
            })
            .collect();
        match <[_; 1]>::try_from(parts) {
            Ok([whole]) => Self::Dense(whole),
            // The array has no elements, but the result needs a device and a type.
            Err(parts) if parts.is_empty() => Self::Dense(chunks[home].clone().into_flat()),
            Err(parts) => Self::Dense(B::concat(parts, 0)),
        }
    }

    /// Returns a view of shards that are adjacent in one allocation. All other shards are copied
    /// into a new allocation. See [`join_shards`].
    fn gather(shards: &[Self], numel: usize, home: usize) -> Self {
        let dense = |shard: &Self| match shard {
            Self::Dense(tensor) => Some(tensor.clone()),
            Self::SparseRows(_) => None,
        };
        let joined = shards.iter().map(dense).collect::<Option<Vec<_>>>();
        match joined.and_then(|shards| join_shards::<B>(&shards, numel)) {
            Some(whole) => Self::Dense(whole),
            None => Self::concat(shards, numel, home),
        }
    }

    fn reduce_alike(&self, count: usize, padded_len: usize, op: ReduceOp) -> Self {
        match is_without_data::<B>() {
            true => self.empty(padded_len),
            false => Self::reduce(vec![self.clone(); count], padded_len, op, 0),
        }
    }

    fn concat_alike(&self, count: usize, numel: usize) -> Self {
        match is_without_data::<B>() {
            true => self.empty(numel),
            false => Self::concat(&vec![self.clone(); count], numel, 0),
        }
    }

    fn to_home_of(&self, home: &Self) -> Self {
        match self {
            Self::Dense(tensor) => Self::Dense(moved::<B>(tensor.clone(), &home.device())),
            Self::SparseRows(rows) => {
                Self::Dense(moved::<B>(rows.clone().into_dense(), &home.device()))
            }
        }
    }
}

/// Returns the tensor on `device`.
///
/// A copy between two devices goes through host memory, because CubeCL's direct copy needs a
/// collective library, and wgpu has none.
fn moved<B: Backend>(
    tensor: B::FloatTensorPrimitive,
    device: &B::Device,
) -> B::FloatTensorPrimitive {
    match B::float_device(&tensor) == *device {
        true => tensor,
        false => float_from_host::<B>(read_float::<B>(tensor), device),
    }
}

/// Returns the element-wise maximum. An element is NaN if it is NaN on either side.
///
/// A comparison with NaN is false. The first selection therefore keeps a NaN of `right`, and the
/// second one restores a NaN of `left`.
pub(crate) fn maximum<B: Backend>(
    left: B::FloatTensorPrimitive,
    right: B::FloatTensorPrimitive,
) -> B::FloatTensorPrimitive {
    let device = B::float_device(&left);
    let bool_dtype = burn_backend::get_device_settings::<B>(&device).bool_dtype;
    let keep_left = B::float_greater(left.clone(), right.clone(), bool_dtype);
    let left_nan = B::float_is_nan(left.clone(), bool_dtype);
    let larger = B::float_mask_where(right, keep_left, left.clone());
    B::float_mask_where(larger, left_nan, left)
}

/// Reduces complete flat tensors of `dtype` on one device with the backend's ops. Returns `None` if
/// the list is empty. The result of a sum is in f32, or in f64 for f64 elements.
///
/// 16-bit numbers are summed in f32, and the caller rounds the sum once. A sum in 16 bits would
/// overflow where the mean does not, and would lose small contributions.
///
/// An addition overwrites its left operand if nothing else refers to it. The first tensor is often
/// `shared`: a view of an array that this rank keeps. The second tensor has just been received and
/// can be overwritten. The first addition therefore swaps its operands, which does not change the
/// sum, because addition is commutative.
fn reduced<B: Backend>(
    tensors: Vec<B::FloatTensorPrimitive>,
    op: ReduceOp,
    shared: bool,
    dtype: FloatDType,
) -> Option<B::FloatTensorPrimitive> {
    let sum_type = if dtype == FloatDType::F64 { dtype } else { FloatDType::F32 };
    let mut tensors = tensors.into_iter().map(|tensor| in_type::<B>(tensor, sum_type));
    let join = |left, right| match op {
        ReduceOp::Sum | ReduceOp::Mean => B::float_add(left, right),
        ReduceOp::Max => maximum::<B>(left, right),
    };
    let first = tensors.next()?;
    let Some(second) = tensors.next() else { return Some(first) };
    let both = match shared && op != ReduceOp::Max {
        true => join(second, first),
        false => join(first, second),
    };
    Some(tensors.fold(both, join))
}

/// Adds the rows of every gradient, in rank order, to the flat sum of the dense parts, in f32.
/// Without a dense sum the rows are added to zeros. Returns a flat tensor of `numel` elements.
///
/// The kernel of the backend adds the rows where the sum is.
fn with_rows<B: SumOps>(
    gradients: &[RowGradient<B>],
    dense: Option<B::FloatTensorPrimitive>,
    numel: usize,
    device: &B::Device,
) -> B::FloatTensorPrimitive {
    let zeros = || B::float_zeros(Shape::from(vec![numel]), device, FloatDType::F32);
    let sum = dense.unwrap_or_else(zeros);
    // All parts are the same range of the table.
    let alike = gradients.chunk_by(|left, right| left.range().start == right.range().start);
    alike.fold(sum, |sum, gradients| {
        let blocks = gradients.iter().flat_map(|gradient| gradient.blocks());
        let blocks: Vec<_> = blocks.map(|block| block_on::<B>(block, device)).collect();
        match blocks.is_empty() {
            true => sum,
            false => B::add_rows(sum, gradients[0].range().start, blocks),
        }
    })
}

/// Returns a block of rows on `device`, through host memory if it is on another one.
fn block_on<B: Backend>(block: &RowBlock<B>, device: &B::Device) -> RowBlock<B> {
    let RowBlock { indices, values } = block.clone();
    let indices = match B::int_device(&indices) == *device {
        true => indices,
        false => int_from_host::<B>(int_into_host::<B>(indices), device),
    };
    RowBlock { indices, values: moved::<B>(values, device) }
}

/// Copies a view into a new allocation, so that it does not keep the complete array alive. Used for
/// a shard of an all-reduced gradient.
pub(crate) fn own<B: SumOps>(array: DeviceArray<B>) -> DeviceArray<B> {
    let device = array.device();
    let data = read_float::<B>(array.into_flat());
    DeviceArray::Dense(B::float_from_data(data, &device))
}
