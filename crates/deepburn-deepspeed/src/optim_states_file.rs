//! A file `*_optim_states.pt`: one rank's part of the flat groups of stages 1 to 3.
//!
//! Main types: [`OptimStatesFile`], the file of one rank, and [`OptimizerState`], the arrays of one
//! tensor of an optimizer. A group is a flat tensor of masters, with an array of the same length
//! for each of the optimizer's moments.
//!
//! ```text
//! optimizer_state_dict
//!   zero_stage                          1, 2 or 3; missing for bf16 with f32 gradients
//!   partition_count                     the number of ranks, or one per group
//!   group_paddings                      [elements], the padding at the end of each group
//!   loss_scaler                         DynamicLossScaler or LossScaler
//!   single_partition_of_fp32_groups     [masters], one per group: stages 1 and 2
//!   base_optimizer_state                [{step, exp_avg, …}] or {state, param_groups}
//!   fp32_flat_groups                    [masters], one per group: stage 3
//!   optimizer_state_dict                {state: {number: {step, exp_avg, …}}, param_groups}: stage 3
//! ```
//!
//! This file does not contain the names of parameters. The model file's `param_shapes` lists them
//! in the order of the flat tensors.

use std::path::Path;
use std::sync::Arc;

use crate::contents::{Contents, PickleValue};
use crate::{DeepSpeedError, LossScale, Tensor};

/// The content of a file `*_optim_states.pt`.
#[derive(Debug)]
pub(crate) struct OptimStatesFile {
    /// The open file.
    pub(crate) contents: Contents,
    /// The ZeRO stage; `None` if the file does not contain it (stage 1 of bf16 with f32 gradients).
    pub(crate) stage: Option<u8>,
    /// This rank's part of each flat group.
    pub(crate) groups: Vec<RankGroup>,
    /// The state of a dynamic loss scaler; `None` for a static scale.
    pub(crate) loss_scale: Option<LossScale>,
    /// The step count of an optimizer that counts steps per parameter group, or once for all
    /// groups.
    steps: Option<u64>,
}

/// One rank's part of a flat group.
#[derive(Debug)]
pub(crate) struct RankGroup {
    /// The f32 masters.
    pub(crate) weights: Arc<Tensor>,
    /// The optimizer's arrays of these elements.
    pub(crate) state: OptimizerState,
}

/// The arrays of a tensor by name, and their step count.
#[derive(Debug, Default)]
pub(crate) struct OptimizerState {
    /// The arrays by DeepSpeed's names, in the order of the file.
    pub(crate) moments: Vec<(String, Arc<Tensor>)>,
    /// The number of updates, if the optimizer counts them per tensor.
    pub(crate) steps: Option<u64>,
}

impl OptimStatesFile {
    /// Opens a file and reads everything except tensors.
    ///
    /// # Errors
    /// Returns an error for expert parallelism, an unknown stage, a damaged file, or a missing
    /// value.
    pub(crate) fn open(path: &Path) -> Result<Self, DeepSpeedError> {
        let contents = Contents::open(path)?;
        let root = contents.root().need("optimizer_state_dict")?;
        if root.get("ds_zero_partition_groups").is_some() {
            let remedy = "use a model without experts";
            let found = "its ranks form several partition groups";
            return Err(DeepSpeedError::unsupported(path, found, remedy));
        }
        let stage = root.get("zero_stage").map(|stage| stage.count()).transpose()?;
        // DeepSpeed has a separate optimizer class for stage 3, which stores the same values under
        // other names.
        let (weights, base) = match stage {
            None | Some(1 | 2) => ("single_partition_of_fp32_groups", "base_optimizer_state"),
            Some(3) => ("fp32_flat_groups", "optimizer_state_dict"),
            Some(_) => return Err(root.need("zero_stage")?.refuse("a stage from 1 to 3")),
        };
        let base = root.need(base)?;
        let weights = root.need(weights)?.list()?;
        let states = group_states(&base, weights.len())?;
        let groups = weights.iter().zip(states).map(|(weights, state)| {
            let weights = weights.tensor()?;
            Ok(RankGroup { weights, state })
        });
        let groups = groups.collect::<Result<_, DeepSpeedError>>()?;
        // If an optimizer does not count steps in its states, the count is in its groups, or
        // DeepSpeed stores it separately.
        let steps = match root.get("base_optimizer_state_step") {
            Some(steps) => Some(count(&steps)?),
            None => counted_in_groups(&base)?,
        };
        let loss_scale = root.get("loss_scaler").map(|scaler| loss_scale(&scaler)).transpose()?;
        let (stage, loss_scale) = (stage.map(|stage| stage as u8), loss_scale.flatten());
        Ok(Self { contents, stage, groups, loss_scale, steps })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.contents.path()
    }

