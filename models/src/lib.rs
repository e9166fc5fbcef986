//! Model architectures for DeepBurn, written as plain Burn modules.
//!
//! Nothing here knows of ranks, shards or DeepSpeed: a model is generic over its backend and is
//! sharded from outside. [`gpt2`] is the GPT-2 of the `transformers` library, to the digit, with
//! its checkpoints, loss and text generation.

pub mod gpt2;
