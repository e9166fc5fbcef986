//! Fuzzes rows and chat templates. They are refused, or they are rendered, and each byte of a mask is in the text.

use deepburn_chat::{
    ChatContext, ChatTemplate, Ending, Message, NestedNulls, Row, RowFormat, RowReader,
    SpecialTokens, render_with_turns,
};
use deepburn_fuzz::fuzz;
use serde_json::json;

const TEMPLATE: &str = r#"{%- if tools %}{{- '<s>system\n' }}{%- for tool in tools %}{{- tool | tojson(indent=2) }}
{%- endfor %}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}{% if message.role == 'user' and ns.last < 0 %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<s>' + message['role'] + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content.split('</think>')[-1] | trim }}</s>
{% endgeneration %}{% else %}{{ message.content }}</s>{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.name ~ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{%- endif %}"#;

fn render(template: &ChatTemplate, messages: &[Message], context: &ChatContext) -> bool {
    let tokens = SpecialTokens::new([("eos_token", "</s>"), ("bos_token", "<s>")]);
    let Ok(rendered) = render_with_turns(template, messages, context, &tokens) else {
        return false;
    };
    let mut last = 0;
    for range in &rendered.generated {
        assert!(range.start >= last && range.start <= range.end);
        assert!(rendered.text.get(range.clone()).is_some());
        last = range.end;
    }
    _ = template.render(messages, context, &tokens, Ending::GenerationPrompt);
    true
}

#[test]
fn mutated_templates_are_refused_or_render() {
    let messages = [
        Message::text("user", "a</think>"),
        Message::text("assistant", "b"),
        Message::text("user", "\u{FDD0}c"),
    ];
    let tokens = [
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "#}",
        "-",
        "{% generation %}",
        "{% endgeneration %}",
        "{% raw %}",
        "{% endraw %}",
        "for x in range(100000)",
        "{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "none",
        "messages",
        "(",
        ")",
        "[",
        "]",
        "'",
        "\"",
        "|tojson",
        "|string",
        "~",
        "* 99999999",
        "|join",
        "strftime_now('%Y')",
        "é",
        "{% set messages = [messages, messages] %}",
        "{% break %}",
        "{% include 'x' %}",
        "9223372036854775807",
    ];
    let (mut refused, mut rendered) = (0, 0);
    fuzz(4_000, |mutator| {
        let mut text = TEMPLATE.as_bytes().to_vec();
        (0..=mutator.below(3)).for_each(|_| mutator.mutate(&mut text, &tokens));
        let Ok(text) = String::from_utf8(text) else { return };
        match ChatTemplate::compile(&text) {
            Ok(template) if render(&template, &messages, &ChatContext::default()) => rendered += 1,
            _ => refused += 1,
        }
    });
    assert!(refused > 100 && rendered > 100, "{refused} {rendered}");
}

#[test]
fn mutated_rows_are_refused_or_encoded() {
    let call = json!({"type": "function", "id": "1", "function": {"name": "add", "arguments": "{\"a\": 1}"}});
    let tools =
        json!([{"type": "function", "function": {"name": "add", "parameters": {"a": null}}}]);
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "1"},
        {"role": "assistant", "content": "<think>x</think>\nyes", "reasoning_content": "r"},
    ]);
    let turn = json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]);
    let rows = [
        json!({"text": "a"}),
        json!({"messages": messages, "tools": tools, "chat_template_kwargs": {"x": true}}),
        json!({"conversations": turn, "system": "s", "tools": tools.to_string()}),
        json!({"prompt": "a", "completion": "b"}),
        json!({"prompt": turn, "completion": [{"role": "assistant", "content": "c"}]}),
        json!({"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]}),
        json!({"chosen": "ab c", "rejected": "ab d"}),
        json!({"prompt": "a", "chosen": messages, "rejected": turn}),
    ];
    let rows: Vec<Vec<u8>> = rows.iter().map(|it| it.to_string().into_bytes()).collect();
    let tokens = [
        "null",
        "\"\"",
        "[]",
        "{}",
        "1e999",
        "\"\\ud800\"",
        "\"role\"",
        "\"from\"",
        "\"user\"",
        "-1",
        "\u{FDD0}",
        "\"content\":null",
        "\"weight\":0,",
        "{\"type\":\"image\"}",
        "[[[[[[[[",
        "\"assistant\"",
        "\"{\\\"a\\\":\"",
    ];
    let template = ChatTemplate::compile(TEMPLATE).unwrap();
    let unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "");
    let unmarked = ChatTemplate::compile(&unmarked).unwrap();
    let (mut refused, mut read) = (0, 0);
    fuzz(20_000, |mutator| {
        let mut text = mutator.pick(&rows).clone();
        match mutator.below(2) {
            0 => mutator.mutate(&mut text, &tokens),
            _ => mutator.mutate_json(&mut text),
        }
        let Ok(text) = String::from_utf8(text) else { return };
        for format in RowFormat::ALL {
            let mut reader = RowReader::new(format);
            reader.nested_nulls = *mutator.pick(&[NestedNulls::Keep, NestedNulls::Remove]);
            let Ok(row) = reader.read_line(&text) else {
                refused += 1;
                continue;
            };
            read += 1;
            if let Row::Chat { messages, context } = &row.row {
                render(&template, messages, context);
                render(&unmarked, messages, context);
            }
        }
    });
    assert!(refused > 1000 && read > 1000, "{refused} {read}");
}

/// Templates that loop, allocate or recurse without an end.
#[test]
fn greedy_templates_are_refused() {
    let double = "{% set x = x ~ x %}".repeat(60);
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}".to_owned(),
        "{{ 'a' * 10000000000 }}".to_owned(),
        "{{ '{:>9999999999}'.format('a') }}".to_owned(),
        "{{ 'b{0:{1}}'.format('a', 1) }}{{ '{:.9999999f}'.format(1.0) }}".to_owned(),
        format!("{{% set x = 'aaaaaaaa' %}}{double}{{{{ x }}}}"),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(),
        format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
        format!("{}{}", "{% if true %}".repeat(10_000), "{% endif %}".repeat(10_000)),
        format!("{{% set x = [1] %}}{}{{{{ x | tojson }}}}", "{% set x = [x, x] %}".repeat(60)),
        format!("{{% set x = [1] %}}{}{{{{ x | tojson }}}}", "{% set x = [x] %}".repeat(200)),
        format!("{{% set x = [1] %}}{}{{{{ x }}}}", "{% set x = [x, x] %}".repeat(60)),
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}".to_owned(),
        // The deepest list before the steps are used up.
        format!(
            "{{% set n = namespace(x=[]) %}}{}",
            "{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}".repeat(10)
        ),
    ] {
        let messages = [Message::text("user", "a")];
        let compiled = ChatTemplate::compile(&source);
        let is_refused = match &compiled {
            Ok(template) => {
                let (context, tokens) = (ChatContext::default(), SpecialTokens::default());
                template.render(&messages, &context, &tokens, Ending::Complete).is_err()
            }
            Err(_) => true,
        };
        assert!(is_refused, "{}", &source[..source.len().min(80)]);
    }
}
