//! One parameter of a sharded model.
//!
//! [Note: Parameter states] Each parameter has one state ([`ParameterState`]). It alone describes what
//! this rank holds of the parameter:
//! - *whole*: the rank holds all elements. This is the state at stages 0 to 2. Between two exchanges of
//!   0/1 Adam the values differ from rank to rank.
//! - *sharded*: the rank holds its flat, zero-padded chunk (stage 3). The chunk is on the device or
//!   *parked*, in host memory beside a device or on NVMe (`offload_param`). On a single rank the chunk has
//!   all elements. Beside the chunk there may be a gathered copy: *fetching* while the all-gather runs;
//!   *gathered*, kept for another op as long as the [`Gatherer`] decides; or *persistent*, kept until the
//!   optimizer changes the chunk (`stage3_param_persistence_threshold`).
//! - *checked out*: the optimizer has taken the values for an update.
//!
//! The module's tensors are handles to these values, so a step changes the model without changing the
//! module.

mod state;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::{Backend, DType, Shape};

use crate::gather::{Fetch, Gatherer, LiveElements};
use crate::ledger::{Category, Ledger};
use crate::parked::ParkedArray;
use crate::tensor::Leased;
use deepburn_comm::Partition;
use deepburn_ops::shard_of_whole;
use state::{ParameterState, WholeCopy};

pub(crate) use state::{Shard, ShardRead};

/// A parameter by its place in the model.
#[derive(Debug)]
pub struct Parameter<B: Backend> {
    description: Description<B>,
    state: Mutex<ParameterState<B>>,
    /// What makes it whole, where it is sharded.
    gatherer: Option<Weak<Gatherer<B>>>,
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

impl<B: Backend> Parameter<B> {
    /// A parameter that every rank holds whole.
    pub(crate) fn whole(
        description: Description<B>,
        tensor: B::FloatTensorPrimitive,
        ledger: Ledger,
    ) -> Self {
        let state =
            Mutex::new(ParameterState::Whole(Leased::held(tensor, &ledger, Category::Parameters)));
        Self { description, state, gatherer: None, ledger }
    }

    /// A parameter of which this rank holds the flat chunk `shard`.
    pub(crate) fn sharded(
        description: Description<B>,
        shard: Shard<B>,
        gatherer: Weak<Gatherer<B>>,
        ledger: Ledger,
    ) -> Self {
        let state = Mutex::new(ParameterState::Sharded { shard, copy: WholeCopy::Absent });
        Self { description, state, gatherer: Some(gatherer), ledger }
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
        match &*self.lock() {
            ParameterState::Whole(whole)
            | ParameterState::Sharded { copy: WholeCopy::Persistent(whole), .. } => {
                return whole.tensor.clone();
            }
            // The gatherer looks at the copy: the use belongs into its record, whatever there is.
            ParameterState::Sharded { .. } => {}
            ParameterState::CheckedOut => {
                panic!("parameter {} was read while the optimizer updates it", self.path())
            }
        }
        match self.gatherer.as_ref().and_then(Weak::upgrade) {
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
            ParameterState::Sharded { shard, .. } => Some(shard.clone()),
            ParameterState::Whole(_) | ParameterState::CheckedOut => None,
        }
    }

    /// This rank's chunk where it is outside of the device.
    pub(crate) fn parked(&self) -> Option<Arc<ParkedArray>> {
        match self.shard()? {
            Shard::Parked(array) => Some(array),
            Shard::Device(_) => None,
        }
    }

    /// This rank's chunk where it is outside of the device, to be changed where it is. Whole values, which
    /// the change makes out of date, are dropped.
    pub(crate) fn update_parked(&self) -> Option<Arc<ParkedArray>> {
        match &mut *self.lock() {
            ParameterState::Sharded { shard: Shard::Parked(array), copy } => {
                *copy = WholeCopy::Absent;
                Some(array.clone())
            }
            _ => None,
        }
    }

    /// Hands the stored elements (all, or this rank's chunk) to the optimizer. Whole values beside a chunk
    /// are dropped, being out of date from now on.
    pub(crate) fn take(&self) -> B::FloatTensorPrimitive {
        match std::mem::replace(&mut *self.lock(), ParameterState::CheckedOut) {
            ParameterState::Whole(held)
            | ParameterState::Sharded { shard: Shard::Device(held), .. } => held.into_inner(),
            ParameterState::Sharded { shard: Shard::Parked(_), .. } => {
                unreachable!("a parked shard is updated where it is")
            }
            ParameterState::CheckedOut => panic!("parameter {} was taken twice", self.path()),
        }
    }

