//! The ranks of a job: threads of this process, or processes that a launcher started.
//!
//! Most programs only call [`run_ranks`]. A program that first runs a preparation on a single rank
//! uses [`Ranks`], which provides the ranks of this process before they run.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

#[cfg(feature = "mpi")]
use deepburn_comm::{CollectiveTag, run_rank};
use deepburn_comm::{CommError, FailureCause, Placement, PlacementError, RankFailure};
use deepburn_config::counted;
use deepburn_kernels::{Instructions, InstructionsError};
use deepburn_learner::BoxError;
#[cfg(feature = "mpi")]
use deepburn_mpi::{MpiGroup, Process, Settings};
use deepburn_ops::OptimizerOps;
use deepburn_zero::Group;

use crate::cores::compute_on_own_thread;

/// The time that a rank waits for the others in a collective. After that, the run fails with an
/// error that names the missing ranks. The value is DeepSpeed's default, 30 minutes.
pub const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Runs `run` on `world_size` ranks and returns the results of this process's ranks, in rank order.
///
/// Without a launcher, each rank is a thread of this process. Under `mpirun` or `srun`, and with
/// the feature `mpi`, this process is one rank: `run` is called once, and one result is returned.
///
/// # Errors
/// Returns the first failure with the rank on which it occurred; the other ranks are stopped. If
/// the launcher started a different number of ranks, returns an error before `run` is called.
pub fn run_ranks<B: OptimizerOps, R: Send>(
    world_size: usize,
    run: impl Fn(Group<B>) -> Result<R, BoxError> + Sync,
) -> Result<Vec<R>, RankFailure<BoxError>> {
    let refused = |error: RanksError| RankFailure {
        rank: 0,
        host: None,
        cause: FailureCause::Error(error.into()),
    };
    let ranks = Ranks::connect().map_err(refused)?;
    ranks.check(world_size).map_err(refused)?;
    ranks.run(world_size, COLLECTIVE_TIMEOUT, run)
}

