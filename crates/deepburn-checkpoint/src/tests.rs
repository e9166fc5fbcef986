//! Tests of complete checkpoints: saved values are loaded unchanged, and changed files are refused.

pub(crate) mod fixture;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepburn_comm::Partition;
use proptest::prelude::*;

use crate::manifest::{MANIFEST, Manifest};
use crate::{
    Checkpoint, CheckpointError, Consolidation, ElementType, EntryKind, Layout, ParamEntry,
    StateKind, StoredState, Tag, consolidate, disk,
};
use fixture::{TempRoot, layout, parameter, run, save, save_layout, values};

/// Returns every value of a checkpoint, by tensor.
fn contents(checkpoint: &Checkpoint) -> Result<Vec<(String, Vec<f32>)>, CheckpointError> {
    let layout = checkpoint.layout();
    let mut all = vec![];
    for (index, entry) in layout.entries().iter().enumerate() {
        for stored in &entry.states {
            let range = 0..layout.numel(index);
            let values = checkpoint.read(&entry.path, &stored.kind, range)?;
            assert_eq!(values.element_type(), stored.element);
            all.push((format!("{}:{}", entry.path, stored.kind), values.into_f32()));
        }
    }
    Ok(all)
}

fn assert_whole(checkpoint: &Checkpoint, step: u64) {
    for (name, found) in contents(checkpoint).unwrap() {
        let (path, kind) = name.split_once(':').unwrap();
        assert_eq!(found, values(path, &kind.parse().unwrap(), step, 0..found.len()), "{name}");
    }
    assert_eq!(*checkpoint.run(), run(step));
    for rank in 0..checkpoint.layout().world_size() {
        assert_eq!(checkpoint.rank_state(rank).unwrap()["rank"], rank);
    }
}

#[test]
fn saved_checkpoints_are_loaded() {
    let root = TempRoot::new();
    for world_size in 1..6 {
        let folder = save(&root, world_size as u64, world_size);
        let checkpoint = Checkpoint::open_intact(&root, None).unwrap();
        assert_eq!(checkpoint.path(), folder);
        assert_eq!(checkpoint.tag(), &Tag::of_step(world_size as u64));
        assert_whole(&checkpoint, world_size as u64);
        assert_eq!(checkpoint.rank_state(world_size), None);
    }
    assert_whole(&Checkpoint::open(&root, Some(&Tag::of_step(2))).unwrap(), 2);
    assert_whole(&Checkpoint::open(&root.join("step-00000003"), None).unwrap(), 3);
    let steps: Vec<_> =
        Checkpoint::all(&root).unwrap().iter().map(|checkpoint| checkpoint.run().step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5]);
}

#[test]
fn a_moved_checkpoint_loads_under_its_new_name() {
    let root = TempRoot::new();
    let folder = save(&root, 1, 2);
    fs::rename(folder, root.join("best")).unwrap();
    assert_whole(&Checkpoint::open(&root, Some(&"best".parse().unwrap())).unwrap(), 1);
}

#[test]
fn tied_weights_are_found_at_every_path() {
    let root = TempRoot::new();
    save(&root, 1, 2);
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    let read = |path| checkpoint.read(path, &StateKind::Weights, 0..12).unwrap();
    assert_eq!(read("head"), read("a"));
}

#[test]
fn missing_parameters_and_ranges_are_refused() {
    let root = TempRoot::new();
    save(&root, 1, 2);
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    let refusal =
        |path, kind: StateKind, range| checkpoint.read(path, &kind, range).unwrap_err().to_string();
    assert!(refusal("c", StateKind::Weights, 0..1).contains("no parameter c"));
    let error = refusal("frozen", StateKind::Gradient, 0..1);
    assert!(error.contains("frozen has no gradient, only weights"), "{error}");
    #[expect(clippy::reversed_empty_ranges)]
    for range in [0..13, 12..13, 5..4, usize::MAX..usize::MAX, 0..usize::MAX] {
        let error = refusal("a", StateKind::Weights, range);
        assert!(error.contains("of shape [3, 4] has no elements"), "{error}");
    }
    assert!(checkpoint.read("a", &StateKind::Weights, 12..12).unwrap().is_empty());
    let mut half = [half::f16::ZERO; 2];
    let error =
        checkpoint.read_into("a", &StateKind::Weights, 0, &mut half).unwrap_err().to_string();
    assert!(error.contains("stored as F32 and was to be read as F16"), "{error}");
    checkpoint.read_into("b", &StateKind::Gradient, 1, &mut half).unwrap();
    assert!(checkpoint.read_into("b", &StateKind::Gradient, usize::MAX, &mut half).is_err());
}

fn message(path: &Path, tag: Option<&Tag>) -> String {
    Checkpoint::open_intact(path, tag).unwrap_err().to_string()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    disk::names(folder).unwrap().into_iter().map(|name| folder.join(name)).collect()
}

