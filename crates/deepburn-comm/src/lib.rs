//! Collectives between the ranks of a sharded training job.
//!
//! [`ProcessGroup`] is the interface of a rank: reductions, gathers, broadcasts and barriers that
//! start immediately and are completed through a [`Pending`] handle, and messages between two
//! ranks, which are matched by sender and [`MessageTag`]. A [`Subgroup`] has some of the ranks. A
//! [`Payload`] is an array that ranks exchange. This crate defines host arrays ([`Host`]). Device
//! tensors are defined in other crates, so this crate does not depend on a tensor library.
//!
//! [`Member`] is the engine for rank threads of one process. [`run_ranks`] runs a function on every
//! rank and returns the first failure. [`Placement`] detects the rank of a process that mpirun,
//! mpiexec or srun started. [`Mesh`] arranges ranks along the axes of parallel training, whose
//! ranks form subgroups.
//!
//! If ranks start different collectives, wait for each other, end early or do not reach a
//! collective, every rank gets a [`CommError`] and no rank hangs.
//!
//! ```
//! use std::time::Duration;
//! use deepburn_comm::{CommError, Host, ProcessGroup, ReduceOp, CollectiveTag, run_ranks};
//!
//! let sums = run_ranks(3, Duration::from_secs(60), |member| {
//!     let mine = Host::from(vec![member.rank() as f32, 1.0]);
//!     let pending = member.all_reduce(CollectiveTag::new("sum", 0), vec![mine], ReduceOp::Sum)?;
//!     Ok::<_, CommError>(pending.wait()?.remove(0).into_vec())
//! })
//! .unwrap();
//! assert_eq!(sums, vec![vec![3.0, 3.0]; 3]);
//! ```

#![forbid(unsafe_code)]

#[cfg(panic = "abort")]
compile_error!(
    "deepburn-comm needs unwinding panics: a rank that fails tells the others, and tensor ops report \
     the failure of a collective, by a panic that is caught. With panic = \"abort\" every failure \
     would end the process without a message. Remove `panic = \"abort\"` from the profile in the \
     workspace's Cargo.toml (or -Cpanic=abort from RUSTFLAGS)"
);

mod call;
mod collective_tag;
mod deadlock;
mod error;
mod gather;
mod group;
mod group_id;
mod group_ranks;
mod host;
mod in_process;
mod mailbox;
mod mesh;
mod message;
mod message_tag;
mod operation;
mod panic;
mod partition;
mod payload;
mod placement;
mod rank_handle;
mod ranks;
mod side;
mod simulated;
mod statistics;

pub use call::Call;
pub use collective_tag::CollectiveTag;
pub use deadlock::{Awaited, Waiting};
pub use error::{Absence, CommError, Side};
pub use gather::gather_bytes;
pub use group::{Pending, ProcessGroup, Subgroup};
pub use group_id::GroupId;
pub use group_ranks::GroupRanks;
pub use host::{Host, HostElement};
pub use in_process::Member;
pub use mailbox::{Mailbox, ReceiveId};
pub use mesh::{Mesh, MeshAxis, MeshError};
pub use message::{MessageContents, MessageDirection, MessageRoute};
pub use message_tag::MessageTag;
pub use operation::Operation;
pub use panic::message as panic_message;
pub use partition::Partition;
pub use payload::{Encoded, Form, Payload, Received, ReduceOp, SharedPayload, Signature};
pub use placement::{Launcher, Placement, PlacementError};
pub use rank_handle::{GroupFailure, RankHandle};
pub use ranks::{FailureCause, RankFailure, run_rank, run_ranks};
pub use simulated::{GroupEvent, SimulatedGroup};
pub use statistics::{Count, MessageCount, Statistics};
