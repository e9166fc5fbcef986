//! Fuzzing of checkpoints: reading a mutated checkpoint returns values or an error, and never
//! panics.
//!
//! Checksums detect random damage, so the checksums of most inputs are corrected after the
//! mutation. This tests the code behind the checksums. CONTRIBUTING.md has the command of the long
//! run.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepburn_checkpoint::{
    BaseValues, Checkpoint, CheckpointError, Consolidation, ElementType, EntryKind, Layout,
    ParamEntry, RankWriter, Retention, Run, Save, StateKind, StoredState, Tag, consolidate,
};
use deepburn_fuzz::{
    JSON_TOKENS, Mutator, SeedCorpus, SeedFile, fuzz, patched, replay, scratch_folder,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const RANKS: usize = 2;
const MANIFEST: &str = "manifest.json";

fn parameter(path: &str, shape: &[usize], states: &[(StateKind, ElementType)]) -> ParamEntry {
    let states = states.iter().cloned().map(|(kind, element)| StoredState { kind, element });
    ParamEntry {
        path: path.into(),
        shape: shape.into(),
        kind: EntryKind::Parameter,
        trainable: true,
        aliases: vec![],
        states: states.collect(),
        base: None,
        pipeline_stage: 0,
    }
}

/// The number of elements of the omitted parameter. All of them are 1.
const OMITTED: usize = 3;

/// A trained, a frozen, a tied and an omitted parameter, and a buffer of bools.
fn layout() -> Arc<Layout> {
    let (weights, moment) = (StateKind::Weights, StateKind::moment("exp_avg"));
    let trained = [
        (weights.clone(), ElementType::F32),
        (moment, ElementType::F32),
        (StateKind::Gradient, ElementType::F16),
    ];
    let mut tied = parameter("a", &[3, 4], &trained);
    tied.aliases = vec!["head".into()];
    let mut frozen = parameter("frozen", &[5], &[(weights.clone(), ElementType::Bf16)]);
    frozen.trainable = false;
    let mut mask = parameter("mask", &[7], &[(weights, ElementType::Bool)]);
    (mask.kind, mask.trainable) = (EntryKind::Buffer, false);
    let mut omitted = parameter("omitted", &[OMITTED], &[]);
    let bytes = [1_f32; OMITTED].map(f32::to_le_bytes);
    let base = BaseValues::of(ElementType::F32, bytes.as_flattened());
    (omitted.trainable, omitted.base) = (false, Some(base));
    let trained = parameter("b", &[1], &trained);
    Arc::new(Layout::new(vec![tied, trained, frozen, mask, omitted], RANKS).unwrap())
}

fn save(root: &Path, step: u64) {
    let layout = layout();
    let save = Save::begin(root, Tag::of_step(step), layout.clone()).unwrap();
    let write = |rank| {
        let mut writer = RankWriter::create(save.ticket(), layout.clone(), rank).unwrap();
        for segment in layout.segments(rank) {
            let entry = &layout.entries()[segment.entry];
            let StoredState { kind, element } = &entry.states[segment.state];
            let bytes = vec![1; segment.range.len() * element.size()];
            writer.write_bytes(&entry.path, kind, *element, &bytes).unwrap();
        }
        writer.finish(json!({ "seed": rank })).unwrap()
    };
    let records = (0..RANKS).map(write).collect();
    let (job, state) = ("fuzz".to_owned(), json!({"optimizer_steps": step, "scale": 65536.0}));
    let (metric, working) = (Some(0.5), ElementType::Bf16);
    save.commit(records, Run { step, stage: 2, working, job, metric, state }).unwrap();
}

/// The files of a folder of checkpoints, with relative paths.
#[derive(Clone)]
struct Files(Vec<(PathBuf, Vec<u8>)>);

impl Files {
    /// Two checkpoints, and `latest`, which names the later one.
    fn sound() -> Self {
        let root = scratch_folder();
        (1..3).for_each(|step| save(root.path(), step));
        let names = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"];
        let paths = ["step-00000002", "step-00000001"]
            .into_iter()
            .flat_map(|tag| names.map(|name| Path::new(tag).join(name)));
        let read = |path: PathBuf| (path.clone(), fs::read(root.path().join(path)).unwrap());
        Self(paths.chain([PathBuf::from("latest")]).map(read).collect())
    }

    fn get(&mut self, path: impl AsRef<Path>) -> &mut Vec<u8> {
        let found = self.0.iter_mut().find(|(found, _)| found == path.as_ref());
        &mut found.expect("a file of the sound folder").1
    }

    fn write(&self, root: &Path) {
        // Removes the files of the previous input, including exports.
        for entry in fs::read_dir(root).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }
        for (path, contents) in &self.0 {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        }
    }

    fn mutate(&mut self, mutator: &mut Mutator) {
        match mutator.below(8) {
            0 => {
                let at = mutator.below(self.0.len());
                mutator.mutate(&mut self.0[at].1, &JSON_TOKENS);
            }
            1..=4 => self.change_manifest(|fields| mutator.mutate_json(fields)),
            _ => self.mutate_rank(mutator),
        }
    }

    /// Replaces a file by a file of the corpus and corrects the checksums.
    fn put(&mut self, kept: &SeedFile) {
        match kept.format() {
            "latest" => *self.get("latest") = kept.bytes.clone(),
            "manifest" => self.change_manifest(|fields| {
                let whole = [&fields[..], b"\n}"].concat();
                let text = patched(&whole, &kept.bytes);
                *fields = text.strip_suffix(b"\n}").unwrap().to_vec();
            }),
            "rank" => self.change_rank(0, |file| {
                // Every save has another id, which its files must contain.
                let start = b"\"id\":\"";
                let at = file.windows(start.len()).position(|window| window == start).unwrap();
                let id = String::from_utf8(file[at..][start.len()..][..16].to_vec()).unwrap();
                *file = replaced(&kept.bytes, b"0123456789abcdef", id.as_bytes());
            }),
            format => panic!("{}: unknown format {format}", kept.name),
        }
    }

    /// Changes the file of a rank in a random way.
    fn mutate_rank(&mut self, mutator: &mut Mutator) {
        let rank = mutator.below(RANKS);
        self.change_rank(rank, |file| mutator.mutate_safetensors(file));
    }

    /// Changes the file of a rank and corrects its length and checksum in the manifest.
    fn change_rank(&mut self, rank: usize, change: impl FnOnce(&mut Vec<u8>)) {
        let path = format!("step-00000002/rank-{rank:05}.safetensors");
        let file = self.get(path);
        change(file);
        let (length, checksum) = (file.len(), blake3::hash(file).to_hex().to_string());
        self.change_manifest(|fields| {
            let text = [&fields[..], b"\n}"].concat();
            // An earlier change may have made the manifest invalid.
            let Ok(mut manifest) = serde_json::from_slice::<Value>(&text) else { return };
            let Some(entry) = manifest.pointer_mut(&format!("/ranks/{rank}")) else { return };
            (entry["length"], entry["checksum"]) = (length.into(), checksum.into());
            let text = serde_json::to_string_pretty(&manifest).unwrap();
            *fields = text.strip_suffix("\n}").unwrap().as_bytes().to_vec();
        });
    }

    /// Changes the fields of the later manifest, and corrects its checksum there and in `latest`.
    fn change_manifest(&mut self, change: impl FnOnce(&mut Vec<u8>)) {
        let manifest = self.get(Path::new("step-00000002").join(MANIFEST));
        let seal = b",\n  \"checksum\": \"";
        let end = manifest.windows(seal.len()).rposition(|window| window == seal);
        // An earlier change may have removed the checksum.
        let Some(end) = end else { return };
        manifest.truncate(end);
        change(manifest);
        let checksum = blake3::hash(manifest).to_hex().to_string();
        manifest.extend([&seal[..], checksum.as_bytes(), b"\"\n}\n"].concat());
        *self.get("latest") = format!("step-00000002\n{checksum}\n").into_bytes();
    }
}

