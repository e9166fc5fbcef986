//! The data of a job: reads data sets, assembles batches, and combines model, data and task in a
//! recipe.
//!
//! ```text
//! places.rs                        a path or a repository on the Hub → local files
//! corpus.rs                        files → tokenized, packed sequences of one length      (language modeling)
//! chat.rs, chat_tokenizer.rs       files → samples with trained tokens, packed or padded  (language modeling)
//! texts.rs                         files → tokenized texts with labels                    (text classification)
//! problem_type.rs                  what a classifier predicts, and where this is set      (text classification)
//! model_config.rs                  the configuration of the model
//! job_adapter.rs                   its adapter
//! job_tokenizer.rs                 the tokenizer of the job or of its pretrained model
//! vocabulary.rs                    vocabulary size and special tokens of the model, from the tokenizer
//! companions.rs                    files of the pretrained model and the tokenizer that are exported unchanged
//! lengths.rs                       maximum lengths, and the curriculum
//! recipe.rs                        the interface of a recipe
//! causal.rs, classification.rs     the recipes: model + data + task
//! subject.rs                       the recipe of a job, one of these
//! causal_data.rs                   the data of language models and its loaders
//! token_batch.rs                   its micro-batches, sequences or pairs
//! text_sampler.rs                  texts that are generated after evaluations, from sample_prompts.rs
//! label_batch.rs                   labels of a batch, and the answers to them
//! text_source.rs                   batches of texts, of a fixed size or with a token budget
//! ```
//!
//! All ranks of a process share the data. Each rank has its own data loader, whose thread assembles
//! the next batches while the rank computes.

pub(crate) mod causal;
pub(crate) mod causal_data;
pub(crate) mod causal_task;
pub(crate) mod chat;
mod chat_tokenizer;
pub(crate) mod classification;
pub(crate) mod companions;
pub(crate) mod corpus;
pub(crate) mod job_adapter;
pub(crate) mod job_tokenizer;
pub(crate) mod label_batch;
pub(crate) mod lengths;
pub(crate) mod model_config;
pub(crate) mod places;
pub(crate) mod preference;
mod pretrained_classes;
mod problem_type;
pub(crate) mod recipe;
pub(crate) mod sample_prompts;
pub(crate) mod subject;
mod text_sampler;
pub(crate) mod text_source;
pub(crate) mod texts;
mod token_batch;
pub(crate) mod turn_ends;
pub(crate) mod unlearned_tokens;
pub(crate) mod vocabulary;
