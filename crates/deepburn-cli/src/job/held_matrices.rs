//! The types in which the matrices of a trained model are held in memory.
//!
//! Main function: [`hold`]. A generated token reads every matrix once, so it takes about as long as
//! memory needs for their bytes:
//!
//! ```text
//! f32      4 bytes per element
//! f16      2
//! q8_0     1.06        32 elements and their scale
//! q4_0     0.56        token tables are held as q8_0, because their errors are the largest
//! ```
//!
//! Elements are encoded as `deepburn export` encodes them. Biases, norms and tables of positions
//! stay in f32. Matrices whose rows are not whole blocks are held in f16.

use clap::builder::TypedValueParser;
use deepburn::kernels::RowEncoding;
use deepburn::ops::OptimizerOps;
use deepburn::zero::inference::{Candidate, EncodedMatrix, encoded};
use deepburn::zero::{RowOrder, Zero};
use deepburn_gguf::TensorType;
use deepburn_models::{Architecture, MatrixUse};

use crate::console;
use crate::failure::Failure;
use crate::named_values::named_values;

/// The types of matrices in memory.
const TYPES: [RowEncoding; 4] =
    [RowEncoding::Q8_0, RowEncoding::Q4_0, RowEncoding::F16, RowEncoding::Bf16];

/// Returns the type in files of a type in memory.
const fn tensor_type(held: RowEncoding) -> TensorType {
    match held {
        RowEncoding::F16 => TensorType::F16,
        RowEncoding::Bf16 => TensorType::Bf16,
        RowEncoding::Q8_0 => TensorType::Q8_0,
        RowEncoding::Q4_0 => TensorType::Q4_0,
    }
}

/// Returns the type in memory that has the blocks of a tensor of a file; `None` if products cannot
/// read them.
pub(crate) fn held_type_of(stored: TensorType) -> Option<RowEncoding> {
    TYPES.into_iter().find(|it| tensor_type(*it) == stored)
}

/// Returns the parser of the option.
pub(crate) fn held_type_parser() -> impl TypedValueParser<Value = RowEncoding> {
    named_values(TYPES.map(|held| {
        let help = match held {
            RowEncoding::F16 => "IEEE half precision",
            RowEncoding::Bf16 => "bfloat16",
            RowEncoding::Q8_0 => "8.5 bits per weight, in blocks of 32",
            RowEncoding::Q4_0 => "4.5 bits per weight, in blocks of 32; token tables in 8.5 bits",
        };
        (tensor_type(held).name(), help, held)
    }))
}

/// Returns `module` with its matrices in the type `held`.
///
/// # Errors
/// Returns a user's mistake if a weight cannot be read, is not finite, or is too large for the
/// type.
pub(crate) fn hold<B: OptimizerOps, M: burn::module::Module<Zero<B>>>(
    held: RowEncoding,
    config: &dyn Architecture,
    module: M,
) -> Result<M, Failure> {
    let mut forms = MatrixForms::new(held);
    let module = encoded(module, |candidate| {
        let form = forms.form(candidate, config.matrix_use(candidate.path));
        form.map(|form| form.encode(candidate)).transpose()
    })?;
    forms.note().iter().for_each(|note| console::eprint(note));
    Ok(module)
}

/// Chooses the forms of a model's matrices, and remembers those whose rows do not have the blocks
/// of the type.
pub(crate) struct MatrixForms {
    held: RowEncoding,
    /// The number of matrices so far.
    count: usize,
    /// The module paths of matrices in f16 instead, with the lengths of their rows.
    without_blocks: Vec<(String, usize)>,
}

impl MatrixForms {
    /// The number of matrices that the note names.
    const NAMED: usize = 3;

    pub(crate) fn new(held: RowEncoding) -> Self {
        Self { held, count: 0, without_blocks: Vec::new() }
    }

    /// Returns the form in which a matrix is held; `None` for one that stays in f32.
    pub(crate) fn form(
        &mut self,
        candidate: &Candidate<'_>,
        used: MatrixUse,
    ) -> Option<MatrixForm> {
        let [rows, columns] = candidate.shape;
        // A row is what a product reads at a time: the weights of one output, or a token.
        let (order, row_len) = match used {
            MatrixUse::Linear => (RowOrder::ByColumn, rows),
            MatrixUse::TokenTable => (RowOrder::ByRow, columns),
            MatrixUse::Other => return None,
        };
        let mut format = match (self.held, used) {
            (RowEncoding::Q4_0, MatrixUse::TokenTable) => RowEncoding::Q8_0,
            (held, _) => held,
        };
        self.count += 1;
        if !row_len.is_multiple_of(format.block_len()) {
            self.without_blocks.push((candidate.path.to_owned(), row_len));
            format = RowEncoding::F16;
        }
        Some(MatrixForm { order, format })
    }

    /// Returns a note about the matrices in f16 instead of blocks; `None` if there are none.
    pub(crate) fn note(&self) -> Option<String> {
        let (held, count) = (self.held, self.without_blocks.len());
        let named = self.without_blocks.iter().take(Self::NAMED);
        let mut named: Vec<_> = named.map(|(path, len)| format!("`{path}` ({len})")).collect();
        if count > Self::NAMED {
            named.push(format!("and {} more", count - Self::NAMED));
        }
        (count > 0).then(|| {
            format!(
                "{count} of {} matrices are held as f16 instead of {}, because the lengths of their rows are not multiples of \
                 {}: {}",
                self.count,
                tensor_type(held),
                held.block_len(),
                named.join(", ")
            )
        })
    }
}

/// The order and the type in which a matrix is held.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixForm {
    /// Which elements follow each other.
    pub(crate) order: RowOrder,
    /// The type in memory.
    pub(crate) format: RowEncoding,
}

impl MatrixForm {
    /// Encodes a matrix.
    ///
    /// # Errors
    /// Returns a user's mistake if a weight cannot be read, is not finite, or is too large for the
    /// type.
    pub(crate) fn encode(self, candidate: &Candidate<'_>) -> Result<EncodedMatrix, Failure> {
        let values = candidate.values().map_err(Failure::mistake)?;
        let values = match self.order {
            RowOrder::ByRow => values,
            // Blocks run along the inputs, down the columns of `[in, out]`.
            RowOrder::ByColumn => transposed(&values, candidate.shape[1]),
        };
        let mut blocks = Vec::new();
        self.append(candidate.path, &values, &mut blocks)?;
        Ok(self.matrix(&blocks))
    }

    /// Appends the blocks of some rows of the matrix at a module path.
    ///
    /// # Errors
    /// Returns a user's mistake if a weight is not finite, or is too large for the type.
    pub(crate) fn append(
        self,
        path: &str,
        values: &[f32],
        blocks: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let encoded = tensor_type(self.format).encode(values, blocks);
        encoded.map_err(|problem| Failure::mistake(format!("--quantize: `{path}`: {problem}")))
    }

    /// Returns the matrix with these blocks.
    pub(crate) fn matrix(self, blocks: &[u8]) -> EncodedMatrix {
        let words = self.format.words_of(blocks);
        EncodedMatrix { format: self.format, order: self.order, words }
    }
}

/// Returns the elements of a matrix with rows of `columns` elements, column by column.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let mut transposed = Vec::with_capacity(values.len());
    for column in 0..columns {
        transposed.extend(values.iter().skip(column).step_by(columns));
    }
    transposed
}
