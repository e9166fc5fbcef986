//! The `tokenizer.json` of a tokenizer that was read from a file.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json, json};

use super::gguf_tokenizer::is_phi3;
use super::pre_tokenizer::PreTokenizer;
use super::sentence_piece::SPACE;
use super::space_prefix::SpacePrefix;
use super::tokenizer_reader::split_merge;
use super::vocabulary::TokenType;
use super::{GgufSpecialTokens, GgufTokenizer};

/// The added tokens of Phi 3 that do not take the spaces after them, as in llama.cpp.
const PHI3_WITHOUT_RULE: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

impl GgufTokenizer {
    /// Returns a `tokenizer.json` that splits texts as llama.cpp does. `name` is the `general.name`
    /// of the file: llama.cpp knows Phi 3 by it, whose added tokens take the spaces after them.
    ///
    /// Added tokens are in the vocabulary too, so that `tokenizers` does not number them anew.
    /// `qwen2` has the normalizer NFC of Qwen's tokenizers, which llama.cpp omits.
    #[must_use]
    pub fn to_json(&self, name: &str, special: &GgufSpecialTokens) -> Json {
        let pre = PreTokenizer::of_name(self.pre).filter(|_| self.is_byte_level());
        let model = json!({
            "type": "BPE",
            "dropout": null,
            // Byte-level BPE of llama.cpp omits bytes without a token.
            "unk_token": self.unknown_token(special).filter(|_| pre.is_none()),
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            // SentencePiece makes one token of neighboring characters without a token.
            "fuse_unk": pre.is_none(),
            "byte_fallback": pre.is_none(),
            "ignore_merges": pre.as_ref().is_some_and(|pre| pre.ignores_merges),
            "vocab": self.vocabulary_json(),
            "merges": self.merges_json(),
        });
        let (normalizer, pre_tokenizer, decoder) = match pre {
            Some(pre) => (pre.normalizer(), pre.to_json(), byte_level()),
            None => (self.space_normalizer(), self.space_pre_tokenizer(), self.space_decoder()),
        };
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens_json(is_phi3(name)),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self.post_processor(special),
            "decoder": decoder,
            "model": model,
        })
    }

    /// Returns whether this is byte-level BPE.
    fn is_byte_level(&self) -> bool {
        self.space_prefix.is_none()
    }

    /// Returns the token for text without a token.
    fn unknown_token(&self, special: &GgufSpecialTokens) -> Option<&str> {
        let by_type = self.types.iter().position(|it| *it == TokenType::Unknown);
        let id = special.unk.map(|id| id as usize).or(by_type)?;
        self.tokens.get(id).map(String::as_str)
    }

    fn vocabulary_json(&self) -> Map<String, Json> {
        let all = self.tokens.iter().zip(&self.types).enumerate();
        let tokens = all.filter(|(_, (_, it))| it.is_in_vocabulary());
        tokens.map(|(id, (text, _))| (text.clone(), id.into())).collect()
    }

    fn merges_json(&self) -> Vec<Json> {
        let pair = |(left, right): (&str, &str)| json!([left, right]);
        match (&self.merges, &self.scores) {
            (Some(merges), _) => {
                let mut seen = HashSet::new();
                let all = merges.iter().filter_map(|merge| split_merge(merge));
                all.filter(|merge| seen.insert(*merge)).map(pair).collect()
            }
            (None, Some(scores)) => self.merges_of_scores(scores).into_iter().map(pair).collect(),
            (None, None) => Vec::new(),
        }
    }

    /// Returns all pairs of tokens whose text is a token, the one with the highest score first, as
    /// `transformers` does: llama.cpp merges the neighbors whose common token has the highest
    /// score.
    fn merges_of_scores(&self, scores: &[f32]) -> Vec<(&str, &str)> {
        let is_part = |id: &usize| self.types.get(*id) == Some(&TokenType::Normal);
        let ids: Vec<usize> = (0..self.tokens.len()).filter(is_part).collect();
        let parts: HashSet<&str> = ids.iter().map(|id| self.tokens[*id].as_str()).collect();
        let mut found = Vec::new();
        for id in ids {
            let text = self.tokens[id].as_str();
            for (at, _) in text.char_indices().skip(1) {
                let (left, right) = text.split_at(at);
                if parts.contains(left) && parts.contains(right) {
                    found.push((scores[id], id, left, right));
                }
            }
        }
        found.sort_by(|a, b| {
            let by_score = b.0.total_cmp(&a.0);
            by_score.then(a.1.cmp(&b.1)).then(b.2.len().cmp(&a.2.len()))
        });
        found.into_iter().map(|(_, _, left, right)| (left, right)).collect()
    }

    fn added_tokens_json(&self, is_phi3: bool) -> Vec<Json> {
        let all = self.tokens.iter().zip(&self.types).enumerate();
        let added = all.filter(|(_, (_, it))| it.is_added());
        let token = |(id, (text, token_type)): (usize, (&String, &TokenType))| {
            json!({
                "id": id,
                "content": text,
                "single_word": false,
                "lstrip": false,
                "rstrip": is_phi3 && !PHI3_WITHOUT_RULE.contains(&text.as_str()),
                "normalized": false,
                "special": *token_type != TokenType::UserDefined,
            })
        };
        added.map(token).collect()
    }

    /// Returns the normalizer that writes spaces as U+2581, unless the pre-tokenizer does.
    fn space_normalizer(&self) -> Json {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let prepend = json!({"type": "Prepend", "prepend": SPACE});
        match self.space_prefix {
            None | Some(SpacePrefix::Never) => replace,
            Some(SpacePrefix::EveryText) => {
                json!({"type": "Sequence", "normalizers": [prepend, replace]})
            }
            Some(SpacePrefix::First | SpacePrefix::Always) => Json::Null,
        }
    }

    fn space_pre_tokenizer(&self) -> Json {
        let scheme = self.space_prefix.and_then(SpacePrefix::scheme);
        scheme.map_or(Json::Null, |scheme| {
            json!({
                "type": "Metaspace",
                "replacement": SPACE,
                "prepend_scheme": scheme,
                "split": false,
            })
        })
    }

    fn space_decoder(&self) -> Json {
        let mut steps = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if self.space_prefix != Some(SpacePrefix::Never) {
            steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({"type": "Sequence", "decoders": steps})
    }

    /// Returns the post-processor, which adds the tokens before and after a text.
    fn post_processor(&self, special: &GgufSpecialTokens) -> Json {
        let token = |id: Option<u32>, is_added: bool| {
            let id = id.filter(|_| is_added)?;
            Some((id, self.tokens.get(id as usize)?.as_str()))
        };
        let bos = token(special.bos, special.add_bos);
        let eos = token(special.eos, special.add_eos);
        let sequence = |name: &str, type_id: usize| {
            let item =
                |(_, text): (u32, &str)| json!({"SpecialToken": {"id": text, "type_id": type_id}});
            let text = json!({"Sequence": {"id": name, "type_id": type_id}});
            bos.map(item).into_iter().chain([text]).chain(eos.map(item)).collect::<Vec<_>>()
        };
        let tokens: HashMap<&str, Json> = bos
            .into_iter()
            .chain(eos)
            .map(|(id, text)| (text, json!({"id": text, "ids": [id], "tokens": [text]})))
            .collect();
        let template = (!tokens.is_empty()).then(|| {
            json!({
                "type": "TemplateProcessing",
                "single": sequence("A", 0),
                "pair": ([sequence("A", 0), sequence("B", 1)].concat()),
                "special_tokens": tokens,
            })
        });
        match (self.is_byte_level(), template) {
            (true, None) => byte_level(),
            (true, Some(template)) => {
                json!({"type": "Sequence", "processors": [byte_level(), template]})
            }
            (false, template) => template.unwrap_or_default(),
        }
    }
}

/// Returns the decoder of byte-level BPE, which is also its post-processor.
fn byte_level() -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true})
}
