//! Configuration keys: name, kind, default, description and support status.
//!
//! A configuration format is defined by tables of [`Key`]s, one table per section. The same table
//! is used to check values, to supply defaults, to suggest similar names, to detect requests for
//! unsupported features, and to list the keys for users ([`entries`]). Each key is therefore
//! declared only once.
//!
//! Keys and kinds are declared in one module because they refer to each other: a section is a kind
//! of value that contains keys. A [`Kind`] checks a value ([`Kind::accepts`]), has a name for
//! listings ([`Display`](fmt::Display)) and corresponds to a type in the JSON schema. Integers may
//! have a decimal point or an exponent if their value is integral, such as `5e8` in many of
//! DeepSpeed's examples. Numbers and flags in quotes are errors.

use std::fmt;

use crate::key_path::join;
use crate::node::{Node, Value};
use crate::range::{Integers, Reals};

/// A key of a section.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Name in its section.
    pub name: &'static str,
    /// Another accepted name; empty if there is none.
    pub alias: &'static str,
    /// A deprecated name, which is accepted with a warning; empty if there is none.
    pub outdated: &'static str,
    /// Allowed values.
    pub kind: Kind,
    /// Value if the key is not given.
    pub default: Literal,
    /// The default in other cases, and which they are; empty if `default` is always the default.
    pub other_default: &'static str,
    /// Unit of the value, `elements` for example; empty if there is none.
    pub unit: &'static str,
    /// Description for users, in one or two sentences.
    pub doc: &'static str,
    /// Whether DeepBurn supports the key.
    pub status: Status,
    /// Whether the value `"auto"` is allowed and resolved.
    pub auto: bool,
    /// First and last ZeRO stage at which the key has an effect.
    pub stages: (u8, u8),
    /// Whether DeepSpeed 0.19.8 rejects every file that has the key, whatever its value.
    pub removed: bool,
}

