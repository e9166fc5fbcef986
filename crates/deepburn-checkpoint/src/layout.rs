//! The layout of a checkpoint: its tensors, and the segment of each tensor that each rank's file
//! contains.
//!
//! Main type: [`Layout`]. Every parameter is flattened and divided into `world_size` chunks of
//! `ceil(numel / world_size)` elements, the same shards that training uses. The padding of the last
//! chunks is not stored. The file of rank r contains chunk r of every array at every ZeRO stage, so
//! files do not depend on the stage.
//!
//! In a pipeline, consecutive ranks form a stage, and only the ranks of an entry's stage store its
//! chunks:
//!
//! ```text
//! 2 stages, 4 ranks    rank 0          rank 1          rank 2          rank 3
//! a, of stage 0        chunk 0 of 2    chunk 1 of 2
//! b, of stage 1                                        chunk 0 of 2    chunk 1 of 2
//! ```
//!
//! With hybrid sharding, a stage consists of replicas, each of which has all of its states. Only
//! the ranks of the first one, which come first, store chunks:
//!
//! ```text
//! 2 replicas, 4 ranks  rank 0          rank 1          rank 2          rank 3
//! a                    chunk 0 of 2    chunk 1 of 2
//! ```
//!
//! The layout determines everything in a file except the values: the header, and the offset and
//! length of each tensor. The header of a file is therefore never trusted: a reader computes the
//! expected header and compares the two. A layout whose sizes overflow is an error.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use deepburn_comm::Partition;
use deepburn_files::safetensors::Header;
use serde::{Deserialize, Serialize};

use crate::identity::{
    FIRST_VERSION, Identity, VERSION_OF_PIPELINE, VERSION_OF_REPLICAS, VERSION_WITH_BASE,
};
use crate::{CheckpointError, EntryKind, ParamEntry, StateKind};

/// The largest number of ranks of a checkpoint. Larger numbers are rejected as mistakes.
const MAX_WORLD_SIZE: usize = 1 << 20;

/// The entries of a checkpoint and the number of ranks that write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "StoredLayout")]
pub struct Layout {
    /// The number of ranks that write the checkpoint. Each rank writes one file.
    world_size: usize,
    /// The number of pipeline stages; omitted in files without a pipeline.
    #[serde(rename = "pipeline_stages", skip_serializing_if = "is_one")]
    stages: usize,
    /// The number of replicas of each stage; omitted in files without hybrid sharding.
    #[serde(skip_serializing_if = "is_one")]
    replicas: usize,
    /// The entries in module order.
    #[serde(rename = "atoms")]
    entries: Vec<ParamEntry>,
    /// The index of the entry at every path, including aliases.
    #[serde(skip_serializing)]
    by_path: HashMap<String, usize>,
}

/// A layout as it is stored, before validation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredLayout {
    world_size: usize,
    #[serde(rename = "pipeline_stages", default = "one")]
    stages: usize,
    #[serde(default = "one")]
    replicas: usize,
    #[serde(rename = "atoms")]
    entries: Vec<ParamEntry>,
}

impl TryFrom<StoredLayout> for Layout {
    type Error = CheckpointError;

    fn try_from(stored: StoredLayout) -> Result<Self, CheckpointError> {
        let StoredLayout { world_size, stages, replicas, entries } = stored;
        Self::of_mesh(entries, world_size, stages, replicas)
    }
}

fn is_one(size: &usize) -> bool {
    *size == 1
}

fn one() -> usize {
    1
}

/// A tensor of a rank's file: a segment of one array of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The index of the entry.
    pub entry: usize,
    /// The index of the array in the entry.
    pub state: usize,
    /// The range of the flat parameter.
    pub range: Range<usize>,
    /// The offset in bytes after the header.
    pub(crate) offset: u64,
}

impl Layout {
    /// Lays out `entries` for `world_size` ranks without a pipeline.
    ///
    /// # Errors
    /// Returns the errors of [`of_mesh`](Self::of_mesh).
    pub fn new(entries: Vec<ParamEntry>, world_size: usize) -> Result<Self, CheckpointError> {
        Self::of_mesh(entries, world_size, 1, 1)
    }

