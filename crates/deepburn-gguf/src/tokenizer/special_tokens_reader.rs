//! Reading of special tokens from a file.

use serde_json::{Map, Value as Json, json};

use super::keys::{CHAT_TEMPLATE, added_key, id_key};
use super::pre_tokenizer::PreTokenizer;
use super::vocabulary::TokenType;
use super::{GgufSpecialTokens, GgufTokenizer};
use crate::{GgufError, Metadata, Value};

/// The tokens that end a turn. llama.cpp knows them by their texts, because its converter often
/// writes the end of a text only.
const TURN_ENDS: [&str; 4] = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];

impl GgufSpecialTokens {
    /// Reads the special tokens of a file with this tokenizer. Missing keys have llama.cpp's
    /// defaults.
    ///
    /// A file of a chat model that names no end of a turn ends turns at the token that llama.cpp
    /// knows by its text. A bos token that is not added and is the eos token too is omitted: files
    /// of tokenizers without one name the eos token.
    ///
    /// # Errors
    /// Returns an error that names the key if it is invalid, or if a token is added that does not
    /// exist.
    pub fn from_metadata(
        metadata: &Metadata,
        tokenizer: &GgufTokenizer,
    ) -> Result<Self, GgufError> {
        let is_sentence_piece = tokenizer.model() == "llama";
        let default = |id: u32| Some(id).filter(|_| is_sentence_piece);
        let id = |name: &str, default| special_id(metadata, name, default, tokenizer);
        let optional = |name: &str| id(name, None);
        let mut tokens = Self {
            bos: id("bos", default(1))?,
            eos: id("eos", default(2))?,
            eot: optional("eot")?,
            eom: optional("eom")?,
            // llama.cpp ignores ids of these two that do not exist, which many files have.
            unk: optional("unknown").unwrap_or(None),
            pad: optional("padding").unwrap_or(None),
            // Without the key, llama.cpp adds the token for SentencePiece and for some
            // pre-tokenizers.
            add_bos: flag(metadata, "bos")?.unwrap_or_else(|| {
                is_sentence_piece
                    || PreTokenizer::of_name(tokenizer.pre()).is_some_and(|pre| pre.adds_bos())
            }),
            add_eos: flag(metadata, "eos")?.unwrap_or(false),
            chat_template: metadata.get(CHAT_TEMPLATE).map(template).transpose()?,
        };
        for (name, id, is_added) in
            [("bos", tokens.bos, tokens.add_bos), ("eos", tokens.eos, tokens.add_eos)]
        {
            if is_added && id.is_none() {
                let problem = format!("is missing, and is added to texts; name the {name} token");
                return Err(GgufError::metadata(&id_key(name), problem));
            }
        }
        if !tokens.add_bos && tokens.bos == tokens.eos {
            tokens.bos = None;
        }
        if tokens.chat_template.is_some() && tokens.eot.is_none() {
            tokens.eot = tokens.find_turn_end(tokenizer);
        }
        Ok(tokens)
    }

    /// Returns the token that ends a turn, unless the tokens at which generation stops have one.
    fn find_turn_end(&self, tokenizer: &GgufTokenizer) -> Option<u32> {
        let is_control = |id: u32| tokenizer.types.get(id as usize) == Some(&TokenType::Control);
        let ids = || TURN_ENDS.iter().filter_map(|text| tokenizer.token_id(text));
        let has_one = ids().any(|id| [self.eos, self.eom].contains(&Some(id)));
        ids().find(|id| is_control(*id)).filter(|_| !has_one)
    }

    /// Returns the tokens at which generation stops, each one once.
    #[must_use]
    pub fn end_tokens(&self) -> Vec<u32> {
        let mut ends: Vec<u32> = Vec::new();
        for id in [self.eos, self.eot, self.eom].into_iter().flatten() {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
        ends
    }

    /// Returns the fields of `config.json` and `generation_config.json` with ids of tokens.
    #[must_use]
    pub fn id_fields(&self) -> Map<String, Json> {
        let ends = match self.end_tokens().as_slice() {
            [] => Json::Null,
            [only] => json!(only),
            ends => json!(ends),
        };
        let fields = [
            ("bos_token_id", json!(self.bos)),
            ("eos_token_id", ends),
            ("pad_token_id", json!(self.pad)),
        ];
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Returns the fields of `tokenizer_config.json`.
    #[must_use]
    pub fn tokenizer_config(&self, tokenizer: &GgufTokenizer) -> Map<String, Json> {
        let mut fields = Map::new();
        for (name, id) in
            [("bos", self.bos), ("eos", self.eos), ("unk", self.unk), ("pad", self.pad)]
        {
            let token = id.and_then(|id| tokenizer.tokens().get(id as usize));
            if let Some(token) = token {
                fields.insert(format!("{name}_token"), token.as_str().into());
            }
        }
        fields.insert("add_bos_token".to_owned(), self.add_bos.into());
        fields.insert("add_eos_token".to_owned(), self.add_eos.into());
        // Otherwise, `transformers` may remove spaces of a decoded text.
        fields.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        fields.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        fields
    }
}

/// Reads an id. A `default` that does not exist is omitted.
fn special_id(
    metadata: &Metadata,
    name: &str,
    default: Option<u32>,
    tokenizer: &GgufTokenizer,
) -> Result<Option<u32>, GgufError> {
    let exists = |id: &u32| (*id as usize) < tokenizer.tokens().len();
    let key = id_key(name);
    let Some(value) = metadata.get(&key) else { return Ok(default.filter(exists)) };
    let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(exists);
    id.map(Some).ok_or_else(|| {
        let len = tokenizer.tokens().len();
        let problem = format!("is {}; must be the id of one of {len} tokens", value.shown());
        GgufError::metadata(&key, problem)
    })
}

/// Reads whether a token is added.
fn flag(metadata: &Metadata, name: &str) -> Result<Option<bool>, GgufError> {
    let key = added_key(name);
    let Some(value) = metadata.get(&key) else { return Ok(None) };
    let problem = || format!("is {}; must be true or false", value.shown());
    value.as_bool().map(Some).ok_or_else(|| GgufError::metadata(&key, problem()))
}

/// Reads the chat template.
fn template(value: &Value) -> Result<String, GgufError> {
    let problem = || format!("is {}; must be a text", value.shown());
    value.as_str().map(str::to_owned).ok_or_else(|| GgufError::metadata(CHAT_TEMPLATE, problem()))
}
