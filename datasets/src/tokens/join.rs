//! The separator between documents in a stream of tokens.

use crate::Tokenizer;

/// The separator between the documents of a split. Published results depend on it: the perplexity
/// on WikiText-2, for example, is usually measured with [`Join::BlankLine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Join {
    /// The end-of-text token. Several documents need a tokenizer that has one. Empty documents are
    /// left out.
    #[default]
    EndOfText,
    /// A blank line: all documents, including empty ones, are one text with `"\n\n"` in between.
    BlankLine,
    /// Nothing: the tokens of each document directly follow the previous document's tokens.
    Nothing,
}

impl Join {
    /// Returns the id of the token between documents, if there is one.
    pub(crate) fn separator(self, tokenizer: &Tokenizer) -> Option<u32> {
        match self {
            Self::EndOfText => tokenizer.end_of_text(),
            Self::BlankLine | Self::Nothing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::test_data;
    use crate::tokens::documents::Documents;
    use crate::tokens::encoder::encode_range;
    use crate::{END_OF_TEXT, TEXT_FIELD, read_documents};

    fn join(join: Join, tokenizer: &Tokenizer, documents: &[String]) -> Vec<u32> {
        let source = Documents::Memory { documents, join };
        let scan = source.scan(0).unwrap();
        let mut ids = Vec::new();
        let mut take = |tokens: &[u32]| {
            ids.extend_from_slice(tokens);
            Ok(())
        };
        encode_range(tokenizer, source, &scan, 0..usize::MAX, &mut take).unwrap();
        ids
    }

    #[test]
    fn each_kind_separates_in_its_own_way() {
        let tokenizer = Tokenizer::train(&["x"], 257).unwrap();
        let encode = |text: &str| tokenizer.encode(text).unwrap();
        let joined = |kind| join(kind, &tokenizer, &["a", "", "b"].map(str::to_owned));
        assert_eq!(joined(Join::EndOfText), encode(&format!("a{END_OF_TEXT}b")));
        assert_eq!(joined(Join::Nothing), encode("ab"));
        assert_eq!(joined(Join::BlankLine), encode("a\n\n\n\nb"));
    }

    /// Known token counts of the raw WikiText-2 test split with GPT-2's tokenizer. Documents are
    /// joined by blank lines, as for its published perplexity, with any number of threads.
    #[test]
    fn gpt2_counts_of_wikitext() {
        let wikitext = "hub/datasets/Salesforce/wikitext/wikitext-2-raw-v1";
        let text = test_data(&format!("{wikitext}/test-00000-of-00001.parquet"));
        let gpt2 = test_data("hub/models/openai-community/gpt2");
        let (Some(text), Some(gpt2)) = (text, gpt2) else { return };
        let rows = read_documents(&text, TEXT_FIELD).unwrap();
        assert_eq!(rows.len(), 4358);
        let tokenizer = Tokenizer::load(&gpt2).unwrap();
        let whole = tokenizer.encode(&rows.join("\n\n")).unwrap();
        assert_eq!(whole.len(), 287_644);
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let ids = pool.install(|| join(Join::BlankLine, &tokenizer, &rows));
            assert!(ids == whole);
        }
    }
}
