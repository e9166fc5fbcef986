//! The tokenizer of a model as metadata, made from its `tokenizer.json` or read from a file.
//!
//! Main type: [`GgufTokenizer`]. llama.cpp has two kinds that DeepBurn's models use: byte-level BPE
//! (`gpt2`) with a pre-tokenizer, which it knows by name, and SentencePiece (`llama`), whose tokens
//! have scores. A tokenizer that has other parts is an error, because llama.cpp would split texts
//! into other tokens without a message.
//!
//! The sources are `get_vocab_base`, `get_vocab_base_pre` and `_create_vocab_sentencepiece` of
//! <https://github.com/ggml-org/llama.cpp/blob/master/conversion/base.py>, and
//! `src/llama-vocab.cpp`.

mod byte_level;
mod definition;
mod gguf_tokenizer;
mod json_reader;
mod keys;
mod pre_tokenizer;
mod sentence_piece;
mod space_prefix;
mod special_tokens;
mod special_tokens_reader;
mod template;
mod tokenizer_json;
mod tokenizer_reader;
mod vocabulary;

pub use gguf_tokenizer::GgufTokenizer;
pub use special_tokens::GgufSpecialTokens;
