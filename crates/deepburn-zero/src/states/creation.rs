//! Creates the states of a sharded model from a module.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use burn_backend::FloatDType;
use deepburn_comm::{Mesh, MeshError};
use deepburn_config::{
    ActivationPlan, OptimizerOffload, OptimizerPlan, Precision, PrecisionPlan, Stage, ZeroPlan,
};
use deepburn_ops::{OptimizerOps, SumOps};

use super::{ModelStates, ModuleContents, Policy, StateSettings};
use crate::assignment::{Assignment, AssignmentError, UpdateSettings};
use crate::decorator::Training;
use crate::error::ZeroError;
use crate::gradient::{GradientChecker, GradientReducer, ReducerPolicy, SumHome, Types};
use crate::group::{Group, MeshGroups};
use crate::ledger::Ledger;
use crate::module::AutodiffModule;
use crate::offload::{ActivationStore, Parking};
use crate::optimizer::Optimizer;
use crate::parameter::{Gatherer, Parameter, Role, Secondary, ShardSpec, persistent_parameters};
use crate::pipeline::{ParameterHomes, PipelineLayout, Stages};
use crate::recompute::BlockRecorder;
use crate::session::Binding;
use crate::sharding::{
    Buffer, BufferKind, BufferTable, ModuleParameter, ParameterSize, ParameterTable, PlainTensor,
    ShardHomes, ShardTiers, Sharder, StateTiers, Updates, check_module, gradient_bytes,
    parameters_of, swap_bytes,
};

impl<B: OptimizerOps> ModelStates<B> {
    /// Shards `module` over `group` according to `policy` and returns the module with handles
    /// instead of values.
    ///
    /// Every rank starts with the values of rank 0, including buffers. The returned module is used
    /// like the original. Ranks may pass clones of one module; the returned modules no longer share
    /// running statistics.
    ///
    /// Only rank 0 initializes lazy parameters, one after the other. In addition to the states that
    /// it keeps, a rank holds at most one complete parameter.
    ///
    /// # Errors
    /// Returns an error if a parameter is not f32 or cannot be initialized, if no parameter is
    /// trainable, if a parameter group matches no parameter, if two layers share a running
    /// statistic, or if the modules of the ranks differ.
    pub fn shard<M: AutodiffModule<Training<B>>>(
        module: M,
        policy: Policy,
        world: Group<B>,
    ) -> Result<(M, Self), ZeroError> {
        // Before the first collective, so that no rank waits for one that has returned an error.
        check_whole_states(&policy)?;
        let (zero, precision) = (&policy.zero, &policy.precision);
        let ledger = Ledger::new();
        let mesh = mesh_of(&world, &policy)?;
        let groups = MeshGroups::new(world, mesh)?;
        let share = share_of(&policy, &groups);
        let (module, sharded) = shard_parameters(module, &policy, share, &groups, &ledger)?;
        let types = gradient_types(precision);
        let reducer = gradient_reducer(&policy, types, share, &sharded, &groups, &ledger)?;
        let reducer = Rc::new(RefCell::new(reducer));
        let ShardedParameters { gatherer, table, buffers, plain_tensors, parking } = sharded;
        let ParameterTable { parameters, indices, optimizer, aliases } = table;
        let recorder = block_recorder(&policy.activations, &parameters, groups.world(), &ledger)?;
        // All parameters are on the device of the rank, so the first one knows it.
        let first = parameters.first().filter(|_| policy.pipeline.is_some());
        let stages =
            first.map(|parameter| Rc::new(Stages::new(&groups, parameter.device().clone())));
        let any_stages = stages.clone().map(|stages| -> Rc<dyn Any> { stages });
        let binding = Binding::new(
            reducer.clone(),
            recorder.clone(),
            ledger,
            groups.data().clone(),
            precision.autocast.map(element_type),
            any_stages,
        );
        // Persistent copies are created by the same all-gather that updates them after each step.
        gatherer.refresh_persistent()?;
        let settings = StateSettings {
            share,
            compute: element_type(precision.compute),
            types,
            allgather_bucket_size: zero.allgather_bucket_size,
            ignore_unused: zero.gradients.ignore_unused_parameters,
        };
        let states = Self {
            groups,
            stages,
            settings,
            errors: parameters.iter().map(|_| None).collect(),
            parameters,
            module: ModuleContents { buffers, plain_tensors, aliases, indices },
            gatherer,
            reducer,
            recorder,
            optimizer,
            parking,
            binding,
        };
        Ok((module, states))
    }
}

