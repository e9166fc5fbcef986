//! What is noticed while rows are encoded. The ids and labels are compared with TRL's in
//! `tests/golden`.

use serde_json::{Value, json};

use super::*;
use crate::Day;

/// A tokenizer with a token for each character, for `<s>` (1), `</s>` (2), `<a>` (3) and `</t>`
/// (4), which is not special. It adds `<s>` to texts.
#[derive(Debug)]
struct Characters;

const ADDED: [(&str, u32); 4] = [("<s>", 1), ("</s>", 2), ("<a>", 3), ("</t>", 4)];

impl TextTokenizer for Characters {
    fn encode(&self, text: &str, surrounding: Surrounding) -> Result<Tokens> {
        let mut tokens = Tokens::default();
        if surrounding == Surrounding::Added {
            tokens.ids.push(1);
            tokens.ranges.push(0..0);
        }
        let mut start = 0;
        while let Some(first) = text[start..].chars().next() {
            let added = ADDED.iter().find(|(token, _)| text[start..].starts_with(token));
            let (id, length) =
                added.map_or((first as u32, first.len_utf8()), |(token, id)| (*id, token.len()));
            tokens.ids.push(id);
            tokens.ranges.push(start..start + length);
            start += length;
        }
        Ok(tokens)
    }

    fn token_text(&self, id: u32) -> String {
        let added = ADDED.iter().find(|(_, it)| *it == id);
        added.map_or_else(
            || char::from_u32(id).into_iter().collect(),
            |(token, _)| (*token).to_owned(),
        )
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        ADDED.iter().find(|(it, _)| *it == token).map(|(_, id)| *id)
    }

    fn is_special(&self, id: u32) -> bool {
        id < 4
    }
}

