//! Assistant turns of templates without marks, against the same templates with marks.

use std::collections::HashMap;
use std::path::Path;

use deepburn_chat::{ChatError, Rendered, Row, render_with_turns};
use serde_json::{Value, json};

use crate::chat::Case;
use crate::{files, golden, json, lines};

/// How our turns of a template may differ from TRL's marks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TurnDifference {
    /// They are the same.
    Nothing,
    /// The line break after the last token of a turn is ours too. A model generates it, or stops
    /// before it.
    LineBreakAfter,
    /// TRL trains the line break before a turn too, although it is part of the generation prompt.
    LineBreakBefore,
    /// TRL marks the token at the end separately.
    Divided,
    /// TRL's template prints reasoning in all turns, the model's template in the last one only.
    /// Turns with the same text are the same.
    Reasoning,
}

/// Templates of models, the marked template, and the difference.
const PAIRS: [(&str, &str, TurnDifference); 12] = [
    ("own_chatml", "own_chatml", TurnDifference::LineBreakAfter),
    ("own_gemma", "own_gemma", TurnDifference::Nothing),
    ("own_llama3", "own_llama3", TurnDifference::Nothing),
    ("own_mistral", "own_mistral", TurnDifference::Nothing),
    ("trl_gemma", "trl_gemma_training", TurnDifference::Nothing),
    ("trl_gemma3", "trl_gemma3_training", TurnDifference::Nothing),
    ("trl_llama3", "trl_llama3_training", TurnDifference::Nothing),
    ("trl_phi3", "trl_phi3_training", TurnDifference::Divided),
    ("trl_phi3_5", "trl_phi3_training", TurnDifference::Divided),
    ("trl_qwen2_5", "trl_qwen2_5_training", TurnDifference::LineBreakBefore),
    ("trl_qwen3", "trl_qwen3_training", TurnDifference::Reasoning),
    ("trl_qwen3_instruct_2507", "trl_qwen3_instruct_2507_training", TurnDifference::Nothing),
];

impl TurnDifference {
    /// Returns TRL's turns as ours.
    fn adjusted(self, theirs: Vec<String>, ours: &[String]) -> Vec<String> {
        match self {
            Self::Nothing => theirs,
            Self::LineBreakAfter => theirs.into_iter().map(|it| it + "\n").collect(),
            Self::LineBreakBefore => {
                theirs.iter().map(|it| it.strip_prefix('\n').unwrap().to_owned()).collect()
            }
            // The token at the end belongs to the last turn.
            Self::Divided => match theirs.split_last() {
                Some((last, before)) if theirs.len() > ours.len() => {
                    let mut turns = before.to_vec();
                    *turns.last_mut().unwrap() += last;
                    turns
                }
                _ => theirs,
            },
            Self::Reasoning => {
                let without = |it: &str| it.rsplit("</think>\n\n").next().unwrap().to_owned();
                assert!(ours.len() == theirs.len());
                let pairs = ours.iter().zip(&theirs);
                pairs
                    .map(
                        |(ours, theirs)| {
                            if ours == theirs { theirs.clone() } else { without(theirs) }
                        },
                    )
                    .collect()
            }
        }
    }
}

fn turns(rendered: &Rendered) -> Vec<String> {
    rendered.generated.iter().map(|it| rendered.text[it.clone()].to_owned()).collect()
}

/// Returns the turns of a golden row.
fn marked_turns(row: &Value) -> Vec<String> {
    let text: Vec<char> = row["text"].as_str().unwrap().chars().collect();
    let index = |it: &Value| it.as_u64().unwrap() as usize;
    let spans = row["spans"].as_array().unwrap().iter();
    spans.map(|it| text[index(&it[0])..index(&it[1])].iter().collect()).collect()
}

/// Finds the turns of all rows of a template, with its marks removed.
fn found(golden: &Path, name: &str) -> Vec<(Value, Result<Rendered, ChatError>)> {
    let conversations = lines(&golden.join("sft/data/conversations.jsonl"));
    let file = json(&golden.join(format!("sft/chat/{name}.json")));
    let case = Case::read(golden, &file);
    let template = case.unmarked();
    let rows = file["rows"].as_array().unwrap().iter();
    rows.filter(|it| it["text"].is_string())
        .map(|row| {
            let conversation =
                conversations.iter().find(|it| it["name"] == row["conversation"]).unwrap();
            let (messages, context) = case.inputs(conversation, &row["kwargs"]);
            let found = render_with_turns(&template, &messages, &context, &case.tokens);
            assert!(
                found.as_ref().is_ok_and(|it| row["text"] == *it.text) || found.is_err(),
                "{name} {row}"
            );
            (row.clone(), found)
        })
        .collect()
}

