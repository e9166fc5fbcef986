//! A checkpoint of DeepSpeed, whichever stage and number of ranks wrote it.
//!
//! Main type: [`DeepSpeedCheckpoint`]. Opening it reads the pickles of all files, checks them
//! against each other and finds the place of every value; no weight is read before it is asked for.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::folder::{Folder, ModelFiles};
use crate::model_states::{ModelStates, Summary};
use crate::optim_states::OptimStates;
use crate::stored::{State, tie};
use crate::tensor::{Pieces, Tensor};
use crate::{Array, Counters, DeepSpeedError, LossScale, Parameter};
use crate::{partitioned, replicated, sharded};

/// An open checkpoint of DeepSpeed. It can be read from several threads at once.
///
/// It keeps the files open and holds where every parameter's values lie, but none of the values. A
/// storage is compared with its checksum the first time that something of it is read, in one
/// streaming pass; then exactly what is asked for is read.
#[derive(Debug)]
pub struct DeepSpeedCheckpoint {
    path: PathBuf,
    summary: Summary,
    state: State,
    parameters: Vec<Parameter>,
    buffers: Vec<(String, Arc<Tensor>)>,
    /// Places in `parameters`, by name and tied name.
    places: HashMap<String, usize>,
}

impl DeepSpeedCheckpoint {
    /// Opens the checkpoint `tag` in the folder `path`; without a tag, `path` itself where it has
    /// the files of one, else the one that the file `latest` in there names.
    ///
    /// # Errors
    /// [`DeepSpeedError::Missing`] where there is none or a file of a rank is not there,
    /// [`DeepSpeedError::Damaged`], [`DeepSpeedError::Layout`] and [`DeepSpeedError::Mixed`] where
    /// files are not what DeepSpeed wrote in one save, [`DeepSpeedError::Unsupported`] of model
    /// parallelism, experts, universal checkpoints and frozen parameters that were left out, or an
    /// I/O error.
    pub fn open(path: &Path, tag: Option<&str>) -> Result<Self, DeepSpeedError> {
        let folder = Folder::find(path, tag)?;
        let (summary, state, buffers) = match &folder.model {
            ModelFiles::Whole(model) => of_whole_model(&folder, model)?,
            ModelFiles::Sharded(models) => of_sharded_model(&folder, models)?,
        };
        let parameters: Vec<_> = state.stored.iter().map(|it| it.parameter.clone()).collect();
        let mut places = HashMap::new();
        for (place, parameter) in parameters.iter().enumerate() {
            let names = [&parameter.name].into_iter().chain(&parameter.aliases);
            places.extend(names.map(|name| (name.clone(), place)));
        }
        let path = folder.path;
        for stored in &state.stored {
            stored.check(&path)?;
        }
        Ok(Self { path, summary, state, parameters, buffers, places })
    }

    /// Whether a folder looks like a checkpoint of DeepSpeed, or names its latest one.
    pub fn is_one(path: &Path) -> bool {
        Folder::is_one(path)
    }

    /// The tag's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// DeepSpeed's version that wrote it.
    pub fn version(&self) -> &str {
        &self.summary.version
    }

    /// The ZeRO stage that it was trained at, 0 to 3.
    pub fn stage(&self) -> u8 {
        self.state.stage
    }

    /// The number of data-parallel ranks.
    pub fn world_size(&self) -> usize {
        self.summary.world_size
    }

    /// How far training was.
    pub fn counters(&self) -> Counters {
        let Summary { global_steps, skipped_steps, global_samples, .. } = self.summary;
        let applied = global_steps.saturating_sub(skipped_steps);
        let optimizer_steps = self.state.steps.unwrap_or(applied);
        Counters { global_steps, skipped_steps, global_samples, optimizer_steps }
    }

    /// The number of the schedule's last step, counted from 0 (`last_batch_iteration`; of a
    /// schedule of PyTorch `last_epoch` less one). `None` where there was no schedule.
    pub fn schedule(&self) -> Option<i64> {
        self.summary.schedule
    }

