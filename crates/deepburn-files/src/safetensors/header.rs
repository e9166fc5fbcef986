//! The header of a safetensors file.

use serde_json::{Map, Value, json};

use super::element_type::ElementType;

/// The list of tensors in a file, in file order and without gaps.
#[derive(Debug, Clone)]
pub struct Header {
    fields: Map<String, Value>,
    data_len: u64,
}

impl Header {
    /// Returns a header without tensors. The values of `metadata` must be strings, because readers
    /// reject other values.
    #[must_use]
    pub fn new(metadata: Map<String, Value>) -> Self {
        let fields = Map::from_iter([("__metadata__".to_owned(), Value::Object(metadata))]);
        Self { fields, data_len: 0 }
    }

    /// Returns a header without tensors, with the metadata that `transformers` requires.
    #[must_use]
    pub fn pytorch() -> Self {
        Self::new(Map::from_iter([("format".to_owned(), json!("pt"))]))
    }

    /// Appends a tensor. Returns the offset of its first byte from the start of the values.
    ///
    /// Names must be unique. If two tensors have the same name, the header only contains the later
    /// tensor, and readers reject the file because of the gap. Readers require each tensor to be
    /// aligned to its element size, so tensors with wide types must be added first.
    pub fn push(&mut self, name: &str, element: ElementType, shape: &[usize]) -> u64 {
        let start = self.data_len;
        self.data_len += shape.iter().product::<usize>() as u64 * element.size() as u64;
        let info = json!({
            "dtype": element,
            "shape": shape,
            "data_offsets": [start, self.data_len],
        });
        // The map keeps the order of insertion (`preserve_order` of `serde_json`), which is file
        // order.
        self.fields.insert(name.to_owned(), info);
        start
    }

    /// Returns the total size of all values in bytes.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Returns the size of the file in bytes.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.to_bytes().len() as u64 + self.data_len
    }

    /// Returns the start of the file: the length of the JSON text in 8 bytes, followed by the text.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec(&self.fields).expect("a JSON object always is JSON");
        // The text is padded with spaces, so that the values start at a multiple of 8.
        text.resize(text.len().next_multiple_of(8), b' ');
        [&(text.len() as u64).to_le_bytes()[..], &text].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_start_at_a_multiple_of_8_for_every_length_of_the_text() {
        for len in 0..20 {
            let mut header = Header::pytorch();
            header.push(&"n".repeat(len), ElementType::U8, &[3]);
            let bytes = header.to_bytes();
            assert!(bytes.len().is_multiple_of(8) && header.file_len() == bytes.len() as u64 + 3);
            let text = std::str::from_utf8(&bytes[8..]).unwrap();
            assert!(serde_json::from_str::<Value>(text).is_ok(), "padding keeps the JSON valid");
        }
    }

    #[test]
    fn the_bytes_match_the_safetensors_crate() {
        use safetensors::tensor::{Dtype, Metadata, TensorInfo};
        let mut header = Header::pytorch();
        assert_eq!(header.push("b.weight", ElementType::F32, &[3, 2]), 0);
        assert_eq!(header.push("a", ElementType::Bf16, &[]), 24);
        assert_eq!(header.push("c", ElementType::Bool, &[0, 4]), 26);
        assert_eq!(header.data_len(), 26);
        let info = |dtype, shape: &[usize], data_offsets| TensorInfo {
            dtype,
            shape: shape.to_vec(),
            data_offsets,
        };
        let infos = vec![
            ("b.weight".to_owned(), info(Dtype::F32, &[3, 2], (0, 24))),
            ("a".to_owned(), info(Dtype::BF16, &[], (24, 26))),
            ("c".to_owned(), info(Dtype::BOOL, &[0, 4], (26, 26))),
        ];
        let format = [("format".to_owned(), "pt".to_owned())].into();
        let text = serde_json::to_string(&Metadata::new(Some(format), infos).unwrap()).unwrap();
        let bytes = header.to_bytes();
        assert_eq!((bytes.len() % 8, header.file_len()), (0, bytes.len() as u64 + 26));
        assert_eq!(bytes[..8], (bytes.len() as u64 - 8).to_le_bytes());
        assert_eq!(std::str::from_utf8(&bytes[8..]).unwrap().trim_end(), text);
    }
}
