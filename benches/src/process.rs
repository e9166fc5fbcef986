//! Runs a program and watches it: its lines, its memory, and the lines of a file that it writes.
//!
//! Main types: [`Watched`] and [`Run`]. A program that fails or takes too long is an error with the end of
//! what it printed.
//!
//! The calling thread polls every 10 ms: whether the program has ended, how many lines the file has, and
//! every fifth time the memory. Two more threads read standard output and standard error to their ends,
//! because a program blocks on a full pipe.
//!
//! # Errors of the measurement
//!
//! - An arrival in the file is late by up to one tick, 10 ms, and by the time that the program takes to
//!   write it.
//! - Lines of standard output have the time at which they were read. A program that buffers its output
//!   prints late; the scripts of peers flush each line.
//! - The seconds of a run include the start of the process and up to one tick after its end.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::memory::{PeakMemory, descendants};

/// Time between two polls of the program and the file; the largest error of an arrival.
const TICK: Duration = Duration::from_millis(10);
/// Polls from one sample of memory to the next: 50 ms.
const TICKS_A_SAMPLE: u32 = 5;
/// Bytes of the standard error that an error quotes, at most.
const QUOTED: usize = 2_000;
/// Longest run. The slowest takes a few minutes; a program that hangs must not hold the suite up.
const LIMIT: Duration = Duration::from_secs(1_800);
/// Longest build, which compiles all dependencies.
const BUILD_LIMIT: Duration = Duration::from_secs(3 * 3_600);

/// A program to run, and what is watched beside its output and its memory.
pub(crate) struct Watched {
    /// The program with its arguments and environment.
    command: Command,
    /// A file that the program appends lines to; the time at which each one arrives is recorded.
    file: Option<PathBuf>,
    /// After this time it is killed.
    limit: Duration,
}

/// What was seen of a program that ran and succeeded.
#[derive(Debug)]
pub(crate) struct Run {
    /// Wall-clock seconds from the start to the end of the program.
    pub(crate) seconds: f64,
    /// Peak memory of all its processes together, in bytes.
    pub(crate) peak_bytes: u64,
    /// Lines of standard output, each with the seconds since the start at which it was read.
    pub(crate) lines: Vec<(f64, String)>,
    /// Seconds since the start at which each line of the file was first seen, in the order of the lines.
    pub(crate) arrivals: Vec<f64>,
}

impl Run {
    /// Returns standard output as one text.
    pub(crate) fn output(&self) -> String {
        self.lines.iter().map(|(_, line)| format!("{line}\n")).collect()
    }
}

impl From<Command> for Watched {
    fn from(command: Command) -> Self {
        Self { command, file: None, limit: LIMIT }
    }
}

impl Watched {
    /// Watches a cargo command, which may have to compile and gets a longer limit.
    pub(crate) fn build(command: Command) -> Self {
        Self { limit: BUILD_LIMIT, ..Self::from(command) }
    }

    /// Watches also the lines of `file`, which need not exist yet.
    pub(crate) fn with_file(self, file: PathBuf) -> Self {
        Self { file: Some(file), ..self }
    }