/// Checks that a checkpoint with a changed file is refused.
fn load_or_refuse(root: &Path, folder: &Path, original: &[(String, Vec<f32>)], case: &str) {
    let equals_original = |opened: Result<Checkpoint, CheckpointError>| {
        let Ok(checkpoint) = opened else { return false };
        let Ok(found) = contents(&checkpoint) else { return false };
        assert_eq!(found, original, "{case}");
        assert_eq!(*checkpoint.run(), run(1), "{case}");
        true
    };
    let opened = equals_original(Checkpoint::open(folder, None));
    assert!(!opened, "{case} is not noticed");
    // The error may name an older checkpoint, but it is not opened.
    assert!(Checkpoint::open_intact(root, None).is_err(), "{case}");
}

#[test]
fn every_flipped_byte_and_every_truncation_of_every_file_is_refused() {
    let root = TempRoot::new();
    let folder = save(&root, 1, 2);
    let original = contents(&Checkpoint::open(&root, None).unwrap()).unwrap();
    assert_eq!(files(&folder).len(), 3);
    for path in files(&folder) {
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let case = format!("byte {at} of {}", path.display());
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            fs::write(&path, flipped).unwrap();
            load_or_refuse(&root, &folder, &original, &case);
            fs::write(&path, &bytes[..at]).unwrap();
            load_or_refuse(&root, &folder, &original, &case);
        }
        fs::write(&path, [&bytes[..], b"\n"].concat()).unwrap();
        load_or_refuse(&root, &folder, &original, "a byte more");
        fs::write(&path, bytes).unwrap();
    }
    assert_whole(&Checkpoint::open_intact(&root, None).unwrap(), 1);
}

#[test]
fn a_refusal_names_the_file_and_the_newest_older_intact_checkpoint() {
    let root = TempRoot::new();
    let folders: Vec<_> = (1..=4).map(|step| save(&root, step, 2)).collect();
    for folder in &folders[2..] {
        fs::write(folder.join("rank-00001.safetensors"), "noise").unwrap();
    }
    for error in
        [message(&root, None), message(&root, Some(&Tag::of_step(4))), message(&folders[3], None)]
    {
        assert!(error.contains("step-00000004/rank-00001.safetensors: damaged"), "{error}");
        assert!(error.contains("intact checkpoint is"), "{error}");
        assert!(error.ends_with("step-00000002"), "{error}");
    }
    // Without a manifest, the step in the tag determines which checkpoints are older.
    fs::remove_file(folders[1].join("manifest.json")).unwrap();
    let error = message(&root, Some(&Tag::of_step(2)));
    assert!(error.contains("step-00000002/manifest.json: damaged"), "{error}");
    assert!(error.ends_with("step-00000001"), "{error}");
    let older = Checkpoint::intact_before(&root, Some(&Tag::of_step(1))).unwrap();
    assert!(older.is_none());
    // If `latest` is damaged too, any intact checkpoint is named.
    fs::write(root.join("latest"), "noise").unwrap();
    let error = message(&root, None);
    assert!(error.contains("latest: damaged") && error.ends_with("step-00000001"), "{error}");
}

#[test]
fn other_folders_are_described_in_the_error() {
    let root = TempRoot::new();
    assert!(message(&root.join("nowhere"), None).contains("no such folder"));
    assert!(message(&root, None).contains("no checkpoint found; give the output folder"));
    fs::write(root.join("file"), "").unwrap();
    assert!(message(&root.join("file"), None).contains("it is a file"));
    save(&root, 7, 1);
    let error = message(&root, Some(&Tag::of_step(8)));
    assert!(error.ends_with("choose one of step-00000007"), "{error}");
    // A name has no step, and without a manifest nothing is older.
    let best = save(&root, 9, 1);
    fs::rename(&best, root.join("best")).unwrap();
    fs::remove_file(root.join("best/manifest.json")).unwrap();
    let error = message(&root, Some(&"best".parse().unwrap()));
    assert!(error.contains("the newest other intact checkpoint is"), "{error}");
    assert!(error.ends_with("step-00000007"), "{error}");

    let foreign = TempRoot::new();
    fs::write(foreign.join("latest"), "global_step3").unwrap();
    fs::create_dir(foreign.join("global_step3")).unwrap();
    fs::write(foreign.join("global_step3/mp_rank_00_model_states.pt"), "").unwrap();
    for error in [message(&foreign, None), message(&foreign.join("global_step3"), None)] {
        assert!(error.contains("DeepSpeed"), "{error}");
    }
    fs::write(foreign.join("manifest.json"), "{\"name\": \"an app\"}").unwrap();
    assert!(message(&foreign, None).contains("a file without"));
}

#[test]
fn a_missing_latest_is_recovered() {
    let root = TempRoot::new();
    save(&root, 1, 1);
    save(&root, 2, 1);
    fs::remove_file(root.join("latest")).unwrap();
    assert_whole(&Checkpoint::open(&root, None).unwrap(), 2);
}

#[test]
fn threads_share_a_checkpoint() {
    let root = TempRoot::new();
    save(&root, 1, 3);
    let checkpoint = Checkpoint::open(&root, None).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_whole(&checkpoint, 1));
            scope.spawn(|| checkpoint.verify().unwrap());
        }
    });
}

