//! The layout of a checkpoint: its tensors, and the part of each tensor in each
//! rank's file.
//!
//! Main type: [`Layout`]. Every parameter is flattened and divided into
//! `world_size` chunks of `ceil(numel / world_size)` elements, like the shards
//! of training; the padding of the last chunks is not stored. Rank r's file
//! holds chunk r of every array at every stage, so files do not depend on the
//! stage.
//!
//! Everything about a file except its values follows from the layout: its
//! header, the offset of each tensor and its length. When a file is read, its
//! own header is compared with the expected one and never trusted. A layout
//! that exceeds any memory is an error.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use deepburn_comm::Partition;
use deepburn_safetensors::Header;
use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::{CheckpointError, EntryKind, ParamEntry, StateKind};

/// The largest number of ranks of a checkpoint. A larger number is a mistake.
const MAX_WORLD_SIZE: usize = 1 << 20;

/// The entries of a checkpoint and the number of ranks that write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "StoredLayout")]
pub struct Layout {
    /// The number of ranks that write, which is the number of files.
    world_size: usize,
    /// The entries in module order.
    atoms: Vec<ParamEntry>,
    /// The index of the entry at every path, including aliases.
    #[serde(skip_serializing)]
    by_path: HashMap<String, usize>,
}

/// A layout as it is stored, before validation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredLayout {
    world_size: usize,
    atoms: Vec<ParamEntry>,
}

impl TryFrom<StoredLayout> for Layout {
    type Error = CheckpointError;

    fn try_from(StoredLayout { world_size, atoms }: StoredLayout) -> Result<Self, CheckpointError> {
        Self::new(atoms, world_size)
    }
}

/// A tensor of a rank's file: a segment of one array of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The index of the entry.
    pub atom: usize,
    /// The index of the array in the entry.
    pub slot: usize,
    /// The range of the flat parameter.
    pub range: Range<usize>,
    /// The offset in bytes after the header.
    pub(crate) offset: u64,
}

impl Layout {
    /// Lays out `atoms` for `world_size` ranks.
    ///
    /// # Errors
    ///
    /// Returns [`CheckpointError::Layout`] for zero ranks, a path or array that
    /// occurs twice, a path that is empty or contains a colon or a control
    /// character, a parameter of integers, a buffer with more than values, and
    /// sizes that overflow.
    pub fn new(atoms: Vec<ParamEntry>, world_size: usize) -> Result<Self, CheckpointError> {
        let refuse = |reason| Err(CheckpointError::Layout { reason });
        if !(1..=MAX_WORLD_SIZE).contains(&world_size) {
            return refuse(format!("{world_size} ranks; must be 1 to {MAX_WORLD_SIZE}"));
        }
        let (mut by_path, mut bytes) = (HashMap::new(), 0_u64);
        for (index, atom) in atoms.iter().enumerate() {
            for path in [&atom.path].into_iter().chain(&atom.aliases) {
                if path.is_empty() || path.contains(|c: char| c == ':' || c.is_control()) {
                    return refuse(format!(
                        "{path:?} is no parameter's path: it is empty, or has a colon or a control \
                         character"
                    ));
                }
                if by_path.insert(path.clone(), index).is_some() {
                    return refuse(format!("two parameters have the path {path}"));
                }
            }
            let mut slots = HashSet::new();
            if let Some(twice) = atom.slots.iter().find(|stored| !slots.insert(&stored.slot)) {
                return refuse(format!("parameter {} has slot {} twice", atom.path, twice.slot));
            }
            if let Some(reason) = mistyped(atom) {
                return refuse(reason);
            }
            // The limit is half the range of a u64, because headers need space
            // too.
            let total = stored_bytes(atom).and_then(|stored| bytes.checked_add(stored));
            bytes = match total.filter(|&total| total <= u64::MAX >> 1) {
                Some(total) => total,
                None => {
                    return refuse(format!(
                        "parameter {} of shape {:?} is larger than any memory",
                        atom.path, atom.shape
                    ));
                }
            };
        }
        Ok(Self { world_size, atoms, by_path })
    }

    /// Returns the number of ranks that write.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the entries in module order.
    pub fn atoms(&self) -> &[ParamEntry] {
        &self.atoms
    }

    /// Returns the index of the entry at `path`, which may be an alias.
    pub fn find(&self, path: &str) -> Option<usize> {
        self.by_path.get(path).copied()
    }

    /// Returns the number of elements of an entry.
    pub fn numel(&self, atom: usize) -> usize {
        // The constructor has rejected overflowing entries.
        self.atoms[atom].checked_numel().unwrap_or(usize::MAX)
    }

    /// Returns the number of elements in each rank's chunk, including padding;
    /// at least 1.
    pub(crate) fn chunk_len(&self, atom: usize) -> usize {
        self.partition(atom).shard_len().max(1)
    }

    /// Returns the flat range of an entry that is in the file of `rank`; empty
    /// for a rank that holds only padding.
    pub fn owned(&self, atom: usize, rank: usize) -> Range<usize> {
        self.partition(atom).owned(rank)
    }

