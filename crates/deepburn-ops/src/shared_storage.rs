//! Shards of all ranks of a process, side by side in one allocation.
//!
//! Main functions: [`join_shards`] and [`shard_of_whole`]. The whole array is then a view of the allocation, so that
//! gathering it copies nothing and takes no memory. Only flex tensors can share memory; other backends give `None`.
//!
//! A [`SharedStorage`] is written when it is made of shards that lie elsewhere. From then on two kinds of tensors use
//! it:
//! - *Wholes* read all of it. Changing a whole copies it first.
//! - A *shard* belongs to one rank, which changes it in place while there is no whole. While there is one, a change
//!   copies the shard, and the shard leaves the storage.
//!
//! [Note: No change under a whole] A change needs the only handle on the bytes of a shard, because flex copies bytes
//! with two handles. A whole is made of handles on all shards. So no shard is being changed when a whole appears, and a
//! change that begins later finds it counted: the last of those handles is dropped after the count has risen, and the
//! only handle left sees what happened before that.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::{AllocationProperty, Backend, Bytes, DType, TensorData, TensorMetadata};
use burn_std::AllocationController;
use rayon::prelude::*;

use crate::host::{float_from_host, host_bytes};

/// Alignment of an allocation: a cache line.
const ALIGNMENT: usize = 64;

/// Returns the first `numel` elements of the concatenation of `shards`, flat.
///
/// Shards that lie side by side in one allocation are not copied. Others are copied into one; [`shard_of_whole`] then
/// gives each rank its shard there. `None` if there is one shard only, if they differ in length, or on other backends
/// than flex.
pub fn join_shards<B: Backend>(
    shards: &[B::FloatTensorPrimitive],
    numel: usize,
) -> Option<B::FloatTensorPrimitive> {
    let parts = shards.iter().map(|shard| host_bytes(shard)).collect::<Option<Vec<_>>>()?;
    let (first, dtype) = (shards.first()?, shards.first()?.dtype());
    let same = |(shard, part): (&B::FloatTensorPrimitive, &bytes::Bytes)| {
        shard.dtype() == dtype && part.len() == parts[0].len()
    };
    if parts.len() < 2 || parts[0].is_empty() || !shards.iter().zip(&parts).all(same) {
        return None;
    }
    let storage = SharedStorage::of(&parts).unwrap_or_else(|| SharedStorage::new(&parts));
    let whole = storage.read().slice(..numel * dtype.size());
    let whole = Bytes::from_shared(whole, AllocationProperty::Native);
    let data = TensorData::from_bytes(whole, [numel], dtype);
    Some(float_from_host::<B>(data, &B::float_device(first)))
}

/// Returns shard `index` of an array that [`join_shards`] made, flat, in the array's own memory.
///
/// `None` if the shard lies there already, or if the array was not made so.
pub fn shard_of_whole<B: Backend>(
    whole: &B::FloatTensorPrimitive,
    index: usize,
) -> Option<B::FloatTensorPrimitive> {
    let bytes = host_bytes(whole)?;
    let storage = SharedStorage::at(bytes.as_ptr())?;
    let dtype = whole.dtype();
    let elements = storage.shard_bytes / dtype.size();
    let shard = Shard::take(storage, index, dtype)?;
    let data = TensorData::from_bytes(shard, [elements], dtype);
    Some(float_from_host::<B>(data, &B::float_device(whole)))
}

/// One allocation for shards of equal size.
struct SharedStorage {
    start: NonNull<u8>,
    shard_bytes: usize,
    /// Wholes that read it.
    readers: AtomicUsize,
    /// By shard, whether a tensor owns it, which may change it.
    owned: Box<[AtomicBool]>,
}

// SAFETY: the memory is written by owners of shards alone, who exclude each other and readers.
unsafe impl Send for SharedStorage {}
// SAFETY: as above.
unsafe impl Sync for SharedStorage {}

/// All storages by their address, so that tensors are recognised which lie in one.
static STORAGES: Mutex<BTreeMap<usize, Weak<SharedStorage>>> = Mutex::new(BTreeMap::new());

