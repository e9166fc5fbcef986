//! Reading of headers.

use std::io::Read;

use crate::error::shortened;
use crate::field_reader::FieldReader;
use crate::header::{MAGIC, VERSION};
use crate::{GgufError, GgufHeader, Metadata, TensorInfo, TensorType};

/// An older version, whose little-endian files are the same.
const VERSION_2: u32 = 2;

impl GgufHeader {
    /// Reads the header of a file with `file_len` bytes. Returns it and the position of the first
    /// tensor.
    ///
    /// A header takes at most 64 MiB in the file, and about seven times as much memory, in the
    /// worst case of many short texts.
    ///
    /// # Errors
    /// Returns an error that names the field if the file is not a little-endian GGUF file of
    /// version 2 or 3, is incomplete, or has bytes after the last tensor. The rules of
    /// [`Metadata::push`], [`GgufHeader::new`] and [`GgufHeader::push`] hold too, and tensors must
    /// follow each other without gaps, which llama.cpp requires.
    pub fn read(input: impl Read, file_len: u64) -> Result<(Self, u64), GgufError> {
        let mut fields = FieldReader::new(input, file_len);
        let (num_tensors, num_pairs) = read_start(&mut fields)?;
        let mut metadata = Metadata::new();
        for index in 0..num_pairs {
            let key = fields.string(&format!("key of metadata {index}"))?;
            let value = fields.value(&field_name("metadata", &key))?;
            metadata.push(key, value)?;
        }
        let mut header = Self::new(metadata)?;
        for index in 0..num_tensors {
            let (name, tensor_type, shape, offset) = read_tensor_info(&mut fields, index)?;
            header.push(name.as_str(), tensor_type, &shape)?;
            // The header has computed the only offset that is allowed.
            let expected = header.tensor(&name).map_or(0, TensorInfo::offset);
            if offset != expected {
                let problem = format!(
                    "begins at byte {offset} of the values; it must be {expected}, after the tensor before it"
                );
                return Err(GgufError::tensor(&name, problem));
            }
        }
        // The position is at most 64 MiB, and the alignment at most 64 KiB.
        let start = fields.position().next_multiple_of(header.alignment());
        check_len(&header, start, file_len)?;
        Ok((header, start))
    }
}

/// Reads the fixed start of the file. Returns the numbers of tensors and of pairs.
fn read_start(fields: &mut FieldReader<impl Read>) -> Result<(usize, usize), GgufError> {
    let magic = fields.bytes::<4>("start of the file")?;
    if magic != MAGIC {
        let problem = format!("is `{}`; a GGUF file starts with `GGUF`", magic.escape_ascii());
        return Err(GgufError::field("start of the file", problem));
    }
    let version = fields.u32("version")?;
    // A big-endian file has the same first bytes. Only its version shows the byte order.
    if version == VERSION.swap_bytes() {
        return Err(GgufError::field("version", "the file is big-endian; convert it first"));
    }
    if ![VERSION, VERSION_2].contains(&version) {
        let problem = format!(
            "is {version}; supported are {VERSION_2} and {VERSION}; convert the model again"
        );
        return Err(GgufError::field("version", problem));
    }
    let (num_tensors, num_pairs) =
        (fields.u64("number of tensors")?, fields.u64("number of metadata")?);
    // The shortest: a length, a name of one byte, and for a pair its type and a byte, for a tensor
    // its number of dimensions, a dimension, its type and its offset.
    let tensors = fields.check("number of tensors", num_tensors, 8 + 1 + 4 + 8 + 4 + 8)?;
    let pairs = fields.check("number of metadata", num_pairs, 8 + 1 + 4 + 1)?;
    Ok((tensors, pairs))
}

/// Reads the description of a tensor: name, type, shape with the outermost dimension first, and
/// offset.
fn read_tensor_info(
    fields: &mut FieldReader<impl Read>,
    index: usize,
) -> Result<(String, TensorType, Vec<u64>, u64), GgufError> {
    let name = fields.string(&format!("name of tensor {index}"))?;
    let field = field_name("tensor", &name);
    let num_dims = fields.u32(&field)? as usize;
    // Before the dimensions are read: a damaged number could be billions.
    if num_dims > TensorInfo::MAX_DIMS {
        let problem =
            format!("{num_dims} dimensions; at most {} are allowed", TensorInfo::MAX_DIMS);
        return Err(GgufError::tensor(&name, problem));
    }
    let mut shape = (0..num_dims).map(|_| fields.u64(&field)).collect::<Result<Vec<_>, _>>()?;
    // Files have the row length first.
    shape.reverse();
    let id = fields.u32(&field)?;
    let Some(tensor_type) = TensorType::from_id(id) else {
        let supported: Vec<_> = TensorType::ALL.iter().map(|it| it.name()).collect();
        let problem =
            format!("unsupported type {id}; supported types are {}", supported.join(", "));
        return Err(GgufError::tensor(&name, problem));
    };
    Ok((name, tensor_type, shape, fields.u64(&field)?))
}

/// Compares the size of the file with the end of the last tensor. The padding after it may be
/// missing.
fn check_len(header: &GgufHeader, start: u64, file_len: u64) -> Result<(), GgufError> {
    let Some(last) = header.tensors().last() else { return Ok(()) };
    let end = start + last.offset() + last.size();
    let padded = start + header.data_len();
    if file_len < end {
        let problem = format!(
            "is {file_len} bytes, and its tensors need {end}, up to `{}`: it is incomplete; download or copy it again",
            shortened(last.name())
        );
        return Err(GgufError::field("size of the file", problem));
    }
    // They may belong to a tensor that a damaged header does not list.
    if file_len > padded {
        let problem = format!("is {file_len}; the last tensor ends at byte {padded}");
        return Err(GgufError::field("size of the file", problem));
    }
    Ok(())
}

/// Returns the name of a field for messages, of which a malformed file determines a limited length.
fn field_name(kind: &str, name: &str) -> String {
    format!("{kind} `{}`", shortened(name))
}
