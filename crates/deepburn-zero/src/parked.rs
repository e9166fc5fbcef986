//! Arrays that are parked outside of the device: in host memory, or in a file on NVMe.
//!
//! A [`ParkedArray`] is a flat array of floats, cut into pieces. A step updates one piece after the other
//! with the kernels of the CPU; pieces of a file are read ahead and written behind by a [`Pipeline`], so that
//! no more than a few of them are in memory. An array may also be read whole, straight into the memory of a
//! tensor. A checkpoint reads arrays where they lie, through a [`ParkedCopy`].

mod activation;
mod copy;
mod pipeline;
mod read;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::DType;
use deepburn_nvme::{ALIGNMENT, Buffer, IoStatistics, Region, SwapError, SwapFile};

use crate::ledger::{Category, Lease, Ledger, Tier};

pub(crate) use activation::{ActivationStore, ParkedActivation};
pub(crate) use copy::ParkedCopy;
pub(crate) use pipeline::{PieceRead, Pipeline, PipelinePolicy, WriteBehind};
pub(crate) use read::{ParkedRead, ParkedTensor};

/// Most elements of one array in a piece: 4 MiB of f32, with which a disk reads at full speed.
pub(crate) const PIECE: usize = 1 << 20;

/// Where arrays are parked.
#[derive(Debug, Clone)]
pub(crate) enum Store {
    /// In host memory.
    Host,
    /// In a file.
    Disk(Arc<SwapFile>),
}

/// How an array is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PieceLayout {
    /// Number of elements.
    pub(crate) len: usize,
    /// Most elements of a piece.
    pub(crate) piece: usize,
    /// Bytes of the largest type that its elements will have.
    pub(crate) element_bytes: usize,
}

/// A flat array outside of the device. The caller knows the type of its elements, which may change from one
/// write to the next.
#[derive(Debug)]
pub(crate) struct ParkedArray {
    layout: PieceLayout,
    data: ParkedData,
    /// Copies that were asked for and that may still be used.
    copies: Mutex<Vec<Weak<ParkedCopy>>>,
    _lease: Lease,
}

#[derive(Debug)]
enum ParkedData {
    /// The elements, one after the other, in words that suit every type.
    Host(Mutex<Vec<u32>>),
    /// Each piece padded to what direct I/O needs.
    Disk { file: Arc<SwapFile>, region: Region },
}

impl Store {
    /// Returns the memory to the system that transfers no longer need.
    pub(crate) fn release_idle(&self) {
        if let Self::Disk(file) = self {
            file.pool().release_idle();
        }
    }

    /// What was read from the file and written to it, and for how long this rank waited; `None` in host memory.
    pub(crate) fn io_statistics(&self) -> Option<IoStatistics> {
        match self {
            Self::Host => None,
            Self::Disk(file) => Some(file.statistics()),
        }
    }

    /// Whether it is a file that grows, whose parts return to it with their arrays.
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
    /// The ranges of the pieces.
    pub(crate) fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        let piece = self.piece.max(1);
        (0..self.len).step_by(piece).map(move |start| start..self.len.min(start + piece))
    }

    /// Bytes in a file.
    pub(crate) fn file_bytes(self) -> u64 {
        self.pieces().last().map_or(0, |last| self.extent(&last, self.element_bytes).end as u64)
    }

    /// The bytes of a piece in a file, where elements have `size` bytes.
    fn extent(self, piece: &Range<usize>, size: usize) -> Range<usize> {
        let start = piece.start / self.piece.max(1) * padded(self.piece.saturating_mul(size));
        start..start + padded(piece.len() * size)
    }
}

/// Rounds a number of bytes up to what direct I/O needs.
fn padded(bytes: usize) -> usize {
    SwapFile::padded(bytes) as usize
}

impl ParkedArray {
    /// An array of zeros, which the ledger has under `category`. Its file does not grow, and keeps its
    /// part for it.
    ///
    /// # Errors
    /// The file is full, or there is no host memory.
    pub(crate) fn zeros(
        store: &Store,
        layout: PieceLayout,
        ledger: &Ledger,
        category: Category,
    ) -> Result<Arc<Self>, SwapError> {
        debug_assert!(!store.grows(), "released parts of a file hold what was there before");
        // What was never written reads as zeros.
        Self::unfilled(store, layout, ledger, category)
    }

    /// An array that is to be written before it is read: it may hold anything.
    ///
    /// # Errors
    /// The file is full, or the disk, where the file grows.
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

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.layout.len
    }

    /// The ranges of the pieces.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Range<usize>> {
        self.layout.pieces()
    }

    /// What a step reads of a file to have a piece; `None` in host memory.
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

    /// A piece in memory, to be read or changed. A piece of a file comes through `pipeline`.
    ///
    /// # Errors
    /// The disk fails.
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

    /// A piece in memory that is to be overwritten: it holds anything.
    ///
    /// # Errors
    /// There is no memory for a buffer.
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

    /// Replaces all elements by `bytes` of the type `dtype`. Writes may complete after the call.
    ///
    /// # Errors
    /// The disk fails, now or in an earlier write.
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

    /// Elements `range` as they are now: later writes leave them as they are.
    pub(crate) fn copy(self: &Arc<Self>, range: Range<usize>, dtype: DType) -> Arc<ParkedCopy> {
        let copy = Arc::new(ParkedCopy::new(self.clone(), range, dtype));
        let mut copies = lock(&self.copies);
        copies.retain(|copy| copy.strong_count() > 0);
        copies.push(Arc::downgrade(&copy));
        copy
    }

    /// Reads what copies need into memory, before their source is overwritten.
    ///
    /// # Errors
    /// The disk fails. Nothing may be overwritten.
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

    /// The bytes of elements `range`.
    ///
    /// # Errors
    /// The disk fails, or there is no host memory.
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

/// A piece of an array, in memory.
#[derive(Debug)]
pub(crate) enum PieceInMemory<'a> {
    /// Bytes of an array in host memory, locked.
    Host(MutexGuard<'a, Vec<u32>>, Range<usize>),
    /// A buffer, how many of its bytes are elements, and where it was read.
    Disk(Buffer, usize, PieceRead),
}

impl PieceInMemory<'_> {
    /// The bytes of the elements, to be changed.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        match self {
            Self::Host(words, bytes) => {
                &mut bytemuck::cast_slice_mut::<u32, u8>(words)[bytes.clone()]
            }
            Self::Disk(buffer, bytes, _) => &mut buffer.as_mut_bytes()[..*bytes],
        }
    }

    /// The elements of an array of f32, to be changed.
    pub(crate) fn floats(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes())
    }

    /// Brings a piece that was changed back to where it belongs.
    ///
    /// # Errors
    /// The disk fails, now or in an earlier write.
    pub(crate) fn store(self, pipeline: &mut Pipeline) -> Result<(), SwapError> {
        match self {
            Self::Host(..) => Ok(()),
            Self::Disk(buffer, _, read) => pipeline.write(&read, buffer),
        }
    }
}

/// An empty array with room for `len` elements. `Vec::with_capacity` would end the process where there is no
/// memory (`ulimit -v`, or a system that does not overcommit).
fn with_capacity<T>(len: usize) -> Result<Vec<T>, SwapError> {
    let mut elements = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    let reserved = elements.try_reserve_exact(len);
    reserved.map(|()| elements).map_err(|_| SwapError::OutOfMemory { bytes, held: 0 })
}

/// A copy of `bytes`.
fn copied(bytes: &[u8]) -> Result<Vec<u8>, SwapError> {
    let mut copy = with_capacity(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// Each change is complete before anything that could panic.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
