//! The connection of this process to its MPI job, and the communication thread.
//!
//! MPI can be initialized only once per process. It is finalized when the process exits and all
//! ranks have signed off, even if there are several runs in between. A process that exits during a
//! run notifies the others. [`Process::connect`] therefore always returns the same [`Process`].
//!
//! ```text
//! rank's thread                         communication thread "communication"
//!   Process::connect  ----------------->  MPI_Init, greetings
//!   group.all_gather  -- QueuedWork::Run ---->  meets the other ranks, exchanges bytes
//!   computes                              ...
//!   pending.wait      <-- result -------
//!   exit              -- QueuedWork::Finalize ->  goodbyes, MPI_Finalize
//!             RunStatus: failure, current wait, step
//! ```
//!
//! The two threads share a work queue and the [`RunStatus`]. A failure can end the process in four
//! ways: the rank detects it at its next op, the exit handler reports it, a hanging rank is ended
//! after a short time, or the launcher ends the process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use deepburn_comm::CommError;

use crate::backoff::Backoff;
use crate::control::Hello;
use crate::letters::Letters;
use crate::library::{Mpi, MpiError};
use crate::link::Link;
use crate::neighbors::{host_name, namespace};
use crate::settings::Settings;
use crate::status::{FAILED, RunStatus};

/// The interval at which the idle communication thread checks for messages.
const IDLE_INTERVAL: Duration = Duration::from_millis(10);

/// This process as a rank of an MPI job.
#[derive(Debug, Clone)]
pub struct Process {
    /// Clones share the connection.
    connection: Arc<Connection>,
}

/// The connection of this process to the job. There is one per process.
#[derive(Debug)]
struct Connection {
    /// The rank of this process.
    rank: usize,
    /// The host of each rank.
    hosts: Vec<Arc<str>>,
    /// The state of the run, shared with the communication thread.
    status: Arc<RunStatus>,
    /// The messages of the rank, shared with the communication thread.
    letters: Arc<Letters>,
    /// The queue of the communication thread.
    work: Sender<QueuedWork>,
    /// The number of runs so far.
    runs: AtomicU32,
}

/// QueuedWork for the communication thread.
pub(crate) enum QueuedWork {
    /// Nothing: the thread looks for messages.
    Wake,
    /// The next operation in the common order.
    Run(Box<dyn FnOnce(&mut Link) + Send>),
    /// Finalizes MPI and sends the result.
    Finalize(SyncSender<Result<(), CommError>>),
}

impl Process {
    /// Connects to the other ranks on the first call. Later calls return the same process.
    ///
    /// # Errors
    /// Returns an error if MPI cannot be initialized or a rank does not connect.
    pub fn connect() -> Result<Self, CommError> {
        static PROCESS: OnceLock<Result<Process, CommError>> = OnceLock::new();
        PROCESS.get_or_init(Self::start).clone()
    }

    /// Starts the communication thread, waits for the greetings of all ranks and registers the exit
    /// handler.
    ///
    /// # Errors
    /// Returns an error if the thread or MPI cannot be started, or a rank does not connect.
    fn start() -> Result<Self, CommError> {
        let status = Arc::new(RunStatus::default());
        let (work, requests) = mpsc::channel();
        // The thread sends the result of the greeting once. The channel has a capacity of one, so
        // the thread does not block on sending.
        let (greeted, greeting) = mpsc::sync_channel(1);
        let letters = Arc::new(Letters::default());
        let (own, own_letters) = (status.clone(), letters.clone());
        let thread = thread::Builder::new().name("communication".into());
        let spawned = thread.spawn(move || match greet(&own, own_letters) {
            Ok(link) => {
                // The receiver may have been dropped because the process exits.
                let _ = greeted.send(Ok((link.rank(), link.hosts())));
                communicate(link, &requests, &own);
            }
            Err(error) => {
                let _ = greeted.send(Err(error));
            }
        });
        let broken = |reason: String| CommError::Transport { rank: 0, reason };
        spawned.map_err(|error| broken(format!("no communication thread: {error}")))?;
        let (rank, hosts) = greeting
            .recv()
            .unwrap_or_else(|_| Err(broken("the communication thread has panicked".into())))?;
        // SAFETY: the function is `extern "C"`, takes nothing and does not unwind.
        if unsafe { libc::atexit(end_of_process) } != 0 {
            return Err(broken("the end of the process cannot be watched (atexit)".into()));
        }
        let runs = AtomicU32::new(0);
        let connection = Connection { rank, hosts, status, letters, work, runs };
        Ok(Self { connection: Arc::new(connection) })
    }

    /// Returns the rank, from 0.
    pub fn rank(&self) -> usize {
        self.connection.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.connection.hosts.len()
    }

    /// Returns the host of each rank.
    pub fn hosts(&self) -> &[Arc<str>] {
        &self.connection.hosts
    }

    /// Starts a run with all ranks on the communication thread.
    pub(crate) fn begin_run(&self, settings: Settings) {
        let run = self.connection.runs.fetch_add(1, Ordering::Relaxed) + 1;
        self.connection.status.set_running(true);
        self.connection.letters.begin(run);
        // MPI counts bytes in a C `int`, so messages must be smaller than 2 GiB.
        let settings = Settings { piece: settings.piece.clamp(1, 1 << 30), ..settings };
        self.submit(QueuedWork::Run(Box::new(move |link| link.begin(run, settings))));
    }

