//! Parked arrays: arrays that are offloaded to host memory or to a file on NVMe.
//!
//! A [`ParkedArray`] is a flat array of floats that is divided into chunks of at most `CHUNK`
//! elements:
//!
//! ```text
//!  elements      0 ............ P-1 │ P ............ 2P-1 │ 2P .. n-1
//!  host memory   packed, in words of 4 bytes
//!  file region   chunk 0            │ chunk 1             │ chunk 2 │ padding
//!                each chunk begins at a multiple of the alignment of direct I/O (4 KiB)
//! ```
//!
//! An array is used in three ways:
//!
//! - *An optimizer step* updates one chunk after the other on the CPU. A [`Pipeline`] reads the
//!   chunks of a file ahead and writes them in the background, so only a few chunks are in memory.
//! - *A gather or a gradient sum* reads the whole array directly into the memory of a tensor
//!   ([`ParkedTensor`]).
//! - *A checkpoint* reads ranges in place through a [`ParkedCopy`]. If the array is written while a
//!   checkpoint still needs its elements, these elements are first read into memory.
//!
//! The caller keeps track of the element type, which may change from one write to the next. For
//! example, the gradient of one micro-batch is in bf16, and the sum of two is in f32. The layout
//! therefore reserves bytes for the largest type.
//!
//! A failed write to a file is final: every later call on any of its arrays returns the error, and
//! the rank ends the job. Tensor ops and backward cannot return errors. If the disk fails there,
//! the failure is a `CommError` that names the rank, the parameter and the folder.
//!
//! [`Parking`] creates the store of a rank and allocates its arrays. The users decide what is
//! stored: shards are read by a gather (`parameter`), gradient sums by a reduction (`gradient`),
//! and states by a step (`optimizer`). `sharding` assigns the arrays to tiers. Activations that
//! wait for backward (`recompute`) have a store of their own, [`ActivationStore`].

mod activation;
mod copy;
mod parking;
mod pipeline;
mod read;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::{Backend, DType, TensorMetadata};
use deepburn_config::SwapFilePlan;
use deepburn_nvme::{
    ALIGNMENT, AlignedBuffer, IoPolicy, IoStatistics, Region, SwapError, SwapFile,
};
use deepburn_ops::{Work, float_bytes, report_work};

use crate::ledger::{Category, Lease, Ledger, Tier};

pub(crate) use activation::{ActivationStore, ParkedActivation};
pub(crate) use copy::ParkedCopy;
pub(crate) use parking::Parking;
pub(crate) use pipeline::{FileChunk, Pipeline, PipelinePolicy, WriteBehind};
pub(crate) use read::{ParkedRead, ParkedTensor};

/// The largest number of elements in a chunk: 4 MiB of f32, enough to read a disk at full speed.
pub(crate) const CHUNK: usize = 1 << 20;

/// The location of parked arrays.
#[derive(Debug, Clone)]
pub(crate) enum Store {
    /// In host memory.
    Host,
    /// In a file of this rank.
    Disk(Arc<SwapFile>),
    /// Nowhere, on a backend without data. The ledger counts what an array would take on the tier.
    Counted(Tier),
}

/// The layout of a parked array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkLayout {
    /// Number of elements.
    pub(crate) len: usize,
    /// The largest number of elements in a chunk.
    pub(crate) chunk: usize,
    /// The size in bytes of the largest type that the elements will have.
    pub(crate) element_bytes: usize,
}

/// Returns the I/O policy of a file.
pub(crate) fn io_policy(file: &SwapFilePlan) -> IoPolicy {
    let SwapFilePlan { block_size, queue_depth, .. } = *file;
    IoPolicy { block_size, queue_depth, ..IoPolicy::default() }
}

/// A flat offloaded array. The caller keeps track of the element type, which may change from one
/// write to the next.
#[derive(Debug)]
pub(crate) struct ParkedArray {
    /// Number of elements, chunks and reserved bytes.
    layout: ChunkLayout,
    /// The elements.
    data: ParkedData,
    /// The copies that may still be read.
    copies: Mutex<Vec<Weak<ParkedCopy>>>,
    /// Counts the reserved bytes on the tier of the store.
    _lease: Lease,
}

