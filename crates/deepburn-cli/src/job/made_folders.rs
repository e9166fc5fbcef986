//! Folders that are created to check that they can be written to.
//!
//! Main type: [`MadeFolders`]. When it is dropped, it removes the folders that it has created,
//! unless they are kept. So a job that fails its checks leaves no folders.

use std::path::{Path, PathBuf};
use std::{fs, io, process};

/// The folders that one call has created.
#[derive(Debug)]
pub(crate) struct MadeFolders {
    /// Created folders, the innermost first.
    made: Vec<PathBuf>,
}

impl MadeFolders {
    /// Creates `folder` and its parents.
    ///
    /// # Errors
    /// Returns the error of the operating system if a folder cannot be created. Folders that were
    /// already created are removed.
    pub(crate) fn make(folder: &Path) -> io::Result<Self> {
        let is_missing = |it: &&Path| !it.as_os_str().is_empty() && !it.exists();
        let made = folder.ancestors().take_while(is_missing).map(Path::to_owned).collect();
        // If `create_dir_all` fails, dropping `folders` removes the folders that it has created
        // before.
        let folders = Self { made };
        fs::create_dir_all(folder)?;
        Ok(folders)
    }

    /// Creates `folder` and checks that files can be written in it.
    ///
    /// # Errors
    /// Returns the error of the operating system if `folder` cannot be created or written to. New
    /// folders are removed.
    pub(crate) fn make_writable(folder: &Path) -> io::Result<Self> {
        let folders = Self::make(folder)?;
        let probe = folder.join(format!(".writable-{}", process::id()));
        fs::write(&probe, b"")?;
        fs::remove_file(&probe)?;
        Ok(folders)
    }

    /// Keeps the folders.
    pub(crate) fn keep(mut self) {
        self.made.clear();
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        for folder in &self.made {
            // If another process has written to a folder, it is not empty and is not removed.
            _ = fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_folders_that_are_not_kept() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b/c");
        drop(MadeFolders::make_writable(&folder).unwrap());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        MadeFolders::make_writable(&folder).unwrap().keep();
        drop(MadeFolders::make(&folder.join("d")).unwrap());
        assert!(folder.is_dir() && !folder.join("d").exists());
    }

    #[test]
    fn leaves_nothing_after_a_failure() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        assert!(MadeFolders::make(&root.path().join("file/a")).is_err());
        let proc = Path::new("/proc/deepburn/a");
        assert!(MadeFolders::make(proc).is_err());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }
}
