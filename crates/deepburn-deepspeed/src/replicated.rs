//! Stage 0: one file with the complete model and optimizer.
//!
//! In f32 the file contains the state of PyTorch's optimizer, with arrays by parameter number. In
//! 16 bits DeepSpeed wraps the optimizer and stores f32 masters, either one per parameter
//! (`fp32_groups`) or, if the optimizer is fused, one flat tensor per group (`fp32_groups_flat`).
//! None of these formats stores names: numbers follow the order of the model, group by group. If a
//! group does not contain the complete model, its parameters must be identifiable by their shapes;
//! otherwise the checkpoint is rejected.
//!
//! ```text
//! f32        optimizer = {state: {number: {step, exp_avg, …}}, param_groups: [{params: [number]}]}
//! 16 bits    optimizer = {optimizer_state_dict: as above, fp32_groups: [[master]],
//!                         dynamic_loss_scale, cur_scale, cur_iter, last_overflow_iter}
//! fused      optimizer = the same with fp32_groups_flat: [master], one state per group
//! ```
//!
//! Assigning arrays to the wrong parameters would be a silent error, so an assignment has to be
//! unique. With one group, arrays are assigned in the order of the model. With several groups, they
//! are assigned in order among the parameters of equal shape, provided that no shape occurs in two
//! groups.

use std::collections::HashMap;
use std::sync::Arc;

use crate::contents::PickleValue;
use crate::model_states_file::ModelStatesFile;
use crate::optim_states_file::{OptimizerState, counted_in_groups, group_numbers};
use crate::stored::{SavedState, Stored};
use crate::tensor::{NamedTensors, Segments};
use crate::{DeepSpeedError, LossScale, Tensor};

/// The optimizer's data for one of its tensors.
struct OptimizerTensor {
    /// The index of its parameter group.
    group: usize,
    /// The f32 master, if the weights are in 16 bits.
    master: Option<Arc<Tensor>>,
    /// Its arrays; empty for a frozen parameter, for which the optimizer has no state.
    state: OptimizerState,
}

/// Assembles the parameters of a checkpoint. A file without an optimizer contains only weights.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] if arrays cannot be assigned to parameters or differ between
/// parameters.
pub(crate) fn assemble(model: &ModelStatesFile) -> Result<SavedState, DeepSpeedError> {
    assemble_of(model, model.module()?)
}

/// Assembles the parameters `module`, whose optimizer is in the file `model`: the whole model, or a
/// pipeline stage of it.
///
/// # Errors
/// Returns the same errors as [`assemble`].
pub(crate) fn assemble_of(
    model: &ModelStatesFile,
    module: NamedTensors,
) -> Result<SavedState, DeepSpeedError> {
    let mut stored = parameters(module);
    let root = model.contents.root();
    let Some(optimizer) = root.get("optimizer") else {
        return Ok(SavedState { stage: 0, stored, moments: vec![], steps: None, loss_scale: None });
    };
    let loss_scale = loss_scale(&optimizer)?;
    let wrapped = optimizer.get("optimizer_state_dict");
    let base = wrapped.as_ref().unwrap_or(&optimizer);
    let tensors = optimizer_tensors(&optimizer, base)?;
    let steps = tensors.iter().filter_map(|tensor| tensor.state.steps).max();
    let steps = steps.map_or_else(|| counted_in_groups(base), |steps| Ok(Some(steps)))?;
    // Frozen parameters have no arrays, so the names are taken from the first tensor with arrays.
    let full = tensors.iter().map(|tensor| tensor.state.names()).find(|names| !names.is_empty());
    let moments: Vec<_> = full.unwrap_or_default().into_iter().map(str::to_owned).collect();
    let uneven = |tensor: &OptimizerTensor| {
        !tensor.state.moments.is_empty() && tensor.state.names() != moments
    };
    if tensors.iter().any(uneven) {
        return Err(base.refuse("an optimizer with the same arrays for all parameters"));
    }
    if optimizer.get("fp32_groups_flat").is_some() {
        flat(&optimizer, &tensors, &mut stored)?;
    } else {
        by_parameter(base, tensors, &mut stored)?;
    }
    Ok(SavedState { stage: 0, stored, moments, steps, loss_scale })
}

