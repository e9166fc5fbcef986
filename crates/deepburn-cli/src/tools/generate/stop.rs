//! Texts that end generation.
//!
//! Main type: [`StopTexts`]. The new text is decoded after each token, because a stop text may
//! begin and end inside of tokens. The prompt does not count. `transformers` keeps what the last
//! token adds after the stop text; here, the text ends with the stop text.

use deepburn_datasets::Tokenizer;

use crate::failure::Failure;

/// Texts that end generation, and the tokenizer that decodes new tokens.
pub(super) struct StopTexts<'a> {
    /// The texts, none of which is empty.
    pub(super) texts: &'a [String],
    /// Decodes tokens.
    pub(super) tokenizer: &'a Tokenizer,
}

impl StopTexts<'_> {
    /// Returns whether generation continues after the tokens `new`. Special tokens count as text.
    ///
    /// # Errors
    /// Returns a failure while running if the tokens cannot be decoded.
    pub(super) fn continues(&self, new: &[u32]) -> Result<bool, Failure> {
        if self.texts.is_empty() {
            return Ok(true);
        }
        let text = self.tokenizer.decode(new, false).map_err(Failure::run)?;
        Ok(first_end(&text, self.texts).is_none())
    }

    /// Returns the text of the prompt and the tokens `new`, up to the end of the first stop text in
    /// the new text.
    ///
    /// # Errors
    /// Returns a failure while running if the tokens cannot be decoded.
    pub(super) fn text(&self, prompt: &[u32], new: &[u32]) -> Result<String, Failure> {
        let decode = |tokens: &[u32]| self.tokenizer.decode(tokens, true).map_err(Failure::run);
        let mut whole = decode(&[prompt, new].concat())?;
        if !self.texts.is_empty() {
            // Decoders may treat the first token of a text in another way, so that only the ends of
            // both texts are equal.
            let added = decode(new)?;
            let rest = first_end(&added, self.texts).map_or("", |end| &added[end..]);
            if whole.ends_with(rest) {
                whole.truncate(whole.len() - rest.len());
            }
        }
        Ok(whole)
    }
}

/// Returns the end of the stop text that ends first in `text`, in bytes.
fn first_end(text: &str, stops: &[String]) -> Option<usize> {
    stops.iter().filter_map(|stop| text.find(stop).map(|start| start + stop.len())).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_that_ends_first_counts() {
        let stops = ["wide world".to_owned(), "wor".to_owned(), "wo".to_owned()];
        assert_eq!(first_end("a wide world", &stops), Some(9));
        assert_eq!(first_end("a wide word", &stops[..2]), Some(10));
        assert_eq!(first_end("a wide", &stops), None);
        assert_eq!(first_end("a wide", &[]), None);
    }
}
