//! The weights of a GGUF file, by the module paths of the model.
//!
//! Main type: [`GgufWeights`]. Rows are found through the weight map. Blocks that a product can
//! read stay as they are in the file; only rows are moved:
//!
//! ```text
//! file             rows [out, in] of each stored tensor       llama.cpp's order of the rows of a head
//! parameter        rows of q, then of k, then of v            the order of `transformers`
//! ```
//!
//! Other types (q4_k, q5_0, q6_k) are decoded and held as q8_0, whose error is a small part of
//! theirs, a few rows at a time.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use deepburn::kernels::RowEncoding;
use deepburn::weights::{Composition, Weight, WeightMap};
use deepburn::zero::RowOrder;
use deepburn::zero::inference::EncodedMatrix;
use deepburn_gguf::{GgufReader, GgufTensor, Hyperparameters, TensorInfo, TensorLayout};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::{Architecture, MatrixUse};

use crate::failure::Failure;
use crate::job::gguf_folder::UnpackedGguf;
use crate::job::held_matrices::{MatrixForm, held_type_of};

/// The number of rows that are decoded and encoded at a time.
const ROWS_AT_A_TIME: usize = 256;

/// The weights of a GGUF file.
pub(crate) struct GgufWeights {
    path: PathBuf,
    reader: GgufReader<BufReader<File>>,
    hyperparameters: Hyperparameters,
    map: WeightMap,
}

impl GgufWeights {
    /// Opens a file that has the weights of the model `config`. Only the header is read.
    ///
    /// # Errors
    /// Returns a user's mistake if the file cannot be read, or if a tensor is missing or has
    /// another shape.
    pub(crate) fn open(file: &UnpackedGguf, config: &AnyDecoder) -> Result<Self, Failure> {
        let path = file.path.clone();
        let reader = GgufReader::open(&path).map_err(Failure::of_key(path.display()))?;
        let (hyperparameters, map) = (file.hyperparameters.clone(), config.weight_map());
        let weights = Self { path, reader, hyperparameters, map };
        // Before any weight is read, so that a wrong file is refused at once.
        weights.check()?;
        Ok(weights)
    }

    /// Compares the shapes of the tensors.
    fn check(&self) -> Result<(), Failure> {
        for tensor in self.map.stored_tensors() {
            let stored = self.stored(tensor.name())?;
            let expected = stored.shape(&file_shape(tensor.shape()));
            let found = self.reader.header().tensor(&stored.name).map(TensorInfo::shape);
            if found != Some(&expected[..]) {
                let found = found.map_or("is missing".to_owned(), |it| format!("has shape {it:?}"));
                let name = &stored.name;
                return Err(
                    self.refused(&format!("tensor `{name}` {found}; the model needs {expected:?}"))
                );
            }
        }
        Ok(())
    }

    fn refused(&self, problem: &str) -> Failure {
        Failure::mistake(format!("{}: {problem}", self.path.display()))
    }

    /// Returns the name and the layout in the file of a tensor of the Hugging Face file.
    fn stored(&self, name: &str) -> Result<GgufTensor, Failure> {
        let stored = self.hyperparameters.stored_tensor(name);
        stored.ok_or_else(|| self.refused(&format!("has no place for tensor `{name}`")))
    }

    /// Returns the parameter at a module path.
    fn weight(&self, path: &str) -> Result<Weight, Failure> {
        let weight = self.map.get(path).cloned();
        weight.ok_or_else(|| self.refused(&format!("has no parameter `{path}`")))
    }

    /// Reads the values of the parameter at a module path in f32.
    ///
    /// # Errors
    /// Returns a user's mistake if a tensor cannot be read.
    pub(crate) fn values(&mut self, path: &str) -> Result<Vec<f32>, Failure> {
        let weight = self.weight(path)?;
        let composition = weight.composition();
        // Parts of one tensor follow each other, so it is read once.
        let mut last: Option<(String, Vec<f32>)> = None;
        composition.read(0..composition.num_elements(), |name, range, values| {
            if last.as_ref().is_none_or(|(read, _)| read != name) {
                last = Some((name.to_owned(), self.stored_values(name)?));
            }
            values.extend(last.iter().flat_map(|(_, whole)| &whole[range.clone()]));
            Ok(())
        })
    }

    /// Reads a tensor by its name in the Hugging Face file, in the layout of that file.
    fn stored_values(&mut self, name: &str) -> Result<Vec<f32>, Failure> {
        let stored = self.stored(name)?;
        let tensor = self.map.stored_tensors().iter().find(|it| it.name() == name);
        let shape = tensor.map_or_else(Vec::new, |it| file_shape(it.shape()));
        let mut values =
            self.reader.read(&stored.name).map_err(|it| self.refused(&it.to_string()))?;
        stored.restore(&mut values, &shape).map_err(|it| self.refused(&it.to_string()))?;
        Ok(values)
    }

