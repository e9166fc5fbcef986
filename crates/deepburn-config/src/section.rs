//! Sections of a configuration: declared once, checked with their key table, and read as a struct.
//!
//! From one declaration, [`section!`] generates the key table, which checks a file, supplies
//! defaults and is listed for users, and a struct with a typed [`Setting`] for each key that is
//! read:
//!
//! ```text
//! section! {
//!     /// Half precision with loss scaling and fp32 masters.
//!     pub(crate) struct Fp16<'a> {
//!         /// Train in fp16.
//!         enabled: bool = flag(false).auto(),
//!         /// Overflows before the scale halves.
//!         hysteresis: usize = positive(2).unit("overflows").auto(),
//!         /// Keep master weights and gradients in fp16.
//!         fp16_master_weights_and_grads = flag(false).unavailable("fp16 master weights", Differs, "set it to false"),
//!     }
//! }
//! ```
//!
//! A key without a type is not read by this struct: it is inert, refused or unavailable, or it is
//! read through another section, such as `Moments`. The compiler warns about a key with a type that
//! no code reads (`field is never read`). If the name of a key is not a valid Rust name, the
//! declaration is `field as "name": ...`. `pub(crate) enum Name { ... }` declares a section that no
//! code reads. In a section that is declared as `Name<'a>: auto`, every key takes `"auto"` for its
//! default: DeepSpeed drops `"auto"` from the sections that are pydantic models.
//!
//! Reading never returns an error. The check that runs before has reported invalid values, which
//! are read as the default, so that further findings about a file do not depend on the first one.

use std::ops::Deref;

use crate::choice::Choice;
use crate::diagnosis::KeyLocation;
use crate::job_plan::AssistantOnlyLoss;
use crate::key::{Key, Kind, Literal};
use crate::key_path::join;
use crate::node::Node;
use crate::step_count::StepCount;

/// A section with a table of keys.
pub(crate) trait Section {
    /// The table.
    const KEYS: &'static [Key];
    /// The description of the section.
    const DOC: &'static str;
}

/// A type that the value of a key can be read as.
pub(crate) trait FromEntry<'a>: Sized {
    /// Returns the value that was given, or the default of the key.
    fn read(entry: &ConfigEntry<'a>) -> Self;
}

/// A key and its value in a document.
#[derive(Debug, Clone)]
pub(crate) struct ConfigEntry<'a> {
    /// The key.
    pub(crate) key: &'static Key,
    /// Its full path.
    pub(crate) path: String,
    written: Option<&'a Node>,
}

/// The key of a whole document.
// It accepts any value, because the check of a document has a message of its own.
static DOCUMENT: Key = Key::new(Kind::Free, Literal::Null);

impl<'a> ConfigEntry<'a> {
    /// Creates the entry of a whole document.
    pub(crate) fn document(node: &'a Node) -> Self {
        Self { key: &DOCUMENT, path: String::new(), written: Some(node) }
    }

    /// Returns the entry of `key` in this section, under any of its names.
    pub(crate) fn child(&self, key: &'static Key) -> Self {
        let section = self.given();
        let written = section.and_then(|node| key.names().find_map(|name| node.get(name)));
        Self { key, path: join(&self.path, key.name), written }
    }

    /// Returns the value, unless it is `null` or `"auto"`.
    pub(crate) fn given(&self) -> Option<&'a Node> {
        self.written.filter(|node| !node.is_null() && !node.is_auto())
    }

    /// Returns whether there is a value other than `null` and `"auto"`.
    pub(crate) fn is_given(&self) -> bool {
        self.given().is_some()
    }

    /// Returns whether the value is `"auto"`.
    pub(crate) fn is_auto(&self) -> bool {
        self.written.is_some_and(Node::is_auto)
    }

    /// Returns the given value, if it is of the key's kind.
    fn valid(&self) -> Option<&'a Node> {
        self.given().filter(|node| self.key.kind.accepts(node).is_ok())
    }
}

