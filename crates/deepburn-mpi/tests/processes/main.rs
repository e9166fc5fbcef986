//! Tests of the engine with real processes, started by `mpirun`.
//!
//! A test starts `mpirun` with this test program, which then runs one *body* on every rank. A body
//! is a test that is ignored except under a launcher. If `mpirun` is not installed, the tests print
//! a message and pass.

#![cfg(feature = "mpi")]

mod collectives;
mod failures;
mod job;
mod messages;
