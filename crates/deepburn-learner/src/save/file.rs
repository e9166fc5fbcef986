//! Opens the safetensors file that weights are saved to.

use std::io;
use std::path::Path;

use deepburn_ops::OptimizerOps;
use deepburn_safetensors::{Header, TensorFileWriter};

use super::{SaveError, SavedTensor};

/// Begins the file `path` with the header of `tensors`, whose values are then written in this order.
///
/// # Errors
/// The file cannot be created.
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

/// What an I/O error at `path` means.
pub(super) fn failure(path: &Path) -> impl Fn(io::Error) -> SaveError {
    move |error| SaveError::File { path: path.to_owned(), reason: error.to_string() }
}
