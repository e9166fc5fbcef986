//! The objects of a row that a template may print with all of their fields.

use deepburn_datasets::RowObject;
use serde_json::{Map, Value};

/// Returns the objects in calls of tools, tools and documents. Null fields of messages are not
/// printed.
pub(super) fn nested_objects(row: &Map<String, Value>) -> Vec<RowObject> {
    let mut objects = Vec::new();
    for (name, value) in row {
        let Value::Array(items) = value else { continue };
        if ["tools", "documents"].contains(&name.as_str()) {
            push(value, name.clone(), &mut objects);
            continue;
        }
        let calls = items.iter().filter_map(|message| message.get("tool_calls"));
        calls.for_each(|calls| push(calls, format!("{name}[].tool_calls"), &mut objects));
    }
    objects
}

/// Adds the objects in `value`, which is at `path`.
fn push(value: &Value, path: String, objects: &mut Vec<RowObject>) {
    match value {
        Value::Object(fields) => {
            let named = fields.iter().map(|(name, value)| (name.clone(), value.is_null()));
            objects.push(RowObject { path: path.clone(), fields: named.collect() });
            fields.iter().for_each(|(name, value)| push(value, format!("{path}.{name}"), objects));
        }
        Value::Array(items) => {
            items.iter().for_each(|item| push(item, format!("{path}[]"), objects));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_below_messages_are_found() {
        let row = json!({
            "id": {"a": null},
            "messages": [
                {"role": "user", "name": null},
                {"content": null, "tool_calls": [{"function": {"arguments": {"a": null, "b": "{}"}}}]},
            ],
            "tools": [{"a": [{"b": 1}]}],
        });
        let found = nested_objects(row.as_object().unwrap());
        let calls = "messages[].tool_calls[]";
        let expected = [
            (calls.to_owned(), vec![("function", false)]),
            (format!("{calls}.function"), vec![("arguments", false)]),
            (format!("{calls}.function.arguments"), vec![("a", true), ("b", false)]),
            ("tools[]".to_owned(), vec![("a", false)]),
            ("tools[].a[]".to_owned(), vec![("b", false)]),
        ];
        let object = |(path, fields): (String, Vec<(&str, bool)>)| RowObject {
            path,
            fields: fields.into_iter().map(|(name, is_null)| (name.to_owned(), is_null)).collect(),
        };
        assert_eq!(found, expected.map(object));
    }
}
