//! A DeepSpeed checkpoint of any stage and number of ranks.
//!
//! Main type: [`DeepSpeedCheckpoint`]. Opening a checkpoint reads the pickles of all files, checks
//! them against each other and finds the position of every value. Weights are read only on request.
//!
//! ```text
//! folder.rs         the files by rank
//!   contents.rs     a file: archive.rs (zip) and pickle.rs (walker.rs executes the opcodes)
//!   model_states_file.rs, optim_states_file.rs  what DeepSpeed stores in the two kinds of files
//!   rank_files.rs   the optimizer files of all ranks, which have to be from one save
//!     replicated.rs, partitioned.rs, sharded.rs    stage 0; 1 and 2; 3: the position of each value
//!     pipeline.rs   the stages of a pipeline, each of which is of stage 0 or 1 (stage_layers.rs: its layers)
//!       stored.rs   the common form of all stages, from which values are read
//! ```

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::folder::{Folder, StageFiles, TagFiles};
use crate::model_states_file::{CommonFields, ModelStatesFile};
use crate::rank_files::{open_ranks, partitions, wrong_number};
use crate::stored::{Assembled, SavedState, Stored, tie};
use crate::tensor::{NamedTensors, Segments};
use crate::{Array, Counters, DeepSpeedError, LossScale, SavedParameter};
use crate::{layer_names, partitioned, pipeline, replicated, sharded};

/// An open DeepSpeed checkpoint, which several threads can read at once.
///
/// It keeps the files open and stores the positions of the values in them, but not the values. A
/// storage is verified against its checksum in one streaming pass on first use; later reads read
/// only the requested range.
#[derive(Debug)]
pub struct DeepSpeedCheckpoint {
    /// The folder of the tag.
    path: PathBuf,
    /// The counters and the version, which are the same in the files of all ranks.
    summary: CommonFields,
    /// The positions of all values, in the order of `parameters`.
    state: SavedState,
    /// The number of stages of a pipeline; `None` without one.
    stages: Option<usize>,
    /// The metadata of the parameters: trained ones first, then frozen ones.
    parameters: Vec<SavedParameter>,
    /// The float buffers of rank 0's model file.
    buffers: NamedTensors,
    /// The indices in `parameters`, by name and tied name.
    places: HashMap<String, usize>,
}

impl DeepSpeedCheckpoint {
    /// Opens the checkpoint `tag` in the folder `path`. Without a tag, opens `path` itself if it
    /// contains a checkpoint's files, or else the checkpoint that the file `latest` names.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Missing`] if there is no checkpoint or the file of a rank, a stage
    /// or a layer is missing; [`DeepSpeedError::Damaged`], [`DeepSpeedError::Layout`] or
    /// [`DeepSpeedError::Mixed`] if the files are not from one save of DeepSpeed;
    /// [`DeepSpeedError::Unsupported`] for tensor parallelism, experts, universal checkpoints and
    /// omitted frozen parameters; or an I/O error.
    pub fn open(path: &Path, tag: Option<&str>) -> Result<Self, DeepSpeedError> {
        let folder = Folder::find(path, tag)?;
        let (summary, state, buffers) = match &folder.files {
            TagFiles::Whole(files) => of_whole_model(&folder.path, files)?,
            TagFiles::Sharded { model, optim } => of_sharded_model(&folder.path, model, optim)?,
            TagFiles::Pipeline { stages, layers } => pipeline::read(&folder.path, stages, layers)?,
        };
        let stages = match &folder.files {
            TagFiles::Pipeline { stages, .. } => Some(stages.len()),
            TagFiles::Whole(_) | TagFiles::Sharded { .. } => None,
        };
        let parameters: Vec<_> = state.stored.iter().map(|it| it.parameter.clone()).collect();
        let mut places = HashMap::new();
        for (place, parameter) in parameters.iter().enumerate() {
            let names = [&parameter.name].into_iter().chain(&parameter.aliases);
            places.extend(names.map(|name| (name.clone(), place)));
        }
        let path = folder.path;
        // With this check, every range of a parameter lies within its arrays, so reads need none.
        for stored in &state.stored {
            stored.check(&path)?;
        }
        Ok(Self { path, summary, state, stages, parameters, buffers, places })
    }

