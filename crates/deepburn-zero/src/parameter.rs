//! One parameter of a sharded model.
//!
//! [Note: Parameter states] The state of a parameter ([`ParameterState`]) describes the data that
//! this rank holds:
//!
//! - *whole*: the rank holds all elements. This is the state at stages 0 to 2. Between two
//!   exchanges of 0/1 Adam, the values differ between ranks.
//! - *sharded*: the rank holds its flat, zero-padded shard (stage 3). The shard is on the device,
//!   or *parked* in host memory or on NVMe (`offload_param`). On a single rank the shard has all
//!   elements. In addition, there may be a gathered copy. It is *fetching* while the all-gather
//!   runs, *gathered* while the gatherer keeps it for another op, or *persistent* until the
//!   optimizer changes the shard (`stage3_param_persistence_threshold`). With hpZ there may also be
//!   a *secondary shard*: a slice of the same values for fewer ranks, which gather inside their
//!   group as long as the values do not change. Everything that changes the shard drops it, so it
//!   is never outdated.
//! - *checked out*: the optimizer has taken the values for an update.
//!
//! ```text
//!  gathered copy          Absent ──start_fetch──► Fetching ──keep_gathered──► Gathered ──release──► Absent
//!                         Absent ──make_persistent──► Persistent
//!  optimizer step         any copy ──take──► checked out ──put──► Absent
//! ```
//!
//! The module's tensors are handles to these values, so an optimizer step changes the model without
//! changing the module.
//!
//! The flat elements of a parameter are partitioned over the ranks, independently of its shape.
//! With 10 elements on 4 ranks:
//!
//! ```text
//!  flat     e0 e1 e2 │ e3 e4 e5 │ e6 e7 e8 │ e9 0 0
//!  rank        0     │    1     │    2     │   3       shard length 3, padded with zeros
//! ```
//!
//! Main types: [`Parameter`], the [`Shard`] that a rank holds of it, and [`ShardSpec`], the slice
//! that a rank updates. `handle.rs` and `view.rs` are what the tensors of the module hold. At stage
//! 3, the [`Gatherer`] gathers parameters for ops and prefetches the next ones in the order of a
//! [`Trace`]. After a step, a [`Publisher`] gives all ranks the updated elements. Shards may be
//! offloaded arrays (`offload`), and all-gathers run in the process group (`group`).

mod fetch;
mod gather;
mod handle;
mod persistence;
mod publish;
mod shard;
mod shard_spec;
mod state;
mod storage;
mod trace;
mod view;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use burn_backend::{Backend, DType, Shape};

use crate::group::elements_to_come;
use crate::holders::Holders;
use crate::ledger::{Category, Ledger};
use crate::offload::{ParkedArray, WriteBehind};
use crate::session::Leased;
use deepburn_comm::{CollectiveTag, Partition};
use deepburn_nvme::SwapError;
use deepburn_ops::{SumOps, shard_of_whole};
use fetch::{Fetch, LiveElements};
use state::{ParameterState, WholeCopy};

pub(crate) use gather::{FetchSource, Gatherer, Secondary};
pub use handle::ParameterView;
pub(crate) use persistence::persistent_parameters;
pub(crate) use publish::Publisher;
pub(crate) use shard::{Shard, ShardRead};
pub(crate) use shard_spec::{ShardSpec, cut_shard};
pub use storage::RowOrder;
pub(crate) use storage::{Storage, WeightOperand};
pub(crate) use trace::{Phase, Trace};
pub(crate) use view::View;

/// A parameter of a sharded model. The tensors of the module are handles to parameters, and an op
/// that needs the data reads the parameter.
#[derive(Debug)]
pub struct Parameter<B: SumOps> {
    /// The properties that never change.
    description: Description<B>,
    /// The data that this rank holds. The lock is held briefly, never during a collective.
    state: Mutex<ParameterState<B>>,
    /// Gathers the complete values if the parameter is sharded.
    gatherer: Option<Weak<dyn Gather<B>>>,
    /// The memory ledger of the model, which also identifies the model.
    ledger: Ledger,
}

