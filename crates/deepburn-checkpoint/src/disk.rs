//! File-system operations: durability of folders, free space, and atomic replacement.
//!
//! A file is durable after `fsync` on the file and on the folder that contains its entry. Both are
//! needed: a file that is flushed, but whose folder is not, may be gone after a power failure. An
//! atomic replacement writes a hidden file next to the target, flushes it, and renames it, so
//! readers see the old or the new content and never a part.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use deepburn_files::PartialFile;

use crate::CheckpointError;

/// Flushes a folder, so that created, renamed and removed entries survive a power failure.
pub(crate) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    // On Windows a folder cannot be opened, and its entries are journalled.
    if cfg!(not(unix)) {
        return Ok(());
    }
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .map_err(CheckpointError::io("flush", path))
}

/// Returns the sorted names in a folder. Names that are not UTF-8 are skipped, because this crate
/// never writes them.
pub(crate) fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let io = CheckpointError::io("read", folder);
    let names: io::Result<Vec<_>> = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
    let names = names.map_err(io)?;
    let mut names: Vec<_> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
    names.sort();
    Ok(names)
}

/// Returns an error if fewer than `needed` bytes are free in the folder.
///
/// The number is a snapshot: another program may use the space afterwards. The check exists so that
/// a save that cannot succeed fails before it writes gigabytes.
pub(crate) fn check_free(folder: &Path, needed: u64) -> Result<(), CheckpointError> {
    let free = fs4::available_space(folder)
        .map_err(CheckpointError::io("find out how much space is free", folder))?;
    if free < needed {
        return Err(CheckpointError::DiskFull { path: folder.to_owned(), needed, free });
    }
    Ok(())
}

/// Converts the error of a failed write of `path`, which needs `needed` bytes in total.
///
/// A full disk and an exceeded quota become [`CheckpointError::DiskFull`] with the space that is
/// free now, so that the message can say how to fix them.
pub(crate) fn write_error(path: &Path, needed: u64) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            let folder = path.parent().unwrap_or(path);
            // An exceeded quota may leave space on the disk, which this number then shows.
            let free = fs4::available_space(folder).unwrap_or(0);
            CheckpointError::DiskFull { path: path.to_owned(), needed, free }
        }
        _ => CheckpointError::Io { action: "write", path: path.to_owned(), source },
    }
}

/// Writes a small new file and waits until it is on the disk.
///
/// The file must not exist.
pub(crate) fn write_new(path: &Path, text: &[u8]) -> Result<(), CheckpointError> {
    File::create_new(path)
        .and_then(|mut file| {
            file.write_all(text)?;
            file.sync_all()
        })
        .map_err(write_error(path, text.len() as u64))
}

/// Replaces the small file at `path` atomically: at any moment it has the old or the new content.
/// The caller has to flush the folder.
pub(crate) fn replace(path: &Path, text: &[u8]) -> Result<(), CheckpointError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = path.with_file_name(format!(".{name}.partial"));
    // A process that was killed may have left this file.
    remove_file_if_there(&partial)?;
    let written = PartialFile::create(path, &partial).and_then(|mut file| {
        file.write_all(text)?;
        file.file().sync_all()?;
        Ok(file)
    });
    let file = written.map_err(write_error(&partial, text.len() as u64))?;
    file.finish().map_err(CheckpointError::io("replace", path))
}

/// Removes a file. A file that does not exist is not an error.
pub(crate) fn remove_file_if_there(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CheckpointError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Fills `buffer` from the bytes at `offset`. Independent of the file position, so threads can read
/// the same file.
pub(crate) fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset);
    #[cfg(windows)]
    {
        let (mut buffer, mut offset) = (buffer, offset);
        while !buffer.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(file, buffer, offset)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => (buffer, offset) = (&mut buffer[read..], offset + read as u64),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replacing_leaves_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("latest");
        fs::write(folder.path().join(".latest.partial"), "left by a kill").unwrap();
        for text in ["one", "two"] {
            replace(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        sync_folder(folder.path()).unwrap();
    }

    #[test]
    fn a_full_disk_is_reported_with_needed_and_free_bytes() {
        let folder = tempfile::tempdir().unwrap();
        check_free(folder.path(), 1).unwrap();
        let error = check_free(folder.path(), u64::MAX).unwrap_err();
        assert!(matches!(error, CheckpointError::DiskFull { needed: u64::MAX, free: 1.., .. }));
        assert!(error.to_string().contains("make room"), "{error}");
        let path = folder.path().join("file");
        let error = write_error(&path, 10)(io::ErrorKind::StorageFull.into());
        assert!(matches!(error, CheckpointError::DiskFull { needed: 10, .. }));
        let error = write_error(&path, 10)(io::ErrorKind::PermissionDenied.into());
        assert!(matches!(error, CheckpointError::Io { action: "write", .. }));
    }

    #[test]
    fn reading_beyond_the_end_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "abcdef").unwrap();
        let file = File::open(path).unwrap();
        let mut buffer = [0; 3];
        read_exact_at(&file, &mut buffer, 2).unwrap();
        assert_eq!(&buffer, b"cde");
        assert!(read_exact_at(&file, &mut buffer, 4).is_err());
        assert!(read_exact_at(&file, &mut buffer, u64::MAX - 1).is_err());
    }
}
