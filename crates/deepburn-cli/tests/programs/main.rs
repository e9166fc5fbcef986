//! `finetune` and `deepburn` from end to end: the programs are run as a user runs them.
//!
//! `data/` holds the token file, two traces of PyTorch with DeepSpeed on the small model in
//! `models/tests/data/tiny`, and two checkpoints of DeepSpeed after 6 of 12 steps on it.

mod backends;
mod batches;
mod best;
mod deepspeed;
mod determinism;
mod evaluation;
mod failures;
#[cfg(feature = "mpi")]
mod faults;
mod hub;
mod job;
mod launching;
mod limits;
mod malformed;
mod memory;
mod one_bit;
mod outputs;
mod param_groups;
mod predicting;
#[cfg(feature = "mpi")]
mod processes;
mod program;
mod ranks;
mod recomputing;
mod resume;
mod reviews;
mod schedules;
mod swapping;
mod traces;
mod watching;
