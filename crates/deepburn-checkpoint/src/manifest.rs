//! `manifest.json`: the contents of a checkpoint and the checksums of its files.
//!
//! Main type: [`Manifest`]. The manifest contains the BLAKE3 hash of every rank's file and, as its
//! last field, the hash of all its bytes before that field. A changed byte in any file is therefore
//! detected, while the manifest remains plain JSON. Files with a correct hash but another format or
//! version are distinguished from damaged ones. The fields below `layout` are defined in `layout`
//! and `param_entry`, and the versions in `identity`.
//!
//! ```text
//! {
//!   "format": "deepburn-checkpoint", "version": 1, or 2 if parameters are omitted, or 3 of a pipeline,
//!                                             or 4 of hybrid sharding,
//!   "writer": …,
//!   "tag": "step-00000010", "id": 16 hexadecimal digits,
//!   "follows": the id of the latest checkpoint at the start of the save, or null,
//!   "saved_at": seconds since 1970,
//!   "run": {"step": …, "stage": …, "working": "BF16", "job": …, "metric": …, "state": {…}},
//!   "layout": {"world_size": …, "pipeline_stages": … of a pipeline,
//!              "replicas": … of hybrid sharding,
//!              "atoms": [{"path": …, "shape": […], "trainable": …,
//!              "aliases": […], "slots": [{"slot": "weights", "element": "F32"}, …],
//!              "kind": "buffer" of a buffer,
//!              "base": {"element": "F32", "checksum": …} if the values are omitted,
//!              "pipeline_stage": the stage that stores the arrays, if it is not 0}, …]},
//!   "ranks": [{"length": bytes, "checksum": …, "state": {…}}, …],
//!   "checksum": of everything before this field's comma
//! }
//! ```

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::identity::{FIRST_VERSION, FORMAT, Identity, NEWEST_VERSION};
use crate::{CheckpointError, ElementType, Layout, Tag};

/// The name of the file.
pub(crate) const MANIFEST: &str = "manifest.json";
/// The largest size of a manifest in bytes. A manifest with thousands of ranks and parameters has a
/// few million bytes.
const MAX_LEN: u64 = 1 << 28;
/// The text between the hashed part and the checksum.
const BEFORE_CHECKSUM: &str = ",\n  \"checksum\": \"";
/// The text after the checksum, at the end of a complete file.
const AFTER_CHECKSUM: &str = "\"\n}\n";
/// The number of hexadecimal digits of a hash.
const DIGITS: usize = 2 * blake3::OUT_LEN;

/// The state of a run on which all ranks agree when a checkpoint is saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The number of optimizer steps, including skipped ones.
    pub step: u64,
    /// The ZeRO stage of the run, 0 to 3. Files do not depend on it.
    pub stage: u8,
    /// The element type in which operations were computed.
    pub working: ElementType,
    /// The name of the run.
    pub job: String,
    /// The number by which [`Retention`](crate::Retention) compares checkpoints, such as the
    /// evaluation loss. Lower is better. A number that is not finite is stored as `None`.
    pub metric: Option<f64>,
    /// Everything else that the trainer needs to resume: counters, loss scale, schedule, versions.
    /// This crate does not interpret it. Integers and floating-point numbers are restored exactly.
    pub state: Value,
}

/// The record of a rank whose file is complete; see [`Save::commit`](crate::Save::commit).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankRecord {
    /// The rank that wrote the file.
    pub(crate) rank: usize,
    /// The id of the save that the file belongs to.
    pub(crate) id: String,
    /// The hash of the layout that this rank used.
    pub(crate) layout: String,
    /// The entry of the file in the manifest.
    pub(crate) file: RankEntry,
}

/// The entry of a rank in the manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RankEntry {
    /// The length of its file in bytes.
    pub(crate) length: u64,
    /// The BLAKE3 hash of its file as hexadecimal digits.
    pub(crate) checksum: String,
    /// The state of this rank only, such as its random stream and the position of its data loader.
    pub(crate) state: Value,
}

/// Everything about a checkpoint except the values of its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// The name of the format, [`FORMAT`].
    pub(crate) format: String,
    /// The version of the format, from [`FIRST_VERSION`] to [`NEWEST_VERSION`].
    pub(crate) version: u64,
    /// The name and version of the program.
    pub(crate) writer: String,
    /// The tag under which it was saved. The folder may have been renamed since.
    pub(crate) tag: Tag,
    /// The random id of the save, which all its files have.
    pub(crate) id: String,
    /// The id of the latest checkpoint when this save was started.
    pub(crate) follows: Option<String>,
    /// The time in seconds since 1970.
    pub(crate) saved_at: u64,
    /// The state on which all ranks agree.
    pub(crate) run: Run,
    /// The entries and the number of ranks, from which headers and offsets of all files follow.
    pub(crate) layout: Layout,
    /// The file of each rank, in rank order.
    pub(crate) ranks: Vec<RankEntry>,
}