    /// Lays out `entries` for `world_size` ranks, which form `stages` pipeline stages of
    /// consecutive ranks. The ranks of a stage form `replicas` groups of consecutive ranks, and the
    /// ranks of the first group store its entries.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Layout`] for a number of ranks that is 0, too large or not a
    /// multiple of the number of stages, a number of replicas that does not divide the ranks of a
    /// stage, an entry of a stage that does not exist, a path or array that occurs twice, a path
    /// that is empty or contains a colon or a control character, a parameter with an integer type,
    /// a buffer with a gradient or optimizer states, an omitted parameter that is trainable or has
    /// stored arrays, and sizes that overflow.
    pub fn of_mesh(
        entries: Vec<ParamEntry>,
        world_size: usize,
        stages: usize,
        replicas: usize,
    ) -> Result<Self, CheckpointError> {
        let refuse = |reason| Err(CheckpointError::Layout { reason });
        if let Some(reason) = uneven(world_size, stages, replicas) {
            return refuse(reason);
        }
        let (mut by_path, mut bytes) = (HashMap::new(), 0_u64);
        for (index, entry) in entries.iter().enumerate() {
            for path in [&entry.path].into_iter().chain(&entry.aliases) {
                if path.is_empty() || path.contains(|c: char| c == ':' || c.is_control()) {
                    return refuse(format!(
                        "invalid parameter path {path:?}: it must not be empty, and must not contain \
                         a colon or a control character"
                    ));
                }
                if by_path.insert(path.clone(), index).is_some() {
                    return refuse(format!("two parameters have the path {path}"));
                }
            }
            if entry.pipeline_stage >= stages {
                let (path, stage) = (&entry.path, entry.pipeline_stage);
                return refuse(format!(
                    "{path} is of pipeline stage {stage}, and there are {stages}"
                ));
            }
            // The names of tensors in a file consist of path and kind, and have to be unique.
            let mut kinds = HashSet::new();
            if let Some(twice) = entry.states.iter().find(|stored| !kinds.insert(&stored.kind)) {
                let (path, kind) = (&entry.path, &twice.kind);
                return refuse(format!("parameter {path} has the state {kind} twice"));
            }
            if let Some(reason) = mistyped(entry) {
                return refuse(reason);
            }
            // The limit is half the range of a u64, because the headers are added to the size of
            // the values.
            let total = stored_bytes(entry).and_then(|stored| bytes.checked_add(stored));
            bytes = match total.filter(|&total| total <= u64::MAX >> 1) {
                Some(total) => total,
                None => {
                    return refuse(format!(
                        "parameter {} of shape {:?} is larger than any memory",
                        entry.path, entry.shape
                    ));
                }
            };
        }
        Ok(Self { world_size, stages, replicas, entries, by_path })
    }

    /// Returns the number of ranks that write the checkpoint.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the number of pipeline stages; 1 without a pipeline.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Returns the number of ranks of each pipeline stage. All of them have different data.
    pub fn stage_ranks(&self) -> usize {
        self.world_size / self.stages
    }

    /// Returns the number of replicas of each stage; 1 without hybrid sharding.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// Returns the number of ranks that store the entries of a stage.
    fn shard_ranks(&self) -> usize {
        self.stage_ranks() / self.replicas
    }

    /// Returns the entries in module order.
    pub fn entries(&self) -> &[ParamEntry] {
        &self.entries
    }

    /// Returns the index of the entry at `path`, which may be an alias.
    pub fn find(&self, path: &str) -> Option<usize> {
        self.by_path.get(path).copied()
    }

    /// Returns the entry at a path, which may be an alias.
    pub(crate) fn entry(&self, path: &str) -> Option<&ParamEntry> {
        self.find(path).map(|index| &self.entries[index])
    }

    /// Returns the version of the manifest, which says whether entries are omitted and whether
    /// there are a pipeline and replicas.
    pub(crate) fn version(&self) -> u64 {
        match self.entries.iter().any(|entry| entry.base.is_some()) {
            // Each version includes those before it, so the newest feature decides.
            _ if self.replicas > 1 => VERSION_OF_REPLICAS,
            _ if self.stages > 1 => VERSION_OF_PIPELINE,
            true => VERSION_WITH_BASE,
            false => FIRST_VERSION,
        }
    }

