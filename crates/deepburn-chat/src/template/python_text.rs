//! Values as Python prints them: `str` and `repr`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::python_json::float_repr;

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

/// Appends `repr(value)`. Lists can contain the same list many times, so each value costs a step.
fn write_repr(state: &State, value: &Value, depth: usize, text: &mut String) -> Result<(), Error> {
    state.consume_fuel(1)?;
    if depth > MAX_DEPTH {
        let reason = format!("a value that is nested more than {MAX_DEPTH} times is not printed");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
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
            let repr = format!("{value:?}");
            state.consume_fuel(repr.len() as u64 / 64)?;
            text.push_str(&repr);
        }
        _ => text.push_str(&format!("{value:?}")),
    }
    Ok(())
}
