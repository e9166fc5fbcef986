//! A profile of some steps: the spans of every thread, and the memory use by category.
//!
//! Main type: [`Profiler`]. Its `tracing` layer receives the spans of this program, and ranks
//! report the beginning and end of steps. Outside the profiled steps it costs one atomic read. The
//! result is `trace.json` (for chrome://tracing and Perfetto), `memory.csv` and `memory.html`.
//!
//! All records are kept in memory until the end of the run, so the number of spans is limited. All
//! ranks lock the same recording, so profiling slows down runs with many ranks and short spans.
//!
//! ```text
//! trace.json    {"traceEvents": [{"name", "ph": "X", "tid": thread, "ts", "dur", "args"}, …],
//!                "otherData": {"dropped_spans": N}}          times in microseconds
//! memory.csv    microseconds,rank,category,bytes
//! ```

mod memory;
mod spans;
mod trace;

use crate::html;
use crate::report_error::ReportError;
use memory::MemorySample;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;
use std::{fs, io};
use trace::Complete;
use tracing_subscriber::Layer;
use tracing_subscriber::registry::LookupSpan;

/// The largest number of spans. It gives about 200 MB of `trace.json`, more than viewers can load.
/// Later spans are counted and dropped.
const MAX_SPANS: usize = 1_000_000;

/// The reason why a profile cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The operating system returned an error.
    #[error(
        "cannot write profile `{}`: {source}; make room there, or choose another output_folder",
        path.display()
    )]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The memory timeline cannot be drawn.
    #[error(transparent)]
    Page(#[from] ReportError),
}

/// Records some steps of a run. Clones record into the same profile.
#[derive(Debug, Clone)]
pub struct Profiler {
    /// The state that all clones share.
    shared: Arc<Shared>,
}

/// The state of a profiler, which the layer and all ranks share.
#[derive(Debug)]
struct Shared {
    /// The requested profile; unset until it is requested.
    wanted: OnceLock<Wanted>,
    /// The time from which microseconds are counted.
    started: Instant,
    /// The number of threads inside a profiled step. Spans are recorded while it is not 0.
    inside: AtomicUsize,
    /// The records so far.
    recording: Mutex<Recording>,
}

/// The profiled steps and the output folder.
#[derive(Debug)]
struct Wanted {
    /// The numbers of the profiled steps, from 1.
    windows: Vec<RangeInclusive<u64>>,
    /// The folder that the files are written to.
    folder: PathBuf,
}

/// The records so far.
#[derive(Debug, Default)]
struct Recording {
    /// The threads in order of their first span; the index is the number of the track.
    threads: Vec<(ThreadId, String)>,
    /// The current step of each thread, and its start in microseconds.
    steps: HashMap<ThreadId, (u64, f64)>,
    /// Spans that have ended, at most `MAX_SPANS`.
    spans: Vec<Complete>,
    /// The number of spans that were dropped because of this limit.
    dropped: u64,
    /// The reported memory, in the order of the reports.
    memory: Vec<MemorySample>,
}

