//! Files that are written at once or not at all: under a temporary name, which is then renamed.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use deepburn_files::PartialFile;

use crate::failure::Failure;

/// Writes a file under a temporary name and renames it, so that readers never see an incomplete
/// file.
///
/// # Errors
/// Returns an error that names the path and the remedy.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<(), String> {
    // The temporary file is in the same folder, because a rename works only within a file system.
    let partial = path.with_extension("partial");
    PartialFile::replace(path, partial, text).map_err(|error| {
        format!(
            "{} cannot be written: {error}; check that its folder still exists, its permissions and the free space there",
            path.display()
        )
    })
}

/// Refuses to replace files in the folder of a tool's output.
///
/// # Errors
/// Returns a user's mistake that names the first file that exists.
pub(crate) fn refuse_existing<'a>(
    folder: &Path,
    names: impl IntoIterator<Item = &'a str>,
) -> Result<(), Failure> {
    // `exists` follows links, so it would let a link be replaced whose target is not mounted.
    match names.into_iter().find(|name| folder.join(name).symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(name) => Err(Failure::mistake(format!(
            "{} exists and is not overwritten; give another folder",
            folder.join(name).display()
        ))),
    }
}

/// Returns whether two paths lead to one file or folder. One that does not exist is none.
pub(crate) fn is_same_file(one: &Path, other: &Path) -> bool {
    // Links and relative paths may lead to the same file.
    let [one, other] = [one, other].map(|path| fs::canonicalize(path).ok());
    one.is_some() && one == other
}

/// Copies a file under a temporary name and renames it. Folders in the path of `target` are
/// created.
///
/// # Errors
/// Returns the error of the operating system.
pub(crate) fn copy_whole(source: &Path, target: &Path) -> io::Result<()> {
    // The output of a job may be its pretrained model.
    if is_same_file(source, target) {
        return Ok(());
    }
    fs::create_dir_all(target.parent().unwrap_or(target))?;
    let mut file = PartialFile::beside(target)?;
    io::copy(&mut File::open(source)?, &mut file)?;
    file.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_a_removed_folder_is_named_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("removed/job.json");
        let message = write_whole(&path, "{}").unwrap_err();
        assert!(
            message.starts_with(&format!("{} cannot be written: ", path.display())),
            "{message}"
        );
        assert!(message.contains("check that its folder still exists"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_without_a_target_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("config.json");
        std::os::unix::fs::symlink("not/mounted", &link).unwrap();
        refuse_existing(folder.path(), ["model.safetensors"]).unwrap();
        let refused = refuse_existing(folder.path(), ["model.safetensors", "config.json"]);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("config.json exists and is not overwritten"), "{message}");
    }
}
