//! Classes of labelled rows: numbers as they are, or names in sorted order.
//!
//! Main type: [`Classes`]. The labels of the train split decide which of the two they are; other splits
//! must follow it. Names become classes in the order of their Unicode code points, so the order depends
//! only on the names, and not on the order of the rows, the split or the rank.

use std::collections::BTreeMap;

use crate::formats::table::{Label, Row, quoted};
use crate::{DataError, LabelledText};

/// The most names that can be classes. A column with more of them probably contains ids, not labels.
const MOST_NAMES: usize = 1 << 16;

/// What the labels of a data set stand for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Classes {
    /// Labels are class numbers.
    Numbers {
        /// They are below it, where it is known.
        count: Option<usize>,
    },
    /// Labels are names; the class of a name is its position.
    Names(Vec<String>),
}

impl Classes {
    /// The names, where labels are names.
    pub fn names(&self) -> Option<&[String]> {
        match self {
            Self::Names(names) => Some(names),
            Self::Numbers { .. } => None,
        }
    }
}

/// Turns the labels of rows into classes.
pub(crate) struct ClassReader {
    kind: Kind,
    /// The first row with a label, for the error of one of the other kind.
    first: Option<String>,
}

enum Kind {
    /// The first label decides; the names that it may have, where they are given.
    Open {
        names: Option<Vec<String>>,
    },
    Numbers {
        count: Option<usize>,
    },
    /// Classes of names, which cannot become more.
    Names(BTreeMap<String, u32>),
    /// Names in the order in which they were found.
    Found(BTreeMap<String, u32>),
}

impl ClassReader {
    /// For rows that decide what labels stand for; `names` are those of all classes, if there are some.
    pub(crate) fn deciding(names: Option<&[String]>) -> Self {
        Self { kind: Kind::Open { names: names.map(<[String]>::to_vec) }, first: None }
    }

    /// For rows whose labels stand for what `classes` says.
    pub(crate) fn following(classes: &Classes) -> Self {
        let kind = match classes {
            Classes::Numbers { count } => Kind::Numbers { count: *count },
            Classes::Names(names) => Kind::Names(numbered(names)),
        };
        Self { kind, first: None }
    }

    /// The class of the label in column `at`; one that was found is preliminary until [`Self::finish`].
    pub(crate) fn class(&mut self, row: &Row<'_>, at: usize) -> Result<u32, DataError> {
        let label = row.label(at)?;
        if let Kind::Open { names } = &mut self.kind {
            let names = names.take();
            self.kind = match (&label, names) {
                (Label::Number(_), names) => Kind::Numbers { count: names.map(|it| it.len()) },
                (Label::Name(_), Some(names)) => Kind::Names(numbered(&names)),
                (Label::Name(_), None) => Kind::Found(BTreeMap::new()),
            };
            self.first = Some(row.place());
        }
        match (&mut self.kind, label) {
            (Kind::Numbers { count }, Label::Number(number)) => {
                match count {
                    Some(count) if number as usize >= *count => Err(row
                        .unfit(at, format!("{number}, an unknown class; id2label names {count}"))),
                    _ => Ok(number),
                }
            }
            (Kind::Names(classes), Label::Name(name)) => match classes.get(&name) {
                Some(class) => Ok(*class),
                None => Err(row.unfit(at, unknown(&name, classes))),
            },
            (Kind::Found(classes), Label::Name(name)) => {
                let next = classes.len() as u32;
                let class = *classes.entry(name).or_insert(next);
                match classes.len() > MOST_NAMES {
                    true => Err(row.unfit(at, too_many())),
                    false => Ok(class),
                }
            }
            (Kind::Numbers { .. }, Label::Name(name)) => {
                Err(self.mixed(row, at, &format!("{}, a name", quoted(&name)), "a class number"))
            }
            (_, Label::Number(number)) => {
                Err(self.mixed(row, at, &format!("{number}, a class number"), "a name"))
            }
            (Kind::Open { .. }, Label::Name(_)) => unreachable!("the first label has decided"),
        }
    }

    /// A label of one kind among those of the other.
    fn mixed(&self, row: &Row<'_>, at: usize, found: &str, others: &str) -> DataError {
        let others = match &self.first {
            Some(place) => format!("that of {place} is {others}"),
            None => format!("a label of the train split is {others}"),
        };
        row.unfit(at, format!("{found}, but {others}; write all labels in one way"))
    }

    /// What the labels stand for. Gives names that were found their class in sorted order.
    pub(crate) fn finish(self, texts: &mut [LabelledText]) -> Classes {
        match self.kind {
            Kind::Open { .. } => Classes::Numbers { count: None },
            Kind::Numbers { count } => Classes::Numbers { count },
            Kind::Names(classes) => Classes::Names(ordered(classes)),
            Kind::Found(classes) => {
                let mut sorted = vec![0; classes.len()];
                for (class, found) in (0..).zip(classes.values()) {
                    sorted[*found as usize] = class;
                }
                for text in texts {
                    text.label = sorted[text.label as usize];
                }
                Classes::Names(classes.into_keys().collect())
            }
        }
    }
}

fn numbered(names: &[String]) -> BTreeMap<String, u32> {
    names.iter().cloned().zip(0..).collect()
}

/// Names in the order of their classes.
fn ordered(classes: BTreeMap<String, u32>) -> Vec<String> {
    let mut names: Vec<_> = classes.into_iter().collect();
    names.sort_by_key(|(_, class)| *class);
    names.into_iter().map(|(name, _)| name).collect()
}

fn unknown(name: &str, classes: &BTreeMap<String, u32>) -> String {
    let shown: Vec<_> = classes.keys().take(8).map(|name| quoted(name)).collect();
    let rest = if classes.len() > shown.len() { ", ..." } else { "" };
    format!(
        "{}, an unknown class; classes of the train split: {} [{}{rest}]; correct the label, or train with \
         rows of it",
        quoted(name),
        classes.len(),
        shown.join(", ")
    )
}

fn too_many() -> String {
    format!("one of more than {MOST_NAMES} names; choose the column of the labels")
}
