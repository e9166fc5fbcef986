//! `generated.jsonl`: texts that a model generated after evaluations, so that people see what it
//! says.
//!
//! Main type: [`GeneratedText`].

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::rows_file::{JsonRow, MetricsError, RowsWriter, read_rows};

/// What a model generated for a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeneratedText {
    /// The number of optimizer steps before the evaluation.
    pub step: u64,
    /// The prompt, as people read it.
    pub prompt: String,
    /// The generated text, without special tokens.
    pub text: String,
    /// The text of the data, if the prompt is from the data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
}

/// Writes `generated.jsonl`.
pub type GeneratedWriter = RowsWriter<GeneratedText>;

impl JsonRow for GeneratedText {
    fn step(&self) -> u64 {
        self.step
    }
}

/// Reads all texts in file order.
///
/// # Errors
/// Returns an error if the file cannot be read, or if a complete line is not a text.
pub fn read_generated(path: &Path) -> Result<Vec<GeneratedText>, MetricsError> {
    read_rows(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back_and_later_ones_are_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("generated.jsonl");
        let text = |step, text: &str, expected: Option<&str>| GeneratedText {
            step,
            prompt: "Say \"a\"\n".to_owned(),
            text: text.to_owned(),
            expected: expected.map(str::to_owned),
        };
        let texts = [text(2, "b\u{2028}\0", None), text(4, "", Some("a"))];
        let mut writer = GeneratedWriter::create(&path).unwrap();
        texts.iter().for_each(|text| writer.write(text.clone()).unwrap());
        assert_eq!(read_generated(&path).unwrap(), texts);
        GeneratedWriter::resume(&path, 3).unwrap();
        assert_eq!(read_generated(&path).unwrap(), texts[..1]);
        std::fs::write(&path, "{\"step\": 1}\n").unwrap();
        let message = read_generated(&path).unwrap_err().to_string();
        assert!(message.contains("generated.jsonl`, line 1: missing field `prompt`"), "{message}");
    }
}
