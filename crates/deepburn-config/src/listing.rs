//! Finds keys by the path that a user types.
//!
//! Main function: [`find_keys`]. A path may omit `deepspeed.` and the type of a variant.

use crate::diagnosis::ConfigError;
use crate::job_keys;
use crate::key::KeyEntry;
use crate::key_path::{is_at_or_below, without_brackets};
use crate::suggestion::{UNKNOWN_KEY, suggestion};

/// Returns the key at `path` and the keys below it. If there is none, returns the keys of this name
/// in all sections.
///
/// A path in the `deepspeed` section may omit the section, and a path below `params` may omit the
/// type of the optimizer or schedule:
///
/// ```
/// use deepburn_config::find_keys;
///
/// let found = find_keys("zero_optimization.stage")?;
/// assert_eq!(found[0].path, "deepspeed.zero_optimization.stage");
/// // Each optimizer has a separate learning rate.
/// assert!(find_keys("optimizer.params.lr")?.len() > 5);
/// let error = find_keys("training.max_step").unwrap_err().to_string();
/// assert!(error.ends_with("did you mean max_steps?"), "{error}");
/// # Ok::<(), deepburn_config::ConfigError>(())
/// ```
///
/// # Errors
/// Returns [`ConfigError::Argument`], with a suggestion, if no key is found.
pub fn find_keys(path: &str) -> Result<Vec<KeyEntry>, ConfigError> {
    let keys = job_keys();
    let inside = format!("deepspeed.{path}");
    // From the narrowest to the widest meaning of the path; the first one that finds a key counts.
    let ways: [&dyn Fn(&KeyEntry) -> bool; 3] =
        [&|entry| is_below(&entry.path, path), &|entry| is_below(&entry.path, &inside), &|entry| {
            entry.key.is_called(path)
        }];
    let found = ways.map(|way| keys.iter().filter(|entry| way(entry)).cloned().collect::<Vec<_>>());
    found.into_iter().find(|found| !found.is_empty()).ok_or_else(|| unknown(&keys, path))
}

/// Returns whether `path` is `wanted` or a key below it. `params[AdamW].lr` also counts as
/// `params.lr`.
fn is_below(path: &str, wanted: &str) -> bool {
    is_at_or_below(path, wanted) || is_at_or_below(&without_brackets(path), wanted)
}

/// Returns the error for an unknown path, with the most similar name in its section or in any
/// section.
fn unknown(keys: &[KeyEntry], path: &str) -> ConfigError {
    let name = path.rsplit('.').next().unwrap_or(path);
    let section = path.strip_suffix(name).unwrap_or_default();
    let beside = |entry: &&KeyEntry| entry.path.strip_suffix(entry.key.name) == Some(section);
    let anywhere = || suggestion(keys.iter().flat_map(|entry| entry.key.names()), name);
    // A name in the same section is more likely than a similar one elsewhere.
    let near = suggestion(keys.iter().filter(beside).flat_map(|entry| entry.key.names()), name);
    let remedy = near.or_else(anywhere);
    let remedy = remedy.unwrap_or("run deepburn keys without a path to see all of them".into());
    let given = crate::Node::text(path).to_string();
    ConfigError::Argument { given, reason: UNKNOWN_KEY.to_owned(), remedy }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(path: &str) -> Vec<String> {
        find_keys(path).unwrap().into_iter().map(|entry| entry.path).collect()
    }

    #[test]
    fn a_key_is_found_by_path_section_and_name() {
        assert_eq!(paths("training.max_steps"), ["training.max_steps"]);
        assert_eq!(paths("max_steps"), ["training.max_steps"]);
        assert_eq!(paths("zero_optimization.stage"), ["deepspeed.zero_optimization.stage"]);
        let splits = ["data.splits", "data.splits.train", "data.splits.eval", "data.splits.test"];
        assert_eq!(paths("data.splits"), splits);
        assert!(
            paths("optimizer.params.lr").contains(&"deepspeed.optimizer.params[SGD].lr".into())
        );
        assert_eq!(paths("optimizer.params[SGD].momentum").len(), 1);
        // Both batch sizes, and the schedule's.
        assert!(paths("train_batch_size").contains(&"deepspeed.train_batch_size".into()));
    }

    #[test]
    fn what_is_not_found_has_a_remedy() {
        for (path, part) in [
            ("max_epochs", "write training.epochs"),
            ("training.max_step", "did you mean max_steps?"),
            ("x", "without a path"),
            ("", "without a path"),
        ] {
            let message = find_keys(path).expect_err(path).to_string();
            assert!(message.contains(part), "{path}: {message}");
        }
    }
}
