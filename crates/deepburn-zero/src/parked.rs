//! Arrays that are parked outside of the device: in host memory, or in a file on NVMe.
//!
//! A [`ParkedArray`] is a flat array of floats, cut into pieces:
//!
//! ```text
//!  elements      0 ............ P-1 │ P ............ 2P-1 │ 2P .. n-1
//!  host memory   packed, in words of 4 bytes
//!  file region   piece 0            │ piece 1             │ piece 2 │ padding
//!                each piece begins at a multiple of what direct I/O needs (4 KiB)
//! ```
//!
//! There are three ways to use one:
//!
//! - *A step* updates one piece after the other with the kernels of the CPU. Pieces of a file are
//!   read ahead and written behind by a [`Pipeline`], so only a few of them are in memory.
//! - *A gather or a gradient sum* reads the array whole, straight into the memory of a tensor
//!   ([`ParkedTensor`]).
//! - *A checkpoint* reads ranges where they lie, through a [`ParkedCopy`]. A write that finds a
//!   save still reading first reads what the save needs into memory.
//!
//! The caller knows the element type, and it may change from one write to the next: a gradient sum
//! of one micro-batch is in bf16, the next one in f32. The layout therefore reserves bytes for the
//! largest type.
//!
//! A failed write is final for a file. Every later call on any of its arrays returns the error.

mod activation;
mod copy;
mod pipeline;
mod read;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::DType;
use deepburn_config::SwapFilePlan;
use deepburn_nvme::{
    ALIGNMENT, AlignedBuffer, IoPolicy, IoStatistics, Region, SwapError, SwapFile,
};

use crate::ledger::{Category, Lease, Ledger, Tier};

pub(crate) use activation::{ActivationStore, ParkedActivation};
pub(crate) use copy::ParkedCopy;
pub(crate) use pipeline::{PieceRead, Pipeline, PipelinePolicy, WriteBehind};
pub(crate) use read::{ParkedRead, ParkedTensor};

/// The largest number of elements in a piece: 4 MiB of f32, with which a disk reads at full speed.
pub(crate) const PIECE: usize = 1 << 20;

/// The location of parked arrays.
#[derive(Debug, Clone)]
pub(crate) enum Store {
    /// In host memory.
    Host,
    /// In a file of this rank.
    Disk(Arc<SwapFile>),
}

/// The layout of a parked array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PieceLayout {
    /// Number of elements.
    pub(crate) len: usize,
    /// The largest number of elements in a piece.
    pub(crate) piece: usize,
    /// The size in bytes of the largest type that the elements will have.
    pub(crate) element_bytes: usize,
}

/// Returns the I/O policy of a file.
pub(crate) fn io_policy(file: &SwapFilePlan) -> IoPolicy {
    let SwapFilePlan { block_size, queue_depth, .. } = *file;
    IoPolicy { block_size, queue_depth, ..IoPolicy::default() }
}

/// A flat array outside of the device. The caller knows the type of its elements, which may change
/// from one write to the next.
#[derive(Debug)]
pub(crate) struct ParkedArray {
    /// Number of elements, pieces and reserved bytes.
    layout: PieceLayout,
    /// The elements.
    data: ParkedData,
    /// Copies that were handed out and may still be read.
    copies: Mutex<Vec<Weak<ParkedCopy>>>,
    /// Counts the reserved bytes on the tier of the store.
    _lease: Lease,
}

/// The elements of a parked array.
#[derive(Debug)]
enum ParkedData {
    /// The elements, packed, in words whose alignment suits every type.
    Host(Mutex<Vec<u32>>),
    /// Each piece padded to what direct I/O needs.
    Disk { file: Arc<SwapFile>, region: Region },
}

impl Store {
    /// Returns buffers that no transfer uses to the operating system.
    pub(crate) fn release_idle(&self) {
        if let Self::Disk(file) = self {
            file.pool().release_idle();
        }
    }

    /// Returns what was read from the file and written to it, and how long this rank waited; `None`
    /// in host memory.
    pub(crate) fn io_statistics(&self) -> Option<IoStatistics> {
        match self {
            Self::Host => None,
            Self::Disk(file) => Some(file.statistics()),
        }
    }

    /// Returns true for a file that grows, whose regions return to it with their arrays
    /// (activations).
    fn grows(&self) -> bool {
        matches!(self, Self::Disk(file) if file.grows())
    }
}

impl Drop for ParkedArray {
    fn drop(&mut self) {
        if let ParkedData::Disk { file, region } = &self.data
            && file.grows()
        {
            file.release(region);
        }
    }
}

