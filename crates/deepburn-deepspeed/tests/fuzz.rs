//! Fuzzing of DeepSpeed checkpoints: reading a mutated checkpoint returns values or an error, and
//! never panics.
//!
//! Checksums detect random damage, so most inputs are zipped again after the mutation. This tests
//! the code behind the checksums. CONTRIBUTING.md has the command of the long run.

use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};

use deepburn_deepspeed::{Array, DeepSpeedCheckpoint, DeepSpeedError};
use deepburn_fuzz::{Mutator, SeedCorpus, SeedFile, fuzz, replay, scratch_folder};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// The smaller fixtures: every stage, frozen parameters, several groups, and other optimizers.
const FIXTURES: [&str; 10] = [
    "s0_fp16_fused",
    "s0_sgd",
    "s0_frozen",
    "s0_groups",
    "s1_bf16_f32_gradients",
    "s1_frozen",
    "s2_lion",
    "s2_frozen",
    "s3_adagrad",
    "s3_frozen",
];

/// Parts of pickles: values, marks, calls, and integers out of the expected range.
const OPCODES: [&[u8]; 40] = [
    b"N",
    b"\x88",
    b"K\x00",
    b"K\x01",
    b"M\xff\xff",
    b"J\xff\xff\xff\xff",
    b"J\xff\xff\xff\x7f",
    b"\x8a\x00",
    b"\x8a\x05\x00\x00\x00\x00\x01",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80",
    b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"G\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"(",
    b")",
    b"]",
    b"}",
    b"t",
    b"l",
    b"d",
    b"e",
    b"u",
    b"a",
    b"s",
    b"0",
    b"1",
    b"2",
    b"\x85",
    b"\x86",
    b"\x87",
    b"R",
    b"b",
    b"Q",
    b"h\x00",
    b"h\x01",
    b"q\x00",
    b"X\xff\xff\xff\xff",
    b"X\x00\x00\x00\x00",
    b"ccollections\nOrderedDict\n",
];

/// An archive of a fixture: its path, its bytes and its entries.
struct FixtureArchive {
    path: PathBuf,
    bytes: Vec<u8>,
    entries: Vec<(String, Vec<u8>)>,
}

impl FixtureArchive {
    fn read(path: PathBuf) -> Self {
        let bytes = fs::read(&path).unwrap();
        let mut zip = ZipArchive::new(Cursor::new(&bytes)).unwrap();
        let entries = (0..zip.len()).map(|index| {
            let mut entry = zip.by_index(index).unwrap();
            let mut contents = Vec::new();
            entry.read_to_end(&mut contents).unwrap();
            (entry.name().unwrap().to_string(), contents)
        });
        let entries = entries.collect();
        Self { path, bytes, entries }
    }

    /// Returns the archive with its pickle, or the whole archive, replaced by a file of the corpus.
    fn with(&self, kept: &SeedFile) -> Self {
        let (path, mut entries) = (self.path.clone(), self.entries.clone());
        let bytes = match kept.format() {
            "pickle" => {
                for (_, pickle) in entries.iter_mut().filter(|(name, _)| name.ends_with("data.pkl"))
                {
                    pickle.clone_from(&kept.bytes);
                }
                zipped(&entries)
            }
            "archive" => kept.bytes.clone(),
            format => panic!("{}: unknown format {format}", kept.name),
        };
        Self { path, bytes, entries }
    }

    /// Returns the bytes of the archive after random mutations.
    fn mutated(&self, mutator: &mut Mutator) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        match mutator.below(8) {
            0 => mutator.mutate(&mut bytes, &OPCODES),
            1 => {
                // The directory, which contains the offsets of the entries.
                let start = bytes.len() - bytes.len().min(100 * self.entries.len());
                mutator.set_integer(&mut bytes[start..]);
            }
            2 => {
                let mut entries = self.entries.clone();
                let at = mutator.below(entries.len());
                mutator.mutate(&mut entries[at].1, &OPCODES);
                bytes = zipped(&entries);
            }
            _ => {
                let mut entries = self.entries.clone();
                let pickle = entries.iter_mut().find(|(name, _)| name.ends_with("data.pkl"));
                mutate_pickle(&mut pickle.expect("every archive has one").1, mutator);
                bytes = zipped(&entries);
            }
        }
        bytes
    }
}

