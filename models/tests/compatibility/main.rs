//! Compares models with `transformers` and PyTorch: weights, files and logits. All tests are in one
//! program, because each additional program would compile the tensor library again.

mod adapters;
mod checkpoints;
mod classifier;
mod configs;
mod decoders;
mod documents;
mod encoder;
mod problem_types;
mod transformers;
