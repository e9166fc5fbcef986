//! This process as one rank of an MPI job, and its communication thread.
//!
//! MPI belongs to the process: it is initialised once and ended when the process ends, however often
//! ranks are run in between. So [`Process`] is kept for the process, behind [`Process::connect`].

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

/// How often the communication thread listens while it has nothing to do.
const IDLE_INTERVAL: Duration = Duration::from_millis(10);
/// How long a rank may compute on after its run has failed, before its process is ended. It notices
/// a failure at its next op; a rank that hangs would otherwise stay forever.
const LAST_OP: Duration = Duration::from_millis(1200);
/// How long a process that fails waits until the other ranks know.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_millis(500);
/// Exit status of a process whose run has failed.
const FAILED: i32 = 1;

/// How a group exchanges data.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// How long a rank waits for others before the run ends; `Duration::MAX` waits forever.
    pub timeout: Duration,
    /// Most bytes of one message, at most 1 GiB.
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
    connection: Arc<Connection>,
}

#[derive(Debug)]
struct Connection {
    rank: usize,
    hosts: Vec<Arc<str>>,
    status: Arc<RunStatus>,
    work: Sender<Work>,
    /// Runs begun so far.
    runs: AtomicU32,
}

/// What the communication thread is asked to do.
pub(crate) enum Work {
    /// A step of the common order.
    Run(Box<dyn FnOnce(&mut Link) + Send>),
    /// End MPI, and answer when that is done.
    Finalize(SyncSender<Result<(), CommError>>),
}

impl Process {
    /// Connects to the other ranks, on the first call; every call returns the same.
    ///
    /// # Errors
    /// When MPI cannot be initialised, or a rank does not come.
    pub fn connect() -> Result<Self, CommError> {
        static PROCESS: OnceLock<Result<Process, CommError>> = OnceLock::new();
        PROCESS.get_or_init(Self::start).clone()
    }

    fn start() -> Result<Self, CommError> {
        let status = Arc::new(RunStatus::default());
        let (work, requests) = mpsc::channel();
        let (greeted, greeting) = mpsc::sync_channel(1);
        let own = status.clone();
        let thread = thread::Builder::new().name("communication".into());
        let spawned = thread.spawn(move || match greet(&own) {
            Ok(link) => {
                // Nobody waits for the answer of a process that has gone.
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

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.connection.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.connection.hosts.len()
    }

    /// The host of each rank.
    pub fn hosts(&self) -> &[Arc<str>] {
        &self.connection.hosts
    }

    /// Begins a run with all ranks, each of which calls this as often. The group of an earlier run is
    /// not used any more. Once a run has failed, every later one fails with the same error: messages of the
    /// failed one may still be on their way, and would be mistaken for messages of the next run.
    ///
    /// Work with arrays that the communication thread does is run by `on_device`.
    pub fn group(&self, settings: Settings, on_device: OnDevice) -> MpiGroup {
        let run = self.connection.runs.fetch_add(1, Ordering::Relaxed) + 1;
        self.connection.status.begin();
        let settings = Settings { piece: settings.piece.clamp(1, 1 << 30), ..settings };
        self.submit(Work::Run(Box::new(move |link| link.begin(run, settings))));
        MpiGroup::new(self.clone(), on_device)
    }

    /// Names the counter of steps that this rank begins, for a failure that the rank does not notice.
    pub fn count_steps(&self, steps: Arc<AtomicU64>) {
        self.connection.status.lock().steps = Some(steps);
    }

    /// Names the flag that is set once the launcher ends this process (SIGTERM). A rank that waits for
    /// others then fails with [`CommError::Terminated`], in the moment that is left before SIGKILL.
    pub fn watch_termination(&self, terminated: Arc<AtomicBool>) {
        self.connection.status.lock().terminated = Some(terminated);
    }

    pub(crate) fn status(&self) -> &RunStatus {
        &self.connection.status
    }

    /// Hands work to the communication thread. Work that it does not come to is dropped.
    pub(crate) fn submit(&self, work: Work) {
        if self.connection.work.send(work).is_err() {
            let reason = "the communication thread has ended".to_owned();
            let rank = self.connection.rank;
            self.connection.status.fail(rank, CommError::Transport { rank, reason });
        }
    }
}

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

/// What the communication thread does until the process ends.
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
        // A failure is in the status, from where the rank takes it.
        let _ = link.listen();
        if link.has_announced() {
            status.set_announced();
        }
        status.end_overdue(&link);
    }
}

/// The end of the process, by `exit` or a return from `main`: ends MPI where the last run has ended
/// well. Otherwise it announces the failure and does not finalize MPI, which would wait for all ranks.
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
            // The rank that has found a failure reports it.
            if status.is_reporter(rank) {
                eprintln!("error: rank {rank} on {} failed: {error}", process.hosts()[rank]);
            }
            // SAFETY: ends the process, whose exit handlers are running already.
            unsafe { libc::_exit(FAILED) }
        }
    });
    drop(ended);
}

