//! What a key is: its name, kind, default, meaning, and what becomes of it here.
//!
//! A configuration format is a table of [`Key`]s, one table a section. The same table checks what
//! was written, supplies the default, finds the nearest known name, decides whether a value asks
//! for a feature that does not exist, and is listed for users ([`entries`]): a key is declared
//! once.

use std::fmt;

use crate::kind::{Kind, Variant};
use crate::node::{Node, Value};

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
            Self::Real(real) => write!(f, "{real:?}"),
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
        let path = crate::key_path::join(path, key.name);
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
