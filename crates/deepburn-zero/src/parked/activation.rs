//! Activation offload: activations that wait for backward outside of the device.
//!
//! Main type: [`ActivationStore`], one for each model whose activations are offloaded. Forward
//! parks the kept activations of a block, as one group, once the following block is over. Backward
//! needs the groups in reverse order. When it reads the first activation of a group, the group
//! before is prefetched:
//!
//! ```text
//!  forward    block 0 │ block 1 │ block 2 │ …        park group 0 │ park group 1 │ …
//!  backward   … │ block 2 │ block 1 │ block 0
//!               fetch 2 and start 1 │ use 1 and start 0 │ use 0
//! ```
//!
//! An activation that is parked in forward and read again before backward is fetched and stays on
//! the device.
//!
//! Memory held, beside what is parked: in forward one group that is being written, and in backward
//! one group that was prefetched. Forward waits for a copy from a device into host memory. Writes
//! to a file and all fetches overlap with computation.

use std::sync::{Arc, Mutex, Weak};

use burn_backend::{Backend, DType, Shape, TensorMetadata};
use deepburn_comm::CommError;
use deepburn_config::ActivationOffload;
use deepburn_nvme::{SwapError, SwapFile};
use deepburn_ops::read_to_host;

use super::{
    ParkedArray, ParkedRead, ParkedTensor, PieceLayout, Store, WriteBehind, io_policy, lock,
};
use crate::group::Group;
use crate::leased::{FullTensor, Leased};
use crate::ledger::{Category, Lease, Ledger};

/// Parks the activations of one model on one rank.
pub(crate) struct ActivationStore<B: Backend> {
    store: Store,
    /// The size in bytes from which on an activation is parked.
    threshold: usize,
    /// Returns true if a tensor comes back as it was: its elements are stored in their flat order.
    is_contiguous: fn(&B::FloatTensorPrimitive) -> bool,
    /// Ends all ranks if the disk fails.
    group: Group<B>,
    /// Counts parked bytes on their tier and fetched ones on the device.
    ledger: Ledger,
    /// Writes to the file that are not complete yet.
    writes: Mutex<WriteBehind>,
    /// The groups of the current training pass.
    pass: Mutex<ParkedPass<B>>,
}

/// The groups that one training pass has parked.
struct ParkedPass<B: Backend> {
    /// Counted from 0.
    number: u64,
    /// In the order of forward. A group that was prefetched is empty. References are weak, so an
    /// activation that nobody holds any more is not fetched.
    groups: Vec<Vec<Weak<ParkedActivation<B>>>>,
    /// The bytes of the last group in the store.
    group_bytes: usize,
    /// Whether backward has started. Only then does a fetch start the fetch of another group.
    is_backward: bool,
}

/// An activation outside of the device, or on its way there or back.
pub(crate) struct ParkedActivation<B: Backend> {
    store: Arc<ActivationStore<B>>,
    /// Its pass, and its group in it.
    pass: u64,
    group: usize,
    shape: Shape,
    dtype: DType,
    device: B::Device,
    /// The location of the data.
    transit: Mutex<Transit<B>>,
}

/// The location of a parked activation's data.
enum Transit<B: Backend> {
    /// In host memory or in the file.
    Parked(Arc<ParkedArray>),
    /// Being read from the file, into memory that becomes the tensor. The array keeps the region of
    /// the file until the read has succeeded.
    Arriving { array: Arc<ParkedArray>, read: ParkedRead, lease: Lease },
    /// On the device again, or on its way there in the device's queue.
    Back(FullTensor<B>),
    /// On the device, with the value of the tape that fetched it.
    Fetched,
}

impl<B: Backend> ParkedPass<B> {
    fn new(number: u64) -> Self {
        Self { number, groups: Vec::new(), group_bytes: 0, is_backward: false }
    }
}

