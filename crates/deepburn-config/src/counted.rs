//! Singular and plural of nouns in messages, such as `1 rank` and `2 ranks`.

/// Formats a number with its noun: `1 rank`, `2 ranks`, `2 micro-batches`.
///
/// Nouns that end in `ch` or `s` get `es`, all others `s`. No other noun is used in messages.
///
/// ```
/// use deepburn_config::counted;
///
/// assert_eq!([counted(1, "step"), counted(2, "batch")], ["1 step", "2 batches"]);
/// ```
pub fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ if noun.ends_with("ch") || noun.ends_with('s') => format!("{count} {noun}es"),
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
            (2, "process", "2 processes"),
        ] {
            assert_eq!(counted(count, noun), text);
        }
    }
}
