//! End-to-end tests of `finetune` and `deepburn`, which are run as by a user.
//!
//! `tests/data/` has a token file, traces of PyTorch and DeepSpeed on the small model in
//! `models/tests/data/tiny`, and two DeepSpeed checkpoints of this model after 6 of 12 steps.

mod architectures;
mod backends;
mod batches;
mod best;
mod cadence;
mod chat;
mod checkpoint_scope;
mod deepspeed;
mod determinism;
mod diagnoses;
mod evaluation;
mod export;
mod failures;
#[cfg(feature = "mpi")]
mod faults;
mod formats;
mod generated;
mod generation;
mod hub;
mod hybrid;
mod instructions;
mod job;
mod label_kinds;
mod label_smoothing;
mod launching;
mod limits;
mod lora;
mod lora_tools;
mod malformed;
mod memory;
#[cfg(all(feature = "cuda", unix))]
mod null_cuda;
mod one_bit;
mod outputs;
mod param_groups;
mod pipelines;
mod predicting;
mod preference;
#[cfg(feature = "mpi")]
mod processes;
mod program;
mod published;
mod quantized;
mod ranks;
mod recomputing;
mod resume;
mod reviews;
mod schedules;
mod swapping;
mod traces;
mod tuning;
mod vocabulary;
mod watching;
