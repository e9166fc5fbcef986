//! One parameter of a sharded model.
//!
//! [Note: Parameter states]
//! - *whole*: every rank holds all elements (stages 0 to 2, and one rank).
//! - *sharded*: every rank holds its flat, zero-padded chunk (stage 3).
//! - *resident*: sharded, and small enough that a whole copy is kept beside the shard until the
//!   optimizer changes it (`stage3_param_persistence_threshold`).
//! - *parked*: sharded, with the chunk in host memory beside a device or on NVMe (`offload_param`).
//! - *gathered*: made whole for an op; the [`Gatherer`] decides how long.
//! - *lent*: in the hands of the optimizer.
//!
//! The module's tensors are handles on these values, so a step changes the model without touching
//! the module.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::{Backend, DType, Shape, TensorMetadata};

use crate::gather::Gatherer;
use crate::ledger::{Category, Lease, Ledger};
use crate::parked::ParkedArray;
use deepburn_comm::Partition;

/// A parameter by its place in the model.
#[derive(Debug)]
pub struct Parameter<B: Backend> {
    description: Description<B>,
    storage: Mutex<Storage<B>>,
    ledger: Ledger,
}

/// What never changes about a parameter.
#[derive(Debug, Clone)]
pub(crate) struct Description<B: Backend> {
    pub(crate) index: usize,
    pub(crate) path: Arc<str>,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: B::Device,
    pub(crate) partition: Partition,
    pub(crate) trainable: bool,
}

#[derive(Debug)]
enum Storage<B: Backend> {
    /// All elements, in the parameter's shape.
    Whole(Held<B>),
    /// This rank's flat chunk, and the whole copy of a resident parameter.
    Sharded { shard: Held<B>, resident: Option<Held<B>>, gatherer: Weak<Gatherer<B>> },
    /// The same, with the chunk outside of the device.
    Parked { shard: Arc<ParkedArray>, resident: Option<Held<B>>, gatherer: Weak<Gatherer<B>> },
    /// Nothing: the optimizer has it.
    Lent { gatherer: Option<Weak<Gatherer<B>>> },
}

/// This rank's flat chunk of a parameter.
#[derive(Debug)]
pub(crate) enum Shard<B: Backend> {
    /// On the device.
    Device(B::FloatTensorPrimitive),
    /// Outside of it, in the parameter's type.
    Parked(Arc<ParkedArray>),
}

#[derive(Debug)]
struct Held<B: Backend> {
    tensor: B::FloatTensorPrimitive,
    _lease: Lease,
}

impl<B: Backend> Parameter<B> {
    /// A parameter that every rank holds whole.
    pub(crate) fn whole(
        description: Description<B>,
        tensor: B::FloatTensorPrimitive,
        ledger: Ledger,
    ) -> Self {
        let held = Held::new(tensor, &ledger);
        Self { description, storage: Mutex::new(Storage::Whole(held)), ledger }
    }

    /// A parameter of which this rank holds the flat chunk `shard`.
    pub(crate) fn sharded(
        description: Description<B>,
        shard: Shard<B>,
        gatherer: Weak<Gatherer<B>>,
        ledger: Ledger,
    ) -> Self {
        let storage = match shard {
            Shard::Device(shard) => {
                let shard = Held::new(shard, &ledger);
                Storage::Sharded { shard, resident: None, gatherer }
            }
            Shard::Parked(shard) => Storage::Parked { shard, resident: None, gatherer },
        };
        Self { description, storage: Mutex::new(storage), ledger }
    }

    /// Place in the model's order of parameters.
    pub fn index(&self) -> usize {
        self.description.index
    }

    /// Module path, such as `blocks.0.mlp.c_fc.weight`.
    pub fn path(&self) -> &str {
        &self.description.path
    }

    pub(crate) fn shared_path(&self) -> Arc<str> {
        self.description.path.clone()
    }

    /// Shape of the whole parameter.
    pub fn shape(&self) -> &Shape {
        &self.description.shape
    }

    /// Elements of the whole parameter.
    pub fn numel(&self) -> usize {
        self.description.partition.numel()
    }

    /// How it is cut.
    pub fn partition(&self) -> Partition {
        self.description.partition
    }

    /// Whether the optimizer updates it; a frozen parameter gets no gradient.
    pub fn is_trainable(&self) -> bool {
        self.description.trainable
    }