/// Returns the model's parameters. Names of the same tensor are tied, which means equal file,
/// storage, offset and shape. The first name in the model becomes the name of the parameter.
fn parameters(module: NamedTensors) -> Vec<Stored> {
    let mut stored = vec![];
    let mut seen = HashMap::new();
    for (name, tensor) in module {
        // The layers of a pipeline are in several files, whose storages have the same keys.
        let file = Arc::as_ptr(&tensor.archive);
        let place = (file, tensor.key.clone(), tensor.offset, tensor.shape.clone());
        // Empty tensors can have equal positions without being tied.
        let first = seen.get(&place).filter(|_| tensor.numel() > 0);
        if let Some(first) = first {
            let first: &mut Stored = &mut stored[*first];
            first.parameter.aliases.push(name);
            continue;
        }
        seen.insert(place, stored.len());
        stored.push(Stored::new((name, tensor.shape.clone()), true, Segments::whole(tensor)));
    }
    stored
}

/// Returns the shapes of the optimizer's tensors in order; `None` if the file has no optimizer, or
/// one without arrays or with flat ones, which do not show the shapes.
///
/// # Errors
/// Returns the same errors as [`assemble`].
pub(crate) fn optimizer_shapes(
    model: &ModelStatesFile,
) -> Result<Option<Vec<Vec<usize>>>, DeepSpeedError> {
    let root = model.contents.root();
    let Some(optimizer) = root.get("optimizer") else { return Ok(None) };
    let wrapped = optimizer.get("optimizer_state_dict");
    let tensors = optimizer_tensors(&optimizer, wrapped.as_ref().unwrap_or(&optimizer))?;
    if optimizer.get("fp32_groups_flat").is_some() {
        return Ok(None);
    }
    Ok(tensors.iter().map(|tensor| tensor.shape().map(<[usize]>::to_vec)).collect())
}

/// Returns the optimizer's tensors in order.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] if the masters do not match the numbers.
fn optimizer_tensors(
    optimizer: &PickleValue<'_>,
    base: &PickleValue<'_>,
) -> Result<Vec<OptimizerTensor>, DeepSpeedError> {
    let masters = optimizer.get("fp32_groups").map(|groups| {
        let groups = groups.list()?;
        groups.iter().map(PickleValue::list).collect::<Result<Vec<_>, _>>()
    });
    let masters = masters.transpose()?;
    let state = base.need("state")?;
    let mut tensors = vec![];
    for (group, numbers) in group_numbers(base)?.into_iter().enumerate() {
        let masters = masters.as_ref().map(|masters| masters.get(group));
        if masters.is_some_and(|it| it.is_none_or(|it| it.len() != numbers.len())) {
            let rule = "with a master for each parameter of the optimizer";
            return Err(optimizer.need("fp32_groups")?.refuse(rule));
        }
        for (at, number) in numbers.into_iter().enumerate() {
            let master = masters.flatten().map(|masters| masters[at].tensor()).transpose()?;
            let state = state.get(&number.to_string());
            let state = state.map(|state| OptimizerState::read(&state)).transpose()?;
            tensors.push(OptimizerTensor { group, master, state: state.unwrap_or_default() });
        }
    }
    Ok(tensors)
}

impl OptimizerTensor {
    /// Returns the shape of the tensor, from its master or its first array.
    fn shape(&self) -> Option<&[usize]> {
        let moment = self.state.moments.first().map(|(_, tensor)| tensor);
        self.master.as_ref().or(moment).map(|tensor| tensor.shape.as_slice())
    }

    /// Returns true if all arrays have the shape of the parameter.
    fn fits(&self, stored: &Stored) -> bool {
        let moments = self.state.moments.iter().map(|(_, tensor)| tensor);
        let mut tensors = moments.chain(&self.master);
        tensors.all(|tensor| tensor.shape == stored.parameter.shape)
    }
}