/// Changes integers of a pickle, or any of its bytes.
fn mutate_pickle(pickle: &mut Vec<u8>, mutator: &mut Mutator) {
    if mutator.below(3) == 0 {
        return mutator.mutate(pickle, &OPCODES);
    }
    for _ in 0..1 + mutator.below(2) {
        // One-byte, two-byte, four-byte and long integers. Some matches are bytes of strings that
        // look like opcodes.
        let width = |opcode| match opcode {
            b'K' => Some(1),
            b'M' => Some(2),
            b'J' => Some(4),
            _ => None,
        };
        let integers = pickle.iter().enumerate();
        let integers: Vec<_> =
            integers.filter_map(|(at, opcode)| Some(at..at + 1 + width(*opcode)?)).collect();
        if let Some(span) = integers.get(mutator.below(integers.len())).cloned() {
            let end = span.end.min(pickle.len());
            let integer = mutator.pick(&OPCODES[..14]).iter().copied();
            drop(pickle.splice(span.start..end, integer));
        }
    }
}

/// Returns an archive of these entries with correct checksums.
fn zipped(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, contents) in entries {
        zip.start_file(name.as_str(), options).unwrap();
        zip.write_all(contents).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// Copies the newest tag of each fixture into `root`.
fn copy_fixtures(root: &Path) -> Vec<Vec<FixtureArchive>> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let copy = |name: &str| {
        let tag = fs::read_to_string(data.join(name).join("latest")).unwrap();
        let folder = root.join(name);
        fs::create_dir(&folder).unwrap();
        let files = fs::read_dir(data.join(name).join(tag)).unwrap().map(|file| {
            let file = file.unwrap();
            let path = folder.join(file.file_name());
            fs::copy(file.path(), &path).unwrap();
            FixtureArchive::read(path)
        });
        let mut files: Vec<_> = files.collect();
        files.sort_by(|left, right| left.path.cmp(&right.path));
        files
    };
    FIXTURES.map(copy).into()
}

/// Reads all values of a checkpoint.
fn read(folder: &Path) -> Result<(), DeepSpeedError> {
    let checkpoint = DeepSpeedCheckpoint::open(folder, None)?;
    let _ = (checkpoint.version(), checkpoint.stage(), checkpoint.world_size());
    let _ = (checkpoint.counters(), checkpoint.schedule(), checkpoint.loss_scale());
    let verified = checkpoint.verify();
    for parameter in checkpoint.parameters() {
        let moments = checkpoint.moments().iter().map(|name| Array::Moment(name));
        for array in moments.chain([Array::Weights]) {
            if let Ok(values) = checkpoint.read(&parameter.name, array, 0..parameter.numel()) {
                assert_eq!(values.len(), parameter.numel());
            }
        }
    }
    for (name, _) in checkpoint.buffers() {
        let _ = checkpoint.read_buffer(name);
    }
    verified
}

#[test]
fn fuzzed_checkpoints_end_in_an_error_or_in_values() {
    let root = scratch_folder();
    let fixtures = copy_fixtures(root.path());
    for files in &fixtures {
        read(files[0].path.parent().unwrap()).unwrap();
    }
    let corpus = SeedCorpus::of_crate(env!("CARGO_MANIFEST_DIR"));
    replay(&corpus, |kept| {
        for file in fixtures.iter().flatten() {
            fs::write(&file.path, file.with(kept).bytes).unwrap();
            let _ = read(file.path.parent().unwrap());
            fs::write(&file.path, &file.bytes).unwrap();
        }
    });
    fuzz(1000, |mutator| {
        let files = mutator.pick(&fixtures);
        if let Some(kept) = corpus.sometimes(mutator) {
            let file = mutator.pick(files);
            fs::write(&file.path, file.with(kept).mutated(mutator)).unwrap();
            let _ = read(file.path.parent().unwrap());
            fs::write(&file.path, &file.bytes).unwrap();
            return;
        }
        let changed: Vec<_> =
            (0..1 + mutator.below(2)).map(|_| mutator.below(files.len())).collect();
        for at in &changed {
            fs::write(&files[*at].path, files[*at].mutated(mutator)).unwrap();
        }
        let _ = read(files[0].path.parent().unwrap());
        for at in changed {
            fs::write(&files[at].path, &files[at].bytes).unwrap();
        }
    });
}