    /// Runs the program to its end and returns what was seen.
    ///
    /// Standard input is empty. Output is kept in memory, which is small for programs of this suite.
    ///
    /// # Errors
    /// When it cannot be started, ends with another status than 0, or takes longer than the limit. The
    /// error quotes the end of its standard error.
    pub(crate) fn run(mut self) -> Outcome<Run> {
        let start = Instant::now();
        let program = self.command.get_program().to_string_lossy().into_owned();
        let mut child = self
            .command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| {
                format!("cannot start {program}: {error}; check that it is installed")
            })?;
        // Both pipes are read while the program runs: a full pipe would block it, and the time would be wrong.
        let lines = collect_lines(&mut child, start);
        let errors = collect_errors(&mut child);
        let mut peak = PeakMemory::default();
        let mut arrivals = Vec::new();
        let status = self.wait(&mut child, start, &mut peak, &mut arrivals)?;
        let seconds = start.elapsed().as_secs_f64();
        let lines = lines.join().map_err(|_| "the thread that reads the output panicked")?;
        let errors = errors.join().map_err(|_| "the thread that reads the errors panicked")?;
        match status {
            Some(status) if status.success() => {
                Ok(Run { seconds, peak_bytes: peak.bytes(), lines, arrivals })
            }
            Some(status) => Err(format!("{program}: {status}\n{}", end_of(&errors)).into()),
            None => Err(format!(
                "{program}: killed after {:?} without a result\n{}",
                self.limit,
                end_of(&errors)
            )
            .into()),
        }
    }

    /// Polls the program until its end. `None` when the limit was reached and the program was killed.
    ///
    /// The arrivals of all lines that appeared since the last poll get the same time. A file that shrinks
    /// keeps its arrivals.
    fn wait(
        &self,
        child: &mut Child,
        start: Instant,
        peak: &mut PeakMemory,
        arrivals: &mut Vec<f64>,
    ) -> Outcome<Option<ExitStatus>> {
        let mut seen = 0;
        for tick in 0_u32.. {
            // Before the look at the file, which then sees the last lines too.
            let status = child.try_wait()?;
            if let Some(file) = &self.file
                && let Ok(metadata) = file.metadata()
                && metadata.len() > seen
            {
                seen = metadata.len();
                let rows = std::fs::read_to_string(file).unwrap_or_default().matches('\n').count();
                arrivals.resize(rows.max(arrivals.len()), start.elapsed().as_secs_f64());
            }
            if status.is_some() {
                return Ok(status);
            }
            if start.elapsed() > self.limit {
                kill(child)?;
                return Ok(None);
            }
            if tick % TICKS_A_SAMPLE == 0 {
                peak.sample(child.id());
            }
            thread::sleep(TICK);
        }
        unreachable!("the loop ends by the limit long before its counter does")
    }
}

/// Kills a program and what it has started, and waits for its end.
///
/// A launcher such as `mpirun` would leave its ranks behind if only the launcher were killed.
fn kill(child: &mut Child) -> Outcome<()> {
    for id in descendants(child.id()) {
        if let Some(id) = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw) {
            // One that has ended meanwhile is no problem.
            let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
        }
    }
    child.wait()?;
    Ok(())
}

/// Starts a thread that reads standard output to its end and notes the time of each line.
///
/// A line that is not UTF-8 ends the list, but never the program.
fn collect_lines(child: &mut Child, start: Instant) -> JoinHandle<Vec<(f64, String)>> {
    let output = child.stdout.take();
    thread::spawn(move || {
        let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
        lines.map_while(Result::ok).map(|line| (start.elapsed().as_secs_f64(), line)).collect()
    })
}

/// Starts a thread that reads standard error to its end, which is what an error message quotes.
fn collect_errors(child: &mut Child) -> JoinHandle<String> {
    let errors = child.stderr.take();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut errors) = errors {
            // What was read until the pipe broke is worth quoting.
            let _ = errors.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Returns the last `QUOTED` bytes of a text, cut at a character, without white space around them.
fn end_of(text: &str) -> &str {
    let start = text.len().saturating_sub(QUOTED);
    // A cut in the middle of a character would panic.
    let start = (start..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    text[start..].trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Watched {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Watched::from(command)
    }

    #[test]
    fn lines_and_memory_of_a_program_are_seen() {
        let run = shell("echo one; sleep 0.1; echo two").run().expect("a shell");
        assert_eq!(run.output(), "one\ntwo\n");
        assert!(run.lines[0].0 < run.lines[1].0 && run.lines[1].0 <= run.seconds);
        assert!(run.peak_bytes > 0);
    }

    #[test]
    fn a_failure_quotes_the_standard_error() {
        let error =
            shell("echo what is wrong >&2; exit 3").run().expect_err("status 3").to_string();
        assert!(error.contains("exit status: 3") && error.contains("what is wrong"), "{error}");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = "ä".repeat(QUOTED);
        assert!(end_of(&text).len() <= QUOTED);
        assert_eq!(end_of(" short \n"), "short");
    }
}
