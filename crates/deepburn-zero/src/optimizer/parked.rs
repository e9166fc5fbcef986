//! Optimizer states that are parked outside of the device: in host memory, or in a file on NVMe.
//!
//! What the optimizer keeps of a parameter is cut into pieces. A step updates one piece after the other
//! with the kernels of the CPU. Pieces of a file are read ahead and written behind by a [`Pipeline`], so that
//! beside the parked states no more than a few of them are in memory. A checkpoint reads states where they
//! lie, through [`ParkedArray`].

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use deepburn_nvme::{ALIGNMENT, Region, SwapError, SwapFile};

use super::pipeline::Pipeline;
use crate::ledger::{Category, Lease, Ledger, Tier};

/// Most elements of one array in a piece: 4 MiB of f32, with which a disk reads at full speed.
pub(crate) const PIECE: usize = 1 << 20;

/// Where states are parked.
#[derive(Debug, Clone)]
pub(crate) enum Store {
    /// In host memory.
    Host,
    /// In a file.
    Disk(Arc<SwapFile>),
}

/// What the optimizer keeps of one parameter: some f32 arrays of one length, master first.
#[derive(Debug)]
pub(crate) struct ParkedState {
    arrays: Arc<ParkedArrays>,
    /// Copies that were asked for and that are still used.
    copies: Mutex<Vec<Weak<ParkedArray>>>,
}

#[derive(Debug)]
struct ParkedArrays {
    store: Store,
    len: usize,
    pieces: Vec<Piece>,
}

/// Elements of all arrays.
#[derive(Debug)]
struct Piece {
    range: Range<usize>,
    place: Place,
    _lease: Lease,
}

/// The arrays of a piece, one after the other.
#[derive(Debug)]
enum Place {
    /// Locked by a step while it updates them.
    Host(Mutex<Vec<f32>>),
    /// Each array padded to what direct I/O needs.
    Disk(Region),
}

/// Bytes of an array of `len` elements in a file.
fn padded(len: usize) -> usize {
    SwapFile::padded(len * size_of::<f32>()) as usize
}

/// The ranges of the pieces of `len` elements.
fn ranges(len: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    let piece = piece.max(1);
    (0..len).step_by(piece).map(move |start| start..len.min(start + piece))
}

/// Bytes in a file of `count` arrays of `len` elements.
pub(crate) fn file_bytes(count: usize, len: usize, piece: usize) -> u64 {
    ranges(len, piece).map(|range| (count * padded(range.len())) as u64).sum()
}

impl ParkedState {
    /// `count` arrays of `len` zeros, in pieces of at most `piece` elements of each.
    ///
    /// # Errors
    /// The file is full.
    pub(crate) fn zeros(
        store: &Store,
        count: usize,
        len: usize,
        piece: usize,
        ledger: &Ledger,
    ) -> Result<Self, SwapError> {
        let park = |range: Range<usize>| {
            let (tier, bytes, place) = match store {
                Store::Host => {
                    let values = vec![0.0; count * range.len()];
                    (Tier::Host, size_of_val(&*values), Place::Host(Mutex::new(values)))
                }
                Store::Disk(file) => {
                    let bytes = count * padded(range.len());
                    // What was never written reads as zeros.
                    (Tier::Disk, bytes, Place::Disk(file.region(bytes)?))
                }
            };
            Ok(Piece { range, place, _lease: ledger.hold_on(tier, Category::Optimizer, bytes) })
        };
        // A rule that keeps nothing, such as SGD without momentum, has nothing to park.
        let parked = if count == 0 { 0 } else { len };
        let pieces = ranges(parked, piece).map(park).collect::<Result<_, SwapError>>()?;
        let arrays = ParkedArrays { store: store.clone(), len, pieces };
        Ok(Self { arrays: Arc::new(arrays), copies: Mutex::default() })
    }

