//! Reading a section through its table: the value that was given, or the table's default.
//!
//! A [`Section`] never complains. Values that break a rule have been reported by the check that
//! runs before, and read as the default, so that the other findings about a file do not depend on
//! the first one. Asking for a key that the table does not have is our own mistake and panics; the
//! tests read every key.

use crate::diagnosis::{Diagnosis, Severity};
use crate::key::{Key, Literal};

use crate::kind::Kind;
use crate::node::{Node, Value};
use crate::source::join;

/// A section of a configuration, present or not.
#[derive(Debug, Clone)]
pub(crate) struct Section<'a> {
    keys: &'static [Key],
    node: Option<&'a Node>,
    path: String,
}

impl<'a> Section<'a> {
    /// The section `path` with these keys.
    pub(crate) fn new(keys: &'static [Key], node: Option<&'a Node>, path: &str) -> Self {
        Self { keys, node, path: path.to_owned() }
    }

    /// A section below this one.
    pub(crate) fn section(&self, name: &str) -> Self {
        Self::new(self.key(name).keys(), self.given(name), &self.path_of(name))
    }

    /// The sections in a list, in its order.
    pub(crate) fn sections(&self, name: &str) -> Vec<Self> {
        let Some(Value::List(nodes)) = self.valid(name).map(|node| &node.value) else {
            return Vec::new();
        };
        let (keys, path) = (self.key(name).keys(), self.path_of(name));
        let section = |(place, node)| Self::new(keys, Some(node), &format!("{path}[{place}]"));
        nodes.iter().enumerate().map(section).collect()
    }

    /// The `params` of the variant that has these keys.
    pub(crate) fn variant(&self, name: &str, keys: &'static [Key]) -> Self {
        Self::new(keys, self.given(name), &self.path_of(name))
    }

    /// Full path of a key.
    pub(crate) fn path_of(&self, name: &str) -> String {
        join(&self.path, name)
    }

    /// An error about a key, at its place.
    pub(crate) fn error(
        &self,
        name: &str,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Diagnosis {
        self.diagnosis(Severity::Error, name, message, remedy)
    }

    /// A warning about a key, at its place.
    pub(crate) fn warning(
        &self,
        name: &str,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Diagnosis {
        self.diagnosis(Severity::Warning, name, message, remedy)
    }

    /// A note about a key, at its place.
    pub(crate) fn note(&self, name: &str, message: impl Into<String>) -> Diagnosis {
        self.diagnosis(Severity::Note, name, message, "")
    }

    /// A finding about a key, at its place.
    pub(crate) fn diagnosis(
        &self,
        severity: Severity,
        name: &str,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Diagnosis {
        let diagnosis = Diagnosis::new(severity, self.path_of(name), message, remedy);
        match self.written(name) {
            Some(node) => diagnosis.at(node),
            None => diagnosis,
        }
    }

    /// The value as it was written, under any of its names; `null` and `"auto"` are not given.
    pub(crate) fn given(&self, name: &str) -> Option<&'a Node> {
        self.written(name).filter(|node| !node.is_null() && !node.is_auto())
    }

    /// Whether the value is `"auto"`.
    pub(crate) fn is_auto(&self, name: &str) -> bool {
        self.written(name).is_some_and(Node::is_auto)
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        match (self.valid(name).and_then(Node::as_flag), self.key(name).default) {
            (Some(flag), _) | (None, Literal::Flag(flag)) => flag,
            _ => self.no_default(name),
        }
    }

    pub(crate) fn optional_flag(&self, name: &str) -> Option<bool> {
        self.valid(name).and_then(Node::as_flag)
    }

    pub(crate) fn integer(&self, name: &str) -> i64 {
        match (self.valid(name).and_then(Node::as_integer), self.key(name).default) {
            (Some(integer), _) | (None, Literal::Integer(integer)) => integer,
            _ => self.no_default(name),
        }
    }

    /// An integer that is never negative, by its kind.
    pub(crate) fn count(&self, name: &str) -> usize {
        as_count(self.integer(name))
    }

    pub(crate) fn optional_count(&self, name: &str) -> Option<usize> {
        self.valid(name).and_then(Node::as_integer).map(as_count)
    }

    /// A list of integers that are never negative, by its kind.
    pub(crate) fn counts(&self, name: &str) -> Option<Vec<usize>> {
        let Value::List(nodes) = &self.valid(name)?.value else { return None };
        nodes.iter().map(|node| node.as_integer().map(as_count)).collect()
    }

    pub(crate) fn real(&self, name: &str) -> f64 {
        match (self.optional_real(name), self.key(name).default) {
            (Some(real), _) | (None, Literal::Real(real)) => real,
            _ => self.no_default(name),
        }
    }

    pub(crate) fn optional_real(&self, name: &str) -> Option<f64> {
        let node = self.valid(name)?;
        match (&self.key(name).kind, &node.value) {
            (Kind::PerGroup(_), Value::List(nodes)) => nodes.first().and_then(Node::as_real),
            _ => node.as_real(),
        }
    }

    pub(crate) fn pair(&self, name: &str) -> [f64; 2] {
        match (self.optional_pair(name), self.key(name).default) {
            (Some(pair), _) | (None, Literal::Pair(pair)) => pair,
            _ => self.no_default(name),
        }
    }

    pub(crate) fn triple(&self, name: &str) -> [f64; 3] {
        let given = self.valid(name).and_then(|node| match &node.value {
            Value::List(nodes) => {
                let numbers = nodes.iter().map(Node::as_real).collect::<Option<Vec<_>>>()?;
                <[f64; 3]>::try_from(numbers).ok()
            }
            _ => None,
        });
        match (given, self.key(name).default) {
            (Some(triple), _) | (None, Literal::Triple(triple)) => triple,
            _ => self.no_default(name),
        }
    }

    pub(crate) fn optional_pair(&self, name: &str) -> Option<[f64; 2]> {
        let Value::List(nodes) = &self.valid(name)?.value else { return None };
        let [first, second] = nodes.as_slice() else { return None };
        Some([first.as_real()?, second.as_real()?])
    }

    /// A string or a list of strings.
    pub(crate) fn texts(&self, name: &str) -> Vec<&'a str> {
        match self.valid(name).map(|node| &node.value) {
            Some(Value::List(nodes)) => nodes.iter().filter_map(Node::as_text).collect(),
            Some(Value::Text(text)) => vec![text],
            _ => Vec::new(),
        }
    }

    pub(crate) fn text(&self, name: &str) -> Option<&'a str> {
        self.valid(name).and_then(Node::as_text)
    }

