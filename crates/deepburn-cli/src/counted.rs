//! Singular and plural of nouns in messages, such as `1 rank` and `2 ranks`.

/// Formats a number with its noun: `1 rank`, `2 ranks`, `2 micro-batches`.
///
/// Nouns that end in `ch` get `es`, all others `s`. No other noun is used in messages.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ if noun.ends_with("ch") => format!("{count} {noun}es"),
        _ => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uses_singular_for_one() {
        for (count, noun, text) in [
            (0, "step", "0 steps"),
            (1, "step", "1 step"),
            (2, "rank", "2 ranks"),
            (1, "micro-batch", "1 micro-batch"),
            (2, "micro-batch", "2 micro-batches"),
        ] {
            assert_eq!(counted(count, noun), text);
        }
    }
}
