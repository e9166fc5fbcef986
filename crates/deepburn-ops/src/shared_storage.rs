//! Shards of all ranks of a process, side by side in one allocation.
//!
//! Main functions: [`join_shards`] and [`shard_of_whole`]. When ranks are threads of one process,
//! an all-gather of their shards does not have to copy: the whole array is a view of an allocation
//! in which the shards are adjacent. Only flex tensors can share memory; other backends give
//! `None`, and the caller gathers by copies.
//!
//! ```text
//! SharedStorage, one allocation, aligned to 64 bytes
//! | shard 0        | shard 1        | shard 2        | shard 3    padding |
//!   ^ rank 0's       ^ rank 1's       ^ rank 2's       ^ rank 3's tensor     read and changed in place
//! |<------------------------- whole ----------------------->|                read only, the first numel elements
//! ```
//!
//! The first gather of a parameter copies the shards into such a storage. Every rank then takes its
//! shard there, so that later gathers find the shards adjacent and copy nothing. The allocation is
//! freed with the last tensor that uses it, a whole or a shard.
//!
//! Two kinds of tensors use a [`SharedStorage`]:
//! - *Wholes* read all of it. Changing a whole copies it first.
//! - A *shard* belongs to one rank, which changes it in place while there is no whole. While there
//!   is one, a change copies the shard to memory of its own, and the shard leaves the storage. The
//!   next gather makes a new storage.
//!
//! [Note: No change under a whole] Changing a shard needs the only handle on its bytes, because
//! flex copies bytes that have two handles. A whole is made from handles on all shards. So no shard
//! is being changed when a whole appears. A change that begins later sees that the whole is
//! counted: the last of those handles is dropped after the count has risen, and flex's reference
//! count orders this before the change.

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

/// The alignment of an allocation in bytes: a cache line, and enough for every element type.
const ALIGNMENT: usize = 64;

/// Returns the first `numel` elements of the concatenation of `shards`, flat.
///
/// Shards that are adjacent in one allocation are not copied. Others are copied into a new one on
/// all threads, after which [`shard_of_whole`] gives each rank its shard there. Returns `None` if
/// there is only one shard, if the shards differ in length or type or are empty, or on other
/// backends than flex.
///
/// # Panics
///
/// Panics if the shards have fewer than `numel` elements together.
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
/// Returns `None` if a tensor owns the shard there already, or if [`join_shards`] did not make the
/// array.
pub fn shard_of_whole<B: Backend>(
    whole: &B::FloatTensorPrimitive,
    index: usize,
) -> Option<B::FloatTensorPrimitive> {
    let bytes = host_bytes(whole)?;
    let storage = SharedStorage::at(bytes.as_ptr())?;
    let dtype = whole.dtype();
    let elements = storage.shard_bytes / dtype.size();
    let shard = StorageShard::take(storage, index, dtype)?;
    let data = TensorData::from_bytes(shard, [elements], dtype);
    Some(float_from_host::<B>(data, &B::float_device(whole)))
}

/// One allocation for shards of equal size.
///
/// Invariant: all bytes are initialised, and the storage is in [`STORAGES`] as long as it exists.
struct SharedStorage {
    /// The first byte.
    start: NonNull<u8>,
    /// The size of a shard in bytes, padding included; not 0.
    shard_bytes: usize,
    /// The number of wholes that read the storage.
    readers: AtomicUsize,
    /// For each shard, whether a tensor owns it. Only this tensor may change the shard.
    owned: Box<[AtomicBool]>,
}

// SAFETY: the memory is written only by owners of shards, which exclude each other and readers.
unsafe impl Send for SharedStorage {}
// SAFETY: as above.
unsafe impl Sync for SharedStorage {}

/// All storages by their address. They identify the storage that a tensor's bytes are in: a tensor
/// has only an address, because flex's bytes do not name their allocation.
static STORAGES: Mutex<BTreeMap<usize, Weak<SharedStorage>>> = Mutex::new(BTreeMap::new());