/// Prints `[role]` before a message, `<a>` before an assistant's, and `</s>` after it.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}</s>\
                        {% else %}[{{ m.content }}]{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";

fn encoder(template: &str, options: EncodeOptions) -> RowEncoder<Characters> {
    let tokens = SpecialTokens::new([("bos_token", "<s>"), ("eos_token", "</s>")]);
    RowEncoder::new(
        Characters,
        Some(ChatTemplates::single(template, Day::today()).unwrap()),
        tokens,
        options,
    )
    .unwrap()
}

fn row(row: Value) -> Row {
    Row::read(&row).unwrap()
}

fn conversation() -> Row {
    row(
        json!({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}),
    )
}

/// Returns the trained text.
fn trained(sample: &EncodedRow) -> String {
    let ids = sample.ids.iter().zip(&sample.trained).filter(|(_, is_trained)| **is_trained);
    ids.map(|(id, _)| Characters.token_text(*id)).collect()
}

const ASSISTANT_ONLY: EncodeOptions = EncodeOptions {
    completion_only_loss: None,
    assistant_only_loss: AssistantOnlyLoss::Turns,
    max_length: None,
};

#[test]
fn assistant_turns_are_trained() {
    let sample = encoder(TEMPLATE, ASSISTANT_ONLY).encode(&conversation()).unwrap();
    assert_eq!((trained(&sample).as_str(), &sample.findings[..]), ("cd</s>", &[][..]));
    let all = encoder(TEMPLATE, EncodeOptions::default()).encode(&conversation()).unwrap();
    assert_eq!(trained(&all), "[ab]<a>cd</s>");
}

/// The template replaces the answer, and prints another generation prompt before it.
#[test]
fn a_last_answer_whose_text_is_changed_is_found_by_its_prompt() {
    let template = TEMPLATE
        .replace("{{ m.content }}</s>", "{{ m.content | trim or '-' }}</s>")
        .replace("%}<a>{% endif", "%}<a><think>{% endif");
    let encode = |question: &str| {
        let messages =
            json!([{"role": "user", "content": question}, {"role": "assistant", "content": " "}]);
        encoder(&template, ASSISTANT_ONLY).encode(&row(json!({"messages": messages})))
    };
    assert_eq!(trained(&encode("a").unwrap()), "-</s>");
    // One of the prompts is a quotation.
    assert!(encode("<a>").unwrap_err().to_string().contains("messages[1]"));
}

#[test]
fn ends_of_turns_outside_the_marks_are_noticed() {
    let marked = TEMPLATE
        .replace("{{ m.content }}</s>", "{% generation %}{{ m.content }}{% endgeneration %}</s>");
    let sample = encoder(&marked, ASSISTANT_ONLY).encode(&conversation()).unwrap();
    assert_eq!(trained(&sample), "cd");
    assert_eq!(sample.findings, [Finding::EndOfTurnUntrained { last: "d".into() }]);
    let messages =
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</t>"}]);
    let row = row(json!({ "messages": messages }));
    let sample = encoder(&marked, ASSISTANT_ONLY).encode(&row).unwrap();
    assert_eq!(sample.findings, [Finding::EndOfTurnUntrained { last: "</t>".into() }]);
    assert_eq!(encoder(TEMPLATE, ASSISTANT_ONLY).encode(&row).unwrap().findings, []);
}

#[test]
fn truncation_is_noticed() {
    let encode = |limit| {
        let options = EncodeOptions { max_length: Some(limit), ..ASSISTANT_ONLY };
        encoder(TEMPLATE, options).encode(&conversation()).unwrap()
    };
    assert_eq!(encode(8).findings, []);
    assert_eq!(encode(7).findings, [Finding::Truncated { length: 8 }]);
    assert_eq!(encode(5).findings, [Finding::LabelsTruncated { length: 8 }]);
    assert!(!encode(5).trained.contains(&true));
}

#[test]
fn two_tokens_for_the_beginning_are_noticed() {
    let sample =
        encoder(TEMPLATE, EncodeOptions::default()).encode(&row(json!({"text": "<s>a"}))).unwrap();
    let twice = |is_conversation| vec![Finding::BosTwice { is_conversation }];
    assert_eq!((sample.ids, sample.findings), (vec![1, 1, 97, 2], twice(false)));
    let template = format!("<s><s>{TEMPLATE}");
    let sample = encoder(&template, EncodeOptions::default()).encode(&conversation()).unwrap();
    assert_eq!(sample.findings, twice(true));
    let pair = row(json!({
        "prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": [{"role": "assistant", "content": "c"}],
    }));
    let pair = encoder(&template, EncodeOptions::default()).encode_preference(&pair).unwrap();
    assert_eq!(pair.findings, twice(true));
}

#[test]
fn texts_that_are_not_printed_are_noticed() {
    let row = row(json!({
        "messages": [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "cd", "reasoning_content": "why"},
        ],
        "tools": [{"type": "function", "function": {"name": "find"}}],
    }));
    let sample = encoder(TEMPLATE, EncodeOptions::default()).encode(&row).unwrap();
    let fields = ["messages[1].reasoning_content", "tools[0]"];
    assert_eq!(sample.findings, fields.map(|it| Finding::NotPrinted { field: it.to_owned() }));
}

#[test]
fn arguments_that_are_not_printed_are_noticed() {
    let findings = |template: &str, arguments: Value| {
        let call = json!({"function": {"name": "find", "arguments": arguments}});
        let row = row(json!({"messages": [
            {"role": "user", "content": "ab"}, {"role": "assistant", "tool_calls": [call]},
        ]}));
        encoder(template, EncodeOptions::default()).encode(&row).unwrap().findings
    };
    let calls = |printed: &str| {
        format!(
            "{{% for m in messages %}}[{{{{ m.content }}}}{{% for c in m.tool_calls %}}{printed}{{% endfor %}}]{{% endfor %}}"
        )
    };
    let (name, all) = (calls("{{ c.function.name }}"), calls("{{ c.function | tojson }}"));
    let field = "messages[1].tool_calls[0].function.arguments".to_owned();
    assert_eq!(findings(&name, json!({"query": [77]})), [Finding::NotPrinted { field }]);
    assert_eq!(findings(&name, json!({})), []);
    assert_eq!(findings(&all, json!({"query": [77]})), []);
    let value = calls("{{ c.function.name }}{{ c.function.arguments.query[0] }}");
    assert_eq!(findings(&value, json!({"query": [77]})), []);
}

#[test]
fn changed_texts_are_printed() {
    for filter in ["upper", "title", "replace(' ', '_')", "tojson", "trim"] {
        let template =
            format!("{{% for m in messages %}}{{{{ m.content | {filter} }}}}{{% endfor %}}");
        let messages = json!([{"role": "user", "content": "straße no. 5 "}]);
        let row = row(json!({ "messages": messages }));
        let sample = encoder(&template, EncodeOptions::default()).encode(&row).unwrap();
        assert_eq!(sample.findings, [], "{filter}");
    }
}