    /// Returns the partition of an entry's flat elements, the same that
    /// training uses for shards.
    fn partition(&self, atom: usize) -> Partition {
        Partition::new(self.numel(atom), self.world_size)
    }

    /// Returns the tensors of the file of `rank` in the order in which they are
    /// written. Wide types come first, so that each tensor is aligned to its
    /// element size. Empty tensors are omitted.
    pub fn pieces(&self, rank: usize) -> Vec<Segment> {
        let mut pieces = Vec::new();
        for (atom, ParamEntry { slots, .. }) in self.atoms.iter().enumerate() {
            let range = self.owned(atom, rank);
            if !range.is_empty() {
                let piece = |slot| Segment { atom, slot, range: range.clone(), offset: 0 };
                pieces.extend((0..slots.len()).map(piece));
            }
        }
        // The sort is stable, so tensors of one size keep the order of the entries.
        pieces.sort_by_key(|piece| std::cmp::Reverse(self.element_size(piece)));
        let mut end = 0;
        for piece in &mut pieces {
            piece.offset = end;
            end += self.piece_len(piece);
        }
        pieces
    }

    /// Returns the length of the file of `rank` in bytes.
    pub(crate) fn file_len(&self, rank: usize, identity: &Identity) -> u64 {
        self.header(rank, &self.pieces(rank), identity).file_len()
    }

    /// Returns the name of a tensor in a file.
    pub(crate) fn name(&self, piece: &Segment) -> String {
        let atom = &self.atoms[piece.atom];
        format!("{}:{}", atom.path, atom.slots[piece.slot].slot)
    }

    /// Returns the length of a tensor in bytes.
    pub(crate) fn piece_len(&self, piece: &Segment) -> u64 {
        piece.range.len() as u64 * self.element_size(piece) as u64
    }

    /// Returns the size of an element of this tensor in bytes.
    fn element_size(&self, piece: &Segment) -> usize {
        self.atoms[piece.atom].slots[piece.slot].element.size()
    }

    /// Returns the header of the file of `rank`. `pieces` are the tensors of
    /// [`Self::pieces`], whose offsets it has to agree with.
    pub(crate) fn header(&self, rank: usize, pieces: &[Segment], identity: &Identity) -> Header {
        let mut header = Header::new(identity.of_file(rank, self.world_size));
        for piece in pieces {
            let element = self.atoms[piece.atom].slots[piece.slot].element;
            let start = header.push(&self.name(piece), element, &[piece.range.len()]);
            debug_assert_eq!(start, piece.offset);
        }
        header
    }

    /// Returns a hash of the layout, with which ranks check that they use the
    /// same one.
    pub(crate) fn digest(&self) -> String {
        let text = serde_json::to_vec(self).expect("names and numbers always are JSON");
        blake3::hash(&text).to_hex().to_string()
    }
}

/// Returns what is wrong with the element types of an entry; `None` if they are
/// valid.
fn mistyped(atom: &ParamEntry) -> Option<String> {
    let ParamEntry { path, kind, trainable, slots, .. } = atom;
    match kind {
        EntryKind::Parameter => {
            let wrong = slots.iter().find(|stored| !stored.element.is_trainable())?;
            Some(format!("parameter {path} is stored as {}; only buffers are", wrong.element))
        }
        EntryKind::Buffer => {
            let values_alone = slots.len() == 1 && slots[0].slot == StateKind::Weights;
            (*trainable || !values_alone)
                .then(|| format!("buffer {path} has more than values, which only parameters have"))
        }
    }
}

