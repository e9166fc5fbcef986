//! Small checkpoints for tests, with values that tell where they belong.
//!
//! The fixture layout has three parameters: `a` with the alias `head`, `b`, and
//! `frozen`, with arrays in F32, F16 and BF16. Each value is computed from
//! path, array, step and index, so a test that reads an element from the wrong
//! place or of the wrong save sees another number. All values are small
//! integers, which every element type represents exactly.

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
        // In memory where there is such a folder: there it costs nothing to wait for the disk.
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
pub(crate) fn atom(path: &str, shape: &[usize]) -> ParamEntry {
    let stored = |slot| StoredState { slot, element: ElementType::F32 };
    ParamEntry {
        path: path.into(),
        shape: shape.into(),
        kind: EntryKind::Parameter,
        trainable: true,
        aliases: vec![],
        slots: vec![stored(StateKind::Weights), stored(StateKind::moment("exp_avg"))],
    }
}

/// Returns a buffer of this type, which has only values.
pub(crate) fn buffer(path: &str, shape: &[usize], element: ElementType) -> ParamEntry {
    let slots = vec![StoredState { slot: StateKind::Weights, element }];
    ParamEntry { kind: EntryKind::Buffer, trainable: false, slots, ..atom(path, shape) }
}

/// Returns the fixture layout for `world_size` ranks.
pub(crate) fn layout(world_size: usize) -> Arc<Layout> {
    let gradient = |element| StoredState { slot: StateKind::Gradient, element };
    let (mut a, mut b) = (atom("a", &[3, 4]), atom("b", &[3]));
    a.aliases = vec!["head".into()];
    a.slots.push(gradient(ElementType::F32));
    b.slots.push(gradient(ElementType::F16));
    let mut frozen = atom("frozen", &[1]);
    frozen.trainable = false;
    frozen.slots = vec![StoredState { slot: StateKind::Weights, element: ElementType::Bf16 }];
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

/// Returns the values of a range of an array after `step` steps: integers from
/// -64 to 63, exact in every type.
pub(crate) fn values(path: &str, slot: &StateKind, step: u64, range: Range<usize>) -> Vec<f32> {
    let salt = path.bytes().chain(slot.as_str().bytes()).map(usize::from).sum::<usize>();
    range.map(|i| ((salt + i * 7 + step as usize) % 128) as f32 - 64.0).collect()
}

/// Writes the file of one rank and returns its record, like a rank of a save.
///
/// # Panics
///
/// Panics if the writer rejects a tensor, or for an element type that no test
/// uses.
pub(crate) fn write_rank(
    ticket: &SaveTicket,
    layout: &Arc<Layout>,
    rank: usize,
    step: u64,
) -> RankRecord {
    let mut writer = RankWriter::create(ticket, layout.clone(), rank).unwrap();
    for piece in layout.pieces(rank) {
        assert_eq!(writer.next_piece(), Some(&piece));
        let atom = &layout.atoms()[piece.atom];
        let StoredState { slot, element } = &atom.slots[piece.slot];
        let values = values(&atom.path, slot, step, piece.range);
        match element {
            ElementType::F32 => {
                // In two parts, as large ones come.
                let (head, tail) = values.split_at(values.len() / 2);
                writer.write(&atom.path, slot, head).unwrap();
                writer.write(&atom.path, slot, tail)
            }
            ElementType::F16 => {
                let values: Vec<_> = values.into_iter().map(f16::from_f32).collect();
                writer.write(&atom.path, slot, &values)
            }
            ElementType::Bf16 => {
                let values: Vec<_> = values.into_iter().map(bf16::from_f32).collect();
                writer.write(&atom.path, slot, &values)
            }
            ElementType::Bool => {
                let bytes: Vec<_> = values.into_iter().map(|value| u8::from(value > 0.0)).collect();
                writer.write_bytes(&atom.path, slot, *element, &bytes)
            }
            ElementType::I64 => {
                let values: Vec<_> = values.into_iter().map(|value| value as i64).collect();
                writer.write(&atom.path, slot, &values)
            }
            other => panic!("no test writes {other}"),
        }
        .unwrap();
    }
    writer.finish(json!({ "rank": rank })).unwrap()
}

/// Saves a checkpoint of this layout and returns its folder. All ranks write
/// one after the other.
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
