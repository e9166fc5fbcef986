//! Checks the chapter "Common keys" against the generated chapter "Configuration keys": sections,
//! keys and defaults.

use std::collections::HashMap;
use std::fs;

use crate::markdown::{anchor, root};

fn chapter(name: &str) -> String {
    fs::read_to_string(root().join("docs/src").join(name)).unwrap()
}

/// Returns the cells of a row of a table; none for other lines.
fn cells(line: &str) -> Vec<&str> {
    line.strip_prefix('|').map_or(vec![], |row| row.split('|').map(str::trim).collect())
}

/// Returns the defaults of all keys by the anchor of their section and their name.
fn defaults() -> HashMap<(String, String), String> {
    let text = chapter("keys.md");
    let mut defaults = HashMap::new();
    let mut section = String::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = anchor(heading);
        }
        if let [key, _, default, ..] = cells(line)[..]
            && let Some(name) = key.split('`').nth(1)
        {
            defaults.insert((section.clone(), name.to_owned()), default.to_owned());
        }
    }
    defaults
}

#[test]
fn common_keys_have_their_defaults() {
    let defaults = defaults();
    let text = chapter("common-keys.md");
    let mut checked = 0;
    for line in text.lines() {
        let [link, default, ..] = cells(line)[..] else { continue };
        let Some((path, target)) =
            link.strip_prefix("[`").and_then(|link| link.split_once("`](keys.md#"))
        else {
            continue;
        };
        let name = path.rsplit('.').next().unwrap();
        let place = (target.trim_end_matches(')').to_owned(), name.to_owned());
        let known = defaults.get(&place).unwrap_or_else(|| panic!("{path} is not in {}", place.0));
        // The chapter of keys has a value in code, `required` or nothing, which is explained in
        // words here.
        match known.starts_with('`') {
            true => assert_eq!(default, known, "{path}"),
            false => assert!(!default.starts_with('`'), "{path} has no default, not {default}"),
        }
        checked += 1;
    }
    assert!(checked > 30, "only {checked} keys");
}