/// The elements of a parked array.
#[derive(Debug)]
enum ParkedData {
    /// The packed elements, in words whose alignment is sufficient for every type.
    Host(Mutex<Vec<u32>>),
    /// The region of a file. Each chunk is padded to the alignment of direct I/O.
    Disk { file: Arc<SwapFile>, region: Region },
    /// No elements. Writes have no effect, and reads return tensors without data. The tier is the
    /// one on which the ledger counts the array.
    Absent(Tier),
}

impl Store {
    /// Returns idle I/O buffers to the operating system.
    pub(crate) fn release_idle(&self) {
        if let Self::Disk(file) = self {
            file.pool().release_idle();
        }
    }

    /// Returns the I/O statistics of the file: bytes read and written, and the time for which this
    /// rank waited. Returns `None` in host memory.
    pub(crate) fn io_statistics(&self) -> Option<IoStatistics> {
        match self {
            Self::Host | Self::Counted(_) => None,
            Self::Disk(file) => Some(file.statistics()),
        }
    }

    /// Returns the tier of the arrays.
    pub(crate) fn tier(&self) -> Tier {
        match self {
            Self::Host => Tier::Host,
            Self::Disk(_) => Tier::Disk,
            Self::Counted(tier) => *tier,
        }
    }

    /// Returns true for a growing file (activations), which reuses the regions of dropped arrays.
    fn grows(&self) -> bool {
        matches!(self, Self::Disk(file) if file.grows())
    }
}

impl Drop for ParkedArray {
    fn drop(&mut self) {
        if let ParkedData::Disk { file, region } = &self.data
            // A file of model states has a fixed size, and its arrays exist for the whole run.
            && file.grows()
        {
            file.release(region);
        }
    }
}

impl ChunkLayout {
    /// Returns the ranges of the chunks in elements, in order.
    pub(crate) fn chunks(self) -> impl Iterator<Item = Range<usize>> {
        let chunk = self.chunk.max(1);
        (0..self.len).step_by(chunk).map(move |start| start..self.len.min(start + chunk))
    }

    /// Returns the size of the array in a file in bytes, including padding.
    pub(crate) fn file_bytes(self) -> u64 {
        // Without a loop over the chunks, because a forecast may be of any size.
        let Some(last) = self.len.checked_sub(1) else { return 0 };
        let chunk = self.chunk.max(1);
        let last = last / chunk * chunk..self.len;
        self.extent(&last, self.element_bytes).end as u64
    }

    /// Returns the padded byte range of a chunk within the array's region, for elements of `size`
    /// bytes. With a smaller type, chunks begin at smaller offsets.
    fn extent(self, chunk: &Range<usize>, size: usize) -> Range<usize> {
        let start = chunk.start / self.chunk.max(1) * padded(self.chunk.saturating_mul(size));
        start..start + padded(chunk.len() * size)
    }
}

/// Rounds a number of bytes up to a multiple of the alignment that direct I/O needs.
fn padded(bytes: usize) -> usize {
    SwapFile::padded(bytes) as usize
}

impl ParkedArray {
    /// Creates an array of zeros, which the ledger counts under `category`. The store must not be a
    /// growing file, because reused regions contain old data.
    ///
    /// # Errors
    /// Returns an error if the file is full or host memory cannot be allocated.
    pub(crate) fn zeros(
        store: &Store,
        layout: ChunkLayout,
        ledger: &Ledger,
        category: Category,
    ) -> Result<Arc<Self>, SwapError> {
        // Another array may have used a region of a growing file before.
        debug_assert!(!store.grows(), "released parts of a file hold what was there before");
        // Regions that were never written read as zeros.
        Self::unfilled(store, layout, ledger, category)
    }