impl Manifest {
    /// Returns the identity of the save that the files belong to.
    pub(crate) fn identity(&self) -> Identity {
        Identity { tag: self.tag.clone(), id: self.id.clone() }
    }

    /// Returns the text of the file and its checksum.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Records`] if a state would not be restored unchanged because it
    /// is nested too deeply or too large.
    pub(crate) fn to_text(&self, path: &Path) -> Result<(String, String), CheckpointError> {
        let refuse = |reason: String| CheckpointError::Records { reason };
        let json = serde_json::to_string_pretty(self)
            .map_err(|error| refuse(format!("the states are not valid JSON: {error}")))?;
        let Some(fields) = json.strip_suffix("\n}") else {
            unreachable!("a pretty object ends with its brace on a line of its own")
        };
        let checksum = blake3::hash(fields.as_bytes()).to_hex().to_string();
        let text = [fields, BEFORE_CHECKSUM, &checksum, AFTER_CHECKSUM].concat();
        if text.len() as u64 > MAX_LEN {
            return Err(refuse(format!(
                "the manifest would have {} bytes and {MAX_LEN} is the most; keep less in states",
                text.len()
            )));
        }
        // A checkpoint that cannot be read again is useless, so the text is parsed again before it
        // is written.
        match Self::parse(path, &text) {
            Ok((back, _)) if back == *self => Ok((text, checksum)),
            Ok(_) => Err(refuse("a state is not the same after it is written and read".into())),
            Err(error) => Err(refuse(format!("the states could not be read again: {error}"))),
        }
    }

    /// Reads and checks the manifest of the checkpoint in `folder`. Also returns its checksum.
    pub(crate) fn read(folder: &Path) -> Result<(Self, String), CheckpointError> {
        let path = folder.join(MANIFEST);
        let io = |source| CheckpointError::io("read", &path)(source);
        // The type is checked before the file is opened, because opening a pipe would wait for its
        // writer.
        let metadata = fs::metadata(&path).map_err(io)?;
        if !metadata.is_file() || metadata.len() > MAX_LEN {
            let reason = format!("it is not a regular file of at most {MAX_LEN} bytes");
            return Err(CheckpointError::damaged(&path, reason));
        }
        let mut bytes = Vec::new();
        // The file may have grown since the check.
        File::open(&path)
            .and_then(|file| file.take(MAX_LEN).read_to_end(&mut bytes))
            .map_err(io)?;
        let text = String::from_utf8(bytes)
            .map_err(|_| CheckpointError::damaged(&path, "it is not valid UTF-8"))?;
        Self::parse(&path, &text)
    }

    /// Checks a manifest's text and returns it with its checksum. `path` is for messages.
    ///
    /// The checksum is verified first, so everything that is parsed afterwards is exactly what was
    /// written. A mismatch that is found then is reported as an error of the writer, not as damage
    /// on the disk.
    fn parse(path: &Path, text: &str) -> Result<(Self, String), CheckpointError> {
        let Some((fields, checksum)) = split(text) else {
            return Err(without_checksum(path, text));
        };
        if blake3::hash(fields.as_bytes()).to_hex().as_str() != checksum {
            return Err(CheckpointError::damaged(path, "its checksum does not match its contents"));
        }
        // The checksum is computed in the same way in all versions, so a newer one is not taken for
        // damage.
        check_version(path, text)?;
        let sound = |fields: &str| -> serde_json::Result<Self> {
            serde_json::from_str(&format!("{fields}\n}}"))
        };
        // The checksum is correct, so the file was written in this form. The fields are parsed
        // without the checksum, which is not one of them.
        let manifest = sound(fields).map_err(|error| {
            CheckpointError::damaged(path, format!("it was written wrong: {error}"))
        })?;
        if manifest.ranks.len() != manifest.layout.world_size() {
            let reason = format!(
                "it was written wrong: {} files for {} ranks",
                manifest.ranks.len(),
                manifest.layout.world_size()
            );
            return Err(CheckpointError::damaged(path, reason));
        }
        Ok((manifest, checksum.to_owned()))
    }
}

/// Returns the fields of a manifest without the closing brace, and the checksum that follows them.
fn split(text: &str) -> Option<(&str, &str)> {
    let text = text.strip_suffix(AFTER_CHECKSUM)?;
    let (before, checksum) = text.split_at_checked(text.len().checked_sub(DIGITS)?)?;
    Some((before.strip_suffix(BEFORE_CHECKSUM)?, checksum))
}

/// Returns the error for a text that does not end like a manifest.
fn without_checksum(path: &Path, text: &str) -> CheckpointError {
    match check_version(path, text) {
        Err(error @ CheckpointError::Version { .. }) => error,
        // Valid JSON without the name of the format belongs to another program. A truncated
        // manifest is not valid JSON.
        Err(error)
            if serde_json::from_str::<IgnoredAny>(text).is_ok() && !text.contains(FORMAT) =>
        {
            error
        }
        _ => CheckpointError::damaged(path, "it does not end with its checksum"),
    }
}

