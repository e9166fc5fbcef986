//! The environment that `transformers` gives to chat templates, in minijinja.

use std::fmt::Write;

use chrono::NaiveDateTime;
use chrono::format::{Item, StrftimeItems};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{DynObject, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, State, UndefinedBehavior, tests};
use minijinja_contrib::pycompat;

use super::counted::{attribute, counted, dict, factor, iterable, namespace, range};
use super::invalid;
use super::python_filters::add_filters;
use super::python_json::tojson;
use super::python_methods::{list_index, text_method};
use super::python_text::{is_space, text_of};
use super::tags::{COUNTED, COUNTED_ATTRIBUTE, FACTOR, GENERATION, ITERABLE};
use super::work::{MAX_STEPS, part_steps, steps};

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
    // A chat is not HTML.
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    // As in Jinja2: undefined values are printed as nothing, but have no attributes.
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_debug(false);
    // Values other than texts are printed as Python prints them.
    environment.set_formatter(|out, state, value| match value.as_str() {
        Some(_) => minijinja::escape_formatter(out, state, value),
        None => Ok(out.write_str(&text_of(state, value)?)?),
    });
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("string", text_of);
    add_filters(&mut environment);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", |value: &Value| value.is_undefined() || is_sequence(value));
    environment.add_filter(GENERATION, mark_generated);
    environment.add_filter(ITERABLE, iterable);
    environment.add_filter(COUNTED, counted);
    environment.add_filter(COUNTED_ATTRIBUTE, attribute);
    environment.add_filter(FACTOR, factor);
    charge_tests(&mut environment);
    // Jinja2 does not have the others, and prints other text with `pprint`.
    for name in ["chain", "lines", "pprint", "split", "zip"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    environment.add_function("dict", dict);
    environment.add_function("namespace", namespace);
    environment.add_function("range", range);
    environment.add_function("raise_exception", |state: &State, message: &Value| {
        let message = format!("{RAISED}{}", text_of(state, message)?);
        Err::<Value, _>(invalid(message))
    });
    environment.add_function("strftime_now", move |format: &str| strftime(now, format));
    Ok(environment)
}

/// Replaces the tests that read texts and lists, for which the engine does not charge.
fn charge_tests(environment: &mut Environment) {
    type Unary = fn(&Value) -> bool;
    for (name, test) in [("lower", tests::is_lower as Unary), ("upper", tests::is_upper)] {
        let charged = move |state: &State, value: &Value| {
            state.consume_fuel(steps(read_bytes(value)))?;
            Ok::<_, Error>(test(value))
        };
        environment.add_test(name, charged);
    }
    type Binary = fn(&State, &Value, &Value) -> Result<bool, Error>;
    const TESTS: [(&[&str], Binary); 10] = [
        (&["eq", "equalto", "=="], |_, a, b| Ok(tests::is_eq(a, b))),
        (&["ne", "!="], |_, a, b| Ok(tests::is_ne(a, b))),
        (&["lt", "lessthan", "<"], |_, a, b| Ok(tests::is_lt(a, b))),
        (&["le", "<="], |_, a, b| Ok(tests::is_le(a, b))),
        (&["gt", "greaterthan", ">"], |_, a, b| Ok(tests::is_gt(a, b))),
        (&["ge", ">="], |_, a, b| Ok(tests::is_ge(a, b))),
        (&["in"], tests::is_in),
        (&["sameas"], |_, a, b| Ok(tests::is_sameas(a, b))),
        (&["startingwith"], |state, a, b| Ok(text_of(state, a)?.starts_with(&text_of(state, b)?))),
        (&["endingwith"], |state, a, b| Ok(text_of(state, a)?.ends_with(&text_of(state, b)?))),
    ];
    for (names, test) in TESTS {
        for name in names {
            let charged = move |state: &State, a: &Value, b: &Value| {
                test(state, &charged(state, a)?, &charged(state, b)?)
            };
            environment.add_test(*name, charged);
        }
    }
}

/// Returns a value whose text is charged, or whose items are when they are read.
fn charged(state: &State, value: &Value) -> Result<Value, Error> {
    state.consume_fuel(steps(read_bytes(value)))?;
    match value.is_kwargs() {
        true => Ok(value.clone()),
        false => counted(value.clone()),
    }
}

/// Returns the bytes of a text, or of the texts in named arguments.
fn read_bytes(value: &Value) -> usize {
    let named = value.as_object().filter(|_| value.is_kwargs());
    let named = named.and_then(DynObject::try_iter_pairs).into_iter().flatten();
    let bytes = |it: &Value| it.as_str().map_or(0, str::len);
    named.fold(bytes(value), |sum, (_, it)| sum.saturating_add(bytes(&it)))
}

/// Returns whether the value has a length and items in Python, as dictionaries and texts do, and
/// `None` does not.
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

/// The filter `trim`, with Python's white space.
fn trim(state: &State, value: &Value, chars: Option<&str>) -> Result<String, Error> {
    let text = text_of(state, value)?;
    state.consume_fuel(trimming_steps(&text, chars.unwrap_or_default()))?;
    Ok(match chars {
        Some(chars) => text.trim_matches(|it| chars.contains(it)).to_owned(),
        None => text.trim_matches(is_space).to_owned(),
    })
}

