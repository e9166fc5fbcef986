//! The file that tells Ollama about a GGUF file.

/// Returns the text of a `Modelfile` for `ollama create`, which begins with `FROM ./FILE`. Ollama
/// finds the chat template in the GGUF file. `parameters` are names of Ollama with their values,
/// and `stop` the texts of the tokens at which generation stops.
///
/// The format is documented at <https://docs.ollama.com/modelfile>.
#[must_use]
pub fn modelfile<'a>(
    file_name: &str,
    parameters: &[(&str, f64)],
    stop: impl IntoIterator<Item = &'a str>,
) -> String {
    let mut text = format!("FROM ./{file_name}\n");
    for (name, value) in parameters {
        text.push_str(&format!("PARAMETER {name} {value}\n"));
    }
    for token in stop {
        // Quotes of three let the text contain quotes, even three of them: a value ends at the end
        // of a line.
        let quotes = if token.contains('"') { "\"\"\"" } else { "\"" };
        text.push_str(&format!("PARAMETER stop {quotes}{token}{quotes}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_tokens_are_quoted() {
        let text = modelfile("model.gguf", &[], ["<|im_end|>", "a\"b"]);
        let expected =
            "FROM ./model.gguf\nPARAMETER stop \"<|im_end|>\"\nPARAMETER stop \"\"\"a\"b\"\"\"\n";
        assert_eq!(text, expected);
        // Ollama reads the characters between the first and the last three quotes of the line.
        let text =
            modelfile("model.gguf", &[("top_k", 20.0), ("temperature", 0.6)], ["a\"\"\"b\""]);
        assert!(
            text.contains("\nPARAMETER top_k 20\nPARAMETER temperature 0.6\nPARAMETER stop "),
            "{text}"
        );
        assert!(text.ends_with("\nPARAMETER stop \"\"\"a\"\"\"b\"\"\"\"\n"), "{text}");
    }
}