impl<B: Backend> ActivationStore<B> {
    /// Creates the store that `offload` selects; `None` if activations stay on the device. Tensors
    /// for which `is_contiguous` returns false always stay there.
    ///
    /// # Errors
    ///
    /// Returns an error if the folder cannot be used or its disk is full.
    pub(crate) fn new(
        offload: &ActivationOffload,
        is_contiguous: fn(&B::FloatTensorPrimitive) -> bool,
        group: Group<B>,
        ledger: Ledger,
    ) -> Result<Option<Arc<Self>>, SwapError> {
        let (store, threshold) = match offload {
            ActivationOffload::Device => return Ok(None),
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
        // What an earlier pass has parked stays with those who hold it.
        let mut pass = lock(&self.pass);
        *pass = ParkedPass::new(pass.number + 1);
    }

    /// Starts backward, and prefetches the group that was parked last.
    pub(crate) fn start_backward(&self) {
        let mut pass = lock(&self.pass);
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

    /// Returns true if a tensor can be parked and parking it frees memory: it is contiguous, not
    /// small, and nobody else holds its memory.
    ///
    /// Views with another layout stay on the device. They would come back contiguous, and kernels
    /// may add the elements in another order then. A broadcast value would even take more memory
    /// parked than it frees.
    pub(crate) fn takes(&self, tensor: &FullTensor<B>) -> bool {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        let is_held_alone =
            tensor.lease.as_ref().is_some_and(|lease| Arc::strong_count(lease) == 1);
        is_held_alone
            && bytes > 0
            && bytes >= self.threshold
            && (self.is_contiguous)(&tensor.tensor)
    }

    /// Parks a tensor in the current group. Its device memory is freed when this call returns.
    ///
    /// # Panics
    ///
    /// Panics with a [`CommError`] if the disk fails, because a tensor op cannot return it.
    pub(crate) fn park(self: &Arc<Self>, tensor: FullTensor<B>) -> Arc<ParkedActivation<B>> {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        let device = B::float_device(&tensor.tensor);
        let bytes = read_to_host::<B>(tensor.tensor.clone());
        let array = self
            .write(&bytes, shape.num_elements(), dtype)
            .unwrap_or_else(|error| std::panic::panic_any(self.failed("write", &error)));
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

    /// Prefetches the group before the group of `parked`, in the backward part of its pass.
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

    /// Starts the reads of a group. An error is not reported here; the read is tried again where
    /// the data is needed.
    fn fetch_ahead(group: Option<Vec<Weak<ParkedActivation<B>>>>) {
        for parked in group.iter().flatten().filter_map(Weak::upgrade) {
            // What cannot be read now is tried again where it is needed.
            let _ = parked.start_fetch();
        }
    }

    /// Copies bytes into a new parked array.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails or host memory cannot be allocated.
    fn write(
        &self,
        bytes: &[u8],
        numel: usize,
        dtype: DType,
    ) -> Result<Arc<ParkedArray>, SwapError> {
        // One piece: it is written and read as a whole.
        let layout = PieceLayout { len: numel, piece: numel, element_bytes: dtype.size() };
        let array =
            ParkedArray::unfilled(&self.store, layout, &self.ledger, Category::Activations)?;
        let mut pass = lock(&self.pass);
        pass.group_bytes += layout.file_bytes() as usize;
        let limit = pass.group_bytes;
        drop(pass);
        let mut writes = lock(&self.writes);
        // The limit is the size of the group so far. Writes of earlier groups had the time of a
        // block to complete, and are awaited now.
        writes.set_limit(limit);
        array.write(bytes, dtype, &mut writes)?;
        Ok(array)
    }

    /// Returns the failure of a disk as a `CommError`, which ends all ranks. `what` is the
    /// operation.
    fn failed(&self, what: &str, error: &SwapError) -> CommError {
        self.group.failed(format!("cannot {what} an activation: {error}"))
    }
}

impl<B: Backend> ParkedActivation<B> {
    /// Brings the data back to its device and returns it. The array is released. In backward the
    /// group before is prefetched first, so that its reads overlap with this wait.
    ///
    /// # Panics
    ///
    /// Panics with a [`CommError`] if the disk fails, because a tensor op cannot return it.
    pub(crate) fn fetch(&self) -> FullTensor<B> {
        let fetched = self.start_fetch().and_then(|()| {
            self.store.fetch_before(self);
            self.arrive()
        });
        fetched.unwrap_or_else(|error| std::panic::panic_any(self.store.failed("read", &error)))
    }

    /// Starts to read the data if it is parked. From then on the ledger counts it on the device.
    fn start_fetch(&self) -> Result<(), SwapError> {
        let mut transit = lock(&self.transit);
        if let Transit::Parked(array) = &*transit {
            let read = ParkedTensor { array, dtype: self.dtype }.start()?;
            let bytes = self.shape.num_elements() * self.dtype.size();
            let lease = self.store.ledger.hold(Category::Activations, bytes);
            *transit = match self.store.store {
                // A device copies while it computes.
                Store::Host => Transit::Back(self.tensor(read, lease)?),
                Store::Disk(_) => Transit::Arriving { array: array.clone(), read, lease },
            };
        }
        Ok(())
    }

    /// Waits for data whose fetch was started. If that fails, the data is parked as before.
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

    /// Turns a read into a tensor of the original shape.
    fn tensor(&self, read: ParkedRead, lease: Lease) -> Result<FullTensor<B>, SwapError> {
        let tensor = B::float_reshape(read.wait::<B>(&self.device)?, self.shape.clone());
        Ok(Leased { tensor, lease: Some(Arc::new(lease)) })
    }
}