/// Returns an error for other formats and other versions of this one.
fn check_version(path: &Path, text: &str) -> Result<(), CheckpointError> {
    #[derive(Deserialize)]
    struct FormatVersion {
        format: String,
        version: u64,
    }
    match serde_json::from_str(text) {
        Ok(FormatVersion { format, version }) if format == FORMAT => {
            if !(FIRST_VERSION..=NEWEST_VERSION).contains(&version) {
                let (path, supported) = (path.to_owned(), NEWEST_VERSION);
                return Err(CheckpointError::Version { path, found: version, supported });
            }
            Ok(())
        }
        _ => {
            let found = format!(
                "a file without `\"format\": \"{FORMAT}\"`; give the folder of a \
                                 checkpoint that DeepBurn wrote"
            );
            Err(CheckpointError::Foreign { path: path.to_owned(), found })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::{parameter, run};
    use serde_json::json;

    fn manifest(state: Value) -> Manifest {
        let entry = RankEntry { length: 5, checksum: "0".repeat(DIGITS), state };
        Manifest {
            format: FORMAT.into(),
            version: FIRST_VERSION,
            writer: "test 0.1".into(),
            tag: Tag::of_step(3),
            id: "0123456789abcdef".into(),
            follows: None,
            saved_at: 1_700_000_000,
            run: run(3),
            layout: Layout::new(vec![parameter("a", &[2])], 1).unwrap(),
            ranks: vec![entry],
        }
    }

    fn parse(text: &str) -> Result<Manifest, CheckpointError> {
        Manifest::parse(Path::new("manifest.json"), text).map(|(manifest, _)| manifest)
    }

    fn text(manifest: &Manifest) -> String {
        manifest.to_text(Path::new("manifest.json")).unwrap().0
    }

    #[test]
    fn numbers_are_restored_exactly() {
        let floats = [0.1, f64::MIN_POSITIVE, 5e-324, f64::MAX, 1.0 / 3.0, 123_456_789.123_456_78];
        let state = json!({ "u": u64::MAX, "i": i64::MIN, "f": floats, "text": "\u{1f525}\n\"" });
        let back = parse(&text(&manifest(state))).unwrap().ranks[0].state.clone();
        assert_eq!((back["u"].as_u64(), back["i"].as_i64()), (Some(u64::MAX), Some(i64::MIN)));
        for (float, found) in floats.iter().zip(back["f"].as_array().unwrap()) {
            assert_eq!(found.as_f64().unwrap().to_bits(), float.to_bits());
        }
    }

    #[test]
    fn it_is_plain_json() {
        let value: Value = serde_json::from_str(&text(&manifest(json!(null)))).unwrap();
        assert_eq!(value["format"], FORMAT);
        assert_eq!(value["checksum"].as_str().unwrap().len(), DIGITS);
    }

    #[test]
    fn states_that_would_not_be_restored_are_refused() {
        let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
        let error = manifest(deep).to_text(Path::new("m")).unwrap_err().to_string();
        assert!(error.contains("could not be read again"), "{error}");
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_refused() {
        let original = text(&manifest(json!({ "seed": 1 }))).into_bytes();
        for at in 0..original.len() {
            for bit in 0..8 {
                let mut bytes = original.clone();
                bytes[at] ^= 1 << bit;
                let Ok(text) = String::from_utf8(bytes) else { continue };
                assert!(parse(&text).is_err(), "bit {bit} of byte {at}");
            }
            assert!(parse(std::str::from_utf8(&original[..at]).unwrap()).is_err(), "{at}");
        }
    }

    #[test]
    fn other_versions_and_formats_are_distinguished_from_damage() {
        let newer = Manifest { version: 5, ..manifest(json!(null)) };
        let json = serde_json::to_string(&newer).unwrap();
        let error = parse(&json).unwrap_err();
        assert!(matches!(error, CheckpointError::Version { found: 5, supported: 4, .. }));
        for text in ["[]", "{}", r#"{"format":"pt","version":1}"#] {
            assert!(matches!(parse(text).unwrap_err(), CheckpointError::Foreign { .. }), "{text}");
        }
        let whole = text(&manifest(json!(null)));
        for text in ["", "\u{0}", &whole[..10], &whole[..whole.len() / 2]] {
            let error = parse(text).unwrap_err();
            assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
        }
    }

    #[test]
    fn every_rank_must_have_a_file() {
        let mut manifest = manifest(json!(null));
        manifest.ranks.clear();
        let error = manifest.to_text(Path::new("m")).unwrap_err().to_string();
        assert!(error.contains("0 files for 1 ranks"), "{error}");
    }
}