/// Returns `bytes` with `old` replaced by `new`, which has the same length.
fn replaced(bytes: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if let Some(at) = bytes.windows(old.len()).position(|window| window == old) {
        bytes[at..at + old.len()].copy_from_slice(new);
    }
    bytes
}

/// Applies a random operation of the crate to a folder of checkpoints.
fn visit(root: &Path, mutator: &mut Mutator) {
    if mutator.below(4) == 0 {
        let _ = Checkpoint::open_intact(root, None);
        let _ = Retention { keep_last: NonZeroUsize::new(1), keep_best: 0 }.apply(root, Some(1));
        let _ = Save::begin(root, Tag::of_step(3), layout());
        return;
    }
    let Ok(mut checkpoint) = Checkpoint::open(root, None) else { return };
    checkpoint.set_base(|_| Ok(vec![1.0; OMITTED]));
    match mutator.below(3) {
        0 => drop(checkpoint.describe()),
        1 => drop(resume(&checkpoint, 1 + mutator.below(4))),
        _ => export(&checkpoint, &root.join("export"), mutator),
    }
}

/// Reads the segments that each of `ranks` ranks would own.
fn resume(checkpoint: &Checkpoint, ranks: usize) -> Result<(), CheckpointError> {
    let layout = Layout::new(checkpoint.layout().entries().to_vec(), ranks)?;
    for rank in 0..ranks {
        for segment in layout.segments(rank) {
            let ParamEntry { path, states, .. } = &layout.entries()[segment.entry];
            let values =
                checkpoint.read(path, &states[segment.state].kind, segment.range.clone())?;
            assert_eq!(values.len(), segment.range.len());
        }
    }
    Ok(())
}

/// Exports the weights. If files are written, they must be valid safetensors.
fn export(checkpoint: &Checkpoint, out: &Path, mutator: &mut Mutator) {
    let element = *mutator.pick(&[ElementType::F32, ElementType::F16, ElementType::Bf16]);
    let max_shard_bytes = *mutator.pick(&[0, 40, u64::MAX]);
    let what = Consolidation { element, max_shard_bytes };
    let Ok(map) = checkpoint.weight_map() else { return };
    let Ok(done) = consolidate(checkpoint, out, &what, &map) else { return };
    for file in done.files {
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            SafeTensors::deserialize(&fs::read(file).unwrap()).unwrap();
        }
    }
}

#[test]
fn fuzzed_checkpoints_end_in_an_error_or_in_values() {
    let (sound, root) = (Files::sound(), scratch_folder());
    let corpus = SeedCorpus::of_crate(env!("CARGO_MANIFEST_DIR"));
    replay(&corpus, |kept| {
        let mut files = sound.clone();
        files.put(kept);
        // The seeds cover every operation.
        for seed in 0..24 {
            files.write(root.path());
            visit(root.path(), &mut Mutator::new(seed));
        }
        if kept.file_name().starts_with("sound") {
            files.write(root.path());
            resume(&Checkpoint::open(root.path(), None).unwrap(), 3).unwrap();
        }
    });
    fuzz(2000, |mutator| {
        let mut files = sound.clone();
        if let Some(kept) = corpus.sometimes(mutator) {
            files.put(kept);
        }
        for _ in 0..1 + mutator.below(2) {
            files.mutate(mutator);
        }
        files.write(root.path());
        visit(root.path(), mutator);
    });
}
