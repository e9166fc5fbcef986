//! Ranks as processes: a process group over MPI.
//!
//! `MpiGroup` offers the same collectives as the rank threads of one process
//! (`deepburn_comm::Member`) and returns the same bits, because MPI only
//! transports bytes: parts of arrays are exchanged, and the owner of a part
//! reduces it in rank order with the payload's own `Payload::reduce`. MPI's
//! data types and reductions are not used, because no standard defines their
//! order of additions.
//!
//! A process is one rank. Its communication thread makes all calls of MPI and
//! runs the collectives in the order in which they were started, while the rank
//! computes. Before data is exchanged, every rank sends every other a header.
//! If headers disagree, all ranks get an error that names both sides. A rank
//! that does not arrive, or whose process dies, ends all ranks with an error
//! that names it.
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
mod settings;
#[cfg(feature = "mpi")]
mod status;
#[cfg(feature = "mpi")]
mod transfer;

#[cfg(feature = "mpi")]
pub use group::{MpiGroup, OnDevice};
#[cfg(feature = "mpi")]
pub use library::MpiError;
#[cfg(feature = "mpi")]
pub use process::Process;
#[cfg(feature = "mpi")]
pub use settings::Settings;
