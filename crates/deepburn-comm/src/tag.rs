//! Names for what is exchanged.

use std::fmt;

/// What a collective exchanges: a purpose and a number, such as `gather#12`.
///
/// All ranks pass the same tag to the same collective. The tag routes nothing (order does); it is
/// there to notice ranks that have drifted apart and to say where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag {
    purpose: &'static str,
    id: u64,
}

impl Tag {
    /// A tag; `id` is whatever identifies the exchange among those of its purpose: the index of a
    /// parameter, the number of a bucket, a hash of a list of parameters.
    pub const fn new(purpose: &'static str, id: u64) -> Self {
        Self { purpose, id }
    }

    /// What the exchange is for; [`Statistics`](crate::Statistics) count by it.
    pub const fn purpose(&self) -> &'static str {
        self.purpose
    }

    /// Which exchange of its purpose it is.
    pub const fn id(&self) -> u64 {
        self.id
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.purpose, self.id)
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
}
