//! How a rank stores the elements of a parameter: as they are, or in 8 or 4 bits.
//!
//! Main type: [`Storage`]. A matrix that is not trained may be stored in blocks of few bits, as a
//! flat tensor of 32-bit words (`deepburn-ops`, [`QuantizedMatrix`]). Everything that keeps or
//! moves a parameter handles this tensor like any other: a shard is a range of words, and a gather,
//! a persistent copy and an offloaded array have words too. Only an op that reads the parameter
//! knows of it ([`WeightOperand`]): a product takes the blocks, all other ops get the elements.
//!
//! The stored tensor has the backend's f32 type and is only copied. Which matrices are quantized is
//! in `Plan::quantization`; rank 0 quantizes each one and broadcasts the words. Checkpoints never
//! contain a quantized parameter, because its values are not exact. They omit it and store the hash
//! of its values before they were quantized, so that tools can verify it with the files of the base
//! model.

use burn_backend::{Backend, DType, Shape};
use deepburn_kernels::{BlockFormat, RowEncoding};
use deepburn_ops::{QuantizedMatrix, dequantize};

/// How the elements of a parameter are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    /// As elements of the parameter's type.
    Plain,
    /// In blocks of few bits.
    Blocks {
        /// The format of the blocks.
        format: BlockFormat,
        /// The BLAKE3 hash of the elements before they were quantized, in the parameter's type;
        /// `None` on a pipeline stage that does not hold them.
        original: Option<[u8; 32]>,
    },
    /// A matrix in the format of a GGUF file, for inference.
    Encoded {
        /// The format.
        format: RowEncoding,
        /// Which elements follow each other.
        order: RowOrder,
    },
}

/// Which elements of a matrix follow each other in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// The elements of a row: a table of tokens, `[vocab, width]`.
    ByRow,
    /// The elements of a column: the weight of a linear layer, `[in, out]`.
    ByColumn,
}

impl Storage {
    /// Returns the number of stored elements of a parameter with `numel` elements: 32-bit words, or
    /// the elements.
    pub(crate) fn stored_len(self, numel: usize) -> usize {
        match self {
            Self::Plain => numel,
            Self::Blocks { format, .. } => format.words(numel),
            Self::Encoded { format, .. } => format.words(numel),
        }
    }

    /// Returns the type of the stored tensor of a parameter of type `dtype`.
    pub(crate) fn stored_type(self, dtype: DType) -> DType {
        match self {
            Self::Plain => dtype,
            // Words are stored as the bits of f32 elements, because parameters are float tensors
            // everywhere.
            Self::Blocks { .. } | Self::Encoded { .. } => DType::F32,
        }
    }

    /// Returns the shape of the stored tensor of a parameter of shape `shape`.
    pub(crate) fn stored_shape(self, shape: &Shape) -> Shape {
        match self {
            Self::Plain => shape.clone(),
            Self::Blocks { .. } | Self::Encoded { .. } => {
                Shape::from(vec![self.stored_len(shape.num_elements())])
            }
        }
    }

    /// Returns the elements of a stored tensor, in the parameter's shape and type.
    pub(crate) fn elements<B: Backend>(
        self,
        stored: B::FloatTensorPrimitive,
        shape: &Shape,
        dtype: DType,
    ) -> B::FloatTensorPrimitive {
        match (self, self.matrix::<B>(&stored, shape, dtype)) {
            (Self::Blocks { format, .. }, None) => {
                dequantize::<B>(stored, format, shape.clone(), dtype)
            }
            (_, Some(matrix)) => matrix.dequantized(),
            (_, None) => stored,
        }
    }

    /// Returns the blocks of a parameter of shape `shape`; `None` if it is not a matrix in blocks.
    pub(crate) fn matrix<B: Backend>(
        self,
        stored: &B::FloatTensorPrimitive,
        shape: &Shape,
        dtype: DType,
    ) -> Option<QuantizedMatrix<B>> {
        let [rows, columns] = shape.as_slice().try_into().ok()?;
        let words = stored.clone();
        Some(match self {
            Self::Plain => return None,
            Self::Blocks { format, .. } => {
                QuantizedMatrix::new(words, format, [rows, columns], dtype)
            }
            Self::Encoded { format, order: RowOrder::ByRow } => {
                QuantizedMatrix::new(words, format, [rows, columns], dtype)
            }
            // The blocks of a column are the blocks of a row of the transposed matrix.
            Self::Encoded { format, order: RowOrder::ByColumn } => {
                QuantizedMatrix::new(words, format, [columns, rows], dtype).transposed()
            }
        })
    }
}

/// The operand of an op that can use quantized blocks.
#[derive(Debug, Clone)]
pub(crate) enum WeightOperand<B: Backend> {
    /// All elements.
    Dense(B::FloatTensorPrimitive),
    /// The blocks of a matrix.
    Quantized(QuantizedMatrix<B>),
}
