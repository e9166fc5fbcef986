//! Runs a program and watches it: its lines, its memory, and the lines of a file that it writes.
//!
//! Main types: [`Watched`] and [`Run`]. A program that fails or takes too long is an error with the end of what it
//! printed.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::memory::{PeakMemory, descendants};

/// Time between two looks at the file, and so the error of an arrival.
const TICK: Duration = Duration::from_millis(10);
/// Looks between two samples of memory.
const TICKS_A_SAMPLE: u32 = 5;
/// Characters of the standard error that an error quotes.
const QUOTED: usize = 2_000;
/// Longest run. The slowest takes a few minutes; a program that hangs must not hold the suite up.
const LIMIT: Duration = Duration::from_secs(1_800);
/// Longest build, which compiles all dependencies.
const BUILD_LIMIT: Duration = Duration::from_secs(3 * 3_600);

/// A program to run.
pub(crate) struct Watched {
    command: Command,
    /// A file whose lines are counted while they arrive.
    file: Option<PathBuf>,
    /// After this time it is killed.
    limit: Duration,
}

/// A program that ran and succeeded.
#[derive(Debug)]
pub(crate) struct Run {
    /// Wall-clock seconds of the program.
    pub(crate) seconds: f64,
    /// Most memory of all its processes.
    pub(crate) peak_bytes: u64,
    /// Lines of the standard output, each with the seconds since the start.
    pub(crate) lines: Vec<(f64, String)>,
    /// Seconds since the start at which each line of the file was there.
    pub(crate) arrivals: Vec<f64>,
}

impl Run {
    /// Standard output as one text.
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
    /// A cargo command, which may have to compile.
    pub(crate) fn build(command: Command) -> Self {
        Self { limit: BUILD_LIMIT, ..Self::from(command) }
    }

    /// Also counts the lines of `file`.
    pub(crate) fn with_file(self, file: PathBuf) -> Self {
        Self { file: Some(file), ..self }
    }

    /// Runs the program to its end.
    ///
    /// # Errors
    /// When it cannot be started, fails, or takes too long.
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

    /// Waits for the end; `None` when time was up and the program was killed.
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

/// Kills a program and what it has started.
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

fn collect_lines(child: &mut Child, start: Instant) -> JoinHandle<Vec<(f64, String)>> {
    let output = child.stdout.take();
    thread::spawn(move || {
        let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
        lines.map_while(Result::ok).map(|line| (start.elapsed().as_secs_f64(), line)).collect()
    })
}

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

fn end_of(text: &str) -> &str {
    let start = text.len().saturating_sub(QUOTED);
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
