//! Rows of all formats, and rows that are refused.

use serde_json::{Value, json};

use super::*;

fn read(row: Value) -> Row {
    Row::read(&row).unwrap_or_else(|error| panic!("{row}: {error}"))
}

fn error(row: Value) -> String {
    match Row::read(&row) {
        Ok(row) => panic!("{row:?}"),
        Err(error) => error.to_string(),
    }
}

fn chat(messages: Value) -> Value {
    json!({ "messages": messages })
}

fn texts(messages: &[Message]) -> Vec<(&str, &str)> {
    messages.iter().map(|it| (it.role(), it.fields()["content"].as_str().unwrap())).collect()
}

#[test]
fn columns_of_templates_are_noted_beside_texts() {
    let read = |row: Value| RowReader::of_row(&row).unwrap().read(&row).unwrap().notes;
    let kwargs = json!({"a": true});
    for row in [
        json!({"text": "a", "chat_template_kwargs": kwargs}),
        json!({"prompt": "a", "completion": "b", "chat_template_kwargs": kwargs}),
        json!({"prompt": "a", "chosen": "b", "rejected": "c", "chat_template_kwargs": kwargs}),
    ] {
        assert_eq!(read(row).unread_column, Some("chat_template_kwargs"));
    }
    assert_eq!(read(json!({"text": "a", "tools": [{}]})).unread_column, Some("tools"));
    let empty = json!({"text": "a", "tools": [], "chat_template_kwargs": {}, "documents": null});
    assert_eq!(read(empty).unread_column, None);
    let messages = json!([{"role": "user", "content": "a"}]);
    let chat = json!({"messages": messages, "chat_template_kwargs": kwargs});
    assert_eq!(read(chat).unread_column, None);
}

/// TRL and `transformers` test for `None`.
#[test]
fn empty_lists_of_tools_are_lists() {
    let messages = json!([{"role": "user", "content": "a"}]);
    for (tools, expected) in [
        (json!([]), Some(vec![])),
        (json!("[]"), Some(vec![])),
        (json!(""), None),
        (json!("null"), None),
        (Value::Null, None),
    ] {
        let Row::Chat { context, .. } = read(json!({"messages": messages, "tools": tools})) else {
            panic!()
        };
        assert_eq!(context.tools, expected, "{tools}");
    }
}

#[test]
fn senders_become_roles() {
    let turns =
        json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": null}]);
    let Row::Chat { messages, .. } = read(json!({"conversations": turns, "system": "s", "id": 7}))
    else {
        panic!()
    };
    assert_eq!(texts(&messages), [("system", "s"), ("user", "a"), ("assistant", "b")]);
    let call = json!([
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"},
        {"from": "observation", "value": "2"},
    ]);
    let Row::Chat { messages, .. } =
        read(json!({"conversations": call, "tools": "[{\"name\": \"f\"}]"}))
    else {
        panic!()
    };
    assert_eq!(texts(&messages), [("user", "a"), ("assistant", ""), ("tool", "2")]);
    assert_eq!(
        messages[1].fields()["tool_calls"][0]["function"],
        json!({"name": "f", "arguments": {"x": 1}})
    );
}

