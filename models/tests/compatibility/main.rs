//! Models compared with `transformers` and PyTorch: their weights, files and logits. All tests are one program,
//! because each further program would compile the tensor stack again.

mod checkpoints;
mod classifier;
mod encoder;
mod transformers;
