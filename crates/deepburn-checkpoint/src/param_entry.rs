//! The entry of one parameter or buffer in a checkpoint.
//!
//! An entry describes a parameter, which is identified by its module path, and all arrays that are
//! stored for it: the full-precision values, the optimizer's moments, and a gradient that is still
//! being accumulated. The entry of a buffer (a running statistic, an integer or bool parameter) has
//! only values. Entries describe complete parameters; the number of ranks that wrote a checkpoint
//! is visible only in its files.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{BaseValues, CheckpointError, ElementType};

/// The kind of an array that belongs to a parameter. Each array has as many elements as the
/// parameter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum StateKind {
    /// The values of the parameter, from the f32 master weights if there are any.
    Weights,
    /// The gradient that was accumulated so far in the current step.
    Gradient,
    /// An optimizer state with a name such as `exp_avg`, `exp_avg_sq` or `momentum`. Names consist
    /// of lower-case letters, digits and `_`.
    Moment(String),
}

impl StateKind {
    /// Returns the name that files use.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Weights => "weights",
            Self::Gradient => "gradient",
            Self::Moment(name) => name,
        }
    }

    /// Returns the moment called `name`.
    pub fn moment(name: &str) -> Self {
        Self::Moment(name.to_owned())
    }
}

impl FromStr for StateKind {
    type Err = CheckpointError;

    fn from_str(name: &str) -> Result<Self, CheckpointError> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        match name {
            "weights" => Ok(Self::Weights),
            "gradient" => Ok(Self::Gradient),
            // The name becomes part of a tensor's name, in which a colon follows the path.
            _ if !name.is_empty() && name.len() <= 100 && name.chars().all(allowed) => {
                Ok(Self::moment(name))
            }
            _ => Err(CheckpointError::Layout {
                reason: format!(
                    "invalid state name `{name}`; allowed are up to 100 lower-case letters, digits \
                     and `_`"
                ),
            }),
        }
    }
}

impl TryFrom<String> for StateKind {
    type Error = CheckpointError;

    fn try_from(name: String) -> Result<Self, CheckpointError> {
        name.parse()
    }
}

impl From<StateKind> for String {
    fn from(kind: StateKind) -> Self {
        kind.as_str().to_owned()
    }
}

impl fmt::Display for StateKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

/// The kind of an array with the element type in which it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredState {
    /// The kind of the array.
    #[serde(rename = "slot")]
    pub kind: StateKind,
    /// The type of its elements.
    pub element: ElementType,
}

/// The kind of an entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    /// A float parameter, trained or frozen. The default for old checkpoints, which do not store
    /// the kind.
    #[default]
    Parameter,
    /// A running statistic, or an integer or bool parameter. It has only values, in any element
    /// type, which exports keep.
    Buffer,
}

/// A parameter or buffer and the arrays that a checkpoint stores for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamEntry {
    /// The module path, such as `transformer.h.0.attn.c_attn.weight`.
    pub path: String,
    /// The shape of the complete parameter.
    pub shape: Vec<usize>,
    /// The kind; omitted in files for parameters.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kind: EntryKind,
    /// Whether the optimizer updates it.
    pub trainable: bool,
    /// Additional paths of the same parameter in the module (tied weights).
    pub aliases: Vec<String>,
    /// The stored arrays, in the order in which they are written.
    #[serde(rename = "slots")]
    pub states: Vec<StoredState>,
    /// The values in the base model, if the checkpoint omits them. Such an entry is a frozen
    /// parameter without stored arrays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseValues>,
    /// The pipeline stage whose ranks store the arrays, from 0; omitted in files for stage 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pipeline_stage: usize,
}

/// Returns true for the value that is not written.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ParamEntry {
    /// Returns the number of elements; `None` if it overflows.
    pub fn checked_numel(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size))
    }

    /// Returns the element type of an array; `None` if it is not stored.
    pub fn element_of(&self, kind: &StateKind) -> Option<ElementType> {
        self.states.iter().find(|stored| stored.kind == *kind).map(|stored| stored.element)
    }

    /// Returns the element type of the weights, which are stored or in the base model; `None` if
    /// there are none.
    pub(crate) fn weights_element(&self) -> Option<ElementType> {
        let base = self.base.as_ref().map(|base| base.element);
        self.element_of(&StateKind::Weights).or(base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_kind_has_one_name() {
        for name in ["weights", "gradient", "exp_avg", "momentum2"] {
            let kind: StateKind = name.parse().unwrap();
            assert_eq!(kind.as_str(), name);
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(serde_json::from_str::<StateKind>(&json).unwrap(), kind);
        }
        assert_eq!("exp_avg".parse::<StateKind>().unwrap(), StateKind::moment("exp_avg"));
        for name in ["", "Exp", "a:b", "a b", &"a".repeat(101)] {
            assert!(name.parse::<StateKind>().is_err(), "{name}");
        }
    }

    #[test]
    fn the_number_of_elements_may_overflow() {
        let mut entry = ParamEntry {
            path: "w".into(),
            shape: vec![2, 3],
            kind: EntryKind::Parameter,
            trainable: true,
            aliases: vec![],
            states: vec![StoredState { kind: StateKind::Weights, element: ElementType::F32 }],
            base: None,
            pipeline_stage: 0,
        };
        assert_eq!(entry.checked_numel(), Some(6));
        assert_eq!(entry.element_of(&StateKind::Weights), Some(ElementType::F32));
        assert_eq!(entry.element_of(&StateKind::Gradient), None);
        entry.shape = vec![usize::MAX, 2];
        assert_eq!(entry.checked_numel(), None);
        entry.shape = vec![];
        assert_eq!(entry.checked_numel(), Some(1));
    }
}