/// Returns the arrangement of all ranks.
///
/// # Errors
/// Returns an error if the stages of the layout do not divide the ranks, or if a shard group does
/// not divide the ranks of a stage.
fn mesh_of<B: SumOps>(world: &Group<B>, policy: &Policy) -> Result<Mesh, MeshError> {
    let stages = policy.pipeline.as_ref().map_or(1, PipelineLayout::stages);
    // Sizes of 0 and sizes that do not divide the ranks are left to `Mesh::new`, which reports
    // them.
    let data = world.world_size().checked_div(stages).unwrap_or(0);
    let shard = policy.shard_size.unwrap_or(data);
    Mesh::new(world.world_size(), stages, data.checked_div(shard).unwrap_or(0), shard)
}

/// Returns the slices of the parameters that this rank keeps.
fn share_of<B: SumOps>(policy: &Policy, groups: &MeshGroups<B>) -> ShardSpec {
    let stage = policy.zero.stage;
    // Replicas exchange the sums of owned elements only, so no rank keeps other elements.
    let cuts_gradients =
        policy.zero.shards_gradients() || groups.replicas().is_some() && stage.shards_optimizer();
    ShardSpec { stage, rank: groups.shard().rank(), cuts_gradients }
}

/// Checks that stages can train the model independently between two messages.
///
/// # Errors
/// Returns [`ZeroError::Pipeline`] with what is not supported.
fn check_pipeline(optimizer: &OptimizerPlan, buffers: &[Buffer]) -> Result<(), ZeroError> {
    let statistic = buffers.iter().find(|buffer| buffer.kind() == BufferKind::RunningStatistic);
    let reason = if let Some(statistic) = statistic {
        format!("its running statistic {} changes in every micro-batch", statistic.path())
    } else if optimizer.exchanges_momentum() {
        "1-bit optimizers exchange momenta among all ranks".to_owned()
    } else {
        return Ok(());
    };
    Err(ZeroError::Pipeline { reason })
}

/// Checks that the plan neither shards nor offloads states if its optimizer exchanges momenta,
/// because a compressed exchange needs complete states on the device.
///
/// # Errors
/// Returns [`ZeroError::MomentumExchange`] with the unsupported setting.
fn check_whole_states(policy: &Policy) -> Result<(), ZeroError> {
    let zero = &policy.zero;
    let reason = match zero.stage {
        _ if !policy.optimizer.exchanges_momentum() => return Ok(()),
        _ if policy.shard_size.is_some() => {
            "this plan adds up gradients in groups of ranks (hybrid sharding)".to_owned()
        }
        Stage::Disabled if zero.optimizer_states == OptimizerOffload::Device => return Ok(()),
        Stage::Disabled => "this plan offloads them".to_owned(),
        stage => format!("ZeRO stage {} shards them", stage.number()),
    };
    Err(ZeroError::MomentumExchange { reason })
}

/// The sharded parameters of a module, with their gatherer, buffers and store.
struct ShardedParameters<B: SumOps> {
    gatherer: Arc<Gatherer<B>>,
    table: ParameterTable<B>,
    buffers: BufferTable<B>,
    plain_tensors: Vec<PlainTensor>,
    parking: Option<Parking>,
}

