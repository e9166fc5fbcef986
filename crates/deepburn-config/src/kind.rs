//! The values that keys take: kinds, ranges, and variants with parameters of their own.
//!
//! A [`Kind`] checks a value ([`Kind::accepts`]), names itself in listings
//! ([`Display`](fmt::Display)) and becomes a type of the JSON schema. Integers may be written with
//! a point or an exponent where they are integral, as `5e8` in many of DeepSpeed's examples;
//! numbers and flags in quotes are refused.

use std::fmt;

use crate::key::{Key, Status, Trigger};
use crate::node::{Node, Value};

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

/// Integers from `min` to `max`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Integers {
    /// Smallest.
    pub min: i64,
    /// Largest.
    pub max: i64,
}

impl Integers {
    /// 0 and more.
    pub const COUNT: Self = Self { min: 0, max: i64::MAX };
    /// 1 and more.
    pub const POSITIVE: Self = Self { min: 1, max: i64::MAX };
    /// Every integer.
    pub const ANY: Self = Self { min: i64::MIN, max: i64::MAX };
}

impl fmt::Display for Integers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (i64::MIN, i64::MAX) => f.write_str("an integer"),
            (min, i64::MAX) => write!(f, "an integer of at least {min}"),
            (min, max) => write!(f, "an integer from {min} to {max}"),
        }
    }
}

/// Finite numbers in an interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reals {
    /// Every finite number.
    Any,
    /// 0 and more.
    NotNegative,
    /// More than 0.
    Positive,
    /// 0 to 1, 1 excluded: decay factors of moments.
    Decay,
    /// 0 to 1, both included.
    Share,
}

impl Reals {
    /// Whether `number` is in the interval. NaN and infinities are in none.
    fn contain(self, number: f64) -> bool {
        number.is_finite()
            && match self {
                Self::Any => true,
                Self::NotNegative => number >= 0.0,
                Self::Positive => number > 0.0,
                Self::Decay => (0.0..1.0).contains(&number),
                Self::Share => (0.0..=1.0).contains(&number),
            }
    }
}

impl fmt::Display for Reals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "a finite number",
            Self::NotNegative => "a finite number of at least 0",
            Self::Positive => "a finite number above 0",
            Self::Decay => "a number from 0 to below 1",
            Self::Share => "a number from 0 to 1",
        })
    }
}

impl Kind {
    /// Whether a value is of this kind; sections are looked into elsewhere.
    ///
    /// # Errors
    /// The rule that it breaks, for a sentence that starts with "must be".
    pub(crate) fn accepts(&self, node: &Node) -> Result<(), String> {
        if self.matches(node) { Ok(()) } else { Err(self.rule()) }
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

    /// What a value of this kind is, for a sentence that starts with "must be".
    fn rule(&self) -> String {
        match self {
            Self::Flag => "true or false".to_owned(),
            Self::Integer(_) | Self::Real(_) | Self::Choice(_) => self.to_string(),
            Self::Integers(range) => format!("a list of integers, each {range}"),
            Self::PerGroup(range) => {
                format!("{range}, or a list of one such number (there is one parameter group)")
            }
            Self::Tuple(len, range) => format!("a list of {} numbers, each {range}", word(*len)),
            Self::Text => "a string".to_owned(),
            Self::List => "a list".to_owned(),
            Self::Texts => "a string or a list of strings".to_owned(),
            Self::Sections(_) => "a list of sections, [{ ... }]".to_owned(),
            Self::Section(_) | Self::Variants(_) => "a section, { ... }".to_owned(),
            Self::SectionOrPath(_) => "a section, { ... }, or the path of a file".to_owned(),
            Self::Free => String::new(),
        }
    }
}

/// The length of a [`Kind::Tuple`] in words.
fn word(len: usize) -> &'static str {
    if len == 2 { "two" } else { "three" }
}

/// The noun of the kind, for listings.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("flag"),
            Self::Integer(range) => range.fmt(f),
            Self::Integers(range) => write!(f, "list, each {range}"),
            Self::Real(range) | Self::PerGroup(range) => range.fmt(f),
            Self::Tuple(len, range) => write!(f, "{} of {range}", word(*len)),
            Self::Text => f.write_str("string"),
            Self::Choice(names) => write!(f, "one of {}", names.join(", ")),
            Self::List => f.write_str("list"),
            Self::Texts => f.write_str("string or list of strings"),
            Self::Sections(_) => f.write_str("list of sections"),
            Self::Section(_) | Self::Variants(_) => f.write_str("section"),
            Self::SectionOrPath(_) => f.write_str("section or path"),
            Self::Free => f.write_str("any value"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
