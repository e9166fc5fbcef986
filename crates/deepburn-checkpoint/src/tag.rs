//! The name of a checkpoint, which is the name of its folder.
//!
//! A name starts with an ASCII letter or digit, so it can be neither a hidden folder nor a
//! command-line option. It has no separators, so it cannot name a path outside the folder of
//! checkpoints. Tags from users and tags from files are validated by the same rule.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The names of other files in a folder of checkpoints, which tags must not have.
const RESERVED: &[&str] = &["latest", "manifest.json"];

/// The name of a checkpoint: a folder name that is safe on every file system. The trainer names
/// checkpoints after their step. Other names are chosen by users, and
/// [`Retention`](crate::Retention) does not touch them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Tag(String);

impl Tag {
    /// The largest number of characters.
    pub const MAX_LEN: usize = 100;

    /// Returns the tag of the checkpoint after `step` optimizer steps, such as `step-00000010`.
    pub fn of_step(step: u64) -> Self {
        Self(format!("step-{step:08}"))
    }

    /// Returns the tag of the checkpoint that the `visit`-th run to reach `step` saves if earlier
    /// ones exist: `step-00000010`, then `step-00000010.2`.
    pub fn numbered(step: u64, visit: u32) -> Self {
        match visit {
            0 | 1 => Self::of_step(step),
            _ => Self(format!("step-{step:08}.{visit}")),
        }
    }

    /// Returns the step of a tag that [`Self::of_step`] or [`Self::numbered`] created; `None` for
    /// other names.
    pub fn step(&self) -> Option<u64> {
        let name = self.0.strip_prefix("step-")?;
        let (step, visit) = name.split_once('.').unwrap_or((name, "1"));
        let (step, visit) = (step.parse().ok()?, visit.parse().ok()?);
        // Names such as `step-1` and `step-00000001.1` parse too, but are users' names.
        (Self::numbered(step, visit) == *self).then_some(step)
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A name that is not a valid tag.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad tag `{name}`: use 1 to {max} characters out of A-Z a-z 0-9 . _ - that start with a letter \
     or a digit, and not `latest` or `manifest.json`",
    max = Tag::MAX_LEN
)]
pub struct TagError {
    /// The name.
    pub name: String,
}

impl FromStr for Tag {
    type Err = TagError;

    fn from_str(name: &str) -> Result<Self, TagError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        let is_tag = (1..=Self::MAX_LEN).contains(&name.len())
            && name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.chars().all(allowed)
            && !RESERVED.contains(&name);
        if !is_tag {
            return Err(TagError { name: name.to_owned() });
        }
        Ok(Self(name.to_owned()))
    }
}

impl TryFrom<String> for Tag {
    type Error = TagError;

    fn try_from(name: String) -> Result<Self, TagError> {
        name.parse()
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_named_so_that_names_sort() {
        assert_eq!(Tag::of_step(10).as_str(), "step-00000010");
        assert_eq!(Tag::of_step(10).step(), Some(10));
        assert_eq!(Tag::of_step(u64::MAX).step(), Some(u64::MAX));
        assert_eq!(Tag::numbered(10, 1), Tag::of_step(10));
        assert_eq!(Tag::numbered(10, 2).as_str(), "step-00000010.2");
        assert_eq!(Tag::numbered(10, 12).step(), Some(10));
        let others = ["step-10", "step-", "best", "step-00000010.damaged-1", "step-00000010.1"];
        for other in others.into_iter().chain(["step-00000010.02", "step-00000010."]) {
            assert_eq!(other.parse::<Tag>().unwrap().step(), None, "{other}");
        }
    }

    #[test]
    fn names_that_are_not_plain_folder_names_are_refused() {
        let long = "a".repeat(Tag::MAX_LEN + 1);
        for name in [
            "", ".", "..", "a/b", "a\\b", ".hidden", "-rf", "latest", "a b", "a\n", "\u{e9}", &long,
        ] {
            let error = name.parse::<Tag>().unwrap_err().to_string();
            assert!(error.contains("bad tag"), "{error}");
        }
        assert!(serde_json::from_str::<Tag>("\"../../etc\"").is_err());
    }
}
