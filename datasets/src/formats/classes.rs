//! Converts the labels of rows to classes. Numbers are kept, and names are numbered in sorted
//! order.
//!
//! Main type: [`Classes`]. The labels of the train split determine whether labels are numbers or
//! names, and the other splits must use the same kind. Names become classes in the order of their
//! Unicode code points, so the order depends only on the names, and not on the order of the rows,
//! the split or the rank.

use std::collections::BTreeMap;

use crate::Result;
use crate::formats::table::{Label, TableRow, quoted};

/// The largest number of class names. A column with more of them probably contains ids.
const MAX_NAMES: usize = 1 << 16;

/// The meaning of the labels of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Classes {
    /// Labels are class numbers.
    Numbers {
        /// The number of classes, if it is known.
        count: Option<usize>,
    },
    /// Labels are class numbers, and other splits may only have those that the train split can
    /// have.
    NumbersBelow {
        /// The highest number of the train split plus one.
        count: usize,
    },
    /// Labels are names; the class of a name is its position.
    Names(Vec<String>),
    /// Labels are numbers to predict.
    Values {
        /// The number of them in each row.
        count: usize,
    },
}

impl Classes {
    /// Returns the names if labels are names.
    pub fn names(&self) -> Option<&[String]> {
        match self {
            Self::Names(names) => Some(names),
            Self::Numbers { .. } | Self::NumbersBelow { .. } | Self::Values { .. } => None,
        }
    }
}

/// Where the known classes are from, for errors about a label that is not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassesOrigin<'a> {
    /// The split, key or file that has the classes.
    pub place: &'a str,
    /// What to do if a label that is not among them is correct.
    pub remedy: &'a str,
}

impl ClassesOrigin<'static> {
    /// The labels of the train split.
    pub const TRAIN_SPLIT: Self =
        Self { place: "the train split", remedy: "train with rows of it" };
}

/// Converts the labels of rows to classes.
pub(crate) struct ClassReader<'a> {
    /// The meaning of the labels, as far as it is known.
    mapping: Mapping,
    /// The first row with a label, for the error about a label of the other kind.
    first: Option<String>,
    /// Where known classes are from.
    origin: ClassesOrigin<'a>,
}

/// How labels are converted to classes.
enum Mapping {
    /// Undecided until the first label. `names` are the known class names.
    Undecided {
        names: Option<Vec<String>>,
    },
    Numbers {
        count: Option<usize>,
    },
    /// Numbers below the number of classes of the train split.
    NumbersBelow {
        count: usize,
    },
    /// A fixed set of names and their classes.
    Names(BTreeMap<String, u32>),
    /// Names in the order of their first row.
    Collected(BTreeMap<String, u32>),
}

impl<'a> ClassReader<'a> {
    /// Creates a reader for the train split, whose labels determine the kind. `names` are the class
    /// names, if they are known from `origin`.
    pub(crate) fn deciding(names: Option<&[String]>, origin: ClassesOrigin<'a>) -> Self {
        let names = names.map(<[String]>::to_vec);
        Self { mapping: Mapping::Undecided { names }, first: None, origin }
    }

    /// Creates a reader for another split. Its labels must be of the kind of `classes`, which are
    /// from `origin`, and known if the classes are.
    pub(crate) fn following(classes: &Classes, origin: ClassesOrigin<'a>) -> Self {
        let mapping = match classes {
            Classes::Numbers { count } => Mapping::Numbers { count: *count },
            Classes::NumbersBelow { count } => Mapping::NumbersBelow { count: *count },
            Classes::Values { .. } => Mapping::Numbers { count: None },
            Classes::Names(names) => Mapping::Names(numbered(names)),
        };
        Self { mapping, first: None, origin }
    }

    /// Returns the class of the label in column `at`. Classes of collected names are preliminary
    /// until [`Self::finish`].
    pub(crate) fn class(&mut self, row: &TableRow<'_>, at: usize) -> Result<u32> {
        self.class_of(row.label(at)?, row, at)
    }