#[test]
fn instructions_become_conversations() {
    let row = json!({"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "s"});
    let Row::ChatCompletion { prompt, completion, .. } = read(row) else { panic!() };
    assert_eq!(
        texts(&prompt),
        [("system", "s"), ("user", "d"), ("assistant", "e"), ("user", "a\nb")]
    );
    assert_eq!(texts(&completion), [("assistant", "c")]);
    let Row::ChatCompletion { prompt, .. } =
        read(json!({"instruction": "a", "input": "", "output": "c"}))
    else {
        panic!()
    };
    assert_eq!(texts(&prompt), [("user", "a")]);
}

#[test]
fn common_starts_become_prompts() {
    let row = json!({"chosen": "It is blue", "rejected": "It is green"});
    let expected = ("It is".to_owned(), " blue".to_owned(), " green".to_owned());
    let Row::Preference { prompt, chosen, rejected } = read(row) else { panic!() };
    assert_eq!((prompt, chosen, rejected), expected);
    let question = json!({"role": "user", "content": "q"});
    let answer = |text: &str| json!({"role": "assistant", "content": text});
    let row = json!({"prompt": "q", "chosen": [question, answer("a")], "rejected": [question, answer("b")]});
    let Row::ChatPreference { prompt, chosen, rejected, .. } = read(row) else { panic!() };
    assert_eq!([prompt.len(), chosen.len(), rejected.len()], [1, 1, 1]);
    assert!(error(json!({"chosen": "a", "rejected": "b"})).contains("another start"));
}

#[test]
fn arguments_are_parsed() {
    let call = |arguments: Value| json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]);
    let row =
        RowReader::new(RowFormat::Messages).read(&chat(call(json!("{\"a\": null}")))).unwrap();
    let Row::Chat { messages, .. } = row.row else { panic!() };
    assert!(row.notes.parsed_arguments);
    assert_eq!(messages[1].fields()["tool_calls"][0]["function"]["arguments"], json!({"a": null}));
    assert!(messages[1].fields().get("content").is_none());
    let path = "`messages[1].tool_calls[0].function.arguments`";
    assert!(error(chat(call(json!("{")))).starts_with(path));
    assert!(error(chat(call(json!(7)))).starts_with(path));
    assert!(error(chat(call(json!("[1]")))).starts_with(path));
    let mut reader = RowReader::new(RowFormat::Messages);
    reader.nested_nulls = NestedNulls::Remove;
    let Row::Chat { messages, .. } =
        reader.read(&chat(call(json!({"a": 1, "b": null})))).unwrap().row
    else {
        panic!()
    };
    assert_eq!(messages[1].fields()["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
}

#[test]
fn long_names_are_shortened() {
    let long = "k".repeat(10_000);
    for row in [
        json!({long.clone(): 1}),
        chat(json!([{"role": "user", "content": "a", long.clone(): 1}])),
        chat(json!([{"role": long, "content": "a"}])),
        chat(json!([{"role": "user", "content": [{"type": long}]}])),
        json!({"conversations": [{"from": long, "value": "a"}]}),
    ] {
        let error = error(row);
        assert!(error.len() < 700, "{error}");
    }
    let rejected = ChatError::Rejected { line: 1, message: long };
    assert!(rejected.to_string().len() < 600);
}

#[test]
fn errors_name_the_field() {
    for (row, start) in [
        (json!([]), "the row is empty"),
        (json!({"a": 1}), "the columns `a` are of no known format"),
        (json!({"text": "a", "messages": []}), "the columns are of several formats"),
        (json!({"text": 1}), "`text` is 1, but it must be a text"),
        (chat(json!([])), "`messages` is empty"),
        (chat(json!("a")), "`messages` is `a`"),
        (chat(json!([1])), "`messages[0]` is 1"),
        (chat(json!([{"role": "boss", "content": "a"}])), "`messages[0].role` is `boss`"),
        (chat(json!([{"role": "user"}])), "`messages[0].content` is missing"),
        (chat(json!([{"role": "user", "content": 1}])), "`messages[0].content` is 1"),
        (
            chat(json!([{"role": "user", "content": [{"type": "image"}]}])),
            "`messages[0].content[0]` is a part of the",
        ),
        (
            chat(json!([{"role": "user", "content": "a", "weight": 0}])),
            "`messages[0].weight` is 0, but it must be absent",
        ),
        (chat(json!([{"role": "user", "content": "a", "x": "y"}])), "`messages[0].x` is `y`"),
        (
            chat(json!([{"role": "user", "content": "a", "tool_calls": []}])),
            "`messages[0].tool_calls` is empty",
        ),
        (
            json!({"conversations": [{"from": "boss", "value": "a"}]}),
            "`conversations[0].from` is `boss`",
        ),
        (json!({"conversations": [{"from": "gpt"}]}), "`conversations[0].value` is missing"),
        (
            json!({"conversations": [{"from": "gpt", "value": "a", "x": 1}]}),
            "`conversations[0].x` is 1, but it must be absent: the fields of messages are `from`, `value`, `name`",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}], "tools": "["}),
            "`tools` is not valid JSON",
        ),
        (json!({"messages": [{"role": "user", "content": "a"}], "tools": [1]}), "`tools[0]` is 1"),
        (json!({"instruction": "a", "output": "b", "history": [["a"]]}), "`history[0]` is a list"),
        (
            json!({"prompt": "a", "completion": [{"role": "user", "content": "b"}]}),
            "`prompt` is `a`",
        ),
        (json!({"prompt": "a", "completion": 3}), "`completion` is 3, but it must be a text"),
        (json!({"prompt": 3, "completion": "a"}), "`prompt` is 3, but it must be a text"),
        (
            json!({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}),
            "`completion` is `b`, but it must be a list",
        ),
        (json!({"prompt": "a", "completion": null}), "`completion` is null"),
        (json!({"messages": null, "id": 1}), "`messages` is null, but it must be a list"),
    ] {
        let error = error(row);
        assert!(error.starts_with(start), "{error}");
    }
}
