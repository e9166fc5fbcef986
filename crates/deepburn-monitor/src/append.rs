//! Files to which complete records are appended, even if the disk is full at times.
//!
//! Main type: [`AppendFile`]. A record is written completely or not at all, so a program that
//! follows the file never reads a partial record. Records that did not fit on the disk are kept in
//! memory and written with the next one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file to which records are appended.
#[derive(Debug)]
pub(crate) struct AppendFile {
    /// Open for appending.
    file: File,
    path: PathBuf,
    /// The number of bytes of complete records in the file.
    len: u64,
    /// Records that were not written yet.
    waiting: Vec<u8>,
}

impl AppendFile {
    /// Opens an existing file of `len` bytes.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub(crate) fn open(path: &Path, len: u64) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).open(path)?;
        Ok(Self { file, path: path.to_path_buf(), len, waiting: Vec::new() })
    }

    /// Creates an empty file, which replaces an existing one.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        File::create(path)?;
        Self::open(path, 0)
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a record after the pending ones.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The file then contains no part of the
    /// record, and the next call writes it.
    pub(crate) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        self.waiting.extend_from_slice(record);
        self.flush()
    }

    /// Writes the pending records.
    ///
    /// # Errors
    /// Returns the same errors as [`append`](Self::append).
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        self.file.write_all(&self.waiting).inspect_err(|_| {
            // If the truncation fails too, there is no way to recover.
            _ = self.file.set_len(self.len);
        })?;
        self.len += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(())
    }

    /// Creates the file and its folder again if they were removed or replaced, and returns whether
    /// this was the case. Earlier records are lost.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub(crate) fn restore_if_removed(&mut self) -> io::Result<bool> {
        if self.is_in_place() {
            return Ok(false);
        }
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        // Another program may have created the file first, and written to it.
        self.len = self.file.metadata()?.len();
        Ok(true)
    }

    #[cfg(unix)]
    fn is_in_place(&self) -> bool {
        use std::os::unix::fs::MetadataExt;
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        match (fs::metadata(&self.path), self.file.metadata()) {
            (Ok(there), Ok(own)) => identity(there) == identity(own),
            // Any other error, such as a missing permission, does not show that the file is gone.
            (Err(error), _) => error.kind() != io::ErrorKind::NotFound,
            (Ok(_), Err(_)) => true,
        }
    }

    #[cfg(not(unix))]
    fn is_in_place(&self) -> bool {
        self.path.exists()
    }
}

/// Returns true for errors that are caused by missing space: a full disk, a quota, or a limit on
/// file sizes (`ulimit -f`).
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    [StorageFull, QuotaExceeded, FileTooLarge].contains(&error.kind())
}

#[cfg(test)]
mod tests {
    use super::*;

    impl AppendFile {
        /// Replaces the open file, to simulate a disk that fails.
        pub(crate) fn swap(&mut self, file: File) -> File {
            std::mem::replace(&mut self.file, file)
        }
    }

    #[test]
    fn records_wait_for_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records");
        let mut records = AppendFile::create(&path).unwrap();
        records.append(b"a\n").unwrap();
        let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let file = records.swap(full);
        for record in ["b\n", "c\n"] {
            assert!(is_full(&records.append(record.as_bytes()).unwrap_err()));
        }
        drop(records.swap(file));
        records.append(b"d\n").unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "a\nb\nc\nd\n");
    }

    #[test]
    fn a_removed_file_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/records");
        fs::create_dir(folder.path().join("run")).unwrap();
        let mut records = AppendFile::create(&path).unwrap();
        records.append(b"a\n").unwrap();
        assert!(!records.restore_if_removed().unwrap());
        fs::remove_dir_all(folder.path().join("run")).unwrap();
        assert!(records.restore_if_removed().unwrap());
        records.append(b"b\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "b\n");
        fs::write(folder.path().join("other"), "x\n").unwrap();
        fs::rename(folder.path().join("other"), &path).unwrap();
        assert!(records.restore_if_removed().unwrap());
        records.append(b"c\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "x\nc\n");
    }
}
