//! Safetensors files, written tensor by tensor.
//!
//! A [`Header`] lists the tensors of a file, and a [`TensorFileWriter`] takes their values in any order. The
//! writer of the `safetensors` crate has an order of its own and needs all tensors at once. Here tensors of a
//! sharded model are gathered one at a time, and memory holds one of them. A file gets its name only when it
//! is complete.
//!
//! The format: <https://github.com/huggingface/safetensors>.
//!
//! ```
//! use deepburn_safetensors::{FloatType, Header, TensorFileWriter};
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