#[test]
fn turns_equal_marked_templates() {
    let Some(golden) = golden() else { return };
    let mut compared = 0;
    for (name, marked, difference) in PAIRS {
        let marked = json(&golden.join(format!("sft/chat/{marked}.json")));
        let marked: HashMap<&str, &Value> = marked["rows"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|it| it["kwargs"] == json!({}) && it["text"].is_string())
            .map(|it| (it["conversation"].as_str().unwrap(), it))
            .collect();
        for (row, found) in found(&golden, name) {
            let name = format!("{name} {}", row["conversation"]);
            let ours = turns(&found.unwrap_or_else(|error| panic!("{name}: {error}")));
            let Some(other) = marked.get(row["conversation"].as_str().unwrap()) else { continue };
            if row["kwargs"] == json!({}) {
                assert_eq!(ours, difference.adjusted(marked_turns(other), &ours), "{name}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 277);
}

//= trl 1.16.0 chat_template_utils.py get_training_chat_template
/// TRL trains the same tokens of the models' own templates, whose marked versions it knows, where
/// both print the same text.
#[test]
fn masks_of_known_templates_equal_marked_templates() {
    let Some(golden) = golden() else { return };
    let (mut same, mut other) = (0, 0);
    for (name, marked, _) in PAIRS.iter().filter(|(name, marked, _)| name != marked) {
        let [file, marked] =
            [name, marked].map(|it| json(&golden.join(format!("sft/chat/{it}.json"))));
        let conversations = lines(&golden.join("sft/data/conversations.jsonl"));
        let case = Case::read(&golden, &file);
        for row in marked["rows"].as_array().unwrap().iter().filter(|it| it["ids"].is_array()) {
            let conversation =
                conversations.iter().find(|it| it["name"] == row["conversation"]).unwrap();
            let (messages, context) = case.inputs(conversation, &row["kwargs"]);
            let encoder = case.encoder(&golden.join(marked["tokenizer"].as_str().unwrap()));
            match encoder.encode(&Row::Chat { messages, context }) {
                Ok(sample) if json!(sample.ids) == row["ids"] => {
                    let mask: String =
                        sample.trained.iter().map(|it| if *it { '1' } else { '0' }).collect();
                    assert_eq!(mask, row["assistant_mask"], "{name} {}", row["conversation"]);
                    same += 1;
                }
                _ => other += 1,
            }
        }
    }
    // The others have no answer, or reasoning that TRL's template of Qwen3 prints in all turns.
    assert_eq!((same, other), (159, 28));
}

/// Templates for which TRL has no marks: each turn is the message and the end of the turn.
#[test]
fn turns_of_other_templates() {
    let Some(golden) = golden() else { return };
    let ends = [
        ("cpp_HuggingFaceTB-SmolLM3-3B", "<|im_end|>\n"),
        ("cpp_Mistral-Small-3.2-24B-Instruct-2506", "</s>"),
        ("cpp_ibm-granite-granite-3.3-2B-Instruct", "<|end_of_text|>\n"),
        ("cpp_NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "<|im_end|>\n"),
        ("cpp_mistralai-Mistral-Nemo-Instruct-2407", "</s>"),
        ("trl_llama3_1", "<|eot_id|>"),
        ("trl_llama3_2", "<|eot_id|>"),
    ];
    let (mut count, mut refused) = (0, 0);
    for (name, end) in ends {
        for (row, found) in found(&golden, name) {
            match found {
                Ok(rendered) => {
                    let turns = turns(&rendered);
                    assert!(
                        turns.iter().all(|it| it.ends_with(end) && it.matches(end).count() == 1),
                        "{turns:?}"
                    );
                    count += turns.len();
                    if row["conversation"] == "three turns" {
                        let expected = ["1", "2", "3"].map(|it| format!("{it}{end}"));
                        let without =
                            |it: &String| it.rsplit("</think>\n").next().unwrap().to_owned();
                        assert_eq!(
                            turns.iter().map(without).collect::<Vec<_>>(),
                            expected,
                            "{name} {row}"
                        );
                    }
                }
                // Nemo prints the system message in the last turn of the user only, and only before
                // an answer.
                Err(error) => {
                    assert!(
                        name.contains("Nemo") && matches!(error, ChatError::Turn { .. }),
                        "{name} {row} {error}"
                    );
                    refused += 1;
                }
            }
        }
    }
    assert_eq!((count, refused), (198, 4));
}

#[test]
fn all_golden_templates_are_compared() {
    let Some(golden) = golden() else { return };
    assert_eq!(files(&golden.join("sft/chat")).len(), 26);
}
