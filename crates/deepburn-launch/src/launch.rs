//! Runs a job with restarts: checks, starts, and the final result.

use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use thiserror::Error;

use crate::connect::connect;
use crate::events::{Events, signal_name};
use crate::job;
use crate::program::is_program;
use crate::{Attempt, ConnectError, JobEnd, Mpirun, is_this_machine};

/// The exit status for a usage error. The job is not restarted, because the error would occur
/// again.
const MISTAKE: u8 = 2;

/// A run that fails within this time counts as an immediate failure.
const QUICK: Duration = Duration::from_secs(5);

/// A job to run.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The command line.
    pub mpirun: Mpirun,
    /// The time of the job's first start. It is passed to ranks as `DEEPBURN_STARTED`, in seconds
    /// since 1970.
    pub started: SystemTime,
    /// The time within which remote hosts must respond.
    pub connect_timeout: Duration,
    /// The time that ranks have to save and stop after the launcher has received a signal.
    pub grace: Duration,
    /// The maximum number of restarts after failures. The number of restarts so far is passed to
    /// ranks as `DEEPBURN_RESTART`.
    pub max_restarts: u32,
}

/// The reason why a job could not run.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// Remote hosts do not respond.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// `mpirun` cannot be run.
    #[error(
        "mpirun: `{program}` cannot be run: {error}; ranks are started by Open MPI 4; install it (Debian: openmpi-bin) or give its path with --mpirun"
    )]
    NoMpirun {
        /// The program.
        program: String,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The `mpirun` program is not Open MPI's.
    #[error(
        "mpirun: `{program}` is not Open MPI's: {version}; ranks are started by Open MPI 4; install it (Debian: openmpi-bin) or give its path with --mpirun"
    )]
    OtherMpirun {
        /// The program.
        program: String,
        /// The version that it prints.
        version: String,
    },
    /// The command of the ranks is not an executable file.
    #[error(
        "bad program: `{program}`; it is not an executable file on this machine, which runs ranks of the job; give its path, or build it"
    )]
    NoProgram {
        /// The program.
        program: String,
    },
    /// Signals or processes cannot be watched.
    #[error("the launcher cannot watch the job: {0}; check the limits on processes and open files")]
    Watch(#[from] io::Error),
}

impl Launch {
    /// Returns the command line of the first start.
    pub fn words(&self) -> Vec<String> {
        self.mpirun.words(&self.attempt(0))
    }

    /// Returns the attempt after this number of restarts.
    fn attempt(&self, restarts: u32) -> Attempt {
        Attempt { started: self.started, restarts }
    }

    /// Runs the job with its restarts.
    ///
    /// Call this function at most once per process, and only in a process without other children.
    /// It catches SIGTERM, SIGINT, SIGHUP and SIGUSR1, and kills all child processes at the end.
    ///
    /// # Errors
    /// Returns an error if a host does not respond, if `mpirun` is missing or not Open MPI's, if
    /// the program of the ranks is not executable, or if signals or processes cannot be watched.
    pub fn run(&self) -> Result<JobEnd, LaunchError> {
        self.check_mpirun()?;
        self.check_program()?;
        let events = Events::listen()?;
        let (mut restarts, mut quick) = (0, 0);
        loop {
            let began = Instant::now();
            let end = self.run_once(restarts, &events);
            // Only consecutive immediate failures are counted. A job that ran for a while is
            // restarted immediately.
            quick = if began.elapsed() < QUICK { quick + 1 } else { 0 };
            let reason = match &end {
                Ok(end) if worth_a_restart(*end) => self.reason(*end),
                // The host may be rebooting, so this failure is retried. If a host does not respond
                // before the first start, the user has most likely made a mistake.
                Err(LaunchError::Connect(error)) if restarts > 0 => error.to_string(),
                _ => return self.summarized(end, restarts),
            };
            if restarts == self.max_restarts {
                return self.summarized(end, restarts);
            }
            restarts += 1;
            let limit = self.max_restarts;
            tracing::warn!("{reason}; restart {restarts} of {limit}");
            if let Some(signal) = events.pause(backoff(quick)) {
                return self.summarized(Ok(interrupted(signal)), restarts);
            }
        }
    }

