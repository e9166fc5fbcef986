//! `deepburn keys`: list the keys of the job file and its `deepspeed` section, or print a JSON
//! Schema.
//!
//! ```text
//! training.epochs
//!     Number of passes over the train split. Defaults to 1 if max_steps is unset too.
//!     type: an integer of at least 1; default: null; unit: epochs
//!     status: supported
//! ```
//!
//! The text comes from the same declarations that parse and check a configuration, so it is always
//! up to date.

use deepburn_config::{KeyEntry, find_keys, job_keys, schema};

use crate::failure::Failure;

/// Returns the keys below `path`, or a JSON Schema.
///
/// # Errors
/// Returns a user's mistake if the key is unknown, or if there is no schema for the section.
pub(crate) fn keys(path: Option<&str>, as_schema: bool) -> Result<String, Failure> {
    if as_schema {
        let schema = match path {
            None => schema(true),
            Some("deepspeed") => schema(false),
            Some(path) => {
                return Err(Failure::mistake(format!(
                    "--schema: no schema for `{path}`; leave the path out, or use `deepspeed`"
                )));
            }
        };
        return serde_json::to_string_pretty(&schema).map_err(Failure::run);
    }
    let entries = match path {
        None => job_keys(),
        Some(path) => find_keys(path).map_err(Failure::mistake)?,
    };
    Ok(entries.iter().map(entry).collect::<Vec<_>>().join("\n"))
}

/// Formats a key: its path, and below it documentation, type, default, unit and status.
fn entry(entry: &KeyEntry) -> String {
    let KeyEntry { path, key, status } = entry;
    let mut lines = vec![path.clone(), format!("    {}", key.doc)];
    let default = match key.is_required() {
        true => "required".to_owned(),
        false => key.default.to_string(),
    };
    let auto = if key.auto { ", or \"auto\"" } else { "" };
    let mut facts = vec![format!("type: {}{auto}", key.kind), format!("default: {default}")];
    if !key.unit.is_empty() {
        facts.push(format!("unit: {}", key.unit));
    }
    if key.stages != (0, 3) {
        facts.push(stages(key.stages));
    }
    lines.push(format!("    {}", facts.join("; ")));
    lines.push(format!("    status: {status}"));
    let others: Vec<_> = key.names().skip(1).collect();
    if !others.is_empty() {
        lines.push(format!("    also: {}", others.join(", ")));
    }
    lines.join("\n")
}

/// Formats the ZeRO stages at which a key has an effect.
pub(super) fn stages((first, last): (u8, u8)) -> String {
    match first == last {
        true => format!("ZeRO stage {first} only"),
        false => format!("ZeRO stages {first} to {last}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn shows_type_default_unit_doc_and_status() {
        let text = keys(Some("zero_optimization.stage3_max_live_parameters"), false).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "deepspeed.zero_optimization.stage3_max_live_parameters");
        assert!(lines[1].starts_with("    Maximum number of elements"), "{text}");
        let facts = "    type: an integer of at least 0, or \"auto\"; default: 1000000000; unit: elements; \
                     ZeRO stage 3 only";
        assert_eq!(lines[2], facts);
        assert_eq!(lines[3], "    status: supported");
        assert_eq!(lines[4], "    also: max_live_parameters");
    }

    #[test]
    fn prints_all_keys_and_schemas() {
        let all = keys(None, false).unwrap();
        for path in ["model.architecture", "training.epochs", "deepspeed.fp16.hysteresis"] {
            assert!(all.lines().any(|line| line == path), "{path}");
        }
        let schema: Value = serde_json::from_str(&keys(None, true).unwrap()).unwrap();
        assert!(schema["properties"]["training"]["anyOf"].is_array(), "{}", schema["properties"]);
        assert!(keys(Some("deepspeed"), true).unwrap().contains("zero_optimization"));
        assert!(keys(Some("training"), true).is_err());
        assert!(keys(Some("max_epochs"), false).unwrap_err().to_string().contains("epochs"));
        let alias = keys(Some("num_train_epochs"), false).unwrap();
        assert!(alias.starts_with("training.epochs"), "{alias}");
    }
}
