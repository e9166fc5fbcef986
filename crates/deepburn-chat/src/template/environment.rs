//! The environment that `transformers` gives to chat templates, in minijinja.

use std::fmt::Write;

use chrono::NaiveDateTime;
use chrono::format::{Item, StrftimeItems};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior};
use minijinja_contrib::pycompat;

use super::python_json::tojson;
use super::python_text::text_of;
use super::tags::{GENERATION, ITERABLE};

/// The maximum work of a template, in steps of minijinja: an instruction, or 64 bytes of text. A chat of a million
/// tokens needs less.
pub(super) const MAX_STEPS: u64 = 2_000_000;

/// The maximum number of digits of a width or a precision in `str.format`.
const MAX_WIDTH_DIGITS: usize = 6;

/// The variable with the two characters that surround generated text.
pub(super) const MARKERS: &str = "__deepburn_markers";

/// The prefix of errors that a template raises.
pub(super) const RAISED: &str = "raise_exception: ";

/// Returns the environment. `strftime_now` returns `now`.
pub(super) fn environment(now: NaiveDateTime) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_debug(false);
    environment.set_formatter(|out, state, value| match value.as_str() {
        Some(_) => minijinja::escape_formatter(out, state, value),
        None => Ok(out.write_str(&text_of(state, value)?)?),
    });
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("string", text_of);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", |value: &Value| value.is_undefined() || is_sequence(value));
    environment.add_filter(GENERATION, mark_generated);
    environment.add_filter(ITERABLE, iterable);
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_function("strftime_now", move |format: &str| strftime(now, format));
    Ok(environment)
}

/// Returns whether the value has a length and items in Python, as dictionaries and texts do, and `None` does not.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::String
    )
}

/// Surrounds generated text with the markers in the variable [`MARKERS`].
fn mark_generated(state: &State, text: String) -> String {
    match state
        .lookup(MARKERS)
        .as_ref()
        .and_then(Value::as_str)
        .map(|it| it.chars().collect::<Vec<_>>())
        .as_deref()
    {
        Some([open, close]) => format!("{open}{text}{close}"),
        _ => text,
    }
}

/// Python does not iterate over `None`; minijinja does.
fn iterable(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None => {
            Err(Error::new(ErrorKind::InvalidOperation, "'NoneType' object is not iterable"))
        }
        _ => Ok(value),
    }
}

/// White space of Python: Unicode's, and the four separators of ASCII.
fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&char)
}

/// The filter `trim`, with Python's white space.
fn trim(state: &State, value: &Value, chars: Option<&str>) -> Result<String, Error> {
    let text = text_of(state, value)?;
    Ok(match chars {
        Some(chars) => text.trim_matches(|it| chars.contains(it)).to_owned(),
        None => text.trim_matches(is_space).to_owned(),
    })
}

/// Methods of Python's `str` and `dict`.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let is_plain = args.iter().all(Value::is_none) && args.len() <= 1;
    if let Some(text) = value.as_str().filter(|_| is_plain) {
        match name {
            "strip" => return Ok(text.trim_matches(is_space).into()),
            "lstrip" => return Ok(text.trim_start_matches(is_space).into()),
            "rstrip" => return Ok(text.trim_end_matches(is_space).into()),
            _ => {}
        }
    }
    if let Some(text) = value.as_str().filter(|text| name == "format" && has_large_width(text)) {
        // The text would be allocated before its length counts as work.
        let reason =
            format!("the format `{text}` has a number of more than {MAX_WIDTH_DIGITS} digits");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    pycompat::unknown_method_callback(state, value, name, args)
}

/// Returns whether a replacement field of a format has a number with too many digits.
fn has_large_width(format: &str) -> bool {
    let fields = format.split('{').skip(1).filter_map(|it| it.split('}').next());
    let mut numbers = fields.flat_map(|field| field.split(|it: char| !it.is_ascii_digit()));
    numbers.any(|digits| digits.len() > MAX_WIDTH_DIGITS)
}

/// Directives of `strftime` whose output does not depend on the locale, the platform or the time zone.
const DIRECTIVES: &str = "aAbBcdDeFhHIjklmMnpRStTuUwWxXyY%";

fn strftime(now: NaiveDateTime, format: &str) -> Result<String, Error> {
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            continue;
        }
        let directive = match chars.next() {
            Some('-') => chars.next(),
            directive => directive,
        };
        if !directive.is_some_and(|it| DIRECTIVES.contains(it)) {
            let reason = format!("strftime_now does not support the format `{format}`");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    let items: Vec<Item> = StrftimeItems::new(format).collect();
    let mut text = String::new();
    match write!(text, "{}", now.format_with_items(items.iter())) {
        Ok(()) => Ok(text),
        Err(_) => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now does not support the format `{format}`"),
        )),
    }
}
