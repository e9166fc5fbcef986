//! The ranks of a job: threads of this process, or processes that a launcher started.
//!
//! [`run_ranks`] is what most programs call. [`Ranks`] says beforehand how many ranks there are and
//! which of them this process runs, for programs that prepare something on one rank alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use deepburn_comm::{CommError, FailureCause, Placement, PlacementError, RankFailure};
#[cfg(feature = "mpi")]
use deepburn_comm::{Tag, run_rank};
use deepburn_learner::OutsideError;
#[cfg(feature = "mpi")]
use deepburn_mpi::{MpiGroup, Process, Settings};
use deepburn_ops::StreamOps;
use deepburn_zero::Group;

use crate::cores::compute_on_own_thread;

/// How long a rank waits for the others in a collective before the run ends with an error that
/// names the ranks that did not come: DeepSpeed's 30 minutes.
pub const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Runs `run` on `world_size` ranks and returns what the ranks of this process return, in rank order.
///
/// Without a launcher every rank is a thread of this process. Under `mpirun` or `srun`, and with the
/// feature `mpi`, this process is one rank: `run` is called once, and one result is returned.
///
/// # Errors
/// The first failure, with the rank it happened on; the other ranks are ended by it. Before anything
/// runs: a launcher that started another number of ranks.
pub fn run_ranks<B: StreamOps, R: Send>(
    world_size: usize,
    run: impl Fn(Group<B>) -> Result<R, OutsideError> + Sync,
) -> Result<Vec<R>, RankFailure<OutsideError>> {
    let refused = |error: RanksError| RankFailure {
        rank: 0,
        host: None,
        cause: FailureCause::Error(error.into()),
    };
    let ranks = Ranks::connect().map_err(refused)?;
    ranks.check(world_size).map_err(refused)?;
    ranks.run(world_size, COLLECTIVE_TIMEOUT, run)
}

/// Why ranks cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RanksError {
    /// The variables of launchers make no sense.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The program was built without MPI.
    #[error(
        "{launcher} started {world_size} processes, but this program was built without MPI and would \
         run the job {world_size} times; build it with `--features mpi`, or set \
         DEEPBURN_LAUNCHER=none to run it so"
    )]
    WithoutMpi {
        /// What started this process.
        launcher: deepburn_comm::Launcher,
        /// Processes that it started.
        world_size: usize,
    },
    /// The launcher and MPI disagree.
    #[error(
        "{} says that this is rank {} of {}, but MPI says rank {rank} of {world_size}; start the \
         program with the launcher of the MPI library that it was built with (with srun: \
         `--mpi=pmix`)",
        placement.launcher, placement.rank, placement.world_size
    )]
    OtherMpi {
        /// What the launcher says.
        placement: Placement,
        /// The rank according to MPI.
        rank: usize,
        /// Number of ranks according to MPI.
        world_size: usize,
    },
    /// Another number of ranks was asked for than was started.
    #[error(
        "{asked} ranks are asked for, but {launcher} started {started}; start {asked} processes, or \
         ask for {started} ranks"
    )]
    OtherNumber {
        /// Ranks that were asked for.
        asked: usize,
        /// What started this process.
        launcher: deepburn_comm::Launcher,
        /// Processes that it started.
        started: usize,
    },
    /// The processes could not connect.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// The ranks that this process runs: all of a job, or one.
#[derive(Debug, Clone)]
pub struct Ranks {
    execution: Execution,
}

#[derive(Debug, Clone)]
enum Execution {
    /// All ranks are threads of this process.
    Threads,
    /// This process is one rank.
    #[cfg(feature = "mpi")]
    Process { placement: Placement, process: Process },
}

impl Ranks {
    /// All ranks as threads of this process, launcher or not.
    pub fn threads() -> Self {
        Self { execution: Execution::Threads }
    }

    /// Looks for a launcher and connects to the other processes that it started.
    ///
    /// # Errors
    /// Contradictory variables of launchers, a program without MPI, processes that do not come.
    pub fn connect() -> Result<Self, RanksError> {
        match Placement::detect()? {
            None => Ok(Self { execution: Execution::Threads }),
            Some(placement) => Self::of(placement),
        }
    }

    #[cfg(feature = "mpi")]
    fn of(placement: Placement) -> Result<Self, RanksError> {
        let process = Process::connect()?;
        let (rank, world_size) = (process.rank(), process.world_size());
        if (rank, world_size) != (placement.rank, placement.world_size) {
            return Err(RanksError::OtherMpi { placement, rank, world_size });
        }
        Ok(Self { execution: Execution::Process { placement, process } })
    }