/// Replaces the values of `module` with handles and creates the optimizer for the slices that this
/// rank updates.
fn shard_parameters<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    module: M,
    policy: &Policy,
    share: ShardSpec,
    groups: &MeshGroups<B>,
    ledger: &Ledger,
) -> Result<(M, ShardedParameters<B>), ZeroError> {
    let (zero, precision, world) = (&policy.zero, &policy.precision, groups.world());
    let (group, secondary) = (groups.shard().clone(), secondary_shards(groups, zero)?);
    let gatherer = Arc::new(Gatherer::new(group, secondary, zero.parameters, ledger.clone()));
    // Buffers are found first, because a running statistic looks like a frozen parameter.
    let (module, buffers, values) = BufferTable::find(module, world, ledger)?;
    let known = parameters_of(&module, &buffers);
    let paths: Vec<_> = known.iter().map(|parameter| parameter.path.clone()).collect();
    check_module(world, &paths, &buffers.descriptions())?;
    let module = buffers.start_from_rank_0(module, &values)?;
    drop(values);
    let layers = known.iter().map(|it| (it.path.clone(), it.layer.clone())).collect();
    let assignment = Assignment { optimizer: &policy.optimizer, groups: &policy.param_groups };
    let quantization = policy.quantization.as_ref();
    let updates = Updates { assignment, layers: &layers, quantization };
    let layout = policy.pipeline.as_ref();
    if layout.is_some() {
        check_pipeline(&policy.optimizer, buffers.all())?;
    }
    let homes = ParameterHomes::new(groups, layout);
    // Groups that do not fit the model are an error before any memory is allocated.
    let sizes = updated_sizes(&known, assignment, &homes)?;
    let bytes = swap_bytes(&sizes, zero, groups.shard().world_size(), precision);
    // The file is allocated now, so that a full disk is an error before any parameter is
    // initialized.
    let parking = Parking::new::<B>(zero, gradient_bytes(precision), bytes)?;
    let shards = ShardHomes {
        gatherer: share.stage.shards_parameters().then(|| Arc::downgrade(&gatherer)),
        parking: parking.as_ref(),
        tiers: ShardTiers::new(zero),
        state_tiers: StateTiers::new(&sizes, zero),
    };
    let working = (precision.compute != Precision::Fp32).then(|| element_type(precision.compute));
    let states = Optimizer::new(working, parking.as_ref());
    let sharder = Sharder::new(homes, share, shards, states, updates, ledger.clone(), &buffers);
    let (module, table) = sharder.shard(module)?;
    // Only now is every parameter a handle, which can be asked for its device without initializing
    // it.
    let plain_tensors = PlainTensor::compared::<B, M>(&module, world)?;
    gatherer.serve(table.parameters.clone(), persistent_copies(&table.parameters, zero));
    Ok((module, ShardedParameters { gatherer, table, buffers, plain_tensors, parking }))
}

/// Returns the secondary shards of hpZ; `None` if the plan has none, or if they would be the shards
/// themselves or whole parameters.
///
/// # Errors
/// Returns an error if the ranks of a secondary shard group do not divide the shard group.
fn secondary_shards<B: OptimizerOps>(
    groups: &MeshGroups<B>,
    zero: &ZeroPlan,
) -> Result<Option<Secondary<B>>, ZeroError> {
    let ranks = groups.shard().world_size();
    match zero.parameters.secondary_partition_size.filter(|_| zero.stage.shards_parameters()) {
        Some(size) if size == 0 || !ranks.is_multiple_of(size) => {
            Err(ZeroError::SecondaryPartition { size, ranks })
        }
        Some(size) if size > 1 && size < ranks => Ok(Some(Secondary::new(groups.secondary(size)?))),
        _ => Ok(None),
    }
}

/// Returns the element type of tensors in this precision.
fn element_type(precision: Precision) -> FloatDType {
    match precision {
        Precision::Fp32 => FloatDType::F32,
        Precision::Fp16 => FloatDType::F16,
        Precision::Bf16 => FloatDType::BF16,
    }
}

/// Returns the element types of gradient communication and accumulation.
fn gradient_types(precision: &PrecisionPlan) -> Types {
    Types {
        communication: element_type(precision.communication),
        accumulation: element_type(precision.accumulation),
    }
}

/// Creates the reducer of the gradients of all parameters.
fn gradient_reducer<B: OptimizerOps>(
    policy: &Policy,
    types: Types,
    share: ShardSpec,
    sharded: &ShardedParameters<B>,
    groups: &MeshGroups<B>,
    ledger: &Ledger,
) -> Result<GradientReducer<B>, ZeroError> {
    let ParameterTable { parameters, optimizer, .. } = &sharded.table;
    let reducer_policy = ReducerPolicy {
        plan: policy.zero.gradients,
        reduction: policy.reduction,
        types,
        shards: share.cuts_gradients,
        checker: GradientChecker::new(share, element_type(policy.precision.compute)),
    };
    let homes = sum_homes(parameters, share, optimizer, sharded.parking.as_ref(), ledger)?;
    let (groups, ledger) = (groups.clone(), ledger.clone());
    let mut reducer =
        GradientReducer::new(groups, parameters.clone(), reducer_policy, homes, ledger);
    reducer.set_mean(optimizer.takes_mean_gradients());
    Ok(reducer)
}

