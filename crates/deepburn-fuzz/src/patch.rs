//! Patches of JSON texts: a file of the corpus says only what differs from a
//! sound text that a test makes.
//!
//! Objects of a patch go through objects by name and through lists by index.
//! `null` removes a field, and anything else replaces the value. A string
//! between `<<` and `>>` is written as it stands in the patch, quotes without their
//! backslashes, and need not be JSON:
//! `"<<1e999>>"`, or a key twice.

use serde_json::Value;

/// Returns the JSON text `sound` with the changes of `patch`, indented like the
/// files that programs write.
///
/// # Panics
///
/// Panics if either text is not JSON.
pub fn patched(sound: &[u8], patch: &[u8]) -> Vec<u8> {
    let mut value = serde_json::from_slice(sound).expect("the sound text is JSON");
    apply(&mut value, serde_json::from_slice(patch).expect("a patch is JSON"));
    let text = serde_json::to_string_pretty(&value).expect("a value is writable");
    let mut parts = text.split("\"<<");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (literal, rest) = part.split_once(">>\"").expect("literal text ends with >>");
        out.push_str(&literal.replace("\\\"", "\""));
        out.push_str(rest);
    }
    out.into_bytes()
}

/// Changes `value` as `patch` says.
fn apply(value: &mut Value, patch: Value) {
    let Value::Object(changes) = patch else {
        *value = patch;
        return;
    };
    for (name, change) in changes {
        if let Value::Array(list) = value {
            let index = name.parse::<usize>().expect("a patch of a list names indices");
            apply(&mut list[index], change);
        } else if change.is_null() {
            value.as_object_mut().map(|fields| fields.remove(&name));
        } else {
            if !value.is_object() {
                *value = Value::Object(Default::default());
            }
            apply(&mut value[name], change);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_change_remove_and_write_word_for_word() {
        let sound = br#"{"a": {"b": 1, "c": 2}, "list": [{"x": 1}, {"x": 2}]}"#;
        let patch =
            br#"{"a": {"b": null, "d": "<<1e999>>"}, "list": {"1": {"x": "<<3, \"x\": 4>>"}}}"#;
        let text = String::from_utf8(patched(sound, patch)).unwrap();
        let text: String = text.split_whitespace().collect();
        assert_eq!(text, r#"{"a":{"c":2,"d":1e999},"list":[{"x":1},{"x":3,"x":4}]}"#);
    }
}