    /// The ledger of its model.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(crate) fn dtype(&self) -> DType {
        self.description.dtype
    }

    pub(crate) fn device(&self) -> &B::Device {
        &self.description.device
    }

    /// All elements in the parameter's shape, gathered where they are sharded.
    pub(crate) fn read(&self) -> B::FloatTensorPrimitive {
        let gatherer = match &*self.lock() {
            Storage::Whole(whole) => return whole.tensor.clone(),
            Storage::Sharded { resident: Some(whole), .. }
            | Storage::Parked { resident: Some(whole), .. } => return whole.tensor.clone(),
            Storage::Sharded { gatherer, .. } | Storage::Parked { gatherer, .. } => {
                gatherer.clone()
            }
            Storage::Lent { .. } => {
                panic!("parameter {} was read while the optimizer updates it", self.path())
            }
        };
        match gatherer.upgrade() {
            Some(gatherer) => gatherer.gather(self.index()),
            None => panic!(
                "parameter {} is sharded and its engine is gone: keep the engine for as long as \
                 its module is used",
                self.path()
            ),
        }
    }

    /// This rank's chunk where the parameter is sharded.
    pub(crate) fn shard(&self) -> Option<Shard<B>> {
        match &*self.lock() {
            Storage::Sharded { shard, .. } => Some(Shard::Device(shard.tensor.clone())),
            Storage::Parked { shard, .. } => Some(Shard::Parked(shard.clone())),
            Storage::Whole(_) | Storage::Lent { .. } => None,
        }
    }

    /// This rank's chunk where it is outside of the device.
    pub(crate) fn parked(&self) -> Option<Arc<ParkedArray>> {
        match &*self.lock() {
            Storage::Parked { shard, .. } => Some(shard.clone()),
            Storage::Whole(_) | Storage::Sharded { .. } | Storage::Lent { .. } => None,
        }
    }

    pub(crate) fn is_resident(&self) -> bool {
        matches!(
            &*self.lock(),
            Storage::Sharded { resident: Some(_), .. } | Storage::Parked { resident: Some(_), .. }
        )
    }

    /// Keeps a whole copy beside the shard until the next [`take`](Self::take) or
    /// [`outdate`](Self::outdate).
    pub(crate) fn make_resident(&self, whole: B::FloatTensorPrimitive) {
        match &mut *self.lock() {
            Storage::Sharded { resident, .. } | Storage::Parked { resident, .. } => {
                *resident = Some(Held::new(whole, &self.ledger));
            }
            Storage::Whole(_) | Storage::Lent { .. } => {}
        }
    }

    /// Drops the whole copy of a parked parameter, whose chunk is about to be changed where it is.
    pub(crate) fn outdate(&self) {
        if let Storage::Parked { resident, .. } = &mut *self.lock() {
            *resident = None;
        }
    }

    /// Hands the stored elements (all, or this rank's chunk) to the optimizer; a resident copy is
    /// dropped, being out of date from now on.
    pub(crate) fn take(&self) -> B::FloatTensorPrimitive {
        let mut storage = self.lock();
        let gatherer = match &*storage {
            Storage::Sharded { gatherer, .. } => Some(gatherer.clone()),
            _ => None,
        };
        match std::mem::replace(&mut *storage, Storage::Lent { gatherer }) {
            Storage::Whole(held) | Storage::Sharded { shard: held, .. } => held.tensor,
            Storage::Lent { .. } => panic!("parameter {} was taken twice", self.path()),
            Storage::Parked { .. } => unreachable!("a parked shard is updated where it is"),
        }
    }

    /// Stores what [`take`](Self::take) handed out, updated.
    pub(crate) fn put(&self, tensor: B::FloatTensorPrimitive) {
        let held = Held::new(tensor, &self.ledger);
        let mut storage = self.lock();
        let gatherer = match &*storage {
            Storage::Lent { gatherer: Some(gatherer) } => Some(gatherer.clone()),
            _ => None,
        };
        *storage = match gatherer {
            Some(gatherer) => Storage::Sharded { shard: held, resident: None, gatherer },
            None => Storage::Whole(held),
        };
    }

    /// A poisoned lock means that this rank is already unwinding; its data is not used again.
    fn lock(&self) -> MutexGuard<'_, Storage<B>> {
        self.storage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Held<B> {
    fn new(tensor: B::FloatTensorPrimitive, ledger: &Ledger) -> Self {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Self { tensor, _lease: ledger.hold(Category::Parameters, bytes) }
    }
}