/// An attacker who can forge checksums also gets an error, before memory is allocated for the
/// announced sizes.
#[test]
fn a_forged_manifest_is_refused() {
    let huge = |path: &str, states: usize| {
        let mut entry = parameter(path, &[1 << 29, 1 << 30]);
        entry.states.truncate(states);
        entry
    };
    let cases = [
        vec![huge("a", 1)],
        vec![huge("a", 1), huge("b", 1)],
        vec![huge("a", 0), huge("b", 0)],
        vec![parameter("a", &[3, 4])],
        vec![],
    ];
    for entries in cases {
        let root = TempRoot::new();
        let folder = save(&root, 1, 2);
        let (mut manifest, _) = Manifest::read(&folder).unwrap();
        manifest.layout = Layout::new(entries, 2).unwrap();
        let path = folder.join(MANIFEST);
        fs::write(&path, manifest.to_text(&path).unwrap().0).unwrap();
        let checkpoint = Checkpoint::open(&folder, None).unwrap();
        let error = checkpoint.verify().unwrap_err().to_string();
        assert!(error.contains("written wrong"), "{error}");
        assert!(checkpoint.read("a", &StateKind::Weights, 0..12).is_err());
        assert!(checkpoint.describe().contains("NOT INTACT"));
        let what = Consolidation { element: ElementType::F32, max_shard_bytes: 1 };
        assert!(
            consolidate(&checkpoint, &root.join("out"), &what, &checkpoint.weight_map().unwrap())
                .is_err()
        );
    }
}

/// Dangling symbolic links, and pipes, whose opening would wait for a writer.
#[test]
#[cfg(unix)]
fn special_files_are_refused_without_blocking() {
    let root = TempRoot::new();
    let folder = save(&root, 1, 1);
    for name in ["rank-00000.safetensors", "manifest.json"] {
        let (path, aside) = (folder.join(name), root.join("aside"));
        fs::rename(&path, &aside).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        if made.is_ok_and(|status| status.success()) {
            assert!(Checkpoint::open_intact(&root, None).is_err());
            fs::remove_file(&path).unwrap();
        }
        std::os::unix::fs::symlink("/nowhere", &path).unwrap();
        assert!(Checkpoint::open_intact(&root, None).is_err());
        fs::remove_file(&path).unwrap();
        fs::rename(&aside, &path).unwrap();
    }
    assert_whole(&Checkpoint::open_intact(&root, None).unwrap(), 1);
}

fn any_entry() -> impl Strategy<Value = ParamEntry> {
    let element =
        prop_oneof![Just(ElementType::F32), Just(ElementType::F16), Just(ElementType::Bf16)];
    let kind = prop_oneof![
        Just(StateKind::Weights),
        Just(StateKind::Gradient),
        Just(StateKind::moment("m"))
    ];
    let states = prop::collection::btree_map(kind, element, 0..4);
    let shape = prop::collection::vec(0_usize..6, 0..4);
    (shape, any::<bool>(), states).prop_map(|(shape, trainable, states)| ParamEntry {
        path: String::new(),
        shape,
        kind: EntryKind::Parameter,
        trainable,
        aliases: vec![],
        states: states.into_iter().map(|(kind, element)| StoredState { kind, element }).collect(),
        base: None,
        pipeline_stage: 0,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_range_reads_as_it_was_written(
        entries in prop::collection::vec(any_entry(), 0..6),
        (saved_by, stages, replicas) in (1_usize..6, 1_usize..4, 1_usize..3),
        loaded_by in 1_usize..6,
        (from, to) in (0_usize..200, 0_usize..200),
    ) {
        let name = |(i, entry)| ParamEntry {
            path: format!("layers.{i}.w"),
            pipeline_stage: i % stages,
            ..entry
        };
        let entries: Vec<_> = entries.into_iter().enumerate().map(name).collect();
        let world_size = saved_by * stages * replicas;
        let layout = Layout::of_mesh(entries.clone(), world_size, stages, replicas).unwrap();
        let layout = Arc::new(layout);
        let root = TempRoot::new();
        save_layout(&root, 1, &layout, run(1));
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        prop_assert_eq!(checkpoint.layout(), &*layout);
        for (index, entry) in layout.entries().iter().enumerate() {
            let numel = layout.numel(index);
            let random = from.min(to).min(numel)..from.max(to).min(numel);
            let cut = Partition::new(numel, loaded_by);
            let ranges = (0..loaded_by).map(|rank| cut.owned(rank)).chain([random]);
            for range in ranges {
                for StoredState { kind, .. } in &entry.states {
                    let found = checkpoint.read(&entry.path, kind, range.clone()).unwrap();
                    let expected = values(&entry.path, kind, 1, range.clone());
                    prop_assert_eq!(found.into_f32(), expected);
                }
            }
        }
    }
}

/// The layout of the tests has states in every float type of 16 and 32 bits.
#[test]
fn the_fixture_has_every_float_type() {
    let layout = layout(1);
    let states: Vec<_> = layout.entries().iter().flat_map(|entry| &entry.states).collect();
    for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
        assert!(states.iter().any(|stored| stored.element == element));
    }
}
