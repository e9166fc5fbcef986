//! One safetensors file, opened for reading tensor by tensor.
//!
//! Main type: [`TensorFile`]. The whole header is validated when the file is opened: lengths,
//! offsets, overlaps and the file size. Tensors are read in blocks, so the file is never loaded
//! into memory as a whole. See the format at <https://github.com/huggingface/safetensors>.
//!
//! ```text
//! 8 bytes    N, the length of the header: little-endian, u64
//! N bytes    JSON: {"__metadata__": {…}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
//! the rest   values, little-endian and row-major; offsets count from here
//! ```

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepburn_files::safetensors::FloatType;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::error::ModelFolderError;

/// The maximum header size of the safetensors format, in bytes.
const MAX_HEADER: u64 = 100_000_000;
/// The first bytes of a pointer of Git LFS, which a clone without Git LFS has in place of a file.
const LFS_START: &[u8; 8] = b"version ";
/// The size of a read in bytes; a multiple of every element size.
const CHUNK: usize = 1 << 20;

/// An open safetensors file with a validated header.
#[derive(Debug)]
pub(crate) struct TensorFile {
    /// The path, for messages.
    path: PathBuf,
    /// The open file. Each read starts with a seek.
    file: File,
    /// The offset of the tensor data, in bytes.
    data_start: u64,
    /// Type, shape and offsets of each tensor.
    header: Metadata,
}

impl TensorFile {
    /// Opens the file and checks its header against its size.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Format`] if the file has another format or is truncated, or an
    /// I/O error.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelFolderError> {
        let io = |source| ModelFolderError::io("open", path, source);
        let format = |reason: String| ModelFolderError::Format { path: path.to_owned(), reason };
        // The file type is checked before the file is opened, because opening a pipe blocks until
        // it has a writer.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(format("it is not a regular file".into()));
        }
        let mut file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        if size < 8 {
            return Err(format(format!(
                "it has {size} bytes, fewer than the 8 of a header length"
            )));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io)?;
        if length == *LFS_START {
            return Err(format(format!(
                "it is a pointer of Git LFS with {size} bytes, not the file; run `git lfs pull` in its repository"
            )));
        }
        let length = u64::from_le_bytes(length);
        // The length is checked before memory for the header is allocated.
        if length > MAX_HEADER.min(size - 8) {
            return Err(format(format!(
                "it announces a header of {length} bytes, but has {size} bytes in all (and {MAX_HEADER} is the most)"
            )));
        }
        // The cast is exact, because the length is at most `MAX_HEADER`.
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(io)?;
        // Reading it also checks that shapes fit offsets, and that tensors neither overlap nor
        // leave gaps.
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| format(format!("its header is wrong: {error}")))?;
        let (data, expected) = (size - 8 - length, header.data_len() as u64);
        if data != expected {
            let remedy = match data < expected {
                true => "is it truncated?",
                false => "it has bytes after its last tensor; copy or save it again",
            };
            return Err(format(format!(
                "its header describes {expected} bytes of tensors, but {data} bytes follow; {remedy}"
            )));
        }
        Ok(Self { path: path.to_owned(), file, data_start: 8 + length, header })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of the tensors, in file order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// Returns the type, shape and offsets of a tensor; `None` if the file does not contain it.
    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// Reads the elements `range` of a tensor in flat order, converts them to f32 and appends them
    /// to `values`. The element type must be one that [`float_type`] supports.
    ///
    /// Uses a buffer of 1 MiB in addition to the values.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Format`] if there is no such tensor, or an I/O error.
    pub(crate) fn append_range(
        &mut self,
        name: &str,
        range: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), ModelFolderError> {
        let path = &self.path;
        let info = self.header.info(name).and_then(|info| Some((info, float_type(info.dtype)?)));
        let Some((info, float)) = info else {
            let reason = format!("it has no tensor `{name}` of f32, f16 or bf16");
            return Err(ModelFolderError::Format { path: path.clone(), reason });
        };
        let io = |source| ModelFolderError::io("read", path, source);
        let start = self.data_start + (info.data_offsets.0 + range.start * float.size()) as u64;
        self.file.seek(SeekFrom::Start(start)).map_err(io)?;
        let mut left = range.len() * float.size();
        let mut chunk = vec![0; CHUNK.min(left)];
        while left > 0 {
            let chunk = &mut chunk[..CHUNK.min(left)];
            self.file.read_exact(chunk).map_err(io)?;
            float.decode(chunk, values);
            left -= chunk.len();
        }
        Ok(())
    }
}

/// Converts a safetensors type to a float type; `None` if weights cannot have this type.
pub(crate) fn float_type(dtype: Dtype) -> Option<FloatType> {
    match dtype {
        Dtype::F32 => Some(FloatType::F32),
        Dtype::F16 => Some(FloatType::F16),
        Dtype::BF16 => Some(FloatType::Bf16),
        _ => None,
    }
}
