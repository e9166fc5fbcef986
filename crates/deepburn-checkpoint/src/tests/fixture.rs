//! Small checkpoints for tests, whose values identify their position.
//!
//! The fixture layout has three parameters: `a` with the alias `head`, `b`, and `frozen`, with
//! arrays in F32, F16 and BF16. Each value is computed from path, array, step and index, so a test
//! that reads an element at the wrong offset or from the wrong save gets a different number. All
//! values are small integers, which every element type represents exactly.

use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use serde_json::json;

use crate::{
    ElementType, EntryKind, Layout, ParamEntry, RankRecord, RankWriter, Run, Save, SaveTicket,
    StateKind, StoredState, Tag,
};

/// A folder for checkpoints that is removed when it is dropped.
pub(crate) struct TempRoot {
    /// The temporary folder that contains `path`; dropping it removes both.
    _parent: tempfile::TempDir,
    /// The folder of checkpoints, which exists and is empty at first.
    path: PathBuf,
}

impl TempRoot {
    /// Creates the folder, in memory if the system has such a file system.
    pub(crate) fn new() -> Self {
        // Flushes are free on a file system in memory.
        let memory = Path::new("/dev/shm");
        let parent = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        let path = parent.path().join("checkpoints");
        std::fs::create_dir(&path).unwrap();
        Self { _parent: parent, path }
    }
}

impl Deref for TempRoot {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

/// Returns a trainable F32 parameter with weights and the moment `exp_avg`.
pub(crate) fn parameter(path: &str, shape: &[usize]) -> ParamEntry {
    let stored = |kind| StoredState { kind, element: ElementType::F32 };
    ParamEntry {
        path: path.into(),
        shape: shape.into(),
        kind: EntryKind::Parameter,
        trainable: true,
        aliases: vec![],
        states: vec![stored(StateKind::Weights), stored(StateKind::moment("exp_avg"))],
        base: None,
        pipeline_stage: 0,
    }
}

/// Returns a buffer of this type, which has only values.
pub(crate) fn buffer(path: &str, shape: &[usize], element: ElementType) -> ParamEntry {
    let states = vec![StoredState { kind: StateKind::Weights, element }];
    ParamEntry { kind: EntryKind::Buffer, trainable: false, states, ..parameter(path, shape) }
}

/// Returns the fixture layout for `world_size` ranks.
pub(crate) fn layout(world_size: usize) -> Arc<Layout> {
    let gradient = |element| StoredState { kind: StateKind::Gradient, element };
    let (mut a, mut b) = (parameter("a", &[3, 4]), parameter("b", &[3]));
    a.aliases = vec!["head".into()];
    a.states.push(gradient(ElementType::F32));
    b.states.push(gradient(ElementType::F16));
    let mut frozen = parameter("frozen", &[1]);
    frozen.trainable = false;
    frozen.states = vec![StoredState { kind: StateKind::Weights, element: ElementType::Bf16 }];
    Arc::new(Layout::new(vec![a, b, frozen], world_size).unwrap())
}

/// Returns the state of a run after `step` steps.
pub(crate) fn run(step: u64) -> Run {
    Run {
        step,
        stage: 2,
        working: ElementType::Bf16,
        job: "test job".into(),
        metric: None,
        state: json!({ "samples": step * 8 }),
    }
}

/// Returns the values of a range of an array after `step` steps: integers from -64 to 63, exact in
/// every type.
pub(crate) fn values(path: &str, kind: &StateKind, step: u64, range: Range<usize>) -> Vec<f32> {
    let salt = path.bytes().chain(kind.as_str().bytes()).map(usize::from).sum::<usize>();
    range.map(|i| ((salt + i * 7 + step as usize) % 128) as f32 - 64.0).collect()
}

/// Writes the file of one rank and returns its record, like a rank of a save.
///
/// # Panics
/// Panics if the writer rejects a tensor, or for an element type that no test uses.
pub(crate) fn write_rank(
    ticket: &SaveTicket,
    layout: &Arc<Layout>,
    rank: usize,
    step: u64,
) -> RankRecord {
    let mut writer = RankWriter::create(ticket, layout.clone(), rank).unwrap();
    for segment in layout.segments(rank) {
        assert_eq!(writer.next_segment(), Some(&segment));
        let entry = &layout.entries()[segment.entry];
        let StoredState { kind, element } = &entry.states[segment.state];
        let values = values(&entry.path, kind, step, segment.range);
        match element {
            ElementType::F32 => {
                // Written in two parts, as callers write large tensors.
                let (head, tail) = values.split_at(values.len() / 2);
                writer.write(&entry.path, kind, head).unwrap();
                writer.write(&entry.path, kind, tail)
            }
            ElementType::F16 => {
                let values: Vec<_> = values.into_iter().map(f16::from_f32).collect();
                writer.write(&entry.path, kind, &values)
            }
            ElementType::Bf16 => {
                let values: Vec<_> = values.into_iter().map(bf16::from_f32).collect();
                writer.write(&entry.path, kind, &values)
            }
            ElementType::Bool => {
                let bytes: Vec<_> = values.into_iter().map(|value| u8::from(value > 0.0)).collect();
                writer.write_bytes(&entry.path, kind, *element, &bytes)
            }
            ElementType::I64 => {
                let values: Vec<_> = values.into_iter().map(|value| value as i64).collect();
                writer.write(&entry.path, kind, &values)
            }
            other => panic!("no test writes {other}"),
        }
        .unwrap();
    }
    writer.finish(json!({ "rank": rank })).unwrap()
}

/// Saves a checkpoint of this layout and returns its folder. All ranks write one after the other.
pub(crate) fn save_layout(root: &Path, step: u64, layout: &Arc<Layout>, run: Run) -> PathBuf {
    let save = Save::begin(root, Tag::of_step(step), layout.clone()).unwrap();
    let records = (0..layout.world_size())
        .map(|rank| write_rank(save.ticket(), layout, rank, step))
        .collect();
    save.commit(records, run).unwrap()
}

/// Saves the fixture layout after `step` steps and returns its folder.
pub(crate) fn save(root: &Path, step: u64, world_size: usize) -> PathBuf {
    save_layout(root, step, &layout(world_size), run(step))
}
