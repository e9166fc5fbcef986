//! Frozen matrices in 8 or 4 bits as operands of products.
//!
//! Main type: [`QuantizedMatrix`]. Its blocks ([`BlockFormat`]) are 32-bit words. They are kept in
//! a tensor of f32 elements, because backends can move, divide and join such tensors: a shard, an
//! offloaded array and a gathered copy of a quantized parameter are tensors like all others. Ops
//! may only copy the words. As numbers they have no meaning.
//!
//! ```text
//! quantize      [rows, columns] f32 ─► words
//! dequantize    words ─► [rows, columns] of any float type     for ops without a kernel
//! products      LinearOps::quantized_linear, quantized_x_gradient, CrossEntropyOps::quantized_head_loss
//! rows          quantized_rows                                 an embedding
//! ```
//!
//! The products equal those with the dequantized matrix. The provided implementations dequantize it
//! as a whole; the CPU backend dequantizes a panel at a time. Blocks are encoded and decoded on the
//! host. On other devices, each op therefore copies the words to the host and the elements to the
//! device.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};
use bytemuck::{Pod, cast_slice};
use bytes::Bytes;
use deepburn_kernels::{BlockFormat, Element, EncodedRows, EncodedSlice, Encoding, QuantizedSlice};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::host::{float_bytes, float_from_host, int_into_host};
use crate::meta::is_without_data;

/// The number of elements that a thread decodes at a time.
const DECODED_AT_A_TIME: usize = 16 * 1024;

/// A quantized matrix, possibly transposed.
#[derive(Debug, Clone)]
pub struct QuantizedMatrix<B: Backend> {
    /// The words of the blocks, `[words]`.
    words: FloatTensor<B>,
    encoding: Encoding,
    /// The rows and columns of the matrix whose elements were encoded in row-major order.
    stored: [usize; 2],
    is_transposed: bool,
    /// The type of the elements in products.
    dtype: DType,
}

impl<B: Backend> QuantizedMatrix<B> {
    /// Returns the matrix of shape `[rows, columns]` with these encoded elements, such as the words
    /// of [`quantize`]. In products, its elements have type `dtype`: f32, f16 or bf16.
    ///
    /// # Panics
    /// Panics if the number of words is not the one of the encoding.
    pub fn new(
        words: FloatTensor<B>,
        encoding: impl Into<Encoding>,
        [rows, columns]: [usize; 2],
        dtype: DType,
    ) -> Self {
        let encoding = encoding.into();
        assert_eq!(words.shape().num_elements(), encoding.words(rows * columns), "words of blocks");
        Self { words, encoding, stored: [rows, columns], is_transposed: false, dtype }
    }

    /// Returns the transposed matrix.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    /// Returns the number of rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        let [rows, columns] = self.stored;
        if self.is_transposed { [columns, rows] } else { [rows, columns] }
    }

    /// Returns the number of rows and columns before a transposition.
    pub(crate) fn stored(&self) -> [usize; 2] {
        self.stored
    }

    /// Returns whether the matrix is the transposed one of what is stored.
    pub(crate) fn is_transposed(&self) -> bool {
        self.is_transposed
    }

    /// Returns the type of the elements in products.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns all elements as a tensor.
    pub fn dequantized(&self) -> FloatTensor<B> {
        let shape = Shape::from(self.stored);
        let whole = dequantize::<B>(self.words.clone(), self.encoding, shape, self.dtype);
        if self.is_transposed { B::float_transpose(whole) } else { whole }
    }

    /// Returns the blocks in host memory.
    pub(crate) fn on_host(&self) -> HostBlocks {
        HostBlocks::new::<B>(self.words.clone(), self.encoding, self.stored)
    }
}

/// Blocks in host memory. A contiguous flex tensor is shared, not copied.
pub(crate) struct HostBlocks {
    bytes: Bytes,
    encoding: Encoding,
    /// The rows and columns.
    shape: [usize; 2],
}

impl HostBlocks {
    fn new<B: Backend>(words: FloatTensor<B>, encoding: Encoding, shape: [usize; 2]) -> Self {
        Self { bytes: float_bytes::<B>(words), encoding, shape }
    }

