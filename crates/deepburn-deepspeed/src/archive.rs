//! The zip archive that `torch.save` writes: one entry with a pickle, and one entry per storage.
//!
//! Main type: [`Archive`]. A storage is verified against its checksum in one streaming pass before
//! its first byte is returned. After that, any range is read directly, so a file of many gigabytes
//! is never held in memory. Compressed entries, entries without a checksum, big-endian values and
//! containers other than zip are errors.
//!
//! ```text
//! NAME/data.pkl       the pickle: every value, with references to storages
//! NAME/byteorder      "little" or "big"; missing in files of older versions
//! NAME/data/0         the bytes of storage 0, aligned to 64 bytes
//! NAME/data/1         …
//! NAME/version        the version of the format; not read
//! ```
//!
//! NAME is the name of the file without `.pt`. A storage is the memory of one or several tensors;
//! the pickle defines the offset and the shape with which each tensor views it. The directory of a
//! zip file is at its end and has the position, size and CRC-32 of each entry.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zip::read::{ArchiveOffset, Config};
use zip::{CompressionMethod, ZipArchive};

use crate::DeepSpeedError;

/// The largest pickle that is read, in bytes. A pickle contains names, shapes and settings, which
/// take a few hundred bytes per tensor.
const MAX_PICKLE: u64 = 64 << 20;

/// The number of bytes that are hashed at a time.
const BLOCK: usize = 1 << 20;

/// The position of an entry in the file.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// The offset of the first byte in the file.
    start: u64,
    /// The size in bytes, which is also the stored size.
    size: u64,
    /// The CRC-32 from the directory. `torch.save` writes 0 if its checksums are turned off.
    checksum: u32,
}

/// An open file of `torch.save`.
#[derive(Debug)]
pub(crate) struct Archive {
    /// The path, for messages.
    path: PathBuf,
    /// The open file. The lock is needed because all threads share the file position.
    file: Mutex<File>,
    /// The entries by name below the archive's only folder, such as `data.pkl` and `data/0`.
    entries: HashMap<String, Entry>,
    /// The names of entries whose checksum was verified.
    proved: Mutex<HashSet<String>>,
}

