//! Records the rows and failures of a run on a GPU, and knows the time that is left.
//!
//! Main type: [`GpuRecording`].

use std::fmt::Display;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::super::*;

/// A program is not started if less time is left.
const LEAST: Duration = Duration::from_secs(2);
/// Time that is kept for the end of the run, when the results are printed.
const END: Duration = Duration::from_secs(5);

/// Title and columns of a table.
pub(super) struct TableHead {
    pub(super) title: String,
    pub(super) columns: Vec<Quantity>,
}

/// The results of a run, which are written to their file after each row.
pub(super) struct GpuRecording<'a> {
    pub(super) suite: &'a Suite,
    results: &'a mut Results,
    /// The file of the results.
    file: PathBuf,
    /// When the run starts.
    start: Instant,
}

impl<'a> GpuRecording<'a> {
    /// Starts a run and writes its file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(super) fn new(suite: &'a Suite, results: &'a mut Results) -> Outcome<Self> {
        let file = suite.results_folder().join(format!("{}.json", results.bench));
        let mut recording = Self { suite, results, file, start: Instant::now() };
        recording.write()?;
        Ok(recording)
    }

    /// Returns the backend that is measured.
    pub(super) fn backend(&self) -> &str {
        &self.suite.options.gpu.backend
    }

    /// Returns the time that is left for programs.
    pub(super) fn left(&self) -> Duration {
        let limit = Duration::from_secs(self.suite.options.gpu.limit);
        limit.saturating_sub(END).saturating_sub(self.start.elapsed())
    }

    /// Returns the time limit of a program: `most` seconds, or the time that is left.
    ///
    /// # Errors
    /// Returns an error if no time is left.
    pub(super) fn limit(&self, most: u64) -> Outcome<Duration> {
        match self.left() {
            left if left < LEAST => Err("no time is left".into()),
            left => Ok(left.min(Duration::from_secs(most))),
        }
    }

    /// Returns a folder in which programs run. CubeCL reads its `cubecl.toml`, which has the lines
    /// `settings`.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written.
    pub(super) fn folder(&self, name: &str, settings: &str) -> Outcome<PathBuf> {
        let folder = self.suite.scratch().join(name);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("cubecl.toml"), settings)?;
        Ok(folder)
    }

    /// Returns a folder whose programs store compiled kernels in it, which later programs of the
    /// folder load. Programs that run at the same time need a folder each.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written.
    pub(super) fn caching(&self, name: &str) -> Outcome<PathBuf> {
        self.folder(name, &self.caching_in(name))
    }

    /// Returns the lines of `cubecl.toml` that store kernels in a folder.
    pub(super) fn caching_in(&self, name: &str) -> String {
        let path = self.suite.scratch().join(name).join("kernels");
        // Strings of JSON are strings of TOML.
        format!("[compilation]\ncache = {{ file = {} }}\n", json!(path))
    }

    /// Runs a program and adds its row to a table, or its failure to the results. Returns what was
    /// measured.
    ///
    /// # Errors
    /// Returns an error if the results cannot be written.
    pub(super) fn row(
        &mut self,
        table: &TableHead,
        name: &str,
        is_peer: bool,
        measure: impl FnOnce(&Self) -> Outcome<Observations>,
    ) -> Outcome<Option<Observations>> {
        let what = format!("{}: {name}", table.title);
        if self.left() < LEAST {
            self.lacks(&what, "no time was left")?;
            return Ok(None);
        }
        match measure(self) {
            Ok(found) => self.add(table, name, is_peer, &found).map(|()| Some(found)),
            Err(error) => self.fail(&what, &error).map(|()| None),
        }
    }

    /// Adds a row to the table of this title, and writes the file.
    fn add(
        &mut self,
        table: &TableHead,
        name: &str,
        is_peer: bool,
        found: &Observations,
    ) -> Outcome<()> {
        let shown = table.columns.iter().filter_map(|it| Some((it, found.median(*it)?)));
        let shown: Vec<_> =
            shown.map(|(it, value)| format!("{} {}", it.label(), it.format(value))).collect();
        eprintln!("{:4.0} s: {name}: {}", self.start.elapsed().as_secs_f64(), shown.join(", "));
        let mut round = RoundRecorder::default();
        round.record(name, is_peer, found);
        let new = round.table(&table.title, &table.columns);
        match self.results.tables.iter_mut().find(|it| it.title == new.title) {
            Some(known) => known.rows.extend(new.rows),
            None => self.results.tables.push(new),
        }
        self.write()
    }

    /// Adds the ratio of two rows of a table.
    pub(super) fn compare(&mut self, table: &TableHead, quantity: Quantity, row: &str, peer: &str) {
        if let Some(table) = self.results.tables.iter_mut().find(|it| it.title == table.title) {
            table.compare(quantity, row, peer, None);
        }
    }

    /// Records a failed program or check, and writes the file.
    ///
    /// # Errors
    /// Returns an error if the results cannot be written.
    pub(super) fn fail(&mut self, what: &str, error: &dyn Display) -> Outcome<()> {
        eprintln!("{:4.0} s: {what}: FAILED: {error}", self.start.elapsed().as_secs_f64());
        self.results.failures.push(format!("{what}: {error}"));
        self.write()
    }

    /// Records what was not measured, and writes the file.
    ///
    /// # Errors
    /// Returns an error if the results cannot be written.
    pub(super) fn lacks(&mut self, what: &str, lacks: &str) -> Outcome<()> {
        self.results.missing.push(format!("{what}: {lacks}"));
        self.write()
    }

    /// Writes the results so far.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(super) fn write(&mut self) -> Outcome<()> {
        self.results.seconds = self.start.elapsed().as_secs_f64();
        self.results.write(&self.file)
    }
}
