//! The data of a job: from the places it names to batches, and the recipes that train on them.
//!
//! ```text
//! places.rs       a path or a repository on the Hub → files on this machine
//! corpus.rs       files → tokenized, packed sequences of one length      (language modelling)
//! texts.rs        files → tokenized texts with classes                   (text classification)
//! vocabulary.rs   tokenizer and model fit together
//! causal.rs, classification.rs     model + data + task = a recipe
//! text_source.rs                   batches of texts, fixed or with a budget of tokens
//! subject.rs      the recipe of a job, of any kind
//! ```
//!
//! All ranks of a process share the data. Each rank has a data loader of its own, with a thread that
//! assembles the next batches while the rank computes.

pub(crate) mod causal;
pub(crate) mod classification;
pub(crate) mod corpus;
pub(crate) mod lengths;
pub(crate) mod places;
pub(crate) mod recipe;
pub(crate) mod subject;
pub(crate) mod text_source;
pub(crate) mod texts;
pub(crate) mod vocabulary;
