//! Folders that are made to find out whether they can be.
//!
//! Main type: [`MadeFolders`], which removes what it has made unless it is kept, so that a job that is refused
//! leaves nothing behind.

use std::path::{Path, PathBuf};
use std::{fs, io, process};

/// The folders that one call has made.
#[derive(Debug)]
pub(crate) struct MadeFolders {
    /// The innermost first.
    made: Vec<PathBuf>,
}

impl MadeFolders {
    /// Makes `folder` and those that lead to it.
    ///
    /// # Errors
    /// One of them cannot be made; then none is left.
    pub(crate) fn make(folder: &Path) -> io::Result<Self> {
        let is_missing = |it: &&Path| !it.as_os_str().is_empty() && !it.exists();
        let made = folder.ancestors().take_while(is_missing).map(Path::to_owned).collect();
        let folders = Self { made };
        fs::create_dir_all(folder)?;
        Ok(folders)
    }

    /// Makes `folder` and makes sure that files can be written in it.
    ///
    /// # Errors
    /// It cannot be made or written to; then no folder is left that was not there.
    pub(crate) fn make_writable(folder: &Path) -> io::Result<Self> {
        let folders = Self::make(folder)?;
        let probe = folder.join(format!(".writable-{}", process::id()));
        fs::write(&probe, b"")?;
        fs::remove_file(&probe)?;
        Ok(folders)
    }

    /// Leaves the folders where they are.
    pub(crate) fn keep(mut self) {
        self.made.clear();
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        for folder in &self.made {
            // One that somebody else uses by now is not empty, and stays.
            _ = fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_kept_goes() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b/c");
        drop(MadeFolders::make_writable(&folder).unwrap());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        MadeFolders::make_writable(&folder).unwrap().keep();
        drop(MadeFolders::make(&folder.join("d")).unwrap());
        assert!(folder.is_dir() && !folder.join("d").exists());
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        assert!(MadeFolders::make(&root.path().join("file/a")).is_err());
        let proc = Path::new("/proc/deepburn/a");
        assert!(MadeFolders::make(proc).is_err());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