    #[cfg(not(feature = "mpi"))]
    fn of(placement: Placement) -> Result<Self, RanksError> {
        let Placement { launcher, world_size, .. } = placement;
        match world_size {
            // A process by itself, as `srun -n 1` starts it, runs its ranks as threads.
            1 => Ok(Self { execution: Execution::Threads }),
            _ => Err(RanksError::WithoutMpi { launcher, world_size }),
        }
    }

    /// Where a launcher put this process; `None` where all ranks are threads of it.
    pub fn placement(&self) -> Option<&Placement> {
        match &self.execution {
            Execution::Threads => None,
            #[cfg(feature = "mpi")]
            Execution::Process { placement, .. } => Some(placement),
        }
    }

    /// Whether rank 0 is in this process.
    pub fn has_first(&self) -> bool {
        self.placement().is_none_or(|placement| placement.rank == 0)
    }

    /// The host of a rank; `None` where all ranks are threads of this process.
    pub fn host(&self, rank: usize) -> Option<Arc<str>> {
        match &self.execution {
            Execution::Threads => {
                let _ = rank; // Of use only where ranks are processes.
                None
            }
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => process.hosts().get(rank).cloned(),
        }
    }

    /// Checks that `asked` ranks can run.
    ///
    /// # Errors
    /// When a launcher started another number.
    pub fn check(&self, asked: usize) -> Result<(), RanksError> {
        match self.placement() {
            Some(&Placement { launcher, world_size: started, .. }) if asked != started => {
                Err(RanksError::OtherNumber { asked, launcher, started })
            }
            _ => Ok(()),
        }
    }

    /// Runs `run` on every rank of this process, as [`run_ranks`] does. `world_size` is the number of
    /// threads; processes are as many as were started. A rank waits for others no longer than
    /// `timeout`.
    ///
    /// # Errors
    /// The first failure. Where ranks are processes all of them return it, and the one whose rank it
    /// names is to show it.
    pub fn run<B: StreamOps, R: Send>(
        &self,
        world_size: usize,
        timeout: Duration,
        run: impl Fn(Group<B>) -> Result<R, OutsideError> + Sync,
    ) -> Result<Vec<R>, RankFailure<OutsideError>> {
        match &self.execution {
            Execution::Threads => deepburn_comm::run_ranks(world_size, timeout, |member| {
                compute_on_own_thread(world_size);
                B::in_shared_stream(|| run(Group::new(member)))
            }),
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => {
                let settings = Settings { timeout, ..Settings::default() };
                let group = process.group(settings, in_shared_stream::<B>);
                let body = || B::in_shared_stream(|| run(Group::new(group.clone())));
                self.named(run_rank(&group, body)).map(|result| vec![result])
            }
        }
    }

    /// Gathers the bytes of every process, in rank order, outside of a run. Where all ranks are threads,
    /// there is one process.
    ///
    /// # Errors
    /// When a process fails or hangs. There is no time-out for a process that works: it may download
    /// gigabytes before it calls this.
    pub fn gather_bytes(
        &self,
        purpose: &'static str,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, RankFailure<CommError>> {
        match &self.execution {
            Execution::Threads => {
                let _ = purpose;
                Ok(vec![bytes.to_vec()])
            }
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => {
                let settings = Settings { timeout: Duration::MAX, ..Settings::default() };
                let group: MpiGroup = process.group(settings, |work| work());
                let tag = Tag::new(purpose, 0);
                self.named(run_rank(&group, || deepburn_comm::gather_bytes(&group, tag, bytes)))
            }
        }
    }

    /// Names the counter of steps that this process begins. Where a process has to be ended because its
    /// rank does not notice a failure, the message names the step.
    pub fn count_steps(&self, steps: Arc<AtomicU64>) {
        match &self.execution {
            Execution::Threads => drop(steps),
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => process.count_steps(steps),
        }
    }

    /// Names the flag that is set once the launcher ends this process (SIGTERM). A rank that waits for
    /// others then says for which, before the process is killed.
    pub fn watch_termination(&self, terminated: Arc<AtomicBool>) {
        match &self.execution {
            Execution::Threads => drop(terminated),
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => process.watch_termination(terminated),
        }
    }

    /// The failure with the host of its rank.
    #[cfg(feature = "mpi")]
    fn named<R, E>(&self, ended: Result<R, RankFailure<E>>) -> Result<R, RankFailure<E>> {
        ended.map_err(|failure| RankFailure { host: self.host(failure.rank), ..failure })
    }
}

/// Runs work of the communication thread in the queue of the rank.
#[cfg(feature = "mpi")]
fn in_shared_stream<B: StreamOps>(work: &mut dyn FnMut()) {
    B::in_shared_stream(work);
}
