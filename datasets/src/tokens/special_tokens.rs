//! The special tokens that the files of a tokenizer name: the end of a text, padding, added tokens.
//!
//! `transformers` stores them in several places, depending on its version.
//! [`TokenizerFiles::special_token`] and [`eos_token_ids`] read all of them.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::formats::folder::read_small;
use crate::tokens::tokenizer_files::{ADDED_TOKENS, CONFIG, SPECIAL_TOKENS, TokenizerFiles};

/// The field of `tokenizer_config.json` with the added tokens by id, since version 4.34 of
/// `transformers`.
const ADDED_BY_ID: &str = "added_tokens_decoder";

/// Classes of `transformers` whose `vocab.json` and `merges.txt` define a byte-level BPE with
/// GPT-2's pre-tokenizer.
const LIKE_GPT2: [&str; 8] =
    ["GPT2", "Roberta", "Bart", "Longformer", "LED", "CodeGen", "PreTrained", ""];

/// Maximum bytes of a `config.json`.
const MAX_CONFIG: u64 = 16 << 20;

impl TokenizerFiles {
    /// Returns the token that the files call `name`, such as `eos_token`: a string, or the
    /// `content` of an object.
    ///
    /// As in `transformers`, `special_tokens_map.json` takes precedence over a
    /// `tokenizer_config.json` of an old version, which does not list the added tokens.
    ///
    /// # Errors
    /// Returns the reason if a file is not valid JSON, or if the token is not a text.
    pub(crate) fn special_token(&self, name: &str) -> Result<Option<String>, String> {
        let (config, map) = (self.json(CONFIG)?, self.json(SPECIAL_TOKENS)?);
        let of_config = token_text(&config, CONFIG, name)?;
        let of_map = token_text(&map, SPECIAL_TOKENS, name)?;
        Ok(match config.get(ADDED_BY_ID) {
            Some(_) => of_config.or(of_map),
            None => of_map.or(of_config),
        })
    }

    /// Sets the end-of-text token in the files that were read, unless they already name it.
    ///
    /// # Errors
    /// Returns the reason if a file is not valid JSON.
    pub(crate) fn set_eos_token(&mut self, token: &str) -> Result<(), String> {
        if self.special_token("eos_token")?.as_deref() == Some(token) {
            return Ok(());
        }
        for name in [CONFIG, SPECIAL_TOKENS] {
            if let Value::Object(mut fields) = self.json(name)? {
                fields.insert("eos_token".to_owned(), token.into());
                self.replace(name, &Value::Object(fields));
            }
        }
        Ok(())
    }

    /// Returns the tokens that were added to `vocab.json`, by id.
    ///
    /// # Errors
    /// Returns the reason if a file is not valid JSON, or has an invalid token.
    pub(crate) fn added_tokens(&self) -> Result<BTreeMap<u32, AddedToken>, String> {
        let (config, older) = (self.json(CONFIG)?, self.json(ADDED_TOKENS)?);
        let mut tokens = BTreeMap::new();
        for (content, id) in older.as_object().into_iter().flatten() {
            let id = token_id(id).ok_or_else(|| {
                format!("{ADDED_TOKENS}: the id of `{content}` is not a token id")
            })?;
            tokens.insert(id, AddedToken::from(content.clone(), self.is_special(content)?));
        }
        // The newer list takes precedence over `added_tokens.json`.
        for (id, token) in config[ADDED_BY_ID].as_object().into_iter().flatten() {
            let invalid = || format!("{CONFIG}: {ADDED_BY_ID}: `{id}` is not an id with a token");
            let id: u32 = id.parse().map_err(|_| invalid())?;
            let content = token["content"].as_str().ok_or_else(invalid)?;
            tokens.insert(id, added_token(content, token));
        }
        Ok(tokens)
    }

