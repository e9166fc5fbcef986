//! Writing and reading of GGUF files, the model format of llama.cpp, Ollama and LM Studio.
//!
//! A [`GgufHeader`] has the [`Metadata`] and lists the tensors of a file. A [`GgufWriter`] encodes
//! their values, a few rows at a time, so that a tensor is never in memory twice. The file is
//! renamed to its final name when it is complete. A [`GgufReader`] reads a file with all checks.
//! [`FileType`] chooses the type of each tensor as `llama-quantize` does, and [`TensorType`]
//! quantizes to the same bytes as llama.cpp's reference code.
//!
//! [`Hyperparameters`] describes a decoder as llama.cpp does: metadata, names and layouts of
//! tensors. [`GgufTokenizer`] and [`GgufSpecialTokens`] do so for a `tokenizer.json`. A model that
//! llama.cpp would compute in another way is an error that names the field.
//! [`Hyperparameters::read`], [`GgufTokenizer::from_metadata`] and
//! [`GgufSpecialTokens::from_metadata`] read a file back, of this crate or of llama.cpp's
//! converter.
//!
//! Little-endian files of versions 2 and 3 can be read, with the tensor types of [`TensorType`].
//! The format is documented at <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
//!
//! ```
//! use deepburn_gguf::{GgufReader, GgufWriter, GgufHeader, Metadata, TensorType};
//!
//! let mut metadata = Metadata::new();
//! metadata.push("general.architecture", "llama")?;
//! let mut header = GgufHeader::new(metadata)?;
//! header.push("output.weight", TensorType::Q8_0, &[2, 32])?;
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.gguf");
//! let mut writer = GgufWriter::create(&path, path.with_extension("partial"), header)?;
//! writer.write("output.weight", &[0.5; 32])?;
//! writer.write("output.weight", &[-2.0; 32])?;
//! writer.finish()?;
//!
//! let mut reader = GgufReader::open(&path)?;
//! assert_eq!(reader.read("output.weight")?.len(), 64);
//! # Ok::<(), deepburn_gguf::GgufError>(())
//! ```

mod blocks;
mod error;
mod field_reader;
mod file_type;
mod header;
mod header_reader;
mod metadata;
mod model;
mod modelfile;
mod reader;
mod tensor_info;
mod tensor_type;
mod tokenizer;
mod value;
mod writer;

pub use blocks::EncodeError;
pub use error::GgufError;
pub use file_type::{FileType, TypeSelector};
pub use header::GgufHeader;
pub use metadata::Metadata;
pub use model::{
    Architecture, GgufAttention, GgufFeedForward, GgufRope, GgufTensor, Hyperparameters,
    RopeScaling, TensorLayout,
};
pub use modelfile::modelfile;
pub use reader::GgufReader;
pub use tensor_info::TensorInfo;
pub use tensor_type::TensorType;
pub use tokenizer::{GgufSpecialTokens, GgufTokenizer};
pub use value::{Array, Value};
pub use writer::GgufWriter;
