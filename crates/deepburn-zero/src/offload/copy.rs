//! Copy-on-write snapshots of parked arrays for checkpoints.
//!
//! A checkpoint is saved on a separate thread while training continues. Copying all states at the
//! start would need the memory that offload is meant to free. A [`ParkedCopy`] therefore reads the
//! array in place. The elements are read into memory only before an optimizer step overwrites them.
//! If steps are faster than the save, all states may therefore end up in memory.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn_backend::{Bytes, DType, TensorData};
use deepburn_nvme::SwapError;

use super::{ParkedArray, copied, lock};

/// A snapshot of elements of a parked array. It takes no memory until the array is overwritten.
#[derive(Debug)]
pub(crate) struct ParkedCopy {
    /// The range of elements in the array.
    range: Range<usize>,
    dtype: DType,
    source: Mutex<CopiedFrom>,
}

/// The source of a copy's elements.
#[derive(Debug)]
enum CopiedFrom {
    /// The array, which has not changed since the snapshot was taken.
    Parked(Arc<ParkedArray>),
    /// The bytes of the range, read before the array was overwritten.
    Memory(Vec<u8>),
}

impl ParkedCopy {
    pub(super) fn new(array: Arc<ParkedArray>, range: Range<usize>, dtype: DType) -> Self {
        Self { range, dtype, source: Mutex::new(CopiedFrom::Parked(array)) }
    }

    /// Returns the number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.range.len()
    }

    /// Returns elements `range` of the copy, flat.
    ///
    /// # Errors
    /// Returns an error if the disk fails or host memory cannot be allocated.
    ///
    /// # Panics
    /// Panics if `range` is out of bounds.
    pub(crate) fn read(&self, range: Range<usize>) -> Result<TensorData, SwapError> {
        assert!(range.end <= self.range.len(), "{range:?} of {} elements", self.range.len());
        let size = self.dtype.size();
        // The lock is held while the file is read, so that a step waits before it overwrites the
        // elements.
        let bytes = match &*lock(&self.source) {
            CopiedFrom::Memory(bytes) => copied(&bytes[range.start * size..range.end * size])?,
            CopiedFrom::Parked(array) => {
                let start = self.range.start;
                array.read_range(&(start + range.start..start + range.end), self.dtype)?
            }
        };
        Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), [range.len()], self.dtype))
    }

    /// Reads all elements into memory, so that the array can be overwritten. Later calls do
    /// nothing.
    ///
    /// # Errors
    /// Returns an error if the disk fails or host memory cannot be allocated.
    pub(super) fn keep(&self) -> Result<(), SwapError> {
        let mut source = lock(&self.source);
        if let CopiedFrom::Parked(array) = &*source {
            *source = CopiedFrom::Memory(array.read_range(&self.range, self.dtype)?);
        }
        Ok(())
    }
}
