//! How documents become one stream of tokens.

use crate::{DataError, Tokenizer};

/// What stands between the documents of a split. Reported figures depend on it: the perplexity on
/// WikiText-2, for one, is that of [`Join::BlankLine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Join {
    /// The end-of-text token, where the tokenizer has one. Empty documents are left out.
    #[default]
    EndOfText,
    /// A blank line: all documents, the empty ones too, are one text with `"\n\n"` in between.
    BlankLine,
    /// Nothing: the tokens of one document follow those of the one before.
    Nothing,
}

impl Join {
    /// The documents as they are tokenized.
    pub(crate) fn prepare(self, mut documents: Vec<String>) -> Vec<String> {
        match self {
            Self::BlankLine => vec![documents.join("\n\n")],
            Self::EndOfText | Self::Nothing => {
                documents.retain(|document| !document.is_empty());
                documents
            }
        }
    }

    /// The tokens of documents that were prepared, and perhaps divided since.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub(crate) fn encode(
        self,
        tokenizer: &Tokenizer,
        documents: &[&str],
    ) -> Result<Vec<u32>, DataError> {
        let encoded = tokenizer.encode_each(documents)?;
        Ok(match (self, tokenizer.end_of_text()) {
            (Self::EndOfText, Some(id)) => encoded.join(&id),
            _ => encoded.concat(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{END_OF_TEXT, TEXT_FIELD, read_documents};

    #[test]
    fn each_kind_keeps_its_documents() {
        let documents = || ["a", "", "b"].map(str::to_owned).to_vec();
        assert_eq!(Join::EndOfText.prepare(documents()), ["a", "b"]);
        assert_eq!(Join::Nothing.prepare(documents()), ["a", "b"]);
        assert_eq!(Join::BlankLine.prepare(documents()), ["a\n\n\n\nb"]);
    }

    #[test]
    fn each_kind_separates_in_its_own_way() {
        let tokenizer = Tokenizer::train(&["x"], 257).unwrap();
        let encode = |text: &str| tokenizer.encode(text).unwrap();
        let joined = |join: Join| join.encode(&tokenizer, &["a", "b"]).unwrap();
        assert_eq!(joined(Join::EndOfText), encode(&format!("a{END_OF_TEXT}b")));
        assert_eq!(joined(Join::Nothing), encode("ab"));
        assert_eq!(joined(Join::BlankLine), encode("ab"));
    }

    /// Known counts of the raw WikiText-2 test split with GPT-2's tokenizer, where both are beside
    /// the checkout: joined by blank lines, as its perplexity is reported, whatever the threads.
    #[test]
    fn gpt2_counts_of_wikitext() {
        let hub = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/hub");
        let folder = hub.join("datasets/Salesforce/wikitext/wikitext-2-raw-v1");
        let text = folder.join("test-00000-of-00001.parquet");
        let gpt2 = hub.join("models/openai-community/gpt2");
        if !text.exists() || !gpt2.exists() {
            return;
        }
        let rows = read_documents(&text, TEXT_FIELD).unwrap();
        assert_eq!(rows.len(), 4358);
        let tokenizer = Tokenizer::load(&gpt2).unwrap();
        let documents = Join::BlankLine.prepare(rows);
        let documents: Vec<&str> = documents.iter().map(String::as_str).collect();
        let whole = tokenizer.encode(documents[0]).unwrap();
        assert_eq!(whole.len(), 287_644);
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let ids = pool.install(|| Join::BlankLine.encode(&tokenizer, &documents)).unwrap();
            assert!(ids == whole);
        }
    }
}
