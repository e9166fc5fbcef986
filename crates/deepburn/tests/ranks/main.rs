//! Tests of failing ranks, early stopping and random delays through the public interface.

mod data;
mod evaluation;
mod failures;
mod net;
mod stress;