#[test]
fn findings_have_remedies() {
    let text = String::new;
    for finding in [
        Finding::EndOfTurnUntrained { last: text() },
        Finding::BosTwice { is_conversation: true },
        Finding::BosTwice { is_conversation: false },
        Finding::NotPrinted { field: text() },
        Finding::VariableUnread { name: "k".repeat(10_000) },
        Finding::EmptyAnswer { field: text() },
        Finding::PromptDiffers { lost: "k".repeat(10_000) },
        Finding::EqualCompletions,
    ] {
        let said = finding.to_string();
        assert!(said.contains("; ") && said.len() < 500, "{said}");
    }
    assert!(Finding::PromptDiffers { lost: text() }.to_string().contains("(white space)"));
}

#[test]
fn documents_without_effect_are_noticed() {
    let row = row(json!({
        "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}],
        "documents": [{"title": "T", "contents": "a fact"}, {"text": "another"}, {"id": 3}],
    }));
    let fields = |template: &str| {
        let sample = encoder(template, EncodeOptions::default()).encode(&row).unwrap();
        let field = |finding| match finding {
            Finding::NotPrinted { field } => field,
            other => panic!("{other}"),
        };
        sample.findings.into_iter().map(field).collect::<Vec<_>>()
    };
    assert_eq!(fields(TEMPLATE), ["documents[1].text", "documents[0]", "documents[2]"]);
    let prints = "{% for d in documents %}{{ d.contents or d.text or d.id }}{% endfor %}";
    assert_eq!(fields(&format!("{prints}{TEMPLATE}")), ["documents[2]"]);
}

#[test]
fn names_and_variables_without_effect_are_noticed() {
    let row = row(json!({
        "messages": [
            {"role": "user", "content": "ab", "name": "Ada"},
            {"role": "assistant", "content": "cd"},
        ],
        "chat_template_kwargs": {"style": "short"},
    }));
    let field = "messages[0].name".to_owned();
    let unread = Finding::VariableUnread { name: "style".to_owned() };
    let sample = encoder(TEMPLATE, EncodeOptions::default()).encode(&row).unwrap();
    assert_eq!(sample.findings, [Finding::NotPrinted { field }, unread]);
    let template = format!(
        "{{% macro intro(m) %}}{{% if style %}}{{{{ m.name }}}}:{{% endif %}}{{% endmacro %}}{{{{ intro(messages[0]) }}}}{TEMPLATE}"
    );
    let sample = encoder(&template, EncodeOptions::default()).encode(&row).unwrap();
    assert_eq!(sample.findings, []);
    let template = format!("{{% set style = style | default('') %}}{{{{ style }}}}Ada{TEMPLATE}");
    let sample = encoder(&template, EncodeOptions::default()).encode(&row).unwrap();
    assert_eq!(sample.findings, []);
}

#[test]
fn empty_answers_are_noticed() {
    let empty = |field: &str| Finding::EmptyAnswer { field: field.to_owned() };
    let findings =
        |it| encoder(TEMPLATE, EncodeOptions::default()).encode(&row(it)).unwrap().findings;
    let messages = json!([
        {"role": "user", "content": ""}, {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "ab"}, {"role": "assistant", "content": " \n"},
    ]);
    assert_eq!(findings(json!({"messages": messages})), [empty("messages[3]")]);
    assert_eq!(findings(json!({"prompt": "ab", "completion": ""})), [empty("completion")]);
    let pair = row(json!({"prompt": "ab", "chosen": "", "rejected": "c"}));
    let pair = encoder(TEMPLATE, EncodeOptions::default()).encode_preference(&pair).unwrap();
    assert_eq!(pair.findings, [empty("chosen")]);
    let answer = |content: Value| json!([{"role": "assistant", "content": content}]);
    let prompt = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]);
    assert_eq!(findings(json!({"prompt": prompt, "completion": answer(json!("b"))})), []);
    let parts = json!([{"type": "text", "text": ""}]);
    let found = findings(json!({"prompt": prompt, "completion": answer(parts)}));
    assert!(found.contains(&empty("prompt + completion[2]")), "{found:?}");
    let rejected =
        json!({"prompt": prompt, "chosen": answer(json!("b")), "rejected": answer(json!(""))});
    let pair =
        encoder(TEMPLATE, EncodeOptions::default()).encode_preference(&row(rejected)).unwrap();
    assert_eq!(pair.findings, []);
}

