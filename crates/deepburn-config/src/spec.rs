//! The right-hand sides of a [`section!`](crate::section::section) declaration: kind, range and
//! default of a key.
//!
//! A [`Spec<T>`] is a [`Key`] without a name, whose values are read as `T`. Each constructor sets
//! the kind, the default and the type together, so a field whose type differs from its key does not
//! compile.
//!
//! Methods set the other properties of a key: its unit, `"auto"`, other names, the stages at which
//! it has an effect, and its status if it is not supported. The names that declarations use are
//! re-exported here, so that a file of declarations only imports this module.

use std::marker::PhantomData;

use crate::choice::Choice;
use crate::job_plan::AssistantOnlyLoss;
pub(crate) use crate::key::Trigger::{AnyEnabled, Differs, Enabled, NotEmpty, NotOneOf, Present};
use crate::key::{Key, Status, Trigger};
pub(crate) use crate::key::{Kind, Literal, SectionVariant};
pub(crate) use crate::range::Reals::{Any, Decay, Fraction, NotNegative, Positive};
use crate::range::{Integers, Reals};
pub(crate) use crate::section::{Section, section};
use crate::step_count::StepCount;

/// A key without a name, whose values are read as `T`.
pub(crate) struct Spec<T> {
    key: Key,
    value: PhantomData<fn() -> T>,
}

/// Declares constructors: `name(arguments): type of the value = kind, default;`.
macro_rules! constructors {
    ($(#[doc = $doc:literal] $name:ident $([$($generic:tt)+])? ($($arg:ident: $Arg:ty),*): $Value:ty
        = $kind:expr, $default:expr;)+) => {
        $(#[doc = $doc]
        pub(crate) const fn $name $(<$($generic)+>)? ($($arg: $Arg),*) -> Spec<$Value> {
            Spec::new($kind, $default)
        })+
    };
}

/// Integers from `min` to `max`.
const fn from_to(min: i64, max: i64) -> Kind {
    Kind::Integer(Integers { min, max })
}

/// At least 0.
const COUNT: Kind = Kind::Integer(Integers::COUNT);
/// At least 1.
const POSITIVE: Kind = Kind::Integer(Integers::POSITIVE);
/// Any integer.
const INTEGER: Kind = Kind::Integer(Integers::ANY);

