//! Conversations and templates: text, token ids, generated characters, mask of trained tokens.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use chrono::NaiveDate;
use deepburn_chat::{
    AssistantOnlyLoss, ChatContext, ChatTemplate, ChatTemplates, ConversationEnd, Day,
    EncodeOptions, EncodedRow, Message, Rendered, Row, RowEncoder, SpecialTokens, Surrounding,
    TextTokenizer,
};
use serde_json::{Value, json};

use crate::hf_tokenizer::HfTokenizer;
use crate::{files, golden, json, lines};

/// The date at which the files were written.
pub(crate) fn now() -> chrono::NaiveDateTime {
    NaiveDate::from_ymd_opt(2026, 7, 4).unwrap().and_hms_opt(9, 8, 7).unwrap()
}

/// A template with its golden renders.
pub(crate) struct Case {
    source: String,
    pub(crate) template: ChatTemplate,
    pub(crate) tokens: SpecialTokens,
}

impl Case {
    pub(crate) fn read(golden: &Path, file: &Value) -> Self {
        let name = file["template"].as_str().unwrap();
        let folder = golden.join(file["tokenizer"].as_str().unwrap());
        let source = match file["from_file"].as_bool().unwrap() {
            true => fs::read_to_string(golden.join(format!("sft/templates/{name}.jinja"))).unwrap(),
            false => ChatTemplates::of_folder(&folder, Day::today()).unwrap().sources()["default"]
                .clone(),
        };
        let tokens = SpecialTokens::of_folder(&folder).unwrap();
        for (name, token) in file["special_tokens"].as_object().unwrap() {
            // transformers knows the unknown token of some classes, which their files do not name.
            assert!(tokens.get(name) == token.as_str() || name == "unk_token", "{name}");
        }
        Self { template: ChatTemplate::at(&source, now()).unwrap(), source, tokens }
    }

    /// Returns the messages and the context of a conversation.
    pub(crate) fn inputs(
        &self,
        conversation: &Value,
        kwargs: &Value,
    ) -> (Vec<Message>, ChatContext) {
        let messages = conversation["messages"].as_array().unwrap().iter();
        let messages =
            messages.map(|it| Message::from_fields(it.as_object().unwrap().clone())).collect();
        let context = ChatContext {
            tools: conversation.get("tools").map(|it| it.as_array().unwrap().clone()),
            documents: None,
            variables: kwargs.as_object().unwrap().clone(),
        };
        (messages, context)
    }

    fn render(
        &self,
        conversation: &Value,
        kwargs: &Value,
        ending: ConversationEnd,
    ) -> deepburn_chat::Result<Rendered> {
        let (messages, context) = self.inputs(conversation, kwargs);
        self.template.render(&messages, &context, &self.tokens, ending)
    }

    /// Returns an encoder of the answers that TRL trains.
    pub(crate) fn encoder(&self, folder: &Path) -> RowEncoder<HfTokenizer> {
        let templates = ChatTemplates::single(&self.source, "2026-07-04".parse().unwrap()).unwrap();
        let options = EncodeOptions {
            assistant_only_loss: AssistantOnlyLoss::Marked,
            ..EncodeOptions::default()
        };
        RowEncoder::new(tokenizer(folder), Some(templates), self.tokens.clone(), options).unwrap()
    }

    /// Returns the template without its marks.
    pub(crate) fn unmarked(&self) -> ChatTemplate {
        let mut source = self.source.clone();
        for word in ["generation", "endgeneration"] {
            for (open, close) in [("", ""), ("-", ""), ("", "-"), ("-", "-")] {
                let tag = format!("{{%{open} {word} {close}%}}");
                // A tag without effect keeps the whitespace control.
                source =
                    source.replace(&tag, &format!("{{%{open} if true %}}{{% endif {close}%}}"));
            }
        }
        let template = ChatTemplate::at(&source, now()).unwrap();
        assert!(!template.marks_generation());
        template
    }
}

fn in_characters(rendered: &Rendered) -> Value {
    let at = |byte: usize| rendered.text[..byte].chars().count();
    rendered.generated.iter().map(|it| json!([at(it.start), at(it.end)])).collect()
}