    /// Returns the class of `label`, which is in column `at`, like [`Self::class`].
    pub(crate) fn class_of(&mut self, label: Label, row: &TableRow<'_>, at: usize) -> Result<u32> {
        if let Mapping::Undecided { names } = &mut self.mapping {
            self.mapping = match (&label, names.take()) {
                // The first label decides. If it is a number, known names only tell how many
                // classes there are.
                (Label::Number(_), names) => Mapping::Numbers { count: names.map(|it| it.len()) },
                (Label::Name(_), Some(names)) => Mapping::Names(numbered(&names)),
                (Label::Name(_), None) => Mapping::Collected(BTreeMap::new()),
            };
            self.first = Some(row.place());
        }
        let reason = match (&mut self.mapping, label) {
            (Mapping::Numbers { count }, Label::Number(number)) => match count {
                Some(count) if number as usize >= *count => {
                    let ClassesOrigin { place, remedy } = self.origin;
                    format!(
                        "{number}, an unknown class; the classes of {place} are below {count}; correct the label, or {remedy}"
                    )
                }
                _ => return Ok(number),
            },
            (Mapping::NumbersBelow { count }, Label::Number(number)) => {
                if (number as usize) < *count {
                    return Ok(number);
                }
                format!(
                    "{number}, an unknown class; the classes of the train split are below {count}; train with rows of class {number}, or set the number of classes (model.config.num_labels, or num_classes for an encoder) to {} or more",
                    u64::from(number) + 1
                )
            }
            (Mapping::Names(classes), Label::Name(name)) => match classes.get(&name) {
                Some(class) => return Ok(*class),
                None => unknown(&name, classes, self.origin),
            },
            (Mapping::Collected(classes), Label::Name(name)) => {
                let next = classes.len() as u32;
                let class = *classes.entry(name).or_insert(next);
                // The name is already counted here, so that exactly `MAX_NAMES` are allowed.
                if classes.len() <= MAX_NAMES {
                    return Ok(class);
                }
                format!("one of more than {MAX_NAMES} names; choose the label column")
            }
            (Mapping::Numbers { .. } | Mapping::NumbersBelow { .. }, Label::Name(name)) => {
                self.mixed(&format!("{}, a name", quoted(&name)), "a class number")
            }
            (_, Label::Number(number)) => {
                self.mixed(&format!("{number}, a class number"), "a name")
            }
            (Mapping::Undecided { .. }, Label::Name(_)) => unreachable!("the first label decides"),
        };
        Err(row.invalid(at, reason))
    }

    /// Returns whether the labels are class numbers.
    pub(crate) fn has_numbers(&self) -> bool {
        matches!(self.mapping, Mapping::Numbers { .. } | Mapping::NumbersBelow { .. })
    }

    /// Describes a name among class numbers, or a class number among names.
    fn mixed(&self, found: &str, others: &str) -> String {
        let others = match &self.first {
            Some(place) => format!("the label of {place} is {others}"),
            None => format!("a label of the train split is {others}"),
        };
        format!("{found}, but {others}; use one kind for all labels")
    }

    /// Returns the classes of the data set, and replaces preliminary classes in `labels` by the
    /// classes in sorted order.
    pub(crate) fn finish<'l>(self, labels: impl Iterator<Item = &'l mut u32>) -> Classes {
        match self.mapping {
            Mapping::Undecided { .. } => Classes::Numbers { count: None },
            Mapping::Numbers { count } => Classes::Numbers { count },
            Mapping::NumbersBelow { count } => Classes::NumbersBelow { count },
            Mapping::Names(classes) => {
                // The map is sorted by name, but known names may have classes in any order.
                let mut names: Vec<_> = classes.into_iter().collect();
                names.sort_by_key(|(_, class)| *class);
                Classes::Names(names.into_iter().map(|(name, _)| name).collect())
            }
            Mapping::Collected(classes) => {
                // `sorted[preliminary]` is the final class: the map iterates in the order of names.
                let mut sorted = vec![0; classes.len()];
                for (class, preliminary) in (0..).zip(classes.values()) {
                    sorted[*preliminary as usize] = class;
                }
                labels.for_each(|label| *label = sorted[*label as usize]);
                Classes::Names(classes.into_keys().collect())
            }
        }
    }
}

/// Numbers the names in their order.
fn numbered(names: &[String]) -> BTreeMap<String, u32> {
    names.iter().cloned().zip(0..).collect()
}

/// Describes a name that is not a known class.
fn unknown(name: &str, classes: &BTreeMap<String, u32>, origin: ClassesOrigin<'_>) -> String {
    let ClassesOrigin { place, remedy } = origin;
    let (name, count) = (quoted(name), classes.len());
    let shown: Vec<_> = classes.keys().take(8).map(|name| quoted(name)).collect();
    let (rest, shown) = (if count > shown.len() { ", ..." } else { "" }, shown.join(", "));
    format!(
        "{name}, an unknown class; classes of {place}: {count} [{shown}{rest}]; correct the label, or {remedy}"
    )
}