    /// Returns the root dict of the optimizer.
    pub(crate) fn root(&self) -> Result<PickleValue<'_>, DeepSpeedError> {
        self.contents.root().need("optimizer_state_dict")
    }

    /// Returns the names of the optimizer's arrays, by group.
    fn names(&self) -> Vec<Vec<&str>> {
        self.groups.iter().map(|group| group.state.names()).collect()
    }

    /// Returns the optimizer's step count.
    ///
    /// Optimizers count steps per tensor, per group, or once for all groups. The first count that
    /// exists is used.
    pub(crate) fn steps(&self) -> Option<u64> {
        let steps = self.groups.iter().filter_map(|group| group.state.steps);
        steps.max().or(self.steps)
    }

    /// Checks that this file and rank 0's file `first` belong to one save of `world_size` ranks.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Mixed`] with the first value that differs.
    pub(crate) fn check(&self, first: &Self, world_size: usize) -> Result<(), DeepSpeedError> {
        let root = self.root()?;
        let counts = root.need("partition_count")?;
        let counts = if counts.is_list() { counts.list()? } else { vec![counts] };
        for count in counts {
            if count.size()? != world_size {
                let reason = format!("partition_count is {}, not {world_size}", count.size()?);
                return Err(DeepSpeedError::mixed(self.path(), reason));
            }
        }
        let differs = if self.stage != first.stage {
            format!("zero_stage is {}, not {}", told(self.stage), told(first.stage))
        } else if self.steps() != first.steps() {
            format!("the optimizer's steps are {}, not {}", told(self.steps()), told(first.steps()))
        } else if self.loss_scale != first.loss_scale {
            format!("the loss scale is {:?}, not {:?}", self.loss_scale, first.loss_scale)
        } else if self.names() != first.names() {
            format!("the optimizer's arrays are {:?}, not {:?}", self.names(), first.names())
        } else {
            return Ok(());
        };
        let reason = format!("{differs} as in {}", first.path().display());
        Err(DeepSpeedError::mixed(self.path(), reason))
    }
}

/// The compression errors of 1-bit optimizers, which are not read. DeepSpeed saves them only for
/// rank 0 and for some parameters, and resets them at every load.
const COMPRESSION_ERRORS: [&str; 2] = ["worker_error", "server_error"];

impl OptimizerState {
    /// Reads `{"step": .., "exp_avg": .., ..}`. Other values than tensors, and the error buffers of
    /// 1-bit optimizers, are skipped.
    ///
    /// # Errors
    /// Returns an error for a tensor that is not dense, or a step that is not a whole number.
    pub(crate) fn read(state: &PickleValue<'_>) -> Result<Self, DeepSpeedError> {
        let mut read = Self::default();
        for (name, value) in state.entries()? {
            if name == "step" {
                read.steps = Some(count(&value)?);
            // Other values, such as flags, are not arrays of the parameter.
            } else if value.is_tensor() && !COMPRESSION_ERRORS.contains(&name.as_str()) {
                read.moments.push((name, value.tensor()?));
            }
        }
        Ok(read)
    }

