//! Checks that all ranks have built the same module, before they exchange its values.
//!
//! Collectives compare sizes alone: with one layer more on a rank, a parameter would be compared with the next one
//! of another layer, or the ranks would continue with different collectives. So ranks exchange a line for each
//! parameter or buffer, in module order, and the first line that differs is named. Main function: [`difference`].

use deepburn_comm::{CommError, Tag};
use deepburn_ops::OptimizerOps;

use crate::error::ZeroError;
use crate::group::Group;

/// The first line in which a rank differs from rank 0.
pub(crate) struct Difference {
    /// The first rank that differs.
    pub(crate) rank: usize,
    /// The line of rank 0; `None` if it has fewer lines.
    pub(crate) first: Option<String>,
    /// The line of the other rank; `None` if it has fewer lines.
    pub(crate) other: Option<String>,
}

/// Compares `lines` between all ranks, which call this together and get the same answer.
///
/// # Errors
///
/// Returns an error if a collective fails.
pub(crate) fn difference<B: OptimizerOps>(
    group: &Group<B>,
    tag: Tag,
    lines: &[String],
) -> Result<Option<Difference>, CommError> {
    let texts = group.gather_bytes(tag, lines.join("\n").as_bytes())?;
    let Some(rank) = texts.iter().position(|text| *text != texts[0]) else { return Ok(None) };
    let [first, other] = [&texts[0], &texts[rank]].map(|text| String::from_utf8_lossy(text));
    let (mut first, mut other) = (first.lines(), other.lines());
    loop {
        let pair = (first.next(), other.next());
        // Texts that differ in nothing but the end of their last line have the same lines.
        if pair == (None, None) {
            return Ok(None);
        }
        if pair.0 != pair.1 {
            let (first, other) = (pair.0.map(str::to_owned), pair.1.map(str::to_owned));
            return Ok(Some(Difference { rank, first, other }));
        }
    }
}

/// Checks that all ranks have parameters with these paths, in this order.
///
/// # Errors
///
/// Returns an error with the first path that differs, or if a collective fails.
pub(crate) fn check_paths<B: OptimizerOps>(
    group: &Group<B>,
    paths: &[String],
) -> Result<(), ZeroError> {
    let Some(found) = difference(group, Tag::new("parameter paths", 0), paths)? else {
        return Ok(());
    };
    let named = |path: Option<String>| {
        path.map_or("no further parameter".to_owned(), |path| format!("parameter {path}"))
    };
    let (first, other) = (named(found.first), named(found.other));
    Err(ZeroError::ParametersDiffer { rank: found.rank, first, other })
}
