//! Checks that all ranks have built the same module before they exchange its values.
//!
//! Collectives only compare sizes. If one rank had an additional layer, ranks would exchange the
//! values of different parameters, or run different collectives. Ranks therefore exchange a line
//! for each parameter and buffer in module order, and the error names the first line that differs.
//! Main function: [`check_module`].

use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;

use crate::error::ZeroError;
use crate::group::Group;

/// The separator between parameters and buffers in the exchanged text. Paths never contain it.
const LISTS: &str = "\u{1}";

/// Checks that all ranks have the same parameters and buffers in the same order. All ranks call
/// this together and get the same result. Parameters and buffers share one collective.
///
/// # Errors
/// Returns an error with the first parameter or buffer that differs, or if the collective fails.
pub(crate) fn check_module<B: OptimizerOps>(
    group: &Group<B>,
    parameters: &[String],
    buffers: &[String],
) -> Result<(), ZeroError> {
    // Paths are sent as text, because the error has to name the first difference.
    let own = [parameters, buffers].map(|lines| lines.join("\n")).join(LISTS);
    let texts = group.gather_bytes(CollectiveTag::new("module", 0), own.as_bytes())?;
    let texts: Vec<_> = texts.iter().map(|text| String::from_utf8_lossy(text)).collect();
    let lists = |rank: usize| texts[rank].split_once(LISTS).unwrap_or((&texts[rank], ""));
    let (parameters, buffers) = lists(0);
    for rank in 1..texts.len() {
        let (other_parameters, other_buffers) = lists(rank);
        if let Some(lines) = difference(parameters, other_parameters) {
            let named = |path: Option<&str>| {
                path.map_or("no further parameter".to_owned(), |path| format!("parameter {path}"))
            };
            let [first, other] = lines.map(named);
            return Err(ZeroError::ParametersDiffer { rank, first, other });
        }
        if let Some(lines) = difference(buffers, other_buffers) {
            let [first, other] = lines.map(|line| line.unwrap_or("nothing").to_owned());
            return Err(ZeroError::BuffersDiffer { rank, first, other });
        }
    }
    Ok(())
}

/// Returns the first lines in which two texts differ; a line is `None` if its text has ended.
fn difference<'a>(first: &'a str, other: &'a str) -> Option<[Option<&'a str>; 2]> {
    let (mut first, mut other) = (first.lines(), other.lines());
    loop {
        match [first.next(), other.next()] {
            [None, None] => return None,
            [first, other] if first != other => return Some([first, other]),
            _ => {}
        }
    }
}
