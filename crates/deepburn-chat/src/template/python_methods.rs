//! Methods of Python's `str` and `list` that minijinja lacks, or computes differently.

use minijinja::value::{Kwargs, Tuple, Value, from_args};
use minijinja::{Error, State};

use super::invalid;
use super::python_text::is_space;
use super::work::{part_steps, steps};

/// Calls a method of a text. Returns `None` if minijinja's method equals Python's, or if the method
/// is not supported.
///
/// # Errors
/// Returns an error where Python raises one.
pub(super) fn text_method(
    state: &State,
    text: &str,
    name: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "title" => {
            let () = from_args(args)?;
            title(text)?.into()
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let found = if name == "index" { text.find(part) } else { text.rfind(part) };
            let found = found.ok_or_else(|| invalid("substring not found"))?;
            text[..found].chars().count().into()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "center" | "ljust" | "rjust" => {
            let (width, fill): (i64, Option<&str>) = from_args(args)?;
            padded(state, text, name, width, fill.unwrap_or(" "))?.into()
        }
        "zfill" => {
            let (width,): (i64,) = from_args(args)?;
            let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
            let sign = &text[..text.len() - digits.len()];
            let width = width.saturating_sub(i64::from(!sign.is_empty()));
            let digits = padded(state, digits, "rjust", width, "0")?;
            format!("{sign}{digits}").into()
        }
        _ => return divided(state, text, name, args),
    }))
}

/// Calls a method that returns parts of a text, like [`text_method`].
fn divided(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let separator = args.first().and_then(Value::as_str);
    if separator == Some("") && matches!(name, "split" | "rsplit" | "partition" | "rpartition") {
        return Err(invalid("empty separator"));
    }
    Ok(Some(match name {
        "splitlines" => {
            let (keep_ends, named): (Option<bool>, Kwargs) = from_args(args)?;
            let keep_ends = keep_ends.or(named.get("keepends")?).unwrap_or(false);
            named.assert_all_used()?;
            // Before the list is allocated.
            state.consume_fuel(part_steps(split_lines(text).count()))?;
            split_lines(text)
                .map(|(line, end)| if keep_ends { end } else { line })
                .map(Value::from)
                .collect()
        }
        "rsplit" => {
            let (separator, count, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = separator.or(named.get("sep")?);
            let count = count.or(named.get("maxsplit")?).unwrap_or(-1);
            named.assert_all_used()?;
            let parts = rsplit(text, separator, usize::try_from(count).ok());
            parts.into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = match name {
                "partition" => text.split_once(separator).ok_or([text, "", ""]),
                _ => text.rsplit_once(separator).ok_or(["", "", text]),
            };
            let parts = parts.map_or_else(|it| it, |(before, after)| [before, separator, after]);
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        _ => return Ok(None),
    }))
}

/// Calls the method `index` of a list. All items are compared, for which the caller charges.
///
/// # Errors
/// Returns an error if the list does not contain the value.
pub(super) fn list_index(list: &Value, args: &[Value]) -> Result<Value, Error> {
    let (value,): (&Value,) = from_args(args)?;
    for (index, item) in list.try_iter()?.checked().enumerate() {
        if item? == *value {
            return Ok(index.into());
        }
    }
    Err(invalid("the value is not in the list"))
}

/// Returns the text with `fill` around it (`center`), after it (`ljust`) or before it (`rjust`), if
/// it has less than `width` characters.
///
/// # Errors
/// Returns an error if `fill` is not one character, or if the text is too long.
pub(super) fn padded(
    state: &State,
    text: &str,
    method: &str,
    width: i64,
    fill: &str,
) -> Result<String, Error> {
    if fill.chars().count() != 1 {
        return Err(invalid("the fill character must be exactly one character long"));
    }
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(text.chars().count());
    // Before it is allocated.
    state.consume_fuel(steps(missing.saturating_mul(fill.len()).saturating_add(text.len())))?;
    let before = match method {
        "ljust" => 0,
        "rjust" => missing,
        // As CPython rounds it.
        _ => missing / 2 + (missing & width & 1),
    };
    Ok([&fill.repeat(before), text, &fill.repeat(missing - before)].concat())
}

/// Returns the lines of a text, without and with their ends, as Python divides it.
pub(super) fn split_lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    fn is_end(char: char) -> bool {
        matches!(char, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    }
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (line, after) = rest.split_at(rest.find(is_end).unwrap_or(rest.len()));
        let end = match after.starts_with("\r\n") {
            true => 2,
            false => after.chars().next().map_or(0, char::len_utf8),
        };
        let (with_end, next) = rest.split_at(line.len() + end);
        rest = next;
        Some((line, with_end))
    })
}

/// Returns the parts of a text that is divided at most `count` times, from its end.
pub(super) fn rsplit<'t>(
    text: &'t str,
    separator: Option<&str>,
    count: Option<usize>,
) -> Vec<&'t str> {
    let count = count.unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    match separator {
        Some(separator) => parts.extend(text.rsplitn(count.saturating_add(1), separator)),
        None => {
            let mut rest = text.trim_end_matches(is_space);
            while !rest.is_empty() {
                let start = match rest.rfind(is_space).filter(|_| parts.len() < count) {
                    Some(at) => at + rest[at..].chars().next().map_or(0, char::len_utf8),
                    None => rest.len() - rest.trim_start_matches(is_space).len(),
                };
                // The rest keeps the spaces before it only if it is not divided any more.
                let start = if parts.len() < count { start } else { 0 };
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end_matches(is_space);
            }
        }
    }
    parts.reverse();
    parts
}

/// Returns the text with a capital after each character without case, as in `They'Re`.
///
/// # Errors
/// Returns an error for characters whose capital depends on its place, which Rust does not know.
fn title(text: &str) -> Result<String, Error> {
    let is_cased =
        |it: char| it.is_lowercase() || it.is_uppercase() || matches!(it, 'ǅ' | 'ǈ' | 'ǋ' | 'ǲ');
    // The form of a sigma depends on the word.
    let lowered = text.to_lowercase();
    let mut sigmas = lowered.chars().filter(|it| matches!(it, 'σ' | 'ς'));
    let mut titled = String::with_capacity(text.len());
    let mut follows_cased = false;
    for char in text.chars() {
        let sigma = if matches!(char, 'Σ' | 'σ' | 'ς') { sigmas.next() } else { None };
        match (follows_cased, char) {
            (true, 'Σ') => titled.push(sigma.unwrap_or('σ')),
            (true, _) => titled.extend(char.to_lowercase()),
            (false, _) => {
                let is_plain = char.to_uppercase().len() == 1
                    && !matches!(
                        char,
                        'Ǆ'..='ǌ' | 'Ǳ'..='ǳ' | '\u{10d0}'..='\u{10ff}'
                    );
                if !is_plain {
                    return Err(invalid(format!("`title` does not support `{char}`")));
                }
                titled.extend(char.to_uppercase());
            }
        }
        follows_cased = is_cased(char);
    }
    Ok(titled)
}
