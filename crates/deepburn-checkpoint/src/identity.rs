//! Which save a file belongs to.

use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Tag;

/// What files call the format.
pub(crate) const FORMAT: &str = "deepburn-checkpoint";
/// The version of the format that is read and written here.
pub(crate) const VERSION: u64 = 1;

/// What the files of one save have in common. Two saves never have the same, not even under one tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) tag: Tag,
    /// 16 random hexadecimal digits.
    pub(crate) id: String,
}

impl Identity {
    pub(crate) fn new(tag: Tag) -> Self {
        // The standard library's one source of random numbers: the keys of its hash tables.
        Self { tag, id: format!("{:016x}", RandomState::new().hash_one(0)) }
    }

    /// The metadata of a rank's file; safetensors allows strings alone.
    pub(crate) fn of_file(&self, rank: usize, world_size: usize) -> Map<String, Value> {
        [
            ("format", FORMAT.to_owned()),
            ("version", VERSION.to_string()),
            ("tag", self.tag.to_string()),
            ("id", self.id.clone()),
            ("rank", rank.to_string()),
            ("world_size", world_size.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), Value::String(value)))
        .into_iter()
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_saves_are_the_same() {
        let [first, second] = [(); 2].map(|()| Identity::new(Tag::of_step(1)));
        assert_ne!(first, second);
        assert_eq!(first.id.len(), 16);
        let text = serde_json::to_string(&first.of_file(3, 8)).unwrap();
        assert_eq!(
            text,
            format!(
                r#"{{"format":"deepburn-checkpoint","version":"1","tag":"step-00000001","id":"{}","rank":"3","world_size":"8"}}"#,
                first.id
            )
        );
    }
}