impl PieceLayout {
    /// Returns the ranges of the pieces in elements, in order.
    pub(crate) fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        let piece = self.piece.max(1);
        (0..self.len).step_by(piece).map(move |start| start..self.len.min(start + piece))
    }

    /// Returns the bytes that the array takes in a file, with padding.
    pub(crate) fn file_bytes(self) -> u64 {
        self.pieces().last().map_or(0, |last| self.extent(&last, self.element_bytes).end as u64)
    }

    /// Returns the padded byte range of a piece within the array's region, for elements of `size`
    /// bytes. Pieces of a smaller type lie closer together.
    fn extent(self, piece: &Range<usize>, size: usize) -> Range<usize> {
        let start = piece.start / self.piece.max(1) * padded(self.piece.saturating_mul(size));
        start..start + padded(piece.len() * size)
    }
}

/// Rounds a number of bytes up to a multiple of the alignment that direct I/O needs.
fn padded(bytes: usize) -> usize {
    SwapFile::padded(bytes) as usize
}

impl ParkedArray {
    /// Creates an array of zeros, which the ledger counts under `category`. The file must not grow,
    /// because a region that was used before does not read as zeros.
    ///
    /// # Errors
    ///
    /// Returns an error if the file is full or host memory cannot be allocated.
    pub(crate) fn zeros(
        store: &Store,
        layout: PieceLayout,
        ledger: &Ledger,
        category: Category,
    ) -> Result<Arc<Self>, SwapError> {
        // A region of a growing file may have belonged to another array.
        debug_assert!(!store.grows(), "released parts of a file hold what was there before");
        // What was never written reads as zeros.
        Self::unfilled(store, layout, ledger, category)
    }

    /// Creates an array that has to be written before it is read, because its contents are
    /// undefined.
    ///
    /// # Errors
    ///
    /// Returns an error if the file is full or cannot grow, or if host memory cannot be allocated.
    fn unfilled(
        store: &Store,
        layout: PieceLayout,
        ledger: &Ledger,
        category: Category,
    ) -> Result<Arc<Self>, SwapError> {
        let (tier, bytes, data) = match store {
            Store::Host => {
                let words = (layout.len * layout.element_bytes).div_ceil(size_of::<u32>());
                let bytes = layout.len * layout.element_bytes;
                let mut zeros = with_capacity::<u32>(words)?;
                zeros.resize(words, 0);
                (Tier::Host, bytes, ParkedData::Host(Mutex::new(zeros)))
            }
            Store::Disk(file) => {
                let bytes = layout.file_bytes() as usize;
                let data = ParkedData::Disk { file: file.clone(), region: file.region(bytes)? };
                (Tier::Disk, bytes, data)
            }
        };
        let lease = ledger.hold_on(tier, category, bytes);
        Ok(Arc::new(Self { layout, data, copies: Mutex::default(), _lease: lease }))
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.layout.len
    }

