//! What a key is: its name, kind, default, meaning, and what becomes of it here.
//!
//! A configuration format is a table of [`Key`]s, one table a section. The same table checks what
//! was written, supplies the default, finds the nearest known name, decides whether a value asks
//! for a feature that does not exist, and is listed for users ([`entries`]): a key
//! is declared once.
//!
//! Keys and kinds are declared together because each holds the other: a section is a kind of value
//! that has keys. A [`Kind`] checks a value ([`Kind::accepts`]), names itself in listings
//! ([`Display`](fmt::Display)) and becomes a type of the JSON schema. Integers may be written with
//! a point or an exponent where they are integral, as `5e8` in many of DeepSpeed's examples;
//! numbers and flags in quotes are refused.

use std::fmt;

use crate::key_path::join;
use crate::node::{Node, Value};
use crate::range::{Integers, Reals};

/// A key of a section.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Name inside its section.
    pub name: &'static str,
    /// Another name that means the same; empty where there is none.
    pub alias: &'static str,
    /// A name that is understood and warned about; empty where there is none.
    pub outdated: &'static str,
    /// Values it takes.
    pub kind: Kind,
    /// Value when it is not given.
    pub default: Literal,
    /// What one unit of the value is, `elements` for example; empty where there is none.
    pub unit: &'static str,
    /// Its effect, in one or two sentences.
    pub doc: &'static str,
    /// What becomes of it here.
    pub status: Status,
    /// Whether `"auto"` is resolved.
    pub auto: bool,
    /// Whether leaving it out is an error.
    pub required: bool,
    /// ZeRO stages at which it has an effect, first and last.
    pub stages: (u8, u8),
}

/// A default, as it stands in a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Literal {
    /// Nothing: the key is absent, or its default depends on others.
    Null,
    /// A flag.
    Flag(bool),
    /// An integer.
    Integer(i64),
    /// A number.
    Real(f64),
    /// Several numbers.
    Reals(&'static [f64]),
    /// A string.
    Text(&'static str),
}

impl Literal {
    /// The same as a written value.
    pub fn node(self) -> Node {
        Node::new(match self {
            Self::Null => Value::Null,
            Self::Flag(flag) => Value::Flag(flag),
            Self::Integer(integer) => Value::Number(integer.to_string()),
            Self::Real(real) => real_node(real),
            Self::Reals(reals) => {
                Value::List(reals.iter().map(|real| Node::new(real_node(*real))).collect())
            }
            Self::Text(text) => Value::Text(text.into()),
        })
    }
}

/// A number in the spelling of a configuration.
fn real_node(real: f64) -> Value {
    // `Debug` writes 1e-8 where `Display` writes seven zeros.
    Value::Number(format!("{real:?}"))
}

impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reals(reals) => write!(f, "{reals:?}"),
            _ => self.node().fmt(f),
        }
    }
}

/// What becomes of a key here.
#[derive(Debug, Clone, Copy)]
pub enum Status {
    /// It does what it says.
    Honoured,
    /// It is accepted, changes nothing, and a note says why.
    Inert(&'static str),
    /// It is accepted, changes nothing in DeepSpeed either, and a warning says why.
    Ignored(&'static str),
    /// The feature does not exist in this version: a value that asks for it is an error.
    Unavailable {
        /// The feature's name.
        feature: &'static str,
        /// Which values ask for it.
        trigger: Trigger,
        /// What to write instead.
        remedy: &'static str,
    },
    /// It must not be given at all.
    Refused {
        /// Why.
        why: &'static str,
        /// What to write instead.
        remedy: &'static str,
    },
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Honoured => f.write_str("supported"),
            Self::Inert(why) => write!(f, "no effect: {why}"),
            Self::Ignored(why) => write!(f, "ignored with a warning: {why}"),
            Self::Unavailable { feature, .. } => write!(f, "unsupported: {feature}"),
            Self::Refused { why, .. } => write!(f, "refused: {why}"),
        }
    }
}

/// Which values of a key ask for its feature.
#[derive(Debug, Clone, Copy)]
pub enum Trigger {
    /// Every value but the default.
    Differs,
    /// Every value but the default and these strings.
    NotOneOf(&'static [&'static str]),
    /// A section with `enabled: true`.
    Enabled,
    /// A section with `enabled: true` anywhere in it.
    AnyEnabled,
    /// Every value but `null` and `false`.
    Present,
    /// Every value but `null`, `false` and an empty section.
    NotEmpty,
}