    /// The regions that a step reads and writes, in its order.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Region> {
        self.arrays.pieces.iter().filter_map(|piece| match &piece.place {
            Place::Disk(region) => Some(region),
            Place::Host(_) => None,
        })
    }

    /// Hands each piece to `update`, with its range: a slice for each array. The pieces of a file come
    /// through `pipeline`.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn update(
        &mut self,
        pipeline: &mut Pipeline,
        mut update: impl FnMut(Range<usize>, &mut [&mut [f32]]),
    ) -> Result<(), SwapError> {
        let kept = self.keep_copies();
        pipeline.note(kept)?;
        if self.arrays.pieces.is_empty() && self.arrays.len > 0 {
            update(0..self.arrays.len, &mut []);
        }
        for piece in &self.arrays.pieces {
            let len = piece.range.len();
            match &piece.place {
                Place::Host(values) => {
                    let mut values = lock(values);
                    update(piece.range.clone(), &mut slices(&mut values, len, len));
                }
                Place::Disk(region) => {
                    let mut buffer = pipeline.read(region)?;
                    let stride = padded(len) / size_of::<f32>();
                    let mut arrays = slices(buffer.as_mut_slice(), stride, len);
                    update(piece.range.clone(), &mut arrays);
                    drop(arrays);
                    pipeline.write(region, buffer)?;
                }
            }
        }
        Ok(())
    }

    /// Replaces the values of one array.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn set(&mut self, array: usize, values: &[f32]) -> Result<(), SwapError> {
        self.keep_copies()?;
        for piece in &self.arrays.pieces {
            let (new, len) = (&values[piece.range.clone()], piece.range.len());
            match (&piece.place, &self.arrays.store) {
                (Place::Host(parked), _) => {
                    lock(parked)[array * len..][..len].copy_from_slice(new);
                }
                (Place::Disk(region), Store::Disk(file)) => {
                    let mut buffer = file.pool().zeroed(padded(len))?;
                    buffer.as_mut_slice()[..len].copy_from_slice(new);
                    file.write(region, array * padded(len), buffer)?.wait()?;
                }
                (Place::Disk(_), Store::Host) => unreachable!("a region belongs to a file"),
            }
        }
        Ok(())
    }

    /// The values of one array.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn array(&self, array: usize) -> Result<Vec<f32>, SwapError> {
        self.arrays.read(array, 0..self.arrays.len)
    }

    /// Elements `range` of one array as they are now: a later step leaves them as they are.
    pub(crate) fn copy(&self, array: usize, range: Range<usize>) -> Arc<ParkedArray> {
        let source = Mutex::new(Source::Parked { arrays: self.arrays.clone(), array });
        let copy = Arc::new(ParkedArray { range, source });
        lock(&self.copies).push(Arc::downgrade(&copy));
        copy
    }

    /// Reads what copies need into memory, before their source is overwritten.
    fn keep_copies(&self) -> Result<(), SwapError> {
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
}

/// The arrays of a piece: `len` elements every `stride`.
fn slices(values: &mut [f32], stride: usize, len: usize) -> Vec<&mut [f32]> {
    values.chunks_exact_mut(stride.max(1)).map(|array| &mut array[..len]).collect()
}

impl ParkedArrays {
    /// Elements `range` of array number `array`.
    fn read(&self, array: usize, range: Range<usize>) -> Result<Vec<f32>, SwapError> {
        let mut read = Vec::with_capacity(range.len());
        for piece in &self.pieces {
            let (start, end) = (range.start.max(piece.range.start), range.end.min(piece.range.end));
            if start >= end {
                continue;
            }
            let (len, first) = (piece.range.len(), start - piece.range.start);
            let wanted = first..first + end - start;
            match (&piece.place, &self.store) {
                (Place::Host(values), _) => {
                    read.extend_from_slice(&lock(values)[array * len..][..len][wanted]);
                }
                (Place::Disk(region), Store::Disk(file)) => {
                    // A read begins at a multiple of the alignment.
                    let skipped = wanted.start % (ALIGNMENT / size_of::<f32>());
                    let offset = array * padded(len);
                    let bytes = [wanted.start - skipped, wanted.end]
                        .map(|element| offset + element * size_of::<f32>());
                    let buffer = file.read(region, bytes[0]..bytes[1])?.wait()?;
                    read.extend_from_slice(&buffer.as_slice::<f32>()[skipped..]);
                }
                (Place::Disk(_), Store::Host) => unreachable!("a region belongs to a file"),
            }
        }
        Ok(read)
    }
}

/// Elements of an array as they were when it was asked for. Holds no memory until a step overwrites them.
#[derive(Debug)]
pub(crate) struct ParkedArray {
    /// Of the array.
    range: Range<usize>,
    source: Mutex<Source>,
}

#[derive(Debug)]
enum Source {
    Parked { arrays: Arc<ParkedArrays>, array: usize },
    Memory(Vec<f32>),
}

