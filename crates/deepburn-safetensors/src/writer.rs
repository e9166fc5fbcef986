//! A safetensors file that is being written.

use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use deepburn_files::PartialFile;

use crate::Header;

/// Bytes that are collected before they are written. Larger pieces are written as they are.
const BUFFER: usize = 1 << 20;

/// Writes a file under another name and renames it when it is complete.
///
/// Dropped before [`finish`](Self::finish), it leaves no file behind.
#[derive(Debug)]
#[must_use = "a file that is not finished is removed"]
pub struct TensorFileWriter {
    writer: BufWriter<PartialFile>,
    /// Bytes before the values.
    data_start: u64,
}

impl TensorFileWriter {
    /// Begins the file `path` with its header. Until it is complete it is called `partial`, which must lie on
    /// the same file system. A file of that name is replaced.
    ///
    /// # Errors
    /// The file cannot be created or written.
    pub fn create(path: &Path, partial: PathBuf, header: &Header) -> io::Result<Self> {
        let writer = BufWriter::with_capacity(BUFFER, PartialFile::create(path, partial)?);
        let bytes = header.to_bytes();
        let mut file = Self { writer, data_start: bytes.len() as u64 };
        file.write(&bytes)?;
        Ok(file)
    }

    /// Continues at a byte of the values, where [`Header::push`] placed a tensor.
    ///
    /// # Errors
    /// What was written before does not reach the file.
    pub fn seek(&mut self, start: u64) -> io::Result<()> {
        self.writer.seek(SeekFrom::Start(self.data_start + start)).map(drop)
    }

    /// Writes the next bytes of the values.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer.write_all(bytes)
    }

    /// Waits until the file is on the disk, and renames it.
    ///
    /// # Errors
    /// The rest cannot be written, or the file cannot be renamed.
    pub fn finish(self) -> io::Result<()> {
        self.writer.into_inner()?.finish_synced()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FloatType;

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