/// Gathers the parameters of a model. Each parameter has a reference to its gatherer.
pub(crate) trait Gather<B: Backend>: fmt::Debug + Send + Sync {
    /// Returns the complete stored tensor of parameter `index` for an op that needs it now.
    ///
    /// # Panics
    /// Panics if the call is not on the rank's thread, because the other ranks would not take part
    /// in the collective and all ranks would wait forever. Panics with a
    /// [`CommError`](deepburn_comm::CommError) if the collective fails.
    fn gather(&self, index: usize) -> B::FloatTensorPrimitive;
}

/// The constant properties of a parameter.
#[derive(Debug, Clone)]
pub(crate) struct Description<B: Backend> {
    /// The position in module order.
    pub(crate) index: usize,
    /// The module path of the first occurrence.
    pub(crate) path: Arc<str>,
    /// The shape of the complete parameter.
    pub(crate) shape: Shape,
    /// The type in which ops compute. If it has 16 bits, the optimizer keeps an f32 master.
    pub(crate) dtype: DType,
    /// The device of this rank.
    pub(crate) device: B::Device,
    /// How the elements are stored.
    pub(crate) storage: Storage,
    /// The partition of the stored elements over ranks, which is the same at all stages.
    pub(crate) partition: Partition,
    /// Whether the optimizer updates the parameter.
    pub(crate) trainable: bool,
    /// The pipeline stages that hold the parameter: all of them without a pipeline.
    pub(crate) homes: Holders,
    /// What this rank's stage holds of it.
    pub(crate) role: Role,
}

/// What a pipeline stage holds of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The values, the gradient and the optimizer states: the last home, and every rank without a
    /// pipeline.
    Owner,
    /// The values, which the owner sends after each step: another home of a tied parameter.
    Copy,
    /// Nothing.
    Elsewhere,
}

impl<B: SumOps> Parameter<B> {
    /// Creates a parameter of which this rank holds all elements.
    pub(crate) fn whole(
        description: Description<B>,
        tensor: B::FloatTensorPrimitive,
        ledger: Ledger,
    ) -> Self {
        let state =
            Mutex::new(ParameterState::Whole(Leased::held(tensor, &ledger, Category::Parameters)));
        Self { description, state, gatherer: None, ledger }
    }

    /// Creates a parameter of which this rank holds the flat shard.
    pub(crate) fn sharded(
        description: Description<B>,
        shard: Shard<B>,
        gatherer: Weak<dyn Gather<B>>,
        ledger: Ledger,
    ) -> Self {
        let state = Mutex::new(ParameterState::of_shard(shard));
        Self { description, state, gatherer: Some(gatherer), ledger }
    }

    /// Creates a parameter of which another pipeline stage holds the elements.
    pub(crate) fn elsewhere(description: Description<B>, ledger: Ledger) -> Self {
        Self { description, state: Mutex::new(ParameterState::Elsewhere), gatherer: None, ledger }
    }

    /// Returns the index in module order.
    pub fn index(&self) -> usize {
        self.description.index
    }

    /// Returns the module path, such as `blocks.0.mlp.c_fc.weight`.
    pub fn path(&self) -> &str {
        &self.description.path
    }

    /// Returns the path as a handle, which tags of collectives share instead of copying the text.
    pub(crate) fn shared_path(&self) -> Arc<str> {
        self.description.path.clone()
    }

    /// Returns the tag of a collective for this parameter alone.
    pub(crate) fn tag(&self, what: &'static str) -> CollectiveTag {
        CollectiveTag::new(what, self.index() as u64).naming([self.shared_path()])
    }

    /// Returns the shape of the complete parameter.
    pub fn shape(&self) -> &Shape {
        &self.description.shape
    }

    /// Returns the number of elements of the complete parameter.
    pub fn numel(&self) -> usize {
        self.description.shape.num_elements()
    }

    /// Returns true if the elements are stored in 8 or 4 bits.
    pub fn is_quantized(&self) -> bool {
        self.description.storage != Storage::Plain
    }

    /// Returns the BLAKE3 hash of the elements of a quantized parameter before they were quantized,
    /// in the type in which ops compute; `None` for other parameters, and for those that another
    /// pipeline stage holds.
    pub fn original_hash(&self) -> Option<[u8; 32]> {
        match self.description.storage {
            Storage::Plain | Storage::Encoded { .. } => None,
            Storage::Blocks { original, .. } => original,
        }
    }