impl Profiler {
    /// Creates a profiler that records no steps. Its layer can be installed before it is known
    /// whether a profile is requested.
    pub fn idle() -> Self {
        let shared = Shared {
            wanted: OnceLock::new(),
            started: Instant::now(),
            inside: AtomicUsize::new(0),
            recording: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Requests a profile of the steps in `windows`, which is written to `folder` at the end. Only
    /// the first call has an effect.
    pub fn profile(&self, windows: Vec<RangeInclusive<u64>>, folder: &Path) {
        // A second call finds the value already set and is ignored.
        let _ = self.shared.wanted.set(Wanted { windows, folder: folder.to_path_buf() });
    }

    /// Returns the layer that receives spans whose target starts with `deepburn`. A filter for log
    /// messages must belong to the layer that prints them, because a filter of the whole subscriber
    /// would also drop spans.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: tracing::Subscriber + for<'span> LookupSpan<'span>,
    {
        spans::layer(self.clone())
    }

    /// Records that this thread starts a step.
    ///
    /// A step of this thread that was not ended is ended now.
    pub fn begin_step(&self, step: u64) {
        // An error may have left the step before without its end.
        self.end_current();
        // A profile that was not requested has no windows, so nothing is recorded.
        let windows = self.shared.wanted.get().map_or(&[][..], |wanted| &wanted.windows);
        if !windows.iter().any(|window| window.contains(&step)) {
            return;
        }
        let now = self.microseconds(Instant::now());
        // The step is stored before the counter is incremented, so a span that sees the counter
        // also finds the step.
        self.recording().steps.insert(thread::current().id(), (step, now));
        self.shared.inside.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that this thread has ended a step. Has no effect if the step is not profiled.
    pub fn end_step(&self, step: u64) {
        // A step outside of the windows has no entry.
        let current = self.recording().steps.get(&thread::current().id()).copied();
        if current.is_some_and(|(begun, _)| begun == step) {
            self.end_current();
        }
    }

    /// Records the memory of a rank, in bytes by category. Has no effect outside the profiled
    /// steps.
    ///
    /// The memory is recorded if any thread is inside a profiled step, even if `rank` itself is
    /// not.
    pub fn memory(&self, rank: usize, categories: &[(&str, u64)]) {
        if !self.is_on() {
            return;
        }
        let at = self.microseconds(Instant::now());
        let bytes = categories.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect();
        self.recording().memory.push(MemorySample { at, rank, bytes });
    }

    /// Writes the profile. Returns `false` and writes nothing if no requested step was reached.
    ///
    /// # Errors
    /// Returns an error if the folder or a file cannot be written.
    pub fn finish(&self) -> Result<bool, ProfileError> {
        self.end_current();
        // Locked until the files are written, so that all of them show the same records.
        let recording = self.recording();
        let Some(Wanted { folder, .. }) = self.shared.wanted.get() else { return Ok(false) };
        if recording.spans.is_empty() && recording.memory.is_empty() {
            return Ok(false);
        }
        if recording.dropped > 0 {
            tracing::warn!(
                "the profile leaves out {} spans after the first {MAX_SPANS}; profile fewer steps",
                recording.dropped
            );
        }
        fs::create_dir_all(folder).map_err(|source| file_error(folder, source))?;
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            html::write(&path, text).map_err(|source| file_error(&path, source))
        };
        write("trace.json", &trace::to_json(&recording))?;
        if !recording.memory.is_empty() {
            let table = memory::to_csv(&recording.memory)
                .map_err(|source| file_error(&folder.join("memory.csv"), source))?;
            write("memory.csv", &table)?;
            write("memory.html", &memory::to_html(&recording.memory)?)?;
        }
        Ok(true)
    }

    /// Returns true while any thread is inside a profiled step.
    fn is_on(&self) -> bool {
        self.shared.inside.load(Ordering::Relaxed) > 0
    }

    /// Ends the current step of this thread, if it has one, and records it as a span.
    fn end_current(&self) {
        let id = thread::current().id();
        let mut recording = self.recording();
        if let Some((step, begun)) = recording.steps.remove(&id) {
            self.shared.inside.fetch_sub(1, Ordering::Relaxed);
            let now = self.microseconds(Instant::now());
            let args = Map::from_iter([("step".to_owned(), json!(step))]);
            recording.push("step", (begun, now), args);
        }
    }

    /// Records a span of this thread if the thread is inside a profiled step. Other ranks may be
    /// ahead or behind.
    fn record(&self, name: &'static str, begun: Instant, args: Map<String, Value>) {
        // The time is taken before locking, because the lock may block.
        let times = (self.microseconds(begun), self.microseconds(Instant::now()));
        let mut recording = self.recording();
        if recording.steps.contains_key(&thread::current().id()) {
            recording.push(name, times, args);
        }
    }

    /// Returns the time since the start of the profiler.
    fn microseconds(&self, at: Instant) -> f64 {
        at.duration_since(self.shared.started).as_nanos() as f64 / 1e3
    }

    /// Locks the recording.
    fn recording(&self) -> MutexGuard<'_, Recording> {
        // Every change is a single push or removal, so a panic leaves the value consistent.
        self.shared.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recording {
    /// Adds a span of this thread, or counts it as dropped if there are too many. Times are in
    /// microseconds.
    fn push(&mut self, name: &'static str, (begun, ended): (f64, f64), args: Map<String, Value>) {
        if self.spans.len() >= MAX_SPANS {
            self.dropped += 1;
            return;
        }
        let track = self.track();
        self.spans.push(Complete { name, track, begun, lasted: ended - begun, args });
    }

    /// Returns the track of this thread.
    fn track(&mut self) -> usize {
        let thread = thread::current();
        match self.threads.iter().position(|(id, _)| *id == thread.id()) {
            Some(track) => track,
            None => {
                let name = thread.name().unwrap_or("unnamed thread").to_owned();
                self.threads.push((thread.id(), name));
                self.threads.len() - 1
            }
        }
    }
}

/// Returns the error of a file or folder.
fn file_error(path: &Path, source: io::Error) -> ProfileError {
    ProfileError::File { path: path.to_path_buf(), source }
}

#[cfg(test)]
mod tests;
