//! Tests of training with the engine: its calls, precision, checkpoints and failures. They are one
//! program, because every test program has to link the tensor stack again.

mod accumulation;
mod autocast;
mod buffers;
mod checkpoints;
mod contexts;
mod deepspeed;
mod engine;
mod failed_backward;
mod failures;
mod line;
mod mixed;
mod mlp;
mod models;
mod one_bit;
mod optimizers;
mod param_groups;
mod pipeline;
mod plain_tensors;
mod saving;
mod saving_faults;
mod targets;
mod train_pass;
mod zero_one;
