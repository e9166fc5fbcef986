//! The right-hand sides of a [`section!`](crate::section::section) declaration: kind, range and default of a key.
//!
//! A [`Spec<T>`] is a [`Key`] without a name whose values read as `T`. Because each constructor here fixes kind,
//! default and type together, a field of another type than its key does not compile.

use std::marker::PhantomData;

use crate::choice::Choice;
use crate::key::{Key, Literal, Spelling, Status, Trigger};
use crate::kind::{Integers, Kind, Reals, Variant};
use crate::section::Section;

/// A key that has no name yet, whose values read as `T`.
pub(crate) struct Spec<T> {
    key: Key,
    value: PhantomData<fn() -> T>,
}

/// A flag.
pub(crate) const fn flag(default: bool) -> Spec<bool> {
    Spec::new(Kind::Flag, Literal::Flag(default))
}

/// A flag without a default.
pub(crate) const fn opt_flag() -> Spec<Option<bool>> {
    Spec::new(Kind::Flag, Literal::Null)
}

/// An integer of at least 0.
pub(crate) const fn count(default: i64) -> Spec<usize> {
    count_in(0, i64::MAX, default)
}

/// An integer of at least 1.
pub(crate) const fn positive(default: i64) -> Spec<usize> {
    count_in(1, i64::MAX, default)
}

/// An integer from `min`, which is at least 0, to `max`.
pub(crate) const fn count_in(min: i64, max: i64, default: i64) -> Spec<usize> {
    Spec::new(Kind::Integer(Integers { min, max }), Literal::Integer(default))
}

/// An integer of at least 0, without a default.
pub(crate) const fn opt_count() -> Spec<Option<usize>> {
    opt_count_in(0, i64::MAX)
}

/// An integer of at least 1, without a default.
pub(crate) const fn opt_positive() -> Spec<Option<usize>> {
    opt_count_in(1, i64::MAX)
}

/// An integer from `min`, which is at least 0, to `max`, without a default.
pub(crate) const fn opt_count_in(min: i64, max: i64) -> Spec<Option<usize>> {
    Spec::new(Kind::Integer(Integers { min, max }), Literal::Null)
}

/// An integer from `min` to `max`.
pub(crate) const fn integer_in(min: i64, max: i64, default: i64) -> Spec<i64> {
    Spec::new(Kind::Integer(Integers { min, max }), Literal::Integer(default))
}

/// Any integer.
pub(crate) const fn integer(default: i64) -> Spec<i64> {
    integer_in(i64::MIN, i64::MAX, default)
}

/// Any integer, without a default.
pub(crate) const fn opt_integer() -> Spec<Option<i64>> {
    Spec::new(Kind::Integer(Integers::ANY), Literal::Null)
}

/// A list of integers of at least 1, without a default.
pub(crate) const fn opt_positives() -> Spec<Option<Vec<usize>>> {
    Spec::new(Kind::Integers(Integers::POSITIVE), Literal::Null)
}

/// A number.
pub(crate) const fn real(range: Reals, default: f64) -> Spec<f64> {
    Spec::new(Kind::Real(range), Literal::Real(default))
}

/// A number without a default.
pub(crate) const fn opt_real(range: Reals) -> Spec<Option<f64>> {
    Spec::new(Kind::Real(range), Literal::Null)
}

/// A number, or a list of one.
pub(crate) const fn per_group(range: Reals, default: f64) -> Spec<f64> {
    Spec::new(Kind::PerGroup(range), Literal::Real(default))
}

/// A number or a list of one, without a default.
pub(crate) const fn opt_per_group(range: Reals) -> Spec<Option<f64>> {
    Spec::new(Kind::PerGroup(range), Literal::Null)
}

/// Two numbers.
pub(crate) const fn pair(range: Reals, default: [f64; 2]) -> Spec<[f64; 2]> {
    Spec::new(Kind::Pair(range), Literal::Pair(default))
}

/// Two numbers, without a default.
pub(crate) const fn opt_pair(range: Reals) -> Spec<Option<[f64; 2]>> {
    Spec::new(Kind::Pair(range), Literal::Null)
}

/// Three numbers.
pub(crate) const fn triple(range: Reals, default: [f64; 3]) -> Spec<[f64; 3]> {
    Spec::new(Kind::Triple(range), Literal::Triple(default))
}

/// A string.
pub(crate) const fn text<'a>(default: &'static str) -> Spec<&'a str> {
    Spec::new(Kind::Text, Literal::Text(default))
}

/// A string without a default.
pub(crate) const fn opt_text<'a>() -> Spec<Option<&'a str>> {
    Spec::new(Kind::Text, Literal::Null)
}

/// A string or a list of strings; none without it.
pub(crate) const fn texts<'a>() -> Spec<Vec<&'a str>> {
    Spec::new(Kind::Texts, Literal::Null)
}

