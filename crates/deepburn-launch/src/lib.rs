//! Starts the ranks of a training job with Open MPI's `mpirun`, on one machine or many.
//!
//! - [`read_hostfile`]: DeepSpeed's hostfile, `host slots=N` a line.
//! - [`Selection`]: which hosts and slots of it are used, by DeepSpeed's `--include`, `--exclude`,
//!   `--num_nodes` and `--num_gpus`.
//! - [`Mpirun`]: the command line.
//! - [`Launch`]: checks that remote hosts answer, runs the command, forwards signals, restarts after
//!   failures and returns how the job ended.
//!
//! # Signals
//! `mpirun` answers SIGTERM and SIGINT by ending the job: it waits `odls_base_sigkill_timeout`
//! seconds, sends SIGTERM to the ranks, waits that time again and sends SIGKILL. It always waits in
//! full, and does the same when a rank fails. A time that is long enough for a checkpoint would
//! therefore delay both the checkpoint and the end of a failed job by minutes. So the time stays at
//! one second, and a launcher that gets SIGTERM, SIGINT, SIGHUP or SIGUSR1 sends SIGUSR1, which
//! `mpirun` forwards to all ranks at once. For a rank, SIGUSR1 means "save and stop", SIGTERM "stop now".
//! `mpirun` loses a signal that comes while it starts ranks, so SIGUSR1 is sent again every few seconds.
//! Ranks must take the second for the first.
//!
//! Nothing here knows of a tensor, a backend or another crate of DeepBurn.

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
