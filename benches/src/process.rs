//! Runs a program and records its output, its peak memory, and the times at which it writes lines
//! to a file.
//!
//! Main types: [`Watched`] and [`ProgramRun`]. If a program fails or takes too long, the error
//! quotes the end of its output.
//!
//! The calling thread polls every 10 ms whether the program has ended and how many lines the file
//! has. It samples the memory at every fifth poll. Two other threads read standard output and
//! standard error, because a program blocks on a full pipe.
//!
//! # Measurement errors
//!
//! - The arrival time of a line in the file is late by up to 10 ms, the time between two polls.
//! - The arrival time of a line on standard output is the time at which it was read. If a program
//!   buffers its output, it is too late. The scripts of peers flush each line.
//! - The time of a run includes the start of the process and up to 10 ms after its end.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::memory::{PeakMemory, descendants};
use crate::quantity::{Observations, Quantity};

/// Time between two polls of the program and the file.
const TICK: Duration = Duration::from_millis(10);
/// Number of polls between two samples of memory, which are 50 ms apart.
const TICKS_A_SAMPLE: u32 = 5;
/// Maximum number of bytes of each output that an error quotes.
const QUOTED: usize = 2_000;
/// Time limit of a run. The slowest run takes a few minutes. If a program hangs, the suite
/// continues after this time.
const LIMIT: Duration = Duration::from_secs(1_800);
/// Time limit of a build, which may compile all dependencies.
const BUILD_LIMIT: Duration = Duration::from_secs(3 * 3_600);

/// A program to run and watch.
pub(crate) struct Watched {
    /// The program with its arguments and environment.
    command: Command,
    /// A file that the program appends lines to. The arrival time of each line is recorded.
    file: Option<PathBuf>,
    /// Time after which the program is killed.
    limit: Duration,
}

/// The output and the measurements of a program that succeeded.
#[derive(Debug)]
pub(crate) struct ProgramRun {
    /// Wall-clock seconds from the start to the end of the program.
    pub(crate) seconds: f64,
    /// Peak memory of all its processes together, in bytes.
    pub(crate) peak_bytes: u64,
    /// Lines of standard output, each with its arrival time in seconds since the start.
    pub(crate) lines: Vec<(f64, String)>,
    /// Arrival times of the lines of the file, in seconds since the start.
    pub(crate) arrivals: Vec<f64>,
}

impl ProgramRun {
    /// Returns an observed value with the peak memory of the run.
    pub(crate) fn observe(&self, quantity: Quantity, value: f64) -> Observations {
        Observations::of(quantity, value).with(Quantity::Peak, self.peak_bytes as f64)
    }

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
    /// Returns a cargo command to run. Its time limit is longer, because it may have to compile.
    pub(crate) fn build(command: Command) -> Self {
        Self { limit: BUILD_LIMIT, ..Self::from(command) }
    }

    /// Sets another time limit. `None` keeps the limit.
    pub(crate) fn within(self, limit: Option<Duration>) -> Self {
        Self { limit: limit.unwrap_or(self.limit), ..self }
    }

    /// Also records the arrival times of lines in `file`, which does not have to exist yet.
    pub(crate) fn with_file(self, file: PathBuf) -> Self {
        Self { file: Some(file), ..self }
    }

    /// Runs the program to its end and returns its output and measurements.
    ///
    /// Standard input is empty. The output is kept in memory.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started, if its exit status is not 0, or if it
    /// takes longer than the time limit. The error quotes the ends of its two outputs.
    pub(crate) fn run(mut self) -> Outcome<ProgramRun> {
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
        // Both pipes are read while the program runs. A full pipe would block it and change its
        // time.
        let lines = collect_lines(&mut child, start);
        let errors = collect_errors(&mut child);
        let mut peak = PeakMemory::default();
        let mut arrivals = Vec::new();
        // This thread samples, so that the readers of the pipes do not delay a sample.
        let status = self.wait(&mut child, start, &mut peak, &mut arrivals)?;
        // Before the threads are joined, which may take longer than the program.
        let seconds = start.elapsed().as_secs_f64();
        let mut lines = lines.join().map_err(|_| "the thread that reads the output panicked")?;
        // A program has written its lines before it ends. On a loaded machine, the thread that
        // reads them may come to the last ones after the end was seen.
        for (arrival, _) in &mut lines {
            *arrival = arrival.min(seconds);
        }
        let errors = errors.join().map_err(|_| "the thread that reads the errors panicked")?;
        match status {
            Some(status) if status.success() => {
                Ok(ProgramRun { seconds, peak_bytes: peak.bytes, lines, arrivals })
            }
            Some(status) => Err(format!("{program}: {status}\n{}", quoted(&lines, &errors)).into()),
            None => Err(format!(
                "{program}: killed after {:?} without a result\n{}",
                self.limit,
                quoted(&lines, &errors)
            )
            .into()),
        }
    }

