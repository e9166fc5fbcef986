//! The zip archive that `torch.save` writes: one entry with a pickle, and one for each storage.
//!
//! Main type: [`Archive`]. A storage is proved by its checksum before the first byte of it is
//! handed out, in one streaming pass; afterwards any range is read where it lies, so that nothing
//! of a file of many gigabytes is held. Compressed entries, entries without a checksum, big-endian
//! values and other containers than zip are refused.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zip::{CompressionMethod, ZipArchive};

use crate::DeepSpeedError;

/// Longest pickle that is read. It has names, shapes and settings: some hundred bytes a tensor.
const MAX_PICKLE: u64 = 64 << 20;

/// Bytes that are checked at a time.
const BLOCK: usize = 1 << 20;

/// Where an entry lies in the file.
#[derive(Debug, Clone, Copy)]
struct Entry {
    start: u64,
    size: u64,
    checksum: u32,
}

/// An open file of `torch.save`.
#[derive(Debug)]
pub(crate) struct Archive {
    path: PathBuf,
    file: Mutex<File>,
    /// By name below the archive's one folder, such as `data.pkl` and `data/0`.
    entries: HashMap<String, Entry>,
    proved: Mutex<HashSet<String>>,
}

impl Archive {
    /// Opens a file and reads its directory.
    pub(crate) fn open(path: &Path) -> Result<Self, DeepSpeedError> {
        let file = File::open(path).map_err(DeepSpeedError::io("open it", path))?;
        let reader = file.try_clone().map_err(DeepSpeedError::io("open it", path))?;
        let entries = entries(path, reader)?;
        let file = Mutex::new(file);
        let archive = Self { path: path.to_owned(), file, entries, proved: Mutex::default() };
        if archive.entries.contains_key("byteorder") && archive.bytes("byteorder", 64)? != b"little"
        {
            let remedy = "save it on a little-endian machine";
            return Err(DeepSpeedError::unsupported(path, "its values are big-endian", remedy));
        }
        Ok(archive)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of the pickle.
    pub(crate) fn pickle(&self) -> Result<Vec<u8>, DeepSpeedError> {
        self.bytes("data.pkl", MAX_PICKLE)
    }

    /// Bytes of the storage `key`.
    pub(crate) fn storage_size(&self, key: &str) -> Result<u64, DeepSpeedError> {
        Ok(self.entry(&storage(key))?.size)
    }

    /// Fills `bytes` with those from `start` on of the storage `key`, which is proved first.
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

    /// A whole entry of at most `max` bytes.
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

    fn entry(&self, name: &str) -> Result<Entry, DeepSpeedError> {
        self.entries.get(name).copied().ok_or_else(|| self.damaged(name, "is missing"))
    }

    /// Compares an entry with its checksum, the first time. Others who want it wait meanwhile.
    fn prove(&self, name: &str, entry: Entry) -> Result<(), DeepSpeedError> {
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

    fn read_at(&self, start: u64, bytes: &mut [u8]) -> Result<(), DeepSpeedError> {
        let mut file = lock(&self.file);
        file.seek(SeekFrom::Start(start))
            .and_then(|_| file.read_exact(bytes))
            .map_err(DeepSpeedError::io("read it", &self.path))
    }

    fn damaged(&self, name: &str, reason: &str) -> DeepSpeedError {
        DeepSpeedError::damaged(&self.path, format!("its entry {name} {reason}"))
    }
}

fn storage(key: &str) -> String {
    format!("data/{key}")
}

/// Nothing is left half done by a panic behind these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the archive's directory lists, below the one folder that everything lies in.
fn entries(path: &Path, file: File) -> Result<HashMap<String, Entry>, DeepSpeedError> {
    let size = file.metadata().map_err(DeepSpeedError::io("read it", path))?.len();
    let broken = |source: zip::result::ZipError| {
        DeepSpeedError::damaged(path, format!("no zip archive of torch.save: {source}"))
    };
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(broken)?;
    let mut listed = HashMap::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(broken)?;
        let name = entry.name().map_err(broken)?.to_string();
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
    let root = roots.min_by_key(|root| root.len()).map(str::to_owned);
    let Some(root) = root else {
        return Err(DeepSpeedError::damaged(path, "there is no data.pkl in it"));
    };
    let below = listed.into_iter();
    Ok(below
        .filter_map(|(name, entry)| Some((name.strip_prefix(&root)?.to_owned(), entry)))
        .collect())
}