    /// Returns the ranges of the pieces in elements, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Range<usize>> {
        self.layout.pieces()
    }

    /// Returns the transfer that brings a piece into memory; `None` in host memory.
    pub(crate) fn piece_read(&self, piece: &Range<usize>, dtype: DType) -> Option<PieceRead> {
        match &self.data {
            ParkedData::Host(_) => None,
            ParkedData::Disk { file, region } => Some(PieceRead {
                file: file.clone(),
                region: region.clone(),
                bytes: self.layout.extent(piece, dtype.size()),
            }),
        }
    }

    /// Returns a piece in memory, to be read or changed. A piece of a file comes through
    /// `pipeline`, in the order in which the step announced its pieces.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    pub(crate) fn piece(
        &self,
        piece: &Range<usize>,
        dtype: DType,
        pipeline: &mut Pipeline,
    ) -> Result<PieceInMemory<'_>, SwapError> {
        let size = dtype.size();
        Ok(match (&self.data, self.piece_read(piece, dtype)) {
            (_, Some(read)) => PieceInMemory::Disk(pipeline.read(&read)?, piece.len() * size, read),
            (ParkedData::Host(words), None) => {
                PieceInMemory::Host(lock(words), piece.start * size..piece.end * size)
            }
            (ParkedData::Disk { .. }, None) => unreachable!("a piece of a file is read"),
        })
    }

    /// Returns a piece in memory that has to be overwritten, because its contents are undefined.
    /// Nothing is read.
    ///
    /// # Errors
    ///
    /// Returns an error if a buffer cannot be allocated.
    pub(crate) fn unfilled_piece(
        &self,
        piece: &Range<usize>,
        dtype: DType,
    ) -> Result<PieceInMemory<'_>, SwapError> {
        let size = dtype.size();
        Ok(match (&self.data, self.piece_read(piece, dtype)) {
            (_, Some(read)) => {
                let buffer = read.file.pool().unfilled(read.bytes.len())?;
                PieceInMemory::Disk(buffer, piece.len() * size, read)
            }
            (ParkedData::Host(words), None) => {
                PieceInMemory::Host(lock(words), piece.start * size..piece.end * size)
            }
            (ParkedData::Disk { .. }, None) => unreachable!("a piece of a file has bytes in it"),
        })
    }

    /// Replaces all elements by `bytes` of type `dtype`. Writes to a file may complete after the
    /// call.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails, now or in an earlier write.
    pub(crate) fn write(
        &self,
        bytes: &[u8],
        dtype: DType,
        writes: &mut WriteBehind,
    ) -> Result<(), SwapError> {
        self.keep_copies()?;
        let size = dtype.size();
        for range in self.pieces() {
            let mut piece = self.unfilled_piece(&range, dtype)?;
            piece.bytes().copy_from_slice(&bytes[range.start * size..range.end * size]);
            if let PieceInMemory::Disk(buffer, _, read) = piece {
                writes.write(&read, buffer)?;
            }
        }
        Ok(())
    }

    /// Returns elements `range` as they are now. Later writes do not change the copy.
    pub(crate) fn copy(self: &Arc<Self>, range: Range<usize>, dtype: DType) -> Arc<ParkedCopy> {
        let copy = Arc::new(ParkedCopy::new(self.clone(), range, dtype));
        let mut copies = lock(&self.copies);
        copies.retain(|copy| copy.strong_count() > 0);
        copies.push(Arc::downgrade(&copy));
        copy
    }

    /// Reads what copies need into memory, before the array is overwritten. Every write has to call
    /// this first.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails. Nothing may be overwritten then.
    pub(crate) fn keep_copies(&self) -> Result<(), SwapError> {
        let mut copies = lock(&self.copies);
        while let Some(copy) = copies.last() {
            if let Some(copy) = copy.upgrade() {
                // One that cannot be kept stays, so that nothing overwrites its source.
                copy.keep()?;
            }
            copies.pop();
        }
        Ok(())
    }

    /// Returns the bytes of elements `range`, read piece by piece.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails or host memory cannot be allocated.
    fn read_range(&self, range: &Range<usize>, dtype: DType) -> Result<Vec<u8>, SwapError> {
        let size = dtype.size();
        let (file, region) = match &self.data {
            ParkedData::Host(words) => {
                let words = lock(words);
                let bytes: &[u8] = bytemuck::cast_slice(&words);
                return copied(&bytes[range.start * size..range.end * size]);
            }
            ParkedData::Disk { file, region } => (file, region),
        };
        let mut read = with_capacity(range.len() * size)?;
        for piece in self.pieces() {
            let (start, end) = (range.start.max(piece.start), range.end.min(piece.end));
            if start >= end {
                continue;
            }
            // A read begins at a multiple of the alignment.
            let skipped = (start - piece.start) * size % ALIGNMENT;
            let first = self.layout.extent(&piece, size).start;
            let bytes = [start, end].map(|element| first + (element - piece.start) * size);
            let buffer = file.read(region, bytes[0] - skipped..bytes[1])?.wait()?;
            read.extend_from_slice(&buffer.as_bytes()[skipped..]);
        }
        Ok(read)
    }
}

/// A piece of an array in memory, which can be changed.
#[derive(Debug)]
pub(crate) enum PieceInMemory<'a> {
    /// Bytes of an array in host memory, locked.
    Host(MutexGuard<'a, Vec<u32>>, Range<usize>),
    /// A buffer, how many of its bytes are elements, and where it was read.
    Disk(AlignedBuffer, usize, PieceRead),
}

impl PieceInMemory<'_> {
    /// Returns the bytes of the elements, without padding.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Host(words, bytes) => {
                &mut bytemuck::cast_slice_mut::<u32, u8>(words)[bytes.clone()]
            }
            Self::Disk(buffer, bytes, _) => &mut buffer.as_mut_bytes()[..*bytes],
        }
    }

    /// Returns the elements of an f32 array.
    pub(crate) fn floats(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes())
    }

    /// Writes a changed piece back. In host memory it was changed in place.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails, now or in an earlier write.
    pub(crate) fn store(self, pipeline: &mut Pipeline) -> Result<(), SwapError> {
        match self {
            Self::Host(..) => Ok(()),
            Self::Disk(buffer, _, read) => pipeline.write(&read, buffer),
        }
    }
}

/// Returns an empty vector with capacity for `len` elements, or an error if memory cannot be
/// allocated. `Vec::with_capacity` would end the process instead (`ulimit -v`, or a system that
/// does not overcommit).
fn with_capacity<T>(len: usize) -> Result<Vec<T>, SwapError> {
    let mut elements = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    let reserved = elements.try_reserve_exact(len);
    reserved.map(|()| elements).map_err(|_| SwapError::OutOfMemory { bytes, held: 0 })
}

/// Returns a copy of `bytes`, or an error if memory cannot be allocated.
fn copied(bytes: &[u8]) -> Result<Vec<u8>, SwapError> {
    let mut copy = with_capacity(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// Locks a mutex, even if it is poisoned: each change is complete before anything that could panic.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
