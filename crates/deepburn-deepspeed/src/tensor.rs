//! Tensors as they lie in files, and parameters put together out of parts of them.
//!
//! Main types: [`Tensor`], a dense tensor in an open file; [`Joined`], several flat tensors as one
//! behind the other; [`Pieces`], the elements of one parameter. Values are widened to f32, which
//! holds f16 and bf16 exactly, and nothing but what is asked for is read.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};

use crate::DeepSpeedError;
use crate::archive::Archive;
use crate::pickle::ElementType;

/// A dense tensor of an open file.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) archive: Arc<Archive>,
    pub(crate) key: String,
    pub(crate) element: ElementType,
    /// Elements of the storage before its first one.
    pub(crate) offset: usize,
    pub(crate) shape: Vec<usize>,
}

impl Tensor {
    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn path(&self) -> &Path {
        self.archive.path()
    }

    /// Appends elements `range` of the flat tensor, which has to have them.
    pub(crate) fn read(
        &self,
        range: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), DeepSpeedError> {
        let size = self.element.size();
        let mut bytes = vec![0; range.len() * size];
        self.archive.read(&self.key, ((self.offset + range.start) * size) as u64, &mut bytes)?;
        let halves = || bytes.as_chunks::<2>().0.iter();
        match self.element {
            ElementType::F32 => {
                values.extend(bytes.as_chunks::<4>().0.iter().map(|it| f32::from_le_bytes(*it)));
            }
            ElementType::F16 => values.extend(halves().map(|it| f16::from_le_bytes(*it).to_f32())),
            ElementType::Bf16 => {
                values.extend(halves().map(|it| bf16::from_le_bytes(*it).to_f32()));
            }
        }
        Ok(())
    }
}

/// The first elements of several flat tensors, one behind the other.
#[derive(Debug, Default)]
pub(crate) struct Joined {
    parts: Vec<(Arc<Tensor>, usize)>,
    len: usize,
}

impl Joined {
    /// Adds the first `len` elements of `tensor`, which has to have them.
    pub(crate) fn add(&mut self, tensor: Arc<Tensor>, len: usize) {
        self.parts.push((tensor, len));
        self.len += len;
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends elements `range`, which must exist, to the elements of a parameter.
    pub(crate) fn cut(&self, range: Range<usize>, pieces: &mut Pieces) {
        let mut start = 0;
        for (tensor, len) in &self.parts {
            let part = range.start.max(start)..range.end.min(start + len);
            if !part.is_empty() {
                let local = part.start - start..part.end - start;
                pieces.0.push((tensor.clone(), local));
            }
            start += len;
        }
    }
}

/// All elements of a parameter, or of one array that an optimizer keeps of it, in their order.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<(Arc<Tensor>, Range<usize>)>);

impl Pieces {
    /// A whole tensor.
    pub(crate) fn whole(tensor: Arc<Tensor>) -> Self {
        let numel = tensor.numel();
        Self(vec![(tensor, 0..numel)])
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|(_, part)| part.len()).sum()
    }

    /// The file of the first element.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.0.first().map(|(tensor, _)| tensor.path())
    }

    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<f32>, DeepSpeedError> {
        let mut values = Vec::with_capacity(range.len());
        let mut start = 0;
        for (tensor, part) in &self.0 {
            let wanted = range.start.max(start)..range.end.min(start + part.len());
            if !wanted.is_empty() {
                let before = part.start;
                let local = before + wanted.start - start..before + wanted.end - start;
                tensor.read(local, &mut values)?;
            }
            start += part.len();
        }
        Ok(values)
    }

    /// Compares everything that these lie in with its checksum.
    pub(crate) fn verify(&self) -> Result<(), DeepSpeedError> {
        self.0.iter().try_for_each(|(tensor, _)| tensor.read(0..0, &mut Vec::new()))
    }

    /// The type that values are rounded to in here.
    pub(crate) fn element(&self) -> Option<ElementType> {
        self.0.first().map(|(tensor, _)| tensor.element)
    }
}