/// Locks the registry. A panic of another holder leaves it valid, because each change is a single
/// insertion or removal.
fn storages() -> MutexGuard<'static, BTreeMap<usize, Weak<SharedStorage>>> {
    STORAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedStorage {
    /// Copies `parts` of equal size, none of them empty, into a new storage, one shard per task on
    /// all threads.
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

    /// Returns the layout of an allocation for `shards` shards.
    ///
    /// # Panics
    ///
    /// Panics if the size overflows, which memory that exists cannot cause.
    fn layout(shard_bytes: usize, shards: usize) -> Layout {
        let size = shard_bytes.checked_mul(shards);
        let layout = size.and_then(|size| Layout::from_size_align(size, ALIGNMENT).ok());
        layout.expect("an array whose shards are in memory has a size that fits")
    }

    /// Returns the storage that begins at `start`. The address of a shard other than the first is
    /// not found.
    fn at(start: *const u8) -> Option<Arc<Self>> {
        storages().get(&(start as usize)).and_then(Weak::upgrade)
    }

    /// Returns the storage whose shards are `parts`, complete and in this order. Shards that were
    /// swapped, or of which one has left the storage, are not found.
    fn of(parts: &[bytes::Bytes]) -> Option<Arc<Self>> {
        let storage = Self::at(parts[0].as_ptr())?;
        let is_shard = |(index, part): (usize, &bytes::Bytes)| {
            part.as_ptr() == storage.shard(index).as_ptr() && part.len() == storage.shard_bytes
        };
        let is_all = parts.len() == storage.owned.len() && parts.iter().enumerate().all(is_shard);
        is_all.then_some(storage)
    }

    /// Returns the first byte of a shard.
    ///
    /// # Panics
    ///
    /// Panics if there are fewer shards.
    fn shard(&self, index: usize) -> NonNull<u8> {
        assert!(index < self.owned.len(), "a storage has a shard for each rank");
        // SAFETY: inside of the allocation.
        unsafe { self.start.add(index * self.shard_bytes) }
    }

    /// Returns all bytes as a whole. No shard is changed in place until it and its slices are
    /// dropped.
    fn read(self: Arc<Self>) -> bytes::Bytes {
        self.readers.fetch_add(1, Ordering::Relaxed);
        bytes::Bytes::from_owner(Whole(self))
    }
}

impl Drop for SharedStorage {
    fn drop(&mut self) {
        // Removed before the memory is freed: the next allocation may get the same address.
        storages().remove(&(self.start.as_ptr() as usize));
        let layout = Self::layout(self.shard_bytes, self.owned.len());
        // SAFETY: it was allocated with this layout, and nobody refers to it any more.
        unsafe { dealloc(self.start.as_ptr(), layout) };
    }
}

/// A reader of all shards. Counted in the storage until it is dropped.
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

/// The bytes of a shard, as the controller of an allocation of flex.
struct StorageShard {
    /// The memory of the shard.
    memory: ShardMemory,
    /// The length in bytes.
    len: usize,
    /// The alignment that the tensor expects: the size of an element in bytes.
    align: usize,
}

/// The location of a shard.
enum ShardMemory {
    /// In the storage, whose flag `owned` is set for this shard.
    Shared { storage: Arc<SharedStorage>, index: usize },
    /// In memory of its own, because it was changed while a whole existed. The words keep it
    /// aligned to eight bytes.
    Own(Vec<u64>),
}

impl StorageShard {
    /// Takes ownership of shard `index` and returns its bytes; `None` if the shard is owned already
    /// or does not exist.
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
        // Acquire pairs with the release of a dropped whole: its reads come before the write that
        // follows here.
        if storage.readers.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut own = vec![0_u64; self.len.div_ceil(size_of::<u64>())];
        let from = self.memory().as_ptr().cast::<u8>();
        // SAFETY: the copy has room for the bytes, which are written.
        unsafe { own.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from, self.len) };
        self.leave(ShardMemory::Own(own));
    }

    /// Replaces the memory of the shard. A shard in the storage gives up its ownership, so another
    /// tensor can take it.
    fn leave(&mut self, to: ShardMemory) {
        if let ShardMemory::Shared { storage, index } = std::mem::replace(&mut self.memory, to) {
            storage.owned[index].store(false, Ordering::Release);
        }
    }
}

/// flex calls these methods. It asks for mutable memory only through the only handle on the bytes.
impl AllocationController for StorageShard {
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

    /// Returns the memory for a change, which moves the shard out of a storage that is being read.
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

/// Gives the shard back to its storage, which frees the memory if nobody else uses it.
impl Drop for StorageShard {
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