    /// Returns the partition of the stored elements over ranks. A quantized parameter stores 32-bit
    /// words.
    pub fn partition(&self) -> Partition {
        self.description.partition
    }

    /// Returns true if the optimizer updates the parameter. A frozen parameter has no gradient.
    pub fn is_trainable(&self) -> bool {
        self.description.trainable
    }

    /// Returns the pipeline stages that hold the parameter: all of them without a pipeline.
    pub fn homes(&self) -> Holders {
        self.description.homes
    }

    /// Returns true if several stages of a pipeline hold the parameter.
    pub(crate) fn is_shared(&self) -> bool {
        // Without a pipeline, all stages count as homes, although there is only one.
        self.homes() != Holders::ALL && self.homes().first() != self.homes().last()
    }

    /// Returns the pipeline stage that owns the parameter: the last one that holds it, and 0
    /// without a pipeline.
    pub fn owner(&self) -> usize {
        if self.homes() == Holders::ALL { 0 } else { self.homes().last() }
    }

    /// Returns what this rank's pipeline stage holds of the parameter.
    pub(crate) fn role(&self) -> Role {
        self.description.role
    }

    /// Returns true if this rank's pipeline stage owns the parameter: it has its gradient and
    /// optimizer states, and saves it. True without a pipeline.
    pub fn is_owned_here(&self) -> bool {
        self.role() == Role::Owner
    }

    /// Returns true if this rank's pipeline stage holds the values of the parameter.
    pub(crate) fn is_held_here(&self) -> bool {
        self.role() != Role::Elsewhere
    }

    /// Returns true if this rank's pipeline stage updates the parameter and has its gradient.
    pub(crate) fn is_updated_here(&self) -> bool {
        self.is_trainable() && self.is_owned_here()
    }

    /// Returns the memory ledger of the parameter's model.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the type in which ops compute.
    pub(crate) fn dtype(&self) -> DType {
        self.description.dtype
    }

    /// Returns how the elements are stored.
    pub(crate) fn storage(&self) -> Storage {
        self.description.storage
    }

    /// Returns the type of the stored elements.
    pub(crate) fn stored_type(&self) -> DType {
        self.description.storage.stored_type(self.dtype())
    }

    pub(crate) fn device(&self) -> &B::Device {
        &self.description.device
    }

    /// Returns all elements in the parameter's shape and gathers them if they are sharded.
    ///
    /// # Panics
    /// Panics for the reasons listed at [`read_stored`](Self::read_stored).
    pub(crate) fn read(&self) -> B::FloatTensorPrimitive {
        self.elements(self.read_stored())
    }

    /// Returns the elements of the complete stored tensor, in the parameter's shape.
    pub(crate) fn elements(&self, stored: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
        self.storage().elements::<B>(stored, self.shape(), self.dtype())
    }

    /// Returns the complete stored tensor and gathers it if it is sharded. A persistent copy is
    /// returned without the gatherer, because it does not depend on the order of uses.
    ///
    /// # Panics
    /// Panics if the optimizer has taken the values, if the engine was dropped, or for the reasons
    /// listed at [`Gather::gather`].
    pub(crate) fn read_stored(&self) -> B::FloatTensorPrimitive {
        match &*self.lock() {
            ParameterState::Whole(whole)
            | ParameterState::Sharded { copy: WholeCopy::Persistent(whole), .. } => {
                return whole.tensor.clone();
            }
            // The gatherer checks for a gathered copy, because it has to record every use.
            ParameterState::Sharded { .. } => {}
            ParameterState::CheckedOut => {
                panic!("parameter {} was read while the optimizer updates it", self.path())
            }
            ParameterState::Elsewhere => panic!(
                "parameter {} was read on a pipeline stage that does not hold it; stages {} do",
                self.path(),
                self.homes()
            ),
        }
        // The lock of the state is released, because a gather is a collective and changes the
        // state.
        match self.gatherer.as_ref().and_then(Weak::upgrade) {
            Some(gatherer) => gatherer.gather(self.index()),
            None => panic!(
                "parameter {} is sharded and its engine is gone: keep the engine for as long as \
                 its module is used",
                self.path()
            ),
        }
    }