/// A default value in a key table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Literal {
    /// No value: the key must be given.
    Required,
    /// No value: the key is absent, or its default depends on other keys.
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
    /// Returns the default as a parsed value.
    pub fn node(self) -> Node {
        Node::new(match self {
            Self::Required | Self::Null => Value::Null,
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

/// Returns a number as it is written in a configuration.
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

/// How DeepBurn treats a key.
#[derive(Debug, Clone, Copy)]
pub enum Status {
    /// The key is supported.
    Honored,
    /// The key is accepted and has no effect. A note gives the reason.
    Inert(&'static str),
    /// The key is accepted and has no effect, as in DeepSpeed. A warning gives the reason.
    Ignored(&'static str),
    /// The feature is not supported in this version. A value that requests it is an error.
    Unavailable {
        /// Name of the feature.
        feature: &'static str,
        /// Values that request it.
        trigger: Trigger,
        /// What to write instead.
        remedy: &'static str,
    },
    /// The key must not be given.
    Refused {
        /// The reason.
        why: &'static str,
        /// What to write instead.
        remedy: &'static str,
    },
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Honored => f.write_str("supported"),
            Self::Inert(why) => write!(f, "no effect: {why}"),
            Self::Ignored(why) => write!(f, "ignored with a warning: {why}"),
            Self::Unavailable { feature, .. } => write!(f, "unsupported: {feature}"),
            Self::Refused { why, .. } => write!(f, "refused: {why}"),
        }
    }
}

/// The values of a key that request its feature.
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
    /// `true`, `false`, or this string, compared without regard to case.
    FlagOr(&'static str),
    /// An integer in a range; `5e8` counts as an integer.
    Integer(Integers),
    /// A number of steps in a range, or a ratio above 0 and below 1 of the steps of the run.
    Steps(Integers),
    /// A list of integers in a range.
    Integers(Integers),
    /// A finite number in a range.
    Real(Reals),
    /// A finite number, or a list of one number. DeepSpeed allows a list with one number per
    /// parameter group; DeepBurn reads a list of one number.
    PerGroup(Reals),
    /// A list of two or three finite numbers; the first field is the length.
    Tuple(usize, Reals),
    /// Any string.
    Text,
    /// A string that no number stands for, and what it is.
    TextOf(&'static str),
    /// A split of the data, as a string: a percentage, a name or a path.
    Split,
    /// One of several strings, compared without regard to case.
    Choice(&'static [&'static str]),
    /// A list of anything.
    List,
    /// A list of strings.
    TextList,
    /// A string, or a list of strings.
    Texts,
    /// A section with these keys.
    Section(&'static [Key]),
    /// A list of sections, each with these keys.
    Sections(&'static [Key]),
    /// A section whose keys depend on the key `type` next to it.
    Variants(&'static [SectionVariant]),
    /// A section, or the path of a file that contains it.
    SectionOrPath(&'static [Key]),
    /// Any value, which is passed on unchanged.
    Free,
}

/// A named choice with parameters, such as an optimizer or a schedule.
#[derive(Debug, Clone, Copy)]
pub struct SectionVariant {
    /// Value of `type`; compared without regard to case.
    pub name: &'static str,
    /// Description for users.
    pub doc: &'static str,
    /// Whether DeepBurn supports the variant.
    pub status: Status,
    /// Its parameters.
    pub keys: &'static [Key],
}

impl SectionVariant {
    /// Creates a supported variant.
    pub(crate) const fn of(name: &'static str, doc: &'static str, keys: &'static [Key]) -> Self {
        Self { name, doc, status: Status::Honored, keys }
    }

    /// Creates a variant of DeepSpeed or PyTorch that is not supported in this version.
    pub(crate) const fn missing(
        name: &'static str,
        feature: &'static str,
        remedy: &'static str,
    ) -> Self {
        let status = Status::Unavailable { feature, trigger: Trigger::Present, remedy };
        Self { name, doc: feature, status, keys: &[] }
    }

    /// Returns the variant that the `type` of a section names.
    pub(crate) fn named_in(section: &Node, variants: &'static [Self]) -> Option<&'static Self> {
        Self::find(variants, section.get("type")?.as_text()?)
    }

    /// Returns the variant called `name`.
    pub(crate) fn find(variants: &'static [Self], name: &str) -> Option<&'static Self> {
        variants.iter().find(|variant| variant.name.eq_ignore_ascii_case(name))
    }
}

impl Key {
    /// Creates a supported key of this kind, without a name.
    pub(crate) const fn new(kind: Kind, default: Literal) -> Self {
        Self {
            name: "",
            alias: "",
            outdated: "",
            kind,
            default,
            other_default: "",
            unit: "",
            doc: "",
            status: Status::Honored,
            auto: false,
            stages: (0, 3),
            removed: false,
        }
    }

    /// Returns whether `name` is a name of this key.
    ///
    /// ```
    /// let keys = deepburn_config::deepspeed_keys();
    /// let bf16 = keys.iter().find(|entry| entry.path == "bf16").unwrap();
    /// assert!(bf16.key.is_called("bfloat16"));
    /// ```
    pub fn is_called(&self, name: &str) -> bool {
        self.names().any(|known| known == name)
    }

    /// Returns the key of `keys` that has the name `name`.
    pub(crate) fn find(keys: &'static [Self], name: &str) -> Option<&'static Self> {
        keys.iter().find(|key| key.is_called(name))
    }

    /// Returns the default as messages show it, with the defaults of other cases.
    pub(crate) fn shown_default(&self) -> String {
        match self.other_default {
            "" => self.default.to_string(),
            other => format!("{} ({other})", self.default),
        }
    }

    /// Returns whether the key must be given.
    pub fn is_required(&self) -> bool {
        self.default == Literal::Required
    }

    /// Returns all names of this key.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.name, self.alias, self.outdated].into_iter().filter(|name| !name.is_empty())
    }

    /// Returns the keys of the section, or of each section in the list; empty if the key is neither
    /// a section nor a list of sections.
    pub fn keys(&self) -> &'static [Self] {
        match self.kind {
            Kind::Section(keys) | Kind::Sections(keys) | Kind::SectionOrPath(keys) => keys,
            _ => &[],
        }
    }

    /// Returns the keys below this key of `section`. Returns `None` if any name is allowed: in a
    /// value that is passed on unchanged, and in parameters of an unknown type.
    pub(crate) fn keys_in(&self, section: &Node) -> Option<&'static [Self]> {
        match self.kind {
            Kind::Free => None,
            Kind::Variants(variants) => {
                SectionVariant::named_in(section, variants).map(|it| it.keys)
            }
            _ => Some(self.keys()),
        }
    }
}

impl Kind {
    /// Checks that a value is of this kind. The keys of a section are checked elsewhere.
    ///
    /// # Errors
    /// Returns the rule that the value breaks, for a sentence that starts with "must be".
    pub(crate) fn accepts(&self, node: &Node) -> Result<(), String> {
        if self.matches(node) { Ok(()) } else { Err(self.words().1) }
    }

    /// Returns whether a value is of this kind.
    fn matches(&self, node: &Node) -> bool {
        let list = node.as_list();
        let integer_in = |node: &Node, range: &Integers| {
            node.as_integer().is_some_and(|i| (range.min..=range.max).contains(&i))
        };
        let real_in = |node: &Node, range: Reals| node.as_real().is_some_and(|r| range.contain(r));
        // Whether the value is a list of `len` numbers in `range`.
        let reals_in = |len: usize, range: Reals| {
            list.is_some_and(|l| l.len() == len && l.iter().all(|node| real_in(node, range)))
        };
        let is_map = matches!(node.value, Value::Map(_));
        let text = node.as_text();
        match self {
            Self::Flag => node.as_flag().is_some(),
            Self::FlagOr(name) => {
                node.as_flag().is_some() || text.is_some_and(|it| it.eq_ignore_ascii_case(name))
            }
            Self::Integer(range) => integer_in(node, range),
            Self::Steps(range) => {
                // 1.0 is one step and not the whole run, as in transformers, where a ratio is below
                // 1.
                let is_ratio = node.as_real().is_some_and(|ratio| 0.0 < ratio && ratio < 1.0);
                integer_in(node, range) || is_ratio
            }
            Self::Integers(range) => list.is_some_and(|l| l.iter().all(|i| integer_in(i, range))),
            Self::Real(range) => real_in(node, *range),
            Self::PerGroup(range) => real_in(node, *range) || reals_in(1, *range),
            Self::Tuple(len, range) => reals_in(*len, *range),
            Self::Text | Self::TextOf(_) | Self::Split => text.is_some(),
            Self::Choice(names) => {
                text.is_some_and(|text| names.iter().any(|name| name.eq_ignore_ascii_case(text)))
            }
            Self::List => list.is_some(),
            Self::TextList => {
                list.is_some_and(|nodes| nodes.iter().all(|node| node.as_text().is_some()))
            }
            Self::Texts => text.is_some() || Self::TextList.matches(node),
            Self::Sections(_) => {
                list.is_some_and(|l| l.iter().all(|node| matches!(node.value, Value::Map(_))))
            }
            Self::Section(_) | Self::Variants(_) => is_map,
            Self::SectionOrPath(_) => is_map || text.is_some(),
            Self::Free => true,
        }
    }

    /// Returns the name of the kind, for listings, and its rule, for a sentence that starts with
    /// "must be".
    fn words(&self) -> (String, String) {
        // The name may be shorter than the rule, because a listing shows it in one line.
        let words = |noun: &str, rule: &str| (noun.to_owned(), rule.to_owned());
        let one_for_both = |words: String| (words.clone(), words);
        match self {
            Self::Flag => words("flag", "true or false"),
            Self::FlagOr(name) => {
                let rule = format!("true or false, without quotes, or \"{name}\"");
                (format!("flag or {name}"), rule)
            }
            Self::Integer(range) => one_for_both(range.to_string()),
            Self::Steps(range) => one_for_both(format!("{range}, or a ratio above 0 and below 1")),
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
            Self::TextOf(what) => words("string", &format!("a string: {what}")),
            Self::Split => words("string", "a string: a percentage, a name or a path"),
            Self::Choice(names) => one_for_both(format!("one of {}", names.join(", "))),
            Self::List => words("list", "a list"),
            Self::TextList => words("list of strings", "a list of strings"),
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

/// Formats the name of the kind.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().0)
    }
}

/// A key in a listing.
#[derive(Debug, Clone)]
pub struct KeyEntry {
    /// Full path; `optimizer.params[AdamW].lr` for a parameter of one variant.
    pub path: String,
    /// The key.
    pub key: Key,
    /// The key's own status, or the status of its section.
    pub status: Status,
}

/// Returns every key of a table and of its sections, depth first, in the order of declaration.
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
    list_section(keys, "", Status::Honored, &mut list);
    list
}

/// Lists a section and the sections inside of it. A section that has no effect passes its status on
/// to its keys.
fn list_section(keys: &'static [Key], path: &str, inherited: Status, list: &mut Vec<KeyEntry>) {
    for key in keys {
        let path = join(path, key.name);
        let status = if matches!(key.status, Status::Honored) { inherited } else { key.status };
        list.push(KeyEntry { path: path.clone(), key: *key, status });
        // The brackets say that the section may occur several times, each with an index of its own.
        let inner = match key.kind {
            Kind::Sections(_) => format!("{path}[]"),
            _ => path.clone(),
        };
        list_section(key.keys(), &inner, status, list);
        let Kind::Variants(variants) = key.kind else { continue };
        for variant in variants {
            // Each variant has a status of its own: a supported `params` may have unsupported
            // types.
            let path = format!("{path}[{}]", variant.name);
            list_section(variant.keys, &path, variant.status, list);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(json: &str) -> Node {
        let origin = crate::source::SourceName { document: "test", name: "test" };
        crate::source::parse_json(json, origin).unwrap()
    }

    #[test]
    fn kinds_accept_what_they_say() {
        let integer_range = Integers { min: 0, max: 3 };
        let integer = Kind::Integer(integer_range);
        for (kind, good, bad) in [
            (Kind::Flag, &["true", "false"][..], &["1", "\"true\"", "null"][..]),
            (Kind::FlagOr("turns"), &["true", "false", "\"Turns\""], &["1", "\"true\"", "null"]),
            (
                integer,
                &["0", "3", "3.0", "3e0"],
                &["4", "-1", "1.5", "true", "\"2\"", "NaN", "[1]"],
            ),
            (Kind::Integers(integer_range), &["[]", "[0, 3]"], &["[4]", "3", "[1.5]", "[null]"]),
            (Kind::Real(Reals::Decay), &["0", "0.999"], &["1", "-0.1", "NaN", "Infinity", "true"]),
            (Kind::Real(Reals::Fraction), &["0", "1", "1e-9"], &["1.001", "-1e-9"]),
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
}