/// What both threads of a process know of its run.
#[derive(Debug, Default)]
pub(crate) struct RunStatus {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    failure: Option<Failure>,
    /// Whether the others know of the failure.
    announced: bool,
    /// Whether the rank's own code is running.
    running: bool,
    /// The step that the rank has begun last, from 1.
    steps: Option<Arc<AtomicU64>>,
    /// Set once the launcher ends this process.
    terminated: Option<Arc<AtomicBool>>,
    /// What the communication thread waits in.
    wait: Option<Wait>,
    last_call: Option<Call>,
}

impl State {
    /// The step that the rank is in, for a message.
    fn step(&self) -> String {
        let step = self.steps.as_ref().map(|steps| steps.load(Ordering::Relaxed));
        step.map(|step| format!("step {step}: ")).unwrap_or_default()
    }
}

/// What a rank waits in, and the ranks that it waits for.
#[derive(Debug, Clone)]
pub(crate) struct Wait {
    pub(crate) call: Option<Call>,
    pub(crate) absent: Vec<Absence>,
}

impl RunStatus {
    fn begin(&self) {
        self.lock().running = true;
    }

    /// The rank's own code has ended.
    pub(crate) fn end(&self) {
        self.lock().running = false;
    }

    fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Ends the run, and with it all that this process would exchange, unless it has failed before.
    pub(crate) fn fail(&self, reporter: usize, cause: CommError) {
        let failure = Failure { reporter, at: Instant::now(), cause };
        let mut state = self.lock();
        if state.failure.is_none() {
            tracing::debug!(reporter, cause = %failure.cause, "the process group has ended");
            state.failure = Some(failure);
        }
    }

    /// Notes whom the communication thread waits for.
    pub(crate) fn set_wait(&self, wait: Option<Wait>) {
        let mut state = self.lock();
        if let Some(call) = wait.as_ref().and_then(|wait| wait.call.clone()) {
            state.last_call = Some(call);
        }
        state.wait = wait;
    }

    /// The last collective that this rank has come to.
    fn last_call(&self) -> Option<Call> {
        self.lock().last_call.clone()
    }

    /// The step that the rank is in, for a message.
    fn step(&self) -> String {
        self.lock().step()
    }

    /// Ends the run of `rank`, which waits, once the launcher ends this process. Returns what ended it.
    ///
    /// The communication thread is not asked: Open MPI may hold it for seconds in a call that has met
    /// a broken connection. Ranks cannot ask each other who reports then: each that waits for all ranks
    /// before it does.
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

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// What ended the run.
    pub(crate) fn cause(&self) -> Option<CommError> {
        self.failure().map(|failure| failure.cause)
    }

    /// Whether `rank` is the one to report the failure.
    pub(crate) fn is_reporter(&self, rank: usize) -> bool {
        self.failure().is_some_and(|failure| failure.reporter == rank)
    }

    fn set_announced(&self) {
        self.lock().announced = true;
        self.changed.notify_all();
    }

    /// Waits for a moment until the others know of the failure.
    pub(crate) fn wait_announced(&self) {
        let waiting = |state: &mut State| !state.announced;
        drop(self.changed.wait_timeout_while(self.lock(), ANNOUNCE_TIMEOUT, waiting));
    }

    /// Ends the process where its rank does not notice that the run has failed.
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

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
