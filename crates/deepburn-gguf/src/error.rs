//! Errors of writing and reading GGUF files.

use std::io;

/// An error of a GGUF file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be opened, read or written.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A field or a tensor has a value that the format or a rule does not allow.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field or tensor, such as "tensor `token_embd.weight`".
        field: String,
        /// The value, the rule and the remedy.
        problem: String,
    },
}

impl GgufError {
    /// Returns an error about a part of the header.
    pub(crate) fn field(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), problem: problem.into() }
    }

    /// Returns an error about a metadata key.
    pub(crate) fn metadata(key: &str, problem: impl Into<String>) -> Self {
        Self::field(format!("metadata `{}`", shortened(key)), problem)
    }

    /// Returns an error about a tensor.
    pub(crate) fn tensor(name: &str, problem: impl Into<String>) -> Self {
        Self::field(format!("tensor `{}`", shortened(name)), problem)
    }
}

/// Returns the first characters of a name from a file, so that a malformed file cannot fill the
/// terminal.
pub(crate) fn shortened(name: &str) -> String {
    const LIMIT: usize = 100;
    // Control characters of a file must not reach the terminal.
    let escaped: String = name.chars().take(LIMIT).flat_map(char::escape_debug).collect();
    match name.chars().nth(LIMIT) {
        Some(_) => escaped + "…",
        None => escaped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_part_and_stay_short() {
        let error = GgufError::tensor("a\n", "has no elements");
        assert_eq!(error.to_string(), r"tensor `a\n`: has no elements");
        let error = GgufError::metadata(&"k".repeat(5000), "is too long");
        assert!(error.to_string().chars().count() < 150);
    }
}
