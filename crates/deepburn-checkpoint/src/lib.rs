//! Sharded checkpoints that load at any number of ranks and any ZeRO stage.
//!
//! ```text
//! ROOT/latest                           the tag to go on from, and its manifest's checksum
//! ROOT/step-00000010/manifest.json      atoms, ranks, states, checksums
//! ROOT/step-00000010/rank-00000.safetensors ...
//! ```
//!
//! A parameter with everything that belongs to it is an [`Atom`], cut over the ranks as
//! [`Layout`] says. [`Save`] and [`RankWriter`] write a checkpoint that is there whole or not at
//! all; [`Checkpoint`] reads any range of any parameter, and no byte before it is verified.
//! [`Retention`] deletes old ones, [`consolidate()`] makes weights for other programs of one, and
//! [`Checkpoint::describe`] shows what is inside.
//!
//! Files are verified by BLAKE3: a corruption cannot be constructed, let alone happen, and one core
//! hashes faster than disks write, which SHA-256 does not; `b3sum` checks them by hand.
//!
//! The crate knows tensors as flat slices and moves nothing between ranks: what they have to tell
//! each other are serialisable values, and sending them is the caller's. All ranks see one folder;
//! where ranks run on several machines, that is a shared file system.

mod atom;
mod checkpoint;
mod consolidate;
mod disk;
mod element;
mod error;
#[cfg(test)]
mod fixture;
mod flusher;
mod foreign;
mod identity;
mod inspect;
mod layout;
mod manifest;
mod rank_file;
mod rank_writer;
mod retention;
mod save;
mod store;
mod tag;
#[cfg(test)]
mod tests;

pub use atom::{Atom, Slot, StoredSlot};
pub use checkpoint::Checkpoint;
pub use consolidate::{AsTrained, Consolidation, Export, consolidate};
pub use element::{Element, ElementType, Values};
pub use error::CheckpointError;
pub use identity::Identity;
pub use layout::{Layout, Piece};
pub use manifest::{RankRecord, Run};
pub use rank_writer::RankWriter;
pub use retention::Retention;
pub use save::{Save, Ticket};
pub use tag::Tag;
