//! Ranks as processes: a process group over MPI.
//!
//! `MpiGroup` carries the same collectives as the rank threads of one process
//! (`deepburn_comm::Member`) and gives the same bits, because it moves bytes alone: parts
//! of arrays are exchanged, and the rank that owns a part reduces it in rank order with the payload's
//! own `Payload::reduce`. Neither MPI's data types nor its reductions are
//! used, whose order of additions no standard fixes.
//!
//! A process is one rank. One thread of it, the communication thread, makes all calls of MPI and runs
//! the collectives in the order in which they were started; the rank computes meanwhile. Before data
//! moves, every rank sends every other a header. Ranks that disagree get the error that names both
//! sides. A rank that does not come, or whose process dies, ends all ranks with its name.
//!
//! Everything is behind the feature `mpi`, which needs an MPI library to build.

#[cfg(feature = "mpi")]
mod backoff;
#[cfg(feature = "mpi")]
mod collectives;
#[cfg(feature = "mpi")]
mod control;
#[cfg(feature = "mpi")]
mod group;
#[cfg(feature = "mpi")]
mod library;
#[cfg(feature = "mpi")]
mod link;
#[cfg(feature = "mpi")]
mod neighbours;
#[cfg(feature = "mpi")]
mod process;
#[cfg(feature = "mpi")]
mod transfer;

#[cfg(feature = "mpi")]
pub use group::{MpiGroup, OnDevice};
#[cfg(feature = "mpi")]
pub use library::MpiError;
#[cfg(feature = "mpi")]
pub use process::{Process, Settings};
