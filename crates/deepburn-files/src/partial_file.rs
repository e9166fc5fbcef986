//! A file that is written completely or not at all.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A file that has a temporary name until it is complete.
///
/// The file is removed if it is dropped before [`finish`](Self::finish) or
/// [`finish_synced`](Self::finish_synced). An existing file at the final path is not changed until
/// then.
///
/// The file has default permissions according to the umask. Writes are not buffered, so many small
/// writes should go through a [`BufWriter`](std::io::BufWriter).
#[derive(Debug)]
#[must_use = "a file that is not finished is removed"]
pub struct PartialFile {
    file: File,
    /// The final path.
    path: PathBuf,
    /// The temporary path; `None` after the file has been renamed.
    partial: Option<PathBuf>,
}

impl PartialFile {
    /// Creates a file at the temporary path `partial`, which will be renamed to `path`. An existing
    /// file at `partial`, for example from a killed program, is replaced.
    ///
    /// Both paths must be on the same file system, because files cannot be renamed across file
    /// systems.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn create(path: impl Into<PathBuf>, partial: impl Into<PathBuf>) -> io::Result<Self> {
        let (path, partial) = (path.into(), partial.into());
        // Truncates a file that a killed program left: its end would follow a shorter content.
        Ok(Self { file: File::create(&partial)?, path, partial: Some(partial) })
    }

    /// Creates a file at a hidden temporary path in the folder of `path`. The process ID is in its
    /// name, so that two programs that write the same file do not conflict.
    ///
    /// Such files that killed programs left for `path` are removed. The lock on the file of a
    /// running program keeps it. On a file system without locks, no file is removed.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn beside(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let name = path.file_name().map(|it| it.to_string_lossy()).unwrap_or_default();
        remove_leftovers(&path, &name);
        let partial = path.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        let file = Self::create(&path, partial)?;
        // Without the lock, which not every file system has, the file of a killed program stays.
        _ = file.file.try_lock();
        Ok(file)
    }

    /// Writes `content` to the temporary path `partial` and renames the file to `path`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written or renamed. The file at `path` is then
    /// unchanged.
    pub fn replace(
        path: impl Into<PathBuf>,
        partial: impl Into<PathBuf>,
        content: impl AsRef<[u8]>,
    ) -> io::Result<()> {
        let mut file = Self::create(path, partial)?;
        file.write_all(content.as_ref())?;
        file.finish()
    }

    /// Returns the final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open file, for example to flush it or to write through a second handle.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to its final path.
    ///
    /// Readers see the complete file. After a power failure the file may be empty, because the disk
    /// may store the new name before the content.
    ///
    /// # Errors
    /// Returns an error if the file cannot be renamed, for example because a folder has that name.
    pub fn finish(mut self) -> io::Result<()> {
        if let Some(partial) = &self.partial {
            // On an error, `partial` is still set, and dropping `self` removes the file.
            fs::rename(partial, &self.path)?;
        }
        // The temporary name is free again, and another writer may already use it.
        self.partial = None;
        Ok(())
    }

    /// Waits until the content is on the disk, then renames the file to its final path.
    ///
    /// After a power failure the path has either the old or the new content. The rename is only
    /// durable after the folder has been flushed too.
    ///
    /// # Errors
    /// Returns an error if the content cannot be flushed or the file cannot be renamed.
    pub fn finish_synced(self) -> io::Result<()> {
        self.file.sync_all()?;
        self.finish()
    }
}

impl Write for PartialFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for PartialFile {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        self.file.seek(position)
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // An error of this clean-up is ignored, because the original error is more important.
            _ = fs::remove_file(partial);
        }
    }
}

/// Removes the temporary files of killed programs for `path`, whose file name is `name`. A running
/// program has locked its file.
fn remove_leftovers(path: &Path, name: &str) {
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let process = found.to_str().and_then(|it| it.strip_prefix('.')?.strip_prefix(name));
        let process = process.and_then(|it| it.strip_prefix('.')?.strip_suffix(".partial"));
        let is_left = process.is_some_and(|it| it.parse::<u32>().is_ok());
        if is_left && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            // A file that cannot be removed does no harm.
            _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_leaves_no_partial_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, partial) = (folder.path().join("a"), folder.path().join(".a.partial"));
        fs::write(&partial, "left by a killed program, and longer").unwrap();
        for text in ["one", "two"] {
            PartialFile::replace(&path, &partial, text).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_not_finished_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (path, partial) = (folder.path().join("a"), folder.path().join("a.partial"));
        fs::write(&path, "old").unwrap();
        let mut file = PartialFile::create(&path, &partial).unwrap();
        file.write_all(b"new").unwrap();
        assert!(partial.exists() && file.path() == path);
        drop(file);
        assert!(!partial.exists());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    }

    #[test]
    fn files_of_killed_programs_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in [".a.csv.4194305.partial", ".a.csv.x.partial", ".b.csv.4194305.partial"] {
            fs::write(path(name), "").unwrap();
        }
        let running = File::create(path(".a.csv.4194306.partial")).unwrap();
        running.try_lock().unwrap();
        drop(PartialFile::beside(path("a.csv")).unwrap());
        let mut left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
        left.sort();
        let expected = [".a.csv.4194306.partial", ".a.csv.x.partial", ".b.csv.4194305.partial"];
        assert_eq!(left, expected);
    }

    #[test]
    fn a_failure_leaves_no_partial_file() {
        let folder = tempfile::tempdir().unwrap();
        let (path, partial) = (folder.path().join("a"), folder.path().join("a.partial"));
        fs::create_dir(&path).unwrap();
        assert!(PartialFile::replace(&path, &partial, "text").is_err());
        assert!(path.is_dir() && !partial.exists());
        let missing = folder.path().join("missing/a");
        assert!(PartialFile::replace(&missing, missing.with_extension("partial"), "text").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_replaced_file_has_default_permissions() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            let path = folder.path().join(name);
            fs::metadata(path).unwrap().permissions().mode()
        };
        let path = folder.path().join("a");
        PartialFile::replace(&path, path.with_extension("partial"), "text").unwrap();
        fs::write(folder.path().join("b"), "text").unwrap();
        assert_eq!(mode("a"), mode("b"));
    }
}