    /// One of a choice's names, in the table's spelling.
    /// The choice that was made, spelled as in the table; the table has no default for it.
    pub(crate) fn optional_choice(&self, name: &str) -> Option<&'static str> {
        let Kind::Choice(names) = self.key(name).kind else { return self.no_default(name) };
        let given = self.text(name)?;
        names.iter().find(|known| given.eq_ignore_ascii_case(known)).copied()
    }

    pub(crate) fn choice(&self, name: &str) -> &'static str {
        match (self.optional_choice(name), self.key(name).default) {
            (Some(known), _) => known,
            (None, Literal::Text(default)) => default,
            _ => self.no_default(name),
        }
    }

    /// The given value when it is of its kind.
    fn valid(&self, name: &str) -> Option<&'a Node> {
        self.given(name).filter(|node| self.key(name).kind.accepts(node).is_ok())
    }

    fn written(&self, name: &str) -> Option<&'a Node> {
        let key = self.key(name);
        key.names().find_map(|name| self.node?.get(name))
    }

    pub(crate) fn key(&self, name: &str) -> &'static Key {
        self.keys
            .iter()
            .find(|key| key.name == name)
            .unwrap_or_else(|| panic!("no key `{name}` in the table of `{}`", self.path))
    }

    fn no_default<T>(&self, name: &str) -> T {
        panic!("`{}` is read as a kind that its table entry does not have", self.path_of(name))
    }
}

fn as_count(integer: i64) -> usize {
    // Kinds of counts start at 0; a 32-bit machine caps them.
    usize::try_from(integer.max(0)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Spelling;

    use crate::kind::{Integers, Reals};

    const KEYS: &[Key] = &[
        Key::count("size", 5, "").spelled(&[Spelling::Alias("old_size")]).auto(),
        Key::optional("limit", Kind::Integer(Integers::POSITIVE), ""),
        Key::new("lr", Kind::PerGroup(Reals::Any), Literal::Real(0.5), ""),
        Key::new("shape", Kind::Choice(&["log", "linear"]), Literal::Text("log"), ""),
    ];

    fn read<T>(json: &str, read: impl FnOnce(Section<'_>) -> T) -> T {
        let origin = crate::source::Origin { document: "test", name: "test" };
        let node = crate::source::parse_json(json, origin).unwrap();
        read(Section::new(KEYS, Some(&node), "s"))
    }

    #[test]
    fn every_name_is_read_and_absence_is_the_default() {
        assert_eq!(read("{\"old_size\": 7e0}", |s| s.count("size")), 7);
        assert_eq!(read("{\"size\": 8}", |s| s.count("size")), 8);
        assert_eq!(read("{}", |s| s.count("size")), 5);
        assert_eq!(read("{\"size\": null}", |s| s.count("size")), 5);
        assert_eq!(read("{\"lr\": [0.25]}", |s| s.real("lr")), 0.25);
        assert_eq!(read("{\"shape\": \"Linear\"}", |s| s.choice("shape")), "linear");
    }

    #[test]
    fn auto_is_neither_given_nor_an_error() {
        read("{\"size\": \"auto\"}", |section| {
            assert!(section.is_auto("size") && section.given("size").is_none());
            assert_eq!(section.count("size"), 5);
        });
    }

    #[test]
    fn values_that_break_a_rule_read_as_the_default() {
        assert_eq!(
            read("{\"size\": -1, \"limit\": 0}", |s| (s.count("size"), s.optional_count("limit"))),
            (5, None)
        );
    }

    #[test]
    #[should_panic(expected = "no key `sizes`")]
    fn unknown_names_are_our_own_mistake() {
        read("{}", |section| section.count("sizes"));
    }
}
