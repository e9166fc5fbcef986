//! The files of a tokenizer, with the names that `transformers` expects.
//!
//! [`TokenizerFiles`] keeps the bytes that were read and writes them back unchanged, so that
//! fine-tuning never alters a tokenizer. It generates only missing files.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use deepburn_files::PartialFile;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, ModelWrapper, NormalizerWrapper, TokenizerBuilder, TokenizerImpl};

use crate::formats::folder::read_small;
use crate::guard::guarded_call;
use crate::{DataError, Result};

/// The token between documents, as GPT-2 spells it.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The ids of tokens that were added to a vocabulary.
pub(crate) const ADDED_TOKENS: &str = "added_tokens.json";
/// The complete definition of a tokenizer.
const TOKENIZER: &str = "tokenizer.json";
/// Settings of `transformers`, with the special tokens.
pub(crate) const CONFIG: &str = "tokenizer_config.json";
/// Special tokens by name.
pub(crate) const SPECIAL_TOKENS: &str = "special_tokens_map.json";
/// The tokens of a BPE and their ids.
const VOCAB: &str = "vocab.json";
/// The merges of a BPE, most frequent first.
const MERGES: &str = "merges.txt";

/// The names of all files of a tokenizer.
pub(crate) const TOKENIZER_FILES: [&str; 6] =
    [TOKENIZER, CONFIG, SPECIAL_TOKENS, VOCAB, MERGES, ADDED_TOKENS];

/// Maximum bytes of a file: ten times the size of the largest vocabularies.
const MAX_BYTES: u64 = 256 << 20;

/// Returns whether the files for which `has` returns true define a tokenizer.
pub(crate) fn is_complete(has: impl Fn(&str) -> bool) -> bool {
    has(TOKENIZER) || (has(VOCAB) && has(MERGES))
}

/// Returns whether a folder has the files of a tokenizer that
/// [`Tokenizer::load`](crate::Tokenizer::load) reads.
pub fn has_tokenizer(folder: &Path) -> bool {
    is_complete(|name| folder.join(name).is_file())
}

/// File names and contents.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenizerFiles(BTreeMap<&'static str, Vec<u8>>);

