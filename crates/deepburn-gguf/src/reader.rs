//! Reading of files.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use crate::{GgufError, GgufHeader, TensorInfo};

/// A GGUF file with a verified header, whose tensors are read in any order.
#[derive(Debug)]
pub struct GgufReader<R> {
    input: R,
    header: GgufHeader,
    /// The position of the first tensor.
    start: u64,
    /// The encoded bytes of the last read. Kept so that reading rows does not allocate each time.
    bytes: Vec<u8>,
}

impl GgufReader<BufReader<File>> {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or as [`GgufHeader::read`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        Self::new(BufReader::new(File::open(path)?))
    }
}

impl<R: Read + Seek> GgufReader<R> {
    /// Reads the header of a file, from its start.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or as [`GgufHeader::read`].
    pub fn new(mut input: R) -> Result<Self, GgufError> {
        let file_len = input.seek(SeekFrom::End(0))?;
        input.seek(SeekFrom::Start(0))?;
        let (header, start) = GgufHeader::read(&mut input, file_len)?;
        Ok(Self { input, header, start, bytes: Vec::new() })
    }

    /// Returns the header.
    pub fn header(&self) -> &GgufHeader {
        &self.header
    }

    /// Reads a whole tensor as f32 values, in row-major order.
    ///
    /// # Errors
    /// Returns an error that names the tensor if there is no such tensor or if it cannot be read.
    pub fn read(&mut self, name: &str) -> Result<Vec<f32>, GgufError> {
        let info = self.tensor(name)?;
        let mut values = Vec::new();
        self.read_rows(name, 0..info.num_elements() / info.row_len(), &mut values)?;
        Ok(values)
    }

    /// Reads rows of a tensor and appends their values to `into`. All dimensions but the last are
    /// counted as one.
    ///
    /// # Errors
    /// Returns an error that names the tensor if there is no such tensor, if `rows` are not in it,
    /// or if it cannot be read.
    pub fn read_rows(
        &mut self,
        name: &str,
        rows: Range<u64>,
        into: &mut Vec<f32>,
    ) -> Result<(), GgufError> {
        let info = self.tensor(name)?;
        let num_rows = info.num_elements() / info.row_len();
        if rows.start > rows.end || rows.end > num_rows {
            let problem = format!("has {num_rows} rows; rows {rows:?} cannot be read");
            return Err(GgufError::tensor(name, problem));
        }
        // Exact, because a row is whole blocks.
        let row_size = info.size() / num_rows;
        // Taken out of `self`, which `fill` borrows, and put back even after an error.
        let mut bytes = std::mem::take(&mut self.bytes);
        let range = rows.start * row_size..rows.end * row_size;
        let result = self.fill(&info, range, &mut bytes);
        if result.is_ok() {
            info.tensor_type().decode(&bytes, into);
        }
        self.bytes = bytes;
        result
    }

    /// Reads the encoded bytes of a tensor into `into`, whose content is replaced.
    ///
    /// # Errors
    /// Returns an error that names the tensor if there is no such tensor or if it cannot be read.
    pub fn read_bytes(&mut self, name: &str, into: &mut Vec<u8>) -> Result<(), GgufError> {
        let info = self.tensor(name)?;
        self.fill(&info, 0..info.size(), into)
    }

    /// Returns the description of a tensor.
    fn tensor(&self, name: &str) -> Result<TensorInfo, GgufError> {
        let missing = || GgufError::tensor(name, "is not in the file");
        self.header.tensor(name).cloned().ok_or_else(missing)
    }

    /// Reads bytes of a tensor. The header has been compared with the size of the file, so that the
    /// range exists unless the file has become shorter.
    fn fill(
        &mut self,
        info: &TensorInfo,
        range: Range<u64>,
        into: &mut Vec<u8>,
    ) -> Result<(), GgufError> {
        let too_large = |_| GgufError::tensor(info.name(), "does not fit into memory");
        into.resize(usize::try_from(range.end - range.start).map_err(too_large)?, 0);
        self.input.seek(SeekFrom::Start(self.start + info.offset() + range.start))?;
        self.input
            .read_exact(into)
            .map_err(|error| GgufError::tensor(info.name(), format!("cannot be read: {error}")))
    }
}