    /// Returns the names of the arrays.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.moments.iter().map(|(name, _)| name.as_str()).collect()
    }
}

/// Returns the states of an optimizer with one flat tensor per group, from a list or from a dict by
/// number.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] if there is not exactly one state per group, in their order.
fn group_states(
    base: &PickleValue<'_>,
    groups: usize,
) -> Result<Vec<OptimizerState>, DeepSpeedError> {
    let states = if base.is_list() {
        let list = base.list()?;
        if list.len() != groups {
            return Err(base.refuse(format!("a list of {groups}, one a group")));
        }
        list.into_iter().map(Some).collect()
    } else {
        let state = base.need("state")?;
        let numbers: Vec<_> = group_numbers(base)?.into_iter().flatten().collect();
        if !numbers.iter().copied().eq(0..groups) {
            let rule = format!("parameters 0 to {groups} in this order, one a flat group");
            return Err(base.need("param_groups")?.refuse(rule));
        }
        numbers.iter().map(|number| state.get(&number.to_string())).collect::<Vec<_>>()
    };
    let states = states.iter().map(|state| match state {
        Some(state) => OptimizerState::read(state),
        // An optimizer that keeps no arrays, such as SGD without momentum, has no states.
        None => Ok(OptimizerState::default()),
    });
    states.collect()
}

/// Returns the numbers of an optimizer's tensors, by group.
pub(crate) fn group_numbers(base: &PickleValue<'_>) -> Result<Vec<Vec<usize>>, DeepSpeedError> {
    let groups = base.need("param_groups")?.list()?;
    let numbers = groups.iter().map(|group| {
        let numbers = group.need("params")?.list()?;
        numbers.iter().map(PickleValue::size).collect()
    });
    numbers.collect()
}

/// Returns the step count of optimizers that store it in their groups.
pub(crate) fn counted_in_groups(base: &PickleValue<'_>) -> Result<Option<u64>, DeepSpeedError> {
    let Some(groups) = base.get("param_groups") else { return Ok(None) };
    let steps = groups.list()?.into_iter().filter_map(|group| group.get("step"));
    let steps: Vec<_> = steps.map(|step| count(&step)).collect::<Result<_, _>>()?;
    Ok(steps.into_iter().max())
}

/// Returns a step count: an integer, or a tensor with one element.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] for a number that is negative, fractional or too large for
/// its type.
fn count(value: &PickleValue<'_>) -> Result<u64, DeepSpeedError> {
    if !value.is_tensor() {
        return value.count();
    }
    let tensor = value.tensor()?;
    let mut read = vec![];
    if tensor.numel() == 1 {
        tensor.read(0..1, &mut read)?;
    }
    match read[..] {
        // Beyond 2^24 not every integer is an f32, and PyTorch's counter stops there.
        [steps] if steps.fract() == 0.0 && (0.0..=16_777_216.0).contains(&steps) => {
            Ok(steps as u64)
        }
        _ => Err(value.refuse("a whole number of updates")),
    }
}

/// Returns the state of a `DynamicLossScaler`; `None` for a static scale.
fn loss_scale(scaler: &PickleValue<'_>) -> Result<Option<LossScale>, DeepSpeedError> {
    if !scaler.need("dynamic")?.bool()? {
        return Ok(None);
    }
    LossScale::read(scaler, scaler.need("cur_hysteresis")?.count()?).map(Some)
}

impl LossScale {
    /// Reads the state of a dynamic scaler.
    pub(crate) fn read(scaler: &PickleValue<'_>, hysteresis: u64) -> Result<Self, DeepSpeedError> {
        Ok(Self {
            scale: scaler.need("cur_scale")?.float()?,
            hysteresis,
            last_overflow: scaler.need("last_overflow_iter")?.int()?,
            iteration: scaler.need("cur_iter")?.count()?,
        })
    }
}

/// Formats an optional value for an error message.
fn told<T: ToString>(value: Option<T>) -> String {
    value.map_or("missing".to_owned(), |value| value.to_string())
}
