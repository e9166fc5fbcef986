//! Hooks that go on without a row if the disk is full.

use std::fmt::Display;

use deepburn::BoxError;

/// Whether the last write of a hook failed because the disk was full.
#[derive(Debug, Default)]
pub(super) struct FullDisk(bool);

impl FullDisk {
    /// Replaces the error of a full disk with a warning, so that training continues. There is one
    /// warning until a write succeeds again.
    ///
    /// `consequence` is the part of the warning that explains what happens to the data.
    ///
    /// # Errors
    /// Returns the error of `written`, unless the disk is full.
    pub(super) fn handle<E: Display + Into<BoxError>>(
        &mut self,
        written: Result<(), E>,
        is_disk_full: fn(&E) -> bool,
        consequence: &str,
    ) -> Result<(), BoxError> {
        match written {
            Err(error) if is_disk_full(&error) => {
                if !self.0 {
                    tracing::warn!("{consequence}: {error}");
                }
                self.0 = true;
                Ok(())
            }
            // Any other outcome, even another error, resets the state, so the next full disk is
            // reported again.
            written => {
                self.0 = false;
                written.map_err(Into::into)
            }
        }
    }
}
