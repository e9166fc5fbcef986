//! A value as it was written: JSON's six kinds, each with the place it came from.
//!
//! [`Node`] keeps what a plain JSON value loses and a diagnosis needs: the position, the order of
//! the keys, and numbers in their own spelling, so that `5e8` can be an integer and `NaN` can be
//! refused under the name of its key. It refuses nothing itself.

use std::fmt;

/// Levels of sections and lists that are read. The deepest DeepSpeed section has seven.
pub const MAX_DEPTH: usize = 64;

/// Line and column of a value, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
}

/// A value and where it stands; the place is unknown for values that came from no text.
#[derive(Debug, Clone)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Where it stands in its text.
    pub at: Option<Position>,
}

/// What a [`Node`] holds.
#[derive(Debug, Clone)]
pub enum Value {
    /// `null`.
    Null,
    /// `true` or `false`.
    Flag(bool),
    /// A number in its own spelling, `5e8` or `NaN` for example.
    Number(String),
    /// A string, unescaped.
    Text(String),
    /// An array.
    List(Vec<Node>),
    /// An object, in the order of the text, no name twice.
    Map(Vec<(String, Node)>),
}

/// Largest number that is read as an integer from a spelling with a point or an exponent.
/// Beyond it neighbouring doubles are more than 1024 apart: nobody means a count by that.
const LARGEST_INTEGRAL_FLOAT: f64 = 9_223_372_036_854_775_807.0;

impl Node {
    /// A node without a place.
    pub fn new(value: Value) -> Self {
        Self { value, at: None }
    }

    /// A string without a place.
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Value::Text(text.into()))
    }

    /// A map without a place.
    pub fn map(entries: Vec<(String, Self)>) -> Self {
        Self::new(Value::Map(entries))
    }

    /// The entry called `name`, if this is a map that has it.
    pub fn get(&self, name: &str) -> Option<&Self> {
        self.entries().iter().find(|(key, _)| key == name).map(|(_, node)| node)
    }

    /// The entry called `name`, to change it.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Self> {
        let entries = self.entries_mut()?;
        entries.iter_mut().find(|(key, _)| key == name).map(|(_, node)| node)
    }

    /// The entries of a map; nothing for every other kind.
    pub fn entries(&self) -> &[(String, Self)] {
        let Value::Map(entries) = &self.value else { return &[] };
        entries
    }

    /// The elements, if this is a list.
    pub(crate) fn as_list(&self) -> Option<&[Self]> {
        let Value::List(nodes) = &self.value else { return None };
        Some(nodes)
    }

    /// Whether this is `null`.
    pub fn is_null(&self) -> bool {
        matches!(self.value, Value::Null)
    }

    /// Whether this is the string `"auto"`.
    pub fn is_auto(&self) -> bool {
        self.as_text() == Some("auto")
    }

    /// The string, if this is one.
    pub fn as_text(&self) -> Option<&str> {
        let Value::Text(text) = &self.value else { return None };
        Some(text)
    }

    /// The flag, if this is one.
    pub fn as_flag(&self) -> Option<bool> {
        let Value::Flag(flag) = self.value else { return None };
        Some(flag)
    }

    /// The number as a double; infinite or NaN where it says so or does not fit.
    pub fn as_real(&self) -> Option<f64> {
        let Value::Number(text) = &self.value else { return None };
        Some(parse_real(text))
    }

    /// The number as an integer, when it is integral: `3`, `3.0` and `5e8` are.
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
        if let Ok(integer) = text.parse() {
            return Some(integer);
        }
        let real = parse_real(text);
        // The cast is exact: the value is integral and inside the range of i64.
        (real.fract() == 0.0 && real.abs() < LARGEST_INTEGRAL_FLOAT).then_some(real as i64)
    }

    /// Returns the same value for `serde_json`. It cannot represent NaN and infinity, which become `null`.
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

    /// Whether both say the same; `5e8` and `500000000.0` do.
    pub(crate) fn means(&self, other: &Self) -> bool {
        match (self.as_real(), other.as_real()) {
            (Some(number), Some(other)) => number == other,
            _ => self.to_json() == other.to_json(),
        }
    }

    /// The noun of this kind of value, for messages.
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

    /// The entries of a map, to change them; nothing for every other kind.
    pub(crate) fn entries_mut(&mut self) -> Option<&mut Vec<(String, Self)>> {
        let Value::Map(entries) = &mut self.value else { return None };
        Some(entries)
    }
}

/// The number that a spelling stands for.
fn parse_real(text: &str) -> f64 {
    match text {
        "Infinity" => f64::INFINITY,
        "-Infinity" => f64::NEG_INFINITY,
        // What is no number at all is not finite either, which is what the caller checks.
        _ => text.parse().unwrap_or(f64::NAN),
    }
}

/// Longest value that a message shows in full.
const SHOWN: usize = 60;

/// The value as a message shows it: short, on one line.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = match &self.value {
            Value::Number(text) => text.clone(),
            Value::Map(entries) if entries.len() == 1 => "a section of 1 key".to_owned(),
            Value::Map(entries) => format!("a section of {} keys", entries.len()),
            _ => self.to_json().to_string(),
        };
        f.write_str(&shortened(&full, SHOWN))
    }
}

/// A text, cut after so many characters where it is too long for a message.
pub(crate) fn shortened(text: &str, shown: usize) -> String {
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
