//! Runs a launcher in a separate process, because signals and child processes affect the whole
//! process.

use std::env;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use deepburn_launch::{HostSlots, Launch, Mpirun, forwarded_variables};
use rustix::process::{Pid, Signal, kill_process};

/// The job to launch. It is passed to the launcher process as text.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) mpirun: String,
    pub(crate) hosts: Vec<HostSlots>,
    pub(crate) remote_shell: String,
    /// A script for `sh` that every rank runs.
    pub(crate) script: String,
    pub(crate) connect_timeout: u64,
    pub(crate) grace: u64,
    pub(crate) max_restarts: u32,
    /// Words that precede the launcher's command line, for example to run it on another machine.
    pub(crate) before: Vec<String>,
}

/// The result of a launcher process.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A running launcher process.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    seen: String,
    stderr: thread::JoinHandle<String>,
}

/// The variable that passes the job to a launcher process.
const JOB: &str = "LAUNCH_TEST_JOB";

/// The separator between words in the text of a job.
const SEPARATOR: char = '\u{1f}';

impl Job {
    /// Returns a job that runs `script` on one rank on this machine, started by `mpirun`.
    pub(crate) fn new(mpirun: &str, script: &str) -> Self {
        Self {
            mpirun: mpirun.to_owned(),
            hosts: vec![HostSlots::new("localhost", 1)],
            remote_shell: "false".to_owned(),
            script: script.to_owned(),
            connect_timeout: 30,
            grace: 60,
            max_restarts: 0,
            before: Vec::new(),
        }
    }

    /// Returns the same job on other hosts.
    pub(crate) fn on(mut self, hosts: &[(&str, &[usize])]) -> Self {
        let host = |(name, slots): &(&str, &[usize])| HostSlots {
            name: (*name).to_owned(),
            slots: slots.to_vec(),
        };
        self.hosts = hosts.iter().map(host).collect();
        self
    }

    /// Starts the launcher.
    pub(crate) fn start(&self) -> Running {
        let own = env::current_exe().unwrap().to_str().unwrap().to_owned();
        let test = ["--exact", "launcher::launcher_process", "--ignored", "--nocapture"];
        let words: Vec<String> = self.before.iter().cloned().chain([own]).collect();
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .args(test)
            .env(JOB, self.text())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test may end before all output has been read.
                let _ = sender.send(line);
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let stderr = thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        });
        Running { child, lines, seen: String::new(), stderr }
    }

    /// Runs the launcher to its end.
    pub(crate) fn run(&self) -> Ended {
        self.start().wait()
    }

    fn text(&self) -> String {
        let mut hosts = String::new();
        for host in &self.hosts {
            let slots: Vec<String> = host.slots.iter().map(usize::to_string).collect();
            let _ = write!(hosts, "{}:{} ", host.name, slots.join(","));
        }
        [
            self.mpirun.as_str(),
            &hosts,
            &self.remote_shell,
            &self.script,
            &self.connect_timeout.to_string(),
            &self.grace.to_string(),
            &self.max_restarts.to_string(),
        ]
        .join(&SEPARATOR.to_string())
    }

    fn from_text(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(SEPARATOR).collect();
        let &[mpirun, hosts, remote_shell, script, connect, grace, restarts] = words.as_slice()
        else {
            return None;
        };
        let host = |host: &str| {
            let (name, slots) = host.split_once(':')?;
            let slots = slots.split(',').map(|slot| slot.parse().ok()).collect::<Option<_>>()?;
            Some(HostSlots { name: name.to_owned(), slots })
        };
        Some(Self {
            hosts: hosts.split_whitespace().map(host).collect::<Option<_>>()?,
            remote_shell: remote_shell.to_owned(),
            connect_timeout: connect.parse().ok()?,
            grace: grace.parse().ok()?,
            max_restarts: restarts.parse().ok()?,
            ..Self::new(mpirun, script)
        })
    }
}

impl Running {
    /// Waits for a line of standard output that contains `text`.
    pub(crate) fn wait_for(&mut self, text: &str) {
        loop {
            let line = self.lines.recv_timeout(Duration::from_secs(120));
            let line = line.unwrap_or_else(|_| panic!("no `{text}` in:\n{}", self.seen));
            let found = line.contains(text);
            self.seen.push_str(&(line + "\n"));
            if found {
                return;
            }
        }
    }

    /// Sends a signal to the launcher process only.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until the launcher has ended.
    pub(crate) fn wait(mut self) -> Ended {
        let status = self.child.wait().unwrap().code();
        self.seen.extend(self.lines.iter().map(|line| line + "\n"));
        Ended { status, stdout: self.seen, stderr: self.stderr.join().unwrap() }
    }
}

/// Returns whether a process with this id is running.
pub(crate) fn is_running(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Waits until a process that was sent a signal has ended.
///
/// A signal takes effect after the call that sends it has returned.
pub(crate) fn wait_for_end(pid: &str) {
    let since = Instant::now();
    while is_running(pid) {
        assert!(since.elapsed() < Duration::from_secs(60), "process {pid} was left");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Writes an executable script.
pub(crate) fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let file = folder.join(name);
    std::fs::write(&file, format!("#!/bin/sh\n{text}")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

/// The process that [`Job::start`] starts.
#[test]
#[ignore = "other tests start it"]
fn launcher_process() {
    let Some(job) = env::var(JOB).ok().and_then(|text| Job::from_text(&text)) else { return };
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let names = env::vars().map(|(name, _)| name);
    let launch = Launch {
        mpirun: Mpirun {
            program: job.mpirun,
            hosts: job.hosts,
            remote_shell: job.remote_shell,
            forwarded: forwarded_variables(names, &[]).unwrap(),
            command: ["sh", "-c", &job.script].map(str::to_owned).to_vec(),
        },
        started: SystemTime::now(),
        connect_timeout: Duration::from_secs(job.connect_timeout),
        grace: Duration::from_secs(job.grace),
        max_restarts: job.max_restarts,
    };
    std::process::exit(match launch.run() {
        Ok(end) => end.status().into(),
        Err(error) => {
            eprintln!("error: {error}");
            200
        }
    });
}