    /// The state of the loss scaler, where there is a dynamic one.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.state.loss_scale
    }

    /// The parameters: those that are trained in the order of the flat groups (of the model at stage
    /// 0), then frozen ones. Buffers are not among them.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The names and shapes of the model's float buffers, such as the running statistics of a batch
    /// norm. They are rank 0's: in DeepSpeed, each rank keeps its own.
    pub fn buffers(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.buffers.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..]))
    }

    /// All elements of the buffer `name`, widened to f32.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_buffer(&self, name: &str) -> Result<Vec<f32>, DeepSpeedError> {
        let Some((_, tensor)) = self.buffers.iter().find(|(found, _)| found == name) else {
            let reason = format!("it has no float buffer {name}");
            return Err(DeepSpeedError::NotInside { path: self.path.clone(), reason });
        };
        let mut values = Vec::with_capacity(tensor.numel());
        tensor.read(0..tensor.numel(), &mut values)?;
        Ok(values)
    }

    /// The names of the optimizer's arrays, such as `exp_avg`, `exp_avg_sq`, `momentum_buffer` and
    /// `sum`.
    pub fn moments(&self) -> &[String] {
        &self.state.moments
    }

    /// Compares everything that can be read with its checksums, in one streaming pass that later
    /// reads need not take again.
    ///
    /// # Errors
    /// [`DeepSpeedError::Damaged`] where a checksum does not hold, or an I/O error.
    pub fn verify(&self) -> Result<(), DeepSpeedError> {
        self.state.stored.iter().try_for_each(|stored| {
            let arrays = [&stored.weights].into_iter().chain(&stored.moments);
            arrays.chain(&stored.working).try_for_each(Pieces::verify)
        })?;
        self.buffers.iter().try_for_each(|(_, tensor)| tensor.read(0..0, &mut Vec::new()))
    }

    /// Elements `range` of a flattened parameter or of one of its arrays, widened to f32. `name` may
    /// be a tied name.
    ///
    /// # Errors
    /// [`DeepSpeedError::NotInside`] where there are no such elements, [`DeepSpeedError::Damaged`]
    /// where a checksum does not hold, [`DeepSpeedError::Mixed`] where masters do not round to the
    /// model's weights, or an I/O error.
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
        let Parameter { shape, trainable, .. } = &stored.parameter;
        if range.start > range.end || range.end > stored.parameter.numel() {
            let reason = format!("parameter {name} of shape {shape:?} has no elements {range:?}");
            return Err(not_inside(reason));
        }
        let moment = match array {
            Array::Weights => return stored.read_weights(range),
            Array::Moment(moment) => moment,
        };
        let at = self.state.moments.iter().position(|found| found == moment);
        match at.and_then(|at| stored.moments.get(at)) {
            Some(pieces) => pieces.read(range),
            None => Err(not_inside(if *trainable {
                let found = self.state.moments.join(", ");
                format!("the optimizer has no {moment} of {name}; its arrays are: {found}")
            } else {
                format!("parameter {name} is frozen, so the optimizer has no {moment} of it")
            })),
        }
    }
}

/// What is read of a checkpoint, its float buffers last.
type Read = (Summary, State, Vec<(String, Arc<Tensor>)>);

fn of_whole_model(folder: &Folder, path: &Path) -> Result<Read, DeepSpeedError> {
    let model = ModelStates::open(path)?;
    let buffers = model.buffers()?;
    let state = match (model.groups.is_some(), folder.optim.is_empty()) {
        (false, true) => replicated::assemble(&model)?,
        (true, _) => {
            let ranks = ranks(folder, &model)?;
            let mut state = partitioned::assemble(&model, &ranks)?;
            tie(&model, &mut state.stored)?;
            state
        }
        (false, false) => {
            let reason =
                "it is of stage 0, and there are files of partitioned optimizers beside it";
            return Err(DeepSpeedError::mixed(path, reason));
        }
    };
    Ok((model.summary, state, buffers))
}

fn of_sharded_model(folder: &Folder, paths: &[PathBuf]) -> Result<Read, DeepSpeedError> {
    let models: Vec<_> =
        paths.iter().map(|path| ModelStates::open(path)).collect::<Result<_, _>>()?;
    let world_size = models[0].summary.world_size;
    if models.len() != world_size {
        return Err(wrong_number(folder, &models[0], models.len(), "model"));
    }
    let ranks = ranks(folder, &models[0])?;
    let mut state = sharded::assemble(&models, &ranks)?;
    tie(&models[0], &mut state.stored)?;
    let buffers = models[0].buffers()?;
    let summary = models.into_iter().next().map(|model| model.summary);
    // There is a first one: its world size was asked for above.
    summary
        .map(|summary| (summary, state, buffers))
        .ok_or_else(|| DeepSpeedError::missing(&folder.path, "there is no model in it"))
}

/// The optimizer's files of all ranks.
fn ranks(folder: &Folder, model: &ModelStates) -> Result<Vec<OptimStates>, DeepSpeedError> {
    let found = folder.optim.len();
    if found != model.summary.world_size || found == 0 {
        return Err(wrong_number(folder, model, found, "optim"));
    }
    let ranks: Vec<_> =
        folder.optim.iter().map(|path| OptimStates::open(path)).collect::<Result<_, _>>()?;
    let sharded = matches!(folder.model, ModelFiles::Sharded(_));
    for rank in &ranks {
        if (rank.stage == Some(3)) != sharded {
            let reason = format!(
                "its zero_stage is {}, which differs from {}",
                rank.stage.map_or("missing".to_owned(), |stage| stage.to_string()),
                model.path().display()
            );
            return Err(DeepSpeedError::mixed(rank.path(), reason));
        }
        let version = rank.contents.root().get("ds_version");
        let version = version.map(|version| version.text()).transpose()?;
        if version.is_some_and(|version| version != model.summary.version) {
            let reason = format!("it is of another version than {}", model.path().display());
            return Err(DeepSpeedError::mixed(rank.path(), reason));
        }
    }
    Ok(ranks)
}

fn wrong_number(folder: &Folder, model: &ModelStates, found: usize, kind: &str) -> DeepSpeedError {
    let reason = format!(
        "there are {found} files *_{kind}_states.pt, and {} says that there were {} ranks; copy the \
         files of all ranks of one save into one folder",
        model.path().display(),
        model.summary.world_size
    );
    DeepSpeedError::missing(&folder.path, reason)
}
