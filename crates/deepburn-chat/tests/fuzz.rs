//! Fuzzes rows and chat templates. They are refused, or they are rendered, and each byte of a mask
//! is in the text.

use deepburn_chat::{
    ChatContext, ChatError, ChatTemplate, ConversationEnd, Message, NestedNulls, Row, RowFormat,
    RowReader, SpecialTokens, render_with_turns,
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
    _ = template.render(messages, context, &tokens, ConversationEnd::GenerationPrompt);
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
        "{% set messages = messages + messages %}",
        "{% set ns.last = ns %}",
        "{% set ns.last = {'a': messages, 'b': messages[1:]} %}",
        "* 2",
        "[1:]",
        "|pprint",
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
    assert!(refused > 100 && rendered > 50, "{refused} {rendered}");
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
        assert_refused(&source);
    }
}

fn assert_refused(source: &str) {
    let messages = [Message::text("user", "a")];
    let (context, tokens) = (ChatContext::default(), SpecialTokens::default());
    let rendered = ChatTemplate::compile(source)
        .and_then(|it| it.render(&messages, &context, &tokens, ConversationEnd::Complete));
    assert!(rendered.is_err(), "{}", &source[..source.len().min(120)]);
}

/// A list that is twice as long after each step has no end, but it needs no memory until it is
/// walked.
#[test]
fn lists_without_an_end_are_refused() {
    let values = [
        // A list that is added to itself, and lists of it.
        ("[1]", "n.x + n.x"),
        ("messages", "n.x + n.x"),
        ("[[1]]", "[n.x[0] + n.x[0]]"),
        ("['a' * 1000] * 1000", "n.x + n.x * 2"),
        // Values that contain the same value twice.
        ("[1]", "[n.x, n.x]"),
        ("[[1]]", "[[n.x[0], n.x[0]]]"),
        ("([1],)", "([n.x[0], n.x[0]],)"),
        ("(1,)", "(n.x, n.x)"),
        ("[{}]", "[{'a': n.x[0], 'b': n.x[0]}]"),
        ("[{'a': [1]}]", "[{'a': [n.x[0].items(), n.x[0].values()]}]"),
        ("[1]", "[n.x, n.x] | batch(2) | list"),
        ("[1]", "[n.x, n.x] | groupby(0) | first"),
    ];
    let uses = [
        "{{ n.x ~ 'a' }}",
        "{{ n.x | join('-') }}",
        "{{ ''.join([n.x]) }}",
        "{{ '{}'.format(n.x) }}",
        "{{ 'a' | replace(n.x, 'b') }}",
        "{{ [n.x] | tojson }}",
        "{{ n.x | upper }}",
        "{{ n.x | string }}",
        "{{ n.x in 'a' }}",
        "{{ {n.x: 1} }}",
        "{{ raise_exception(n.x) }}",
        "{{ n.x }}",
    ];
    for (start, next) in values {
        let double = format!("{{% for i in range(60) %}}{{% set n.x = {next} %}}{{% endfor %}}");
        for end in uses {
            assert_refused(&format!("{{% set n = namespace(x={start}) %}}{double}{end}"));
        }
    }
}

