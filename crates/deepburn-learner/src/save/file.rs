//! Opens the safetensors file that weights are saved to.

use std::io;
use std::path::Path;

use deepburn_ops::OptimizerOps;
use deepburn_safetensors::{Header, TensorFileWriter};

use super::{SaveError, SavedTensor};

/// Creates the file `path` with the header of `tensors`, whose values then have
/// to be written in this order. The data is written to `path` with the suffix
/// `.partial`, and this file is renamed when it is complete.
///
/// # Errors
///
/// Returns an error if the file cannot be created.
pub(super) fn create<B: OptimizerOps>(
    path: &Path,
    tensors: &[SavedTensor<B>],
) -> Result<TensorFileWriter, SaveError> {
    let failed = failure(path);
    let Some(name) = path.file_name() else {
        return Err(failed(io::Error::other("the path names no file")));
    };
    if path.is_dir() {
        return Err(failed(io::ErrorKind::IsADirectory.into()));
    }
    let mut header = Header::pytorch();
    for tensor in tensors {
        header.push(&tensor.path, tensor.element, &tensor.shape);
    }
    let mut partial = name.to_owned();
    partial.push(".partial");
    TensorFileWriter::create(path, path.with_file_name(partial), &header).map_err(failed)
}

/// Returns a function that converts an I/O error at `path`.
pub(super) fn failure(path: &Path) -> impl Fn(io::Error) -> SaveError {
    move |error| SaveError::File { path: path.to_owned(), reason: error.to_string() }
}
