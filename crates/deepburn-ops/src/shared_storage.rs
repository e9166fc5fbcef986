//! The shards of all ranks of a process, adjacent in one allocation.
//!
//! Main functions: [`join_shards`] and [`shard_of_whole`]. When ranks are threads of one process,
//! an all-gather of their shards does not have to copy: the full array is a view of an allocation
//! in which the shards are adjacent. Only flex tensors can share memory. On other backends the
//! functions return `None`, and the caller copies the shards.
//!
//! ```text
//! SharedStorage, one allocation, aligned to 64 bytes
//! | shard 0        | shard 1        | shard 2        | shard 3    padding |
//!   ^ rank 0's       ^ rank 1's       ^ rank 2's       ^ rank 3's tensor     read and modified in place
//! |<--------------------- full array ---------------------->|                read only, the first numel elements
//! ```
//!
//! The first gather of a parameter copies the shards into such a storage. Every rank then uses its
//! shard in this storage, so later gathers find the shards adjacent and copy nothing. The
//! allocation is freed when the last tensor that uses it, a full array or a shard, is dropped.
//!
//! Two kinds of tensors use a [`SharedStorage`]:
//! - A *full array* (`Whole`) reads all shards. Modifying a full array copies it first.
//! - A *shard* is owned by one rank, which modifies it in place while no full array exists. While a
//!   full array exists, the first modification copies the shard out of the storage into separate
//!   memory. The next gather allocates a new storage.
//!
//! [Note: No write while a full array exists] Modifying a shard requires the only handle on its
//! bytes, because flex copies bytes that have two handles. A full array is created from handles on
//! all shards, so no shard is being modified at that time. A modification that begins later sees
//! the full array in the count of readers: the last of those handles is dropped after the count was
//! incremented, and flex's reference count orders this drop before the modification.

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
/// Shards that are adjacent in one allocation are not copied. Other shards are copied into a new
/// allocation on all threads; [`shard_of_whole`] then returns the shard of each rank in this
/// allocation. Returns `None` if there is only one shard, if the shards differ in length or type or
/// are empty, or if the backend is not flex.
///
/// # Panics
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
    // The last shard may end with padding.
    let whole = storage.read().slice(..numel * dtype.size());
    let whole = Bytes::from_shared(whole, AllocationProperty::Native);
    let data = TensorData::from_bytes(whole, [numel], dtype);
    Some(float_from_host::<B>(data, &B::float_device(first)))
}

/// Returns shard `index` of an array that [`join_shards`] created, as a flat tensor in the array's
/// own memory.
///
/// Returns `None` if a tensor already owns the shard, or if [`join_shards`] did not create the
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
/// Invariant: all bytes are initialized, and the storage is in [`STORAGES`] as long as it exists.
struct SharedStorage {
    /// The first byte.
    start: NonNull<u8>,
    /// The size of a shard in bytes, padding included; not 0.
    shard_bytes: usize,
    /// The number of full arrays that read the storage.
    readers: AtomicUsize,
    /// For each shard, whether a tensor owns it. Only this tensor may change the shard.
    owned: Box<[AtomicBool]>,
}

// SAFETY: the memory is written only by owners of shards, which exclude each other and readers.
unsafe impl Send for SharedStorage {}
// SAFETY: as above.
unsafe impl Sync for SharedStorage {}

/// All storages by their address. The registry is needed to find the storage of a tensor, because
/// flex's bytes provide an address but no reference to their allocation.
static STORAGES: Mutex<BTreeMap<usize, Weak<SharedStorage>>> = Mutex::new(BTreeMap::new());