/// Work that a few instructions do on long lists and texts.
#[test]
fn expensive_operations_are_refused() {
    let repeated = |work: &str| format!("{{% for i in range(99999) %}}{work}{{% endfor %}}");
    let nested = |open: &str, end: &str, close: &str| {
        format!("{}{{{{ {end} }}}}{}", open.repeat(30), close.repeat(30))
    };
    for source in [
        repeated("{{ ([0] * 99999999)[99999998:] | first }}"),
        repeated("{{ (99999999 * [0])[99999998:] | first }}"),
        repeated("{{ (range(99999) * 1000)[99999998:] | first }}"),
        repeated("{{ [0] * 99999999 == [0] * 99999999 }}"),
        repeated("{{ ([0] * 99999999) | sort | length }}"),
        // Lists of lists that have not been computed.
        format!(
            "{{% set n = namespace(x=[[1]]) %}}{}",
            repeated("{% set n.x = [n.x[0][0:] * 1] %}").repeat(9)
        ),
        format!("{{{{ ([1]{})[0] }}}}", "[0:]".repeat(60_000)),
        format!("{{{{ ([1]{})[0] }}}}", " * 1".repeat(60_000)),
        format!("{{{{ 1{} }}}}", "~1".repeat(80_000)),
        // Values that are stored by other statements than `set`.
        nested("{% with a = a + a if a else [1] %}", "a ~ ''", "{% endwith %}")
            .replace("a + a", "[a, a]"),
        nested("{% for a in [a + a if a else [1]] %}", "a ~ ''", "{% endfor %}"),
        "{% macro m(x) %}{{ m(x + x) }}{{ x ~ '' }}{% endmacro %}{{ m([]) }}".to_owned(),
        "{% for a in [[1]] recursive %}{{ loop([a + a]) }}{% endfor %}".to_owned(),
        // Values that contain themselves.
        "{% set n = namespace() %}{% set n.x = n %}{{ n ~ '' }}".to_owned(),
        "{% set n = namespace() %}{% set n.x = [n] %}{{ n ~ '' }}".to_owned(),
        "{% set n = namespace() %}{% set m = namespace(x=n, y=n) %}{{ m }}".to_owned(),
        // Texts.
        "{% set x = 'a ' * 20000000 %}{{ x.split(' ') | length }}".to_owned(),
        "{% set x = '\n' * 99999999 %}{{ x.splitlines() | length }}".to_owned(),
        "{{ ('a' * 1000000).strip('b' * 999999 ~ 'a') }}".to_owned(),
        "{{ ('a' * 1000000) | trim('b' * 999999 ~ 'a') }}".to_owned(),
        "{{ ''.join(['a' * 1000000] * 100000) }}".to_owned(),
        "{{ (['a' * 1000000] * 100000) | join }}".to_owned(),
        "{{ ''.join('a' * 60000000) }}".to_owned(),
        "{{ (['a'] * 100000) | tojson(separators=['b' * 1000000, ':']) }}".to_owned(),
        "{{ ([[[1]]] * 100000) | tojson(indent='b' * 1000000) }}".to_owned(),
        "{{ (['é' * 1000000] * 100000) | tojson(ensure_ascii=true) }}".to_owned(),
        "{{ ('{0}' * 1000000).format('a' * 1000000) }}".to_owned(),
        "{{ ('{:999999}' * 100000).format(*(['a'] * 100000)) }}".to_owned(),
    ] {
        assert_refused(&source);
    }
}

