//! TensorBoard event files.
//!
//! Main type: [`EventWriter`]. A file is a sequence of TFRecords, each with the masked CRC-32C of
//! its length and of its content. Each content is an `Event` of TensorBoard's protocol buffers. The
//! first event names the format, and each later one contains one scalar. A write returns after the
//! event was passed to the operating system, so TensorBoard can follow a run.

use crate::append::AppendFile;
use crate::error::MonitorError;
use prost::Message;
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The version of the format.
const FILE_VERSION: &str = "brain.Event:2";

/// The constant that is added to a rotated checksum, so that checksums of data that contains
/// checksums stay reliable.
const MASK_DELTA: u32 = 0xA282_EAD8;

/// The part of `tensorflow.Event` that scalars need.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Scalar>,
}

/// `tensorflow.Summary.Value` with its `simple_value`.
#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    // The field is optional, so that a 0 is written too: a value without a kind would be dropped.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// Writes scalars to a new event file.
#[derive(Debug)]
pub struct EventWriter {
    file: AppendFile,
}

impl EventWriter {
    /// Creates a file in `folder`, which is created if it does not exist. Files of earlier runs are
    /// kept, and TensorBoard reads all files of a folder.
    ///
    /// # Errors
    /// Returns an error if the folder or the file cannot be created.
    pub fn create(folder: &Path) -> Result<Self, MonitorError> {
        static FILES: AtomicU32 = AtomicU32::new(0);
        fs::create_dir_all(folder).map_err(|source| MonitorError::new("create", folder, source))?;
        let seconds = now() as u64;
        // A process may begin several runs within a second.
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let host = host_name();
        let process = std::process::id();
        let path = folder.join(format!("events.out.tfevents.{seconds}.{host}.{process}.{number}"));
        // A file of an earlier run must not be continued, because its first event names the format.
        let file = File::create_new(&path).and_then(|_| AppendFile::open(&path, 0));
        let file = file.map_err(|source| MonitorError::new("create", &path, source))?;
        let mut writer = Self { file };
        writer.write(0, What::FileVersion(FILE_VERSION.to_owned()))?;
        Ok(writer)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Appends a value of the curve `tag`. It is stored in 32 bits, TensorBoard's type; NaN and
    /// infinity are kept.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result<(), MonitorError> {
        let scalar = Scalar { tag: tag.to_owned(), simple_value: Some(value as f32) };
        // No run reaches more steps than the field can hold.
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        self.write(step, What::Summary(Summary { values: vec![scalar] }))
    }

    fn write(&mut self, step: i64, what: What) -> Result<(), MonitorError> {
        let event = Event { wall_time: now(), step, what: Some(what) };
        self.file
            .append(&record(&event.encode_to_vec()))
            .map_err(|source| MonitorError::new("write", self.file.path(), source))
    }
}