/// Methods of Python's `str` and `dict`.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    // Without arguments, Python strips its own white space, which has more characters than Rust's.
    let is_plain = args.iter().all(Value::is_none) && args.len() <= 1;
    if let Some(text) = value.as_str().filter(|_| is_plain) {
        match name {
            "strip" => return Ok(text.trim_matches(is_space).into()),
            "lstrip" => return Ok(text.trim_start_matches(is_space).into()),
            "rstrip" => return Ok(text.trim_end_matches(is_space).into()),
            _ => {}
        }
    }
    if let Some(text) = value.as_str() {
        if name == "join" {
            return join(state, text, args);
        }
        state.consume_fuel(method_steps(text, name, args)?)?;
        state.consume_fuel(args.iter().map(|it| steps(read_bytes(it))).sum())?;
        if let Some(result) = text_method(state, text, name, args)? {
            return Ok(result);
        }
    }
    let is_object = |it: &Value| it.as_object().is_some();
    if !is_object(value) && !args.iter().any(is_object) {
        return pycompat::unknown_method_callback(state, value, name, args);
    }
    let args = args.iter().map(|it| charged(state, it)).collect::<Result<Vec<_>, _>>()?;
    let value = counted(value.clone())?;
    match (name, value.kind()) {
        ("index", ValueKind::Seq) => list_index(&value, &args),
        _ => pycompat::unknown_method_callback(state, &value, name, &args),
    }
}

/// The method `join` of a text, which also counts the work of reading the items.
fn join(state: &State, separator: &str, args: &[Value]) -> Result<Value, Error> {
    let (items,): (&Value,) = from_args(args)?;
    let mut joined = String::new();
    for (index, item) in items.try_iter()?.checked().enumerate() {
        let start = joined.len();
        joined.push_str(if index > 0 { separator } else { "" });
        joined.push_str(&text_of(state, &item?)?);
        state.consume_fuel(1 + steps(joined.len() - start))?;
    }
    Ok(Value::from(joined))
}

/// Returns the steps of a method of a text. Reading the text and the arguments, and the result, are
/// charged elsewhere.
fn method_steps(text: &str, name: &str, args: &[Value]) -> Result<u64, Error> {
    let texts = || args.iter().filter_map(Value::as_str);
    let first = texts().next();
    Ok(match name {
        "split" | "rsplit" => part_steps(match first {
            Some("") | None => text.len(),
            Some(separator) => text.matches(separator).count(),
        }),
        "strip" | "lstrip" | "rstrip" => trimming_steps(text, first.unwrap_or_default()),
        "format" => {
            let read: usize = args.iter().map(read_bytes).sum();
            let fields = text.matches('{').count();
            steps(fields.saturating_mul(read.saturating_add(largest_width(text)?)))
        }
        _ => 0,
    })
}

/// Returns the steps of comparing the characters at the ends of a text with all of `chars`.
fn trimming_steps(text: &str, chars: &str) -> u64 {
    steps(text.len().saturating_mul(chars.len()))
}

/// Returns the largest width or precision of a format.
fn largest_width(format: &str) -> Result<usize, Error> {
    let fields = format.split('{').skip(1).filter_map(|it| it.split('}').next());
    let numbers = fields.flat_map(|field| field.split(|it: char| !it.is_ascii_digit()));
    let mut largest = 0;
    for digits in numbers.filter(|it| !it.is_empty()) {
        if digits.len() > MAX_WIDTH_DIGITS {
            // The text would be allocated before its length counts as work.
            let reason = format!(
                "the format `{format}` has a number of more than {MAX_WIDTH_DIGITS} digits"
            );
            return Err(invalid(reason));
        }
        largest = largest.max(digits.parse().unwrap_or(0));
    }
    Ok(largest)
}

/// Directives of `strftime` whose output does not depend on the locale, the platform or the time
/// zone.
const DIRECTIVES: &str = "aAbBcdDeFhHIjklmMnpRStTuUwWxXyY%";

/// The maximum bytes of a format of `strftime_now`.
const MAX_TIME_FORMAT: usize = 256;

fn strftime(now: NaiveDateTime, format: &str) -> Result<String, Error> {
    if format.len() > MAX_TIME_FORMAT {
        let reason = format!(
            "strftime_now has a format of {} bytes; the maximum is {MAX_TIME_FORMAT}; shorten it",
            format.len()
        );
        return Err(invalid(reason));
    }
    let mut chars = format.chars();
    let mut written = String::new();
    while let Some(char) = chars.next() {
        written.push(char);
        if char != '%' {
            continue;
        }
        let mut directive = chars.next();
        match directive {
            // Python writes microseconds, chrono nanoseconds.
            Some('f') => {
                written.push_str("6f");
                continue;
            }
            Some('-') => {
                written.push('-');
                directive = chars.next();
            }
            _ => {}
        }
        written.extend(directive);
        if !directive.is_some_and(|it| DIRECTIVES.contains(it)) {
            let reason = format!("strftime_now does not support the format `{format}`");
            return Err(invalid(reason));
        }
    }
    let items: Vec<Item> = StrftimeItems::new(&written).collect();
    let mut text = String::new();
    match write!(text, "{}", now.format_with_items(items.iter())) {
        Ok(()) => Ok(text),
        Err(_) => Err(invalid(format!("strftime_now does not support the format `{format}`"))),
    }
}