fn storages() -> MutexGuard<'static, BTreeMap<usize, Weak<SharedStorage>>> {
    STORAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedStorage {
    /// Copies `parts` of equal size, none of them empty, into a new storage.
    fn new(parts: &[bytes::Bytes]) -> Arc<Self> {
        let shard_bytes = parts[0].len();
        let layout = Self::layout(shard_bytes, parts.len());
        // SAFETY: the layout is not empty.
        let start =
            NonNull::new(unsafe { alloc(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: it was allocated with this size, and nobody else knows of it yet.
        let memory = unsafe {
            std::slice::from_raw_parts_mut(start.as_ptr().cast::<MaybeUninit<u8>>(), layout.size())
        };
        memory.par_chunks_mut(shard_bytes).zip(parts).for_each(|(shard, part)| {
            // SAFETY: both have `shard_bytes` bytes, and new memory does not overlap with any other.
            unsafe {
                shard.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(part.as_ptr(), part.len())
            };
        });
        let owned = parts.iter().map(|_| AtomicBool::new(false)).collect();
        let storage = Arc::new(Self { start, shard_bytes, readers: AtomicUsize::new(0), owned });
        storages().insert(start.as_ptr() as usize, Arc::downgrade(&storage));
        storage
    }

    fn layout(shard_bytes: usize, shards: usize) -> Layout {
        let size = shard_bytes.checked_mul(shards);
        let layout = size.and_then(|size| Layout::from_size_align(size, ALIGNMENT).ok());
        layout.expect("an array whose shards are in memory has a size that fits")
    }

    /// The storage that begins at `start`.
    fn at(start: *const u8) -> Option<Arc<Self>> {
        storages().get(&(start as usize)).and_then(Weak::upgrade)
    }

    /// The storage whose shards are `parts`, all of them, in this order.
    fn of(parts: &[bytes::Bytes]) -> Option<Arc<Self>> {
        let storage = Self::at(parts[0].as_ptr())?;
        let is_shard = |(index, part): (usize, &bytes::Bytes)| {
            part.as_ptr() == storage.shard(index).as_ptr() && part.len() == storage.shard_bytes
        };
        let is_all = parts.len() == storage.owned.len() && parts.iter().enumerate().all(is_shard);
        is_all.then_some(storage)
    }

    /// The first byte of a shard.
    fn shard(&self, index: usize) -> NonNull<u8> {
        assert!(index < self.owned.len(), "a storage has a shard for each rank");
        // SAFETY: inside of the allocation.
        unsafe { self.start.add(index * self.shard_bytes) }
    }

    /// All bytes, which no shard changes as long as they are held.
    fn read(self: Arc<Self>) -> bytes::Bytes {
        self.readers.fetch_add(1, Ordering::Relaxed);
        bytes::Bytes::from_owner(Whole(self))
    }
}

impl Drop for SharedStorage {
    fn drop(&mut self) {
        // Before the address is free for another storage.
        storages().remove(&(self.start.as_ptr() as usize));
        let layout = Self::layout(self.shard_bytes, self.owned.len());
        // SAFETY: it was allocated with this layout, and nobody refers to it any more.
        unsafe { dealloc(self.start.as_ptr(), layout) };
    }
}

/// A reader of all shards.
struct Whole(Arc<SharedStorage>);

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        let storage = &self.0;
        let len = storage.shard_bytes * storage.owned.len();
        // SAFETY: all of it was written when it was made, and no shard changes while it has a reader.
        // [Note: No change under a whole]
        unsafe { std::slice::from_raw_parts(storage.start.as_ptr(), len) }
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::Release);
    }
}

/// The bytes of a shard of elements of `align` bytes.
struct Shard {
    memory: ShardMemory,
    len: usize,
    align: usize,
}

/// Where a shard lies.
enum ShardMemory {
    /// In the storage, which says that it is owned.
    Shared { storage: Arc<SharedStorage>, index: usize },
    /// In memory of its own, because it was changed while there was a whole.
    Own(Vec<u64>),
}

