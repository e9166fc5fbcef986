//! Known names that a user may have meant by an unknown one.

use crate::foreign::foreign_name;

/// The problem of a key that is not in its table, as all messages word it.
pub(crate) const UNKNOWN_KEY: &str = "unknown key";

/// Minimum similarity of a known name that is suggested instead of an unknown name.
const SIMILAR: f64 = 0.7;

/// Returns what to write instead of an unknown `name`: the equivalent of another program's name, or
/// the most similar known name.
pub(crate) fn suggestion(known: impl Iterator<Item = &'static str>, name: &str) -> Option<String> {
    // A known name of another program is not a typing error, even if a key here is similar.
    let similar = || nearest(known, name).map(|nearest| format!("did you mean {nearest}?"));
    foreign_name(name).map(str::to_owned).or_else(similar)
}

/// Returns the known name that is most similar to `name`, if it is similar enough for a typing
/// error.
pub(crate) fn nearest(all: impl Iterator<Item = &'static str>, name: &str) -> Option<&'static str> {
    // The time to compute the distance is proportional to the product of the lengths, and no key is
    // this long.
    if name.len() > 100 {
        return None;
    }
    all.map(|known| (strsim::normalized_damerau_levenshtein(known, name), known))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known)
}
