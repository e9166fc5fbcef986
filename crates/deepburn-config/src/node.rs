//! A parsed value of one of JSON's six types, with its position in the text.
//!
//! [`Node`] keeps information that a diagnosis needs and a plain JSON value loses: the position,
//! the order of the keys, and the spelling of numbers. `5e8` can therefore be an integer, and an
//! error about `NaN` can name its key. The node itself does not check values.

use std::fmt;

/// Maximum depth of nested sections and lists. The deepest DeepSpeed section has seven levels.
pub const MAX_DEPTH: usize = 64;

/// Line and column of a value, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineColumn {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

/// A value and its position, which is unknown for values that were not read from a text.
#[derive(Debug, Clone)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// The position in the text.
    pub at: Option<LineColumn>,
}

/// The value of a [`Node`].
#[derive(Debug, Clone)]
pub enum Value {
    /// `null`.
    Null,
    /// `true` or `false`.
    Flag(bool),
    /// A number as it was written, `5e8` or `NaN` for example.
    Number(String),
    /// A string, unescaped.
    Text(String),
    /// An array.
    List(Vec<Node>),
    /// An object without duplicate names, in the order of the text.
    Map(Vec<(String, Node)>),
}

/// Upper bound of numbers with a decimal point or an exponent that are read as integers. Above it,
/// adjacent doubles differ by more than 1024, so such a number is not an exact count.
const LARGEST_INTEGRAL_FLOAT: f64 = 9_223_372_036_854_775_807.0;

impl Node {
    /// Creates a node without a position.
    pub fn new(value: Value) -> Self {
        Self { value, at: None }
    }

    /// Creates a string without a position.
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Value::Text(text.into()))
    }

    /// Creates a map without a position.
    pub fn map(entries: Vec<(String, Self)>) -> Self {
        Self::new(Value::Map(entries))
    }

    /// Returns the entry called `name`, if this is a map that contains it.
    pub fn get(&self, name: &str) -> Option<&Self> {
        self.entries().iter().find(|(key, _)| key == name).map(|(_, node)| node)
    }

    /// Returns the entry called `name` as a mutable reference.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Self> {
        let entries = self.entries_mut()?;
        entries.iter_mut().find(|(key, _)| key == name).map(|(_, node)| node)
    }

    /// Returns the entries of a map; empty for any other type.
    pub fn entries(&self) -> &[(String, Self)] {
        let Value::Map(entries) = &self.value else { return &[] };
        entries
    }

    /// Returns the elements, if this is a list.
    pub(crate) fn as_list(&self) -> Option<&[Self]> {
        let Value::List(nodes) = &self.value else { return None };
        Some(nodes)
    }

    /// Returns whether this is `null`.
    pub fn is_null(&self) -> bool {
        matches!(self.value, Value::Null)
    }

    /// Returns whether this is the string `"auto"`.
    pub fn is_auto(&self) -> bool {
        self.as_text() == Some("auto")
    }

    /// Returns the string, if this is a string.
    pub fn as_text(&self) -> Option<&str> {
        let Value::Text(text) = &self.value else { return None };
        Some(text)
    }

    /// Returns the flag, if this is a flag.
    pub fn as_flag(&self) -> Option<bool> {
        let Value::Flag(flag) = self.value else { return None };
        Some(flag)
    }

    /// Returns the number as a double. It is infinite or NaN if it was written as such, and
    /// infinite if it is too large.
    pub fn as_real(&self) -> Option<f64> {
        let Value::Number(text) = &self.value else { return None };
        Some(parse_real(text))
    }

    /// Returns the number as an integer, if it is integral, as `3`, `3.0` and `5e8` are.
    ///
    /// ```
    /// use deepburn_config::RawConfig;
    ///
    /// let config = RawConfig::from_json(r#"{"bucket": 5e8, "lr": 1e-4}"#)?;
    /// let value = |name: &str| config.node().get(name).and_then(|node| node.as_integer());
    /// assert_eq!((value("bucket"), value("lr")), (Some(500_000_000), None));
    /// # Ok::<(), deepburn_config::ConfigError>(())
    /// ```
    pub fn as_integer(&self) -> Option<i64> {
        let Value::Number(text) = &self.value else { return None };
        // A double holds integers up to 2^53 only, so they are parsed as such where possible.
        if let Ok(integer) = text.parse() {
            return Some(integer);
        }
        let real = parse_real(text);
        // The cast is exact: the value is integral and inside the range of i64.
        (real.fract() == 0.0 && real.abs() < LARGEST_INTEGRAL_FLOAT).then_some(real as i64)
    }

    /// Returns the same value for `serde_json`. It cannot represent NaN and infinity, which become
    /// `null`.
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match &self.value {
            Value::Null => Json::Null,
            Value::Flag(flag) => Json::Bool(*flag),
            // `1.0` stays a real number; `5e8` is how people write a large count.
            Value::Number(text) => match self.as_integer().filter(|_| !text.contains('.')) {
                Some(integer) => Json::from(integer),
                None => self.as_real().map_or(Json::Null, Json::from),
            },
            Value::Text(text) => Json::String(text.clone()),
            Value::List(nodes) => Json::Array(nodes.iter().map(Self::to_json).collect()),
            Value::Map(entries) => {
                entries.iter().map(|(name, node)| (name.clone(), node.to_json())).collect()
            }
        }
    }

    /// Returns whether both values are equal, as `5e8` and `500000000.0` are.
    pub(crate) fn means(&self, other: &Self) -> bool {
        match (self.as_real(), other.as_real()) {
            // As JSON, `5e8` and `500000000.0` would differ.
            (Some(number), Some(other)) => number == other,
            _ => self.to_json() == other.to_json(),
        }
    }

    /// Returns the name of the value's type, for messages.
    pub(crate) fn noun(&self) -> &'static str {
        match self.value {
            Value::Null => "null",
            Value::Flag(_) => "a boolean",
            Value::Number(_) => "a number",
            Value::Text(_) => "a string",
            Value::List(_) => "a list",
            Value::Map(_) => "a section",
        }
    }

    /// Returns the entries of a map as a mutable reference; `None` for any other type.
    pub(crate) fn entries_mut(&mut self) -> Option<&mut Vec<(String, Self)>> {
        let Value::Map(entries) = &mut self.value else { return None };
        Some(entries)
    }
}

