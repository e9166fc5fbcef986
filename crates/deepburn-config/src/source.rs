//! Parses text to a [`Node`]: JSON with comments and trailing commas, YAML, base64, inline values.
//!
//! Reports errors that do not depend on the keys: invalid syntax with line and column, duplicate
//! keys, nesting deeper than [`MAX_DEPTH`], files larger than [`MAX_BYTES`], and text that is not
//! UTF-8. Hostile input results in a [`ConfigError`], never in a panic: the parser limits its
//! recursion, and the returned tree is at most [`MAX_DEPTH`] levels deep.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use jsonc_parser::common::Ranged;
use jsonc_parser::errors::ParseErrorKind;
use jsonc_parser::{CollectOptions, ParseOptions, ast, parse_to_ast};

use crate::diagnosis::ConfigError;
use crate::key_path::join;
use crate::node::{LineColumn, MAX_DEPTH, Node, Value};

/// Maximum size of a configuration file, in bytes.
pub const MAX_BYTES: u64 = 4 << 20;

/// Allows comments, trailing commas and `NaN` (which the check rejects with the name of its key).
/// Other deviations from JSON are errors, because a missing comma or quote is nearly always a
/// mistake.
const JSON_WITH_COMMENTS: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_loose_object_property_names: false,
    allow_trailing_commas: true,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: true,
    allow_extended_string_escapes: false,
};

/// The kind of a text and its name in messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceName<'a> {
    /// `DeepSpeed config` or `job file`.
    pub(crate) document: &'static str,
    /// A path, or `inline configuration`.
    pub(crate) name: &'a str,
}

/// Reads a file of at most [`MAX_BYTES`] as UTF-8, without its byte-order mark.
pub(crate) fn read_text(path: &Path) -> Result<String, ConfigError> {
    let unreadable = |reason: String| ConfigError::Unreadable { path: path.to_path_buf(), reason };
    let mut bytes = Vec::new();
    File::open(path)
        // One byte more than allowed tells a file that is too large from one that just fits, also
        // for pipes, whose size is not known before.
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|error| unreadable(error.to_string()))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(unreadable(format!("it is larger than {MAX_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|error| unreadable(error.to_string()))?;
    // Editors on Windows write the mark, which JSON does not allow.
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// Parses JSON with comments.
///
/// # Errors
/// Returns an error for invalid syntax, for duplicate keys, and for nesting that is too deep.
pub(crate) fn parse_json(text: &str, origin: SourceName<'_>) -> Result<Node, ConfigError> {
    parse(text, origin, true)
}

/// Parses JSON with comments. With `has_places`, values store their positions in the text, which
/// users can see.
fn parse(text: &str, origin: SourceName<'_>, has_places: bool) -> Result<Node, ConfigError> {
    let syntax = |line, column, reason: String| {
        let remedy = "write JSON; comments and trailing commas are allowed";
        ConfigError::Syntax { source_name: origin.name.into(), line, column, reason, remedy }
    };
    let parsed = parse_to_ast(text, &CollectOptions::default(), &JSON_WITH_COMMENTS);
    let parsed = parsed.map_err(|error| match error.kind() {
        // The parser's limit protects the stack, and the builder's is the documented one. Both have
        // the same message.
        ParseErrorKind::NestingDepthExceeded => too_deep(origin),
        kind => syntax(error.line_display(), error.column_display(), kind.to_string()),
    })?;
    let root = parsed.value.ok_or_else(|| syntax(1, 1, "the text is empty".into()))?;
    let lines = LineStarts::of(text);
    let mut builder = Builder { lines, has_places, repeated: Vec::new(), origin, depth: 0 };
    let node = builder.node(&root, "")?;
    // Duplicates do not end the conversion, so that all of them are in one message.
    if builder.repeated.is_empty() {
        return Ok(node);
    }
    let SourceName { document, name } = origin;
    let (keys, places): (Vec<_>, Vec<_>) = builder.repeated.into_iter().unzip();
    let (keys, places) = (keys.join(", "), places.join(", "));
    Err(ConfigError::DuplicateKeys { document, source_name: name.into(), keys, places })
}

/// Returns the error for a text that is nested too deeply.
fn too_deep(origin: SourceName<'_>) -> ConfigError {
    let reason = format!("sections are nested deeper than {MAX_DEPTH} levels");
    ConfigError::Argument { given: origin.name.into(), reason, remedy: "flatten the file".into() }
}

/// Converts the parser's tree to nodes, and collects duplicate keys.
struct Builder<'a> {
    lines: LineStarts<'a>,
    has_places: bool,
    /// Path and position of each duplicate key.
    repeated: Vec<(String, String)>,
    origin: SourceName<'a>,
    /// Number of lists and sections that contain the current value.
    depth: usize,
}

impl Builder<'_> {
    /// Converts a value and its nested values.
    fn node(&mut self, value: &ast::Value<'_>, path: &str) -> Result<Node, ConfigError> {
        if self.depth > MAX_DEPTH {
            return Err(too_deep(self.origin));
        }
        self.depth += 1;
        let converted = match value {
            ast::Value::NullKeyword(_) => Value::Null,
            ast::Value::BooleanLit(flag) => Value::Flag(flag.value),
            ast::Value::NumberLit(number) => Value::Number(number.value.to_owned()),
            ast::Value::StringLit(text) => Value::Text(text.value.to_string()),
            ast::Value::Array(list) => {
                let elements = list.elements.iter().enumerate();
                let node = |(i, element)| self.node(element, &format!("{path}[{i}]"));
                Value::List(elements.map(node).collect::<Result<_, _>>()?)
            }
            ast::Value::Object(map) => {
                let mut seen = HashSet::new();
                let mut entries = Vec::with_capacity(map.properties.len());
                for property in &map.properties {
                    let name = property.name.as_str();
                    let full = join(path, name);
                    if !seen.insert(name) {
                        let LineColumn { line, column } = self.lines.position(property.start());
                        self.repeated.push((full.clone(), format!("line {line}, column {column}")));
                    }
                    entries.push((name.to_owned(), self.node(&property.value, &full)?));
                }
                Value::Map(entries)
            }
        };
        self.depth -= 1;
        let at = self.has_places.then(|| self.lines.position(value.start()));
        Ok(Node { value: converted, at })
    }
}

/// Byte offset of each line's start.
struct LineStarts<'a> {
    text: &'a str,
    starts: Vec<usize>,
}