/// The reason why ranks cannot run.
#[derive(thiserror::Error)]
pub enum RanksError {
    /// The environment variables of the launcher are contradictory.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// A launcher started several processes, but the program was built without MPI.
    #[error(
        "{launcher} started {world_size} processes, but this program was built without MPI and would \
         run the job {world_size} times; build it with the feature `mpi`, or start it without a \
         launcher, which runs all ranks as threads of one process"
    )]
    WithoutMpi {
        /// The launcher that started this process.
        launcher: deepburn_comm::Launcher,
        /// The number of processes that it started.
        world_size: usize,
    },
    /// The launcher and MPI report different ranks or numbers of ranks.
    #[error(
        "{} started this process as rank {} of {}, but MPI reports rank {rank} of {world_size}; start the \
         program with the launcher of the MPI library that it was built with (with srun: \
         `--mpi=pmix`)",
        placement.launcher, placement.rank, placement.world_size
    )]
    OtherMpi {
        /// The rank as the launcher reports it.
        placement: Placement,
        /// The rank according to MPI.
        rank: usize,
        /// Number of ranks according to MPI.
        world_size: usize,
    },
    /// The program needs a different number of ranks than the launcher started.
    #[error(
        "the program needs {}, but {launcher} started {started}; start {} or configure {}",
        counted(*asked, "rank"),
        counted(*asked, "process"),
        counted(*started, "rank")
    )]
    OtherNumber {
        /// The number of ranks that the program needs.
        asked: usize,
        /// The launcher that started this process.
        launcher: deepburn_comm::Launcher,
        /// The number of processes that it started.
        started: usize,
    },
    /// The environment variable `DEEPBURN_INSTRUCTIONS` cannot be honored.
    #[error(transparent)]
    Instructions(#[from] InstructionsError),
    /// The processes could not connect.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Prints the message, because a program whose `main` returns the error prints this form.
impl fmt::Debug for RanksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The ranks that this process runs: all ranks of a job, or one of them.
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
    /// Returns ranks that are all threads of this process, with or without a launcher.
    pub fn threads() -> Self {
        Self { execution: Execution::Threads }
    }

    /// Detects a launcher and connects to the other processes that it started.
    ///
    /// Without a launcher all ranks are threads of this process.
    ///
    /// # Errors
    /// Returns an error if the launcher's variables are contradictory, if `DEEPBURN_INSTRUCTIONS`
    /// cannot be honored, if the program was built without MPI but several processes were started,
    /// or if another process does not connect.
    pub fn connect() -> Result<Self, RanksError> {
        Instructions::check()?;
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
            // A single process, as `srun -n 1` starts it, runs its ranks as threads.
            1 => Ok(Self { execution: Execution::Threads }),
            _ => Err(RanksError::WithoutMpi { launcher, world_size }),
        }
    }

    /// Returns the placement that the launcher gave this process; `None` if all ranks are threads
    /// of it.
    pub fn placement(&self) -> Option<&Placement> {
        match &self.execution {
            Execution::Threads => None,
            #[cfg(feature = "mpi")]
            Execution::Process { placement, .. } => Some(placement),
        }
    }

    /// Returns true if rank 0 runs in this process.
    pub fn has_first(&self) -> bool {
        self.placement().is_none_or(|placement| placement.rank == 0)
    }

    /// Returns the host name of a rank; `None` if all ranks are threads of this process.
    pub fn host(&self, rank: usize) -> Option<Arc<str>> {
        match &self.execution {
            Execution::Threads => {
                let _ = rank; // Only rank processes have hosts.
                None
            }
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => process.hosts().get(rank).cloned(),
        }
    }

    /// Checks that `asked` ranks can run.
    ///
    /// # Errors
    /// Returns an error if a launcher started a different number of ranks.
    pub fn check(&self, asked: usize) -> Result<(), RanksError> {
        match self.placement() {
            Some(&Placement { launcher, world_size: started, .. }) if asked != started => {
                Err(RanksError::OtherNumber { asked, launcher, started })
            }
            _ => Ok(()),
        }
    }

    /// Runs `run` on every rank of this process, as [`run_ranks`] does.
    ///
    /// `world_size` is the number of rank threads. With rank processes it must be the number that
    /// the launcher started. A rank waits at most `timeout` for the others in a collective.
    ///
    /// # Errors
    /// Returns the first failure. Rank processes all return the same failure; only the process
    /// whose rank it names should report it.
    pub fn run<B: OptimizerOps, R: Send>(
        &self,
        world_size: usize,
        timeout: Duration,
        run: impl Fn(Group<B>) -> Result<R, BoxError> + Sync,
    ) -> Result<Vec<R>, RankFailure<BoxError>> {
        match &self.execution {
            Execution::Threads => deepburn_comm::run_ranks(world_size, timeout, |member| {
                compute_on_own_thread(world_size);
                // Ranks of a process read each other's tensors, so they use one queue of a shared
                // device.
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

    /// Gathers the bytes of every process, in rank order, outside of a run.
    ///
    /// With rank threads there is one process, and the result has one element. `purpose` names the
    /// exchange in error messages.
    ///
    /// # Errors
    /// Returns an error if a process fails or hangs. A process that is still working never times
    /// out, because it may download gigabytes before this call.
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
                // Bytes are in host memory, so the communication thread needs no device queue.
                let group: MpiGroup = process.group(settings, |work| work());
                let tag = CollectiveTag::new(purpose, 0);
                self.named(run_rank(&group, || deepburn_comm::gather_bytes(&group, tag, bytes)))
            }
        }
    }

    /// Sets the counter of the steps that this process begins. If a process has to be stopped
    /// because its rank does not notice a failure, the message names the step.
    pub fn count_steps(&self, steps: Arc<AtomicU64>) {
        match &self.execution {
            Execution::Threads => drop(steps),
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => process.count_steps(steps),
        }
    }

    /// Sets the flag that signals termination by the launcher (SIGTERM). A rank that waits for
    /// others then names them before the process is killed.
    pub fn watch_termination(&self, terminated: Arc<AtomicBool>) {
        match &self.execution {
            Execution::Threads => drop(terminated),
            #[cfg(feature = "mpi")]
            Execution::Process { process, .. } => process.watch_termination(terminated),
        }
    }

    /// Adds the host of the failed rank to a failure.
    #[cfg(feature = "mpi")]
    fn named<R, E>(&self, ended: Result<R, RankFailure<E>>) -> Result<R, RankFailure<E>> {
        ended.map_err(|failure| RankFailure { host: self.host(failure.rank), ..failure })
    }
}

/// Runs work of the communication thread in the rank's device queue.
#[cfg(feature = "mpi")]
fn in_shared_stream<B: OptimizerOps>(work: &mut dyn FnMut()) {
    B::in_shared_stream(work);
}
