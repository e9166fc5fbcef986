//! The metadata keys of a tokenizer.

/// The kind of the tokenizer: `gpt2` or `llama`.
pub(super) const MODEL: &str = "tokenizer.ggml.model";
/// The name of the pre-tokenizer.
pub(super) const PRE: &str = "tokenizer.ggml.pre";
/// The texts of the tokens, by id.
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
/// The number of each token's type.
pub(super) const TYPES: &str = "tokenizer.ggml.token_type";
/// A score per token, in SentencePiece.
pub(super) const SCORES: &str = "tokenizer.ggml.scores";
/// `left right` for each merge, in BPE.
pub(super) const MERGES: &str = "tokenizer.ggml.merges";
/// Whether a space is added before texts.
pub(super) const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
/// Before which texts it is added, if `Metaspace` does it. llama.cpp does not know this key.
pub(super) const PREPEND_SCHEME: &str = "deepburn.tokenizer.prepend_scheme";
/// The chat template, in Jinja.
pub(super) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// Returns the key of the id of a special token, such as `bos`.
pub(super) fn id_key(name: &str) -> String {
    format!("tokenizer.ggml.{name}_token_id")
}

/// Returns the key of whether a special token is added to texts.
pub(super) fn added_key(name: &str) -> String {
    format!("tokenizer.ggml.add_{name}_token")
}