    /// Returns true if a folder looks like a DeepSpeed checkpoint or names its latest one.
    pub fn is_one(path: &Path) -> bool {
        Folder::is_one(path)
    }

    /// Returns the folder of the tag.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the DeepSpeed version that wrote it.
    pub fn version(&self) -> &str {
        &self.summary.version
    }

    /// Returns the ZeRO stage of the run, 0 to 3.
    pub fn stage(&self) -> u8 {
        self.state.stage
    }

    /// Returns the number of data-parallel ranks.
    pub fn world_size(&self) -> usize {
        self.summary.world_size
    }

    /// Returns the number of stages of a pipeline, which may be 1. `None` if the model was saved as
    /// a whole, with the names that it has without a pipeline.
    pub fn pipeline_stages(&self) -> Option<usize> {
        self.stages
    }

    /// Returns the parameters of a pipeline by their names in the model without a pipeline.
    ///
    /// The parameters of a pipeline have the names of their layers, such as `2.attn.c_attn.weight`
    /// and `tied_modules.embed.weight`. `model` has the names and shapes of the whole model in
    /// module order. A layer is the part of the model with the same shapes, whose names end like
    /// the layer's names. If several equal layers fit several parts that differ in a number, as
    /// blocks do, they are in order. Otherwise, a layer lies between its neighbors if these are in
    /// the order of the model.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::NotInside`] with the layer if it fits no part, or more than one.
    pub fn layers_in_model<'m>(
        &self,
        model: &[(&'m str, &'m [usize])],
    ) -> Result<HashMap<&'m str, &SavedParameter>, DeepSpeedError> {
        let named = layer_names::in_model(&self.parameters, model);
        named.map_err(|reason| DeepSpeedError::NotInside { path: self.path.clone(), reason })
    }

    /// Returns the training progress.
    pub fn counters(&self) -> Counters {
        let CommonFields { global_steps, skipped_steps, global_samples, .. } = self.summary;
        // An optimizer without a count, such as SGD, has applied every step that was not skipped.
        let applied = global_steps.saturating_sub(skipped_steps);
        let optimizer_steps = self.state.steps.unwrap_or(applied);
        Counters { global_steps, skipped_steps, global_samples, optimizer_steps }
    }

    /// Returns the index of the schedule's last step, from 0 (`last_batch_iteration`, or
    /// `last_epoch` minus one for a PyTorch schedule). `None` without a schedule.
    pub fn schedule(&self) -> Option<i64> {
        self.summary.schedule
    }

    /// Returns the state of a dynamic loss scaler; `None` for a static scale.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.state.loss_scale
    }

    /// Returns the parameters, without buffers: first trained ones in the order of the flat groups
    /// (of the model at stage 0), then frozen ones.
    pub fn parameters(&self) -> &[SavedParameter] {
        &self.parameters
    }

    /// Returns the names and shapes of the model's float buffers, such as the running statistics of
    /// a batch norm. They are the buffers of rank 0; in DeepSpeed, each rank keeps its own copy.
    pub fn buffers(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.buffers.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..]))
    }

    /// Reads all elements of the buffer `name`, converted to f32.
    ///
    /// # Errors
    /// Returns the same errors as [`read`](Self::read).
    pub fn read_buffer(&self, name: &str) -> Result<Vec<f32>, DeepSpeedError> {
        let Some((_, tensor)) = self.buffers.iter().find(|(found, _)| found == name) else {
            let reason = format!("it has no float buffer {name}");
            return Err(DeepSpeedError::NotInside { path: self.path.clone(), reason });
        };
        let mut values = Vec::with_capacity(tensor.numel());
        tensor.read(0..tensor.numel(), &mut values)?;
        Ok(values)
    }

    /// Returns the names of the optimizer's arrays, such as `exp_avg`, `exp_avg_sq`,
    /// `momentum_buffer` and `sum`.
    pub fn moments(&self) -> &[String] {
        &self.state.moments
    }

    /// Verifies all checksums in one streaming pass. Later reads do not verify them again.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Damaged`] if a checksum is wrong, or an I/O error.
    pub fn verify(&self) -> Result<(), DeepSpeedError> {
        self.state.stored.iter().flat_map(Stored::arrays).try_for_each(Segments::verify)?;
        self.buffers.iter().try_for_each(|(_, tensor)| tensor.read(0..0, &mut Vec::new()))
    }

    /// Reads elements `range` of a flattened parameter or of one of its arrays, converted to f32.
    /// `name` may be a tied name.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::NotInside`] if the elements do not exist,
    /// [`DeepSpeedError::Damaged`] if a checksum is wrong, [`DeepSpeedError::Mixed`] if masters do
    /// not round to the model's weights, or an I/O error.
    pub fn read(
        &self,
        name: &str,
        array: Array<'_>,
        range: Range<usize>,
    ) -> Result<Vec<f32>, DeepSpeedError> {
        let not_inside = |reason| DeepSpeedError::NotInside { path: self.path.clone(), reason };
        let Some(place) = self.places.get(name) else {
            return Err(not_inside(format!("it has no parameter {name}")));
        };
        let stored = &self.state.stored[*place];
        let SavedParameter { shape, trainable, .. } = &stored.parameter;
        if range.start > range.end || range.end > stored.parameter.numel() {
            let reason = format!("parameter {name} of shape {shape:?} has no elements {range:?}");
            return Err(not_inside(reason));
        }
        let moment = match array {
            Array::Weights => return stored.read_weights(range),
            Array::Moment(moment) => moment,
        };
        let at = self.state.moments.iter().position(|found| found == moment);
        match at.filter(|at| *at < stored.moments.len()) {
            Some(at) => stored.read_moment(at, moment, range),
            None => Err(not_inside(if *trainable {
                let found = self.state.moments.join(", ");
                format!("the optimizer has no {moment} of {name}; its arrays are: {found}")
            } else {
                format!("parameter {name} is frozen, so the optimizer has no {moment} of it")
            })),
        }
    }
}

