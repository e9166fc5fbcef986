//! `finetune` and `deepburn` from end to end: the programs are run as a user runs them.
//!
//! `data/` holds the token file and two traces of PyTorch with DeepSpeed on the small model in
//! `models/tests/data/tiny`.

mod backends;
mod batches;
mod determinism;
mod evaluation;
mod failures;
mod hub;
mod job;
mod malformed;
mod memory;
mod outputs;
mod program;
mod ranks;
mod resume;
mod reviews;
mod schedules;
mod traces;
mod watching;