// Keys of constructors that begin with `opt` have no default: their value is `None` if it is not
// given.
constructors! {
    /// A flag.
    flag(default: bool): bool = Kind::Flag, Literal::Flag(default);
    /// A flag without a default.
    opt_flag(): Option<bool> = Kind::Flag, Literal::Null;
    /// An integer of at least 0.
    count(default: i64): usize = COUNT, Literal::Integer(default);
    /// An integer of at least 0, without a default.
    opt_count(): Option<usize> = COUNT, Literal::Null;
    /// An integer of at least 1.
    positive(default: i64): usize = POSITIVE, Literal::Integer(default);
    /// An integer of at least 1, without a default.
    opt_positive(): Option<usize> = POSITIVE, Literal::Null;
    /// An integer from `min`, which is at least 0, to `max`.
    count_in(min: i64, max: i64, default: i64): usize = from_to(min, max), Literal::Integer(default);
    /// An integer from `min`, which is at least 0, to `max`, without a default.
    opt_count_in(min: i64, max: i64): Option<usize> = from_to(min, max), Literal::Null;
    /// Any integer.
    integer(default: i64): i64 = INTEGER, Literal::Integer(default);
    /// Any integer, without a default.
    opt_integer(): Option<i64> = INTEGER, Literal::Null;
    /// An integer from `min` to `max`.
    integer_in(min: i64, max: i64, default: i64): i64 = from_to(min, max), Literal::Integer(default);
    /// A number of steps from `min`, or a ratio of the steps of the run, without a default.
    opt_steps(min: i64): Option<StepCount> = Kind::Steps(Integers { min, max: i64::MAX }), Literal::Null;
    /// A list of integers of at least 1, without a default.
    opt_positives(): Option<Vec<usize>> = Kind::Integers(Integers::POSITIVE), Literal::Null;
    /// A number.
    real(range: Reals, default: f64): f64 = Kind::Real(range), Literal::Real(default);
    /// A number without a default.
    opt_real(range: Reals): Option<f64> = Kind::Real(range), Literal::Null;
    /// A number, or a list of one.
    per_group(range: Reals, default: f64): f64 = Kind::PerGroup(range), Literal::Real(default);
    /// A number or a list of one, without a default.
    opt_per_group(range: Reals): Option<f64> = Kind::PerGroup(range), Literal::Null;
    /// Two numbers.
    pair(range: Reals, default: &'static [f64; 2]): [f64; 2] = Kind::Tuple(2, range), Literal::Reals(default);
    /// Two numbers, without a default.
    opt_pair(range: Reals): Option<[f64; 2]> = Kind::Tuple(2, range), Literal::Null;
    /// Three numbers.
    triple(range: Reals, default: &'static [f64; 3]): [f64; 3] = Kind::Tuple(3, range), Literal::Reals(default);
    /// A string.
    text['a](default: &'static str): &'a str = Kind::Text, Literal::Text(default);
    /// A string without a default.
    opt_text['a](): Option<&'a str> = Kind::Text, Literal::Null;
    /// A string that no number stands for, without a default.
    opt_text_of['a](what: &'static str): Option<&'a str> = Kind::TextOf(what), Literal::Null;
    /// A split of the data, without a default.
    opt_split['a](): Option<&'a str> = Kind::Split, Literal::Null;
    /// A string or a list of strings; empty if it is not given.
    texts['a](): Vec<&'a str> = Kind::Texts, Literal::Null;
    /// A flag, or the answers that are found by rendering turns.
    answers(): AssistantOnlyLoss = Kind::FlagOr(AssistantOnlyLoss::TURNS), Literal::Flag(false);
    /// One of the names of `T`.
    choice[T: Choice](default: &'static str): T = Kind::Choice(T::NAMES), Literal::Text(default);
    /// One of the names of `T`, without a default.
    opt_choice[T: Choice](): Option<T> = Kind::Choice(T::NAMES), Literal::Null;
    /// One of several strings.
    one_of['a](names: &'static [&'static str], default: &'static str): &'a str
        = Kind::Choice(names), Literal::Text(default);
    /// One of several strings, without a default.
    opt_one_of['a](names: &'static [&'static str]): Option<&'a str> = Kind::Choice(names), Literal::Null;
    /// A section whose keys depend on the key `type` next to it. The variant's section reads it.
    variants(variants: &'static [SectionVariant]): () = Kind::Variants(variants), Literal::Null;
    /// A list of any values, which a rule reads.
    list(): () = Kind::List, Literal::Null;
    /// A list of strings, which a rule reads.
    text_list(): () = Kind::TextList, Literal::Null;
    /// Any value, which a rule reads.
    free(): () = Kind::Free, Literal::Null;
}

/// A section. Its doc is `S::DOC` unless the declaration has another.
pub(crate) const fn section<S: Section>() -> Spec<S> {
    Spec::new(Kind::Section(S::KEYS), Literal::Null).doc(S::DOC)
}

/// A section of an unsupported feature, which `enabled: true` requests.
pub(crate) const fn switched_off<S: Section>(
    feature: &'static str,
    remedy: &'static str,
) -> Spec<S> {
    section().unavailable(feature, Enabled, remedy)
}

/// A flag that must have its default, because the other value requests an unsupported feature.
pub(crate) const fn fixed(default: bool, feature: &'static str) -> Spec<bool> {
    let remedy = if default { "set it to true" } else { "set it to false" };
    flag(default).unavailable(feature, Differs, remedy)
}

/// A key of an unsupported feature, which any value except `null` and `false` requests.
pub(crate) const fn absent(feature: &'static str) -> Spec<()> {
    free().unavailable(feature, Present, "remove it")
}

/// Returns the keys, each of which takes `"auto"`.
pub(crate) const fn all_auto<const N: usize>(mut keys: [Key; N]) -> [Key; N] {
    let mut at = 0;
    // Constant functions cannot use iterators.
    while at < N {
        keys[at].auto = true;
        at += 1;
    }
    keys
}

/// Declares keys that several sections have, each with its doc.
macro_rules! shared {
    ($($(#[doc = $doc:literal])+ $vis:vis $name:ident: $Type:ty = $spec:expr;)+) => {
        $($(#[doc = $doc])+
        $vis const $name: $crate::spec::Spec<$Type> = {
            let spec: $crate::spec::Spec<$Type> = $spec;
            spec.doc(concat!($($doc),+))
        };)+
    };
}

pub(crate) use shared;

/// A list of sections.
pub(crate) const fn sections<S: Section>() -> Spec<Vec<S>> {
    Spec::new(Kind::Sections(S::KEYS), Literal::Null).doc(S::DOC)
}

impl<T> Spec<T> {
    /// Creates the specification of a supported key.
    const fn new(kind: Kind, default: Literal) -> Self {
        Self { key: Key::new(kind, default), value: PhantomData }
    }

    /// Creates a key of this kind without a default, which no section reads.
    pub(crate) const fn of(kind: Kind) -> Self {
        Self::new(kind, Literal::Null)
    }

    /// Sets the doc of a key that several sections have.
    pub(crate) const fn doc(mut self, doc: &'static str) -> Self {
        self.key.doc = doc.trim_ascii_start();
        self
    }

    /// Returns the key with this name. If `doc` is empty, the text of [`Spec::doc`] is kept.
    pub(crate) const fn named(self, name: &'static str, doc: &'static str) -> Key {
        // The text of a doc comment starts with the space after `///`.
        let doc = if doc.is_empty() { self.key.doc } else { doc.trim_ascii_start() };
        Key { name, doc, ..self.key }
    }
}

impl<T> Spec<Option<T>> {
    /// Makes the key required.
    pub(crate) const fn required(mut self) -> Self {
        self.key.default = Literal::Required;
        self
    }
}

/// Declares methods that set one field of the key: `name(arguments) field = value;`.
macro_rules! setters {
    ($(#[doc = $doc:literal] $name:ident($($arg:ident: $Arg:ty),*) $field:ident = $value:expr;)+) => {
        impl<T> Spec<T> {
            $(#[doc = $doc]
            pub(crate) const fn $name(mut self $(, $arg: $Arg)*) -> Self {
                self.key.$field = $value;
                self
            })+
        }
    };
}

setters! {
    /// Sets the default, of a key that no section reads.
    or(literal: Literal) default = literal;
    /// Names the default in other cases, for remedies: "1024 for chat".
    or_else(cases: &'static str) other_default = cases;
    /// Sets another accepted name.
    alias(name: &'static str) alias = name;
    /// Sets a deprecated name, which is accepted with a warning.
    outdated(name: &'static str) outdated = name;
    /// Sets the unit.
    unit(unit: &'static str) unit = unit;
    /// Allows `"auto"`.
    auto() auto = true;
    /// Sets the ZeRO stages at which the key has an effect.
    at_stages(first: u8, last: u8) stages = (first, last);
    /// Marks a key that DeepSpeed 0.19.8 rejects.
    removed() removed = true;
    /// Accepts the key without an effect.
    inert(why: &'static str) status = Status::Inert(why);
    /// Ignores the key, as DeepSpeed does.
    ignored(why: &'static str) status = Status::Ignored(why);
    /// Reports a value that requests an unsupported feature as an error.
    unavailable(feature: &'static str, trigger: Trigger, remedy: &'static str)
        status = Status::Unavailable { feature, trigger, remedy };
    /// Reports every value as an error.
    refused(why: &'static str, remedy: &'static str) status = Status::Refused { why, remedy };
}
