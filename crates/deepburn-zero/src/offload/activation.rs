//! Activation offload: activations are stored in host memory or on NVMe until backward needs them.
//!
//! Main type: [`ActivationStore`], one for each model whose activations are offloaded. During
//! forward, the kept activations of a block are parked as one group when the following block has
//! ended. Backward needs the groups in reverse order. When it reads the first activation of a
//! group, the preceding group is prefetched:
//!
//! ```text
//!  forward    block 0 │ block 1 │ block 2 │ …        park group 0 │ park group 1 │ …
//!  backward   … │ block 2 │ block 1 │ block 0
//!               fetch 2 and start 1 │ use 1 and start 0 │ use 0
//! ```
//!
//! If an activation is read again in forward after it was parked, it is fetched and stays on the
//! device.
//!
//! In addition to the parked data, forward needs memory for the group that is being written, and
//! backward needs memory for the prefetched group. Forward waits for copies from a device to host
//! memory, once for each 16 MiB. Writes to a file and all fetches overlap with computation.
//!
//! The file grows on demand, so a full disk ends all ranks in the first steps. It reuses the space
//! of arrays that were dropped, so an array is always written before it is read.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

use burn_backend::{DType, Shape, TensorMetadata};
use deepburn_comm::CommError;
use deepburn_config::ActivationOffload;
use deepburn_nvme::{SwapError, SwapFile};
use deepburn_ops::{SumOps, each_float_bytes, is_without_data};

use super::{
    ChunkLayout, ParkedArray, ParkedRead, ParkedTensor, Store, WriteBehind, io_policy, lock,
};
use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger, Tier};
use crate::session::{FullTensor, Leased};

/// Parks the activations of one model on one rank.
pub(crate) struct ActivationStore<B: SumOps> {
    store: Store,
    /// The smallest size in bytes of an activation that is parked.
    threshold: usize,
    /// Returns true if the elements of a tensor are stored in their flat order. Only such a tensor
    /// has the same layout after it was parked and fetched.
    is_contiguous: fn(&B::FloatTensorPrimitive) -> bool,
    /// The process group, which ends with an error if the disk fails.
    group: Group<B>,
    /// Counts parked bytes on their tier and fetched bytes on the device.
    ledger: Ledger,
    /// The pending writes to the file.
    writes: Mutex<WriteBehind>,
    /// The groups of the current training pass.
    pass: Mutex<ParkedPass<B>>,
}

/// The groups that one training pass has parked.
struct ParkedPass<B: SumOps> {
    /// The number of the pass, counted from 0.
    number: u64,
    /// The groups in the order of forward. A prefetched group is empty. References are weak, so
    /// activations that are no longer in use are not fetched.
    groups: Vec<Vec<Weak<ParkedActivation<B>>>>,
    /// The stored size of the last group in bytes.
    group_bytes: usize,
    /// Whether backward has started. Only then does a fetch start the fetch of another group.
    is_backward: bool,
}

/// An activation that is parked or being transferred.
pub(crate) struct ParkedActivation<B: SumOps> {
    store: Arc<ActivationStore<B>>,
    /// The number of its pass and of its group in the pass.
    pass: u64,
    group: usize,
    shape: Shape,
    dtype: DType,
    device: B::Device,
    /// The location of the data.
    transit: Mutex<Transit<B>>,
}

/// The location of a parked activation's data.
enum Transit<B: SumOps> {
    /// In host memory or in the file.
    Parked(Arc<ParkedArray>),
    /// Being read from the file into the memory of the tensor. The array keeps the region of the
    /// file until the read has succeeded.
    Arriving { array: Arc<ParkedArray>, read: ParkedRead, lease: Lease },
    /// On the device, or queued for a copy to the device.
    Back(FullTensor<B>),
    /// Taken by the tape value that fetched the activation.
    Fetched,
}

impl<B: SumOps> ParkedPass<B> {
    fn new(number: u64) -> Self {
        Self { number, groups: Vec::new(), group_bytes: 0, is_backward: false }
    }
}

