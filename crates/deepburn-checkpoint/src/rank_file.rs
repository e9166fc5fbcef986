//! The file of one rank, verified and open for reading.
//!
//! Main type: [`RankFile`]. The content of the file is not trusted. The manifest has its length and
//! hash, and the layout determines its header, with which the header in the file is compared. The
//! offsets of tensors are therefore known before the file is opened. Values are read with
//! positioned reads instead of a memory map, because truncating a mapped file would end the
//! process.
//!
//! ```text
//! 8 bytes           length of the header, little-endian, u64
//! JSON header       {"__metadata__": {"format": …, "version": …, "tag": …, "id": …,
//!                                     "rank": …, "world_size": …},
//!                    "linear.weight:weights": {"dtype": "F32", "shape": [N],
//!                                              "data_offsets": [START, END]}, …}
//! values            this rank's chunk of each array, wide element types first
//! ```
//!
//! The file is an ordinary safetensors file, so other tools can read it. Tensors are flat. Their
//! names consist of the module path and the kind of the array, separated by a colon.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::identity::FORMAT;
use crate::manifest::Manifest;
use crate::{CheckpointError, disk};

/// The number of bytes that are hashed at a time.
const CHUNK: usize = 1 << 20;
/// The beginning of a file of this format, after the length of its header.
const METADATA: &str = "{\"__metadata__\":";
/// The metadata must end within this number of bytes.
const METADATA_ROOM: u64 = 1 << 10;

/// A verified file.
#[derive(Debug)]
pub(crate) struct RankFile {
    /// The path, for messages.
    path: PathBuf,
    /// The open file. On Unix it stays readable if the checkpoint is deleted.
    file: File,
    /// The offset of each tensor in the file, by entry and array.
    starts: HashMap<(usize, usize), u64>,
}

impl RankFile {
    /// Opens and verifies the file of `rank` in the checkpoint in `folder`. The complete file is
    /// read once to hash it.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Mixed`] if the file's metadata names another save or another
    /// rank, [`CheckpointError::Damaged`] if it is missing or differs from the manifest in another
    /// way, or an I/O error.
    pub(crate) fn open(
        folder: &Path,
        manifest: &Manifest,
        rank: usize,
    ) -> Result<Self, CheckpointError> {
        let path = folder.join(rank_file_name(rank));
        let (layout, identity) = (&manifest.layout, manifest.identity());
        let segments = layout.segments(rank);
        let header = layout.header(rank, &segments, &identity).to_bytes();
        let io = |source| match source {
            source if io::Error::kind(&source) == io::ErrorKind::NotFound => {
                CheckpointError::damaged(&path, "it is missing")
            }
            source => CheckpointError::io("read", &path)(source),
        };
        // The type is checked before the file is opened, because opening a pipe would wait for its
        // writer.
        let metadata = fs::metadata(&path).map_err(io)?;
        if !metadata.is_file() {
            return Err(CheckpointError::damaged(&path, "it is not a regular file"));
        }
        let file = File::open(&path).map_err(io)?;
        let entry = &manifest.ranks[rank];
        let expected = identity.of_file(rank, layout.world_size());
        // The length comes first: a file that was cut short need not be hashed.
        if metadata.len() != entry.length {
            let reason = format!("it has {} bytes instead of {}", metadata.len(), entry.length);
            return Err(mixed(&path, &file, &expected)
                .unwrap_or_else(|| CheckpointError::damaged(&path, reason)));
        }
        if hash(&file).map_err(io)?.to_hex().as_str() != entry.checksum {
            return Err(mixed(&path, &file, &expected).unwrap_or_else(|| {
                CheckpointError::damaged(&path, "its checksum does not match its contents")
            }));
        }
        // The checksum is correct, so the file was written in this form.
        let mut found = vec![0; header.len()];
        let same = entry.length == layout.file_len(rank, &identity)
            && disk::read_exact_at(&file, &mut found, 0).map(|()| found == header).map_err(io)?;
        if !same {
            let reason = "it was written wrong: its header does not match the manifest";
            return Err(CheckpointError::damaged(&path, reason));
        }
        let data = header.len() as u64;
        let starts = segments
            .iter()
            .map(|segment| ((segment.entry, segment.state), data + segment.offset))
            .collect();
        Ok(Self { path, file, starts })
    }

    /// Fills `bytes` with the values of an array from byte `offset` of its tensor on.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Damaged`] if the file was truncated after it was verified, or an
    /// I/O error.
    pub(crate) fn read(
        &self,
        (entry, state): (usize, usize),
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let Some(start) = self.starts.get(&(entry, state)) else {
            unreachable!("every rank that owns elements has a tensor for each state")
        };
        disk::read_exact_at(&self.file, bytes, start + offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                CheckpointError::damaged(&self.path, "it was cut short while it was read")
            }
            _ => CheckpointError::io("read", &self.path)(error),
        })
    }
}

