//! The entries of a token cache, and their removal.
//!
//! A cache is limited by size and by age ([`CacheLimits`]). The time of the last use of an entry is
//! the later of its modification and access times, and the least recently used entries are removed
//! first. A run can still read a file that it opened before the removal. A run that is killed while
//! it writes leaves an unfinished file. The next run removes the file, because the writer's lock
//! ended with its process.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The limits above which entries of a token cache are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// Maximum bytes of all entries.
    pub bytes: u64,
    /// Maximum time since the last use of an entry.
    pub age: Duration,
}

/// Bytes of a gigabyte.
const GIGABYTE: u64 = 1_000_000_000;
/// Seconds of a day.
const DAY: u64 = 24 * 60 * 60;

impl Default for CacheLimits {
    /// 20 GB and 30 days.
    fn default() -> Self {
        Self { bytes: 20 * GIGABYTE, age: Duration::from_secs(30 * DAY) }
    }
}

impl CacheLimits {
    /// Reads the limits from the environment variables `DEEPBURN_CACHE_GB` and
    /// `DEEPBURN_CACHE_DAYS`, which `variable` looks up. Both are whole numbers; any other value is
    /// ignored with a warning.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use deepburn_datasets::CacheLimits;
    ///
    /// let limits = CacheLimits::from_variables(|name| {
    ///     (name == "DEEPBURN_CACHE_DAYS").then(|| "7".to_owned())
    /// });
    /// assert_eq!(limits.age, Duration::from_secs(7 * 24 * 60 * 60));
    /// assert_eq!(limits.bytes, CacheLimits::default().bytes);
    /// ```
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str, default: u64| match variable(name).as_deref().map(str::trim) {
            None | Some("") => default,
            Some(value) => value.parse().unwrap_or_else(|_| {
                tracing::warn!("{name} = {value}: it must be a whole number; using {default}");
                default
            }),
        };
        Self {
            bytes: number("DEEPBURN_CACHE_GB", 20).saturating_mul(GIGABYTE),
            age: Duration::from_secs(number("DEEPBURN_CACHE_DAYS", 30).saturating_mul(DAY)),
        }
    }
}

/// A file of a token cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Time since its last use.
    pub unused: Duration,
    /// The text that was tokenized, if it is known.
    pub source: Option<String>,
}

/// The extension of the file that stores the source of an entry.
pub(crate) const SOURCE: &str = "source";

/// Returns the entries in `folder`, most recently used first. A missing folder has no entries.
///
/// # Errors
/// Returns an error if the folder cannot be read.
pub(crate) fn entries(folder: &Path) -> io::Result<Vec<CacheEntry>> {
    let listing = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listing => listing?,
    };
    let now = SystemTime::now();
    let mut entries = Vec::new();
    for file in listing.flatten() {
        let path = file.path();
        // The files with the sources of entries, for example, are not counted as entries.
        let is_entry = path.extension().is_some_and(|name| name == "bin") || is_partial(&path);
        // Another process may have removed the file since.
        let Some(metadata) = file.metadata().ok().filter(|it| it.is_file() && is_entry) else {
            continue;
        };
        // An entry counts as used when it is written and when it is found.
        let times = [metadata.modified(), metadata.accessed()].into_iter().flatten();
        let used = times.max().unwrap_or(SystemTime::UNIX_EPOCH);
        entries.push(CacheEntry {
            bytes: metadata.len(),
            unused: now.duration_since(used).unwrap_or_default(),
            source: match is_partial(&path) {
                true if is_being_written(&path) => Some("being written".to_owned()),
                true => Some("unfinished: its run was interrupted".to_owned()),
                false => fs::read_to_string(path.with_extension(SOURCE)).ok(),
            },
            path,
        });
    }
    entries.sort_by(|a, b| a.unused.cmp(&b.unused).then_with(|| a.path.cmp(&b.path)));
    Ok(entries)
}

/// Returns whether `path` has the temporary name of an unfinished entry.
fn is_partial(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(".tmp"))
}