impl<B: SumOps> ActivationStore<B> {
    /// Creates the store that `offload` selects; `None` if activations stay on the device. Tensors
    /// for which `is_contiguous` returns false always stay on the device.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be used or its disk is full.
    pub(crate) fn new(
        offload: &ActivationOffload,
        is_contiguous: fn(&B::FloatTensorPrimitive) -> bool,
        group: Group<B>,
        ledger: Ledger,
    ) -> Result<Option<Arc<Self>>, SwapError> {
        let (store, threshold) = match offload {
            ActivationOffload::Device => return Ok(None),
            ActivationOffload::Host { threshold } if is_without_data::<B>() => {
                (Store::Counted(Tier::Host), *threshold)
            }
            ActivationOffload::Nvme { threshold, .. } if is_without_data::<B>() => {
                (Store::Counted(Tier::Disk), *threshold)
            }
            ActivationOffload::Host { threshold } => (Store::Host, *threshold),
            ActivationOffload::Nvme { file, threshold } => {
                let file = SwapFile::growing(&file.folder, &io_policy(file))?;
                (Store::Disk(Arc::new(file)), *threshold)
            }
        };
        let (writes, pass) = (Mutex::default(), Mutex::new(ParkedPass::new(0)));
        Ok(Some(Arc::new(Self { store, threshold, is_contiguous, group, ledger, writes, pass })))
    }

    /// Starts a training pass. Its groups are counted from 0 again.
    pub(crate) fn start_forward(&self) {
        // Activations of an earlier pass stay parked as long as there are handles to them.
        let mut pass = lock(&self.pass);
        *pass = ParkedPass::new(pass.number + 1);
    }

    /// Starts backward, and prefetches the group that was parked last.
    pub(crate) fn start_backward(&self) {
        let mut pass = lock(&self.pass);
        // A second call has nothing to prefetch, because the first one has taken the last group.
        if std::mem::replace(&mut pass.is_backward, true) {
            return;
        }
        let last = pass.groups.last_mut().map(std::mem::take);
        drop(pass);
        Self::fetch_ahead(last);
    }

    /// Starts the next group.
    pub(crate) fn start_group(&self) {
        let mut pass = lock(&self.pass);
        pass.groups.push(Vec::new());
        pass.group_bytes = 0;
    }

    /// Returns true if a tensor can be parked and parking it frees memory. It must be contiguous,
    /// at least as large as the threshold, and the only user of its memory.
    ///
    /// Views with another layout stay on the device. They would be contiguous after a fetch, and
    /// kernels might then sum their elements in another order. A parked broadcast value would even
    /// take more memory than it frees.
    pub(crate) fn takes(&self, tensor: &FullTensor<B>) -> bool {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        let is_held_alone =
            tensor.lease.as_ref().is_some_and(|lease| Arc::strong_count(lease) == 1);
        is_held_alone
            && bytes > 0
            && bytes >= self.threshold
            && (self.is_contiguous)(&tensor.tensor)
    }

    /// Parks tensors in the current group, and returns them in their order. Their device memory is
    /// freed when this call returns: the copies to the host end here.
    ///
    /// # Panics
    /// Panics with a [`CommError`] if the disk fails, because a tensor op cannot return an error.
    pub(crate) fn park(
        self: &Arc<Self>,
        tensors: Vec<FullTensor<B>>,
    ) -> Vec<Arc<ParkedActivation<B>>> {
        let form = |tensor: &FullTensor<B>| {
            (tensor.shape(), tensor.dtype(), B::float_device(&tensor.tensor))
        };
        let mut forms = tensors.iter().map(form).collect::<Vec<_>>().into_iter();
        let mut parked = Vec::with_capacity(tensors.len());
        let (tensors, mut leases): (Vec<_>, VecDeque<_>) =
            tensors.into_iter().map(|Leased { tensor, lease }| (tensor, lease)).unzip();
        let written = each_float_bytes::<B, _>(tensors, |bytes| {
            let Some((shape, dtype, device)) = forms.next() else {
                unreachable!("each tensor is read once")
            };
            let array = self.write(&bytes, shape.num_elements(), dtype)?;
            // The tensor is dropped.
            leases.pop_front();
            parked.push(self.parked(array, shape, dtype, device));
            Ok(())
        });
        written.unwrap_or_else(|error| std::panic::panic_any(self.failed("write", &error)));
        parked
    }

    /// Returns the activation in `array`, in the current group.
    fn parked(
        self: &Arc<Self>,
        array: Arc<ParkedArray>,
        shape: Shape,
        dtype: DType,
        device: B::Device,
    ) -> Arc<ParkedActivation<B>> {
        let mut pass = lock(&self.pass);
        let parked = Arc::new(ParkedActivation {
            store: self.clone(),
            pass: pass.number,
            group: pass.groups.len().saturating_sub(1),
            shape,
            dtype,
            device,
            transit: Mutex::new(Transit::Parked(array)),
        });
        if let Some(group) = pass.groups.last_mut() {
            group.push(Arc::downgrade(&parked));
        }
        parked
    }