    /// Returns the number of elements of an entry.
    pub fn numel(&self, entry: usize) -> usize {
        // The constructor rejects entries that overflow.
        self.entries[entry].checked_numel().unwrap_or(usize::MAX)
    }

    /// Returns the ranks whose files contain elements `range` of an entry.
    pub(crate) fn owners(&self, entry: usize, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        // A chunk without elements belongs to an entry without any, whose ranges are all empty.
        let chunk = self.partition(entry).shard_len().max(1);
        let first = self.first_rank(entry);
        first + range.start / chunk..first + (range.end - 1) / chunk + 1
    }

    /// Returns the flat range of an entry that is in the file of `rank`; empty for a rank that
    /// holds only padding, and for ranks of other pipeline stages and other replicas than the
    /// first.
    pub fn owned(&self, entry: usize, rank: usize) -> Range<usize> {
        match rank.checked_sub(self.first_rank(entry)) {
            Some(rank) if rank < self.shard_ranks() => self.partition(entry).owned(rank),
            _ => 0..0,
        }
    }

    /// Returns the first rank of the pipeline stage of an entry.
    fn first_rank(&self, entry: usize) -> usize {
        self.entries[entry].pipeline_stage * self.stage_ranks()
    }

    /// Returns the partition of an entry's flat elements, the same that training uses for shards.
    fn partition(&self, entry: usize) -> Partition {
        Partition::new(self.numel(entry), self.shard_ranks())
    }

    /// Returns the tensors of the file of `rank` in the order in which they are written. Wide types
    /// come first, so that each tensor is aligned to its element size. Empty tensors are omitted.
    pub fn segments(&self, rank: usize) -> Vec<Segment> {
        let mut segments = Vec::new();
        for (entry, ParamEntry { states, .. }) in self.entries.iter().enumerate() {
            let range = self.owned(entry, rank);
            if !range.is_empty() {
                let segment = |state| Segment { entry, state, range: range.clone(), offset: 0 };
                segments.extend((0..states.len()).map(segment));
            }
        }
        // The sort is stable, so tensors of one size keep the order of the entries.
        segments.sort_by_key(|segment| std::cmp::Reverse(self.element_size(segment)));
        let mut end = 0;
        for segment in &mut segments {
            segment.offset = end;
            end += self.segment_len(segment);
        }
        segments
    }

    /// Returns the length of the file of `rank` in bytes.
    pub(crate) fn file_len(&self, rank: usize, identity: &Identity) -> u64 {
        self.header(rank, &self.segments(rank), identity).file_len()
    }

    /// Returns the name of a tensor in a file.
    pub(crate) fn name(&self, segment: &Segment) -> String {
        let entry = &self.entries[segment.entry];
        format!("{}:{}", entry.path, entry.states[segment.state].kind)
    }

    /// Returns the length of a tensor in bytes.
    pub(crate) fn segment_len(&self, segment: &Segment) -> u64 {
        segment.range.len() as u64 * self.element_size(segment) as u64
    }

    /// Returns the size of an element of this tensor in bytes.
    fn element_size(&self, segment: &Segment) -> usize {
        self.entries[segment.entry].states[segment.state].element.size()
    }

    /// Returns the header of the file of `rank`. `segments` is the result of [`Self::segments`] for
    /// this rank; the header has the same offsets.
    pub(crate) fn header(&self, rank: usize, segments: &[Segment], identity: &Identity) -> Header {
        let mut header = Header::new(identity.of_file(rank, self.world_size));
        for segment in segments {
            let element = self.entries[segment.entry].states[segment.state].element;
            let start = header.push(&self.name(segment), element, &[segment.range.len()]);
            // Readers compute offsets from the segments alone, so the two must agree.
            debug_assert_eq!(start, segment.offset);
        }
        header
    }

    /// Returns a hash of the layout. Rank 0 compares the hashes of all ranks to check that they use
    /// the same layout.
    pub(crate) fn digest(&self) -> String {
        let text = serde_json::to_vec(self).expect("names and numbers always are JSON");
        blake3::hash(&text).to_hex().to_string()
    }
}