/// Expressions that read the long texts `x` and `y`, or what contains them.
const OPERATIONS: [&str; 194] = [
    // Operators.
    "x == y",
    "x != y",
    "x < y",
    "x <= y",
    "x > y",
    "x >= y",
    "x == y == x",
    "[x] == [y]",
    "(x,) == (y,)",
    "{'a': x} == {'a': y}",
    "[[x]] + [x] == [[y]] + [y]",
    "(x,) + (x,) == (y,) + (y,)",
    "t == u",
    "t + t == u + u",
    "l == m2",
    "l * 2 == m2 * 2",
    "n == o",
    "n.x == o.x",
    "d.a == y",
    "x in [y]",
    "x not in (y, 'a')",
    "x in l",
    "x in d",
    "'a' in x",
    "x in x",
    "x ~ 'a'",
    "x + 'a'",
    "x * 2",
    "not x == y",
    "x == y or x",
    "w == x",
    // Subscripts, slices and keys.
    "x[-1]",
    "x[3999999]",
    "x.3999999",
    "x[i]",
    "x[1:]",
    "x[:1]",
    "x[:-1]",
    "x[::2]",
    "x[::-1]",
    "x[5:6]",
    "d[x]",
    "d[x ~ '']",
    "{x: 1}",
    "{'a': 1}[x]",
    "{x: 1}['a']",
    "(x or y)[-1]",
    "(x if i else y)[:1]",
    "n.x[-1]",
    "d.a[-1]",
    "l[0][-1]",
    "dict(**{x: 1})",
    "x is in y[-1]",
    "x is in [y][0]",
    // Tests.
    "x is lower",
    "x is upper",
    "x is eq y",
    "x is equalto(y)",
    "x is ne y",
    "x is lt y",
    "x is le y",
    "x is lessthan y",
    "x is gt y",
    "x is greaterthan y",
    "x is ge y",
    "x is sameas y",
    "x is in y",
    "x is in [y]",
    "x is in l",
    "[x] is eq [y]",
    "x is startingwith y",
    "x is endingwith y",
    "'a' is startingwith x",
    "[x] | select('lower') | list",
    "[x] | select('eq', y) | list",
    "l | reject('eq', y) | list",
    "[d] | selectattr('a', 'eq', y) | list",
    "[d] | rejectattr('a', 'lower') | list",
    // Filters.
    "x | upper",
    "x | lower",
    "x | title",
    "x | capitalize",
    "x | trim",
    "x | trim(y)",
    "x | replace('b', 'c')",
    "'a' | replace(x, 'b')",
    "x | length",
    "x | list",
    "x | first",
    "x | last",
    "x | reverse",
    "x | string",
    "x | escape",
    "x | safe",
    "x | tojson",
    "x | indent(2)",
    "x | truncate",
    "x | center",
    "x | urlencode",
    "x | int",
    "'a' | center(4000000)",
    "'a' | indent(4000000, true)",
    "x | join('-')",
    "l | join(x)",
    "x | batch(2) | list",
    "x | slice(2) | list",
    "x | unique | list",
    "x | sort",
    "x | format('a')",
    "'%s' | format(x)",
    "d | attr(x)",
    "x | default(y)",
    "'' | default(x, true)",
    "[x, y] | sort | length",
    "([x, y]) | sort | length",
    "[x, y] | unique | list | length",
    "[x, y] | min | length",
    "[x, y] | max | length",
    "[x, y] | join | length",
    "{'a': x, 'b': y} | dictsort(by='value') | length",
    "dict(a=x, b=y) | dictsort(by='value') | length",
    "namespace(a=x, b=y) | dictsort(by='value') | length",
    "n | dictsort(by='value') | length",
    "[d, d] | map(attribute=x) | list",
    "[d, d] | map(attribute='a') | sort | length",
    "[d, d] | sort(attribute='a') | length",
    "[d, d] | groupby('a') | length",
    "[d, d] | groupby(x) | length",
    "[d, d] | unique(attribute='a') | list",
    "[d, d] | max(attribute='a')",
    "[d, d] | sum(attribute=x)",
    "[x] | map('lower') | list",
    "l | map('replace', x, 'a') | list",
    "t | sort | length",
    "l | last | length",
    "d | items | list | sort | length",
    // Methods.
    "x.upper()",
    "x.lower()",
    "x.islower()",
    "x.isupper()",
    "x.isspace()",
    "x.isdigit()",
    "x.isalnum()",
    "x.isalpha()",
    "x.isascii()",
    "x.strip()",
    "x.strip('a')",
    "x.lstrip()",
    "x.rstrip('a')",
    "x.replace('b', 'c')",
    "'a'.replace(x, 'b')",
    "x.title()",
    "x.split('b')",
    "x.split()",
    "'a'.split(x)",
    "x.splitlines()",
    "x.capitalize()",
    "x.count('b')",
    "'a'.count(x)",
    "x.find('b')",
    "'a'.find(x)",
    "x.rfind('b')",
    "x.startswith(y)",
    "x.startswith((y, y))",
    "x.endswith(y)",
    "x.join(['a', 'b'])",
    "''.join([x])",
    "'{}'.format(x)",
    "'{a}'.format(a=x)",
    "d.get(x)",
    "d.get('a', x) == y",
    "[x, x].count(y)",
    "l.count(y)",
    "x.rsplit()",
    "x.rsplit('b')",
    "'a'.rsplit(x)",
    "x.partition('b')",
    "x.rpartition('b')",
    "x.index('a')",
    "x.rindex('a')",
    "x.removeprefix('b')",
    "x.removesuffix('b')",
    "x.center(9)",
    "x.zfill(9)",
    "'a'.ljust(4000000)",
    "'a'.rjust(4000000)",
    "l.index(x)",
    "loop.changed(x)",
    "loop.cycle(x, y)",
    // Functions.
    "dict(a=x) == dict(a=y)",
    "range(3)[x]",
    "[range(99999)] == [range(99999)]",
    "namespace(x=x) == namespace(x=y)",
    "m(x)",
];

/// Statements that read them.
const STATEMENTS: [&str; 15] = [
    "{% set z = x %}{{ z[-1] }}",
    "{% set z %}{{ x }}{% endset %}",
    "{% with z = x %}{{ z == y }}{% endwith %}",
    "{% filter upper %}{{ x }}{% endfilter %}",
    "{% filter replace(x, 'b') %}a{% endfilter %}",
    "{{ k(x, y) }}",
    "{% call c(x) %}{{ x[-1] }}{% endcall %}",
    "{% for a in [x] %}{{ a == y }}{% endfor %}",
    "{% for a in x %}{% break %}{% endfor %}",
    "{% include x ignore missing %}",
    "{% include [x] ignore missing %}",
    "{% set x | replace(y, 'b') %}a{% endset %}",
    "{% if x == y and y == x %}{% endif %}",
    "{% if not i %}{% elif x == y %}{% endif %}",
    "{% do loop.changed(x) %}",
];