impl ParkedArray {
    /// Number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.range.len()
    }

    /// Elements `range`.
    ///
    /// # Errors
    /// The disk fails.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn read(&self, range: Range<usize>) -> Result<Vec<f32>, SwapError> {
        assert!(range.end <= self.range.len(), "{range:?} of {} elements", self.range.len());
        // Locked while a file is read: a step waits before it overwrites what is read here.
        match &*lock(&self.source) {
            Source::Memory(values) => Ok(values[range].to_vec()),
            Source::Parked { arrays, array } => {
                let start = self.range.start;
                arrays.read(*array, start + range.start..start + range.end)
            }
        }
    }

    fn keep(&self) -> Result<(), SwapError> {
        let mut source = lock(&self.source);
        if let Source::Parked { arrays, array } = &*source {
            *source = Source::Memory(arrays.read(*array, self.range.clone())?);
        }
        Ok(())
    }
}

/// Each change is complete before anything that could panic.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use deepburn_nvme::IoPolicy;

    use super::*;
    use crate::optimizer::pipeline::PipelinePolicy;

    /// In host memory, and in a file on this machine's disk.
    fn stores() -> [Store; 2] {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = SwapFile::create(folder, 1 << 20, &IoPolicy::default()).unwrap();
        [Store::Host, Store::Disk(Arc::new(file))]
    }

    fn pipeline(store: &Store) -> Pipeline {
        Pipeline::new(store, PipelinePolicy { reads_ahead: true, writes_behind: true })
    }

    #[test]
    fn pieces_are_one_array() {
        let values: Vec<f32> = (0..10).map(|value| value as f32).collect();
        for (store, tier) in stores().iter().zip([Tier::Host, Tier::Disk]) {
            for piece in [1, 3, 4, 10, 100] {
                let ledger = Ledger::new();
                let mut state = ParkedState::zeros(store, 2, 10, piece, &ledger).unwrap();
                state.set(1, &values).unwrap();
                assert_eq!(state.array(0).unwrap(), [0.0; 10]);
                assert_eq!(state.array(1).unwrap(), values);
                assert_eq!(state.copy(1, 2..9).read(1..6).unwrap(), values[3..8]);
                let bytes = match tier {
                    Tier::Disk => file_bytes(2, 10, piece) as usize,
                    _ => 2 * 10 * 4,
                };
                assert_eq!(ledger.usage_on(tier, Category::Optimizer).current, bytes);
                assert_eq!(ledger.usage(Category::Optimizer).current, 0);
                drop(state);
                assert_eq!(ledger.usage_on(tier, Category::Optimizer).current, 0);
            }
        }
    }

    #[test]
    fn a_copy_keeps_what_it_was_made_of() {
        for store in stores() {
            let mut state = ParkedState::zeros(&store, 2, 10, 4, &Ledger::new()).unwrap();
            let mut pipeline = pipeline(&store);
            pipeline.start(state.regions().cloned().collect()).unwrap();
            state
                .update(&mut pipeline, |range, arrays| {
                    for (index, value) in range.zip(&mut *arrays[1]) {
                        *value = index as f32;
                    }
                })
                .unwrap();
            let copy = state.copy(1, 3..8);
            drop(state.copy(1, 0..10));
            state.set(1, &[-1.0; 10]).unwrap();
            assert_eq!(copy.read(0..5).unwrap(), [3.0, 4.0, 5.0, 6.0, 7.0]);
            assert_eq!((copy.numel(), copy.read(4..5).unwrap()), (5, vec![7.0]));
            assert_eq!(state.copy(1, 0..2).read(0..2).unwrap(), [-1.0, -1.0]);
            assert_eq!(state.array(0).unwrap(), [0.0; 10]);
        }
    }

    #[test]
    fn a_rule_without_states_is_applied_once() {
        for store in stores() {
            let mut state = ParkedState::zeros(&store, 0, 10, 4, &Ledger::new()).unwrap();
            assert_eq!((state.regions().count(), file_bytes(0, 10, 4)), (0, 0));
            let mut ranges = Vec::new();
            let update = |range, arrays: &mut [&mut [f32]]| ranges.push((range, arrays.len()));
            state.update(&mut pipeline(&store), update).unwrap();
            assert_eq!(ranges, [(0..10, 0)]);
        }
    }

    #[test]
    fn nothing_is_parked_of_a_rank_without_elements() {
        for store in stores() {
            let mut state = ParkedState::zeros(&store, 3, 0, 4, &Ledger::new()).unwrap();
            let update = |_, _: &mut [&mut [f32]]| unreachable!("there is no piece");
            state.update(&mut pipeline(&store), update).unwrap();
            assert!(state.copy(2, 0..0).read(0..0).unwrap().is_empty());
        }
    }
}
