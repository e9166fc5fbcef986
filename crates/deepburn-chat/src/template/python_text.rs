//! Values as Python prints them: `str` and `repr`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, State};

use super::invalid;
use super::python_json::float_repr;
use super::work::steps;

/// The maximum nesting of a printed value.
const MAX_DEPTH: usize = 128;

/// Returns `str(value)`: texts as they are, other values as `repr` writes them.
///
/// # Errors
/// Returns an error if the text is too long or the value is nested too deeply.
pub(super) fn text_of(state: &State, value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut text = String::new();
            write_repr(state, value, 0, &mut text)?;
            Ok(text)
        }
    }
}

/// White space of Python: Unicode's, and the four separators of ASCII.
pub(super) fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&char)
}

/// Appends `repr(value)`. Lists can contain the same list many times, so each value costs a step.
fn write_repr(state: &State, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
    state.consume_fuel(1)?;
    if depth > MAX_DEPTH {
        let reason = format!("a value that is nested more than {MAX_DEPTH} times is not printed");
        return Err(invalid(reason));
    }
    match value.kind() {
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(float) => text.push_str(&float_repr(float)),
            Err(_) => text.push_str(&value.to_string()),
        },
        ValueKind::Seq | ValueKind::Iterable => {
            let brackets = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            text.push(brackets.0);
            for (index, item) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                write_repr(state, &item, depth + 1, text)?;
            }
            text.push_str(if value.is_tuple() && value.len() == Some(1) { "," } else { "" });
            text.push(brackets.1);
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                write_repr(state, &key, depth + 1, text)?;
                text.push_str(": ");
                write_repr(state, &value.get_item(&key)?, depth + 1, text)?;
            }
            text.push('}');
        }
        ValueKind::String => {
            let string = value.as_str().unwrap_or_default();
            state.consume_fuel(steps(string.len()))?;
            write_string(string, text);
        }
        _ => text.push_str(&format!("{value:?}")),
    }
    Ok(())
}

/// Appends `repr` of a text: in single quotes, unless it contains only those.
fn write_string(string: &str, text: &mut String) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for char in string.chars() {
        match char {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            _ if char == quote => text.extend(['\\', quote]),
            _ if is_printable(char) => text.push(char),
            _ => text.push_str(&match u32::from(char) {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    text.push(quote);
}

/// Returns whether Python prints a character as it is. Spaces other than the usual one, controls,
/// and characters that change the direction or joining of others are not printed. Unassigned
/// characters are not considered.
fn is_printable(char: char) -> bool {
    let is_format = matches!(
        char,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
            | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e000}'..='\u{f8ff}' | '\u{e0001}'..='\u{e007f}' | '\u{f0000}'..
    );
    char == ' ' || !(char.is_control() || char.is_whitespace() || is_format)
}