/// Every operator, subscript, test, filter, method, function and statement that reads a text, on a
/// text that is too long to be read in each of 90,000 iterations. Without a charge, an operation
/// takes minutes.
#[test]
fn long_texts_are_not_read_without_end() {
    let expressions = OPERATIONS.map(|it| format!("{{% if ({it}) is none %}}{{% endif %}}"));
    for operation in expressions.iter().map(String::as_str).chain(STATEMENTS) {
        let source = format!(
            "{{% macro m(a) %}}{{% if a[-1] %}}{{% endif %}}{{% endmacro %}}{{% macro c(a) %}}{{{{ a[-1] }}}}{{{{ caller() }}}}{{% endmacro %}}{{% macro k(a, b) %}}{{{{ a == b }}}}{{% endmacro %}}\
             {{% set x = 'a' * 4000000 %}}{{% set y = 'a' * 4000000 %}}{{% set t, u, l, m2 = (x,), (y,), [x], [y] %}}\
             {{% set n, o, d, i = namespace(x=x), namespace(x=y), {{'a': x}}, 3999999 %}}{{% set w %}}{{{{ x }}}}{{% endset %}}\
             {{% for _ in range(90000) %}}{operation}{{% endfor %}}"
        );
        let template = ChatTemplate::compile(&source).unwrap();
        let messages = [Message::text("user", "a")];
        let (context, tokens) = (ChatContext::default(), SpecialTokens::default());
        let rendered = template.render(&messages, &context, &tokens, ConversationEnd::Complete);
        let is_refused = matches!(rendered, Err(ChatError::TooMuchWork { .. }));
        assert!(is_refused, "{operation}: {rendered:?}");
    }
}

/// Names and formats are limited, because they are not charged.
#[test]
fn long_names_and_formats_are_refused() {
    for (source, expected) in [
        (format!("{{{{ messages.{} }}}}", "a".repeat(5000)), "names of more than 256 bytes"),
        (
            "{{ strftime_now('%A' * 1000000) }}".to_owned(),
            "a format of 2000000 bytes; the maximum is 256",
        ),
        ("{{ ('a' * 2000,) * 9 }}".to_owned(), "use a list"),
    ] {
        let messages = [Message::text("user", "a")];
        let (context, tokens) = (ChatContext::default(), SpecialTokens::default());
        let rendered = ChatTemplate::compile(&source)
            .and_then(|it| it.render(&messages, &context, &tokens, ConversationEnd::Complete));
        let error = rendered.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// Storing and repeating values does not change them.
#[test]
fn stored_values_stay_the_same() {
    for (source, expected) in [
        (
            "{% set x = (1, 2) %}{{ x }}{{ x + (3,) }}{% set a, b = x %}{{ a }}{{ x == (1, 2) }}",
            "(1, 2)(1, 2, 3)1True",
        ),
        (
            "{% set x = [1] * 2 + [3] %}{{ x }}{{ x[1:] }}{{ x | length }}{{ x[::-1] | join('-') }}",
            "[1, 1, 3][1, 3]33-1-1",
        ),
        (
            "{% set x = {'b': 1, 'a': [2]} %}{{ x }}{{ x.a[0] }}{{ x | dictsort }}",
            "{'b': 1, 'a': [2]}2[('a', [2]), ('b', 1)]",
        ),
        (
            "{% set n = namespace({'a': 1}) %}{% set n.b = [2] %}{{ n.a }}{{ n.b }}{{ n.c is defined }}",
            "1[2]False",
        ),
        ("{% set n = namespace() %}{% set n.a = 'x' * 3 %}{{ n.a.upper() }}", "XXX"),
        (
            "{% set x = [{'k': 1, 'v': 2}, {'k': 1, 'v': 3}] %}{% for g in x | groupby('k') %}{{ g.grouper }}{{ g.list | map(attribute='v') | list }}{% endfor %}",
            "1[2, 3]",
        ),
        (
            "{% macro m(a, b=[2]) %}{{ a }}{{ b }}{{ c is defined }}{% endmacro %}{{ m(1) }}{{ m([1], b=(3,)) }}",
            "1[2]False[1](3,)False",
        ),
        (
            "{% macro m() %}{{ caller([1] * 2) }}{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
            "[1, 1]",
        ),
        (
            "{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}",
            "123",
        ),
        ("{% for k, v in {'a': 1}.items() %}{{ loop.length }}{{ k }}{{ v }}{% endfor %}", "1a1"),
        ("{% with a = [1], b = 2 %}{{ a }}{{ b }}{% endwith %}", "[1]2"),
        (
            "{% set l = loop %}{% set u = undefined_name %}{{ l is defined }}{{ u is defined }}",
            "FalseFalse",
        ),
        (
            "{% set d = dict(a=1) %}{{ dict(**d) }}{{ 'a' in d }}{{ d == {'a': 1} }}{{ [d] == [{'a': 1}] }}",
            "{'a': 1}TrueTrueTrue",
        ),
        (
            "{{ messages[0] == messages[0] }}{{ messages[0].role in ['user'] }}{{ messages is sequence }}{{ messages[0] is mapping }}",
            "TrueTrueTrueTrue",
        ),
    ] {
        let messages = [Message::text("user", "a")];
        let (context, tokens) = (ChatContext::default(), SpecialTokens::default());
        let template = ChatTemplate::compile(source).unwrap();
        let rendered = template.render(&messages, &context, &tokens, ConversationEnd::Complete);
        assert_eq!(rendered.map(|it| it.text), Ok(expected.to_owned()), "{source}");
    }
}