/// The values that a key takes.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `true` or `false`.
    Flag,
    /// An integer in a range; `5e8` is one.
    Integer(Integers),
    /// A list of integers in a range.
    Integers(Integers),
    /// A finite number in a range.
    Real(Reals),
    /// A finite number, or a list of one: DeepSpeed allows a list over parameter groups, of which
    /// there is one.
    PerGroup(Reals),
    /// A list of so many finite numbers, two or three.
    Tuple(usize, Reals),
    /// Any string.
    Text,
    /// One of some strings, in any case.
    Choice(&'static [&'static str]),
    /// A list of anything.
    List,
    /// A string, or a list of strings.
    Texts,
    /// A section with keys of its own.
    Section(&'static [Key]),
    /// A list of sections, each with these keys.
    Sections(&'static [Key]),
    /// A section whose keys depend on the `type` beside it.
    Variants(&'static [Variant]),
    /// A section, or the path of a file that holds it.
    SectionOrPath(&'static [Key]),
    /// Anything: handed on as it is.
    Free,
}

/// A named choice with parameters of its own: an optimizer, a schedule.
#[derive(Debug, Clone, Copy)]
pub struct Variant {
    /// Value of `type`; compared without regard to case.
    pub name: &'static str,
    /// What it is.
    pub doc: &'static str,
    /// Whether it exists here.
    pub status: Status,
    /// Its parameters.
    pub keys: &'static [Key],
}

impl Variant {
    /// A variant that exists here.
    pub(crate) const fn of(name: &'static str, doc: &'static str, keys: &'static [Key]) -> Self {
        Self { name, doc, status: Status::Honoured, keys }
    }

    /// A variant that DeepSpeed or PyTorch has and this version does not.
    pub(crate) const fn missing(
        name: &'static str,
        feature: &'static str,
        remedy: &'static str,
    ) -> Self {
        let status = Status::Unavailable { feature, trigger: Trigger::Present, remedy };
        Self { name, doc: feature, status, keys: &[] }
    }

    /// The variant that the `type` of a section names.
    pub(crate) fn named_in(section: &Node, variants: &'static [Self]) -> Option<&'static Self> {
        Self::find(variants, section.get("type")?.as_text()?)
    }

    /// The variant of this name.
    pub(crate) fn find(variants: &'static [Self], name: &str) -> Option<&'static Self> {
        variants.iter().find(|variant| variant.name.eq_ignore_ascii_case(name))
    }
}

impl Key {
    /// Whether `name` means this key.
    ///
    /// ```
    /// let keys = deepburn_config::deepspeed_keys();
    /// let bf16 = keys.iter().find(|entry| entry.path == "bf16").unwrap();
    /// assert!(bf16.key.is_called("bfloat16"));
    /// ```
    pub fn is_called(&self, name: &str) -> bool {
        self.names().any(|known| known == name)
    }

    /// The key of `keys` that `name` means.
    pub(crate) fn find(keys: &'static [Self], name: &str) -> Option<&'static Self> {
        keys.iter().find(|key| key.is_called(name))
    }

    /// Every name of this key.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.name, self.alias, self.outdated].into_iter().filter(|name| !name.is_empty())
    }

    /// The keys of the section that this key is, or of each section in its list; nothing where it
    /// is neither.
    pub fn keys(&self) -> &'static [Self] {
        match self.kind {
            Kind::Section(keys) | Kind::Sections(keys) | Kind::SectionOrPath(keys) => keys,
            _ => &[],
        }
    }

    /// The keys below this key of `section`. `None` where every name is allowed: in a value that is handed on, and in
    /// parameters whose type is not known.
    pub(crate) fn keys_in(&self, section: &Node) -> Option<&'static [Self]> {
        match self.kind {
            Kind::Free => None,
            Kind::Variants(variants) => Variant::named_in(section, variants).map(|it| it.keys),
            _ => Some(self.keys()),
        }
    }

    /// Whether this value asks for more than the default.
    pub(crate) fn asks(&self, trigger: Trigger, node: &Node) -> bool {
        let is_default = node.is_null() || node.means(&self.default.node());
        match trigger {
            Trigger::Differs => !is_default,
            Trigger::NotOneOf(names) => {
                let known = |text: &str| names.iter().any(|name| name.eq_ignore_ascii_case(text));
                !is_default && !node.as_text().is_some_and(known)
            }
            Trigger::Enabled => node.get("enabled").and_then(Node::as_flag) == Some(true),
            Trigger::AnyEnabled => any_enabled(node),
            Trigger::Present => !node.is_null() && node.as_flag() != Some(false),
            Trigger::NotEmpty => {
                let is_empty = matches!(&node.value, Value::Map(entries) if entries.is_empty());
                !is_empty && self.asks(Trigger::Present, node)
            }
        }
    }
}

/// Whether a section, or one inside of it, has `enabled: true`.
fn any_enabled(node: &Node) -> bool {
    node.entries().iter().any(|(name, node)| {
        (name == "enabled" && node.as_flag() == Some(true)) || any_enabled(node)
    })
}

impl Kind {
    /// Whether a value is of this kind; sections are looked into elsewhere.
    ///
    /// # Errors
    /// The rule that it breaks, for a sentence that starts with "must be".
    pub(crate) fn accepts(&self, node: &Node) -> Result<(), String> {
        if self.matches(node) { Ok(()) } else { Err(self.words().1) }
    }

    /// Whether a value is of this kind.
    fn matches(&self, node: &Node) -> bool {
        let list = node.as_list();
        let integer_in = |node: &Node, range: &Integers| {
            node.as_integer().is_some_and(|i| (range.min..=range.max).contains(&i))
        };
        let real_in = |node: &Node, range: Reals| node.as_real().is_some_and(|r| range.contain(r));
        // A list of so many numbers.
        let reals_in = |len: usize, range: Reals| {
            list.is_some_and(|l| l.len() == len && l.iter().all(|node| real_in(node, range)))
        };
        let is_map = matches!(node.value, Value::Map(_));
        let text = node.as_text();
        match self {
            Self::Flag => node.as_flag().is_some(),
            Self::Integer(range) => integer_in(node, range),
            Self::Integers(range) => list.is_some_and(|l| l.iter().all(|i| integer_in(i, range))),
            Self::Real(range) => real_in(node, *range),
            Self::PerGroup(range) => real_in(node, *range) || reals_in(1, *range),
            Self::Tuple(len, range) => reals_in(*len, *range),
            Self::Text => text.is_some(),
            Self::Choice(names) => {
                text.is_some_and(|text| names.iter().any(|name| name.eq_ignore_ascii_case(text)))
            }
            Self::List => list.is_some(),
            Self::Texts => match list {
                Some(nodes) => nodes.iter().all(|node| node.as_text().is_some()),
                None => text.is_some(),
            },
            Self::Sections(_) => {
                list.is_some_and(|l| l.iter().all(|node| matches!(node.value, Value::Map(_))))
            }
            Self::Section(_) | Self::Variants(_) => is_map,
            Self::SectionOrPath(_) => is_map || text.is_some(),
            Self::Free => true,
        }
    }

    /// The noun of the kind, for listings, and its rule, for a sentence that starts with "must be".
    fn words(&self) -> (String, String) {
        let words = |noun: &str, rule: &str| (noun.to_owned(), rule.to_owned());
        let one_for_both = |words: String| (words.clone(), words);
        match self {
            Self::Flag => words("flag", "true or false"),
            Self::Integer(range) => one_for_both(range.to_string()),
            Self::Integers(range) => {
                (format!("list, each {range}"), format!("a list of integers, each {range}"))
            }
            Self::Real(range) => one_for_both(range.to_string()),
            Self::PerGroup(range) => {
                let list = "or a list of one such number (there is one parameter group)";
                (range.to_string(), format!("{range}, {list}"))
            }
            Self::Tuple(len, range) => {
                let len = if *len == 2 { "two" } else { "three" };
                (format!("{len} of {range}"), format!("a list of {len} numbers, each {range}"))
            }
            Self::Text => words("string", "a string"),
            Self::Choice(names) => one_for_both(format!("one of {}", names.join(", "))),
            Self::List => words("list", "a list"),
            Self::Texts => words("string or list of strings", "a string or a list of strings"),
            Self::Sections(_) => words("list of sections", "a list of sections, [{ ... }]"),
            Self::Section(_) | Self::Variants(_) => words("section", "a section, { ... }"),
            Self::SectionOrPath(_) => {
                words("section or path", "a section, { ... }, or the path of a file")
            }
            Self::Free => words("any value", ""),
        }
    }
}

/// The noun of the kind.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().0)
    }
}

/// One line of a listing of keys.
#[derive(Debug, Clone)]
pub struct KeyEntry {
    /// Full path; `optimizer.params[AdamW].lr` for a parameter of one variant.
    pub path: String,
    /// The key.
    pub key: Key,
    /// The key's own status, or the status of its section.
    pub status: Status,
}

/// Every key below a table, depth first, in the order of the tables.
///
/// The keys of an optimizer or schedule are listed once for each `type`:
///
/// ```
/// let keys = deepburn_config::deepspeed_keys();
/// let has = |path: &str| keys.iter().any(|entry| entry.path == path);
/// assert!(has("optimizer.params[AdamW].lr") && has("optimizer.params[SGD].momentum"));
/// assert!(!has("optimizer.params[SGD].betas"));
/// ```
pub fn entries(keys: &'static [Key]) -> Vec<KeyEntry> {
    let mut list = Vec::new();
    list_section(keys, "", Status::Honoured, &mut list);
    list
}

/// Lists a section and the sections inside of it. A section that has no effect passes its status on
/// to its keys.
fn list_section(keys: &'static [Key], path: &str, inherited: Status, list: &mut Vec<KeyEntry>) {
    for key in keys {
        let path = join(path, key.name);
        let status = if matches!(key.status, Status::Honoured) { inherited } else { key.status };
        list.push(KeyEntry { path: path.clone(), key: *key, status });
        let inner = match key.kind {
            Kind::Sections(_) => format!("{path}[]"),
            _ => path.clone(),
        };
        list_section(key.keys(), &inner, status, list);
        let Kind::Variants(variants) = key.kind else { continue };
        for variant in variants {
            let path = format!("{path}[{}]", variant.name);
            list_section(variant.keys, &path, variant.status, list);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;

    fn node(json: &str) -> Node {
        let origin = crate::source::Origin { document: "test", name: "test" };
        crate::source::parse_json(json, origin).unwrap()
    }

    #[test]
    fn kinds_accept_what_they_say() {
        let integer_range = Integers { min: 0, max: 3 };
        let integer = Kind::Integer(integer_range);
        for (kind, good, bad) in [
            (Kind::Flag, &["true", "false"][..], &["1", "\"true\"", "null"][..]),
            (
                integer,
                &["0", "3", "3.0", "3e0"],
                &["4", "-1", "1.5", "true", "\"2\"", "NaN", "[1]"],
            ),
            (Kind::Integers(integer_range), &["[]", "[0, 3]"], &["[4]", "3", "[1.5]", "[null]"]),
            (Kind::Real(Reals::Decay), &["0", "0.999"], &["1", "-0.1", "NaN", "Infinity", "true"]),
            (Kind::Real(Reals::Share), &["0", "1", "1e-9"], &["1.001", "-1e-9"]),
            (Kind::Real(Reals::Positive), &["1e-300", "5"], &["0", "-5", "1e999"]),
            (
                Kind::PerGroup(Reals::NotNegative),
                &["0.1", "[0.1]"],
                &["[0.1, 0.2]", "[]", "[true]"],
            ),
            (
                Kind::Tuple(2, Reals::Decay),
                &["[0.9, 0.999]"],
                &["0.9", "[0.9]", "[0.9, 1.0]", "[0, \"\"]"],
            ),
            (Kind::Texts, &["\"a\"", "[]", "[\"a\", \"b\"]"], &["1", "[1]", "[\"a\", null]"]),
            (Kind::Sections(&[]), &["[]", "[{}, {\"a\": 1}]"], &["{}", "[1]", "null"]),
            (Kind::Choice(&["Log", "linear"]), &["\"log\"", "\"LINEAR\""], &["\"cos\"", "3"]),
        ] {
            for good in good {
                assert!(kind.accepts(&node(good)).is_ok(), "{kind}: {good}");
            }
            for bad in bad {
                assert!(kind.accepts(&node(bad)).is_err(), "{kind}: {bad}");
            }
        }
    }

    #[test]
    fn only_values_that_ask_for_a_feature_do() {
        let size = spec::positive(1).named("zero_hpz_partition_size", "");
        assert!(!size.asks(Trigger::Differs, &node("1.0")));
        assert!(size.asks(Trigger::Differs, &node("8")));
        let dtype = spec::opt_text().named("communication_data_type", "");
        let other = Trigger::NotOneOf(&["fp32"]);
        assert!(!dtype.asks(other, &node("\"FP32\"")) && !dtype.asks(other, &node("null")));
        assert!(dtype.asks(other, &node("\"fp16\"")));
        let section = spec::Spec::<()>::of(Kind::Section(&[])).named("s", "");
        assert!(!section.asks(Trigger::Enabled, &node("{\"enabled\": false}")));
        assert!(section.asks(Trigger::Enabled, &node("{\"enabled\": true}")));
        assert!(!section.asks(Trigger::Enabled, &node("{\"x\": {\"enabled\": true}}")));
        assert!(section.asks(Trigger::AnyEnabled, &node("{\"x\": {\"enabled\": true}}")));
        assert!(
            !section.asks(Trigger::Present, &node("false"))
                && section.asks(Trigger::Present, &node("{}"))
        );
        assert!(!section.asks(Trigger::NotEmpty, &node("{}")));
        assert!(section.asks(Trigger::NotEmpty, &node("{\"a\": 1}")));
    }
}
