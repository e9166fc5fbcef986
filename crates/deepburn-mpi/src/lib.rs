//! A process group over MPI, with one process per rank.
//!
//! `MpiGroup` provides the same collectives as the rank threads of one process
//! (`deepburn_comm::Member`) and returns bit-identical results. MPI only transports bytes: ranks
//! exchange parts of arrays, and the owner of a part reduces it in rank order with
//! `Payload::reduce`. MPI's data types and reductions are not used, because the MPI standard does
//! not define their order of additions.
//!
//! Each process is one rank. Its communication thread makes all MPI calls and runs the collectives
//! in the order in which they were started, while the rank's thread computes. Before data is
//! exchanged, every rank sends a header to every other rank. If headers disagree, all ranks return
//! an error that names both sides. If a rank does not reach a collective in time or its process
//! dies, all ranks return an error that names this rank.
//!
//! Messages between two ranks (`ProcessGroup::send`) do not take part in that order. The
//! communication thread sends and receives them while it waits in a collective, and keeps those
//! that the rank has not asked for. Subgroups exchange headers only among their members.
//!
//! All items require the feature `mpi`, which needs an MPI library at build time.

#![cfg(feature = "mpi")]

mod backoff;
mod collectives;
mod control;
mod deadline;
mod group;
mod letters;
mod library;
mod link;
mod neighbors;
mod process;
mod settings;
mod status;
mod transfer;

pub use group::{MpiGroup, OnDevice};
pub use library::MpiError;
pub use process::Process;
pub use settings::Settings;
