//! The identity of a process group.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Identifies a process group. All members of a group have the same value.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum GroupId {
    /// All ranks.
    World,
    /// Some of the ranks.
    Subgroup {
        /// The name, such as `shard`.
        name: Cow<'static, str>,
        /// The number of groups with this name that a member created before.
        index: u32,
    },
}

impl GroupId {
    /// Returns the name of a subgroup; `None` for the world.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::World => None,
            Self::Subgroup { name, .. } => Some(name),
        }
    }
}

/// Formats the group as the end of a message: nothing for the world.
pub(crate) struct InGroup<'a>(pub(crate) Option<&'a str>);

impl fmt::Display for InGroup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, " in the group `{name}`"))
    }
}
