//! The engine with real processes, started by `mpirun`.
//!
//! A test starts `mpirun` with this very test program, which then runs one *body* on every rank: a
//! test that is ignored except under a launcher. Without `mpirun` the tests say so and pass.

#![cfg(feature = "mpi")]

mod collectives;
mod failures;
mod job;
