//! The files a tokenizer is kept in, as `transformers` names them.
//!
//! [`TokenizerFiles`] remembers the bytes it was read from and writes those back unchanged, so
//! that fine-tuning never alters a tokenizer; it renders only what is missing.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};
use tokenizers::ModelWrapper;

use crate::DataError;
use crate::formats::text::read_small;
use crate::guard::guarded;
use crate::tokens::tokenizer::END_OF_TEXT;

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const VOCAB: &str = "vocab.json";
const MERGES: &str = "merges.txt";
const NAMES: [&str; 6] = [TOKENIZER, CONFIG, SPECIAL_TOKENS, VOCAB, MERGES, "added_tokens.json"];

/// Bytes of one of the files, at most: ten times those of the largest vocabularies.
const MAX_BYTES: u64 = 256 << 20;

/// File name to contents.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenizerFiles(BTreeMap<&'static str, Vec<u8>>);

impl TokenizerFiles {
    /// The tokenizer files in a folder, or the one file named.
    pub(crate) fn read(path: &Path) -> Result<Self, DataError> {
        let read = |path: &Path| read_small(path, MAX_BYTES);
        if !fs::metadata(path).map_err(DataError::unreadable(path))?.is_dir() {
            return Ok(Self(BTreeMap::from([(TOKENIZER, read(path)?)])));
        }
        let mut files = BTreeMap::new();
        for name in NAMES {
            let file = path.join(name);
            if file.is_file() {
                files.insert(name, read(&file)?);
            }
        }
        let has = |name| files.contains_key(name);
        match has(TOKENIZER) || (has(VOCAB) && has(MERGES)) {
            true => Ok(Self(files)),
            false => Err(DataError::NoTokenizer { path: path.to_owned() }),
        }
    }

    /// The files of a tokenizer that exists as `tokenizer.json` only.
    pub(crate) fn trained(json: String) -> Self {
        Self(BTreeMap::from([(TOKENIZER, json.into_bytes())]))
    }

    /// The tokenizer in these files; `path` names them in errors.
    pub(crate) fn build(&self, path: &Path) -> Result<tokenizers::Tokenizer, DataError> {
        match (self.0.get(TOKENIZER), self.0.get(VOCAB), self.0.get(MERGES)) {
            (Some(json), _, _) if path.is_dir() => parse(json, &path.join(TOKENIZER), ""),
            (Some(json), _, _) => parse(json, path, ""),
            (None, Some(vocab), Some(merges)) => build_gpt2(vocab, merges, path),
            _ => Err(DataError::NoTokenizer { path: path.to_owned() }),
        }
    }

    /// The token that the configuration calls `name`, where there is one.
    pub(crate) fn special_token(&self, name: &str) -> Option<String> {
        let config: Value = serde_json::from_slice(self.0.get(CONFIG)?).ok()?;
        let token = &config[name];
        token.get("content").unwrap_or(token).as_str().map(str::to_owned)
    }

    /// `eos_token` of the configuration: a string, or an object with the string as `content`.
    pub(crate) fn eos_token(&self, path: &Path) -> Result<Option<String>, DataError> {
        let Some(config) = self.0.get(CONFIG) else { return Ok(None) };
        let config: Value = serde_json::from_slice(config)
            .map_err(|error| invalid(path, format!("{CONFIG} is not valid JSON: {error}")))?;
        let token = &config["eos_token"];
        let token = token.get("content").unwrap_or(token);
        Ok(token.as_str().map(str::to_owned))
    }

    /// Writes all files into `folder`, rendering those that `transformers` needs and we lack. `from` names the
    /// tokenizer in errors.
    pub(crate) fn write(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        from: Option<&Path>,
        end_of_text: Option<&str>,
        folder: &Path,
    ) -> Result<(), DataError> {
        fs::create_dir_all(folder).map_err(DataError::unwritable(folder))?;
        let mut files = self.rendered(tokenizer, from, end_of_text)?;
        files.extend(self.0.clone());
        for (name, contents) in files {
            write_whole(folder, name, &contents)
                .map_err(DataError::unwritable(folder.join(name)))?;
        }
        Ok(())
    }

    fn rendered(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        from: Option<&Path>,
        end_of_text: Option<&str>,
    ) -> Result<BTreeMap<&'static str, Vec<u8>>, DataError> {
        let mut files = BTreeMap::new();
        if !self.0.contains_key(TOKENIZER) {
            let json = rendered(from, || tokenizer.to_string(true))?;
            files.insert(TOKENIZER, json.into_bytes());
        }
        if !self.0.contains_key(CONFIG) {
            files.insert(CONFIG, pretty(&config(end_of_text)));
            if let Some(token) = end_of_text {
                let map = json!({ "bos_token": token, "eos_token": token, "pad_token": token });
                files.insert(SPECIAL_TOKENS, pretty(&map));
            }
        }
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model() {
            let model = rendered(from, || Ok(serde_json::to_value(bpe)?))?;
            files.insert(VOCAB, model["vocab"].to_string().into_bytes());
            files.insert(MERGES, render_merges(&model["merges"]).into_bytes());
        }
        Ok(files)
    }
}

