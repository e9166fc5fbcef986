//! This process as one rank of an MPI job, and its communication thread.
//!
//! MPI belongs to the process: it is initialised once and finalised when the
//! process exits, even if ranks are run several times in between.
//! [`Process::connect`] therefore always returns the same [`Process`].
//!
//! ```text
//! rank's thread                         communication thread "communication"
//!   Process::connect  ----------------->  MPI_Init, greetings
//!   group.all_gather  -- Work::Run ---->  meets the other ranks, exchanges bytes
//!   computes                              ...
//!   pending.wait      <-- result -------
//!   exit              -- Work::Finalize ->  goodbyes, MPI_Finalize
//!             RunStatus: failure, current wait, step
//! ```
//!
//! The two threads share a queue of work and the [`RunStatus`]. A failure may
//! end the process in four ways: the rank notices it at its next op, the exit
//! handler reports it, a rank that hangs is ended after [`LAST_OP`], or the
//! launcher ends the process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use deepburn_comm::{Absence, Call, CommError, Failure};

use crate::control::Hello;
use crate::library::Mpi;
use crate::link::Link;
use crate::neighbours::{host_name, namespace};
use crate::{MpiError, MpiGroup, OnDevice};

/// The interval at which the idle communication thread checks for messages.
const IDLE_INTERVAL: Duration = Duration::from_millis(10);
/// The time that a rank may continue to compute after its run has failed,
/// before its process is ended. A rank detects a failure at its next op;
/// without this limit a rank that hangs would stay forever.
const LAST_OP: Duration = Duration::from_millis(1200);
/// The time that a failing process waits until the other ranks know of the
/// failure.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_millis(500);
/// The exit status of a process whose run has failed.
const FAILED: i32 = 1;

/// Options of the exchange of data.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The time that a rank waits for others before the run ends;
    /// `Duration::MAX` waits forever.
    pub timeout: Duration,
    /// The largest size of a message in bytes, at most 1 GiB.
    pub piece: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(30 * 60), piece: 1 << 30 }
    }
}

/// This process as a rank of an MPI job.
#[derive(Debug, Clone)]
pub struct Process {
    /// Clones share the connection.
    connection: Arc<Connection>,
}

/// The connection of this process to the job, which exists once.
#[derive(Debug)]
struct Connection {
    /// The rank of this process.
    rank: usize,
    /// The host of each rank.
    hosts: Vec<Arc<str>>,
    /// The state of the run, shared with the communication thread.
    status: Arc<RunStatus>,
    /// The queue of the communication thread.
    work: Sender<Work>,
    /// The number of runs so far.
    runs: AtomicU32,
}

/// Work for the communication thread.
pub(crate) enum Work {
    /// The next operation in the common order.
    Run(Box<dyn FnOnce(&mut Link) + Send>),
    /// Finalizes MPI and sends the result.
    Finalize(SyncSender<Result<(), CommError>>),
}

impl Process {
    /// Connects to the other ranks on the first call; every call returns the
    /// same process.
    ///
    /// # Errors
    ///
    /// Returns an error if MPI cannot be initialised or a rank does not
    /// connect.
    pub fn connect() -> Result<Self, CommError> {
        static PROCESS: OnceLock<Result<Process, CommError>> = OnceLock::new();
        PROCESS.get_or_init(Self::start).clone()
    }