/// Returns the number of bytes of all arrays of an entry; `None` if it
/// overflows. An entry without arrays counts one byte per element, so that
/// elements can be summed without overflow too.
fn stored_bytes(atom: &ParamEntry) -> Option<u64> {
    let size = atom.slots.iter().map(|stored| stored.element.size()).sum::<usize>().max(1);
    u64::try_from(atom.checked_numel()?.checked_mul(size)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{atom, buffer};
    use crate::{ElementType, StoredState};
    use proptest::prelude::*;

    fn refusal(atoms: Vec<ParamEntry>, world_size: usize) -> String {
        Layout::new(atoms, world_size).unwrap_err().to_string()
    }

    #[test]
    fn impossible_layouts_are_refused() {
        assert!(refusal(vec![], 0).contains("0 ranks"));
        assert!(refusal(vec![], usize::MAX).contains("ranks; must be"));
        let (a, b) = (atom("a", &[2]), atom("b", &[2]));
        assert!(refusal(vec![a.clone(), a.clone()], 1).contains("two parameters have the path a"));
        let alias = ParamEntry { aliases: vec!["a".into()], ..b.clone() };
        assert!(refusal(vec![a.clone(), alias], 1).contains("two parameters have the path a"));
        for path in ["", "a:b", "a\nb"] {
            assert!(refusal(vec![atom(path, &[2])], 1).contains("no parameter's path"), "{path:?}");
        }
        let twice = ParamEntry { slots: [b.slots.clone(), b.slots].concat(), ..a };
        assert!(refusal(vec![twice], 1).contains("slot weights twice"));
        for shape in [&[usize::MAX, 2][..], &[usize::MAX], &[usize::MAX / 8]] {
            assert!(refusal(vec![atom("huge", shape)], 1).contains("larger than any memory"));
        }
        let huge = atom("huge", &[1 << 59]);
        let other = ParamEntry { path: "other".into(), ..huge.clone() };
        assert!(Layout::new(vec![huge.clone()], 1).is_ok());
        assert!(refusal(vec![huge, other], 1).contains("parameter other of shape"));
    }

    #[test]
    fn parameters_are_floats_and_buffers_are_values() {
        let mut integers = atom("a", &[2]);
        integers.slots[0].element = ElementType::I32;
        assert!(refusal(vec![integers], 1).contains("parameter a is stored as I32"));
        for element in ElementType::ALL {
            assert!(Layout::new(vec![buffer("b", &[2], element)], 1).is_ok());
        }
        let with_moment =
            ParamEntry { kind: EntryKind::Buffer, trainable: false, ..atom("b", &[2]) };
        let trainable = ParamEntry { trainable: true, ..buffer("b", &[2], ElementType::F32) };
        for atom in [with_moment, trainable] {
            assert!(refusal(vec![atom], 1).contains("buffer b has more than values"));
        }
        // Layouts of parameters read and hash as they did before there were buffers.
        let text = serde_json::to_string(&atom("a", &[2])).unwrap();
        assert!(!text.contains("kind"), "{text}");
        let text = serde_json::to_string(&buffer("b", &[2], ElementType::I64)).unwrap();
        assert!(text.contains(r#""kind":"buffer""#), "{text}");
    }

    #[test]
    fn what_is_read_is_checked_like_what_is_made() {
        let layout = Layout::new(vec![atom("a", &[2, 3])], 2).unwrap();
        let text = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
        assert!(serde_json::from_str::<Layout>(&text.replace("[2,3]", "[-1]")).is_err());
        let error =
            serde_json::from_str::<Layout>(&text.replace("\"world_size\":2", "\"world_size\":0"));
        assert!(error.unwrap_err().to_string().contains("0 ranks"));
        assert_ne!(layout.digest(), Layout::new(vec![atom("a", &[3, 2])], 2).unwrap().digest());
    }

    #[test]
    fn wide_types_come_first_and_empty_tensors_nowhere() {
        let half = StoredState { slot: StateKind::Gradient, element: ElementType::Bf16 };
        let odd = |path| {
            let atom = atom(path, &[3]);
            ParamEntry { slots: [vec![half.clone()], atom.slots.clone()].concat(), ..atom }
        };
        let layout = Layout::new(vec![odd("a"), odd("b"), atom("none", &[0])], 2).unwrap();
        let names = |rank| -> Vec<_> {
            layout.pieces(rank).iter().map(|piece| layout.name(piece)).collect()
        };
        assert_eq!(
            names(0),
            ["a:weights", "a:exp_avg", "b:weights", "b:exp_avg", "a:gradient", "b:gradient",]
        );
        assert_eq!(layout.pieces(1)[1].offset, 4);
        assert_eq!(layout.owned(2, 0), 0..0);
        let four = Layout::new(vec![atom("a", &[3])], 5).unwrap();
        assert_eq!(four.pieces(4), []);
        let found: Vec<_> = (0..5).map(|rank| four.owned(0, rank)).collect();
        assert_eq!(found, [0..1, 1..2, 2..3, 3..3, 3..3]);
    }

    proptest! {
        #[test]
        fn headers_are_sound_safetensors(
            sizes in prop::collection::vec(0_usize..50, 0..6), world_size in 1_usize..6,
        ) {
            let atoms = sizes.iter().enumerate().map(|(i, &n)| atom(&format!("p{i}\"."), &[n]));
            let layout = Layout::new(atoms.collect(), world_size).unwrap();
            let identity = Identity::new("x".parse().unwrap());
            for rank in 0..world_size {
                let pieces = layout.pieces(rank);
                let mut file = layout.header(rank, &pieces, &identity).to_bytes();
                file.resize(layout.file_len(rank, &identity) as usize, 0);
                let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
                prop_assert_eq!(tensors.len(), pieces.len());
                for piece in &pieces {
                    let tensor = tensors.tensor(&layout.name(piece)).unwrap();
                    prop_assert_eq!(tensor.shape(), &[piece.range.len()]);
                }
            }
        }

        #[test]
        fn chunks_tile_the_parameter(numel in 0_usize..10_000, world_size in 1_usize..70) {
            let layout = Layout::new(vec![atom("a", &[numel])], world_size).unwrap();
            let mut next = 0;
            for rank in 0..world_size {
                let owned = layout.owned(0, rank);
                prop_assert_eq!(owned.start, next);
                prop_assert!(owned.len() <= numel.div_ceil(world_size));
                next = owned.end;
            }
            prop_assert_eq!(next, numel);
        }
    }
}
