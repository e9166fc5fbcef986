//! A writer for safetensors files.

use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::header::Header;
use crate::partial_file::PartialFile;

/// The size of the write buffer in bytes. Larger writes bypass the buffer.
const BUFFER: usize = 1 << 20;

/// Writes a file under a temporary name and renames it when it is complete.
///
/// If it is dropped before [`finish`](Self::finish), the temporary file is removed.
#[derive(Debug)]
#[must_use = "a file that is not finished is removed"]
pub struct TensorFileWriter {
    writer: BufWriter<PartialFile>,
    /// The offset of the values in the file, in bytes.
    data_start: u64,
}

impl TensorFileWriter {
    /// Creates a file and writes its header. The file has the temporary path `partial` until it is
    /// renamed to `path`. Both paths must be on the same file system. An existing file at `partial`
    /// is replaced.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created or written.
    pub fn create(path: &Path, partial: PathBuf, header: &Header) -> io::Result<Self> {
        Self::start(PartialFile::create(path, partial)?, header)
    }

    /// Creates a file and writes its header. It has the temporary path of [`PartialFile::beside`].
    ///
    /// # Errors
    /// Returns an error if the file cannot be created or written.
    pub fn beside(path: &Path, header: &Header) -> io::Result<Self> {
        Self::start(PartialFile::beside(path)?, header)
    }

    /// Writes the header of a new file.
    fn start(file: PartialFile, header: &Header) -> io::Result<Self> {
        let writer = BufWriter::with_capacity(BUFFER, file);
        let bytes = header.to_bytes();
        let mut file = Self { writer, data_start: bytes.len() as u64 };
        // On an error, dropping `file` removes the temporary file.
        file.write(&bytes)?;
        Ok(file)
    }

    /// Sets the write position to the byte `start` of the values. [`Header::push`] returns the
    /// position of a tensor.
    ///
    /// # Errors
    /// Returns an error if buffered bytes cannot be written to the file.
    pub fn seek(&mut self, start: u64) -> io::Result<()> {
        self.writer.seek(SeekFrom::Start(self.data_start + start)).map(drop)
    }

    /// Writes bytes of the values at the current position.
    ///
    /// # Errors
    /// Returns an error if the bytes cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer.write_all(bytes)
    }

    /// Waits until the file is stored on the disk, then renames it.
    ///
    /// # Errors
    /// Returns an error if the remaining bytes cannot be written or the file cannot be renamed.
    pub fn finish(self) -> io::Result<()> {
        // Returns the error of the last buffered bytes, which dropping a `BufWriter` would ignore.
        self.writer.into_inner()?.finish_synced()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safetensors::FloatType;

    #[test]
    fn tensors_come_in_any_order_and_the_name_comes_last() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let partial = folder.path().join(".partial");
        let mut header = Header::pytorch();
        let starts = ["a", "b"].map(|name| header.push(name, FloatType::F32.element(), &[2]));
        for is_finished in [false, true] {
            let mut writer = TensorFileWriter::create(&path, partial.clone(), &header).unwrap();
            for (start, value) in starts.iter().zip([1.0_f32, 2.0]).rev() {
                writer.seek(*start).unwrap();
                writer.write(&value.to_le_bytes()).unwrap();
                writer.write(&(-value).to_le_bytes()).unwrap();
            }
            assert!(partial.exists() && !path.exists());
            if is_finished {
                writer.finish().unwrap();
            } else {
                drop(writer);
            }
            assert_eq!((partial.exists(), path.exists()), (false, is_finished));
        }
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let expected: Vec<u8> = [2_f32, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(file.tensor("b").unwrap().data(), expected);
    }
}
