//! Activations that wait for backward outside of the device: activation offload.
//!
//! Main type: [`ActivationStore`], one for each model whose activations are offloaded. Forward parks the
//! activations that are kept of a block once the block after it is over, as one group. Backward needs the
//! groups in the reverse order: when it reads the first activation of a group, the group before is fetched
//! ahead. What is parked in forward and read again before backward is fetched, and stays on the device.
//!
//! Memory held, beside what is parked: in forward a group that is being written, and in backward
//! one that was fetched ahead.

use std::sync::{Arc, Mutex, Weak};

use burn_backend::{Backend, DType, Shape, TensorMetadata};
use deepburn_comm::CommError;
use deepburn_config::ActivationOffload;
use deepburn_nvme::{SwapError, SwapFile};
use deepburn_ops::read_to_host;

use super::{ParkedArray, ParkedRead, ParkedTensor, PieceLayout, Store, WriteBehind, lock};
use crate::group::Group;
use crate::ledger::{Category, Lease, Ledger};
use crate::tensor::{FullTensor, Leased};
use crate::tiers::io_policy;

/// Parks the activations of one model on one rank.
pub(crate) struct ActivationStore<B: Backend> {
    store: Store,
    /// Bytes from which on an activation is parked.
    threshold: usize,
    /// Whether a tensor comes back as it was: parked are its elements in their flat order.
    is_contiguous: fn(&B::FloatTensorPrimitive) -> bool,
    /// Ends all ranks where the disk fails.
    group: Group<B>,
    ledger: Ledger,
    writes: Mutex<WriteBehind>,
    pass: Mutex<ParkedPass<B>>,
}

/// What a pass has parked.
struct ParkedPass<B: Backend> {
    /// Counted from 0.
    number: u64,
    /// In the order of forward. A group that was fetched ahead is empty.
    groups: Vec<Vec<Weak<ParkedActivation<B>>>>,
    /// Bytes of the last group.
    group_bytes: usize,
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
    transit: Mutex<Transit<B>>,
}

/// Where the data of a parked activation is.
enum Transit<B: Backend> {
    /// In host memory or in the file.
    Parked(Arc<ParkedArray>),
    /// Being read from the file, into memory that will be the tensor's.
    Arriving { array: Arc<ParkedArray>, read: ParkedRead, lease: Lease },
    /// On the device again, or on its way there in the device's queue.
    Back(FullTensor<B>),
    /// On the device, with whoever has fetched it.
    Fetched,
}

impl<B: Backend> ParkedPass<B> {
    fn new(number: u64) -> Self {
        Self { number, groups: Vec::new(), group_bytes: 0, is_backward: false }
    }
}

impl<B: Backend> ActivationStore<B> {
    /// Creates the store that `offload` asks for; `None` where activations stay on the device. Tensors for
    /// which `is_contiguous` is false stay there too.
    ///
    /// # Errors
    /// The folder cannot be used, or its disk is full.
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

    /// Begins a training pass.
    pub(crate) fn start_forward(&self) {
        // What an earlier pass has parked stays with those who hold it.
        let mut pass = lock(&self.pass);
        *pass = ParkedPass::new(pass.number + 1);
    }

    /// Ends forward: the group that was parked last is fetched ahead.
    pub(crate) fn start_backward(&self) {
        let mut pass = lock(&self.pass);
        if std::mem::replace(&mut pass.is_backward, true) {
            return;
        }
        let last = pass.groups.last_mut().map(std::mem::take);
        drop(pass);
        Self::fetch_ahead(last);
    }

    /// Begins the next group.
    pub(crate) fn start_group(&self) {
        let mut pass = lock(&self.pass);
        pass.groups.push(Vec::new());
        pass.group_bytes = 0;
    }

    /// Whether a tensor can be parked, and it pays: it is contiguous and not small, and nobody else holds its
    /// memory. Views of other layouts stay: kernels may add their elements in another order, and a broadcast
    /// value is larger than its memory.
    pub(crate) fn takes(&self, tensor: &FullTensor<B>) -> bool {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        let is_held_alone =
            tensor.lease.as_ref().is_some_and(|lease| Arc::strong_count(lease) == 1);
        is_held_alone
            && bytes > 0
            && bytes >= self.threshold
            && (self.is_contiguous)(&tensor.tensor)
    }

    /// Parks a tensor in the present group.
    ///
    /// # Panics
    /// With a [`CommError`] where the disk fails: a tensor op cannot return it.
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

    /// Where activations wait.
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

    fn fetch_ahead(group: Option<Vec<Weak<ParkedActivation<B>>>>) {
        for parked in group.iter().flatten().filter_map(Weak::upgrade) {
            // What cannot be read now is tried again where it is needed.
            let _ = parked.start_fetch();
        }
    }

    /// Copies bytes to where parked activations are.
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
        // The writes of earlier groups have had the time of a block, and now they are waited for.
        writes.set_limit(limit);
        array.write(bytes, dtype, &mut writes)?;
        Ok(array)
    }

    /// The failure of a disk.
    fn failed(&self, what: &str, error: &SwapError) -> CommError {
        self.group.failed(format!("cannot {what} an activation: {error}"))
    }
}

impl<B: Backend> ParkedActivation<B> {
    /// Returns the data on its device, where it stays. In backward the group before is fetched ahead.
    ///
    /// # Panics
    /// With a [`CommError`] where the disk fails: a tensor op cannot return it.
    pub(crate) fn fetch(&self) -> FullTensor<B> {
        let fetched = self.start_fetch().and_then(|()| {
            self.store.fetch_before(self);
            self.arrive()
        });
        fetched.unwrap_or_else(|error| std::panic::panic_any(self.store.failed("read", &error)))
    }

    /// Starts to read the data, where it is parked.
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

    /// Waits for data whose fetch was started.
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

    /// The tensor of what was read.
    fn tensor(&self, read: ParkedRead, lease: Lease) -> Result<FullTensor<B>, SwapError> {
        let tensor = B::float_reshape(read.wait::<B>(&self.device)?, self.shape.clone());
        Ok(Leased { tensor, lease: Some(Arc::new(lease)) })
    }
}
