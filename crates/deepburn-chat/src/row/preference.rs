//! Prompts that are part of both completions of a preference.

use crate::{ChatError, Message, Result};

/// Divides a common start off two lists of messages, as `extract_prompt` of TRL does. If one list
/// starts with the other, its last message is not part of the prompt.
pub(super) fn common_messages(
    chosen: &[Message],
    rejected: &[Message],
) -> Result<(Vec<Message>, Vec<Message>, Vec<Message>)> {
    let common = common(chosen, rejected);
    if common == 0 {
        let rule = "a list that starts with the messages of `rejected`, because the row has no `prompt` of messages";
        return Err(ChatError::field("chosen", "a list with another start than `rejected`", rule));
    }
    let split = |all: &[Message]| all[common..].to_vec();
    Ok((chosen[..common].to_vec(), split(chosen), split(rejected)))
}

/// Divides a common start off two texts. A space before the difference belongs to the completions.
pub(super) fn common_text(chosen: &str, rejected: &str) -> Result<(String, String, String)> {
    // By characters, as Python compares texts.
    let (left, right): (Vec<char>, Vec<char>) =
        (chosen.chars().collect(), rejected.chars().collect());
    let mut common = common(&left, &right);
    let differs = common < left.len().min(right.len()) && left[common] != right[common];
    if differs && common > 0 && left[common - 1] == ' ' {
        common -= 1;
    }
    if common == 0 {
        let rule = "a text that starts like `rejected`, because the row has no `prompt`";
        return Err(ChatError::field("chosen", "a text with another start than `rejected`", rule));
    }
    let text = |chars: &[char]| chars.iter().collect::<String>();
    Ok((text(&left[..common]), text(&left[common..]), text(&right[common..])))
}

/// Returns the length of the common start, which leaves at least one element of both.
fn common<T: PartialEq>(left: &[T], right: &[T]) -> usize {
    let shorter = left.len().min(right.len());
    let equal = left.iter().zip(right).take_while(|(left, right)| left == right).count();
    equal.min(shorter.saturating_sub(1))
}