/// The value of a key, with its [`ConfigEntry`], to which it dereferences.
#[derive(Debug, Clone)]
pub(crate) struct Setting<'a, T> {
    /// The given value, or the default.
    pub(crate) value: T,
    entry: ConfigEntry<'a>,
}

impl<'a, T: FromEntry<'a>> Setting<'a, T> {
    /// Reads `key` of a section.
    pub(crate) fn read(section: &ConfigEntry<'a>, key: &'static Key) -> Self {
        let entry = section.child(key);
        Self { value: T::read(&entry), entry }
    }
}

impl<'a, T> Deref for Setting<'a, T> {
    type Target = ConfigEntry<'a>;

    fn deref(&self) -> &ConfigEntry<'a> {
        &self.entry
    }
}

impl From<&ConfigEntry<'_>> for KeyLocation {
    fn from(entry: &ConfigEntry<'_>) -> Self {
        Self { key: entry.path.clone(), at: entry.written.and_then(|node| node.at) }
    }
}

impl<T> From<&Setting<'_, T>> for KeyLocation {
    fn from(setting: &Setting<'_, T>) -> Self {
        Self::from(&setting.entry)
    }
}

/// A value that is read from a single node.
pub(crate) trait FromNode<'a>: Sized {
    /// Returns the value of a node that `kind` accepts.
    fn parse(node: &'a Node, kind: &Kind) -> Option<Self>;

    /// Returns the value of a default.
    fn of(default: Literal) -> Option<Self>;
}

impl<'a, T: FromNode<'a>> FromEntry<'a> for Option<T> {
    fn read(entry: &ConfigEntry<'a>) -> Self {
        entry.valid().and_then(|node| T::parse(node, &entry.key.kind))
    }
}

impl<'a, T: FromNode<'a>> FromEntry<'a> for T {
    fn read(entry: &ConfigEntry<'a>) -> Self {
        let value = Option::read(entry).or_else(|| T::of(entry.key.default));
        // The constructors in `spec` ensure that a key that is read as T has a default of type T.
        value.unwrap_or_else(|| unreachable!("{} has no default", entry.path))
    }
}

/// Implements [`FromNode`]: `[generics] Type: parse, default => value;`.
macro_rules! scalars {
    ($([$($generics:tt)*] $Scalar:ty: $parse:expr, $default:pat => $of:expr;)+) => {
        $(impl<'a, $($generics)*> FromNode<'a> for $Scalar {
            fn parse(node: &'a Node, kind: &Kind) -> Option<Self> {
                let parse: fn(&'a Node, &Kind) -> Option<Self> = $parse;
                parse(node, kind)
            }

            fn of(default: Literal) -> Option<Self> {
                let $default = default else { return None };
                $of
            }
        })+
    };
}

scalars! {
    [] bool: |node, _| node.as_flag(), Literal::Flag(flag) => Some(flag);
    [] AssistantOnlyLoss: |node, _| Some(match node.as_flag() {
        Some(false) => AssistantOnlyLoss::Off,
        Some(true) => AssistantOnlyLoss::Marked,
        None => AssistantOnlyLoss::Turns,
    }), Literal::Flag(false) => Some(AssistantOnlyLoss::Off);
    [] i64: |node, _| node.as_integer(), Literal::Integer(integer) => Some(integer);
    [] usize: |node, _| as_count(node), Literal::Integer(integer) => Some(to_count(integer));
    [] StepCount: |node, _| match as_count(node) {
        Some(steps) => Some(StepCount::Steps(steps)),
        None => node.as_real().map(StepCount::Ratio),
    }, Literal::Integer(integer) => Some(StepCount::Steps(to_count(integer)));
    [] f64: |node, _| as_real(node), Literal::Real(real) => Some(real);
    [const N: usize] [f64; N]: |node, _| {
        let numbers: Option<Vec<_>> = node.as_list()?.iter().map(Node::as_real).collect();
        numbers?.try_into().ok()
    }, Literal::Reals(reals) => reals.try_into().ok();
    // A name of a choice is returned in the spelling of the table.
    [] &'a str: |node, kind| {
        let text = node.as_text()?;
        let Kind::Choice(names) = kind else { return Some(text) };
        names.iter().find(|name| name.eq_ignore_ascii_case(text)).copied()
    }, Literal::Text(text) => Some(text);
    [T: Choice] T: |node, _| T::named(node.as_text()?), Literal::Text(name) => T::named(name);
}

