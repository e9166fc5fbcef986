//! Replaces the parameters of a module with handles to sharded parameters.
//!
//! Main type: `Sharder`, a module mapper. All ranks process the parameters together, in module
//! order:
//!
//! ```text
//! rank 0 creates the value, and quantizes it if it is a frozen matrix in 8 or 4 bits
//!     ─► broadcast ─► every rank extracts
//!     shard for the parameter       (stage 3, in the working type, on its tier)
//!     whole parameter               (stages 0 to 2, in the working type)
//!     slice for the optimizer       (f32 master if ops compute in 16 bits)
//! value dropped ─► next parameter
//! ```
//!
//! The peak memory is therefore the kept states plus one whole parameter in f32. A process with
//! several ranks may hold two, because rank 0 creates the next value while other ranks still copy
//! their shards. The module gets handles, which are tensors of the decorated backend that refer to
//! a parameter and have no data. A handle stays in the module for the whole run. Before each
//! forward pass, `Marker` replaces its autodiff leaf.
//!
//! Parameters are identified by module path and index, because Burn's parameter ids differ between
//! processes.
//!
//! The submodules are the other parts of a module. `module_parameters.rs` lists the parameters
//! first, and [`check_module`] compares the lists of the ranks. [`InitialValue`] is the value of
//! rank 0. [`StateTiers`] and [`ShardTiers`] decide what is offloaded (`offload`). Buffers stay in
//! the module ([`BufferTable`]), and plain tensors are compared ([`PlainTensor`]). The model states
//! (`states`) use all of them when they are created.

mod buffers;
mod initial;
mod marker;
mod module_parameters;
mod parameter_size;
mod plain_tensors;
mod same_module;
mod tiers;

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata};
use deepburn_config::{QuantizationPlan, QuantizedFormat};
use deepburn_kernels::BlockFormat;
use deepburn_ops::{OptimizerOps, SumOps, is_without_data, shared_bytes};

use crate::assignment::{Assignment, ModelParameter, UpdateSettings};
use crate::decorator::{PlacedTensor, Training, Zero, ZeroTensor};
use crate::error::ZeroError;
use crate::holders::Holders;
use crate::ledger::{Category, Ledger, Tier};
use crate::module::{
    Module, ModuleMapper, ModulePath, Param, ParamId, Tensor, TensorPrimitive, keep_path,
};
use crate::offload::{ParkedArray, Parking, WriteBehind};
use crate::optimizer::{Optimizer, Owned};
use crate::parameter::{
    Description, Gatherer, Parameter, Role, Shard, ShardSpec, Storage, cut_shard,
};
use crate::pipeline::ParameterHomes;
use crate::session::Leased;
use deepburn_comm::Partition;

use initial::{Announced, InitialValue, TakenParam};

pub(crate) use buffers::BufferTable;
pub use buffers::{Buffer, BufferKind};
pub(crate) use initial::caught;
pub(crate) use marker::Marker;
pub(crate) use module_parameters::{ModuleParameter, parameters_of};
pub use parameter_size::ParameterSize;
pub use plain_tensors::PlainTensor;
pub(crate) use same_module::check_module;
pub use tiers::swap_bytes;
pub(crate) use tiers::{ShardTiers, StateTiers, gradient_bytes};

/// Replaces each parameter of a module with a handle.
///
/// A tied parameter (the same [`ParamId`] at several paths) becomes one parameter with one shard
/// and one autodiff leaf. Its name is its first path.
///
/// Only one parameter is complete at a time. In a process with several ranks there may be two,
/// because rank 0 may create the next value while another rank still extracts its shard.
pub(crate) struct Sharder<'a, B: SumOps> {
    /// The tensors that stay unchanged in the module.
    buffers: &'a BufferTable<B>,
    /// The groups of this rank, and the parameters that each pipeline stage holds.
    homes: ParameterHomes<'a, B>,
    /// The stage and rank, which determine the slices.
    share: ShardSpec,
    /// Counts the memory of shards and states, and of the value that is being sharded.
    ledger: Ledger,
    /// Where shards and optimizer states are kept.
    shards: ShardHomes<'a, B>,
    /// The optimizer settings of each parameter.
    updates: Updates<'a>,
    /// The path of the current module or parameter.
    path: ModulePath,
    /// The parameters so far.
    parameters: Vec<Arc<Parameter<B>>>,
    /// Receives the slice of each parameter that this rank updates.
    optimizer: Optimizer<B>,
    /// Additional paths of tied parameters, by parameter index.
    aliases: Vec<Vec<String>>,
    /// The index and autodiff tensor of each parameter that was already visited.
    seen: HashMap<ParamId, (usize, Box<dyn Any>)>,
    /// The first error. A module mapper cannot return an error, so the rest of the module is passed
    /// through unchanged.
    failure: Option<ZeroError>,
}