/// Locks the registry. A panic of another thread that holds the lock leaves the registry valid,
/// because each change is a single insertion or removal.
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
        // SAFETY: the memory was allocated with this size, and no other code has a pointer to it
        // yet.
        let memory = unsafe {
            std::slice::from_raw_parts_mut(start.as_ptr().cast::<MaybeUninit<u8>>(), layout.size())
        };
        memory.par_chunks_mut(shard_bytes).zip(parts).for_each(|(shard, part)| {
            // SAFETY: both have `shard_bytes` bytes, and new memory does not overlap with any
            // other.
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
    /// Panics if the size overflows. This cannot happen for shards that are in memory.
    fn layout(shard_bytes: usize, shards: usize) -> Layout {
        let size = shard_bytes.checked_mul(shards);
        let layout = size.and_then(|size| Layout::from_size_align(size, ALIGNMENT).ok());
        layout.expect("an array whose shards are in memory has a size that fits")
    }

    /// Returns the storage that begins at `start`. Returns `None` for any other address, also for
    /// the address of a shard other than the first.
    fn at(start: *const u8) -> Option<Arc<Self>> {
        // A storage that another thread is dropping is still registered, but cannot be upgraded.
        storages().get(&(start as usize)).and_then(Weak::upgrade)
    }

    /// Returns the storage whose shards are `parts`, complete and in this order. Returns `None` if
    /// the shards are in another order, or if one of them was copied out of the storage.
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
    /// Panics if `index` is not less than the number of shards.
    fn shard(&self, index: usize) -> NonNull<u8> {
        assert!(index < self.owned.len(), "a storage has a shard for each rank");
        // SAFETY: inside of the allocation.
        unsafe { self.start.add(index * self.shard_bytes) }
    }

    /// Returns all bytes as a full array. No shard is modified in place until the array and all its
    /// slices are dropped.
    fn read(self: Arc<Self>) -> bytes::Bytes {
        // Relaxed is enough: a later modification is ordered after this by flex's reference count:
        // [Note: No write while a full array exists].
        self.readers.fetch_add(1, Ordering::Relaxed);
        bytes::Bytes::from_owner(Whole(self))
    }
}

impl Drop for SharedStorage {
    fn drop(&mut self) {
        // Removed before the memory is freed: the next allocation may get the same address.
        storages().remove(&(self.start.as_ptr() as usize));
        let layout = Self::layout(self.shard_bytes, self.owned.len());
        // SAFETY: the memory was allocated with this layout, and no references to it exist any
        // more.
        unsafe { dealloc(self.start.as_ptr(), layout) };
    }
}

/// A reader of all shards. Counted in the storage until it is dropped.
struct Whole(Arc<SharedStorage>);

impl AsRef<[u8]> for Whole {
    fn as_ref(&self) -> &[u8] {
        let storage = &self.0;
        let len = storage.shard_bytes * storage.owned.len();
        // SAFETY: all bytes were written when the storage was created, and no shard changes while
        // the storage has a reader: [Note: No write while a full array exists]
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
    /// In the storage. Its flag `owned` is set for this shard.
    Shared { storage: Arc<SharedStorage>, index: usize },
    /// In separate memory, because the shard was modified while a full array existed. The `u64`
    /// words keep the memory aligned to eight bytes.
    Own(Vec<u64>),
}

impl StorageShard {
    /// Takes ownership of shard `index` and returns its bytes; `None` if the shard is owned already
    /// or does not exist.
    fn take(storage: Arc<SharedStorage>, index: usize, dtype: DType) -> Option<Bytes> {
        // Pairs with the release in `leave`: the new owner sees what the previous one wrote.
        if storage.owned.get(index)?.swap(true, Ordering::Acquire) {
            return None;
        }
        let len = storage.shard_bytes;
        let memory = ShardMemory::Shared { storage, index };
        let shard = Box::new(Self { memory, len, align: dtype.size() });
        // SAFETY: all bytes of a storage are written when it is created.
        Some(unsafe { Bytes::from_controller(shard, len) })
    }

    /// Copies the shard out of the storage if a full array reads the storage.
    fn leave_readers(&mut self) {
        let ShardMemory::Shared { storage, .. } = &self.memory else { return };
        // The acquire load pairs with the release in `Whole::drop`: all reads of the dropped array
        // happen before the write that follows here.
        if storage.readers.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut own = vec![0_u64; self.len.div_ceil(size_of::<u64>())];
        let from = self.memory().as_ptr().cast::<u8>();
        // SAFETY: the new vector has at least `len` bytes, and the `len` bytes of the shard are
        // initialized.
        unsafe { own.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from, self.len) };
        self.leave(ShardMemory::Own(own));
    }

    /// Replaces the memory of the shard. If the shard is in the storage, its flag `owned` is
    /// cleared, so another tensor can take the shard.
    fn leave(&mut self, to: ShardMemory) {
        if let ShardMemory::Shared { storage, index } = std::mem::replace(&mut self.memory, to) {
            storage.owned[index].store(false, Ordering::Release);
        }
    }
}

/// flex calls these methods. It requests mutable memory only through the only handle on the bytes.
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
        // SAFETY: the shard has `len` bytes. Only its owner modifies them, and the owner is
        // borrowed.
        unsafe { std::slice::from_raw_parts(start.cast(), self.len) }
    }

    /// Returns the memory for modification. If a full array reads the storage, the shard is first
    /// copied out of it.
    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        self.leave_readers();
        let start = match &mut self.memory {
            ShardMemory::Shared { storage, index } => storage.shard(*index).as_ptr(),
            ShardMemory::Own(words) => words.as_mut_ptr().cast(),
        };
        // SAFETY: the shard has `len` bytes. Its only owner is borrowed exclusively, and no full
        // array reads this memory: [Note: No write while a full array exists]
        unsafe { std::slice::from_raw_parts_mut(start.cast(), self.len) }
    }
}

/// Returns the shard to its storage. The memory is freed with the last reference to the storage.
impl Drop for StorageShard {
    fn drop(&mut self) {
        self.leave(ShardMemory::Own(Vec::new()));
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
