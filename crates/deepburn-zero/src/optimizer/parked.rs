//! Optimizer states that are parked outside of the device: in host memory.
//!
//! What the optimizer keeps of a parameter is cut into pieces. A step checks one piece out after the
//! other, updates it with the kernels of the CPU and puts it back, so that beside the parked states no more
//! than a piece of them is in use. A checkpoint reads states where they lie, through [`ParkedArray`].

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::ledger::{Category, Lease, Ledger, Tier};

/// Most elements of one array in a piece: 16 MiB of f32. Large enough for a disk to read at full speed.
pub(crate) const PIECE: usize = 1 << 22;

/// What the optimizer keeps of one parameter: some f32 arrays of one length, master first.
#[derive(Debug)]
pub(crate) struct ParkedState {
    arrays: Arc<Mutex<ParkedArrays>>,
    /// Arrays of each piece.
    count: usize,
    len: usize,
    /// Copies that were asked for and that are still used.
    copies: Mutex<Vec<Weak<ParkedArray>>>,
}

#[derive(Debug)]
struct ParkedArrays {
    pieces: Vec<Piece>,
}

/// Elements of all arrays.
#[derive(Debug)]
struct Piece {
    range: Range<usize>,
    place: Place,
    _lease: Lease,
}

#[derive(Debug)]
enum Place {
    /// The arrays one after the other.
    Host(Vec<f32>),
    /// A step has it.
    CheckedOut,
}

impl ParkedState {
    /// `count` arrays of `len` zeros, in pieces of at most `piece` elements of each.
    pub(crate) fn zeros(count: usize, len: usize, piece: usize, ledger: &Ledger) -> Self {
        let starts = (0..len).step_by(piece.max(1));
        let pieces = starts.map(|start| {
            let range = start..len.min(start + piece);
            let numel = count * range.len();
            let _lease = ledger.hold_on(Tier::Host, Category::Optimizer, numel * size_of::<f32>());
            Piece { range, place: Place::Host(vec![0.0; numel]), _lease }
        });
        let arrays = ParkedArrays { pieces: pieces.collect() };
        Self { arrays: Arc::new(Mutex::new(arrays)), count, len, copies: Mutex::default() }
    }

    /// Hands each piece to `update`, with its range: a slice for each array.
    pub(crate) fn update(&mut self, mut update: impl FnMut(Range<usize>, &mut [&mut [f32]])) {
        self.keep_copies();
        let pieces = self.lock().pieces.len();
        for index in 0..pieces {
            let (range, mut values) = self.check_out(index);
            if !range.is_empty() {
                let mut arrays: Vec<_> = values.chunks_exact_mut(range.len()).collect();
                update(range, &mut arrays);
            }
            self.put_back(index, values);
        }
    }

    /// Replaces the values of one array.
    pub(crate) fn set(&mut self, array: usize, values: &[f32]) {
        self.update(|range, arrays| arrays[array].copy_from_slice(&values[range]));
    }

    /// The values of one array.
    pub(crate) fn array(&self, array: usize) -> Vec<f32> {
        self.lock().read(array, self.count, 0..self.len)
    }

    /// Elements `range` of one array as they are now: a later step leaves them as they are.
    pub(crate) fn copy(&self, array: usize, range: Range<usize>) -> Arc<ParkedArray> {
        let (arrays, count) = (self.arrays.clone(), self.count);
        let source = Mutex::new(Source::Parked { arrays, array, count });
        let copy = Arc::new(ParkedArray { range, source });
        lock(&self.copies).push(Arc::downgrade(&copy));
        copy
    }

    /// Reads what copies need into memory, before their source is overwritten.
    fn keep_copies(&self) {
        lock(&self.copies).drain(..).filter_map(|copy| copy.upgrade()).for_each(|copy| copy.keep());
    }

    fn check_out(&self, index: usize) -> (Range<usize>, Vec<f32>) {
        let mut arrays = self.lock();
        let piece = &mut arrays.pieces[index];
        match std::mem::replace(&mut piece.place, Place::CheckedOut) {
            Place::Host(values) => (piece.range.clone(), values),
            Place::CheckedOut => unreachable!("a step has one piece at a time"),
        }
    }