/// A value that only a rule reads, with [`ConfigEntry::given`].
impl FromEntry<'_> for () {
    fn read(_: &ConfigEntry<'_>) -> Self {}
}

/// A list of integers, which are not negative because of the key's kind.
impl FromEntry<'_> for Option<Vec<usize>> {
    fn read(entry: &ConfigEntry<'_>) -> Self {
        entry.valid()?.as_list()?.iter().map(as_count).collect()
    }
}

/// A string or a list of strings.
impl<'a> FromEntry<'a> for Vec<&'a str> {
    fn read(entry: &ConfigEntry<'a>) -> Self {
        let Some(node) = entry.valid() else { return Vec::new() };
        let nodes = node.as_list().unwrap_or(std::slice::from_ref(node));
        nodes.iter().filter_map(Node::as_text).collect()
    }
}

/// A list of sections.
impl<'a, S: Section + FromEntry<'a>> FromEntry<'a> for Vec<S> {
    fn read(entry: &ConfigEntry<'a>) -> Self {
        let section = |(place, node)| ConfigEntry {
            key: entry.key,
            path: format!("{}[{place}]", entry.path),
            written: Some(node),
        };
        let nodes = entry.valid().and_then(Node::as_list).unwrap_or_default().iter().enumerate();
        nodes.map(|item| S::read(&section(item))).collect()
    }
}

/// Returns a node as a non-negative integer.
fn as_count(node: &Node) -> Option<usize> {
    node.as_integer().map(to_count)
}

/// Converts a count, which is at least 0 because of its kind. On a 32-bit machine, it is capped.
fn to_count(integer: i64) -> usize {
    usize::try_from(integer.max(0)).unwrap_or(usize::MAX)
}

/// Returns a number, or the only number of a list.
fn as_real(node: &Node) -> Option<f64> {
    node.as_list().map_or(Some(node), <[Node]>::first)?.as_real()
}

/// Declares sections: see [the module](self).
macro_rules! section {
    ($(#[doc = $about:literal])+ $vis:vis struct $Section:ident<$a:lifetime> $(: $all:ident)? {
        $($(#[doc = $doc:literal])* $name:ident $(as $key:literal)? $(: $Type:ty)? = $spec:expr,)*
    } $($rest:tt)*) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone)]
        $vis struct $Section<$a> {
            $($(pub(crate) $name: $crate::section::Setting<$a, $Type>,)?)*
        }

        impl<$a> $crate::section::Section for $Section<$a> {
            const KEYS: &'static [$crate::key::Key] = &$crate::section::keys!($($all)? [$($crate::section::key!(
                [$($doc)*] $name $(as $key)?, [$($Type)?], $spec
            )),*]);
            const DOC: &'static str = concat!($($about),+).trim_ascii_start();
        }

        impl<$a> $crate::section::FromEntry<$a> for $Section<$a> {
            #[allow(unused_variables)]
            fn read(entry: &$crate::section::ConfigEntry<$a>) -> Self {
                // A key without a type also has a variable, which is not used.
                let [$($name),*] = <Self as $crate::section::Section>::KEYS else {
                    unreachable!("the table has one row for each name")
                };
                Self { $($($name: <$crate::section::Setting<$a, $Type>>::read(entry, $name),)?)* }
            }
        }

        $crate::section::section!($($rest)*);
    };
    ($(#[doc = $about:literal])+ $vis:vis enum $Section:ident $(: $all:ident)? {
        $($(#[doc = $doc:literal])* $name:ident $(as $key:literal)? = $spec:expr,)*
    } $($rest:tt)*) => {
        $(#[doc = $about])+
        $vis enum $Section {}

        impl $crate::section::Section for $Section {
            const KEYS: &'static [$crate::key::Key] = &$crate::section::keys!($($all)? [
                $($crate::section::key!([$($doc)*] $name $(as $key)?, [], $spec)),*
            ]);
            const DOC: &'static str = concat!($($about),+).trim_ascii_start();
        }

        $crate::section::section!($($rest)*);
    };
    () => {};
}

