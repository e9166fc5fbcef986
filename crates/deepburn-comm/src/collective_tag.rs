//! Tags that identify collectives.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The name of an exchange: a purpose and a number, such as `gather#12`, and
/// optionally the names of its arrays.
///
/// All ranks pass the same tag to the same collective. Tags do not route data,
/// because collectives are matched by the order of calls. Tags detect ranks
/// that are out of step and identify the collective in error messages. Purpose
/// and number are compared; array names are only shown in messages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CollectiveTag {
    purpose: Cow<'static, str>,
    id: u64,
    /// The array names. A thin pointer keeps errors small, because every error
    /// contains a tag. Names are not sent to other ranks.
    #[serde(skip)]
    names: Option<Arc<Vec<Arc<str>>>>,
}

impl CollectiveTag {
    /// Returns a tag. `id` distinguishes the exchanges of a purpose: the index
    /// of a parameter, the number of a bucket, or a hash of a list of
    /// parameters.
    pub const fn new(purpose: &'static str, id: u64) -> Self {
        Self { purpose: Cow::Borrowed(purpose), id, names: None }
    }

    /// Returns the tag with array names, such as parameter paths. Messages then
    /// show the names instead of the number.
    pub fn naming(self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        Self { names: Some(Arc::new(names.into_iter().collect())), ..self }
    }

    /// Returns the purpose. [`Statistics`](crate::Statistics) counts
    /// collectives by purpose.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// Returns the purpose as a `Cow`, without allocating for a string
    /// constant.
    pub(crate) fn shared_purpose(&self) -> Cow<'static, str> {
        self.purpose.clone()
    }

    /// Returns the number that distinguishes exchanges with the same purpose.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Returns the names of the arrays; empty if no names were given.
    pub fn names(&self) -> &[Arc<str>] {
        self.names.as_deref().map_or(&[], Vec::as_slice)
    }
}

impl PartialEq for CollectiveTag {
    fn eq(&self, other: &Self) -> bool {
        (&self.purpose, self.id) == (&other.purpose, other.id)
    }
}

impl Eq for CollectiveTag {}

impl fmt::Display for CollectiveTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names() {
            [] => write!(f, "{}#{}", self.purpose, self.id),
            [name] => write!(f, "{} ({name})", self.purpose),
            [first, rest @ ..] => write!(f, "{} ({first} and {} more)", self.purpose, rest.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_reads_as_purpose_and_number() {
        let tag = CollectiveTag::new("gather", 12);
        assert_eq!(tag.to_string(), "gather#12");
        assert_eq!((tag.purpose(), tag.id()), ("gather", 12));
        assert_ne!(tag, CollectiveTag::new("gather", 13));
    }

    #[test]
    fn names_take_the_place_of_the_number_and_are_not_compared() {
        let named = |names: &[&str]| {
            CollectiveTag::new("gather", 12).naming(names.iter().map(|name| Arc::from(*name)))
        };
        assert_eq!(named(&["a.weight"]).to_string(), "gather (a.weight)");
        assert_eq!(named(&["a", "b", "c"]).to_string(), "gather (a and 2 more)");
        assert_eq!(named(&[]).to_string(), "gather#12");
        assert_eq!(named(&["a"]), named(&["b"]));
    }
}