/// What the library renders.
fn rendered<T>(
    from: Option<&Path>,
    render: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T, DataError> {
    let (path, doing) = (from.map(Path::to_owned), "rendering its files");
    let rendered = guarded(render).unwrap_or_else(|panic| Err(panic.into()));
    rendered.map_err(|error| DataError::Tokenizer { path, doing, reason: error.to_string() })
}

/// A byte-level BPE with GPT-2's splitting, as `vocab.json` and `merges.txt` imply.
fn build_gpt2(
    vocab: &[u8],
    merges: &[u8],
    path: &Path,
) -> Result<tokenizers::Tokenizer, DataError> {
    let vocab: BTreeMap<String, u32> = serde_json::from_slice(vocab).map_err(|error| {
        invalid(path, format!("{VOCAB} is not a map of tokens to ids: {error}"))
    })?;
    let merges = parse_merges(merges).map_err(|reason| invalid(path, reason))?;
    let special = vocab.get(END_OF_TEXT).map(|&id| end_of_text_token(id));
    let level = |add_prefix_space, trim_offsets| {
        json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space,
                "trim_offsets": trim_offsets, "use_regex": true })
    };
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": special.as_slice(),
        "normalizer": null,
        "pre_tokenizer": level(false, true),
        "post_processor": level(true, false),
        "decoder": level(false, true),
        "model": { "type": "BPE", "vocab": vocab, "merges": merges },
    });
    parse(tokenizer.to_string().as_bytes(), path, &format!("{VOCAB} and {MERGES} disagree: "))
}

/// The tokenizer in `json`. `problem` begins the reason of an error.
fn parse(json: &[u8], path: &Path, problem: &str) -> Result<tokenizers::Tokenizer, DataError> {
    // Asked first: for a truncated file the library panics where a decoder is cut.
    serde_json::from_slice::<serde::de::IgnoredAny>(json)
        .map_err(|error| invalid(path, format!("{problem}it is not valid JSON: {error}")))?;
    match guarded(|| tokenizers::Tokenizer::from_bytes(json)) {
        Ok(Ok(tokenizer)) => Ok(tokenizer),
        Ok(Err(error)) => Err(invalid(path, format!("{problem}{error}"))),
        Err(panic) => {
            Err(invalid(path, format!("{problem}its parts contradict each other ({panic})")))
        }
    }
}

fn end_of_text_token(id: u32) -> Value {
    json!({ "id": id, "content": END_OF_TEXT, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
}

/// `merges.txt` of a BPE model's pairs.
fn render_merges(pairs: &Value) -> String {
    let mut text = String::from("#version: 0.2\n");
    for pair in pairs.as_array().into_iter().flatten() {
        let [left, right] = [&pair[0], &pair[1]].map(|token| token.as_str().unwrap_or_default());
        text.push_str(&format!("{left} {right}\n"));
    }
    text
}

/// The pairs of `merges.txt`: a version line, then two tokens a line, most frequent first.
fn parse_merges(merges: &[u8]) -> Result<Vec<(String, String)>, String> {
    let text = std::str::from_utf8(merges).map_err(|error| format!("{MERGES}: {error}"))?;
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| !line.starts_with("#version") && !line.is_empty())
        .map(|(index, line)| match line.split(' ').collect::<Vec<_>>()[..] {
            [left, right] if !left.is_empty() && !right.is_empty() => {
                Ok((left.to_owned(), right.to_owned()))
            }
            _ => Err(format!("{MERGES} line {}: expected two tokens and a space", index + 1)),
        })
        .collect()
}

/// What `AutoTokenizer` must know beside `tokenizer.json`.
fn config(end_of_text: Option<&str>) -> Value {
    let mut config = json!({
        "clean_up_tokenization_spaces": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    if let Some(token) = end_of_text {
        config["bos_token"] = token.into();
        config["eos_token"] = token.into();
        // Batches are padded with it, behind the text.
        config["pad_token"] = token.into();
    }
    config
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// Writes beside the target and renames, so that no reader sees half a file.
fn write_whole(folder: &Path, name: &str, contents: &[u8]) -> io::Result<()> {
    let partial = folder.join(format!(".{name}.partial"));
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(contents)?;
        file.sync_all()?;
        fs::rename(&partial, folder.join(name))
    };
    write().inspect_err(|_| {
        // The error that matters is the one being returned.
        let _ = fs::remove_file(&partial);
    })
}

fn invalid(path: &Path, reason: String) -> DataError {
    DataError::InvalidTokenizer { path: path.to_owned(), reason: reason.replace('\n', " ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_are_pairs() {
        let merges = parse_merges(b"#version: 0.2\na b\n\nab c\n").unwrap();
        assert_eq!(merges, [("a".into(), "b".into()), ("ab".into(), "c".into())]);
        for bad in ["a\n", "a b c\n", "a  b\n", " a\n"] {
            assert!(parse_merges(bad.as_bytes()).unwrap_err().contains("line 1"), "{bad}");
        }
        assert!(parse_merges(b"a \xff").is_err());
    }

    #[test]
    fn the_end_of_text_may_be_a_string_or_an_object() {
        let eos = |config: &str| {
            TokenizerFiles(BTreeMap::from([(CONFIG, config.into())])).eos_token(Path::new("t"))
        };
        assert_eq!(eos(r#"{"eos_token": "</s>"}"#).unwrap().unwrap(), "</s>");
        assert_eq!(eos(r#"{"eos_token": {"content": "</s>"}}"#).unwrap().unwrap(), "</s>");
        assert_eq!(eos(r#"{"eos_token": null}"#).unwrap(), None);
        assert_eq!(eos("[]").unwrap(), None);
        assert!(eos("{").is_err());
    }

    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        write_whole(dir.path(), "a", b"one").unwrap();
        write_whole(dir.path(), "a", b"two").unwrap();
        assert_eq!(fs::read(dir.path().join("a")).unwrap(), b"two");
        fs::create_dir(dir.path().join("b")).unwrap();
        assert!(write_whole(dir.path(), "b", b"x").is_err());
        assert!(write_whole(&dir.path().join("missing"), "a", b"x").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