/// Returns whether a run is writing `path`: the writer holds a lock on the file. On a file system
/// without locks, an unfinished file counts as being written for a day.
fn is_being_written(path: &Path) -> bool {
    let Ok(file) = fs::File::open(path) else { return false };
    match file.try_lock_shared() {
        Ok(()) => false,
        Err(fs::TryLockError::WouldBlock) => true,
        Err(fs::TryLockError::Error(_)) => {
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            let age = modified.ok().and_then(|time| time.elapsed().ok()).unwrap_or_default();
            age < Duration::from_secs(DAY)
        }
    }
}

/// Removes the entries that exceed `limits`, and the unfinished files of interrupted runs. The most
/// recently used entry is always kept.
pub(crate) fn evict(folder: &Path, limits: CacheLimits) -> io::Result<()> {
    let (partial, complete): (Vec<_>, Vec<_>) =
        entries(folder)?.into_iter().partition(|entry| is_partial(&entry.path));
    for entry in partial.iter().filter(|entry| !is_being_written(&entry.path)) {
        remove(&entry.path)?;
    }
    let mut total = 0;
    for (index, entry) in complete.into_iter().enumerate() {
        total += entry.bytes;
        if index > 0 && (total > limits.bytes || entry.unused > limits.age) {
            // A removed entry does not count, so a smaller entry after it may be kept.
            total -= entry.bytes;
            tracing::info!(file = %entry.path.display(), "removed from the token cache");
            remove(&entry.path)?;
        }
    }
    Ok(())
}

/// Removes an entry and its source file.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    // Not every entry has a source file.
    let _ = fs::remove_file(path.with_extension(SOURCE));
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let name = |entry: CacheEntry| entry.path.file_name().unwrap().to_str().unwrap().to_owned();
        entries(folder).unwrap().into_iter().map(name).collect()
    }

    /// Creates files of 100 bytes, each unused for the given number of days.
    fn cache(files: &[(&str, u64)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, days) in files {
            let path = dir.path().join(name);
            fs::write(&path, [0; 100]).unwrap();
            let used = SystemTime::now() - Duration::from_secs(days * DAY);
            let times = fs::FileTimes::new().set_modified(used).set_accessed(used);
            fs::File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
        }
        dir
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let files = [("a.bin", 3), ("b.u32.bin", 1), ("c.bin", 2), ("d.bin", 9), (".tmpx", 0)];
        let dir = cache(&files);
        fs::write(dir.path().join("a.source"), "text.txt").unwrap();
        let writer = fs::File::open(dir.path().join(".tmpx")).unwrap();
        writer.lock().unwrap();
        assert_eq!(names(dir.path()), [".tmpx", "b.u32.bin", "c.bin", "a.bin", "d.bin"]);
        assert_eq!(entries(dir.path()).unwrap()[3].source.as_deref(), Some("text.txt"));
        let limits = |bytes, days| CacheLimits { bytes, age: Duration::from_secs(days * DAY) };
        evict(dir.path(), limits(1000, 5)).unwrap();
        assert_eq!(names(dir.path()), [".tmpx", "b.u32.bin", "c.bin", "a.bin"]);
        evict(dir.path(), limits(200, 5)).unwrap();
        assert_eq!(names(dir.path()), [".tmpx", "b.u32.bin", "c.bin"]);
        assert!(!dir.path().join("a.source").exists());
        // The most recently used entry is kept under any limits.
        evict(dir.path(), limits(0, 0)).unwrap();
        assert_eq!(names(dir.path()), [".tmpx", "b.u32.bin"]);
        // An unfinished file is removed only after its writer is gone.
        assert_eq!(entries(dir.path()).unwrap()[0].source.as_deref(), Some("being written"));
        drop(writer);
        evict(dir.path(), limits(0, 0)).unwrap();
        assert_eq!(names(dir.path()), ["b.u32.bin"]);
        assert_eq!(names(&dir.path().join("none")), [""; 0]);
    }

    #[test]
    fn limits_come_from_variables() {
        let limits = |value: &str| {
            CacheLimits::from_variables(|name| (name == "DEEPBURN_CACHE_GB").then(|| value.into()))
        };
        assert_eq!(limits(""), CacheLimits::default());
        assert_eq!(limits("x"), CacheLimits::default());
        assert_eq!(limits("7").bytes, 7_000_000_000);
    }
}