/// Creates the recorder for activation checkpointing and activation offload.
fn block_recorder<B: OptimizerOps>(
    plan: &ActivationPlan,
    parameters: &[Arc<Parameter<B>>],
    group: &Group<B>,
    ledger: &Ledger,
) -> Result<Rc<BlockRecorder<B>>, ZeroError> {
    let paths = parameters.iter().map(|parameter| parameter.path());
    let store =
        ActivationStore::new(&plan.offload, B::is_contiguous, group.clone(), ledger.clone())?;
    Ok(Rc::new(BlockRecorder::new(plan.recompute, store, ledger.clone(), paths)))
}

/// Checks the parameter groups and returns the sizes of all parameters.
///
/// The sizes determine the tiers of offloaded states and the size of their file before memory is
/// allocated.
///
/// # Errors
/// Returns an error if a parameter group matches no parameter, or if the optimizer is Muon and no
/// trained parameter is a matrix.
fn updated_sizes<B: SumOps>(
    parameters: &[ModuleParameter],
    assignment: Assignment<'_>,
    homes: &ParameterHomes<'_, B>,
) -> Result<Vec<ParameterSize>, ZeroError> {
    let known: Vec<_> = parameters.iter().map(ModuleParameter::described).collect();
    let trained: Vec<_> = assignment
        .of_model(&known)?
        .into_iter()
        .zip(parameters)
        .map(|(settings, parameter)| settings.filter(|_| parameter.is_trainable))
        .collect();
    let roles: Vec<_> = parameters
        .iter()
        .map(|parameter| Ok(homes.of(&parameter.path)?.1))
        .collect::<Result<_, ZeroError>>()?;
    let is_muon = matches!(assignment.optimizer, OptimizerPlan::Muon(_));
    if is_muon && !trained.iter().flatten().any(|settings| settings.matrices.is_some()) {
        return Err(AssignmentError::no_matrix(&known).into());
    }
    let size = |((parameter, settings), role): ((&ModuleParameter, &Option<_>), &Role)| {
        let numel = parameter.shape.iter().product::<usize>() as u64;
        let settings: Option<&UpdateSettings> = settings.as_ref().filter(|_| *role == Role::Owner);
        ParameterSize::new(numel, settings.map(|settings| &settings.optimizer))
    };
    let held = parameters.iter().zip(&trained).zip(&roles);
    // Parameters of other stages need no space.
    Ok(held.filter(|(_, role)| **role != Role::Elsewhere).map(size).collect())
}

/// Returns the parameters of which every rank keeps a complete copy in addition to its shard; none
/// below stage 3.
fn persistent_copies<B: SumOps>(parameters: &[Arc<Parameter<B>>], zero: &ZeroPlan) -> Vec<usize> {
    if !zero.stage.shards_parameters() {
        return Vec::new();
    }
    // Each pipeline stage applies the thresholds to the parameters that it holds.
    let held: Vec<_> = parameters.iter().filter(|it| it.is_held_here()).collect();
    let numels = held.iter().map(|parameter| parameter.numel() as u64);
    let persistent = persistent_parameters(numels, &zero.parameters);
    let mut persistent: Vec<_> = persistent.into_iter().map(|place| held[place].index()).collect();
    // The only shard of a single rank is the whole parameter, unless it is offloaded.
    persistent.retain(|index| parameters[*index].is_copied_by_gather());
    persistent
}

/// Returns the location of each parameter's accumulated gradient, which is the same as for its
/// optimizer states.
///
/// # Errors
/// Returns an error if the file of offloaded states is full.
fn sum_homes<B: OptimizerOps>(
    parameters: &[Arc<Parameter<B>>],
    share: ShardSpec,
    optimizer: &Optimizer<B>,
    parking: Option<&Parking>,
    ledger: &Ledger,
) -> Result<Vec<SumHome>, ZeroError> {
    let home = |parameter: &Arc<Parameter<B>>| match parking {
        Some(parking) if optimizer.is_parked(parameter.index()) => {
            let len = share.len(parameter.partition());
            Ok(SumHome::Parked(parking.gradient_sum(len, ledger)?))
        }
        _ => Ok(SumHome::Device),
    };
    parameters.iter().map(home).collect()
}
