//! Starts the ranks of a training job with Open MPI's `mpirun`, on one machine or many.
//!
//! - [`read_hostfile`]: reads DeepSpeed's hostfile, `host slots=N` per line.
//! - [`Selection`]: selects hosts and slots with DeepSpeed's `--include`, `--exclude`,
//!   `--num_nodes` and `--num_gpus`.
//! - [`Mpirun`]: builds the command line.
//! - [`Launch`]: checks that remote hosts respond, runs the command, forwards signals, restarts
//!   after failures and returns how the job ended.
//!
//! # Signals
//!
//! On SIGTERM and SIGINT, `mpirun` ends the job: it waits `odls_base_sigkill_timeout` seconds,
//! sends SIGTERM to the ranks, waits again and sends SIGKILL. It always waits for the full time,
//! even after a rank has failed. A time-out that is long enough for saving a checkpoint would
//! therefore delay both the checkpoint and the end of a failed job by minutes.
//!
//! For this reason the time-out is one second. When the launcher receives SIGTERM, SIGINT, SIGHUP
//! or SIGUSR1, it sends SIGUSR1 to `mpirun`, which forwards it to all ranks immediately. For a
//! rank, SIGUSR1 means "save and stop" and SIGTERM means "stop now". `mpirun` loses signals that
//! arrive while it starts ranks, so SIGUSR1 is sent again every few seconds, and ranks must ignore
//! repeated signals.
//!
//! This crate depends neither on a tensor library nor on other crates of DeepBurn.

#![forbid(unsafe_code)]

mod children;
mod command;
mod connect;
mod environment;
mod events;
mod guard;
mod hostfile;
mod job;
mod launch;
mod local;
mod orphans;
mod output;
mod program;
mod selection;
mod stall;

pub use command::{Attempt, Mpirun, quoted};
pub use connect::ConnectError;
pub use environment::{ForwardError, forwarded_variables};
pub use hostfile::{HostSlots, HostfileError, read_hostfile};
pub use job::JobEnd;
pub use launch::{Launch, LaunchError};
pub use local::{LocalError, is_this_machine, this_machine, usable_cores};
pub use program::{CommandError, training_command};
pub use selection::{Selection, SelectionError};
