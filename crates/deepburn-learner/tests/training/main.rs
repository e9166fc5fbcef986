//! Engines in training: their calls, precision, checkpoints and failures. One program, because each would compile
//! the tensor stack again.

mod autocast;
mod buffers;
mod checkpoints;
mod common;
mod contexts;
mod deepspeed;
mod engine;
mod failures;
mod mixed;
mod mlp;
mod one_bit;
mod optimizers;
mod param_groups;
mod saving;
mod saving_faults;
mod train_pass;
mod zero_one;
