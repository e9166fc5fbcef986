//! Compares small templates with `tests/data/renders.json`, which `make_renders.py` wrote with
//! transformers and Jinja2.

use chrono::NaiveDate;
use deepburn_chat::{ChatContext, ChatTemplate, ConversationEnd, Message, SpecialTokens};
use serde_json::Value;

/// Templates whose text differs, with our text. They are the documented differences of
/// `ChatTemplate`.
const OTHER_TEXTS: [(&str, &str); 7] = [
    ("{% if n[1:] %}a{% endif %}b", "b"),
    ("{{ i > n }}", "True"),
    ("{{ i > 'a' }}", "False"),
    ("{{ [1.5, 1e20] | join }}", "1.5100000000000000000000.0"),
    // Objects of Python.
    ("{{ self }}", ""),
    ("{{ u.encode }}", ""),
    // The script has no messages.
    ("{{ messages }}", "[{'role': 'user', 'content': 'a'}]"),
];

/// Templates that are errors here: methods and filters that minijinja does not have, and capitals
/// that Rust does not know.
const REFUSED: [&str; 6] = [
    "{{ '%s' % i }}",
    "{{ '%s %d' % (s, 3) }}",
    "{{ 'a b' | wordcount }}",
    "{{ 'éÀ ß'.title() }}",
    "{{ 'a ßb'.title() }}",
    "{{ 'ŉ'.title() }}",
];

//= transformers 5.23.0 utils/chat_template_utils.py render_jinja_template
//= jinja2 3.1.6 filters.py do_indent
#[test]
fn renders_like_jinja2() {
    let file: Value = serde_json::from_str(include_str!("data/renders.json")).unwrap();
    let variables = file["variables"].as_object().unwrap().clone();
    let context = ChatContext { variables, ..ChatContext::default() };
    let now = NaiveDate::from_ymd_opt(2026, 7, 4).unwrap().and_hms_opt(9, 8, 7).unwrap();
    let (mut same, mut other) = (0, 0);
    for row in file["renders"].as_array().unwrap() {
        let source = row[0].as_str().unwrap();
        let rendered = ChatTemplate::at(source, now).and_then(|it| {
            let messages = [Message::text("user", "a")];
            it.render(&messages, &context, &SpecialTokens::default(), ConversationEnd::Complete)
        });
        let text = rendered.as_ref().ok().map(|it| it.text.as_str());
        if let Some((_, expected)) = OTHER_TEXTS.iter().find(|(it, _)| *it == source) {
            assert_eq!(text, Some(*expected), "{source}");
            other += 1;
        } else if REFUSED.contains(&source) {
            assert_eq!(text, None, "{source}");
            other += 1;
        } else {
            assert_eq!(text, row[1].as_str(), "{source}: {rendered:?}");
            same += 1;
        }
    }
    assert_eq!((same, other), (427, 13));
}