impl TokenizerFiles {
    /// Reads the tokenizer files in a folder, or a single file. The files that name the special
    /// tokens of a `tokenizer.json` are read from its folder; a file of another name may be there
    /// by chance.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let is_folder = fs::metadata(path).map_err(DataError::unreadable(path))?.is_dir();
        let (folder, names) = match (is_folder, path.parent()) {
            (true, _) => (path, &TOKENIZER_FILES[..]),
            (false, Some(folder)) if path.file_name() == Some(TOKENIZER.as_ref()) => {
                (folder, &[CONFIG, SPECIAL_TOKENS][..])
            }
            (false, _) => (path, &[][..]),
        };
        let mut files = BTreeMap::new();
        for name in names {
            let file = folder.join(name);
            if file.is_file() {
                files.insert(*name, read_small(&file, MAX_BYTES)?);
            }
        }
        if !is_folder {
            files.insert(TOKENIZER, read_small(path, MAX_BYTES)?);
        }
        match is_complete(|name| files.contains_key(name)) {
            true => Ok(Self(files)),
            false => Err(no_tokenizer(path)),
        }
    }

    /// Creates the files of a trained tokenizer: `tokenizer.json` only.
    pub(crate) fn trained(json: String) -> Self {
        Self(BTreeMap::from([(TOKENIZER, json.into_bytes())]))
    }

    /// Builds the tokenizer; `path` names it in errors.
    pub(crate) fn build(&self, path: &Path) -> Result<tokenizers::Tokenizer> {
        match (self.0.get(TOKENIZER), self.0.get(VOCAB), self.0.get(MERGES)) {
            (Some(json), _, _) if path.is_dir() => parse(json, &path.join(TOKENIZER)),
            (Some(json), _, _) => parse(json, path),
            (None, Some(vocab), Some(merges)) => {
                let added = self.added_tokens().and_then(|added| {
                    self.check_class()?;
                    Ok(added)
                });
                let added = added.map_err(|reason| Self::invalid(path, &reason))?;
                build_gpt2([vocab, merges], &added, path)
            }
            _ => Err(no_tokenizer(path)),
        }
    }

    /// Returns the contents of a file as JSON; null if it is missing.
    ///
    /// # Errors
    /// Returns the reason if it is not valid JSON.
    pub(crate) fn json(&self, name: &str) -> Result<Value, String> {
        let Some(contents) = self.0.get(name) else { return Ok(Value::Null) };
        serde_json::from_slice(contents)
            .map_err(|error| format!("{name} is not valid JSON: {error}"))
    }

    /// Returns the number of entries of the list of added tokens in `tokenizer.json`, if there is
    /// this file.
    pub(crate) fn num_added_tokens(&self) -> Option<usize> {
        // Only this list is kept of a file of many megabytes.
        #[derive(serde::Deserialize)]
        struct Definition {
            added_tokens: Vec<serde::de::IgnoredAny>,
        }
        let definition: Definition = serde_json::from_slice(self.0.get(TOKENIZER)?).ok()?;
        Some(definition.added_tokens.len())
    }

    /// Replaces a file that was read by `json`. A missing file stays missing.
    pub(crate) fn replace(&mut self, name: &str, json: &Value) {
        if let Some(contents) = self.0.get_mut(name) {
            *contents = pretty(json);
        }
    }

    /// Writes all files and the `generated` ones into `folder`.
    pub(crate) fn write(
        &self,
        mut generated: BTreeMap<&'static str, Vec<u8>>,
        folder: &Path,
    ) -> Result<()> {
        fs::create_dir_all(folder).map_err(DataError::unwritable(folder))?;
        // Files that were read replace generated ones.
        generated.extend(self.0.clone());
        for (name, contents) in generated {
            write_whole(folder, name, &contents)
                .map_err(DataError::unwritable(folder.join(name)))?;
        }
        Ok(())
    }

    /// Generates the files that `transformers` needs and that are missing here.
    pub(crate) fn generated(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        end_of_text: Option<&str>,
    ) -> tokenizers::Result<BTreeMap<&'static str, Vec<u8>>> {
        let mut files = BTreeMap::new();
        if !self.0.contains_key(TOKENIZER) {
            files.insert(TOKENIZER, tokenizer.to_string(true)?.into_bytes());
        }
        if !self.0.contains_key(CONFIG) {
            let mut config = json!({
                "clean_up_tokenization_spaces": false,
                "tokenizer_class": "PreTrainedTokenizerFast",
            });
            let mut special = json!({});
            // Batches are padded with the end-of-text token, after the text. It also begins a text
            // in GPT-2's vocabulary; another vocabulary has its own token for that, or none.
            let is_gpt2 = end_of_text == Some(END_OF_TEXT);
            let names = ["bos_token", "eos_token", "pad_token"].into_iter();
            for name in names.filter(|name| is_gpt2 || *name != "bos_token") {
                if let Some(token) = end_of_text {
                    config[name] = token.into();
                    special[name] = token.into();
                }
            }
            files.insert(CONFIG, pretty(&config));
            if end_of_text.is_some() {
                files.insert(SPECIAL_TOKENS, pretty(&special));
            }
        }
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model() {
            let model = serde_json::to_value(bpe)?;
            files.insert(VOCAB, model["vocab"].to_string().into_bytes());
            files.insert(MERGES, render_merges(&model["merges"]).into_bytes());
        }
        Ok(files)
    }

    /// Returns the error of tokenizer files that cannot be used.
    pub(crate) fn invalid(path: &Path, reason: &str) -> DataError {
        let reason = reason.replace('\n', " ");
        DataError::invalid(
            path,
            format!(
                "cannot be loaded as a tokenizer: {reason}; data.tokenizer must be in the format of the `tokenizers` library; fetch it again, or choose another one"
            ),
        )
    }
}

/// Returns the error of a folder without a tokenizer.
fn no_tokenizer(path: &Path) -> DataError {
    let reason = "holds no tokenizer that can be read; expected tokenizer.json, or vocab.json together with merges.txt; give the folder of the tokenizer, or convert another format with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)";
    DataError::invalid(path, reason)
}

/// Renders a JSON file.
fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// A byte-level BPE tokenizer with the components of GPT-2's tokenizer.
pub(crate) type ByteLevelBpe =
    TokenizerImpl<BPE, NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel>;

/// Adds GPT-2's pre-tokenizer, post-processor and decoder to `model`.
pub(crate) fn byte_level(model: BPE) -> tokenizers::Result<ByteLevelBpe> {
    TokenizerBuilder::new()
        .with_model(model)
        .with_normalizer(None)
        .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
        .with_post_processor(Some(ByteLevel::new(true, false, true)))
        .with_decoder(Some(ByteLevel::new(false, true, true)))
        .build()
}

