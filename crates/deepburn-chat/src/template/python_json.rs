//! JSON and numbers as Python writes them: `json.dumps` and `repr(float)`.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::invalid;
use super::work::steps;

/// The maximum nesting of a value. It is Rust's limit for JSON text too (`serde_json`).
const MAX_DEPTH: usize = 128;

/// The filter `tojson` of `transformers`, which is `json.dumps` with `ensure_ascii=False`.
///
/// # Errors
/// Returns an error for values that JSON does not have, and for unknown arguments.
pub(super) fn tojson(
    state: &State,
    value: Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if positional.len() > names.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let argument = |index: usize| -> Result<Option<Value>, Error> {
        let named = named.get::<Option<Value>>(names[index])?;
        Ok(named.or_else(|| positional.get(index).cloned()).filter(|it| !it.is_none()))
    };
    let is_true = |it: Option<Value>| it.is_some_and(|it| it.is_true());
    let indent = argument(1)?.map(|it| indentation(&it)).transpose()?;
    let separators = match argument(2)? {
        Some(pair) => separators(&pair)?,
        // A line that ends with a comma has no space after it.
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let (ascii, sorted) = (is_true(argument(0)?), is_true(argument(3)?));
    named.assert_all_used()?;
    let mut writer = JsonWriter { ascii, indent, separators, sorted, state, text: String::new() };
    writer.write(&value, 0)?;
    Ok(Value::from(writer.text))
}

fn indentation(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let width = i64::try_from(value.clone())?;
    // A negative width breaks lines without indenting them, as in Python.
    let width = usize::try_from(width).unwrap_or(0);
    if width > 64 {
        return Err(invalid(format!("tojson indents by at most 64 spaces, not {width}")));
    }
    Ok(" ".repeat(width))
}

fn separators(pair: &Value) -> Result<(String, String), Error> {
    let items: Vec<Value> = pair.try_iter()?.take(3).collect();
    match items.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
        [Some(item), Some(key)] => Ok((item.to_owned(), key.to_owned())),
        _ => Err(invalid("separators must be two texts")),
    }
}

/// The arguments of `json.dumps`, and its text so far.
struct JsonWriter<'s, 't, 'e> {
    ascii: bool,
    indent: Option<String>,
    separators: (String, String),
    sorted: bool,
    state: &'s State<'t, 'e>,
    text: String,
}

impl JsonWriter<'_, '_, '_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        // Lists can contain the same list many times, so the text may be much longer than the
        // value.
        self.state.consume_fuel(1)?;
        if depth > MAX_DEPTH {
            return Err(invalid(format!("tojson writes at most {MAX_DEPTH} nested values")));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&number(value)),
            ValueKind::String => {
                let string = value.as_str().unwrap_or_default();
                // An escaped character is several times as long.
                let bytes_of_step = if self.ascii { 16 } else { 64 };
                self.state.consume_fuel(string.len() as u64 / bytes_of_step)?;
                self.string(string);
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.text.push('[');
                let mut is_empty = true;
                for item in value.try_iter()? {
                    self.separate(is_empty, depth + 1)?;
                    is_empty = false;
                    self.write(&item, depth + 1)?;
                }
                self.close(is_empty, depth, ']')?;
            }
            ValueKind::Map => {
                self.text.push('{');
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                for (index, key) in keys.iter().enumerate() {
                    self.separate(index == 0, depth + 1)?;
                    self.key(key)?;
                    self.state.consume_fuel(steps(self.separators.1.len()))?;
                    self.text.push_str(&self.separators.1);
                    self.write(&value.get_item(key)?, depth + 1)?;
                }
                self.close(keys.is_empty(), depth, '}')?;
            }
            ValueKind::Undefined => {
                return Err(invalid("Object of type Undefined is not JSON serializable"));
            }
            kind => {
                return Err(invalid(format!("a value of type {kind} is not JSON serializable")));
            }
        }
        Ok(())
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None => self.text.push_str("\"null\""),
            ValueKind::Bool if key.is_true() => self.text.push_str("\"true\""),
            ValueKind::Bool => self.text.push_str("\"false\""),
            ValueKind::Number => self.text.push_str(&format!("\"{}\"", number(key))),
            kind => return Err(invalid(format!("a key of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn separate(&mut self, is_first: bool, depth: usize) -> Result<(), Error> {
        if !is_first {
            self.state.consume_fuel(steps(self.separators.0.len()))?;
            self.text.push_str(&self.separators.0);
        }
        self.break_line(depth)
    }

    fn close(&mut self, is_empty: bool, depth: usize, bracket: char) -> Result<(), Error> {
        if !is_empty {
            self.break_line(depth)?;
        }
        self.text.push(bracket);
        Ok(())
    }

    fn break_line(&mut self, depth: usize) -> Result<(), Error> {
        if let Some(indent) = &self.indent {
            self.state.consume_fuel(steps(indent.len() * depth))?;
            self.text.push('\n');
            (0..depth).for_each(|_| self.text.push_str(indent));
        }
        Ok(())
    }

    fn string(&mut self, string: &str) {
        self.text.push('"');
        for char in string.chars() {
            match char {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                ' '..='~' => self.text.push(char),
                // Python escapes UTF-16 units, so a character beyond U+FFFF takes two escapes.
                _ if self.ascii || char < ' ' => {
                    for unit in char.encode_utf16(&mut [0; 2]) {
                        self.text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => self.text.push(char),
            }
        }
        self.text.push('"');
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) if float.is_nan() => "NaN".to_owned(),
        Ok(float) if float.is_infinite() && float > 0.0 => "Infinity".to_owned(),
        Ok(float) if float.is_infinite() => "-Infinity".to_owned(),
        Ok(float) => float_repr(float),
        Err(_) => value.to_string(),
    }
}

/// Returns Python's `repr` of a float: the shortest digits that are read back as the same number,
/// with an exponent below 1e-4 and from 1e16.
pub(super) fn float_repr(float: f64) -> String {
    let size = float.abs();
    if float.is_nan() {
        return "nan".to_owned();
    }
    if size == 0.0 || (1e-4..1e16).contains(&size) || float.is_infinite() {
        return format!("{float:?}");
    }
    let scientific = format!("{float:e}");
    match scientific.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => scientific,
    }
}
