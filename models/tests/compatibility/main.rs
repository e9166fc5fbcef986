//! Models beside those of `transformers` and PyTorch: their weights, files and logits. One program, because each
//! would compile the tensor stack again.

mod checkpoints;
mod classifier;
mod encoder;
mod transformers;