//= transformers 5.23.0 utils/chat_template_utils.py render_jinja_template
#[test]
fn renders_like_transformers() {
    let Some(golden) = golden() else { return };
    let conversations: HashMap<String, Value> = lines(&golden.join("sft/data/conversations.jsonl"))
        .into_iter()
        .map(|it| (it["name"].as_str().unwrap().to_owned(), it))
        .collect();
    let (mut texts, mut errors, mut spans) = (0, 0, 0);
    for path in files(&golden.join("sft/chat")) {
        let file = json(&path);
        let case = Case::read(&golden, &file);
        for row in file["rows"].as_array().unwrap() {
            let name = format!("{} {} {}", file["template"], row["conversation"], row["kwargs"]);
            let conversation = &conversations[row["conversation"].as_str().unwrap()];
            let rendered = case.render(conversation, &row["kwargs"], ConversationEnd::Complete);
            let prompt = case
                .render(conversation, &row["kwargs"], ConversationEnd::GenerationPrompt)
                .map(|it| it.text);
            match row["text"].as_str() {
                Some(text) => {
                    assert_eq!(rendered.as_ref().map(|it| it.text.as_str()), Ok(text), "{name}")
                }
                None => assert!(rendered.is_err(), "{name}: {rendered:?}"),
            }
            let suffixed = row["prompt_suffix"]
                .as_str()
                .map(|it| format!("{}{it}", row["text"].as_str().unwrap()));
            match suffixed.as_deref().or(row["text_prompt"].as_str()) {
                Some(text) => assert_eq!(prompt.as_deref(), Ok(text), "{name}"),
                None => assert!(prompt.is_err(), "{name}: {prompt:?}"),
            }
            texts += 2;
            errors += usize::from(rendered.is_err()) + usize::from(prompt.is_err());
            if let (Some(expected), Ok(rendered)) = (row.get("spans"), &rendered) {
                assert_eq!(in_characters(rendered), *expected, "{name}");
                spans += 1;
            }
        }
    }
    assert_eq!((texts, errors, spans), (1512, 228, 253));
}

fn tokenizer(folder: &Path) -> HfTokenizer {
    HfTokenizer::new(tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap())
        .unwrap()
}

//= transformers 5.23.0 tokenization_utils_base.py apply_chat_template return_assistant_tokens_mask
#[test]
fn tokenizes_and_masks_like_transformers() {
    let Some(golden) = golden() else { return };
    let conversations = lines(&golden.join("sft/data/conversations.jsonl"));
    let (mut ids, mut masks) = (0, 0);
    for path in files(&golden.join("sft/chat")) {
        let file = json(&path);
        let case = Case::read(&golden, &file);
        let folder = golden.join(file["tokenizer"].as_str().unwrap());
        let tokenizer = tokenizer(&folder);
        for row in file["rows"].as_array().unwrap() {
            let (Some(expected), name) = (row.get("ids"), &row["conversation"]) else { continue };
            let conversation = conversations.iter().find(|it| it["name"] == *name).unwrap();
            let rendered =
                case.render(conversation, &row["kwargs"], ConversationEnd::Complete).unwrap();
            let tokens = tokenizer.encode(&rendered.text, Surrounding::None).unwrap();
            assert_eq!(json!(tokens.ids), *expected, "{} {name}", file["template"]);
            ids += 1;
            if let Some(expected) = row["assistant_mask"].as_str() {
                let (messages, context) = case.inputs(conversation, &row["kwargs"]);
                let sample = case.encoder(&folder).encode(&Row::Chat { messages, context });
                // TRL refuses a conversation without a trained token.
                let mask = |sample: EncodedRow| -> String {
                    sample.trained.iter().map(|it| if *it { '1' } else { '0' }).collect()
                };
                let expected = Some(expected).filter(|it| it.contains('1')).map(str::to_owned);
                assert_eq!(sample.map(mask).ok(), expected, "{} {name}", file["template"]);
                masks += 1;
            }
        }
    }
    assert_eq!((ids, masks), (253, 253));
}

//= trl 1.16.0 chat_template_utils.py get_training_chat_template
/// TRL has marked versions of the templates whose names it knows.
#[test]
fn templates_that_trl_knows_are_recognized() {
    let Some(golden) = golden() else { return };
    let (mut known, mut unknown) = (0, 0);
    for entry in fs::read_dir(golden.join("sft/templates")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let template = ChatTemplate::compile(&fs::read_to_string(&path).unwrap()).unwrap();
        // TRL 1.16 has more marked versions than the folder.
        let marked = golden.join(format!("sft/templates/{name}_training.jinja"));
        let is_known = name.ends_with("_training") || marked.exists() || name == "trl_phi3_5";
        assert_eq!(template.is_trained_by_trl(), is_known, "{name}");
        if is_known { known += 1 } else { unknown += 1 }
    }
    assert!(known > 10 && unknown > 3, "{known} {unknown}");
}