/// Hashes the file from its beginning.
fn hash(mut file: &File) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finalize()),
            Ok(read) => _ = hasher.update(&buffer[..read]),
            // A signal, for example of a resized terminal, must not end the read.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the error for a file whose metadata names another save; `None` if it has no such
/// metadata. The metadata is looked for in the first bytes only, because the header of a damaged
/// file cannot be trusted.
fn mixed(path: &Path, file: &File, expected: &Map<String, Value>) -> Option<CheckpointError> {
    let range = metadata_range(file.metadata().ok()?.len())?;
    let mut bytes = vec![0; usize::try_from(range.end - range.start).ok()?];
    disk::read_exact_at(file, &mut bytes, range.start).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let object = text.strip_prefix(METADATA)?;
    let found: Map<String, Value> = serde_json::from_str(&object[..object.find('}')? + 1]).ok()?;
    if found.get("format").and_then(Value::as_str) != Some(FORMAT) || found == *expected {
        return None;
    }
    let name = |name: &str| found.get(name).and_then(Value::as_str).unwrap_or("?");
    let found = format!(
        "rank {} of {} of {}, save {}",
        name("rank"),
        name("world_size"),
        name("tag"),
        name("id")
    );
    Some(CheckpointError::Mixed { path: path.to_owned(), found })
}

/// Returns the range of bytes in which a file of `length` bytes has its metadata.
fn metadata_range(length: u64) -> Option<Range<u64>> {
    (length > 8).then(|| 8..length.min(METADATA_ROOM))
}

/// Returns the name of the file of `rank`.
pub(crate) fn rank_file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::{TempRoot, save};

    fn open(folder: &Path, rank: usize) -> Result<RankFile, CheckpointError> {
        RankFile::open(folder, &Manifest::read(folder).unwrap().0, rank)
    }

    #[test]
    fn files_of_other_saves_are_reported_as_mixed() {
        let root = TempRoot::new();
        let [first, second] = [1, 2].map(|step| save(&root, step, 2));
        open(&first, 1).unwrap();
        fs::copy(second.join(rank_file_name(1)), first.join(rank_file_name(1))).unwrap();
        let error = open(&first, 1).unwrap_err();
        assert!(matches!(error, CheckpointError::Mixed { .. }), "{error}");
        assert!(error.to_string().contains("rank 1 of 2 of step-00000002"), "{error}");
        // A file of another rank of the same save is detected too.
        fs::copy(first.join(rank_file_name(0)), first.join(rank_file_name(1))).unwrap();
        let error = open(&first, 1).unwrap_err().to_string();
        assert!(error.contains("rank 0 of 2 of step-00000001"), "{error}");
    }

    #[test]
    fn other_contents_are_reported_as_damage() {
        let root = TempRoot::new();
        let folder = save(&root, 1, 1);
        let path = folder.join(rank_file_name(0));
        let length = fs::metadata(&path).unwrap().len() as usize;
        let huge = [&u64::MAX.to_le_bytes()[..], &vec![b'{'; length - 8]].concat();
        for contents in [vec![], vec![1; 7], vec![0; length], huge, vec![0; length + 1]] {
            fs::write(&path, contents).unwrap();
            let error = open(&folder, 0).unwrap_err();
            assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        }
        fs::remove_file(&path).unwrap();
        assert!(open(&folder, 0).unwrap_err().to_string().contains("it is missing"));
        fs::create_dir(&path).unwrap();
        assert!(open(&folder, 0).unwrap_err().to_string().contains("it is not a regular file"));
    }

    /// An attacker who can forge checksums cannot read beyond the end of the file.
    #[test]
    fn a_forged_file_is_not_read_out_of_bounds() {
        let root = TempRoot::new();
        let folder = save(&root, 1, 1);
        let path = folder.join(rank_file_name(0));
        let (mut manifest, _) = Manifest::read(&folder).unwrap();
        for contents in [&b"short"[..], &[0; 5000]] {
            fs::write(&path, contents).unwrap();
            manifest.ranks[0].length = contents.len() as u64;
            manifest.ranks[0].checksum = blake3::hash(contents).to_hex().to_string();
            let error = RankFile::open(&folder, &manifest, 0).unwrap_err().to_string();
            assert!(error.contains("written wrong"), "{error}");
        }
    }

    #[test]
    fn a_file_cut_short_after_it_was_verified_is_an_error() {
        let root = TempRoot::new();
        let folder = save(&root, 1, 1);
        let file = open(&folder, 0).unwrap();
        let mut bytes = [0; 4];
        file.read((0, 0), 0, &mut bytes).unwrap();
        File::options().write(true).open(&file.path).unwrap().set_len(20).unwrap();
        let error = file.read((0, 0), 0, &mut bytes).unwrap_err().to_string();
        assert!(error.contains("cut short"), "{error}");
    }
}