/// Parses a number, which may be infinite or NaN.
fn parse_real(text: &str) -> f64 {
    match text {
        "Infinity" => f64::INFINITY,
        "-Infinity" => f64::NEG_INFINITY,
        // Text that is not a number becomes NaN. Callers check that the number is finite.
        _ => text.parse().unwrap_or(f64::NAN),
    }
}

/// Maximum number of characters of a value that a message shows in full.
const SHOWN: usize = 60;

/// Formats the value for messages: short, on one line.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = match &self.value {
            // JSON would have another spelling than the file.
            Value::Number(text) => text.clone(),
            Value::Map(entries) if entries.len() == 1 => "a section of 1 key".to_owned(),
            Value::Map(entries) => format!("a section of {} keys", entries.len()),
            _ => self.to_json().to_string(),
        };
        f.write_str(&shortened(&full, SHOWN))
    }
}

/// Truncates a text after `shown` characters, if it is longer.
pub fn shortened(text: &str, shown: usize) -> String {
    match text.char_indices().nth(shown) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &str) -> Node {
        Node::new(Value::Number(text.into()))
    }

    #[test]
    fn integral_spellings_are_integers() {
        for (text, expected) in [
            ("0", Some(0)),
            ("-1", Some(-1)),
            ("5e8", Some(500_000_000)),
            ("2E8", Some(200_000_000)),
            ("1e4", Some(10_000)),
            ("200000000.0", Some(200_000_000)),
            ("9223372036854775807", Some(i64::MAX)),
            ("9223372036854775808", None),
            ("1e400", None),
            ("1.5", None),
            ("NaN", None),
            ("Infinity", None),
        ] {
            assert_eq!(number(text).as_integer(), expected, "{text}");
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_told_apart() {
        assert!(number("NaN").as_real().is_some_and(f64::is_nan));
        assert_eq!(number("-Infinity").as_real(), Some(f64::NEG_INFINITY));
        assert_eq!(number("1e999").as_real(), Some(f64::INFINITY));
    }

    #[test]
    fn long_values_are_shortened_between_characters() {
        let shown = Node::text("\u{e9}".repeat(500)).to_string();
        assert!(shown.ends_with("...") && shown.chars().count() == SHOWN + 3);
    }
}
