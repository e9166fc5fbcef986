//! Writing of safetensors files, tensor by tensor.
//!
//! A [`Header`] lists the tensors of a file, and a [`TensorFileWriter`] writes their values in any
//! order. The writer of the `safetensors` crate uses a fixed order and requires all tensors at
//! once. With this module, the tensors of a sharded model can be gathered one at a time, so only
//! one tensor is in memory. The file is renamed to its final name when it is complete.
//!
//! The format is documented at <https://github.com/huggingface/safetensors>.
//!
//! ```
//! use deepburn_files::safetensors::{FloatType, Header, TensorFileWriter};
//!
//! let mut header = Header::pytorch();
//! let bias = header.push("bias", FloatType::F32.element(), &[2]);
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.safetensors");
//! let mut writer = TensorFileWriter::create(&path, path.with_extension("partial"), &header)?;
//! writer.seek(bias)?;
//! let mut bytes = Vec::new();
//! FloatType::F32.encode(&[1.0, 2.0], &mut bytes);
//! writer.write(&bytes)?;
//! writer.finish()?;
//! # Ok::<(), std::io::Error>(())
//! ```

mod element_type;
mod float_type;
mod header;
mod writer;

pub use element_type::ElementType;
pub use float_type::FloatType;
pub use header::Header;
pub use writer::TensorFileWriter;
