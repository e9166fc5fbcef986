//! A file `*_model_states.pt`: the model, the training progress, and the parameters in each flat
//! group.
//!
//! Main type: [`ModelStatesFile`]. Files of model parallelism, experts or hierarchical
//! partitioning, and files that were saved without their frozen parameters, are rejected.
//!
//! ```text
//! module                   {name: tensor}; None in a pipeline, whose layers have files of their own
//! buffer_names             [name]
//! param_shapes             [{name: shape}], one dict per flat group; missing at stage 0
//! frozen_param_shapes      {name: shape}, or None
//! frozen_param_fragments   {name: tensor}: complete at stage 2, this rank's chunk at stage 3
//! shared_params            {tied name: name}
//! optimizer                the complete optimizer; stage 0 only
//! lr_scheduler             {last_batch_iteration} or {last_epoch}
//! ds_version, dp_world_size, mp_world_size, global_steps, skipped_steps, global_samples, ds_config
//! ```

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::contents::{Contents, PickleValue};
use crate::tensor::NamedTensors;
use crate::{DeepSpeedError, Tensor};

/// The name and shape of a parameter.
pub(crate) type Named = (String, Vec<usize>);

/// The content of a file `*_model_states.pt`.
#[derive(Debug)]
pub(crate) struct ModelStatesFile {
    /// The open file.
    pub(crate) contents: Contents,
    /// The counters, the version and the position of the schedule.
    pub(crate) summary: CommonFields,
    /// The parameters of each flat group in order; `None` at stage 0.
    pub(crate) groups: Option<Vec<Vec<Named>>>,
    /// The frozen parameters; `None` if the file does not list them separately.
    pub(crate) frozen: Option<Vec<Named>>,
    /// Tied names with the parameters that they refer to; `None` at stage 0.
    pub(crate) tied: Option<Vec<(String, String)>>,
}

/// The values on which the files of all ranks must agree.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CommonFields {
    /// The version of DeepSpeed.
    pub(crate) version: String,
    /// The number of data-parallel ranks.
    pub(crate) world_size: usize,
    /// The number of optimizer steps, including skipped ones.
    pub(crate) global_steps: u64,
    /// The number of steps that an overflow skipped.
    pub(crate) skipped_steps: u64,
    /// The number of training samples over all ranks.
    pub(crate) global_samples: u64,
    /// The index of the schedule's last step, from 0; `None` without a schedule.
    pub(crate) schedule: Option<i64>,
}

impl ModelStatesFile {
    /// Opens a file and reads everything except tensors. `stages` is the number of pipeline stages,
    /// or 1.
    ///
    /// # Errors
    /// Returns an error for an unsupported kind of checkpoint, a damaged file, or a missing value.
    pub(crate) fn open(path: &Path, stages: usize) -> Result<Self, DeepSpeedError> {
        let contents = Contents::open(path)?;
        let root = contents.root();
        refuse_other_degrees(path, &root, stages)?;
        refuse_foreign(path, &root)?;
        let summary = CommonFields::read(&root)?;
        // The order of the groups and of the parameters in them is the order in the flat tensors.
        let groups =
            root.get("param_shapes").map(|groups| groups.list()?.iter().map(named).collect());
        let groups = groups.transpose()?;
        let frozen = root.get("frozen_param_shapes").map(|shapes| named(&shapes)).transpose()?;
        let tied = root.get("shared_params").map(|tied| {
            let tied = tied.entries()?.into_iter();
            tied.map(|(alias, name)| Ok((alias, name.text()?.to_owned()))).collect()
        });
        let tied = tied.transpose()?;
        Ok(Self { contents, summary, groups, frozen, tied })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.contents.path()
    }

    /// Returns the tensor with this name in the model; `None` if there is none, as in the file of a
    /// pipeline stage.
    ///
    /// # Errors
    /// Returns an error if the value is not a dense tensor.
    pub(crate) fn in_module(&self, name: &str) -> Result<Option<Arc<Tensor>>, DeepSpeedError> {
        let module = self.contents.root().get("module");
        module.and_then(|module| module.get(name)).map(|value| value.tensor()).transpose()
    }

    /// Returns all tensors of the model except buffers, in order. They are in module order, which
    /// the parameter numbers of optimizers follow. The file of a pipeline stage has none.
    pub(crate) fn module(&self) -> Result<NamedTensors, DeepSpeedError> {
        let root = self.contents.root();
        let buffers = self.buffer_names()?;
        let Some(module) = root.get("module") else { return Ok(Vec::new()) };
        let module = module.entries()?.into_iter();
        let parameters = module.filter(|(name, _)| !buffers.contains(name.as_str()));
        parameters.map(|(name, value)| Ok((name, value.tensor()?))).collect()
    }

    /// Returns the names of the model's buffers.
    pub(crate) fn buffer_names(&self) -> Result<HashSet<&str>, DeepSpeedError> {
        let names = self.contents.root().need("buffer_names")?.list()?;
        names.iter().map(PickleValue::text).collect()
    }

    /// Returns the buffers of the model that are contiguous floats, in order. Others, such as the
    /// integer `num_batches_tracked` of a batch norm, are omitted.
    pub(crate) fn buffers(&self) -> Result<NamedTensors, DeepSpeedError> {
        let root = self.contents.root();
        let Some(names) = root.get("buffer_names") else { return Ok(Vec::new()) };
        let names = names.list()?;
        let names: HashSet<_> = names.iter().map(PickleValue::text).collect::<Result<_, _>>()?;
        let module = root.need("module")?.entries()?.into_iter();
        let buffers = module.filter(|(name, _)| names.contains(name.as_str()));
        Ok(buffers.filter_map(|(name, value)| Some((name, value.tensor().ok()?))).collect())
    }