    /// Returns whether the files name `token` as a special token.
    fn is_special(&self, token: &str) -> Result<bool, String> {
        for file in [CONFIG, SPECIAL_TOKENS] {
            let fields = self.json(file)?;
            for (name, value) in fields.as_object().into_iter().flatten() {
                let list = value.as_array().into_iter().flatten();
                let mut all = list.chain([value]).filter_map(text_of);
                if name.ends_with("_token") && all.any(|it| it == token)
                    || name == "additional_special_tokens" && all.any(|it| it == token)
                {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Checks that `vocab.json` and `merges.txt` belong to a tokenizer that is built like GPT-2's.
    /// Other classes with these files, such as CLIP's, split and normalize text in another way, so
    /// their ids would be wrong.
    ///
    /// # Errors
    /// Returns the class and the remedy.
    pub(crate) fn check_class(&self) -> Result<(), String> {
        let config = self.json(CONFIG)?;
        let class = config["tokenizer_class"].as_str().unwrap_or_default();
        let name = class.strip_suffix("Fast").unwrap_or(class);
        let name = name.strip_suffix("Tokenizer").unwrap_or(name);
        if LIKE_GPT2.contains(&name) {
            return Ok(());
        }
        Err(format!(
            "{CONFIG} has the tokenizer_class `{class}`, whose vocab.json and merges.txt do not define the whole \
             tokenizer; write its tokenizer.json with transformers' AutoTokenizer.from_pretrained(FOLDER) and \
             save_pretrained(FOLDER)"
        ))
    }
}

/// Returns the text of a token, which is a string or an object with its `content`.
fn text_of(token: &Value) -> Option<&str> {
    token.get("content").unwrap_or(token).as_str()
}

/// Returns the token id that a value is.
fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Returns the token that the file `file` calls `name`; `None` if it is missing or null.
///
/// # Errors
/// Returns the reason if it is not a text.
fn token_text(json: &Value, file: &str, name: &str) -> Result<Option<String>, String> {
    let token = &json[name];
    match text_of(token) {
        Some(text) => Ok(Some(text.to_owned())),
        None if token.is_null() => Ok(None),
        None => Err(format!("{file}: {name} is {token}, which is not a text")),
    }
}

/// Returns an added token with the properties in `fields`, which default to false as in
/// `transformers`.
fn added_token(content: &str, fields: &Value) -> AddedToken {
    let flag = |name: &str| fields[name].as_bool().unwrap_or(false);
    AddedToken::from(content.to_owned(), flag("special"))
        .single_word(flag("single_word"))
        .lstrip(flag("lstrip"))
        .rstrip(flag("rstrip"))
        .normalized(flag("normalized"))
}

/// Returns the `eos_token_id` of the model in `folder`, one id or a list: of `config.json`, or else
/// of `generation_config.json`. Empty if neither has one. Whether these files are valid is checked
/// where the model is read.
pub(crate) fn eos_token_ids(folder: &Path) -> Vec<u32> {
    let ids = |name: &str| {
        let contents = read_small(&folder.join(name), MAX_CONFIG).ok()?;
        let mut fields: Map<String, Value> = serde_json::from_slice(&contents).ok()?;
        let ids: Vec<u32> = match fields.remove("eos_token_id")? {
            Value::Array(ids) => ids.iter().filter_map(token_id).collect(),
            value => token_id(&value).into_iter().collect(),
        };
        Some(ids).filter(|ids| !ids.is_empty())
    };
    ["config.json", "generation_config.json"].into_iter().find_map(ids).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::{END_OF_TEXT, Tokenizer};

    /// Writes a tokenizer of words and other files to a folder.
    fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
            "model": { "type": "WordLevel", "unk_token": "?",
                "vocab": { "?": 0, "</s>": 1, "<end>": 2, "<s>": 3, "word": 4 } },
        });
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        for (name, json) in files {
            fs::write(folder.path().join(name), json.to_string()).unwrap();
        }
        folder
    }

    #[test]
    fn the_end_of_text_is_found_where_transformers_finds_it() {
        let text = |eos: &str| json!({ "eos_token": eos });
        let object = |eos: &str| json!({ "eos_token": { "__type": "AddedToken", "content": eos, "lstrip": false } });
        let newer = |eos: Value| json!({ "eos_token": eos, "added_tokens_decoder": {} });
        let (config, map) = ("tokenizer_config.json", "special_tokens_map.json");
        for (files, expected) in [
            (vec![], None),
            (vec![(config, text("</s>"))], Some(1)),
            (vec![(config, object("</s>"))], Some(1)),
            (vec![(map, text("<end>"))], Some(2)),
            (vec![(map, object("<end>"))], Some(2)),
            (vec![(config, json!({ "eos_token": null })), (map, text("<end>"))], Some(2)),
            (vec![(config, json!([])), (map, text("<end>"))], Some(2)),
            // The map is of an older version than the list of added tokens.
            (vec![(config, text("</s>")), (map, text("<end>"))], Some(2)),
            (vec![(config, newer(json!("</s>"))), (map, text("<end>"))], Some(1)),
            (vec![(config, newer(Value::Null)), (map, text("<end>"))], Some(2)),
            // The model knows its end of text, if the tokenizer does not.
            (vec![("config.json", json!({ "eos_token_id": 2 }))], Some(2)),
            (vec![("config.json", json!({ "eos_token_id": [9, 1, 2] }))], Some(1)),
            (vec![("generation_config.json", json!({ "eos_token_id": [2, 1] }))], Some(2)),
            (
                vec![
                    ("config.json", json!({ "eos_token_id": null })),
                    ("generation_config.json", json!({ "eos_token_id": 1 })),
                ],
                Some(1),
            ),
            (vec![(map, text("</s>")), ("config.json", json!({ "eos_token_id": 2 }))], Some(1)),
            (vec![("config.json", json!({ "eos_token_id": 9 }))], None),
        ] {
            let folder = folder(&files);
            for path in [folder.path().to_owned(), folder.path().join("tokenizer.json")] {
                let tokenizer = Tokenizer::load(&path).unwrap();
                assert_eq!(tokenizer.end_of_text(), expected, "{files:?}");
            }
            // A file of another name has no files of its own beside it.
            let other = folder.path().join("words.json");
            fs::rename(folder.path().join("tokenizer.json"), &other).unwrap();
            assert_eq!(Tokenizer::load(&other).unwrap().end_of_text(), None);
        }
    }

    #[test]
    fn a_special_token_that_is_not_in_the_vocabulary_is_refused() {
        for (file, eos, expected) in [
            ("tokenizer_config.json", json!("<eos>"), "eos_token `<eos>` is not in its vocabulary"),
            ("special_tokens_map.json", json!("<eos>"), "`<eos>` is not in its vocabulary"),
            ("special_tokens_map.json", json!(5), "special_tokens_map.json: eos_token is 5"),
        ] {
            let folder = folder(&[(file, json!({ "eos_token": eos }))]);
            let message = Tokenizer::load(folder.path()).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_chosen_end_of_text_is_saved_with_the_tokenizer() {
        let config = json!({ "eos_token": "</s>", "model_max_length": 7 });
        let folder = folder(&[("tokenizer_config.json", config)]);
        let load = || Tokenizer::load(folder.path()).unwrap();
        let chosen = load().with_end_of_text("<end>").unwrap();
        assert_eq!(chosen.end_of_text(), Some(2));
        assert!(!chosen.end_of_text_is_ordinary());
        assert!(load().with_end_of_text("word").unwrap().end_of_text_is_ordinary());
        let saved = folder.path().join("saved");
        chosen.save(&saved).unwrap();
        assert_eq!(Tokenizer::load(&saved).unwrap().end_of_text(), Some(2));
        let config = fs::read_to_string(saved.join("tokenizer_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!(config, json!({ "eos_token": "<end>", "model_max_length": 7 }));

        // The file of the same token is not written again.
        load().with_end_of_text("</s>").unwrap().save(&saved).unwrap();
        let read = |folder: &Path| fs::read(folder.join("tokenizer_config.json")).unwrap();
        assert!(read(&saved) == read(folder.path()));

        let message = load().with_end_of_text("word </s>").unwrap_err().to_string();
        assert!(message.contains("data.eos_token = \"word </s>\""), "{message}");
    }

    /// Only GPT-2's end-of-text token also begins a text.
    #[test]
    fn no_beginning_of_text_is_invented() {
        let folder = folder(&[("config.json", json!({ "eos_token_id": 1 }))]);
        let saved = folder.path().join("saved");
        Tokenizer::load(folder.path()).unwrap().save(&saved).unwrap();
        let config = fs::read_to_string(saved.join("tokenizer_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        assert_eq!((&config["eos_token"], &config["bos_token"]), (&json!("</s>"), &Value::Null));
    }

    #[test]
    fn tokens_added_to_a_vocabulary_have_their_ids() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, json: Value| {
            fs::write(folder.path().join(name), json.to_string()).unwrap();
        };
        write("vocab.json", json!({ "a": 0, "b": 1, END_OF_TEXT: 2 }));
        fs::write(folder.path().join("merges.txt"), "#version: 0.2\n").unwrap();
        let load = || Tokenizer::load(folder.path());
        assert_eq!(load().unwrap().vocab_size(), 3);
        write("added_tokens.json", json!({ "<x>": 3 }));
        let decoder = json!({
            "2": { "content": END_OF_TEXT, "special": true },
            "4": { "content": "<y>", "special": true },
        });
        write("tokenizer_config.json", json!({ "added_tokens_decoder": decoder }));
        let tokenizer = load().unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.end_of_text()), (5, Some(2)));
        assert_eq!(tokenizer.encode("a<y>b<x>").unwrap(), [0, 4, 1, 3]);

        write("added_tokens.json", json!({ "<x>": 7 }));
        let message = load().unwrap_err().to_string();
        assert!(message.contains("the added token `<y>` cannot have the id 4"), "{message}");
        write("tokenizer_config.json", json!({ "tokenizer_class": "CLIPTokenizer" }));
        let message = load().unwrap_err().to_string();
        assert!(message.contains("tokenizer_class `CLIPTokenizer`"), "{message}");
    }
}
