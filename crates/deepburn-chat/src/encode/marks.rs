//! Which tokens are trained, given the spans between `{% generation %}` marks.

use std::ops::Range;

/// Returns which tokens have a part of one of the spans.
pub(super) fn overlapping(ranges: &[Range<usize>], spans: &[Range<usize>]) -> Vec<bool> {
    let overlaps =
        |token: &Range<usize>| spans.iter().any(|it| token.start < it.end && it.start < token.end);
    ranges.iter().map(overlaps).collect()
}

//= transformers 5.23.0 tokenization_utils_base.py apply_chat_template return_assistant_tokens_mask
/// Returns `assistant_masks` of `apply_chat_template(return_assistant_tokens_mask=True)` of
/// `transformers` 5.23, for tokens that stand for `ranges` of a text with the generated `spans`.
/// `None` if the text starts with an empty span, which `transformers` rejects.
///
/// It trains the tokens from the one of a span's first character to the one of its last character,
/// of which it takes the first token if a character has several. Some tokenizers leave spaces out
/// of the ranges. If the first character is in no token, this span and those after it are not
/// trained. If the last one is in no token, or in the first token of the text, all tokens up to the
/// end of the text are trained.
pub(super) fn like_transformers(
    ranges: &[Range<usize>],
    spans: &[Range<usize>],
) -> Option<Vec<bool>> {
    let token_at = |byte: usize| ranges.iter().position(|it| it.contains(&byte));
    let mut trained = vec![false; ranges.len()];
    for span in spans {
        // Any byte of the last character will do, because ranges have whole characters.
        let last = token_at(span.end.checked_sub(1)?);
        let Some(first) = token_at(span.start) else { break };
        let end = last.filter(|it| *it > 0).map_or(ranges.len(), |it| it + 1);
        trained[first..end.max(first)].fill(true);
    }
    Some(trained)
}