impl Archive {
    /// Opens a file and reads its directory.
    ///
    /// # Errors
    /// Returns an error if the file is not a zip archive of `torch.save` with little-endian values.
    pub(crate) fn open(path: &Path) -> Result<Self, DeepSpeedError> {
        let file = File::open(path).map_err(DeepSpeedError::io("open it", path))?;
        // The clone shares the position in the file, but the directory is read before anything else
        // is.
        let reader = file.try_clone().map_err(DeepSpeedError::io("open it", path))?;
        let entries = entries(path, reader)?;
        let file = Mutex::new(file);
        let archive = Self { path: path.to_owned(), file, entries, proved: Mutex::default() };
        // Files of older versions do not have this entry and are assumed to be little-endian.
        if archive.entries.contains_key("byteorder") && archive.bytes("byteorder", 64)? != b"little"
        {
            let remedy = "save it on a little-endian machine";
            return Err(DeepSpeedError::unsupported(path, "its values are big-endian", remedy));
        }
        Ok(archive)
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bytes of the pickle.
    ///
    /// # Errors
    /// Returns an error if there is no pickle, it is larger than any real one, or its checksum is
    /// wrong.
    pub(crate) fn pickle(&self) -> Result<Vec<u8>, DeepSpeedError> {
        self.bytes("data.pkl", MAX_PICKLE)
    }

    /// Returns the size of the storage `key` in bytes.
    ///
    /// # Errors
    /// Returns an error if there is no such storage.
    pub(crate) fn storage_size(&self, key: &str) -> Result<u64, DeepSpeedError> {
        Ok(self.entry(&storage(key))?.size)
    }

    /// Fills `bytes` with the storage `key` from byte `start` on. The storage is verified first.
    ///
    /// # Errors
    /// Returns an error if the storage is too short, its checksum is wrong, or the file cannot be
    /// read.
    pub(crate) fn read(
        &self,
        key: &str,
        start: u64,
        bytes: &mut [u8],
    ) -> Result<(), DeepSpeedError> {
        let name = storage(key);
        let entry = self.entry(&name)?;
        if start.checked_add(bytes.len() as u64).is_none_or(|end| end > entry.size) {
            return Err(self.damaged(&name, "is shorter than its tensors"));
        }
        self.prove(&name, entry)?;
        self.read_at(entry.start + start, bytes)
    }

    /// Reads a complete entry of at most `max` bytes.
    fn bytes(&self, name: &str, max: u64) -> Result<Vec<u8>, DeepSpeedError> {
        let entry = self.entry(name)?;
        if entry.size > max {
            let reason = format!("has {} bytes, where at most {max} are expected", entry.size);
            return Err(self.damaged(name, &reason));
        }
        self.prove(name, entry)?;
        let mut bytes = vec![0; entry.size as usize];
        self.read_at(entry.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the position of an entry.
    fn entry(&self, name: &str) -> Result<Entry, DeepSpeedError> {
        self.entries.get(name).copied().ok_or_else(|| self.damaged(name, "is missing"))
    }

    /// Verifies the checksum of an entry on first use. Other threads that need the entry wait.
    fn prove(&self, name: &str, entry: Entry) -> Result<(), DeepSpeedError> {
        // The lock is held while the entry is read, so that two threads do not verify the same
        // storage.
        let mut proved = lock(&self.proved);
        if proved.contains(name) {
            return Ok(());
        }
        let mut hasher = crc32fast::Hasher::new();
        let mut block = vec![0; BLOCK.min(entry.size as usize)];
        let mut done = 0;
        while done < entry.size {
            let len = (entry.size - done).min(BLOCK as u64) as usize;
            self.read_at(entry.start + done, &mut block[..len])?;
            hasher.update(&block[..len]);
            done += len as u64;
        }
        if hasher.finalize() != entry.checksum {
            // A CRC of 0 is possible but improbable. PyTorch writes 0 if checksums are turned off.
            let unchecked = entry.checksum == 0;
            let reason = if unchecked {
                "has no checksum, so that nothing proves it (torch.serialization.\
                 set_crc32_options(False) was in force; save with checksums)"
            } else {
                "is not what its checksum says"
            };
            return Err(self.damaged(name, reason));
        }
        proved.insert(name.to_owned());
        Ok(())
    }

    /// Reads at a position. The lock keeps the seek and the read together.
    fn read_at(&self, start: u64, bytes: &mut [u8]) -> Result<(), DeepSpeedError> {
        let mut file = lock(&self.file);
        file.seek(SeekFrom::Start(start))
            .and_then(|_| file.read_exact(bytes))
            .map_err(DeepSpeedError::io("read it", &self.path))
    }

    /// Returns the error for a damaged entry.
    fn damaged(&self, name: &str, reason: &str) -> DeepSpeedError {
        DeepSpeedError::damaged(&self.path, format!("its entry {name} {reason}"))
    }
}

/// Returns the entry name of a storage.
fn storage(key: &str) -> String {
    format!("data/{key}")
}

/// Locks a mutex. A panic cannot leave its value in an intermediate state, so a poisoned lock is
/// usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks the name of the archive's folder.
///
/// `torch.save` names the folder after the file without its extension, or `archive` if it writes to
/// a stream. A file that was renamed, for example to another rank's file, is therefore detected.
///
/// # Errors
/// Returns [`DeepSpeedError::Mixed`] if the archive has the name of another file.
fn check_name(path: &Path, root: &str) -> Result<(), DeepSpeedError> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    if root == name || root == "archive" {
        return Ok(());
    }
    Err(DeepSpeedError::mixed(path, format!("it was saved as {root}.pt")))
}

/// Returns the entries in the archive's directory, below the only folder.
///
/// The folder is found by the shortest name that ends in `data.pkl`. Entries outside of it are
/// ignored.
///
/// # Errors
/// Returns [`DeepSpeedError::Damaged`] for another container, a compressed or encrypted entry, an
/// entry beyond the end of the file, or an archive without a pickle; [`DeepSpeedError::Mixed`] for
/// a renamed file.
fn entries(path: &Path, file: File) -> Result<HashMap<String, Entry>, DeepSpeedError> {
    let size = file.metadata().map_err(DeepSpeedError::io("read it", path))?.len();
    let broken = |source: zip::result::ZipError| {
        DeepSpeedError::damaged(path, format!("no zip archive of torch.save: {source}"))
    };
    // `torch.save` writes nothing before the archive. If the library searches for its start, it
    // takes the second entry of the directory for the first where that entry is 76 bytes further
    // on: the size of the two ZIP64 records that `torch.save` adds after the directory. This is so
    // for all names of 21 letters, such as `layer_00-model_states`.
    let config = Config { archive_offset: ArchiveOffset::Known(0) };
    let mut archive = ZipArchive::with_config(config, BufReader::new(file)).map_err(broken)?;
    let mut listed = HashMap::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(broken)?;
        let name = entry.name().map_err(broken)?.to_string();
        // Ranges are read directly from the file, which requires entries without compression and
        // encryption.
        let stored = entry.compression() == CompressionMethod::Stored && !entry.encrypted();
        let start = entry.data_start().unwrap_or(u64::MAX);
        if !stored || entry.compressed_size() != entry.size() {
            let reason = format!("its entry {name} is compressed, which torch.save never does");
            return Err(DeepSpeedError::damaged(path, reason));
        }
        if start.checked_add(entry.size()).is_none_or(|end| end > size) {
            let reason = format!("its entry {name} goes beyond the end of the file");
            return Err(DeepSpeedError::damaged(path, reason));
        }
        let place = Entry { start, size: entry.size(), checksum: entry.crc32() };
        listed.insert(name, place);
    }
    let roots = listed.keys().filter_map(|name| name.strip_suffix("data.pkl"));
    // A deeper folder could contain another `data.pkl`. The pickle of the archive is the outermost
    // one.
    let root = roots.min_by_key(|root| root.len()).map(str::to_owned);
    let Some(root) = root else {
        return Err(DeepSpeedError::damaged(path, "there is no data.pkl in it"));
    };
    check_name(path, root.trim_end_matches('/'))?;
    let below = listed.into_iter();
    Ok(below
        .filter_map(|(name, entry)| Some((name.strip_prefix(&root)?.to_owned(), entry)))
        .collect())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use tempfile::TempDir;
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    /// Creates an archive with these entries.
    fn archive(entries: &[(&str, &[u8])]) -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.pt");
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        for (name, bytes) in entries {
            zip.start_file(*name, options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        zip.finish().unwrap();
        (folder, path)
    }

    fn error<T: std::fmt::Debug>(result: Result<T, DeepSpeedError>) -> String {
        result.unwrap_err().to_string()
    }

    const ENTRIES: &[(&str, &[u8])] = &[
        ("model/data.pkl", b"N."),
        ("model/byteorder", b"little"),
        ("model/data/0", b"0123456789"),
        ("model/data/1", b""),
    ];

    #[test]
    fn entries_are_read_by_range() {
        let (_folder, path) = archive(ENTRIES);
        let archive = Archive::open(&path).unwrap();
        assert_eq!(archive.pickle().unwrap(), b"N.");
        assert_eq!(archive.storage_size("0").unwrap(), 10);
        let mut bytes = [0; 3];
        archive.read("0", 4, &mut bytes).unwrap();
        assert_eq!(&bytes, b"456");
        archive.read("1", 0, &mut []).unwrap();
        assert!(error(archive.read("0", 8, &mut bytes)).contains("is shorter than its tensors"));
        assert!(error(archive.read("0", u64::MAX, &mut bytes)).contains("is shorter"));
        assert!(error(archive.storage_size("2")).contains("its entry data/2 is missing"));
    }

    #[test]
    fn every_flipped_bit_of_a_storage_is_detected() {
        let (_folder, path) = archive(ENTRIES);
        let sound = fs::read(&path).unwrap();
        let start = sound.windows(10).position(|bytes| bytes == b"0123456789").unwrap();
        for bit in 0..80 {
            let mut bytes = sound.clone();
            bytes[start + bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, bytes).unwrap();
            let archive = Archive::open(&path).unwrap();
            let message = error(archive.read("0", 0, &mut [0]));
            assert!(message.contains("data/0 is not what its checksum says"), "{message}");
        }
    }

    #[test]
    fn storages_without_a_checksum_are_refused() {
        let (_folder, path) = archive(ENTRIES);
        let mut bytes = fs::read(&path).unwrap();
        // The checksum is at byte 16 of an entry of the directory, the name at byte 46.
        let name = bytes.windows(12).rposition(|bytes| bytes == b"model/data/0").unwrap();
        bytes[name - 30..name - 26].fill(0);
        fs::write(&path, bytes).unwrap();
        let archive = Archive::open(&path).unwrap();
        let message = error(archive.read("0", 0, &mut [0]));
        assert!(message.contains("has no checksum, so that nothing proves it"), "{message}");
    }

    #[test]
    fn other_files_are_refused() {
        let (_folder, path) = archive(&[("model/data.pkl", b"N."), ("model/byteorder", b"big")]);
        assert!(error(Archive::open(&path)).contains("its values are big-endian"));
        let (_folder, path) = archive(&[("model/version", b"3")]);
        assert!(error(Archive::open(&path)).contains("there is no data.pkl in it"));
        fs::write(&path, b"no archive").unwrap();
        assert!(error(Archive::open(&path)).contains("no zip archive of torch.save"));
        let missing = path.with_file_name("other.pt");
        assert!(error(Archive::open(&missing)).contains("other.pt: cannot open it"));
    }
}