/// Returns the reason why these ranks cannot be divided into pipeline stages and replicas; `None`
/// if they can.
fn uneven(world_size: usize, stages: usize, replicas: usize) -> Option<String> {
    if !(1..=MAX_WORLD_SIZE).contains(&world_size) {
        return Some(format!("{world_size} ranks; must be 1 to {MAX_WORLD_SIZE}"));
    }
    if stages == 0 || !world_size.is_multiple_of(stages) {
        return Some(format!(
            "{stages} pipeline stages of {world_size} ranks; each must have as many"
        ));
    }
    let ranks = world_size / stages;
    let is_uneven = replicas == 0 || !ranks.is_multiple_of(replicas);
    is_uneven.then(|| format!("{replicas} replicas of {ranks} ranks; each must have as many"))
}

/// Returns the reason why the element types of an entry are invalid; `None` if they are valid.
fn mistyped(entry: &ParamEntry) -> Option<String> {
    let ParamEntry { path, kind, trainable, states, base, .. } = entry;
    if base.is_some() && (*trainable || !states.is_empty() || *kind == EntryKind::Buffer) {
        return Some(format!(
            "{path} is omitted; only frozen parameters are, with all their arrays"
        ));
    }
    match kind {
        EntryKind::Parameter => {
            let wrong = states.iter().find(|stored| !stored.element.is_trainable())?;
            Some(format!("parameter {path} is stored as {}; only buffers are", wrong.element))
        }
        EntryKind::Buffer => {
            let values_alone = states.len() == 1 && states[0].kind == StateKind::Weights;
            (*trainable || !values_alone)
                .then(|| format!("buffer {path} has more than values, which only parameters have"))
        }
    }
}