    /// Polls the program until its end. Returns `None` if the time limit was reached and the
    /// program was killed.
    ///
    /// All lines that were added since the last poll get the same arrival time. If the file
    /// shrinks, the arrival times are kept.
    fn wait(
        &self,
        child: &mut Child,
        start: Instant,
        peak: &mut PeakMemory,
        arrivals: &mut Vec<f64>,
    ) -> Outcome<Option<ExitStatus>> {
        let mut seen = 0;
        for tick in 0_u32.. {
            // Check for the end before reading the file, so that the last lines are seen.
            let status = child.try_wait()?;
            if let Some(file) = &self.file
                && let Ok(metadata) = file.metadata()
                && metadata.len() > seen
            {
                // The size is compared first, because the lines are counted in the whole file.
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

/// Kills a program and all its descendants, and waits for its end.
///
/// If only a launcher such as `mpirun` were killed, its ranks would continue to run.
fn kill(child: &mut Child) -> Outcome<()> {
    // All of them are found before the first is killed, because orphans get another parent.
    for id in descendants(child.id()) {
        if let Some(id) = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw) {
            // A process that has already ended is not an error.
            let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
        }
    }
    child.wait()?;
    Ok(())
}

/// Starts a thread that reads standard output to its end and records the arrival time of each line.
///
/// Lines after one that is not UTF-8 are ignored.
fn collect_lines(child: &mut Child, start: Instant) -> JoinHandle<Vec<(f64, String)>> {
    let output = child.stdout.take();
    thread::spawn(move || {
        let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
        lines.map_while(Result::ok).map(|line| (start.elapsed().as_secs_f64(), line)).collect()
    })
}

/// Starts a thread that reads standard error to its end, for error messages.
fn collect_errors(child: &mut Child) -> JoinHandle<String> {
    let errors = child.stderr.take();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut errors) = errors {
            // If reading fails, the text that was read before is still returned.
            let _ = errors.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Returns the ends of standard output and standard error. Test programs report to the former.
fn quoted(lines: &[(f64, String)], errors: &str) -> String {
    let output: Vec<_> = lines.iter().map(|(_, line)| line.as_str()).collect();
    format!("{}\n{}", end_of(&output.join("\n")), end_of(errors)).trim().into()
}

/// Returns about the last `QUOTED` bytes of a text, from a character boundary on, without
/// surrounding white space.
fn end_of(text: &str) -> &str {
    let start = text.len().saturating_sub(QUOTED);
    // Slicing in the middle of a character would panic.
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
        assert!(run.lines[0].0 <= run.lines[1].0 && run.lines[1].0 <= run.seconds);
        assert!(run.peak_bytes > 0);
    }

    #[test]
    fn a_failure_quotes_both_outputs() {
        let error =
            shell("echo test A; echo what is wrong >&2; exit 3").run().expect_err("status 3");
        let error = error.to_string();
        assert!(error.ends_with("exit status: 3\ntest A\nwhat is wrong"), "{error}");
    }

    #[test]
    fn a_program_that_hangs_is_killed() {
        let hanging = shell("echo step 1; sleep 60").within(Some(Duration::from_millis(300)));
        let error = hanging.run().expect_err("killed").to_string();
        assert!(error.contains("killed after 300ms") && error.ends_with("step 1"), "{error}");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = "ä".repeat(QUOTED);
        assert!(end_of(&text).len() <= QUOTED);
        assert_eq!(end_of(" short \n"), "short");
    }
}
