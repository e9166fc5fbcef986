//! Tests of Burn's Learner on sharded ranks, through the public interface.
#![recursion_limit = "256"]

mod bits;
mod classifier;
mod recorder;
mod refusals;
mod resuming;
mod stopping;
mod updates;