    /// Stores what [`take`](Self::take) handed out, updated.
    pub(crate) fn put(&self, tensor: B::FloatTensorPrimitive) {
        let held = Leased::held(tensor, &self.ledger, Category::Parameters);
        *self.lock() = match self.gatherer {
            Some(_) => {
                ParameterState::Sharded { shard: Shard::Device(held), copy: WholeCopy::Absent }
            }
            None => ParameterState::Whole(held),
        };
    }

    /// A poisoned lock means that this rank is already unwinding; its data is not used again.
    fn lock(&self) -> MutexGuard<'_, ParameterState<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the gatherer does with the whole values of a sharded parameter.
impl<B: Backend> Parameter<B> {
    /// Whether there are whole values that stay until the optimizer changes the shard.
    pub(crate) fn is_persistent(&self) -> bool {
        matches!(&*self.lock(), ParameterState::Sharded { copy: WholeCopy::Persistent(_), .. })
    }

    /// Whether whole values are neither there nor on their way.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(&*self.lock(), ParameterState::Sharded { copy: WholeCopy::Absent, .. })
    }

    /// The fetch that brings whole values, where they are on their way.
    pub(crate) fn fetch(&self) -> Option<Arc<Fetch<B>>> {
        match &*self.lock() {
            ParameterState::Sharded { copy: WholeCopy::Fetching(fetch), .. } => Some(fetch.clone()),
            _ => None,
        }
    }

    /// Whole values that were gathered.
    pub(crate) fn gathered(&self) -> Option<B::FloatTensorPrimitive> {
        match &*self.lock() {
            ParameterState::Sharded { copy: WholeCopy::Gathered { whole, .. }, .. } => {
                Some(whole.tensor.clone())
            }
            _ => None,
        }
    }

    /// Whole values are on their way.
    pub(crate) fn start_fetch(&self, fetch: Arc<Fetch<B>>) {
        self.set_copy(WholeCopy::Fetching(fetch));
    }

    /// Keeps whole values until [`release`](Self::release).
    pub(crate) fn keep_gathered(&self, whole: B::FloatTensorPrimitive, live: LiveElements) {
        let whole = Leased::held(whole, &self.ledger, Category::Gathered);
        self.set_copy(WholeCopy::Gathered { whole, _live: live });
    }

    /// Moves the shard of `rank` into the memory of `whole`, where ranks of one process can share it: until one of
    /// them changes its shard in another way than in place, later gathers copy nothing. The ledger stays as it is,
    /// because a rank on a machine of its own holds both.
    pub(crate) fn move_shard(&self, whole: &B::FloatTensorPrimitive, rank: usize) {
        if let ParameterState::Sharded { shard: Shard::Device(held), .. } = &mut *self.lock()
            && let Some(shard) = shard_of_whole::<B>(whole, rank)
        {
            held.tensor = shard;
        }
    }

    /// Keeps whole values until the optimizer changes the shard.
    pub(crate) fn make_persistent(&self, whole: B::FloatTensorPrimitive) {
        let whole = Leased::held(whole, &self.ledger, Category::Parameters);
        self.set_copy(WholeCopy::Persistent(whole));
    }

    /// Drops whole values that are not persistent. Returns the fetch where they were on their way.
    pub(crate) fn release(&self) -> Option<Arc<Fetch<B>>> {
        let mut state = self.lock();
        let ParameterState::Sharded { copy, .. } = &mut *state else { return None };
        if let WholeCopy::Persistent(_) = copy {
            return None;
        }
        match std::mem::replace(copy, WholeCopy::Absent) {
            WholeCopy::Fetching(fetch) => Some(fetch),
            WholeCopy::Gathered { .. } | WholeCopy::Absent | WholeCopy::Persistent(_) => None,
        }
    }

    fn set_copy(&self, to: WholeCopy<B>) {
        match &mut *self.lock() {
            ParameterState::Sharded { copy, .. } => *copy = to,
            ParameterState::Whole(_) | ParameterState::CheckedOut => {
                unreachable!("parameter {} is gathered while it is not sharded", self.path())
            }
        }
    }
}