/// Returns a TFRecord: length, its checksum, content, its checksum, all little-endian.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(content.len() + 16);
    record.extend(length);
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(content);
    record.extend(masked_crc(content).to_le_bytes());
    record
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// Returns the time in seconds since 1970.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Returns the name of this machine in a form that is valid in a file name.
pub(crate) fn host_name() -> String {
    let named = fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("COMPUTERNAME").ok())
        .unwrap_or_default();
    let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let name: String = named.trim().chars().filter(plain).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the contents of a file's records, parsed as the format specifies.
    fn contents(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
        let mut contents = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(word(&bytes[8..]), masked(bitwise_crc(&bytes[..8])));
            let content = &bytes[12..12 + length];
            assert_eq!(word(&bytes[12 + length..]), masked(bitwise_crc(content)));
            contents.push(content.to_vec());
            bytes = &bytes[16 + length..];
        }
        contents
    }

    /// Computes CRC-32C bit by bit, with the reflected Castagnoli polynomial.
    fn bitwise_crc(bytes: &[u8]) -> u32 {
        let step = |crc: u32, _| (crc >> 1) ^ (0x82F6_3B78 * (crc & 1));
        !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
    }

    fn masked(crc: u32) -> u32 {
        crc.rotate_right(15).wrapping_add(0xA282_EAD8)
    }

    /// Returns the number and content of each field of a protocol buffer.
    fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
        fn varint(bytes: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..).step_by(7) {
                let byte = bytes[0];
                *bytes = &bytes[1..];
                value |= u64::from(byte & 0x7F) << shift;
                if byte < 0x80 {
                    return value;
                }
            }
            unreachable!("a varint ends")
        }
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let length = match key & 7 {
                0 => {
                    fields.push((key >> 3, varint(&mut bytes).to_le_bytes().to_vec()));
                    continue;
                }
                1 => 8,
                5 => 4,
                2 => varint(&mut bytes) as usize,
                wire => panic!("wire type {wire}"),
            };
            fields.push((key >> 3, bytes[..length].to_vec()));
            bytes = &bytes[length..];
        }
        fields
    }

    #[test]
    fn checksums_are_castagnoli_s() {
        // RFC 3720, B.4.
        for (bytes, crc) in [(vec![0; 32], 0x8A91_36AA), (vec![0xFF; 32], 0x62A8_AB43)] {
            assert_eq!((bitwise_crc(&bytes), crc32c::crc32c(&bytes)), (crc, crc));
        }
        assert_eq!(bitwise_crc(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn a_decoder_of_its_own_reads_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(&folder.path().join("a/b")).unwrap();
        writer.scalar("Train/Samples/lr", 32, 0.0).unwrap();
        writer.scalar("loss", 1 << 40, -2.5).unwrap();
        writer.scalar("loss", 64, f64::NAN).unwrap();
        let events = contents(&fs::read(writer.path()).unwrap());
        assert_eq!(events.len(), 4);
        let first = fields(&events[0]);
        assert_eq!(first[0].0, 1);
        let time = f64::from_le_bytes(first[0].1[..].try_into().unwrap());
        assert!(time > 1.7e9, "{time}");
        assert_eq!(first[1], (3, b"brain.Event:2".to_vec()));
        let scalar = |event: &[u8]| {
            let event = fields(event);
            assert_eq!(event.iter().map(|field| field.0).collect::<Vec<_>>(), [1, 2, 5]);
            let step = u64::from_le_bytes(event[1].1[..].try_into().unwrap());
            let summary = fields(&event[2].1);
            assert_eq!((summary.len(), summary[0].0), (1, 1));
            let value = fields(&summary[0].1);
            assert_eq!(value.iter().map(|field| field.0).collect::<Vec<_>>(), [1, 2]);
            let number = f32::from_le_bytes(value[1].1[..].try_into().unwrap());
            (String::from_utf8(value[0].1.clone()).unwrap(), step, number)
        };
        assert_eq!(scalar(&events[1]), ("Train/Samples/lr".to_owned(), 32, 0.0));
        assert_eq!(scalar(&events[2]), ("loss".to_owned(), 1 << 40, -2.5));
        assert!(scalar(&events[3]).2.is_nan());
    }

    #[test]
    fn every_event_is_there_when_its_call_returns_and_no_file_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = EventWriter::create(folder.path()).unwrap();
        let second = EventWriter::create(folder.path()).unwrap();
        assert_ne!(first.path(), second.path());
        for step in 1..=3 {
            first.scalar("a", step, 1.0).unwrap();
            assert_eq!(contents(&fs::read(first.path()).unwrap()).len() as u64, step + 1);
        }
        let name = first.path().file_name().unwrap().to_string_lossy().into_owned();
        let parts: Vec<_> = name.split('.').collect();
        assert_eq!(parts[..3], ["events", "out", "tfevents"]);
        assert_eq!((parts.len(), parts[5]), (7, &*std::process::id().to_string()));
    }

    #[test]
    fn errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join("taken");
        fs::write(&taken, "").unwrap();
        let message = EventWriter::create(&taken).unwrap_err().to_string();
        assert!(message.contains("taken"), "{message}");
    }
}
