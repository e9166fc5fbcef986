//! How a rank stores the elements of a parameter: as they are, or in 8 or 4 bits.
//!
//! Main type: [`Storage`]. A frozen matrix may be stored in blocks of few bits, as a flat tensor of 32-bit words
//! (`deepburn-ops`, [`QuantizedMatrix`]). Everything that keeps or moves a parameter handles this tensor like any other:
//! a shard is a range of words, and a gather, a persistent copy and an offloaded array have words too. Only an op that
//! reads the parameter knows of it ([`Weight`]): a product takes the blocks, all other ops get the elements.

use burn_backend::{Backend, DType, Shape};
use deepburn_kernels::BlockFormat;
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
        /// The BLAKE3 hash of the elements before they were quantized, in the parameter's type.
        original: [u8; 32],
    },
}

impl Storage {
    /// Returns the number of stored elements of a parameter with `numel` elements: 32-bit words, or the elements.
    pub(crate) fn stored_len(self, numel: usize) -> usize {
        match self {
            Self::Plain => numel,
            Self::Blocks { format, .. } => format.words(numel),
        }
    }

    /// Returns the type of the stored tensor of a parameter of type `dtype`.
    pub(crate) fn stored_type(self, dtype: DType) -> DType {
        match self {
            Self::Plain => dtype,
            Self::Blocks { .. } => DType::F32,
        }
    }

    /// Returns the shape of the stored tensor of a parameter of shape `shape`.
    pub(crate) fn stored_shape(self, shape: &Shape) -> Shape {
        match self {
            Self::Plain => shape.clone(),
            Self::Blocks { format, .. } => Shape::from(vec![format.words(shape.num_elements())]),
        }
    }

    /// Returns the elements of a stored tensor, in the parameter's shape and type.
    pub(crate) fn elements<B: Backend>(
        self,
        stored: B::FloatTensorPrimitive,
        shape: &Shape,
        dtype: DType,
    ) -> B::FloatTensorPrimitive {
        match self {
            Self::Plain => stored,
            Self::Blocks { format, .. } => dequantize::<B>(stored, format, shape.clone(), dtype),
        }
    }
}

/// The operand of an op that can use quantized blocks.
#[derive(Debug, Clone)]
pub(crate) enum Weight<B: Backend> {
    /// All elements.
    Dense(B::FloatTensorPrimitive),
    /// The blocks of a frozen matrix.
    Quantized(QuantizedMatrix<B>),
}
