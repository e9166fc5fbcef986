//! The identity of the save that a file belongs to.
//!
//! Files of different saves may have equal tags, for example when a run is repeated in another
//! folder. If files of two saves are mixed, the checksums differ, but the error could only report a
//! damaged file. The random id, which is stored in the manifest and in the metadata of each rank's
//! file, lets the error report that files were mixed.

use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Tag;

/// The name of the format in files.
pub(crate) const FORMAT: &str = "deepburn-checkpoint";
/// The oldest version of the format.
pub(crate) const FIRST_VERSION: u64 = 1;
/// The version of manifests that omit parameters. Programs that only read [`FIRST_VERSION`] refuse
/// them. Everything else is the same.
pub(crate) const VERSION_WITH_BASE: u64 = 2;
/// The version of manifests of pipelines, with or without omitted parameters. Programs that only
/// read earlier versions would look for arrays in the files of other ranks.
pub(crate) const VERSION_OF_PIPELINE: u64 = 3;
/// The version of manifests of hybrid sharding, with or without a pipeline and omitted parameters,
/// for the same reason.
pub(crate) const VERSION_OF_REPLICAS: u64 = 4;
/// The newest version. A manifest has the oldest one that can express it, so that older programs
/// read what they can.
pub(crate) const NEWEST_VERSION: u64 = VERSION_OF_REPLICAS;

/// The identity that all files of a save share. It is unique even among saves with the same tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The tag of the checkpoint.
    pub(crate) tag: Tag,
    /// 16 random hexadecimal digits.
    pub(crate) id: String,
}

impl Identity {
    /// Returns an identity with a new id.
    pub(crate) fn new(tag: Tag) -> Self {
        // The keys of hash tables are the standard library's only source of random numbers.
        Self { tag, id: format!("{:016x}", RandomState::new().hash_one(0)) }
    }

    /// Returns the metadata of a rank's file. safetensors allows only strings.
    pub(crate) fn of_file(&self, rank: usize, world_size: usize) -> Map<String, Value> {
        [
            ("format", FORMAT.to_owned()),
            // The files of ranks are the same in all versions, which differ in their manifests.
            ("version", FIRST_VERSION.to_string()),
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