/// The optimizer settings of all parameters, and the storage of those without any.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Updates<'a> {
    /// The optimizer and the parameter groups.
    pub(crate) assignment: Assignment<'a>,
    /// The type name of the layer that holds each parameter, by its first path.
    pub(crate) layers: &'a HashMap<String, String>,
    /// The storage of frozen matrices.
    pub(crate) quantization: Option<&'a QuantizationPlan>,
}

/// The tiers and stores of shards and optimizer states, and the gatherer.
pub(crate) struct ShardHomes<'a, B: SumOps> {
    /// Gathers sharded parameters; `None` if parameters are replicated on every rank.
    pub(crate) gatherer: Option<Weak<Gatherer<B>>>,
    /// The host memory or NVMe file of offloaded shards.
    pub(crate) parking: Option<&'a Parking>,
    /// The tiers of parameter shards, which are assigned in module order.
    pub(crate) tiers: ShardTiers,
    /// The tiers of optimizer states, which are assigned in module order.
    pub(crate) state_tiers: StateTiers,
}

/// The result of sharding besides the module.
pub(crate) struct ParameterTable<B: SumOps> {
    /// The parameters in module order.
    pub(crate) parameters: Arc<[Arc<Parameter<B>>]>,
    /// The index of each parameter id. All occurrences of a tied parameter have the same id.
    pub(crate) indices: HashMap<ParamId, usize>,
    /// The optimizer with the states of all parameters.
    pub(crate) optimizer: Optimizer<B>,
    /// Additional paths of tied parameters, by index.
    pub(crate) aliases: Vec<Vec<String>>,
}

impl<'a, B: OptimizerOps> Sharder<'a, B> {
    /// Creates a sharder that keeps each parameter according to `shards`, in the working type of
    /// `optimizer`. The optimizer receives the slices that this rank updates, according to
    /// `updates`. `buffers` are not changed.
    pub(crate) fn new(
        homes: ParameterHomes<'a, B>,
        share: ShardSpec,
        shards: ShardHomes<'a, B>,
        optimizer: Optimizer<B>,
        updates: Updates<'a>,
        ledger: Ledger,
        buffers: &'a BufferTable<B>,
    ) -> Self {
        Self {
            buffers,
            homes,
            share,
            ledger,
            shards,
            updates,
            path: ModulePath::default(),
            parameters: Vec::new(),
            optimizer,
            aliases: Vec::new(),
            seen: HashMap::new(),
            failure: None,
        }
    }

    /// Shards `module`. Every rank starts with the values of rank 0.
    ///
    /// # Errors
    /// Returns the first error of a parameter, or an error if no parameter is trainable. The module
    /// is then dropped, because some of its parameters have already been replaced.
    pub(crate) fn shard<M: Module<Training<B>>>(
        mut self,
        module: M,
    ) -> Result<(M, ParameterTable<B>), ZeroError> {
        let module = module.map(&mut self);
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        if !self.parameters.iter().any(|parameter| parameter.is_trainable()) {
            return Err(ZeroError::NothingTrainable);
        }
        let indices = self.seen.into_iter().map(|(id, (index, _))| (id, index)).collect();
        let Self { parameters, optimizer, aliases, .. } = self;
        Ok((module, ParameterTable { parameters: parameters.into(), indices, optimizer, aliases }))
    }

