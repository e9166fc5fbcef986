//! Sharded checkpoints that load at any number of ranks and any ZeRO stage.
//!
//! ```text
//! ROOT/latest                           the tag to resume from, and its manifest's checksum
//! ROOT/step-00000010/manifest.json      entries, ranks, states, checksums
//! ROOT/step-00000010/rank-00000.safetensors ...
//! ROOT/.step-00000020.partial/          a save in progress, or one that was killed
//! ROOT/.step-00000010.deleted/          a checkpoint that is being deleted
//! ROOT/step-00000010.damaged-1/         a damaged checkpoint whose step was saved again
//! ```
//!
//! A [`ParamEntry`] describes a parameter and all arrays that are stored for it, or a buffer (a
//! running statistic, an integer or bool parameter). [`Layout`] partitions the entries over the
//! ranks. [`Save`] and [`RankWriter`] write a checkpoint atomically: it is either complete or does
//! not exist. [`Checkpoint`] reads any range of any parameter and verifies each file before using
//! it. [`Retention`] deletes old checkpoints, [`consolidate()`] exports weights for other programs,
//! and [`Checkpoint::describe`] prints the contents.
//!
//! ```
//! use std::sync::Arc;
//! use deepburn_checkpoint::*;
//! use serde_json::json;
//!
//! # let root = tempfile::tempdir()?;
//! # let root = root.path();
//! let states = vec![StoredState { kind: StateKind::Weights, element: ElementType::F32 }];
//! let (path, shape) = ("linear.weight".to_owned(), vec![2, 3]);
//! let kind = EntryKind::Parameter;
//! let (base, pipeline_stage) = (None, 0);
//! let entry =
//!     ParamEntry { path, shape, kind, trainable: true, aliases: vec![], states, base, pipeline_stage };
//! let layout = Arc::new(Layout::new(vec![entry], 2)?);
//!
//! // Two ranks write their files, here one after the other.
//! let save = Save::begin(root, Tag::of_step(10), layout.clone())?;
//! let mut records = vec![];
//! for (rank, owned) in [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]].iter().enumerate() {
//!     let mut writer = RankWriter::create(save.ticket(), layout.clone(), rank)?;
//!     writer.write::<f32>("linear.weight", &StateKind::Weights, owned)?;
//!     records.push(writer.finish(json!({ "seed": rank }))?);
//! }
//! let (job, state) = ("example".to_owned(), json!({ "tokens": 4096 }));
//! let run = Run { step: 10, stage: 2, working: ElementType::F32, job, metric: None, state };
//! save.commit(records, run)?;
//!
//! // Any number of ranks can read the checkpoint.
//! let checkpoint = Checkpoint::open_intact(root, None)?;
//! let values = checkpoint.read("linear.weight", &StateKind::Weights, 2..5)?;
//! assert_eq!(values, Values::F32(vec![3.0, 4.0, 5.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A checkpoint may omit frozen parameters, whose values are in a base model. Its entry then has
//! the hash of the values ([`BaseValues`]), and [`Checkpoint::set_base`] gives the checkpoint the
//! model to read them from.
//!
//! Files are verified with BLAKE3. It is collision-resistant and, unlike SHA-256, fast enough that
//! a single core hashes faster than a disk writes. The command-line tool `b3sum` computes the same
//! checksums.
//!
//! The crate stores tensors as flat slices and does not communicate between ranks. The values that
//! ranks have to exchange ([`SaveTicket`] and [`RankRecord`]) are serializable, and the caller
//! sends them. All ranks must access the same folder, so a run on several machines needs a shared
//! file system.

mod base_reader;
mod base_values;
mod checkpoint;
mod consolidate;
mod disk;
mod error;
mod flusher;
mod foreign;
mod identity;
mod inspect;
mod layout;
mod manifest;
mod param_entry;
mod rank_file;
mod rank_writer;
mod retention;
mod save;
mod store;
mod stored_element;
mod tag;
#[cfg(test)]
mod tests;

pub use base_values::BaseValues;
pub use checkpoint::Checkpoint;
pub use consolidate::{Consolidated, Consolidation, NotFinite, consolidate};
pub use deepburn_weights::WeightMap;
pub use error::CheckpointError;
pub use layout::{Layout, Segment};
pub use manifest::{RankRecord, Run};
pub use param_entry::{EntryKind, ParamEntry, StateKind, StoredState};
pub use rank_writer::RankWriter;
pub use retention::{Retention, delete_checkpoint};
pub use save::{Save, SaveTicket};
pub use stored_element::{ElementType, StoredElement, Values};
pub use tag::{Tag, TagError};