impl Shard {
    /// The bytes of shard `index`. `None` if they are owned already.
    fn take(storage: Arc<SharedStorage>, index: usize, dtype: DType) -> Option<Bytes> {
        if storage.owned.get(index)?.swap(true, Ordering::Acquire) {
            return None;
        }
        let len = storage.shard_bytes;
        let memory = ShardMemory::Shared { storage, index };
        let shard = Box::new(Self { memory, len, align: dtype.size() });
        // SAFETY: all bytes of a storage are written when it is made.
        Some(unsafe { Bytes::from_controller(shard, len) })
    }

    /// Copies the shard out of the storage if a whole reads it.
    fn leave_readers(&mut self) {
        let ShardMemory::Shared { storage, .. } = &self.memory else { return };
        if storage.readers.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut own = vec![0_u64; self.len.div_ceil(size_of::<u64>())];
        let from = self.memory().as_ptr().cast::<u8>();
        // SAFETY: the copy has room for the bytes, which are written.
        unsafe { own.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from, self.len) };
        self.leave(ShardMemory::Own(own));
    }

    fn leave(&mut self, to: ShardMemory) {
        if let ShardMemory::Shared { storage, index } = std::mem::replace(&mut self.memory, to) {
            storage.owned[index].store(false, Ordering::Release);
        }
    }
}

impl AllocationController for Shard {
    fn alloc_align(&self) -> usize {
        self.align
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        let start = match &self.memory {
            ShardMemory::Shared { storage, index } => storage.shard(*index).as_ptr().cast_const(),
            ShardMemory::Own(words) => words.as_ptr().cast(),
        };
        // SAFETY: the shard has so many bytes. Only its owner changes them, which is borrowed.
        unsafe { std::slice::from_raw_parts(start.cast(), self.len) }
    }

    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        self.leave_readers();
        let start = match &mut self.memory {
            ShardMemory::Shared { storage, index } => storage.shard(*index).as_ptr(),
            ShardMemory::Own(words) => words.as_mut_ptr().cast(),
        };
        // SAFETY: the shard has so many bytes. Its one owner is borrowed exclusively, and there is no whole:
        // [Note: No change under a whole]
        unsafe { std::slice::from_raw_parts_mut(start.cast(), self.len) }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        self.leave(ShardMemory::Own(Vec::new()));
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_backend::Shape;
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::{Flex, FlexTensor};

    use super::*;

    fn tensor(values: &[f32]) -> FlexTensor {
        FlexTensor::from_data(TensorData::new(values.to_vec(), Shape::from(vec![values.len()])))
    }

    fn values(tensor: &FlexTensor) -> &[f32] {
        tensor.as_slice().unwrap()
    }

    fn address(tensor: &FlexTensor) -> *const f32 {
        values(tensor).as_ptr()
    }

    fn double(tensor: FlexTensor) -> FlexTensor {
        Flex::float_mul_scalar(tensor, 2.0.into())
    }

    /// Two shards of a storage, of which the second has one element of padding.
    fn shards() -> [FlexTensor; 2] {
        let apart = [tensor(&[1.0, 2.0]), tensor(&[3.0, 0.0])];
        let whole = join_shards::<Flex>(&apart, 3).unwrap();
        assert_eq!(values(&whole), [1.0, 2.0, 3.0]);
        [0, 1].map(|index| shard_of_whole::<Flex>(&whole, index).unwrap())
    }

    #[test]
    fn shards_that_lie_side_by_side_are_joined_where_they_are() {
        let shards = shards();
        let whole = join_shards::<Flex>(&shards, 3).unwrap();
        assert_eq!(values(&whole), [1.0, 2.0, 3.0]);
        assert_eq!(address(&whole), address(&shards[0]));
        assert!(shard_of_whole::<Flex>(&whole, 0).is_none());
        let swapped = [shards[1].clone(), shards[0].clone()];
        let copy = join_shards::<Flex>(&swapped, 4).unwrap();
        assert_eq!(values(&copy), [3.0, 0.0, 1.0, 2.0]);
    }

