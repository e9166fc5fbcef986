//! Tags that identify messages between two ranks.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of a message: what it has and its number, such as `activation 3`, and optionally a part
/// of the computation in which the number counts, such as `micro-batch 2`.
///
/// Unlike a [`CollectiveTag`](crate::CollectiveTag), it routes data: a receive takes the message
/// with the same sender and an equal tag. All fields are compared. Nothing is allocated until a tag
/// is printed.
///
/// ```
/// # use deepburn_comm::MessageTag;
/// let tag = MessageTag::new("activation", 3).within("micro-batch", 2);
/// assert_eq!(tag.to_string(), "activation 3 of micro-batch 2");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MessageTag {
    purpose: Cow<'static, str>,
    id: u64,
    scope: Option<(Cow<'static, str>, u64)>,
}

impl MessageTag {
    /// Returns a tag. `id` distinguishes the messages of a purpose.
    pub const fn new(purpose: &'static str, id: u64) -> Self {
        Self { purpose: Cow::Borrowed(purpose), id, scope: None }
    }

    /// Returns the tag within part `id` of the computation, for example a micro-batch. A second
    /// call replaces the part.
    #[must_use]
    pub fn within(self, scope: &'static str, id: u64) -> Self {
        Self { scope: Some((scope.into(), id)), ..self }
    }

    /// Returns the purpose. [`Statistics`](crate::Statistics) counts messages by purpose.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// Returns the number that distinguishes messages with the same purpose.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Returns the purpose as a `Cow`, without allocating for a string constant.
    pub(crate) fn shared_purpose(&self) -> Cow<'static, str> {
        self.purpose.clone()
    }
}

impl fmt::Display for MessageTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.purpose, self.id)?;
        match &self.scope {
            Some((scope, id)) => write!(f, " of {scope} {id}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_of_a_tag_are_compared_and_shown() {
        let tag = MessageTag::new("activation", 3);
        assert_eq!((&*tag.purpose, tag.id), ("activation", 3));
        assert_eq!(tag.to_string(), "activation 3");
        let within = tag.clone().within("micro-batch", 2);
        assert_eq!(within.to_string(), "activation 3 of micro-batch 2");
        assert_ne!(tag, within);
        assert_ne!(within, tag.within("micro-batch", 3));
    }
}