#[test]
fn prompts_that_are_encoded_differently_are_noticed() {
    let template = TEMPLATE.replace("%}<a>{% endif", "%}<a>?{% endif");
    let row = row(json!({
        "prompt": [{"role": "user", "content": "ab"}], "completion": [{"role": "assistant", "content": "cd"}],
    }));
    let sample = encoder(&template, EncodeOptions::default()).encode(&row).unwrap();
    assert_eq!(trained(&sample), "cd</s>");
    assert_eq!(sample.findings, [Finding::PromptDiffers { lost: "?".into() }]);
}

#[test]
fn options_that_do_not_fit_are_errors() {
    let error = |options, row| encoder(TEMPLATE, options).encode(&row).unwrap_err().to_string();
    let completion_only = EncodeOptions { completion_only_loss: Some(true), ..Default::default() };
    let message = error(completion_only, conversation());
    assert!(message.starts_with("`completion_only_loss` is set"), "{message}");
    assert!(message.contains("; remove the row, or the option"), "{message}");
    let message = error(ASSISTANT_ONLY, row(json!({"text": "a"})));
    assert!(message.starts_with("`assistant_only_loss` is set"), "{message}");
    assert!(message.contains("; remove the row, or set it to false"), "{message}");
    let user_only = row(json!({"messages": [{"role": "user", "content": "a"}]}));
    assert!(error(ASSISTANT_ONLY, user_only).contains("no message of the assistant"));
    let preference = row(json!({"chosen": "ab", "rejected": "ac"}));
    assert!(error(EncodeOptions::default(), preference).contains("preference"));
    let variables = row(
        json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}}),
    );
    assert!(
        error(EncodeOptions::default(), variables).starts_with("`chat_template_kwargs` is `tools`")
    );
}

#[test]
fn preferences_are_truncated_and_compared() {
    let row = row(json!({"prompt": "ab", "chosen": "cde", "rejected": "cde"}));
    let options = EncodeOptions { max_length: Some(5), ..Default::default() };
    let sample = encoder(TEMPLATE, options).encode_preference(&row).unwrap();
    assert_eq!((sample.prompt, sample.chosen), (vec![1, 97, 98], vec![99, 100]));
    assert_eq!(sample.findings[0], Finding::EqualCompletions);
    assert_eq!(
        sample.findings[1..],
        [Finding::Truncated { length: 7 }, Finding::Truncated { length: 7 }]
    );
}

#[test]
fn prompts_end_where_an_answer_begins() {
    let encoder = encoder(TEMPLATE, EncodeOptions::default());
    let text = |ids: &[u32]| ids.iter().map(|id| Characters.token_text(*id)).collect::<String>();
    let user = |content: &str| json!({"role": "user", "content": content});
    let assistant = |content: &str| json!({"role": "assistant", "content": content});
    for (fields, expected) in [
        (json!({"text": "ab"}), None),
        (json!({"prompt": "ab", "completion": "c"}), Some(("<s>ab", "c"))),
        (
            json!({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}),
            Some(("[a]<a>", "b")),
        ),
        (json!({"messages": [assistant("b"), user("c")]}), None),
        (json!({"messages": [user("c")]}), None),
        (json!({"prompt": [user("a")], "completion": [assistant("b")]}), Some(("[a]<a>", "b"))),
        (json!({"prompt": "a", "chosen": "b", "rejected": "c"}), Some(("<s>a", "b"))),
        (
            json!({"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}),
            Some(("[a]<a>", "b")),
        ),
    ] {
        let found = encoder.prompt(&row(fields.clone())).unwrap();
        let found = found.as_ref().map(|it| (text(&it.ids), it.expected.as_str()));
        let expected = expected.map(|(prompt, expected)| (prompt.to_owned(), expected));
        assert_eq!(found, expected, "{fields}");
    }
    assert_eq!(text(&encoder.user_prompt("a").unwrap()), "[a]<a>");
    let bare =
        RowEncoder::new(Characters, None, SpecialTokens::default(), EncodeOptions::default());
    assert_eq!(text(&bare.unwrap().user_prompt("a").unwrap()), "<s>a");
}