/// Builds the byte-level BPE with GPT-2's pre-tokenizer that `vocab.json` and `merges.txt` imply,
/// with the tokens that were `added` to it.
fn build_gpt2(
    [vocab, merges]: [&[u8]; 2],
    added: &BTreeMap<u32, AddedToken>,
    path: &Path,
) -> Result<tokenizers::Tokenizer> {
    let vocab: BTreeMap<String, u32> = serde_json::from_slice(vocab).map_err(|error| {
        TokenizerFiles::invalid(path, &format!("{VOCAB} is not a map of tokens to ids: {error}"))
    })?;
    let merges = parse_merges(merges).map_err(|reason| TokenizerFiles::invalid(path, &reason))?;
    let build = || -> tokenizers::Result<tokenizers::Tokenizer> {
        let has_end_of_text = vocab.contains_key(END_OF_TEXT);
        let model = BPE::builder().vocab_and_merges(vocab.into_iter().collect::<Vocab>(), merges);
        let mut tokenizer = byte_level(model.build()?)?;
        if has_end_of_text {
            tokenizer.add_special_tokens(&[AddedToken::from(END_OF_TEXT, true)]);
        }
        // In the order of their ids, because the library assigns ids one after another.
        for (id, token) in added {
            match token.special {
                true => tokenizer.add_special_tokens(std::slice::from_ref(token)),
                false => tokenizer.add_tokens(std::slice::from_ref(token)),
            };
            if tokenizer.token_to_id(&token.content) != Some(*id) {
                let content = &token.content;
                return Err(format!("the added token `{content}` cannot have the id {id}").into());
            }
        }
        Ok(tokenizer.into())
    };
    guarded_call(build).map_err(|reason| {
        TokenizerFiles::invalid(path, &format!("{VOCAB} and {MERGES} disagree: {reason}"))
    })
}

/// Parses the tokenizer in `json`.
fn parse(json: &[u8], path: &Path) -> Result<tokenizers::Tokenizer> {
    // Checked first, because the library panics on a file that is truncated within a decoder.
    let valid = serde_json::from_slice::<serde::de::IgnoredAny>(json)
        .map_err(|error| format!("it is not valid JSON: {error}"));
    valid
        .and_then(|_| guarded_call(|| tokenizers::Tokenizer::from_bytes(json)))
        .map_err(|reason| TokenizerFiles::invalid(path, &reason))
}

/// Renders the pairs of a BPE model as `merges.txt`.
fn render_merges(pairs: &Value) -> String {
    let mut text = String::from("#version: 0.2\n");
    for pair in pairs.as_array().into_iter().flatten() {
        let [left, right] = [&pair[0], &pair[1]].map(|token| token.as_str().unwrap_or_default());
        text.push_str(&format!("{left} {right}\n"));
    }
    text
}

/// Parses `merges.txt`: a version line, then two tokens per line, most frequent first.
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

/// Writes a file under a temporary name and renames it, so that no reader sees an incomplete file.
fn write_whole(folder: &Path, name: &str, contents: &[u8]) -> io::Result<()> {
    let partial = folder.join(format!(".{name}.partial"));
    let mut file = PartialFile::create(folder.join(name), partial)?;
    file.write_all(contents)?;
    file.finish_synced()
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

    /// The rendered definition is part of the key of cached tokens.
    #[test]
    fn a_vocabulary_and_merges_define_gpt2s_tokenizer() {
        let vocab = json!({ "a": 0, "b": 1, "ab": 2, END_OF_TEXT: 3 });
        let level = |add_prefix_space, trim_offsets| {
            json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space,
                    "trim_offsets": trim_offsets, "use_regex": true })
        };
        let expected = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [{ "id": 3, "content": END_OF_TEXT, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false, "special": true }],
            "normalizer": null,
            "pre_tokenizer": level(false, true),
            "post_processor": level(true, false),
            "decoder": level(false, true),
            "model": { "type": "BPE", "vocab": vocab, "merges": [["a", "b"]] },
        });
        let expected = tokenizers::Tokenizer::from_bytes(expected.to_string()).unwrap();
        let merges = b"#version: 0.2\na b\n";
        let built =
            build_gpt2([vocab.to_string().as_bytes(), merges], &BTreeMap::new(), Path::new("t"));
        let built = built.unwrap();
        assert_eq!(built.to_string(false).unwrap(), expected.to_string(false).unwrap());
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