/// Assigns the optimizer's arrays to the parameters.
///
/// The model's 16-bit weights become the working copy of each parameter that has a master. A
/// parameter without arrays is frozen, unless the optimizer keeps none at all (SGD without
/// momentum).
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] if the assignment is not unique.
fn by_parameter(
    base: &PickleValue<'_>,
    tensors: Vec<OptimizerTensor>,
    stored: &mut [Stored],
) -> Result<(), DeepSpeedError> {
    let Some(order) = order(&tensors, stored) else {
        return Err(base.need("param_groups")?.refuse(format!(
            "of groups that tell by order or shape which of the {} parameters they have (with \
             frozen parameters or groups of mixed shapes, save at stage 1 or higher)",
            stored.len()
        )));
    };
    let any =
        tensors.iter().any(|tensor| tensor.master.is_some() || !tensor.state.moments.is_empty());
    for (tensor, at) in tensors.into_iter().zip(order) {
        let stored = &mut stored[at];
        stored.parameter.trainable = !any || tensor.shape().is_some();
        let moments = tensor.state.moments.into_iter();
        stored.moments = moments.map(|(_, tensor)| Segments::whole(tensor)).collect();
        if let Some(master) = tensor.master {
            let working = std::mem::replace(&mut stored.weights, Segments::whole(master));
            stored.working = Some(working);
        }
    }
    Ok(())
}

/// Returns the parameter of each tensor: by model order if there is one group, or by the order
/// among parameters of equal shape if no two groups share a shape. `None` if neither is
/// unambiguous.
fn order(tensors: &[OptimizerTensor], stored: &[Stored]) -> Option<Vec<usize>> {
    if tensors.len() != stored.len() {
        return None;
    }
    if tensors.iter().all(|tensor| tensor.group == 0) {
        let fit = tensors.iter().zip(stored).all(|(tensor, stored)| tensor.fits(stored));
        return fit.then(|| (0..stored.len()).collect());
    }
    let mut by_shape: HashMap<&[usize], std::collections::VecDeque<usize>> = HashMap::new();
    for (at, stored) in stored.iter().enumerate() {
        by_shape.entry(&stored.parameter.shape).or_default().push_back(at);
    }
    let mut groups: HashMap<&[usize], usize> = HashMap::new();
    let order = tensors.iter().map(|tensor| {
        let shape = tensor.shape()?;
        let group = *groups.entry(shape).or_insert(tensor.group);
        let at = by_shape.get_mut(shape)?.pop_front()?;
        (group == tensor.group && tensor.fits(&stored[at])).then_some(at)
    });
    order.collect()
}

/// Divides the flat masters and arrays of a fused optimizer, whose only group has all parameters.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] unless the only group has all parameters of the model,
/// because neither names nor shapes are stored.
fn flat(
    optimizer: &PickleValue<'_>,
    tensors: &[OptimizerTensor],
    stored: &mut [Stored],
) -> Result<(), DeepSpeedError> {
    let groups = optimizer.need("fp32_groups_flat")?;
    let masters = groups.list()?;
    let numel: usize = stored.iter().map(|stored| stored.parameter.numel()).sum();
    let rule = format!(
        "one flat group of the {numel} elements of all parameters (with frozen parameters or \
         several groups, save at stage 1 or higher)"
    );
    let ([master], [tensor]) = (&masters[..], tensors) else { return Err(groups.refuse(rule)) };
    let master = master.tensor()?;
    let moments: Vec<_> = tensor.state.moments.iter().map(|(_, tensor)| tensor.clone()).collect();
    if master.shape != [numel] || moments.iter().any(|moment| moment.shape != [numel]) {
        return Err(groups.refuse(rule));
    }
    let mut start = 0;
    for stored in stored {
        let end = start + stored.parameter.numel();
        let cut = |tensor: &Arc<Tensor>| Segments::whole(tensor.clone()).cut(start..end);
        stored.working = Some(std::mem::replace(&mut stored.weights, cut(&master)));
        stored.moments = moments.iter().map(cut).collect();
        start = end;
    }
    Ok(())
}

/// Returns the loss scaler of a wrapped optimizer, which has no hysteresis. Its state is stored
/// next to the masters.
fn loss_scale(optimizer: &PickleValue<'_>) -> Result<Option<LossScale>, DeepSpeedError> {
    let dynamic = optimizer.get("dynamic_loss_scale").map(|it| it.bool()).transpose()?;
    if dynamic != Some(true) {
        return Ok(None);
    }
    LossScale::read(optimizer, 1).map(Some)
}