impl<'a> LineStarts<'a> {
    /// Finds the lines of a text.
    fn of(text: &'a str) -> Self {
        let after_breaks = text.match_indices('\n').map(|(at, _)| at + 1);
        Self { text, starts: std::iter::once(0).chain(after_breaks).collect() }
    }

    /// Returns the line and column of a byte.
    fn position(&self, byte: usize) -> LineColumn {
        // At least 1, because the first line starts at 0.
        let line = self.starts.partition_point(|&start| start <= byte);
        let start = self.starts[line - 1];
        let column = self.text.get(start..byte).map_or(0, |before| before.chars().count());
        LineColumn { line, column: column + 1 }
    }
}

/// Parses YAML. Numbers have the values that YAML defines.
///
/// # Errors
/// Returns an error for invalid syntax, for duplicate keys, and for nesting that is too deep, with
/// the parser's message.
pub(crate) fn parse_yaml(text: &str, name: &str) -> Result<Node, ConfigError> {
    let value: serde_json::Value = serde_saphyr::from_str(text).map_err(|error| {
        let (line, column) =
            error.location().map_or((1, 1), |at| (at.line() as usize, at.column() as usize));
        let reason = error.without_snippet().to_string();
        let remedy = "write YAML as `accelerate config` does";
        ConfigError::Syntax { source_name: name.into(), line, column, reason, remedy }
    })?;
    from_value(&value, SourceName { document: "Accelerate config", name })
}

/// Converts a value that is already in memory.
///
/// # Errors
/// Returns [`ConfigError::Argument`] if sections or lists are nested too deeply.
pub(crate) fn from_value(
    value: &serde_json::Value,
    origin: SourceName<'_>,
) -> Result<Node, ConfigError> {
    // Printing is recursive, so the depth is checked first.
    if is_deeper_than(value, MAX_DEPTH + 1) {
        return Err(too_deep(origin));
    }
    // All sources have the same conversion, in which numbers keep their spelling. Positions in this
    // text would mean nothing to users.
    parse(&value.to_string(), origin, false)
}

/// Returns whether a value has lists and sections in more than `levels` levels.
fn is_deeper_than(value: &serde_json::Value, levels: usize) -> bool {
    let Some(inside) = levels.checked_sub(1) else { return value.is_array() || value.is_object() };
    match value {
        serde_json::Value::Array(values) => values.iter().any(|it| is_deeper_than(it, inside)),
        serde_json::Value::Object(map) => map.values().any(|it| is_deeper_than(it, inside)),
        _ => false,
    }
}