    /// Broadcasts the value of rank 0, keeps the slices that this rank needs and drops the value.
    /// Another rank of the process may still hold the value.
    ///
    /// `D` is the number of dimensions according to Burn's module mapper.
    ///
    /// # Errors
    /// Returns an error if the value has a wrong type, if ranks disagree on its shape, if the file
    /// of offloaded states is full, or if a collective fails.
    fn adopt<const D: usize>(
        &mut self,
        value: InitialValue<B>,
    ) -> Result<Arc<Parameter<B>>, ZeroError> {
        let path = self.path.joined();
        self.check_type(&path, &value)?;
        let (index, device) = (self.parameters.len(), value.device());
        // The shape comes first, because ranks without a value need it to receive the elements.
        let announced = value.announce::<D>(self.homes.groups.world(), index, &path)?;
        let (homes, role) = self.homes.of(&path)?;
        let shape = announced.shape().clone();
        // The shape is taken from the value, because Burn reports the transposed shape for a lazy
        // column-major `Linear`.
        let Updates { assignment, layers, quantization } = self.updates;
        let Some(layer) = layers.get(&path) else {
            return Err(ZeroError::UnvisitedParameter { path });
        };
        let described = ModelParameter { path: &path, shape: &shape, layer, is_announced: false };
        // A parameter that is frozen in the module stays frozen, regardless of its parameter group.
        let settings = assignment.of_parameter(&described)?.filter(|_| announced.is_trainable());
        let trainable = settings.is_some();
        let format = quantization.filter(|_| !trainable).and_then(|it| format_of(it, &described));
        let (flat, storage) = self.distribute(announced, &path, homes, format)?;
        let stored = storage.stored_len(shape.num_elements());
        let partition = Partition::new(stored, self.homes.groups.shard().world_size());
        // At the other ZeRO stages, the parameter keeps the memory of the value.
        let is_cut = self.shards.gatherer.is_some() && flat.is_some();
        let _cut = is_cut.then(|| self.ledger.hold(Category::Gathered, stored * DType::F32.size()));
        // The other stages of a tied parameter receive its updated values, so they have no states.
        let updated = flat.as_ref().filter(|_| trainable && role == Role::Owner);
        self.adopt_states(updated, settings, partition, &device)?;
        let dtype = self.optimizer.working().map_or(DType::F32, DType::from);
        let path = path.into();
        let description = Description {
            index,
            path,
            shape,
            dtype,
            device,
            storage,
            partition,
            trainable,
            homes,
            role,
        };
        Ok(Arc::new(match flat {
            Some(flat) => self.keep(description, flat)?,
            None => Parameter::elsewhere(description, self.ledger.clone()),
        }))
    }

    /// Creates the optimizer states of the next parameter, whose elements are `updated`, or notes
    /// that this rank does not update it.
    ///
    /// # Errors
    /// Returns an error if the file of offloaded states is full.
    fn adopt_states(
        &mut self,
        updated: Option<&B::FloatTensorPrimitive>,
        settings: Option<UpdateSettings>,
        partition: Partition,
        device: &B::Device,
    ) -> Result<(), ZeroError> {
        // The layout matches a gathered parameter, so that every stage runs the same kernels.
        let owned = updated.map(|flat| match self.optimizer.working() {
            Some(_) => Owned::Masters(self.share.of_whole::<B>(flat, partition)),
            None => Owned::Elements(self.share.len(partition), device.clone()),
        });
        let is_parked =
            // `next` counts elements, so it is only called for parameters that this rank updates.
            updated.is_some() && self.shards.state_tiers.next(partition.numel()) != Tier::Device;
        let parking = self.shards.parking.filter(|_| is_parked);
        Ok(self.optimizer.adopt(owned, settings, parking, &self.ledger)?)
    }

