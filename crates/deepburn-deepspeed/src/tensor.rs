//! Tensors in files, and parameters that are assembled from segments of these tensors.
//!
//! Main types: [`Tensor`], a dense tensor in an open file; [`Segments`], ranges of such tensors,
//! one after the other: a flat group without its padding, or one parameter. Values are converted to
//! f32, which represents f16 and bf16 exactly. Only the requested range is read.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use deepburn_files::safetensors::FloatType;

use crate::DeepSpeedError;
use crate::archive::Archive;

/// Tensors with their names in the model, in order.
pub(crate) type NamedTensors = Vec<(String, Arc<Tensor>)>;

/// A dense tensor in an open file.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// The file, which stays open as long as one of its tensors exists.
    pub(crate) archive: Arc<Archive>,
    /// The name of the storage in the archive.
    pub(crate) key: String,
    pub(crate) element: FloatType,
    /// The offset of the first element in the storage.
    pub(crate) offset: usize,
    /// The shape, outermost dimension first.
    pub(crate) shape: Vec<usize>,
}

impl Tensor {
    /// Returns the number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.archive.path()
    }

    /// Appends elements `range` of the flat tensor to `values`, converted to f32. The range must
    /// exist. Memory holds the bytes and the values of the range.
    pub(crate) fn read(
        &self,
        range: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), DeepSpeedError> {
        let size = self.element.size();
        let mut bytes = vec![0; range.len() * size];
        self.archive.read(&self.key, ((self.offset + range.start) * size) as u64, &mut bytes)?;
        self.element.decode(&bytes, values);
        Ok(())
    }
}

/// Segments of flat tensors, one after another: what contains a parameter or one of its optimizer
/// arrays, or a flat group without its padding.
#[derive(Debug, Default)]
pub(crate) struct Segments(Vec<(Arc<Tensor>, Range<usize>)>);

impl Segments {
    /// Returns a complete tensor as one segment.
    pub(crate) fn whole(tensor: Arc<Tensor>) -> Self {
        let numel = tensor.numel();
        Self(vec![(tensor, 0..numel)])
    }

    /// Appends the first `len` elements of `tensor`, which must exist.
    pub(crate) fn add(&mut self, tensor: Arc<Tensor>, len: usize) {
        self.0.push((tensor, 0..len));
    }

    /// Appends other segments.
    pub(crate) fn append(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Returns the segments of elements `range`, which must exist.
    pub(crate) fn cut(&self, range: Range<usize>) -> Self {
        let (mut segments, mut start) = (Self::default(), 0);
        for (tensor, part) in &self.0 {
            // Where a segment does not overlap the range, this range ends before it starts and
            // counts as empty.
            let wanted = range.start.max(start)..range.end.min(start + part.len());
            if !wanted.is_empty() {
                let local = part.start + wanted.start - start..part.start + wanted.end - start;
                segments.0.push((tensor.clone(), local));
            }
            start += part.len();
        }
        segments
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|(_, part)| part.len()).sum()
    }

    /// Returns the file of the first element.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.0.first().map(|(tensor, _)| tensor.path())
    }

    /// Reads elements `range`, converted to f32.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Damaged`] if a checksum is wrong, or an I/O error.
    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<f32>, DeepSpeedError> {
        let mut values = Vec::with_capacity(range.len());
        for (tensor, part) in self.cut(range).0 {
            tensor.read(part, &mut values)?;
        }
        Ok(values)
    }

    /// Verifies the storages of all segments.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Damaged`] if a checksum is wrong, or an I/O error.
    pub(crate) fn verify(&self) -> Result<(), DeepSpeedError> {
        // An empty read verifies the storage, because every read verifies it first.
        self.0.iter().try_for_each(|(tensor, _)| tensor.read(0..0, &mut Vec::new()))
    }

    /// Returns the element type.
    pub(crate) fn element(&self) -> Option<FloatType> {
        self.0.first().map(|(tensor, _)| tensor.element)
    }
}