    /// Returns the location of parked activations.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Prefetches the group that precedes the group of `parked`, if the pass is in backward.
    fn fetch_before(&self, parked: &ParkedActivation<B>) {
        let mut pass = lock(&self.pass);
        let is_backward = pass.is_backward && pass.number == parked.pass;
        let before = match parked.group.checked_sub(1) {
            Some(before) if is_backward => pass.groups.get_mut(before).map(std::mem::take),
            _ => None,
        };
        drop(pass);
        Self::fetch_ahead(before);
    }

    /// Starts to read a group. Errors are ignored here, because the read is retried when the data
    /// is needed.
    fn fetch_ahead(group: Option<Vec<Weak<ParkedActivation<B>>>>) {
        for parked in group.iter().flatten().filter_map(Weak::upgrade) {
            // A failed read is retried when the data is needed.
            let _ = parked.start_fetch();
        }
    }

    /// Copies bytes into a new parked array.
    ///
    /// # Errors
    /// Returns an error if the disk fails or host memory cannot be allocated.
    fn write(
        &self,
        bytes: &[u8],
        numel: usize,
        dtype: DType,
    ) -> Result<Arc<ParkedArray>, SwapError> {
        // The array has one chunk, because it is written and read as a whole.
        let layout = ChunkLayout { len: numel, chunk: numel, element_bytes: dtype.size() };
        let array =
            ParkedArray::unfilled(&self.store, layout, &self.ledger, Category::Activations)?;
        let mut pass = lock(&self.pass);
        pass.group_bytes += layout.file_bytes() as usize;
        let limit = pass.group_bytes;
        drop(pass);
        let mut writes = lock(&self.writes);
        // The limit is the size of the group so far. The writes of earlier groups had a whole block
        // of time to complete, so this call waits for them.
        writes.set_limit(limit);
        array.write(bytes, dtype, &mut writes)?;
        Ok(array)
    }

    /// Converts a disk failure to a `CommError`, which ends the group. `what` is the operation,
    /// "read" or "write".
    fn failed(&self, what: &str, error: &SwapError) -> CommError {
        self.group.failed(format!("cannot {what} an activation: {error}"))
    }
}

impl<B: SumOps> ParkedActivation<B> {
    /// Copies the data to its device, returns it and releases the array. In backward, this first
    /// starts to prefetch the preceding group, so that its reads overlap with the wait.
    ///
    /// # Panics
    /// Panics with a [`CommError`] if the disk fails, because a tensor op cannot return an error.
    pub(crate) fn fetch(&self) -> FullTensor<B> {
        let fetched = self.start_fetch().and_then(|()| {
            self.store.fetch_before(self);
            self.arrive()
        });
        fetched.unwrap_or_else(|error| std::panic::panic_any(self.store.failed("read", &error)))
    }

    /// Starts to read the data if it is parked. The ledger then counts it on the device.
    fn start_fetch(&self) -> Result<(), SwapError> {
        let mut transit = lock(&self.transit);
        if let Transit::Parked(array) = &*transit {
            let read = ParkedTensor { array, dtype: self.dtype }.start()?;
            let bytes = self.shape.num_elements() * self.dtype.size();
            let lease = self.store.ledger.hold(Category::Activations, bytes);
            *transit = match self.store.store.tier() {
                // The copy to the device overlaps with computation.
                Tier::Host | Tier::Device => Transit::Back(self.tensor(read, lease)?),
                Tier::Disk => Transit::Arriving { array: array.clone(), read, lease },
            };
        }
        Ok(())
    }

    /// Waits for a started fetch. If the fetch fails, the data stays parked.
    fn arrive(&self) -> Result<FullTensor<B>, SwapError> {
        let mut transit = lock(&self.transit);
        match std::mem::replace(&mut *transit, Transit::Fetched) {
            Transit::Back(tensor) => Ok(tensor),
            Transit::Arriving { array, read, lease } => {
                self.tensor(read, lease).inspect_err(|_| *transit = Transit::Parked(array))
            }
            Transit::Parked(_) | Transit::Fetched => {
                unreachable!("one value of a tape holds an activation, and fetches it once")
            }
        }
    }

    /// Waits for a read and returns a tensor of the original shape.
    fn tensor(&self, read: ParkedRead, lease: Lease) -> Result<FullTensor<B>, SwapError> {
        let tensor = B::float_reshape(read.wait::<B>(&self.device)?, self.shape.clone());
        Ok(Leased { tensor, lease: Some(Arc::new(lease)) })
    }
}