    /// Broadcasts the value of rank 0 to the stages `homes`, quantized if there is a format, and
    /// returns its stored elements in flat order; `None` on other stages, which know the storage.
    ///
    /// # Errors
    /// Returns an error if the backend cannot hold quantized parameters, or if a collective fails.
    fn distribute(
        &self,
        announced: Announced<B>,
        path: &str,
        homes: Holders,
        format: Option<BlockFormat>,
    ) -> Result<(Option<B::FloatTensorPrimitive>, Storage), ZeroError> {
        if !self.homes.takes_part(homes) {
            let in_blocks = |format| Storage::Blocks { format, original: None };
            return Ok((None, format.map_or(Storage::Plain, in_blocks)));
        }
        let device = announced.device();
        if format.is_some() && !holds_words::<B>(device) {
            return Err(ZeroError::QuantizationBackend { backend: B::name(device) });
        }
        // Rank 0 holds the whole value until it is quantized.
        let bytes = announced.shape().num_elements() * DType::F32.size();
        let holds_whole = format.is_some() && self.homes.groups.world().rank() == 0;
        let _whole = holds_whole.then(|| self.ledger.hold(Category::Gathered, bytes));
        let compute = self.optimizer.working().unwrap_or(FloatDType::F32);
        let index = self.parameters.len();
        let (flat, storage) =
            announced.distribute((&self.homes, homes), index, path, (format, compute))?;
        // Rank 0 creates all values, also of other stages.
        Ok((Some(flat).filter(|_| self.homes.is_home(homes)), storage))
    }

    /// Returns a parameter with the part of its stored elements that this rank keeps, on its tier.
    ///
    /// # Errors
    /// Returns an error if the file of offloaded states is full.
    fn keep(
        &mut self,
        description: Description<B>,
        flat: B::FloatTensorPrimitive,
    ) -> Result<Parameter<B>, ZeroError> {
        let (storage, partition) = (description.storage, description.partition);
        let in_type = |tensor| match storage {
            Storage::Plain => B::cast(tensor, FloatDType::from(description.dtype)),
            Storage::Blocks { .. } | Storage::Encoded { .. } => tensor,
        };
        let ledger = self.ledger.clone();
        let Some(gatherer) = &self.shards.gatherer else {
            let shape = storage.stored_shape(&description.shape);
            let whole = B::float_reshape(in_type(flat), shape);
            return Ok(Parameter::whole(description, whole, ledger));
        };
        // The shard is extracted before the cast, so that a rank never holds the whole parameter in
        // two types.
        let shard = in_type(cut_shard::<B>(&flat, partition, self.share.rank));
        // `next` is called for every shard, also without a store, as in `swap_bytes`.
        let tier = self.shards.tiers.next(partition.shard_len());
        let shard = match self.shards.parking {
            Some(parking) if tier != Tier::Device => {
                Shard::Parked(park::<B>(parking, tier, shard, &ledger)?)
            }
            _ => Shard::Device(Leased::held(shard, &ledger, Category::Parameters)),
        };
        Ok(Parameter::sharded(description, shard, gatherer.clone(), ledger))
    }

    /// Returns an error for a value that is not f32, and for a working type that the device does
    /// not support.
    ///
    /// # Errors
    /// Returns [`ZeroError::ParameterType`] or [`ZeroError::UnsupportedType`].
    fn check_type(&self, path: &str, value: &InitialValue<B>) -> Result<(), ZeroError> {
        if let InitialValue::Present { tensor, .. } = value
            && tensor.dtype() != DType::F32
        {
            let (path, dtype) = (path.to_owned(), tensor.dtype().name());
            return Err(ZeroError::ParameterType { path, dtype });
        }
        let device = value.device();
        let missing = |dtype: &FloatDType| !B::supports_dtype(&device, (*dtype).into());
        match self.optimizer.working().filter(missing) {
            Some(working) => Err(ZeroError::UnsupportedType {
                backend: B::name(&device),
                dtype: DType::from(working).name(),
            }),
            None => Ok(()),
        }
    }

