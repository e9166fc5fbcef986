//! Names for what is exchanged.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// What a collective exchanges: a purpose and a number, such as `gather#12`, and where it is known the
/// names of its arrays.
///
/// All ranks pass the same tag to the same collective. The tag routes nothing (order does); it is
/// there to notice ranks that have drifted apart and to say where. Tags are compared by purpose and
/// number; names are for messages alone.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tag {
    purpose: Cow<'static, str>,
    id: u64,
    /// Behind a thin pointer, because every error holds a tag. Not sent along with each exchange.
    #[serde(skip)]
    names: Option<Arc<Vec<Arc<str>>>>,
}

impl Tag {
    /// A tag; `id` is whatever identifies the exchange among those of its purpose: the index of a
    /// parameter, the number of a bucket, a hash of a list of parameters.
    pub const fn new(purpose: &'static str, id: u64) -> Self {
        Self { purpose: Cow::Borrowed(purpose), id, names: None }
    }

    /// The same tag with the name of each array, such as the paths of parameters. Messages then show
    /// names in place of the number.
    pub fn naming(self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        Self { names: Some(Arc::new(names.into_iter().collect())), ..self }
    }

    /// What the exchange is for; [`Statistics`](crate::Statistics) count by it.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// The purpose, to be kept; not copied where it was given as a constant.
    pub(crate) fn shared_purpose(&self) -> Cow<'static, str> {
        self.purpose.clone()
    }

    /// Which exchange of its purpose it is.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Names of its arrays; none where they were not given.
    pub fn names(&self) -> &[Arc<str>] {
        self.names.as_deref().map_or(&[], Vec::as_slice)
    }
}

impl PartialEq for Tag {
    fn eq(&self, other: &Self) -> bool {
        (&self.purpose, self.id) == (&other.purpose, other.id)
    }
}

impl Eq for Tag {}

impl fmt::Display for Tag {
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
        let tag = Tag::new("gather", 12);
        assert_eq!(tag.to_string(), "gather#12");
        assert_eq!((tag.purpose(), tag.id()), ("gather", 12));
        assert_ne!(tag, Tag::new("gather", 13));
    }

    #[test]
    fn names_take_the_place_of_the_number_and_are_not_compared() {
        let named = |names: &[&str]| {
            Tag::new("gather", 12).naming(names.iter().map(|name| Arc::from(*name)))
        };
        assert_eq!(named(&["a.weight"]).to_string(), "gather (a.weight)");
        assert_eq!(named(&["a", "b", "c"]).to_string(), "gather (a and 2 more)");
        assert_eq!(named(&[]).to_string(), "gather#12");
        assert_eq!(named(&["a"]), named(&["b"]));
    }
}
