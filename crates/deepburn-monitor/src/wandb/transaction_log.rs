//! W&B's transaction log, the format of a `.wandb` file: records in blocks, as in LevelDB's log.
//!
//! Main types: [`TransactionLog`], which appends records, and [`StoredRecords`], which reads them.
//! Source: `core/pkg/leveldb/record.go` of W&B.
//!
//! ```text
//! file    ":W&B", 0xBEE1 (u16), version 0 (u8), then chunks
//! chunk   CRC-32 of type and data (u32), length of the data (u16), type (u8), data
//! type    1 a whole record, 2 its first part, 3 a middle part, 4 its last part
//! ```
//!
//! Numbers are little-endian. A chunk lies in one block of 32 KiB, and the header of the file is
//! part of the first block. If fewer than 7 bytes are left in a block, they are zeros.

use std::fs::File;
use std::io;
use std::path::Path;

use prost::Message;

use super::record::{Record, RecordKind};
use crate::append::AppendFile;

/// The header of a file: magic bytes and version 0.
const HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xE1, 0xBE, 0];
/// The bytes of a block.
const BLOCK: usize = 32 * 1024;
/// The bytes of a chunk before its data: checksum, length and type.
const CHUNK_HEADER: usize = 7;

/// A whole record.
const FULL: u8 = 1;
/// The first part of a record.
const FIRST: u8 = 2;
/// A part between the first and the last one.
const MIDDLE: u8 = 3;
/// The last part of a record.
const LAST: u8 = 4;

/// Appends records to a new file. A record has been passed to the operating system when the call
/// returns.
#[derive(Debug)]
pub(super) struct TransactionLog {
    pub(super) file: AppendFile,
    /// The bytes of the file, including those that wait for room on the disk.
    position: usize,
    num_records: i64,
}

impl TransactionLog {
    /// Creates a file, which must not exist.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        File::create_new(path)?;
        let file = AppendFile::open(path, 0)?;
        Ok(Self { file, position: 0, num_records: 0 })
    }

    /// Returns the path of the file.
    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Appends records. All of them are written in one call, so a killed process does not separate
    /// them.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The records are kept and written with the
    /// next ones.
    pub(super) fn append(&mut self, kinds: Vec<RecordKind>) -> io::Result<()> {
        let mut bytes = Vec::new();
        // With the first records, so that a file never has a header alone.
        if self.position == 0 {
            bytes.extend(HEADER);
        }
        for kind in kinds {
            self.num_records += 1;
            let record = Record { num: self.num_records, kind: Some(kind) };
            push_record(&mut bytes, self.position, &record.encode_to_vec());
        }
        self.position += bytes.len();
        self.file.append(&bytes)
    }
}

/// Appends a record to `bytes`, which begin at `position` of the file.
fn push_record(bytes: &mut Vec<u8>, position: usize, mut data: &[u8]) {
    let mut is_first = true;
    loop {
        let mut left = BLOCK - (position + bytes.len()) % BLOCK;
        if left < CHUNK_HEADER {
            bytes.resize(bytes.len() + left, 0);
            left = BLOCK;
        }
        // A block with room for the header only gets a chunk without data, as in W&B's own writer.
        let part;
        (part, data) = data.split_at(data.len().min(left - CHUNK_HEADER));
        let is_last = data.is_empty();
        let kind = match (is_first, is_last) {
            (true, true) => FULL,
            (true, false) => FIRST,
            (false, false) => MIDDLE,
            (false, true) => LAST,
        };
        bytes.extend(checksum(kind, part).to_le_bytes());
        // A part is shorter than a block, so its length fits.
        bytes.extend((part.len() as u16).to_le_bytes());
        bytes.push(kind);
        bytes.extend(part);
        if is_last {
            return;
        }
        is_first = false;
    }
}

/// Returns the CRC-32 (IEEE) of a chunk.
fn checksum(kind: u8, data: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[kind]);
    hasher.update(data);
    hasher.finalize()
}

/// A record of a file, and where it lies.
#[derive(Debug)]
pub(super) struct StoredRecord {
    pub(super) record: Record,
    /// The bytes of the file before the record.
    pub(super) start: u64,
    /// The bytes of the file up to the end of the record.
    pub(super) end: u64,
}

/// The complete records at the beginning of a file. They end before the first damaged or incomplete
/// one.
pub(super) struct StoredRecords<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> StoredRecords<'a> {
    /// Reads the content of a file. A content without the header has no records.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        let position = if bytes.starts_with(&HEADER) { HEADER.len() } else { bytes.len() };
        Self { bytes, position }
    }

    /// Returns the type and the data of the next chunk; `None` if it is incomplete or damaged.
    fn chunk(&mut self) -> Option<(u8, &'a [u8])> {
        let left = BLOCK - self.position % BLOCK;
        if left < CHUNK_HEADER {
            self.position += left;
        }
        let rest = self.bytes.get(self.position..)?;
        let (header, rest) = rest.split_at_checked(CHUNK_HEADER)?;
        let &[a, b, c, d, low, high, kind] = header else { return None };
        let data = rest.get(..usize::from(u16::from_le_bytes([low, high])))?;
        if checksum(kind, data) != u32::from_le_bytes([a, b, c, d]) {
            return None;
        }
        self.position += CHUNK_HEADER + data.len();
        Some((kind, data))
    }

    /// Returns the next record, with the positions of its begin and end.
    fn record(&mut self) -> Option<StoredRecord> {
        let start = self.position as u64;
        let (mut data, mut is_first) = (Vec::new(), true);
        loop {
            let (kind, part) = self.chunk()?;
            // A part without its beginning, or a second beginning.
            if is_first != matches!(kind, FULL | FIRST) {
                return None;
            }
            is_first = false;
            data.extend(part);
            if matches!(kind, FULL | LAST) {
                let record = Record::decode(&data[..]).ok()?;
                return Some(StoredRecord { record, start, end: self.position as u64 });
            }
        }
    }
}

impl Iterator for StoredRecords<'_> {
    type Item = StoredRecord;

    fn next(&mut self) -> Option<StoredRecord> {
        let record = self.record();
        if record.is_none() {
            // What follows damage is not trusted.
            self.position = self.bytes.len();
        }
        record
    }
}