    /// Creates an array with undefined contents, which must be written before it is read.
    ///
    /// # Errors
    /// Returns an error if the file is full or cannot grow, or if host memory cannot be allocated.
    fn unfilled(
        store: &Store,
        layout: ChunkLayout,
        ledger: &Ledger,
        category: Category,
    ) -> Result<Arc<Self>, SwapError> {
        let bytes = match store.tier() {
            Tier::Disk => layout.file_bytes() as usize,
            Tier::Host | Tier::Device => layout.len * layout.element_bytes,
        };
        let data = match store {
            Store::Host => {
                let words = bytes.div_ceil(size_of::<u32>());
                let mut zeros = with_capacity::<u32>(words)?;
                zeros.resize(words, 0);
                ParkedData::Host(Mutex::new(zeros))
            }
            Store::Disk(file) => {
                ParkedData::Disk { file: file.clone(), region: file.region(bytes)? }
            }
            Store::Counted(tier) => ParkedData::Absent(*tier),
        };
        let lease = ledger.hold_on(store.tier(), category, bytes);
        Ok(Arc::new(Self { layout, data, copies: Mutex::default(), _lease: lease }))
    }

    /// Returns true if the array has no elements to compute with, on a backend without data.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self.data, ParkedData::Absent(_))
    }

    /// Reports that the elements of an array without data would be transferred `times` times
    /// between its tier and the device. They have type `dtype`.
    pub(crate) fn report_transfers(&self, times: u64, dtype: DType) {
        let ParkedData::Absent(tier) = self.data else { return };
        report_work(|| {
            let bytes = times * (self.layout.len * dtype.size()) as u64;
            match tier {
                Tier::Disk => Work { swapped: bytes, ..Work::default() },
                Tier::Host => Work { copied: bytes, ..Work::default() },
                Tier::Device => Work::default(),
            }
        });
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.layout.len
    }

    /// Returns the ranges of the chunks in elements, in order.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Range<usize>> {
        self.layout.chunks()
    }

    /// Returns the location of a chunk in the file; `None` without a file.
    pub(crate) fn file_chunk(&self, chunk: &Range<usize>, dtype: DType) -> Option<FileChunk> {
        match &self.data {
            ParkedData::Host(_) | ParkedData::Absent(_) => None,
            ParkedData::Disk { file, region } => Some(FileChunk {
                file: file.clone(),
                region: region.clone(),
                bytes: self.layout.extent(chunk, dtype.size()),
            }),
        }
    }

    /// Returns a chunk for reading and writing. A chunk of a file is read through `pipeline`, in
    /// the order that was passed to [`Pipeline::start`].
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(crate) fn chunk(
        &self,
        chunk: &Range<usize>,
        dtype: DType,
        pipeline: &mut Pipeline,
    ) -> Result<ChunkInMemory<'_>, SwapError> {
        self.chunk_in(chunk, dtype, |read| pipeline.read(read))
    }

    /// Returns a chunk that must be overwritten. In a file, its contents are undefined, because
    /// nothing is read.
    ///
    /// # Errors
    /// Returns an error if a buffer cannot be allocated.
    pub(crate) fn unfilled_chunk(
        &self,
        chunk: &Range<usize>,
        dtype: DType,
    ) -> Result<ChunkInMemory<'_>, SwapError> {
        self.chunk_in(chunk, dtype, |read| read.file.pool().unfilled(read.bytes.len()))
    }

    /// Returns a chunk in host memory, or in the buffer that `buffer` returns for its location in
    /// the file.
    fn chunk_in(
        &self,
        chunk: &Range<usize>,
        dtype: DType,
        buffer: impl FnOnce(&FileChunk) -> Result<AlignedBuffer, SwapError>,
    ) -> Result<ChunkInMemory<'_>, SwapError> {
        let size = dtype.size();
        Ok(match (&self.data, self.file_chunk(chunk, dtype)) {
            (_, Some(read)) => ChunkInMemory::Disk(buffer(&read)?, chunk.len() * size, read),
            (ParkedData::Host(words), None) => {
                ChunkInMemory::Host(lock(words), chunk.start * size..chunk.end * size)
            }
            (ParkedData::Disk { .. }, None) => unreachable!("a chunk of a file has bytes in it"),
            (ParkedData::Absent(_), None) => unreachable!("nothing computes without data"),
        })
    }

    /// Replaces all elements with `bytes`, which have type `dtype`. Writes to a file may complete
    /// after the call returns.
    ///
    /// # Errors
    /// Returns an error if the disk fails, now or in an earlier write.
    pub(crate) fn write(
        &self,
        bytes: &[u8],
        dtype: DType,
        writes: &mut WriteBehind,
    ) -> Result<(), SwapError> {
        self.keep_copies()?;
        let size = dtype.size();
        if self.is_absent() {
            self.report_transfers(1, dtype);
            return Ok(());
        }
        for range in self.chunks() {
            let mut chunk = self.unfilled_chunk(&range, dtype)?;
            chunk.bytes().copy_from_slice(&bytes[range.start * size..range.end * size]);
            if let ChunkInMemory::Disk(buffer, _, read) = chunk {
                writes.write(&read, buffer)?;
            }
        }
        Ok(())
    }

    /// Replaces all elements with the elements of a tensor, which is read from its device. An array
    /// without data stays as it is, and nothing is read.
    ///
    /// # Errors
    /// Returns the errors of [`write`](Self::write).
    pub(crate) fn write_tensor<B: Backend>(
        &self,
        tensor: B::FloatTensorPrimitive,
        writes: &mut WriteBehind,
    ) -> Result<(), SwapError> {
        let dtype = tensor.dtype();
        if self.is_absent() {
            self.report_transfers(1, dtype);
            return Ok(());
        }
        self.write(&float_bytes::<B>(tensor), dtype, writes)
    }

    /// Returns a snapshot of elements `range`. Later writes do not change it.
    pub(crate) fn copy(self: &Arc<Self>, range: Range<usize>, dtype: DType) -> Arc<ParkedCopy> {
        let copy = Arc::new(ParkedCopy::new(self.clone(), range, dtype));
        let mut copies = lock(&self.copies);
        // An array that is never written is copied by each checkpoint, so dropped copies are
        // removed here.
        copies.retain(|copy| copy.strong_count() > 0);
        copies.push(Arc::downgrade(&copy));
        copy
    }

    /// Reads the elements that copies need into memory. This must be called before every write to
    /// the array.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The array must not be overwritten in this case.
    pub(crate) fn keep_copies(&self) -> Result<(), SwapError> {
        let mut copies = lock(&self.copies);
        while let Some(copy) = copies.last() {
            if let Some(copy) = copy.upgrade() {
                // A copy that cannot be read stays in the list, so that its source is not
                // overwritten.
                copy.keep()?;
            }
            copies.pop();
        }
        Ok(())
    }

    /// Returns the bytes of elements `range`, read chunk by chunk.
    ///
    /// # Errors
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
            ParkedData::Absent(_) => return Ok(vec![0; range.len() * size]),
        };
        let mut read = with_capacity(range.len() * size)?;
        for chunk in self.chunks() {
            let (start, end) = (range.start.max(chunk.start), range.end.min(chunk.end));
            if start >= end {
                continue;
            }
            // A read must begin at a multiple of the alignment.
            let skipped = (start - chunk.start) * size % ALIGNMENT;
            let first = self.layout.extent(&chunk, size).start;
            let bytes = [start, end].map(|element| first + (element - chunk.start) * size);
            let buffer = file.read(region, bytes[0] - skipped..bytes[1])?.wait()?;
            read.extend_from_slice(&buffer.as_bytes()[skipped..]);
        }
        Ok(read)
    }
}

/// A chunk of an array in memory for reading and writing.
#[derive(Debug)]
pub(crate) enum ChunkInMemory<'a> {
    /// Bytes of an array in host memory, locked.
    Host(MutexGuard<'a, Vec<u32>>, Range<usize>),
    /// A buffer, the number of its bytes that are elements, and its location in the file.
    Disk(AlignedBuffer, usize, FileChunk),
}

impl ChunkInMemory<'_> {
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

    /// Writes a changed chunk to the file. A chunk in host memory is changed in place.
    ///
    /// # Errors
    /// Returns an error if the disk fails, now or in an earlier write.
    pub(crate) fn store(self, pipeline: &mut Pipeline) -> Result<(), SwapError> {
        match self {
            Self::Host(..) => Ok(()),
            Self::Disk(buffer, _, read) => pipeline.write(&read, buffer),
        }
    }
}

/// Returns an empty vector with capacity for `len` elements, or an error if memory cannot be
/// allocated. `Vec::with_capacity` would abort the process instead, for example with `ulimit -v` or
/// on a system without overcommit.
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

/// Locks a mutex even if it is poisoned. The data is consistent, because no code panics in the
/// middle of a change.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
