//! Compares the base model that an adapter was trained on with the model that it is used with.
//!
//! An adapter changes the weights of one model. With another model of the same shapes, it would
//! load and compute something else. Folders that this program saved have a hash of samples of the
//! base model's values ([`ModelRecord`]). Other folders have only the name in
//! `adapter_config.json`: a repository, or a path that may have moved.
//!
//! | Known about the base model | Checked |
//! |---|---|
//! | a hash in `deepburn.json` | the hash |
//! | a folder that exists | the hashes of both folders |
//! | a name only | a warning if the last parts of the names differ |

use std::fs;
use std::path::{Component, Path, PathBuf};

use deepburn_config::Place;
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::AdapterFolder;

use crate::failure::Failure;
use crate::job::model_folder::{ModelRecord, model_in};

/// Returns the name of a base model for `adapter_config.json`: a repository, with `@` and its
/// revision if it has one, or the path of a folder, which is absolute, because programs run in
/// other folders.
pub(crate) fn base_name(place: Option<&Place>, folder: &Path) -> String {
    match place {
        Some(Place::Hub(name)) => name.clone(),
        _ => fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned()).display().to_string(),
    }
}

/// Checks that `folder` has the base model of an adapter. `option` names the value that selects the
/// folder, and `model` is its configuration. `place` is the place that the user gave.
///
/// # Errors
/// Returns a user's mistake if the weights in the folder are not those that the adapter was trained
/// on, or if a file cannot be read.
pub(crate) fn check_base(
    option: &str,
    adapter: &AdapterFolder,
    model: &AnyDecoder,
    (place, folder): (Option<&Place>, &Path),
) -> Result<(), Failure> {
    let of_option = Failure::of_key(option);
    let recorded = ModelRecord::read(adapter.path()).and_then(|record| record.base_model_hash);
    let name = adapter.config().base_model.as_deref().unwrap_or_default();
    let (expected, source) = match recorded {
        // The hash was taken in training. A folder that a name leads to may have changed since.
        Some(hash) => (Some(hash), ModelRecord::FILE),
        // A folder that does not fit the model says nothing about the adapter, which does.
        None => {
            let named = named_folder(adapter.path(), name)
                .filter(|named| fs::canonicalize(named).ok() != fs::canonicalize(folder).ok());
            (named.and_then(|named| model.base_fingerprint(&named).ok()), name)
        }
    };
    let given = base_name(place, folder);
    match expected {
        // The given folder is only hashed if there is something to compare with.
        Some(expected) if expected == model.base_fingerprint(folder).map_err(&of_option)? => Ok(()),
        Some(_) => {
            let is_named = named_folder(adapter.path(), name)
                .is_some_and(|named| fs::canonicalize(named).ok() == fs::canonicalize(folder).ok());
            let remedy = match name {
                _ if is_named => "they have changed there since; restore them, give a folder with the earlier weights, or \
                                  train the adapter again"
                    .to_owned(),
                "" => "give its base model".to_owned(),
                name => format!("give its base model, {name}"),
            };
            Err(Failure::mistake(format!(
                "{option}: the weights in {given} are not those that the adapter in {} was trained on, according to \
                 {source}; it would compute something else; {remedy}",
                adapter.path().display()
            )))
        }
        None => {
            if !name.is_empty() && last_part(name) != last_part(&given) {
                tracing::warn!(
                    "{option}: the adapter in {} names the base model {name}, and this is {given}; unless both have the same \
                     weights, the adapter computes something else: give its base model",
                    adapter.path().display()
                );
            }
            Ok(())
        }
    }
}

/// Logs a warning for each setting of a trained adapter that selects nothing in its model: the
/// adapter may belong to a larger one. `option` names the value that selects the adapter.
///
/// # Errors
/// Returns a user's mistake for an expression that takes too long.
pub(crate) fn warn_of_unused(option: &str, adapted: &AnyDecoder) -> Result<(), Failure> {
    for setting in adapted.unused_settings().map_err(Failure::of_key(option))? {
        tracing::warn!(
            "{option}: `{setting}` of the adapter selects nothing in its base model; check that this is the model that it \
             was trained on"
        );
    }
    Ok(())
}

/// Returns the hash of the base model that the record of an adapter contains. Logs a warning if its
/// files cannot be read any more, because the adapter is worth more than the hash.
pub(crate) fn base_hash(adapted: &AnyDecoder, base: &Path) -> Option<String> {
    let hash = adapted.base_fingerprint(base);
    hash.map_err(|error| tracing::warn!("the adapter has no hash of its base model: {error}")).ok()
}

/// Returns the folder that an adapter names as its base model, if it exists. A relative path is
/// relative to the folder of the program that wrote it. It is tried from here and from the adapter.
pub(crate) fn named_folder(adapter: &Path, name: &str) -> Option<PathBuf> {
    let folders = [PathBuf::new(), adapter.to_owned()];
    let local = folders.iter().map(|folder| folder.join(name));
    local.filter(|_| !name.is_empty()).find(|path| path.is_dir()).map(|path| model_in(&path))
}

/// Returns the last part of the name of a model, in lower case and without a revision. A folder of
/// the Hub's cache, `models--owner--name/snapshots/commit`, is called as its repository.
fn last_part(name: &str) -> String {
    let path = Path::new(name);
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(part) => part.to_str(),
        _ => None,
    });
    // The model of a run is in its folder `model`, and the run has the name.
    let parts: Vec<&str> = parts.filter(|part| *part != "model").collect();
    // A snapshot of the Hub's cache ends with a commit, and its repository is further up.
    let cached = parts.iter().find_map(|part| part.strip_prefix("models--")?.rsplit("--").next());
    let last = cached.or(parts.last().copied()).unwrap_or(name);
    last.split('@').next().unwrap_or(last).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_model_have_the_same_last_part() {
        for name in [
            "Qwen/Qwen3-0.6B",
            "unsloth/qwen3-0.6b",
            "Qwen/Qwen3-0.6B@main",
            "/data/Qwen3-0.6B/",
            "runs/Qwen3-0.6B/model",
            "/root/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca",
        ] {
            assert_eq!(last_part(name), "qwen3-0.6b", "{name}");
        }
        assert_ne!(last_part("Qwen/Qwen3-0.6B-Base"), last_part("Qwen/Qwen3-0.6B"));
    }
}