    /// Starts the communication thread, waits for the greetings of all ranks
    /// and registers the exit handler.
    ///
    /// # Errors
    ///
    /// Returns an error if the thread or MPI cannot be started, or a rank does
    /// not connect.
    fn start() -> Result<Self, CommError> {
        let status = Arc::new(RunStatus::default());
        let (work, requests) = mpsc::channel();
        // The thread reports the outcome of the greeting once; space for one
        // message keeps it from waiting for this thread.
        let (greeted, greeting) = mpsc::sync_channel(1);
        let own = status.clone();
        let thread = thread::Builder::new().name("communication".into());
        let spawned = thread.spawn(move || match greet(&own) {
            Ok(link) => {
                // The receiver may be gone if the process exits.
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
        Ok(Self {
            connection: Arc::new(Connection { rank, hosts, status, work, runs: AtomicU32::new(0) }),
        })
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

    /// Starts a run with all ranks; every rank must call this the same number
    /// of times. The group of an earlier run must no longer be used.
    ///
    /// After a failed run, every later one fails with the same error, because
    /// messages of the failed run could still arrive and be mistaken for
    /// messages of the new one. `on_device` runs the work with arrays on the
    /// communication thread.
    pub fn group(&self, settings: Settings, on_device: OnDevice) -> MpiGroup {
        let run = self.connection.runs.fetch_add(1, Ordering::Relaxed) + 1;
        self.connection.status.begin();
        // MPI counts bytes in a C `int`, so a message has to stay below 2 GiB.
        let settings = Settings { piece: settings.piece.clamp(1, 1 << 30), ..settings };
        self.submit(Work::Run(Box::new(move |link| link.begin(run, settings))));
        MpiGroup::new(self.clone(), on_device)
    }

    /// Sets the counter of this rank's steps, which names the step in a failure
    /// that the rank does not detect itself.
    pub fn count_steps(&self, steps: Arc<AtomicU64>) {
        self.connection.status.lock().steps = Some(steps);
    }

    /// Sets the flag that signals termination by the launcher (SIGTERM). A rank
    /// that waits for others then fails with [`CommError::Terminated`] in the
    /// time before SIGKILL.
    pub fn watch_termination(&self, terminated: Arc<AtomicBool>) {
        self.connection.status.lock().terminated = Some(terminated);
    }

    /// Returns the state of the run.
    pub(crate) fn status(&self) -> &RunStatus {
        &self.connection.status
    }

    /// Queues work for the communication thread. Work that it does not reach is
    /// dropped, which closes the channel of its result.
    pub(crate) fn submit(&self, work: Work) {
        if self.connection.work.send(work).is_err() {
            let reason = "the communication thread has ended".to_owned();
            let rank = self.connection.rank;
            self.connection.status.fail(rank, CommError::Transport { rank, reason });
        }
    }
}

/// Initialises MPI on the calling thread and exchanges greetings with all
/// ranks.
///
/// # Errors
///
/// Returns an error if MPI cannot be initialised or a rank does not connect.
fn greet(status: &Arc<RunStatus>) -> Result<Link, CommError> {
    let broken = |error: MpiError| CommError::Transport { rank: 0, reason: error.to_string() };
    let mpi = Mpi::init().map_err(broken)?;
    let order = if cfg!(target_endian = "big") { "big" } else { "little" };
    let hello = Hello {
        build: format!("deepburn {} ({order}-endian)", env!("CARGO_PKG_VERSION")),
        host: host_name(),
        namespace: namespace(),
        pid: std::process::id() as i32,
    };
    Link::connect(mpi, hello, status.clone())
}

/// Runs the loop of the communication thread until the process exits. Between
/// two pieces of work, it handles messages every [`IDLE_INTERVAL`], so that
/// pings are answered and failures are noticed while the rank computes.
fn communicate(mut link: Link, requests: &Receiver<Work>, status: &RunStatus) {
    loop {
        match requests.recv_timeout(IDLE_INTERVAL) {
            Ok(Work::Run(work)) => {
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
            Ok(Work::Finalize(answer)) => {
                let _ = answer.send(link.finalize());
                return;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // A failure is stored in the status, from which the rank reads it.
        let _ = link.listen();
        if link.has_announced() {
            status.set_announced();
        }
        status.end_overdue(&link);
    }
}

/// Runs at the exit of the process (`exit` or a return from `main`). Finalizes
/// MPI if the last run succeeded. Otherwise announces the failure and does not
/// finalize MPI, which would wait for all ranks.
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
        process.submit(Work::Finalize(answer));
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

/// The state of a run that both threads of a process share.
#[derive(Debug, Default)]
pub(crate) struct RunStatus {
    state: Mutex<State>,
    changed: Condvar,
}

/// The state behind the lock.
#[derive(Debug, Default)]
struct State {
    /// The first failure of the run; later ones are ignored.
    failure: Option<Failure>,
    /// Whether the other ranks know of the failure.
    announced: bool,
    /// Whether the rank's own code is running.
    running: bool,
    /// The last step that the rank has started, from 1.
    steps: Option<Arc<AtomicU64>>,
    /// Set when the launcher ends this process.
    terminated: Option<Arc<AtomicBool>>,
    /// The current wait of the communication thread.
    wait: Option<Wait>,
    /// The last collective in which the communication thread waited.
    last_call: Option<Call>,
}

impl State {
    /// Returns the rank's current step as the beginning of a message.
    fn step(&self) -> String {
        let step = self.steps.as_ref().map(|steps| steps.load(Ordering::Relaxed));
        step.map(|step| format!("step {step}: ")).unwrap_or_default()
    }
}

/// The collective in which a rank waits, and the ranks for which it waits.
#[derive(Debug, Clone)]
pub(crate) struct Wait {
    /// The collective; `None` while the ranks connect.
    pub(crate) call: Option<Call>,
    /// What is known of the missing ranks.
    pub(crate) absent: Vec<Absence>,
}

impl RunStatus {
    /// Records that the rank's own code is running.
    fn begin(&self) {
        self.lock().running = true;
    }

    /// Records that the rank's own code has ended.
    pub(crate) fn end(&self) {
        self.lock().running = false;
    }

    /// Returns true if the rank's own code is running.
    fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Ends the run, unless it has already failed. This process then exchanges
    /// nothing more.
    pub(crate) fn fail(&self, reporter: usize, cause: CommError) {
        let failure = Failure { reporter, at: Instant::now(), cause };
        let mut state = self.lock();
        if state.failure.is_none() {
            tracing::debug!(reporter, cause = %failure.cause, "the process group has ended");
            state.failure = Some(failure);
        }
    }

    /// Records the ranks for which the communication thread waits.
    pub(crate) fn set_wait(&self, wait: Option<Wait>) {
        let mut state = self.lock();
        if let Some(call) = wait.as_ref().and_then(|wait| wait.call.clone()) {
            state.last_call = Some(call);
        }
        state.wait = wait;
    }

    /// Returns the last collective that this rank has reached.
    fn last_call(&self) -> Option<Call> {
        self.lock().last_call.clone()
    }

    /// Returns the rank's current step as the beginning of a message.
    fn step(&self) -> String {
        self.lock().step()
    }

    /// Ends the run of the waiting `rank` if the launcher ends this process.
    /// Returns the failure.
    ///
    /// This is done without the communication thread, because Open MPI may hold
    /// it for seconds in a call on a broken connection. The ranks can no longer
    /// agree on which of them reports, so each one that waits for all other
    /// ranks does.
    pub(crate) fn terminate(&self, rank: usize) -> Option<CommError> {
        let wait = {
            let mut state = self.lock();
            let terminated = state.terminated.as_ref()?;
            let is_terminated = terminated.load(Ordering::Relaxed);
            let wait = state.wait.clone().filter(|it| is_terminated && !it.absent.is_empty())?;
            state.announced = true;
            wait
        };
        let is_absent = |rank: &usize| wait.absent.iter().any(|absence| absence.rank == *rank);
        let reporter = (0..rank).find(|other| !is_absent(other)).unwrap_or(rank);
        let Wait { call, absent } = wait;
        self.fail(reporter, CommError::Terminated { rank, call: call.map(Box::new), absent });
        self.cause()
    }

    /// Returns the first failure of the run with its reporter and time.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Returns the failure that ended the run.
    pub(crate) fn cause(&self) -> Option<CommError> {
        self.failure().map(|failure| failure.cause)
    }

    /// Returns true if `rank` has to report the failure.
    pub(crate) fn is_reporter(&self, rank: usize) -> bool {
        self.failure().is_some_and(|failure| failure.reporter == rank)
    }

    /// Records that the other ranks know of the failure, and wakes the thread
    /// that waits for this.
    fn set_announced(&self) {
        self.lock().announced = true;
        self.changed.notify_all();
    }

    /// Waits for a short time until the other ranks know of the failure.
    pub(crate) fn wait_announced(&self) {
        let waiting = |state: &mut State| !state.announced;
        drop(self.changed.wait_timeout_while(self.lock(), ANNOUNCE_TIMEOUT, waiting));
    }

    /// Ends the process if its rank does not detect that the run has failed.
    fn end_overdue(&self, link: &Link) {
        let state = self.lock();
        let Some(failure) = state.failure.as_ref().filter(|_| state.running) else { return };
        if failure.at.elapsed() < LAST_OP {
            return;
        }
        if failure.reporter == link.rank() {
            let (rank, host) = (link.rank(), &link.hosts()[link.rank()]);
            eprintln!("error: rank {rank} on {host} failed: {}{}", state.step(), failure.cause);
        }
        // SAFETY: ends the process without running anything else of it; its rank is stuck.
        unsafe { libc::_exit(FAILED) }
    }

    /// Locks the state. A panic of another holder leaves it valid.
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