    /// Returns this rank's shard if the parameter is sharded.
    pub(crate) fn shard(&self) -> Option<Shard<B>> {
        match &*self.lock() {
            ParameterState::Sharded { shard, .. } => Some(shard.clone()),
            ParameterState::Whole(_) | ParameterState::CheckedOut | ParameterState::Elsewhere => {
                None
            }
        }
    }

    /// Returns this rank's shard if it is offloaded.
    pub(crate) fn parked(&self) -> Option<Arc<ParkedArray>> {
        match self.shard()? {
            Shard::Parked(array) => Some(array),
            Shard::Device(_) => None,
        }
    }

    /// Returns this rank's shard for an update in place if it is offloaded. A gathered copy and a
    /// secondary shard are dropped, because the update makes them outdated.
    pub(crate) fn update_parked(&self) -> Option<Arc<ParkedArray>> {
        match &mut *self.lock() {
            ParameterState::Sharded { shard: Shard::Parked(array), copy, secondary } => {
                (*copy, *secondary) = (WholeCopy::Absent, None);
                Some(array.clone())
            }
            _ => None,
        }
    }

    /// Takes the stored elements for the optimizer: all elements or this rank's shard. A gathered
    /// copy and a secondary shard are dropped, because the update makes them outdated. The ledger
    /// entry ends, so the caller must count the elements elsewhere.
    ///
    /// # Panics
    /// Panics if the elements were already taken.
    pub(crate) fn take(&self) -> B::FloatTensorPrimitive {
        match std::mem::replace(&mut *self.lock(), ParameterState::CheckedOut) {
            ParameterState::Whole(held)
            | ParameterState::Sharded { shard: Shard::Device(held), .. } => held.into_inner(),
            ParameterState::Sharded { shard: Shard::Parked(_), .. } => {
                unreachable!("a parked shard is updated where it is")
            }
            ParameterState::CheckedOut | ParameterState::Elsewhere => {
                panic!("parameter {} was taken twice, or by another stage", self.path())
            }
        }
    }

    /// Stores the updated elements that [`take`](Self::take) returned: all elements in the
    /// parameter's shape, or this rank's shard.
    pub(crate) fn put(&self, tensor: B::FloatTensorPrimitive) {
        let held = Leased::held(tensor, &self.ledger, Category::Parameters);
        *self.lock() = match self.gatherer {
            Some(_) => ParameterState::of_shard(Shard::Device(held)),
            None => ParameterState::Whole(held),
        };
    }

    /// Returns the elements that this rank keeps, for another pipeline stage of a tied parameter:
    /// all of them, or its shard.
    ///
    /// # Errors
    /// Returns an error if an offloaded shard cannot be read.
    pub(crate) fn kept_values(&self) -> Result<B::FloatTensorPrimitive, SwapError> {
        match self.shard() {
            Some(shard) => shard.start_read(self.dtype())?.wait(self.device()),
            None => Ok(self.read_stored()),
        }
    }

    /// Returns a placeholder for the elements that [`kept_values`](Self::kept_values) of another
    /// stage returns.
    pub(crate) fn values_to_come(&self) -> B::FloatTensorPrimitive {
        let numel = match self.shard() {
            Some(_) => self.partition().shard_len(),
            None => self.partition().numel(),
        };
        elements_to_come::<B>(numel, self.stored_type().into(), self.device())
    }

    /// Replaces the elements that this rank keeps with the owner's values.
    ///
    /// # Errors
    /// Returns an error if an offloaded shard cannot be written.
    pub(crate) fn replace_values(&self, flat: B::FloatTensorPrimitive) -> Result<(), SwapError> {
        if let Some(shard) = self.update_parked() {
            return shard.write_tensor::<B>(flat, &mut WriteBehind::default());
        }
        // This also drops a gathered copy and a secondary shard of the old values.
        drop(self.take());
        match self.gatherer {
            Some(_) => self.put(flat),
            None => self.put(B::float_reshape(flat, self.shape().clone())),
        }
        Ok(())
    }

    /// Locks the state. A poisoned lock means that this rank is unwinding, and its data is not used
    /// again.
    fn lock(&self) -> MutexGuard<'_, ParameterState<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Methods with which the gatherer manages the gathered copy of a sharded parameter.
impl<B: SumOps> Parameter<B> {
    /// Returns true if there is a persistent copy.
    pub(crate) fn is_persistent(&self) -> bool {
        matches!(&*self.lock(), ParameterState::Sharded { copy: WholeCopy::Persistent(_), .. })
    }

