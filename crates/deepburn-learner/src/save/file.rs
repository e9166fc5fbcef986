//! A safetensors file that is written tensor by tensor, beside its place, and renamed when it is
//! complete.

use deepburn_ops::OptimizerOps;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::{SaveError, SavedTensor};

/// A file that is not complete. Dropping it removes it.
pub(super) struct TensorFile {
    /// The name that it gets.
    path: PathBuf,
    partial: Partial,
    writer: BufWriter<File>,
}

/// The sibling that holds the data until the file is complete.
struct Partial {
    path: PathBuf,
    renamed: bool,
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.renamed {
            // Best effort: the error that is reported matters more than this one.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl TensorFile {
    /// Begins the file with the header of `tensors`, which are then appended in this order.
    ///
    /// # Errors
    /// When it cannot be created.
    pub(super) fn create<B: OptimizerOps>(
        path: &Path,
        tensors: &[SavedTensor<B>],
    ) -> Result<Self, SaveError> {
        let failed = failure(path);
        let Some(name) = path.file_name() else {
            return Err(failed(io::Error::other("the path names no file")));
        };
        if path.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        let header = header(tensors).map_err(&failed)?;
        let mut sibling = name.to_owned();
        sibling.push(".partial");
        let partial = path.with_file_name(sibling);
        let writer = BufWriter::new(File::create(&partial).map_err(failed)?);
        let partial = Partial { path: partial, renamed: false };
        let mut file = Self { path: path.to_owned(), partial, writer };
        file.append(&header)?;
        Ok(file)
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// When they cannot be written.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        self.writer.write_all(bytes).map_err(failure(&self.path))
    }

    /// Waits until all is on the disk and gives the file its name.
    ///
    /// # Errors
    /// When the rest cannot be written or the file cannot be renamed.
    pub(super) fn finish(mut self) -> Result<(), SaveError> {
        self.complete().map_err(failure(&self.path))?;
        self.partial.renamed = true;
        Ok(())
    }

    fn complete(&mut self) -> io::Result<()> {
        self.writer.flush()?;
        self.writer.get_ref().sync_all()?;
        fs::rename(&self.partial.path, &self.path)
    }
}

/// The header of a safetensors file: its length in 8 bytes, then JSON padded to a multiple of 8.
fn header<B: OptimizerOps>(tensors: &[SavedTensor<B>]) -> io::Result<Vec<u8>> {
    let mut offset = 0;
    let infos = tensors.iter().map(|tensor| {
        let info = tensor.info(offset);
        offset = info.data_offsets.1;
        (tensor.path.clone(), info)
    });
    // transformers asks for it.
    let format = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    let metadata = Metadata::new(Some(format), infos.collect()).map_err(io::Error::other)?;
    let mut json = serde_json::to_vec(&metadata)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

fn failure(path: &Path) -> impl Fn(io::Error) -> SaveError {
    move |error| SaveError::File { path: path.to_owned(), reason: error.to_string() }
}