/// Decodes a text from base64 (URL-safe or standard alphabet), or returns the reason why it is not
/// valid.
pub(crate) fn decode_base64(encoded: &str) -> Result<String, String> {
    let encoded = encoded.trim();
    let bytes = URL_SAFE
        // DeepSpeed decodes the URL-safe alphabet, and the command `base64` encodes the standard
        // one.
        .decode(encoded)
        .or_else(|_| STANDARD.decode(encoded))
        .map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: SourceName<'static> =
        SourceName { document: "DeepSpeed config", name: "ds.json" };

    fn json(text: &str) -> Result<Node, ConfigError> {
        parse_json(text, ORIGIN)
    }

    #[test]
    fn comments_and_trailing_commas_are_read() {
        let node = json("{ // one\n \"a\": [1, 2,], /* two */ \"b\": {\"c\": null,},\n}").unwrap();
        assert_eq!(node.to_json(), serde_json::json!({"a": [1, 2], "b": {"c": null}}));
    }

    #[test]
    fn values_know_their_place() {
        let node = json("{\n  \"\u{e9}\": 1, \"b\": 2\n}").unwrap();
        assert_eq!(node.get("b").unwrap().at, Some(LineColumn { line: 2, column: 16 }));
    }

    #[test]
    fn duplicate_keys_are_all_named_with_their_places() {
        let error = json("{\"a\": 1, \"s\": {\"x\": 1,\n\"x\": 2}, \"a\": 3}").unwrap_err();
        assert_eq!(
            error.to_string(),
            "Duplicate keys in DeepSpeed config: [s.x, a] (ds.json, line 2, column 1, \
             line 2, column 10); keep one of each"
        );
    }

    #[test]
    fn syntax_errors_have_line_and_column() {
        for (text, place) in [
            ("", "line 1, column 1"),
            ("{\"a\": 1 \"b\": 2}", "line 1, column 8"),
            ("{\n\"a\": \n}", "line 3"),
            ("{'a': 1}", "line 1, column 2"),
            ("{\"a\": 0x10}", "line 1, column 7"),
            ("{\"a\": 1} {}", "line 1, column 10"),
            ("[1, 2", "line 1"),
            ("{\"a\": tru}", "line 1, column 7"),
            ("\"\\ud800\"", "line 1"),
        ] {
            let message = json(text).expect_err(text).to_string();
            assert!(message.contains(place), "{text}: {message}");
        }
    }

    fn is_too_deep(parsed: Result<Node, ConfigError>) -> bool {
        parsed.is_err_and(|error| error.to_string().contains("nested deeper than 64 levels"))
    }

    #[test]
    fn deep_nesting_is_refused_before_the_stack_is_gone() {
        for depth in [MAX_DEPTH + 2, 600, 200_000] {
            let lists = "[".repeat(depth) + &"]".repeat(depth);
            assert!(is_too_deep(json(&lists)), "{depth}");
            let maps = "{\"a\":".repeat(depth) + "1" + &"}".repeat(depth);
            assert!(is_too_deep(json(&maps)), "{depth}");
            assert!(json(&"[".repeat(depth)).is_err());
            assert!(parse_yaml(&lists, "x.yaml").is_err());
        }
        assert!(json(&("[".repeat(MAX_DEPTH) + &"]".repeat(MAX_DEPTH))).is_ok());
    }

    #[test]
    fn base64_of_both_alphabets_is_read() {
        let text = "{\"a\": \"???>>>\"}";
        assert_eq!(decode_base64(&URL_SAFE.encode(text)).unwrap(), text);
        assert_eq!(decode_base64(&STANDARD.encode(text)).unwrap(), text);
        assert!(decode_base64("ds_config.json").is_err());
    }

    #[test]
    fn files_that_are_no_text_are_refused_with_their_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ds.json");
        std::fs::write(&file, [0xff, 0xfe, 0x00]).unwrap();
        for path in [file.as_path(), folder.path(), Path::new("/nowhere/ds.json")] {
            let message = read_text(path).unwrap_err().to_string();
            assert!(message.contains(&path.display().to_string()), "{message}");
        }
        std::fs::write(&file, "\u{feff}{}").unwrap();
        assert_eq!(read_text(&file).unwrap(), "{}");
    }

    #[test]
    fn yaml_errors_have_a_place() {
        let message = parse_yaml("a: 1\na: 2\n", "x.yaml").unwrap_err().to_string();
        assert!(message.contains("x.yaml: line 2"), "{message}");
    }
}