    /// Returns true if there is no copy and none is being gathered.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(&*self.lock(), ParameterState::Sharded { copy: WholeCopy::Absent, .. })
    }

    /// Returns the pending fetch of a copy.
    pub(crate) fn fetch(&self) -> Option<Arc<Fetch<B>>> {
        match &*self.lock() {
            ParameterState::Sharded { copy: WholeCopy::Fetching(fetch), .. } => Some(fetch.clone()),
            _ => None,
        }
    }

    /// Returns the gathered copy.
    pub(crate) fn gathered(&self) -> Option<B::FloatTensorPrimitive> {
        match &*self.lock() {
            ParameterState::Sharded { copy: WholeCopy::Gathered { whole, .. }, .. } => {
                Some(whole.tensor.clone())
            }
            _ => None,
        }
    }

    /// Records that a copy is being gathered.
    pub(crate) fn start_fetch(&self, fetch: Arc<Fetch<B>>) {
        self.set_copy(WholeCopy::Fetching(fetch));
    }

    /// Returns true if a gathered copy takes memory. On a single rank, a shard on the device has
    /// all elements, and the gathered copy is a view of it.
    pub(crate) fn is_copied_by_gather(&self) -> bool {
        self.partition().world_size() > 1 || self.parked().is_some()
    }

    /// Keeps a gathered copy until [`release`](Self::release).
    pub(crate) fn keep_gathered(&self, whole: B::FloatTensorPrimitive, live: LiveElements) {
        let whole = match self.is_copied_by_gather() {
            true => Leased::held(whole, &self.ledger, Category::Gathered),
            false => Leased { tensor: whole, lease: None },
        };
        self.set_copy(WholeCopy::Gathered { whole, _live: live });
    }

    /// Moves the shard of `rank` into the memory of `whole`, which the ranks of one process can
    /// share. Later gathers then copy nothing, as long as all ranks change their shards in place.
    /// The ledger is not changed, because ranks on different machines hold the shard and the whole
    /// parameter.
    pub(crate) fn move_shard(&self, whole: &B::FloatTensorPrimitive, rank: usize) {
        if let ParameterState::Sharded { shard: Shard::Device(held), .. } = &mut *self.lock()
            && let Some(shard) = shard_of_whole::<B>(whole, rank)
        {
            held.tensor = shard;
        }
    }

    /// Returns the secondary shard.
    pub(crate) fn secondary(&self) -> Option<B::FloatTensorPrimitive> {
        match &*self.lock() {
            ParameterState::Sharded { secondary: Some(shard), .. } => Some(shard.tensor.clone()),
            _ => None,
        }
    }

    /// Keeps a secondary shard, cut from the current values, until they change or until
    /// [`release_secondary`](Self::release_secondary).
    pub(crate) fn keep_secondary(&self, shard: B::FloatTensorPrimitive) {
        if let ParameterState::Sharded { secondary, .. } = &mut *self.lock() {
            *secondary = Some(Leased::held(shard, &self.ledger, Category::Gathered));
        }
    }

    /// Drops the secondary shard.
    pub(crate) fn release_secondary(&self) {
        if let ParameterState::Sharded { secondary, .. } = &mut *self.lock() {
            *secondary = None;
        }
    }

    /// Keeps the complete values until the optimizer changes the shard.
    pub(crate) fn make_persistent(&self, whole: B::FloatTensorPrimitive) {
        let whole = Leased::held(whole, &self.ledger, Category::Parameters);
        self.set_copy(WholeCopy::Persistent(whole));
    }

    /// Drops a copy that is not persistent. Returns a pending fetch.
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

    /// Replaces the gathered copy of a sharded parameter.
    fn set_copy(&self, to: WholeCopy<B>) {
        match &mut *self.lock() {
            ParameterState::Sharded { copy, .. } => *copy = to,
            ParameterState::Whole(_) | ParameterState::CheckedOut | ParameterState::Elsewhere => {
                unreachable!("parameter {} is gathered while it is not sharded", self.path())
            }
        }
    }
}
