//! Writing of files.

use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

use deepburn_files::PartialFile;

use crate::{GgufError, GgufHeader, TensorInfo};

/// The number of elements that are encoded before they are written, at least a row.
const BATCH_LEN: usize = 1 << 20;

/// Writes the tensors of a file in any order, each of them row by row.
///
/// The file is created at a temporary path. [`finish`](Self::finish) renames it. If the writer is
/// dropped before that, the file is removed.
#[derive(Debug)]
#[must_use = "a file that is not finished is removed"]
pub struct GgufWriter {
    file: PartialFile,
    header: GgufHeader,
    /// The position of the first tensor.
    start: u64,
    /// The bytes of each tensor that have been written.
    written: Vec<u64>,
    /// The encoded bytes of a batch. Kept so that each batch does not allocate again.
    bytes: Vec<u8>,
}

impl GgufWriter {
    /// Creates a file at the temporary path `partial`, which will be renamed to `path`, and writes
    /// the header. Both paths must be on the same file system. The file gets its final size, and
    /// padding is zero.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created or written.
    pub fn create(
        path: impl Into<PathBuf>,
        partial: impl Into<PathBuf>,
        header: GgufHeader,
    ) -> Result<Self, GgufError> {
        let mut file = PartialFile::create(path, partial)?;
        let start = header.to_bytes();
        file.write_all(&start)?;
        let start = start.len() as u64;
        // Padding is never written. In a file of this size, it reads as zeros.
        file.file().set_len(start + header.data_len())?;
        let written = vec![0; header.tensors().len()];
        Ok(Self { file, header, start, written, bytes: Vec::new() })
    }

    /// Returns the header.
    pub fn header(&self) -> &GgufHeader {
        &self.header
    }

    /// Encodes `values`, the next rows of a tensor, and writes them. The rows of a tensor may be
    /// passed at once or in several calls, in row-major order; calls for different tensors may
    /// alternate.
    ///
    /// # Errors
    /// Returns an error that names the tensor if it is not in the header, if `values` are not whole
    /// rows or more rows than are left, if a value is NaN, infinite or too large for the type, or
    /// if the file cannot be written. After an error, the file cannot be finished.
    pub fn write(&mut self, name: &str, values: &[f32]) -> Result<(), GgufError> {
        let index = self.next(name, values.len())?;
        let info = &self.header.tensors()[index];
        // The length of `values` is a multiple of it.
        let row_len = info.row_len() as usize;
        // Whole rows, which are whole blocks too.
        let batch_len = (BATCH_LEN / row_len).max(1) * row_len;
        let row_size = info.size() / (info.num_elements() / info.row_len());
        let first = self.written[index] / row_size;
        self.file.seek(SeekFrom::Start(self.start + info.offset() + self.written[index]))?;
        for (batch, values) in values.chunks(batch_len).enumerate() {
            self.bytes.clear();
            info.tensor_type().encode(values, &mut self.bytes).map_err(|error| {
                let start = first as usize * row_len + batch * batch_len;
                GgufError::tensor(name, error.shifted(start).to_string())
            })?;
            self.file.write_all(&self.bytes)?;
            self.written[index] += self.bytes.len() as u64;
        }
        Ok(())
    }

    /// Returns the index of a tensor if `len` values are whole rows that are still missing.
    fn next(&self, name: &str, len: usize) -> Result<usize, GgufError> {
        let Some(index) = self.header.position(name) else {
            return Err(GgufError::tensor(name, "is not in the header"));
        };
        let info = &self.header.tensors()[index];
        let (len, row_len) = (len as u64, info.row_len());
        if !len.is_multiple_of(row_len) {
            let problem = format!("{len} values; rows have {row_len} elements, pass whole rows");
            return Err(GgufError::tensor(name, problem));
        }
        let left = info.tensor_type().size_of(len).is_some_and(|size| size <= self.left(index));
        match left {
            true => Ok(index),
            false => {
                let problem = format!(
                    "{len} values are more than are left of its {} elements",
                    info.num_elements()
                );
                Err(GgufError::tensor(name, problem))
            }
        }
    }

    /// Returns the number of bytes of a tensor that have not been written.
    fn left(&self, index: usize) -> u64 {
        self.header.tensors()[index].size() - self.written[index]
    }

    /// Waits until the content is on the disk, then renames the file to its final path.
    ///
    /// # Errors
    /// Returns an error that names the tensor if rows of a tensor are missing, or if the file
    /// cannot be flushed or renamed. The file is then removed.
    pub fn finish(self) -> Result<(), GgufError> {
        let missing = (0..self.written.len()).find(|index| self.left(*index) > 0);
        if let Some(index) = missing {
            let info: &TensorInfo = &self.header.tensors()[index];
            let problem = format!(
                "{} of {} bytes were written; write all rows",
                self.written[index],
                info.size()
            );
            return Err(GgufError::tensor(info.name(), problem));
        }
        Ok(self.file.finish_synced()?)
    }
}
