//! Atomic file writes, and the safetensors format.
//!
//! Main type: [`PartialFile`]. The file is written under a temporary name and renamed when it is
//! complete. Readers therefore never see an incomplete file at the final path, even if the writing
//! program is killed. [`safetensors`] writes tensors to such files.
//!
//! ```
//! use std::io::Write;
//!
//! use deepburn_files::PartialFile;
//!
//! # let folder = tempfile::tempdir()?;
//! let path = folder.path().join("results.json");
//! let mut file = PartialFile::create(&path, path.with_extension("json.partial"))?;
//! file.write_all(b"{}\n")?;
//! assert!(!path.exists());
//! file.finish_synced()?;
//! assert_eq!(std::fs::read(&path)?, b"{}\n");
//! # Ok::<(), std::io::Error>(())
//! ```

mod partial_file;
pub mod safetensors;

pub use partial_file::PartialFile;
