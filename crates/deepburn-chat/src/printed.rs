//! Finds texts of a conversation that its template does not print.

use serde_json::Value;

use crate::{ChatContext, Finding, Message};

/// The bytes between two texts in which the second one is looked for first.
const MAX_HEADER: usize = 128;

/// Returns the fields of `messages` and `context` whose text is not part of `text`.
///
/// White space around a text does not count, and a text may be printed as JSON.
pub(crate) fn unprinted(
    text: &str,
    messages: &[Message],
    context: &ChatContext,
    field: &str,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut rest = text;
    let mut check = |field: String, value: Option<&Value>| {
        let Some(string) = value.and_then(Value::as_str).map(str::trim) else { return };
        if let Some(after) = printed_next(rest, string) {
            rest = after;
            return;
        }
        let as_json = || {
            let json = Value::from(string).to_string();
            json.len() > 2 && text.contains(&json[1..json.len() - 1])
        };
        if !text.contains(string) && !as_json() {
            findings.push(Finding::NotPrinted { field });
        }
    };
    for (index, message) in messages.iter().enumerate() {
        let fields = message.fields();
        let path = format!("{field}[{index}]");
        match fields.get("content") {
            Some(Value::Array(parts)) => {
                for (part, value) in parts.iter().enumerate() {
                    check(format!("{path}.content[{part}].text"), value.get("text"));
                }
            }
            content => check(format!("{path}.content"), content),
        }
        for name in ["reasoning_content", "thinking", "reasoning"] {
            check(format!("{path}.{name}"), fields.get(name));
        }
        for (call, value) in
            fields.get("tool_calls").and_then(Value::as_array).into_iter().flatten().enumerate()
        {
            let function = value.get("function").unwrap_or(value);
            check(format!("{path}.tool_calls[{call}]"), function.get("name"));
        }
    }
    for (index, tool) in context.tools.iter().flatten().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        check(format!("tools[{index}]"), function.get("name"));
    }
    for (index, document) in context.documents.iter().flatten().enumerate() {
        check(format!("documents[{index}].text"), document.get("text"));
    }
    findings
}

/// Returns the text after `string`, if it starts within a few bytes. Templates print most texts in their order, shortly
/// after each other, and searching a whole conversation for each of its texts takes longer than rendering it.
fn printed_next<'t>(text: &'t str, string: &str) -> Option<&'t str> {
    let mut starts = text.char_indices().map(|(at, _)| at).take_while(|at| *at < MAX_HEADER);
    starts.find_map(|at| text[at..].strip_prefix(string))
}
