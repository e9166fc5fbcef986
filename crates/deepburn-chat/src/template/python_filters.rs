//! Filters of Jinja2 that minijinja lacks, or computes differently.

use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, State, filters};

use super::invalid;
use super::python_methods::{padded, rsplit, split_lines};
use super::python_text::text_of;
use super::work::steps;

/// The characters that a truncated text may have in excess of its length.
const LEEWAY: usize = 5;

/// The arguments of `indent`.
type Indent<'a> = (&'a Value, Option<Value>, Option<bool>, Option<bool>, Kwargs);

/// The arguments of `truncate`, apart from the text.
type Truncate<'a> = (Option<usize>, Option<bool>, Option<&'a str>, Option<usize>, Kwargs);

/// Adds the filters to an environment.
pub(super) fn add_filters(environment: &mut Environment<'_>) {
    environment.add_filter("center", center);
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("truncate", truncate);
    environment.add_filter("urlencode", urlencode);
}

/// Returns a text. Python fails to add a text to other values.
fn text<'a>(value: &'a Value, filter: &str) -> Result<&'a str, Error> {
    let kind = value.kind();
    value.as_str().ok_or_else(|| invalid(format!("the filter `{filter}` needs a text, not {kind}")))
}

//= jinja2 3.1.6 filters.py do_indent
/// Indents the lines of a text by a number of spaces, or by a text: all but the first and the empty
/// ones.
fn indent(state: &State, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let (value, width, first, blank, named): Indent = from_args(&args)?;
    let width = width.or(named.get("width")?).unwrap_or_else(|| 4.into());
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let (unit, count) = match width.as_str() {
        Some(unit) => (unit, 1),
        None => (" ", usize::try_from(i64::try_from(width.clone())?).unwrap_or(0)),
    };
    // The added end makes an empty last line count.
    let ended = format!("{}\n", text(value, "indent")?);
    let added = unit.len().saturating_mul(count).saturating_mul(split_lines(&ended).count());
    state.consume_fuel(steps(added.saturating_add(ended.len())))?;
    let indentation = unit.repeat(count);
    let mut indented = String::new();
    for (index, (line, _)) in split_lines(&ended).enumerate() {
        indented.push_str(if index > 0 { "\n" } else { "" });
        let is_indented = if index == 0 { first } else { blank || !line.is_empty() };
        indented.push_str(if is_indented { &indentation } else { "" });
        indented.push_str(line);
    }
    Ok(indented)
}

/// Returns the start of a text, and `...` if it is longer.
fn truncate(value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let (length, cut_words, end, leeway, named): Truncate = from_args(&args)?;
    let length = length.or(named.get("length")?).unwrap_or(255);
    let cut_words = cut_words.or(named.get("killwords")?).unwrap_or(false);
    let end = end.or(named.get("end")?).unwrap_or("...");
    let leeway = leeway.or(named.get("leeway")?).unwrap_or(LEEWAY);
    named.assert_all_used()?;
    let text = text(value, "truncate")?;
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(invalid(format!(
            "the filter `truncate` has a length of {length}, and an end that is longer"
        )));
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let cut = text.char_indices().nth(kept).map_or(text, |(at, _)| &text[..at]);
    let words = if cut_words { cut } else { rsplit(cut, Some(" "), Some(1))[0] };
    Ok(format!("{words}{end}"))
}

/// Returns a text in the middle of a field.
fn center(
    state: &State,
    value: &Value,
    width: Option<i64>,
    named: Kwargs,
) -> Result<String, Error> {
    let width = width.or(named.get("width")?).unwrap_or(80);
    named.assert_all_used()?;
    padded(state, &text_of(state, value)?, "center", width, " ")
}

/// Returns a text or the pairs of a dictionary as a part of a URL.
fn urlencode(state: &State, value: &Value) -> Result<String, Error> {
    let quoted = |value: &Value, is_query: bool| {
        let text = text_of(state, value)?;
        // A byte becomes three at most.
        state.consume_fuel(steps(3 * text.len()))?;
        let mut quoted = String::new();
        for byte in text.bytes() {
            match byte {
                it if it.is_ascii_alphanumeric() || b"_.-~".contains(&it) => quoted.push(it.into()),
                b'/' if !is_query => quoted.push('/'),
                b' ' if is_query => quoted.push('+'),
                _ => quoted.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok::<_, Error>(quoted)
    };
    match value.kind() {
        ValueKind::Map => {
            let mut pairs = Vec::new();
            for key in value.try_iter()?.checked() {
                let key = key?;
                let value = value.get_item(&key)?;
                pairs.push(format!("{}={}", quoted(&key, true)?, quoted(&value, true)?));
            }
            Ok(pairs.join("&"))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            Err(invalid("the filter `urlencode` does not support lists; use a dictionary"))
        }
        _ => quoted(value, false),
    }
}

/// Returns an integer, or the default for a text that is none. Other values, and other bases than
/// ten, are left to minijinja.
fn int(state: &State, value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (_, base, named): (Option<&Value>, Option<u32>, Kwargs) = from_args(&args)?;
    // Unlike an absent one, a default of `none` is returned.
    let default = args.first().filter(|it| !it.is_kwargs()).cloned();
    let default = default.or_else(|| named.get("default").ok()).unwrap_or_else(|| 0.into());
    let base = base.or(named.get("base")?).unwrap_or(10);
    named.assert_all_used()?;
    match value.as_str() {
        Some(text) if base == 10 => decimal(text, default),
        _ => filters::int(
            state,
            value,
            Some(default),
            Some(base),
            Kwargs::from_iter([("", Value::UNDEFINED); 0]),
        ),
    }
}

/// The error of `int` for a number that minijinja has no integer for.
const TOO_LONG: &str = "the filter `int` does not support numbers beyond 128 bits";

/// Reads a number with the rules of Python's `int` and `float`.
fn decimal(text: &str, default: Value) -> Result<Value, Error> {
    let trimmed = text.trim();
    if trimmed.chars().any(|it| it.is_numeric() && !it.is_ascii()) {
        // Python reads the digits of all scripts.
        return Err(invalid("the filter `int` does not support digits other than `0` to `9`"));
    }
    // A single underscore may divide digits.
    let bytes = trimmed.as_bytes();
    let is_digit = |at: Option<usize>| {
        at.and_then(|it| bytes.get(it)).is_some_and(|it: &u8| it.is_ascii_digit())
    };
    let divides = |at: usize| is_digit(at.checked_sub(1)) && is_digit(at.checked_add(1));
    if !trimmed.match_indices('_').all(|(at, _)| divides(at)) {
        return Ok(default);
    }
    let digits = trimmed.replace('_', "");
    let unsigned = digits.strip_prefix(['+', '-']).unwrap_or(&digits);
    if !unsigned.is_empty() && unsigned.bytes().all(|it| it.is_ascii_digit()) {
        let too_long = |_| invalid(TOO_LONG);
        return Ok(digits.parse::<i128>().map_err(too_long)?.into());
    }
    match digits.parse::<f64>().map(f64::trunc) {
        Ok(float) if float.is_finite() => match float.abs() < 1e38 {
            // Exact, because it is an integer within the range.
            true => Ok(Value::from(float as i128)),
            false => Err(invalid(TOO_LONG)),
        },
        _ => Ok(default),
    }
}
