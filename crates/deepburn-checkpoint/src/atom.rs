//! What is known of one parameter or buffer: its atom.
//!
//! An atom is a parameter by its module path with everything that belongs to it, its *slots*: the
//! values in full precision, the optimizer's moments, a gradient that is still being accumulated.
//! A buffer (a running statistic, an integer or bool parameter) is an atom with its values alone.
//! Atoms are whole; how many ranks a checkpoint was written by shows in its files alone.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{CheckpointError, ElementType};

/// One of the arrays that belong to a parameter, each as long as the parameter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Slot {
    /// The values: masters in full precision where there are any.
    Weights,
    /// The gradient accumulated so far, between two micro-batches of a step.
    Gradient,
    /// What the optimizer keeps, by its name: `exp_avg`, `exp_avg_sq`, `momentum`. Lower-case
    /// letters, digits and `_`.
    Moment(String),
}

impl Slot {
    /// The name in files.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Weights => "weights",
            Self::Gradient => "gradient",
            Self::Moment(name) => name,
        }
    }

    /// The moment called `name`.
    pub fn moment(name: &str) -> Self {
        Self::Moment(name.to_owned())
    }
}

impl FromStr for Slot {
    type Err = CheckpointError;

    fn from_str(name: &str) -> Result<Self, CheckpointError> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        match name {
            "weights" => Ok(Self::Weights),
            "gradient" => Ok(Self::Gradient),
            _ if !name.is_empty() && name.len() <= 100 && name.chars().all(allowed) => {
                Ok(Self::moment(name))
            }
            _ => Err(CheckpointError::Layout {
                reason: format!(
                    "`{name}` is no slot: up to 100 lower-case letters, digits and `_`"
                ),
            }),
        }
    }
}

impl TryFrom<String> for Slot {
    type Error = CheckpointError;

    fn try_from(name: String) -> Result<Self, CheckpointError> {
        name.parse()
    }
}

impl From<Slot> for String {
    fn from(slot: Slot) -> Self {
        slot.as_str().to_owned()
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

/// A slot with the type that it is stored in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredSlot {
    /// Which array.
    pub slot: Slot,
    /// Its elements' type.
    pub element: ElementType,
}

/// What an atom is in its module.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AtomKind {
    /// A float parameter, trained or frozen. All atoms are in checkpoints that do not say.
    #[default]
    Parameter,
    /// A running statistic, or an integer or bool parameter: values alone, in any element type,
    /// which exports keep.
    Buffer,
}

impl AtomKind {
    fn is_parameter(&self) -> bool {
        *self == Self::Parameter
    }
}

/// A parameter or buffer and what is stored of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Atom {
    /// Module path: `transformer.h.0.attn.c_attn.weight`.
    pub path: String,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// What it is; left out of files where it is a parameter.
    #[serde(default, skip_serializing_if = "AtomKind::is_parameter")]
    pub kind: AtomKind,
    /// Whether the optimizer changes it.
    pub trainable: bool,
    /// Other paths at which the module has this same parameter (tied weights).
    pub aliases: Vec<String>,
    /// What is stored, in the order in which it is written.
    pub slots: Vec<StoredSlot>,
}

impl Atom {
    /// Elements of the parameter. `None` for a shape that no memory holds.
    pub fn checked_numel(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size))
    }

    /// The type of a slot, where there is one.
    pub fn element_of(&self, slot: &Slot) -> Option<ElementType> {
        self.slots.iter().find(|stored| stored.slot == *slot).map(|stored| stored.element)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_one_name_each() {
        for name in ["weights", "gradient", "exp_avg", "momentum2"] {
            let slot: Slot = name.parse().unwrap();
            assert_eq!(slot.as_str(), name);
            let json = serde_json::to_string(&slot).unwrap();
            assert_eq!(serde_json::from_str::<Slot>(&json).unwrap(), slot);
        }
        assert_eq!("exp_avg".parse::<Slot>().unwrap(), Slot::moment("exp_avg"));
        for name in ["", "Exp", "a:b", "a b", &"a".repeat(101)] {
            assert!(name.parse::<Slot>().is_err(), "{name}");
        }
    }

    #[test]
    fn a_shape_beyond_all_memory_has_no_count() {
        let mut atom = Atom {
            path: "w".into(),
            shape: vec![2, 3],
            kind: AtomKind::Parameter,
            trainable: true,
            aliases: vec![],
            slots: vec![StoredSlot { slot: Slot::Weights, element: ElementType::F32 }],
        };
        assert_eq!(atom.checked_numel(), Some(6));
        assert_eq!(atom.element_of(&Slot::Weights), Some(ElementType::F32));
        assert_eq!(atom.element_of(&Slot::Gradient), None);
        atom.shape = vec![usize::MAX, 2];
        assert_eq!(atom.checked_numel(), None);
        atom.shape = vec![];
        assert_eq!(atom.checked_numel(), Some(1));
    }
}