    fn put_back(&self, index: usize, values: Vec<f32>) {
        self.lock().pieces[index].place = Place::Host(values);
    }

    fn lock(&self) -> MutexGuard<'_, ParkedArrays> {
        lock(&self.arrays)
    }
}

impl ParkedArrays {
    /// Elements `range` of array number `array` of `count`.
    fn read(&self, array: usize, count: usize, range: Range<usize>) -> Vec<f32> {
        let mut read = Vec::with_capacity(range.len());
        for piece in &self.pieces {
            let (start, end) = (range.start.max(piece.range.start), range.end.min(piece.range.end));
            if start >= end {
                continue;
            }
            let Place::Host(values) = &piece.place else {
                unreachable!("copies are kept before a step begins")
            };
            debug_assert_eq!(values.len(), count * piece.range.len());
            let first = array * piece.range.len();
            let first = first + start - piece.range.start;
            read.extend_from_slice(&values[first..first + end - start]);
        }
        read
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
    Parked { arrays: Arc<Mutex<ParkedArrays>>, array: usize, count: usize },
    Memory(Vec<f32>),
}

impl ParkedArray {
    /// Number of elements.
    pub(crate) fn numel(&self) -> usize {
        self.range.len()
    }

    /// Elements `range`.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn read(&self, range: Range<usize>) -> Vec<f32> {
        assert!(range.end <= self.range.len(), "{range:?} of {} elements", self.range.len());
        match &*lock(&self.source) {
            Source::Memory(values) => values[range].to_vec(),
            Source::Parked { arrays, array, count } => {
                let range = self.range.start + range.start..self.range.start + range.end;
                lock(arrays).read(*array, *count, range)
            }
        }
    }

    fn keep(&self) {
        let mut source = lock(&self.source);
        if let Source::Parked { arrays, array, count } = &*source {
            let values = lock(arrays).read(*array, *count, self.range.clone());
            *source = Source::Memory(values);
        }
    }
}

/// Each change is complete before anything that could panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(state: &mut ParkedState) {
        let mut next = 0.0;
        state.update(|_, arrays| {
            for value in arrays.iter_mut().flat_map(|array| array.iter_mut()) {
                *value = next;
                next += 1.0;
            }
        });
    }

    #[test]
    fn pieces_are_one_array() {
        let ledger = Ledger::new();
        for piece in [1, 3, 4, 10, 100] {
            let mut state = ParkedState::zeros(2, 10, piece, &ledger);
            let values: Vec<f32> = (0..10).map(|value| value as f32).collect();
            state.set(1, &values);
            assert_eq!((state.array(0), state.array(1)), (vec![0.0; 10], values.clone()));
            assert_eq!(state.copy(1, 2..9).read(1..6), values[3..8]);
            assert_eq!(ledger.usage_on(Tier::Host, Category::Optimizer).current, 2 * 10 * 4);
            assert_eq!(ledger.usage(Category::Optimizer).current, 0);
        }
        assert_eq!(ledger.usage_on(Tier::Host, Category::Optimizer).current, 0);
    }

    #[test]
    fn a_copy_keeps_what_it_was_made_of() {
        let mut state = ParkedState::zeros(1, 10, 4, &Ledger::new());
        counted(&mut state);
        let copy = state.copy(0, 3..8);
        let dropped = state.copy(0, 0..10);
        drop(dropped);
        state.set(0, &[-1.0; 10]);
        assert_eq!(copy.read(0..5), [3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!((copy.numel(), copy.read(4..5)), (5, vec![7.0]));
        assert_eq!(state.copy(0, 0..2).read(0..2), [-1.0, -1.0]);
    }

    #[test]
    fn nothing_is_parked_of_a_rank_without_elements() {
        let mut state = ParkedState::zeros(3, 0, 4, &Ledger::new());
        state.update(|_, _| unreachable!("there is no piece"));
        assert!(state.copy(2, 0..0).read(0..0).is_empty());
    }
}