/// Creates the key table of [`section!`]. In a section that is declared `: auto`, all keys take
/// `"auto"`.
macro_rules! keys {
    ([$($key:expr),* $(,)?]) => { [$($key),*] };
    (auto [$($key:expr),* $(,)?]) => { $crate::spec::all_auto([$($key),*]) };
}

/// Declares one key of [`section!`]. If a type is given, it must be the spec's type.
macro_rules! key {
    ([$($doc:literal)*] $name:ident, $Type:tt, $spec:expr) => {
        $crate::section::key!([$($doc)*] $name as (stringify!($name)), $Type, $spec)
    };
    ([$($doc:literal)*] $name:ident as $key:tt, [], $spec:expr) => {
        $spec.named($key, concat!($($doc),*))
    };
    ([$($doc:literal)*] $name:ident as $key:tt, [$Type:ty], $spec:expr) => {{
        let spec: $crate::spec::Spec<$Type> = $spec;
        spec.named($key, concat!($($doc),*))
    }};
}

/// Creates a plan: `filled!(Plan, section { a, b } c: 3)` sets the fields `a` and `b` to the values
/// of the section's keys with these names.
macro_rules! filled {
    ($($Plan:ident)::+, $section:ident { $($key:ident),+ $(,)? } $($field:ident $(: $value:expr)?),* $(,)?) => {
        $($Plan)::+ { $($key: $section.$key.value,)+ $($field $(: $value)?,)* }
    };
}

pub(crate) use {filled, key, keys, section};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::WarmupShape as Shape;
    use crate::range::Reals;
    use crate::spec::{choice, count, opt_positive, per_group};

    section! {
        /// A section.
        struct Sizes<'a> {
            size: usize = count(5).alias("old_size").auto(),
            limit: Option<usize> = opt_positive(),
            lr: f64 = per_group(Reals::Any, 0.5),
            shape as "Shape": Shape = choice("log"),
        }
    }

    fn read<T>(json: &str, read: impl FnOnce(Sizes<'_>) -> T) -> T {
        let origin = crate::source::SourceName { document: "test", name: "test" };
        let node = crate::source::parse_json(json, origin).unwrap();
        read(Sizes::read(&ConfigEntry::document(&node)))
    }

    #[test]
    fn every_name_is_read_and_absence_is_the_default() {
        assert_eq!(read("{\"old_size\": 7e0}", |s| s.size.value), 7);
        assert_eq!(read("{\"size\": 8}", |s| s.size.value), 8);
        assert_eq!(read("{}", |s| s.size.value), 5);
        assert_eq!(read("{\"size\": null}", |s| s.size.value), 5);
        assert_eq!(read("{\"lr\": [0.25]}", |s| s.lr.value), 0.25);
        assert_eq!(read("{}", |s| s.shape.value), Shape::Log);
        assert_eq!(read("{\"Shape\": \"Linear\"}", |s| s.shape.value), Shape::Linear);
    }

    #[test]
    fn auto_is_neither_given_nor_an_error() {
        read("{\"size\": \"auto\"}", |section| {
            assert!(section.size.is_auto() && section.size.given().is_none());
            assert_eq!(section.size.value, 5);
        });
    }

    #[test]
    fn values_that_break_a_rule_read_as_the_default() {
        let values = read("{\"size\": -1, \"limit\": 0}", |s| (s.size.value, s.limit.value));
        assert_eq!(values, (5, None));
    }

    #[test]
    fn a_declaration_is_a_table_too() {
        let [size, limit, lr, shape] = Sizes::KEYS else { panic!("{:?}", Sizes::KEYS) };
        assert_eq!((size.name, shape.name, Sizes::DOC), ("size", "Shape", "A section."));
        assert!(size.is_called("old_size") && size.auto && !limit.auto);
        assert_eq!((limit.default, lr.default), (Literal::Null, Literal::Real(0.5)));
    }
}