    #[test]
    fn a_shard_is_changed_in_place_where_nobody_reads_the_whole() {
        let [first, second] = shards();
        let place = address(&first);
        let first = double(first);
        assert_eq!(address(&first), place);
        let whole = join_shards::<Flex>(&[first, second], 4).unwrap();
        assert_eq!(address(&whole), place);
        assert_eq!(values(&whole), [2.0, 4.0, 3.0, 0.0]);
    }

    #[test]
    fn a_shard_is_copied_where_somebody_reads_the_whole() {
        let [first, second] = shards();
        let before = join_shards::<Flex>(&[first.clone(), second.clone()], 3).unwrap();
        let first = double(first);
        assert_ne!(address(&first), address(&before));
        assert_eq!(values(&before), [1.0, 2.0, 3.0]);
        let after = join_shards::<Flex>(&[first, second], 3).unwrap();
        assert_eq!(values(&after), [2.0, 4.0, 3.0]);
        // Its shard is not owned any more, so that a rank can have the values that the whole still has.
        assert_eq!(values(&shard_of_whole::<Flex>(&before, 0).unwrap()), [1.0, 2.0]);
    }

    #[test]
    fn a_whole_is_copied_before_it_is_changed() {
        let shards = shards();
        let whole = join_shards::<Flex>(&shards, 3).unwrap();
        assert_eq!(values(&double(whole)), [2.0, 4.0, 6.0]);
        assert_eq!(values(&shards[0]), [1.0, 2.0]);
    }

    #[test]
    fn memory_is_freed_with_its_last_tensor() {
        // No other test has shards of this size, which may lie at the same address afterwards.
        let apart = [tensor(&[1.0; 5]), tensor(&[1.0; 5])];
        let whole = join_shards::<Flex>(&apart, 10).unwrap();
        let shards = [0, 1].map(|index| shard_of_whole::<Flex>(&whole, index).unwrap());
        let start = address(&shards[0]).cast();
        assert!(SharedStorage::at(start).is_some());
        drop(shards);
        assert_eq!(values(&whole), [1.0; 10]);
        drop(whole);
        assert!(SharedStorage::at(start).is_none_or(|storage| storage.shard_bytes != 20));
    }

    #[test]
    fn arrays_that_cannot_lie_side_by_side_are_left() {
        assert!(join_shards::<Flex>(&[tensor(&[1.0])], 1).is_none());
        assert!(join_shards::<Flex>(&[tensor(&[1.0]), tensor(&[1.0, 2.0])], 3).is_none());
        assert!(join_shards::<Flex>(&[tensor(&[]), tensor(&[])], 0).is_none());
        assert!(shard_of_whole::<Flex>(&tensor(&[1.0]), 0).is_none());
    }

    #[test]
    fn threads_that_change_and_read_in_turn_see_whole_updates() {
        let barrier = std::sync::Barrier::new(2);
        let posted = Mutex::new([None, None]);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (barrier, posted) = (&barrier, &posted);
                scope.spawn(move || {
                    let mut shard = tensor(&[1.0; 1000]);
                    for step in 0..20 {
                        posted.lock().unwrap()[rank] = Some(shard.clone());
                        barrier.wait();
                        let both = posted.lock().unwrap().clone().map(Option::unwrap);
                        let whole = join_shards::<Flex>(&both, 2000).unwrap();
                        drop(both);
                        let own = shard_of_whole::<Flex>(&whole, rank);
                        barrier.wait();
                        posted.lock().unwrap()[rank] = None;
                        // One rank is late, so that the other one changes its shard under a whole.
                        if rank == step % 2 {
                            drop(whole);
                            shard = double(own.unwrap_or(shard));
                        } else {
                            std::thread::yield_now();
                            assert!(values(&whole).iter().all(|value| *value == values(&whole)[0]));
                            drop(whole);
                            shard = double(own.unwrap_or(shard));
                        }
                        barrier.wait();
                    }
                    assert!(values(&shard).iter().all(|value| *value == f32::powi(2.0, 20)));
                });
            }
        });
    }
}