/// Returns the number of bytes of all arrays of an entry; `None` if it overflows. An omitted entry
/// counts as if it were stored, because exports contain it. An entry without arrays counts as one
/// byte per element, so that sums of element counts cannot overflow either.
fn stored_bytes(entry: &ParamEntry) -> Option<u64> {
    let sizes = entry.states.iter().map(|stored| stored.element.size());
    let base = entry.base.iter().map(|base| base.element.size());
    let size = sizes.chain(base).sum::<usize>().max(1);
    u64::try_from(entry.checked_numel()?.checked_mul(size)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::{buffer, parameter};
    use crate::{BaseValues, ElementType, StoredState};
    use proptest::prelude::*;

    fn refusal(entries: Vec<ParamEntry>, world_size: usize) -> String {
        Layout::new(entries, world_size).unwrap_err().to_string()
    }

    #[test]
    fn impossible_layouts_are_refused() {
        assert!(refusal(vec![], 0).contains("0 ranks"));
        assert!(refusal(vec![], usize::MAX).contains("ranks; must be"));
        let (a, b) = (parameter("a", &[2]), parameter("b", &[2]));
        assert!(refusal(vec![a.clone(), a.clone()], 1).contains("two parameters have the path a"));
        let alias = ParamEntry { aliases: vec!["a".into()], ..b.clone() };
        assert!(refusal(vec![a.clone(), alias], 1).contains("two parameters have the path a"));
        for path in ["", "a:b", "a\nb"] {
            let error = refusal(vec![parameter(path, &[2])], 1);
            assert!(error.contains("invalid parameter path"), "{error}");
        }
        let twice = ParamEntry { states: [b.states.clone(), b.states].concat(), ..a };
        assert!(refusal(vec![twice], 1).contains("has the state weights twice"));
        for shape in [&[usize::MAX, 2][..], &[usize::MAX], &[usize::MAX / 8]] {
            assert!(refusal(vec![parameter("huge", shape)], 1).contains("larger than any memory"));
        }
        let huge = parameter("huge", &[1 << 59]);
        let other = ParamEntry { path: "other".into(), ..huge.clone() };
        assert!(Layout::new(vec![huge.clone()], 1).is_ok());
        assert!(refusal(vec![huge, other], 1).contains("parameter other of shape"));
    }

    #[test]
    fn ranks_of_a_stage_store_its_entries() {
        let b = ParamEntry { pipeline_stage: 1, ..parameter("b", &[3]) };
        let entries = vec![parameter("a", &[5]), b.clone()];
        let layout = Layout::of_mesh(entries.clone(), 4, 2, 1).unwrap();
        assert_eq!([0, 1, 2, 3].map(|rank| layout.owned(0, rank)), [0..3, 3..5, 0..0, 0..0]);
        assert_eq!([0, 1, 2, 3].map(|rank| layout.owned(1, rank)), [0..0, 0..0, 0..2, 2..3]);
        assert_eq!([layout.owners(0, &(1..5)), layout.owners(1, &(1..2))], [0..2, 2..3]);
        assert_eq!(layout.version(), 3);
        let text = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
        assert!(text.starts_with(r#"{"world_size":4,"pipeline_stages":2,"#), "{text}");
        assert_eq!(text.matches("pipeline_stage\":1").count(), 1, "{text}");
        // Other layouts have the same JSON as before there were pipelines.
        let text = serde_json::to_string(&Layout::new(vec![parameter("a", &[2])], 4).unwrap());
        assert!(!text.unwrap().contains("pipeline"));

        for stages in [0, 3] {
            let error = Layout::of_mesh(entries.clone(), 4, stages, 1).unwrap_err().to_string();
            assert!(error.contains("pipeline stages of 4 ranks"), "{error}");
        }
        assert!(refusal(vec![b], 4).contains("b is of pipeline stage 1, and there are 1"));
    }

    #[test]
    fn ranks_of_the_first_replica_store_the_entries_of_a_stage() {
        let b = ParamEntry { pipeline_stage: 1, ..parameter("b", &[3]) };
        let entries = vec![parameter("a", &[5]), b];
        let layout = Layout::of_mesh(entries.clone(), 8, 2, 2).unwrap();
        let owned = |entry| [0, 1, 2, 3, 4, 5, 6, 7].map(|rank| layout.owned(entry, rank).len());
        assert_eq!((owned(0), owned(1)), ([3, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 2, 1, 0, 0]));
        assert_eq!([layout.owners(0, &(1..5)), layout.owners(1, &(1..3))], [0..2, 4..6]);
        assert_eq!((layout.version(), layout.stage_ranks(), layout.replicas()), (4, 4, 2));
        let text = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
        assert!(text.starts_with(r#"{"world_size":8,"pipeline_stages":2,"replicas":2,"#), "{text}");
        let text = serde_json::to_string(&Layout::new(vec![parameter("a", &[2])], 4).unwrap());
        assert!(!text.unwrap().contains("replicas"));
        for replicas in [0, 3] {
            let error = Layout::of_mesh(entries.clone(), 8, 2, replicas).unwrap_err().to_string();
            assert!(error.contains("replicas of 4 ranks"), "{error}");
        }
    }

    #[test]
    fn parameters_are_floats_and_buffers_have_only_values() {
        let mut integers = parameter("a", &[2]);
        integers.states[0].element = ElementType::I32;
        assert!(refusal(vec![integers], 1).contains("parameter a is stored as I32"));
        for element in ElementType::ALL {
            assert!(Layout::new(vec![buffer("b", &[2], element)], 1).is_ok());
        }
        let with_moment =
            ParamEntry { kind: EntryKind::Buffer, trainable: false, ..parameter("b", &[2]) };
        let trainable = ParamEntry { trainable: true, ..buffer("b", &[2], ElementType::F32) };
        for entry in [with_moment, trainable] {
            assert!(refusal(vec![entry], 1).contains("buffer b has more than values"));
        }
        // Layouts without buffers have the same JSON and the same hash as before buffers were
        // supported.
        let text = serde_json::to_string(&parameter("a", &[2])).unwrap();
        assert!(!text.contains("kind"), "{text}");
        let text = serde_json::to_string(&buffer("b", &[2], ElementType::I64)).unwrap();
        assert!(text.contains(r#""kind":"buffer""#), "{text}");
    }

    #[test]
    fn only_frozen_parameters_are_omitted() {
        let base = Some(BaseValues::of(ElementType::F32, &[0; 8]));
        let frozen = ParamEntry {
            trainable: false,
            states: vec![],
            base: base.clone(),
            ..parameter("a", &[2])
        };
        let layout = Layout::new(vec![frozen.clone(), parameter("b", &[2])], 2).unwrap();
        assert_eq!((layout.version(), layout.segments(0).len()), (2, 2));
        for entry in [
            ParamEntry { trainable: true, ..frozen.clone() },
            ParamEntry { base: base.clone(), trainable: false, ..parameter("a", &[2]) },
            ParamEntry { kind: EntryKind::Buffer, ..frozen },
        ] {
            assert!(refusal(vec![entry], 1).contains("a is omitted; only frozen parameters are"));
        }
        // Other layouts have the same JSON, hash and version as before parameters were omitted.
        let whole = Layout::new(vec![parameter("a", &[2])], 1).unwrap();
        assert_eq!(whole.version(), 1);
        assert!(!serde_json::to_string(&whole).unwrap().contains("base"));
    }

    #[test]
    fn deserialized_layouts_are_validated() {
        let layout = Layout::new(vec![parameter("a", &[2, 3])], 2).unwrap();
        let text = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
        // The names in files are part of the format and never change.
        let start = r#"{"world_size":2,"atoms":[{"path":"a","shape":[2,3],"trainable":true,"#;
        assert!(text.starts_with(start), "{text}");
        assert!(text.contains(r#""slots":[{"slot":"weights","element":"F32"},"#), "{text}");
        assert!(serde_json::from_str::<Layout>(&text.replace("[2,3]", "[-1]")).is_err());
        let error =
            serde_json::from_str::<Layout>(&text.replace("\"world_size\":2", "\"world_size\":0"));
        assert!(error.unwrap_err().to_string().contains("0 ranks"));
        let other = Layout::new(vec![parameter("a", &[3, 2])], 2).unwrap();
        assert_ne!(layout.digest(), other.digest());
    }

    #[test]
    fn wide_types_come_first_and_empty_tensors_are_omitted() {
        let half = StoredState { kind: StateKind::Gradient, element: ElementType::Bf16 };
        let odd = |path| {
            let entry = parameter(path, &[3]);
            ParamEntry { states: [vec![half.clone()], entry.states.clone()].concat(), ..entry }
        };
        let layout = Layout::new(vec![odd("a"), odd("b"), parameter("none", &[0])], 2).unwrap();
        let names = |rank| -> Vec<_> {
            layout.segments(rank).iter().map(|segment| layout.name(segment)).collect()
        };
        assert_eq!(
            names(0),
            ["a:weights", "a:exp_avg", "b:weights", "b:exp_avg", "a:gradient", "b:gradient",]
        );
        assert_eq!(layout.segments(1)[1].offset, 4);
        assert_eq!(layout.owned(2, 0), 0..0);
        let four = Layout::new(vec![parameter("a", &[3])], 5).unwrap();
        assert_eq!(four.segments(4), []);
        let found: Vec<_> = (0..5).map(|rank| four.owned(0, rank)).collect();
        assert_eq!(found, [0..1, 1..2, 2..3, 3..3, 3..3]);
    }

    proptest! {
        #[test]
        fn headers_are_sound_safetensors(
            sizes in prop::collection::vec(0_usize..50, 0..6), world_size in 1_usize..6,
        ) {
            let named = |(i, &n): (usize, &usize)| parameter(&format!("p{i}\"."), &[n]);
            let entries = sizes.iter().enumerate().map(named).collect();
            let layout = Layout::new(entries, world_size).unwrap();
            let identity = Identity::new("x".parse().unwrap());
            for rank in 0..world_size {
                let segments = layout.segments(rank);
                let mut file = layout.header(rank, &segments, &identity).to_bytes();
                file.resize(layout.file_len(rank, &identity) as usize, 0);
                let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
                prop_assert_eq!(tensors.len(), segments.len());
                for segment in &segments {
                    let tensor = tensors.tensor(&layout.name(segment)).unwrap();
                    prop_assert_eq!(tensor.shape(), &[segment.range.len()]);
                }
            }
        }

        #[test]
        fn chunks_tile_the_parameter(numel in 0_usize..10_000, world_size in 1_usize..70) {
            let layout = Layout::new(vec![parameter("a", &[numel])], world_size).unwrap();
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