    /// Returns the matrix.
    pub(crate) fn matrix(&self) -> EncodedSlice<'_> {
        match self.encoding {
            Encoding::Flat(format) => {
                let numel = self.shape.iter().product();
                let slice = QuantizedSlice::new(format, numel, cast_slice(&self.bytes));
                EncodedSlice::Flat(slice)
            }
            Encoding::ByRow(format) => {
                EncodedSlice::ByRow(EncodedRows::new(format, self.shape, &self.bytes))
            }
        }
    }

    /// Decodes all elements on all threads.
    fn decoded<E: Element + Pod>(&self) -> Vec<E> {
        let mut values = vec![E::zeroed(); self.shape.iter().product()];
        let matrix = self.matrix();
        let parts = values.par_chunks_mut(DECODED_AT_A_TIME).enumerate();
        parts.for_each(|(part, out)| matrix.decode(part * DECODED_AT_A_TIME, out));
        values
    }

    /// Decodes the rows `rows` of a matrix with rows of `width` elements.
    fn rows<E: Element + Pod>(&self, rows: &[i64], width: usize) -> Vec<E> {
        let mut values = vec![E::zeroed(); rows.len() * width];
        let matrix = self.matrix();
        let parts = values.par_chunks_mut(width.max(1)).zip(rows);
        // The caller has checked that the rows are not negative.
        parts.for_each(|(out, row)| matrix.decode(*row as usize * width, out));
        values
    }
}

/// Calls a generic function with the element type that `$dtype` names. f64 is decoded in f32 and
/// cast by the caller.
macro_rules! with_element {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $E = f16;
                $body
            }
            DType::BF16 => {
                type $E = bf16;
                $body
            }
            _ => {
                type $E = f32;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// Returns the words of a tensor's elements, `[words]`. The elements are read in f32, in flat
/// order.
///
/// # Panics
/// Panics if the device fails.
pub fn quantize<B: Backend>(tensor: FloatTensor<B>, format: BlockFormat) -> FloatTensor<B> {
    let device = B::float_device(&tensor);
    let len = format.words(tensor.shape().num_elements());
    // There are no elements to encode, only the size of their encoding to show.
    if is_without_data::<B>() {
        return B::float_empty(Shape::from(vec![len]), &device, FloatDType::F32);
    }
    let tensor = match tensor.dtype() {
        DType::F32 => tensor,
        _ => B::float_cast(tensor, FloatDType::F32),
    };
    let bytes = float_bytes::<B>(tensor);
    let words = format.encode(cast_slice(&bytes));
    let words = burn_backend::Bytes::from_elems(words);
    float_from_host::<B>(TensorData::from_bytes(words, vec![len], DType::F32), &device)
}

/// Returns the elements of `words` as a tensor of `shape` and `dtype`. Each element is rounded
/// once. The last axis has the rows of an encoding by rows.
///
/// # Panics
/// Panics if the number of words is not the one of the encoding, or if the device fails.
pub fn dequantize<B: Backend>(
    words: FloatTensor<B>,
    encoding: impl Into<Encoding>,
    shape: Shape,
    dtype: DType,
) -> FloatTensor<B> {
    let device = B::float_device(&words);
    if is_without_data::<B>() {
        return B::float_empty(shape, &device, dtype.into());
    }
    let width = shape.as_slice().last().copied().unwrap_or(1);
    let rows = shape.num_elements().checked_div(width).unwrap_or(0);
    let blocks = HostBlocks::new::<B>(words, encoding.into(), [rows, width]);
    let data = with_element!(dtype, E => TensorData::new(blocks.decoded::<E>(), shape));
    in_type::<B>(float_from_host::<B>(data, &device), dtype)
}

/// Returns the rows `indices` of a matrix, of shape `[.., columns]`. Only these rows are
/// dequantized. A transposed matrix is dequantized as a whole.
///
/// # Panics
/// Panics if an index is not a row, or if the device fails.
pub fn quantized_rows<B: Backend>(
    matrix: &QuantizedMatrix<B>,
    indices: IntTensor<B>,
) -> FloatTensor<B> {
    if is_without_data::<B>() || matrix.is_transposed {
        return B::embedding(matrix.dequantized(), indices);
    }
    let [count, width] = matrix.stored;
    let mut shape = indices.shape().to_vec();
    shape.push(width);
    let indices = int_into_host::<B>(indices);
    for index in &indices {
        assert!((0..count as i64).contains(index), "row {index} of {count}");
    }
    let (blocks, device) = (matrix.on_host(), B::float_device(&matrix.words));
    let data =
        with_element!(matrix.dtype, E => TensorData::new(blocks.rows::<E>(&indices, width), shape));
    in_type::<B>(float_from_host::<B>(data, &device), matrix.dtype)
}

/// Returns the tensor in elements of `dtype`.
fn in_type<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype { tensor } else { B::float_cast(tensor, dtype.into()) }
}