/// One of the names of `T`.
pub(crate) const fn choice<T: Choice>(default: &'static str) -> Spec<T> {
    Spec::new(Kind::Choice(T::NAMES), Literal::Text(default))
}

/// One of the names of `T`, without a default.
pub(crate) const fn opt_choice<T: Choice>() -> Spec<Option<T>> {
    Spec::new(Kind::Choice(T::NAMES), Literal::Null)
}

/// One of some strings.
pub(crate) const fn one_of<'a>(
    names: &'static [&'static str],
    default: &'static str,
) -> Spec<&'a str> {
    Spec::new(Kind::Choice(names), Literal::Text(default))
}

/// One of some strings, without a default.
pub(crate) const fn opt_one_of<'a>(names: &'static [&'static str]) -> Spec<Option<&'a str>> {
    Spec::new(Kind::Choice(names), Literal::Null)
}

/// A section. Its doc is that of `S` unless the declaration has another.
pub(crate) const fn section<S: Section>() -> Spec<S> {
    Spec::new(Kind::Section(S::KEYS), Literal::Null).doc(S::DOC)
}

/// A list of sections.
pub(crate) const fn sections<S: Section>() -> Spec<Vec<S>> {
    Spec::new(Kind::Sections(S::KEYS), Literal::Null).doc(S::DOC)
}

/// A section whose keys depend on the `type` beside it. The variant's section reads it.
pub(crate) const fn variants(variants: &'static [Variant]) -> Spec<()> {
    Spec::new(Kind::Variants(variants), Literal::Null)
}

/// A list of anything; a rule reads it.
pub(crate) const fn list() -> Spec<()> {
    Spec::new(Kind::List, Literal::Null)
}

/// Anything; a rule reads it.
pub(crate) const fn free() -> Spec<()> {
    Spec::of(Kind::Free)
}

impl<T> Spec<T> {
    const fn new(kind: Kind, default: Literal) -> Self {
        let key = Key {
            name: "",
            spellings: &[],
            kind,
            default,
            unit: "",
            doc: "",
            status: Status::Honoured,
            auto: false,
            required: false,
            stages: (0, 3),
        };
        Self { key, value: PhantomData }
    }

    /// A key of this kind without a default, which no section reads.
    pub(crate) const fn of(kind: Kind) -> Self {
        Self::new(kind, Literal::Null)
    }

    /// Sets the default, of a key that no section reads.
    pub(crate) const fn or(mut self, default: Literal) -> Self {
        self.key.default = default;
        self
    }

    /// Sets the doc of a key that several sections have.
    pub(crate) const fn doc(mut self, doc: &'static str) -> Self {
        self.key.doc = doc;
        self
    }

    /// Sets other names.
    pub(crate) const fn spelled(mut self, spellings: &'static [Spelling]) -> Self {
        self.key.spellings = spellings;
        self
    }

    /// Sets the unit.
    pub(crate) const fn unit(mut self, unit: &'static str) -> Self {
        self.key.unit = unit;
        self
    }

    /// Allows `"auto"`.
    pub(crate) const fn auto(mut self) -> Self {
        self.key.auto = true;
        self
    }

    /// Sets the ZeRO stages at which the key has an effect.
    pub(crate) const fn at_stages(mut self, first: u8, last: u8) -> Self {
        self.key.stages = (first, last);
        self
    }

    /// Accepted, and changes nothing.
    pub(crate) const fn inert(mut self, why: &'static str) -> Self {
        self.key.status = Status::Inert(why);
        self
    }

    /// Ignored, as DeepSpeed ignores it.
    pub(crate) const fn ignored(mut self, why: &'static str) -> Self {
        self.key.status = Status::Ignored(why);
        self
    }

    /// Refused where a value asks for a feature that does not exist.
    pub(crate) const fn unavailable(
        mut self,
        feature: &'static str,
        trigger: Trigger,
        remedy: &'static str,
    ) -> Self {
        self.key.status = Status::Unavailable { feature, trigger, remedy };
        self
    }

    /// Never allowed.
    pub(crate) const fn refused(mut self, why: &'static str, remedy: &'static str) -> Self {
        self.key.status = Status::Refused { why, remedy };
        self
    }

    /// The key of this name. An empty doc leaves that of [`Spec::doc`].
    pub(crate) const fn named(self, name: &'static str, doc: &'static str) -> Key {
        let doc = if doc.is_empty() { self.key.doc } else { doc.trim_ascii_start() };
        Key { name, doc, ..self.key }
    }
}

impl<T> Spec<Option<T>> {
    /// Must be given.
    pub(crate) const fn required(mut self) -> Self {
        self.key.required = true;
        self
    }
}
