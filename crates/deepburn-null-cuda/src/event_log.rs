//! [`EventLog`]: one line for each call of the driver.

use std::fmt::Arguments;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A text file of calls, each with the seconds since the first one.
#[derive(Debug)]
pub(crate) struct EventLog {
    start: Instant,
    file: Mutex<File>,
}

impl EventLog {
    /// Creates the file.
    ///
    /// # Panics
    /// Panics if it cannot be created.
    pub(crate) fn create(path: &Path) -> Self {
        let file = File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { start: Instant::now(), file: Mutex::new(file) }
    }

    /// Writes a line. A line that cannot be written is missing.
    pub(crate) fn write(&self, event: Arguments<'_>) {
        let seconds = self.start.elapsed().as_secs_f64();
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // One write, so that a process that is killed leaves whole lines.
        let _ = file.write_all(format!("{seconds:.6} {event}\n").as_bytes());
    }
}
