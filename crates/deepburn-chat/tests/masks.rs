//! Compares masks of marked answers with `tests/data/masks.json`, which `make_masks.py` wrote with
//! transformers.

use std::ops::Range;

use deepburn_chat::{
    AssistantOnlyLoss, ChatTemplates, Day, EncodeOptions, EncodedRow, Finding, Result, Row,
    RowEncoder, SpecialTokens, Surrounding, TextTokenizer, Tokens,
};
use serde_json::{Value, json};

/// The tokens of a recorded text.
struct Recorded(Tokens);

impl TextTokenizer for Recorded {
    fn encode(&self, _: &str, _: Surrounding) -> Result<Tokens> {
        Ok(self.0.clone())
    }

    fn token_text(&self, id: u32) -> String {
        id.to_string()
    }

    fn token_id(&self, _: &str) -> Option<u32> {
        None
    }

    fn is_special(&self, _: u32) -> bool {
        true
    }
}

/// Returns the text of the messages, as the recorded templates print it.
fn text(row: &Value) -> String {
    let template = row["template"].as_str().unwrap();
    let space = |role: &Value| role == "assistant" && template.contains("+ ' '");
    let messages = row["messages"].as_array().unwrap().iter().map(|it| {
        let space = if space(&it["role"]) { " " } else { "" };
        let end = if template.contains("'\n'") { "\n" } else { "" };
        format!("{}{space}{end}", it["content"].as_str().unwrap())
    });
    messages.collect()
}

fn tokens(row: &Value) -> Tokens {
    let text = text(row);
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let at = |it: &Value| starts[usize::try_from(it.as_u64().unwrap()).unwrap()];
    let ranges: Vec<Range<usize>> =
        row["offsets"].as_array().unwrap().iter().map(|it| at(&it[0])..at(&it[1])).collect();
    Tokens { ids: serde_json::from_value(row["ids"].clone()).unwrap(), ranges }
}

fn encode(row: &Value, assistant_only_loss: AssistantOnlyLoss) -> Result<EncodedRow> {
    let template = row["template"].as_str().unwrap();
    let templates = ChatTemplates::single(template, Day::today()).unwrap();
    let options = EncodeOptions { assistant_only_loss, ..EncodeOptions::default() };
    let tokens = SpecialTokens::default();
    let encoder = RowEncoder::new(Recorded(self::tokens(row)), Some(templates), tokens, options)?;
    encoder.encode(&Row::read(&json!({"messages": row["messages"]}))?)
}

fn mask(sample: &EncodedRow) -> String {
    sample.trained.iter().map(|it| if *it { '1' } else { '0' }).collect()
}

fn rows() -> Vec<Value> {
    serde_json::from_str(include_str!("data/masks.json")).unwrap()
}

//= transformers 5.23.0 tokenization_utils_base.py apply_chat_template return_assistant_tokens_mask
#[test]
fn masks_equal_transformers() {
    for row in rows() {
        let name = &row["name"];
        let ours = encode(&row, AssistantOnlyLoss::Marked);
        match row["mask"].as_str().filter(|it| it.contains('1')) {
            Some(expected) => assert_eq!(mask(&ours.unwrap()), expected, "{name}"),
            // TRL refuses conversations without a trained token, and transformers a first answer
            // without text.
            None => {
                let error = ours.unwrap_err().to_string();
                assert!(error.contains("assistant_only_loss"), "{name}: {error}");
            }
        }
    }
}

/// Where transformers does not train the answers exactly, `true` has a finding, and turns train
/// them.
#[test]
fn tokens_of_other_texts_are_noticed() {
    let other = |finding: &Finding| {
        matches!(finding, Finding::TrainedOutside { .. } | Finding::AnswerUntrained { .. })
    };
    let mut kinds = [0; 3];
    for row in rows() {
        let name = &row["name"];
        let Ok(turns) = encode(&row, AssistantOnlyLoss::Turns) else { continue };
        assert!(!turns.findings.iter().any(other), "{name}: {turns:?}");
        let Tokens { ranges, .. } = tokens(&row);
        let spans = row["spans"].as_array().unwrap();
        let starts: Vec<usize> = text(&row).char_indices().map(|(at, _)| at).collect();
        let at = |it: &Value| {
            let index = usize::try_from(it.as_u64().unwrap()).unwrap();
            starts.get(index).copied().unwrap_or(text(&row).len())
        };
        for (range, trained) in ranges.iter().zip(&turns.trained) {
            let is_answer = |it: &Value| range.start < at(&it[1]) && at(&it[0]) < range.end;
            assert_eq!(*trained, spans.iter().any(is_answer), "{name} {range:?}");
        }
        let Ok(marked) = encode(&row, AssistantOnlyLoss::Marked) else { continue };
        assert_eq!(marked.findings.iter().any(other), marked.trained != turns.trained, "{name}");
        kinds[0] += usize::from(marked.trained == turns.trained);
        let has = |kind: &str| marked.findings.iter().any(|it| it.kind() == kind);
        kinds[1] += usize::from(has("trained outside"));
        kinds[2] += usize::from(has("answer untrained"));
    }
    assert!(kinds.iter().all(|it| *it > 1), "{kinds:?}");
}