    /// Returns a frozen parameter, or this rank's part of it.
    pub(crate) fn fragment(&self, name: &str) -> Result<Arc<Tensor>, DeepSpeedError> {
        self.contents.root().need("frozen_param_fragments")?.need(name)?.tensor()
    }

    /// Returns an error if the file was saved without the frozen parameters, which are required to
    /// resume.
    pub(crate) fn refuse_excluded(&self) -> Result<(), DeepSpeedError> {
        if self.frozen.is_some() {
            return Ok(());
        }
        let remedy = "save it without exclude_frozen_parameters";
        let found = "frozen_param_shapes is None, so frozen parameters were left out when it was \
                     saved";
        Err(DeepSpeedError::unsupported(self.path(), found, remedy))
    }
}

impl CommonFields {
    /// Reads the summary from the root dict.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Layout`] for a value that is missing or of another kind.
    fn read(root: &PickleValue<'_>) -> Result<Self, DeepSpeedError> {
        Ok(Self {
            version: root.need("ds_version")?.text()?.to_owned(),
            world_size: root.need("dp_world_size")?.size()?,
            global_steps: root.need("global_steps")?.count()?,
            skipped_steps: root.need("skipped_steps")?.count()?,
            global_samples: root.need("global_samples")?.count()?,
            schedule: root.get("lr_scheduler").map(|state| schedule(&state)).transpose()?,
        })
    }
}

/// Returns the position of a schedule. DeepSpeed's schedules store the index of the last step, from
/// 0; PyTorch's store the next one.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] for a schedule with neither.
fn schedule(state: &PickleValue<'_>) -> Result<i64, DeepSpeedError> {
    if let Some(last) = state.get("last_batch_iteration") {
        return last.int();
    }
    match state.get("last_epoch") {
        Some(next) => Ok(next.int()?.saturating_sub(1)),
        None => Err(state.refuse("a schedule with `last_batch_iteration` or `last_epoch`")),
    }
}

/// Returns names and shapes from a dict.
fn named(shapes: &PickleValue<'_>) -> Result<Vec<Named>, DeepSpeedError> {
    let shapes = shapes.entries()?.into_iter();
    shapes.map(|(name, shape)| Ok((name, shape.shape()?))).collect()
}

/// Returns an error unless the file is of a run with `stages` pipeline stages and no other
/// parallelism within the model.
///
/// # Errors
/// Returns [`DeepSpeedError::Missing`] for the file of a pipeline stage whose layers have no files,
/// and [`DeepSpeedError::Unsupported`] for another degree of parallelism.
fn refuse_other_degrees(
    path: &Path,
    root: &PickleValue<'_>,
    stages: usize,
) -> Result<(), DeepSpeedError> {
    let degrees = root.get("checkpoint_parallel_dimensions");
    let degree = |name| degrees.as_ref().and_then(|it| it.get(name));
    let expected = [
        ("pp_degree", degree("pp_degree"), stages),
        ("tp_degree", degree("tp_degree"), 1),
        // DeepSpeed counts the stages of a pipeline as model parallelism.
        ("mp_world_size", root.get("mp_world_size"), stages),
    ];
    for (name, value, expected) in expected {
        let Some(found) = value.map(|value| value.size()).transpose()? else { continue };
        if found == expected {
            continue;
        }
        let found = format!("its {name} is {found}");
        if name == "pp_degree" {
            let reason = format!(
                "{found}, but the folder has {expected} stages with their layers; copy the whole folder"
            );
            return Err(DeepSpeedError::missing(path, reason));
        }
        let remedy = "save it without tensor parallelism";
        return Err(DeepSpeedError::unsupported(path, found, remedy));
    }
    Ok(())
}

/// Returns an error for unsupported kinds of checkpoints. They are recognized by keys, because the
/// file names do not show all of them.
fn refuse_foreign(path: &Path, root: &PickleValue<'_>) -> Result<(), DeepSpeedError> {
    let refuse = |found: String, remedy| Err(DeepSpeedError::unsupported(path, found, remedy));
    if root.get("universal_checkpoint_info").is_some() {
        let remedy = "save it without tensor parallelism";
        return refuse("it has universal_checkpoint_info, so tensors are cut".into(), remedy);
    }
    for name in ["num_experts", "autoep_layers", "ds_autoep_layers"] {
        if root.get(name).is_some_and(|it| it.list().is_ok_and(|list| !list.is_empty())) {
            let remedy = "use a model without experts";
            return refuse(format!("it has {name}: experts (MoE)"), remedy);
        }
    }
    let zero = root.get("ds_config").and_then(|config| config.get("zero_optimization"));
    // Partitions span all ranks with the default values: 1 for ZeRO++ and -1 for MiCS.
    for (name, whole) in [("zero_hpz_partition_size", 1), ("mics_shard_size", -1)] {
        let value = zero.as_ref().and_then(|zero| zero.get(name));
        if let Some(value) = value.map(|it| it.int()).transpose()?
            && value > whole.max(0)
        {
            let remedy = "save it with whole partitions (ZeRO++ and MiCS off)";
            return refuse(format!("its zero_optimization.{name} is {value}"), remedy);
        }
    }
    if zero.is_some_and(|zero| zero.get("zenflow").is_some()) {
        let remedy = "save it with zero_optimization.zenflow off";
        return refuse("it is of ZenFlow, which keeps parts of the optimizer apart".into(), remedy);
    }
    Ok(())
}
