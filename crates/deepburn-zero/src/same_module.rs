//! Checks that all ranks have built the same module, before they exchange its values.
//!
//! Collectives compare sizes alone: with one layer more on a rank, a parameter would be compared with the next one
//! of another layer, or the ranks would continue with different collectives. So ranks exchange a line for each
//! parameter and buffer, in module order, and the first line that differs is named. Main function: [`check_module`].

use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;

use crate::error::ZeroError;
use crate::group::Group;

/// What separates parameters from buffers in the exchanged text. No path has it.
const LISTS: &str = "\u{1}";

/// Checks that all ranks have these parameters and buffers, in this order. All ranks call it together and get the same
/// answer; one exchange is made for both, whether there are buffers or not.
///
/// # Errors
///
/// Returns an error with the first parameter or buffer that differs, or if the collective fails.
pub(crate) fn check_module<B: OptimizerOps>(
    group: &Group<B>,
    parameters: &[String],
    buffers: &[String],
) -> Result<(), ZeroError> {
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

/// Returns the first lines in which two texts differ; `None` in place of a line for a text that has ended.
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