    /// Sets the step counter of this rank. It is used to name the step in failures that the rank
    /// does not detect itself.
    pub fn count_steps(&self, steps: Arc<AtomicU64>) {
        self.connection.status.set_steps(steps);
    }

    /// Sets the flag that signals termination by the launcher (SIGTERM). A rank that waits for
    /// others then fails with [`CommError::Terminated`] before the launcher sends SIGKILL.
    pub fn watch_termination(&self, terminated: Arc<AtomicBool>) {
        self.connection.status.set_terminated(terminated);
    }

    /// Returns the state of the run.
    pub(crate) fn status(&self) -> &RunStatus {
        &self.connection.status
    }

    /// Returns the messages of the rank.
    pub(crate) fn letters(&self) -> &Letters {
        &self.connection.letters
    }

    /// Queues work for the communication thread. If the thread ends first, the work is dropped,
    /// which closes the result channel.
    pub(crate) fn submit(&self, work: QueuedWork) {
        if self.connection.work.send(work).is_err() {
            let reason = "the communication thread has ended".to_owned();
            let rank = self.connection.rank;
            self.connection.status.fail(rank, CommError::Transport { rank, reason });
        }
    }
}

/// Initializes MPI on the calling thread and exchanges greetings with all ranks.
///
/// # Errors
/// Returns an error if MPI cannot be initialized or a rank does not connect.
fn greet(status: &Arc<RunStatus>, letters: Arc<Letters>) -> Result<Link, CommError> {
    let broken = |error: MpiError| CommError::Transport { rank: 0, reason: error.to_string() };
    let mpi = Mpi::init().map_err(broken)?;
    let order = if cfg!(target_endian = "big") { "big" } else { "little" };
    let hello = Hello {
        build: format!("deepburn {} ({order}-endian)", env!("CARGO_PKG_VERSION")),
        host: host_name(),
        namespace: namespace(),
        pid: std::process::id() as i32,
    };
    Link::connect(mpi, hello, status.clone(), letters)
}

/// Runs the main loop of the communication thread until the process exits. While there is no work,
/// it handles messages every [`IDLE_INTERVAL`], so that pings are answered and failures are
/// detected while the rank computes. While messages between ranks are under way, it looks more
/// often.
fn communicate(mut link: Link, requests: &Receiver<QueuedWork>, status: &RunStatus) {
    let mut backoff = Backoff::default();
    loop {
        if link.take_progress() {
            backoff = Backoff::default();
        }
        match next_work(&link, requests, &mut backoff) {
            Ok(QueuedWork::Wake) => backoff = Backoff::default(),
            Ok(QueuedWork::Run(work)) => {
                let run = catch_unwind(AssertUnwindSafe(|| work(&mut link)));
                if let Err(payload) = run {
                    let cause = format!(
                        "panic on the communication thread: {}",
                        deepburn_comm::panic_message(&*payload)
                    );
                    let rank = link.rank();
                    status.fail(rank, CommError::PeerFailed { rank, cause });
                }
            }
            Ok(QueuedWork::Finalize(answer)) => {
                let _ = answer.send(link.finalize());
                return;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // A failure is stored in the status, from which the rank reads it.
        let _ = link.listen().and_then(|()| link.ping(&[]));
        if link.has_announced() {
            status.set_announced();
        }
        status.end_overdue(link.rank(), || link.hosts());
    }
}

/// Returns the next work, or an error if there is none after a pause.
fn next_work(
    link: &Link,
    requests: &Receiver<QueuedWork>,
    backoff: &mut Backoff,
) -> Result<QueuedWork, RecvTimeoutError> {
    if !link.is_busy() {
        return requests.recv_timeout(IDLE_INTERVAL);
    }
    requests.try_recv().map_err(|error| match error {
        TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
        TryRecvError::Empty => {
            backoff.pause();
            RecvTimeoutError::Timeout
        }
    })
}

/// The exit handler, which runs on `exit` or a return from `main`. It finalizes MPI if the last run
/// succeeded. Otherwise it announces the failure and does not finalize MPI, because `MPI_Finalize`
/// would wait for all ranks.
extern "C" fn end_of_process() {
    let ended = catch_unwind(|| {
        let Ok(process) = Process::connect() else { return };
        let status = process.status();
        let rank = process.rank();
        if status.is_running() && status.cause().is_none() {
            let host = process.hosts()[rank].to_string();
            let call = status.last_call().map(Box::new);
            let cause = CommError::Exited { rank, host: host.clone(), call };
            eprintln!("error: rank {rank} on {host} failed: {}{cause}", status.step());
            status.fail(rank, cause);
        }
        if status.cause().is_some() {
            status.wait_announced();
            return;
        }
        let (answer, answered) = mpsc::sync_channel(1);
        process.submit(QueuedWork::Finalize(answer));
        if let Ok(Err(error)) = answered.recv() {
            // Only the rank that detected the failure reports it.
            if status.is_reporter(rank) {
                eprintln!("error: rank {rank} on {} failed: {error}", process.hosts()[rank]);
            }
            // SAFETY: ends the process, whose exit handlers are running already.
            unsafe { libc::_exit(FAILED) }
        }
    });
    drop(ended);
}