/// Assembles stages 0 to 2, whose model is in one file.
///
/// # Errors
/// Returns an error if the files are not from one save or of an unsupported kind. A model file
/// without flat groups next to optimizer files is a mixture of two saves.
fn of_whole_model(folder: &Path, files: &StageFiles) -> Result<Assembled, DeepSpeedError> {
    let model = ModelStatesFile::open(&files.model, 1)?;
    let buffers = model.buffers()?;
    let state = match partitions(folder, &model, &files.optim)? {
        None => replicated::assemble(&model)?,
        Some(ranks) => {
            let mut state = partitioned::assemble(&model, &ranks)?;
            tie(&model, &mut state.stored)?;
            state
        }
    };
    Ok((model.summary, state, buffers))
}

/// Assembles stage 3, whose model is in one file per rank. The buffers are taken from the file of
/// rank 0.
fn of_sharded_model(
    folder: &Path,
    paths: &[PathBuf],
    optim: &[PathBuf],
) -> Result<Assembled, DeepSpeedError> {
    let mut models: Vec<_> =
        paths.iter().map(|path| ModelStatesFile::open(path, 1)).collect::<Result<_, _>>()?;
    let world_size = models[0].summary.world_size;
    if models.len() != world_size {
        return Err(wrong_number(folder, &models[0], models.len(), "model"));
    }
    let ranks = open_ranks(folder, &models[0], optim, true)?;
    let mut state = sharded::assemble(&models, &ranks)?;
    tie(&models[0], &mut state.stored)?;
    let buffers = models[0].buffers()?;
    Ok((models.swap_remove(0).summary, state, buffers))
}