    /// Returns the blocks of the matrix at a module path as the file has them; `None` if a product
    /// cannot read them, or if they are not in the format `wanted`.
    ///
    /// # Errors
    /// Returns a user's mistake if a tensor cannot be read.
    pub(crate) fn blocks(
        &mut self,
        path: &str,
        used: MatrixUse,
        wanted: Option<RowEncoding>,
    ) -> Result<Option<EncodedMatrix>, Failure> {
        let weight = self.weight(path)?;
        let composition = weight.composition();
        let order = match used {
            MatrixUse::Linear => RowOrder::ByColumn,
            MatrixUse::TokenTable => RowOrder::ByRow,
            MatrixUse::Other => return Ok(None),
        };
        let Some(tensors) = self.adjacent_rows(composition, order)? else { return Ok(None) };
        let is_wanted = |format: &RowEncoding| wanted.is_none_or(|wanted| wanted == *format);
        let Some(format) = self.common_format(&tensors).filter(is_wanted) else {
            return Ok(None);
        };
        let (mut whole, mut bytes) = (Vec::new(), Vec::new());
        for stored in tensors {
            // llama.cpp permutes the rows of some heads, which moves whole blocks.
            let rows = self.num_rows(&stored.name);
            let read = self.reader.read_bytes(&stored.name, &mut bytes);
            let read = read.and_then(|()| stored.restore_rows(&mut bytes, rows));
            read.map_err(|error| self.refused(&error.to_string()))?;
            whole.extend_from_slice(&bytes);
        }
        Ok(Some(EncodedMatrix { format, order, words: format.words_of(&whole) }))
    }

    /// Encodes the matrix at a module path in another type, some rows at a time, so that the whole
    /// matrix is never in f32; `None` if the file does not have the rows of `form` in their order.
    ///
    /// # Errors
    /// Returns a user's mistake if a tensor cannot be read or encoded.
    pub(crate) fn encoded_again(
        &mut self,
        path: &str,
        form: MatrixForm,
    ) -> Result<Option<EncodedMatrix>, Failure> {
        let weight = self.weight(path)?;
        let tensors = self.adjacent_rows(weight.composition(), form.order)?;
        let moves_rows =
            |stored: &GgufTensor| matches!(stored.layout, TensorLayout::Interleaved { .. });
        let Some(tensors) = tensors.filter(|tensors| !tensors.iter().any(moves_rows)) else {
            return Ok(None);
        };
        let (mut values, mut blocks) = (Vec::new(), Vec::new());
        for stored in tensors {
            let num_rows = self.num_rows(&stored.name) as u64;
            for start in (0..num_rows).step_by(ROWS_AT_A_TIME) {
                let rows = start..num_rows.min(start + ROWS_AT_A_TIME as u64);
                values.clear();
                let read = self.reader.read_rows(&stored.name, rows, &mut values);
                read.map_err(|error| self.refused(&error.to_string()))?;
                form.append(path, &values, &mut blocks)?;
            }
        }
        Ok(Some(form.matrix(&blocks)))
    }

    /// Returns the tensors whose rows, one after the other, are a parameter in `order`; `None` if
    /// there are no such tensors.
    fn adjacent_rows(
        &self,
        composition: &Composition,
        order: RowOrder,
    ) -> Result<Option<Vec<GgufTensor>>, Failure> {
        let components = composition.components();
        let joins_columns = components.len() == 1 || composition.axis() == 1;
        let mut tensors = Vec::new();
        for component in components {
            let stored = self.stored(&component.name)?;
            // Either file may store the transpose of the parameter, and two transposes cancel.
            let is_transposed = component.transposed != (stored.layout == TensorLayout::Transposed);
            let found = if is_transposed { RowOrder::ByColumn } else { RowOrder::ByRow };
            // Encoded blocks can be neither cut into slices nor scaled.
            let is_whole = component.slice.is_none() && stored.factor == 1.0;
            // Rows of parts follow each other only if the parameter joins its parts along the
            // columns.
            if found != order || !is_whole || found == RowOrder::ByColumn && !joins_columns {
                return Ok(None);
            }
            tensors.push(stored);
        }
        let is_table_of_parts = order == RowOrder::ByRow && tensors.len() > 1;
        Ok(Some(tensors).filter(|_| !is_table_of_parts))
    }

    /// Returns the format of all tensors; `None` if they differ or a product cannot read it.
    fn common_format(&self, tensors: &[GgufTensor]) -> Option<RowEncoding> {
        let mut formats = tensors.iter().map(|stored| {
            let info = self.reader.header().tensor(&stored.name);
            info.and_then(|it| held_type_of(it.tensor_type()))
        });
        let first = formats.next()??;
        formats.all(|format| format == Some(first)).then_some(first)
    }

    /// Returns whether a part of the parameter at a module path is quantized in the file.
    pub(crate) fn is_quantized(&self, path: &str) -> Result<bool, Failure> {
        let weight = self.weight(path)?;
        let mut is_quantized = false;
        for component in weight.composition().components() {
            let info = self.reader.header().tensor(&self.stored(&component.name)?.name);
            is_quantized |= info.is_some_and(|it| it.tensor_type().block_len() > 1);
        }
        Ok(is_quantized)
    }

    fn num_rows(&self, name: &str) -> usize {
        let info = self.reader.header().tensor(name);
        info.map_or(0, |it| (it.num_elements() / it.row_len()) as usize)
    }
}

/// Returns the shape of a tensor as GGUF files store it.
pub(crate) fn file_shape(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|size| *size as u64).collect()
}