    /// Checks the remote hosts and runs the job once. If a signal has already arrived, nothing is
    /// started.
    ///
    /// # Errors
    /// Returns an error if a host does not respond or `mpirun` cannot be run.
    fn run_once(&self, restarts: u32, events: &Events) -> Result<JobEnd, LaunchError> {
        if let Some(signal) = events.pending_signal() {
            return Ok(interrupted(signal));
        }
        let hosts: Vec<&str> = self.mpirun.remote_hosts().map(|host| host.name.as_str()).collect();
        let (shell, timeout) = (&self.mpirun.remote_shell, self.connect_timeout);
        if let Some(signal) = connect(&hosts, shell, timeout, events)? {
            return Ok(interrupted(signal));
        }
        let words = self.mpirun.words(&self.attempt(restarts));
        Ok(job::run(&words, self.grace, events)?)
    }

    /// Returns an error if the ranks of this machine would not find the program.
    fn check_program(&self) -> Result<(), LaunchError> {
        let runs_here = self.mpirun.hosts.iter().any(|host| is_this_machine(&host.name));
        let path = std::env::var_os("PATH");
        match self.mpirun.command.first() {
            Some(program) if runs_here && !is_program(program, path.as_deref()) => {
                Err(LaunchError::NoProgram { program: program.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Returns an error if `mpirun` is not Open MPI's, because its options would differ.
    fn check_mpirun(&self) -> Result<(), LaunchError> {
        let program = self.mpirun.program.clone();
        let asked = Command::new(&program).arg("--version").stdin(Stdio::null()).output();
        let output = match asked {
            Ok(output) => output,
            Err(error) => return Err(LaunchError::NoMpirun { program, error }),
        };
        let text = String::from_utf8_lossy(&output.stdout);
        if text.contains("Open MPI") {
            return Ok(());
        }
        let version = text.lines().next().unwrap_or("it does not tell its version").to_owned();
        Err(LaunchError::OtherMpirun { program, version })
    }

    /// Describes the end of the job, for example `rank 1 on worker-2 failed with status 7`.
    pub fn reason(&self, end: JobEnd) -> String {
        let (status, rank) = match end {
            JobEnd::Success => return "all ranks succeeded".to_owned(),
            JobEnd::Interrupted { signal } => {
                return format!("{} ended the job", signal_name(signal.into()));
            }
            JobEnd::Failed { status, rank } => (status, rank),
        };
        let cause = match status {
            // mpirun uses statuses above the range for signals for its own errors.
            129..=192 => format!("ended by signal {}", status - 128),
            _ => format!("failed with status {status}"),
        };
        match rank.map(|rank| (rank, self.mpirun.host_of(rank))) {
            Some((rank, Some(host))) => format!("rank {rank} on {host} {cause}"),
            Some((rank, None)) => format!("rank {rank} {cause}"),
            None => format!("the job {cause}"),
        }
    }

    /// Logs the number of restarts, if the job may restart, and returns the result.
    fn summarized(
        &self,
        end: Result<JobEnd, LaunchError>,
        restarts: u32,
    ) -> Result<JobEnd, LaunchError> {
        if self.max_restarts > 0 {
            // The elapsed time is unknown if the system clock has been set back.
            let seconds = self.started.elapsed().unwrap_or_default().as_secs_f64();
            let plural = if restarts == 1 { "" } else { "s" };
            tracing::info!("{restarts} restart{plural}; {seconds:.1} s since the launch");
        }
        end
    }
}

/// Returns the end of a job that received a signal between two runs.
fn interrupted(signal: i32) -> JobEnd {
    tracing::info!("{}: no rank was running", signal_name(signal));
    // All caught signals have numbers below 16.
    JobEnd::Interrupted { signal: signal as u8 }
}

/// Returns the pause before a restart after `quick` consecutive immediate failures. There is no
/// pause after the first two failures; later pauses are 1, 2, 4 and so on up to 60 s. The pause
/// gives a temporary problem, such as a rebooting host, time to disappear.
fn backoff(quick: u32) -> Duration {
    match quick {
        0..=2 => Duration::ZERO,
        _ => Duration::from_secs((1 << (quick - 3).min(6)).min(60)),
    }
}

/// Returns true unless the job failed with a usage error.
fn worth_a_restart(end: JobEnd) -> bool {
    matches!(end, JobEnd::Failed { status, .. } if status != MISTAKE)
}