    /// Takes a parameter out of the module and returns a handle in its place.
    ///
    /// The second occurrence of a tied parameter gets the handle of the first one.
    ///
    /// # Errors
    /// Returns an error if the value cannot be created or sharded.
    fn shard_param<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Result<Param<Tensor<Training<B>, D>>, ZeroError> {
        // Rank 0 also initializes the later occurrences of a lazy tied parameter, so that the
        // random generator advances as in plain Burn.
        let taken = TakenParam::<B, D>::new(param, self.homes.groups.world().rank());
        let TakenParam { id, mapper, value } = taken
            .map_err(|reason| ZeroError::Initialization { path: self.path.joined(), reason })?;
        if let Some((index, twin)) = self.seen.get(&id)
            && let Some(twin) = twin.downcast_ref::<Tensor<Training<B>, D>>()
        {
            self.aliases[*index].push(self.path.joined());
            return Ok(Param::from_mapped_value(id, twin.clone(), mapper));
        }
        let parameter = self.adopt::<D>(value)?;
        let handle = leaf::<B, D>(parameter.clone());
        self.seen.insert(id, (parameter.index(), Box::new(handle.clone())));
        self.parameters.push(parameter);
        self.aliases.push(Vec::new());
        Ok(Param::from_mapped_value(id, handle, mapper))
    }
}

impl<B: OptimizerOps> ModuleMapper<Training<B>> for Sharder<'_, B> {
    keep_path!();

    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Param<Tensor<Training<B>, D>> {
        if self.failure.is_some() || self.buffers.contains(param.id) {
            return param;
        }
        let (id, device) = (param.id, param.lazy_device());
        self.shard_param(param).unwrap_or_else(|failure| {
            self.failure = Some(failure);
            // The module is dropped after a failure, so the value is never used.
            Param::initialized(id, Tensor::zeros([1; D], &device))
        })
    }
}

/// Returns true if tensors are in host memory, or without data, so that the words of quantized
/// parameters are only copied. A kernel of a device may change the bits of an f32 that is not a
/// number.
fn holds_words<B: Backend>(device: &B::Device) -> bool {
    let tensor = || B::float_zeros(Shape::from(vec![1]), device, FloatDType::F32);
    is_without_data::<B>() || shared_bytes::<B>(&tensor()).is_some()
}

/// Returns the format of a frozen parameter; `None` if it is not quantized.
fn format_of(plan: &QuantizationPlan, parameter: &ModelParameter<'_>) -> Option<BlockFormat> {
    let is_skipped = plan.skipped.iter().any(|path| path == parameter.path);
    // Vectors stay as they are: they are small, and their blocks would save next to nothing.
    if is_skipped || parameter.shape.len() != 2 {
        return None;
    }
    Some(match plan.format {
        QuantizedFormat::Nf4 => BlockFormat::Nf4 { double: false },
        QuantizedFormat::Nf4Double => BlockFormat::Nf4 { double: true },
        QuantizedFormat::Int8 => BlockFormat::Int8,
    })
}

/// Moves a shard from the device to host memory or NVMe, and waits until it is written.
///
/// # Errors
/// Returns an error if the file of this rank is full or the disk fails.
fn park<B: Backend>(
    parking: &Parking,
    tier: Tier,
    shard: B::FloatTensorPrimitive,
    ledger: &Ledger,
) -> Result<Arc<ParkedArray>, ZeroError> {
    let dtype = shard.dtype();
    let array = parking.shard(tier, (shard.shape().num_elements(), dtype), ledger)?;
    array.write_tensor::<B>(shard, &mut WriteBehind::default())?;
    Ok(array)
}

/// Creates an autodiff leaf for a parameter, or a constant for a frozen parameter.
///
/// Each rank needs a separate leaf, because a shared leaf would connect the graphs and the locks of
/// the ranks.
fn leaf<B: OptimizerOps, const D: usize>(parameter: Arc<Parameter<B>>) -> Tensor<Training<B>, D> {
    let trainable = parameter.is_trainable();
    let primitive =
        TensorPrimitive::Float(PlacedTensor::Everywhere(ZeroTensor::parameter(parameter)));
    // The tensor comes from the inner backend, so that autodiff does not track how it was created.
    let tensor = Tensor::from_inner(Tensor::<Zero<B>, D>::from_primitive(primitive));
    if trainable { tensor.require_grad() } else { tensor }
}
