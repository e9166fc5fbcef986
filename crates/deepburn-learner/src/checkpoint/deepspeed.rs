//! Resuming from DeepSpeed checkpoints.
//!
//! The crate `deepburn-deepspeed` reads ranges directly from the files, so each rank reads little
//! more than its own shards. A [`WeightMap`] maps the parameters to the PyTorch model, whose
//! parameters may have other names and layouts: the weights of `torch.nn.Linear` have shape
//! `[out, in]`. Moments have the layout of their parameter. Parameters and running statistics that
//! are not in the map have their module paths as names. A checkpoint of a pipeline has the names of
//! its layers, which are found in the model first.
//!
//! Integer and bool buffers, random streams, the position of the data loader, and the optimizer
//! states of 1-bit LAMB are not loaded.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::AutodiffModule;
use burn::tensor::TensorData;
use deepburn_config::OptimizerPlan;
use deepburn_deepspeed::{
    Array, Counters, DeepSpeedCheckpoint, DeepSpeedError, LossScale, SavedParameter,
};
use deepburn_ops::OptimizerOps;
use deepburn_weights::{Component, Composition, WeightMap};
use deepburn_zero::{Buffer, BufferKind, StateArray, StateSegment, Training, moments};

use super::counters::check_deepspeed_counters;
use super::load::{LoadPlan, StoredMoments};
use super::optimizer_states::{check_new_states, listed};
use super::{TrainingCheckpointError, unfit};
use crate::engine::EngineCounters;
use crate::exchange::exchange;
use crate::{Engine, ScalerState};

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Resumes from a DeepSpeed checkpoint of any ZeRO stage and number of ranks. All ranks call
    /// this together.
    ///
    /// `plan` selects what is loaded besides the weights: moments, loss scale, schedule and
    /// counters. Running statistics are loaded from DeepSpeed's rank 0. Integer and bool parameters
    /// keep their current values, and a warning is logged. DeepSpeed does not save random streams,
    /// which stay unchanged here, or the position of the data loader, which the caller has to
    /// restore.
    ///
    /// # Errors
    /// Returns an error if the checkpoint does not match the model or the optimizer; the engine is
    /// then unchanged. If reading or a collective fails after these checks, the engine is left
    /// partly loaded and must not be used.
    pub fn load_deepspeed_checkpoint(
        &mut self,
        checkpoint: &DeepSpeedCheckpoint,
        map: &WeightMap,
        plan: LoadPlan,
    ) -> Result<(), TrainingCheckpointError> {
        self.check_settled("load_deepspeed_checkpoint")?;
        let stored = self.fit_deepspeed(checkpoint, map, plan);
        // A rank whose checkpoint does not fit takes part in the exchange, in which the others
        // learn of it.
        let fits = match &stored {
            Ok(_) => Ok(checkpoint.path().to_owned()),
            Err(reason) => Err(unfit(checkpoint.path(), reason.clone())),
        };
        let paths = exchange(self.group(), "DeepSpeed checkpoint to load", Some(fits))?;
        let stored = stored.map_err(|reason| unfit(checkpoint.path(), reason))?;
        if let Some(other) = paths.iter().find(|path| **path != paths[0]) {
            return Err(unfit(
                checkpoint.path(),
                format!("another rank loads {}", other.display()),
            ));
        }
        // All ranks read the same files and find the same error here, so no exchange is needed.
        let (counters, schedule) = (stored.checkpoint.counters(), stored.checkpoint.schedule());
        check_deepspeed_counters(&counters, schedule, scaler_state(stored.checkpoint))
            .map_err(|reason| unfit(checkpoint.path(), reason))?;
        self.adopt_deepspeed(&stored, plan)
    }

    /// Addresses a checkpoint by the module paths of this model, and checks that `plan` can load
    /// it.
    ///
    /// # Errors
    /// Returns the first difference as the reason in an error message.
    fn fit_deepspeed<'a>(
        &self,
        checkpoint: &'a DeepSpeedCheckpoint,
        map: &'a WeightMap,
        plan: LoadPlan,
    ) -> Result<MappedCheckpoint<'a>, String> {
        let own = self.parameters().iter().enumerate().map(|(index, parameter)| Own {
            path: parameter.path(),
            shape: parameter.shape(),
            optimizer: self.states().optimizer_of(index),
        });
        let own: Vec<_> = own.collect();
        let stored = MappedCheckpoint::new(checkpoint, map, &own)?;
        let optimizer_states = matches!(plan, LoadPlan::Training { optimizer_states: true, .. });
        stored.check(&own, optimizer_states)?;
        self.buffers().iter().try_for_each(|buffer| stored.check_buffer(buffer))?;
        Ok(stored)
    }

    /// Loads weights, buffers and the parts of the training state that `plan` selects.
    ///
    /// DeepSpeed saves only between optimizer steps, so the number of micro-steps is computed from
    /// the number of steps.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or a collective fails. The engine is then partly
    /// loaded.
    fn adopt_deepspeed(
        &mut self,
        stored: &MappedCheckpoint<'_>,
        plan: LoadPlan,
    ) -> Result<(), TrainingCheckpointError> {
        let read = |segment: &StateSegment<'_>| stored.read(segment);
        self.zero_grad();
        self.states.load_weights(|_| true, read)?;
        self.keep_unchanged_base(|_| true)?;
        let is_first = self.rank() == 0;
        self.load_buffers(|buffer| stored.read_buffer(buffer, is_first))?;
        let LoadPlan::Training { optimizer_states, lr_scheduler_states } = plan else {
            return Ok(());
        };
        let Counters { global_steps, skipped_steps, global_samples, optimizer_steps } =
            stored.checkpoint.counters();
        self.progress = EngineCounters {
            micro_steps: global_steps * self.batch().gradient_accumulation_steps as u64,
            global_steps,
            skipped_steps,
            global_samples,
            ..EngineCounters::default()
        };
        if optimizer_states {
            let stored_moments = |path: &str| StoredMoments {
                was_frozen: !stored.was_trained(path),
                is_empty: stored.checkpoint.moments().is_empty(),
                // DeepSpeed has one step count for all parameters.
                start: 0,
            };
            self.load_moments(optimizer_steps, stored_moments, read)?;
            if let Some(state) = scaler_state(stored.checkpoint) {
                self.scaler.restore(state);
            }
        }
        if let Some(position) = stored.checkpoint.schedule().filter(|_| lr_scheduler_states) {
            self.schedule.seek(position);
        }
        Ok(())
    }
}

/// Converts DeepSpeed's loss-scaler state; `None` for a static scale.
fn scaler_state(checkpoint: &DeepSpeedCheckpoint) -> Option<ScalerState> {
    checkpoint.loss_scale().map(|LossScale { scale, hysteresis, last_overflow, iteration }| {
        ScalerState { scale, hysteresis, last_overflow, iteration }
    })
}

/// Checks a DeepSpeed checkpoint against a model and an optimizer before there is an engine.
///
/// `parameters` gives module path and shape of each parameter, and its optimizer with the settings
/// of its group; `None` if it is frozen.
///
/// # Errors
/// Returns [`TrainingCheckpointError::Unfit`] with the first difference.
pub fn check_deepspeed_checkpoint<'a>(
    checkpoint: &DeepSpeedCheckpoint,
    map: &WeightMap,
    parameters: impl IntoIterator<Item = (&'a str, &'a [usize], Option<&'a OptimizerPlan>)>,
) -> Result<(), TrainingCheckpointError> {
    let own = parameters.into_iter().map(|(path, shape, optimizer)| Own { path, shape, optimizer });
    let own: Vec<_> = own.collect();
    let stored = MappedCheckpoint::new(checkpoint, map, &own);
    stored.and_then(|it| it.check(&own, true)).map_err(|reason| unfit(checkpoint.path(), reason))
}

/// A parameter of the Burn model.
struct Own<'a> {
    /// The module path.
    path: &'a str,
    /// The shape in this model.
    shape: &'a [usize],
    /// The optimizer that updates it; `None` if it is frozen.
    optimizer: Option<&'a OptimizerPlan>,
}

/// A DeepSpeed checkpoint, addressed by the module paths of a Burn model.
struct MappedCheckpoint<'a> {
    /// The checkpoint.
    checkpoint: &'a DeepSpeedCheckpoint,
    /// The names and layouts of the PyTorch model.
    map: &'a WeightMap,
    /// The entries by name in the PyTorch model. A tied parameter has several names.
    by_name: HashMap<String, &'a SavedParameter>,
}

impl<'a> MappedCheckpoint<'a> {
    /// Indexes the parameters by all their names, or the layers of a pipeline by the names that
    /// they have in the model `own` without a pipeline.
    ///
    /// # Errors
    /// Returns the layer whose place in the model is not certain as the reason in an error message.
    fn new(
        checkpoint: &'a DeepSpeedCheckpoint,
        map: &'a WeightMap,
        own: &[Own<'_>],
    ) -> Result<Self, String> {
        let mut by_name = HashMap::new();
        if checkpoint.pipeline_stages().is_some() {
            let compositions = own.iter().map(|it| composition(map, it.path, it.shape));
            let compositions: Vec<_> = compositions.collect::<Result<_, _>>()?;
            let components = compositions.iter().flat_map(Composition::components);
            let model: Vec<_> = components.map(|it| (&*it.name, &it.shape[..])).collect();
            let layers = checkpoint.layers_in_model(&model).map_err(|error| error.to_string())?;
            by_name.extend(layers.into_iter().map(|(name, it)| (name.to_owned(), it)));
        } else {
            for parameter in checkpoint.parameters() {
                let names = [&parameter.name].into_iter().chain(&parameter.aliases);
                by_name.extend(names.map(|name| (name.clone(), parameter)));
            }
        }
        Ok(Self { checkpoint, map, by_name })
    }

    /// Checks that model and checkpoint have the same parameters, and, if `optimizer_states` is
    /// true, that the moments can be loaded.
    fn check(&self, parameters: &[Own<'_>], optimizer_states: bool) -> Result<(), String> {
        let mut missed: Vec<&SavedParameter> = self.checkpoint.parameters().iter().collect();
        // Another model has a clearer error than its moments.
        let mut moments = Ok(());
        for own in parameters {
            let components = self.check_parameter(own)?;
            missed
                .retain(|missed| components.iter().all(|component| component.name != missed.name));
            if optimizer_states && moments.is_ok() {
                moments = self.check_moments(own);
            }
        }
        if let Some(SavedParameter { name, .. }) = missed.first() {
            return Err(format!(
                "it has a parameter {name}, which this model does not have: use the model \
                 that it was saved from"
            ));
        }
        moments
    }

    /// Checks that the checkpoint has the moments of one parameter, or that they can be new.
    fn check_moments(&self, own: &Own<'_>) -> Result<(), String> {
        let Some(optimizer) = own.optimizer else { return Ok(()) };
        let stored: Vec<&str> = self.checkpoint.moments().iter().map(String::as_str).collect();
        let kept = moments(optimizer);
        // The updates also need trust ratios and factors, which DeepSpeed stores but this reader
        // does not read.
        if matches!(optimizer, OptimizerPlan::OneBitLamb(_)) {
            return Err(format!(
                "loading optimizer states of OneBitLamb from a DeepSpeed checkpoint is not supported, and it kept {}: \
                 finish the run with DeepSpeed, or start from its weights (a program of your own can load the weights \
                 alone)",
                listed(&stored)
            ));
        }
        if kept != stored {
            return Err(format!(
                "its optimizer kept {} of each parameter and this one keeps {}: use the optimizer \
                 that saved it (a program of your own can load the weights alone)",
                listed(&stored),
                listed(kept)
            ));
        }
        match self.was_trained(own.path) {
            true => Ok(()),
            false => check_new_states(own.path, optimizer),
        }
    }

    /// Checks names and shapes of the parameters that form one parameter of this model, and returns
    /// them.
    fn check_parameter(&self, own: &Own<'_>) -> Result<Vec<&'a SavedParameter>, String> {
        let &Own { path, shape: own_shape, .. } = own;
        let composition = composition(self.map, path, own_shape)?;
        let mut found = Vec::new();
        for Component { name, shape, .. } in composition.components() {
            let parameter = self.find(path, name)?;
            if parameter.shape != *shape || composition.shape() != own_shape {
                return Err(format!(
                    "its parameter {name} has shape {:?}, but this model's {path} has {own_shape:?}: \
                     use the model that it was saved from",
                    parameter.shape
                ));
            }
            found.push(parameter);
        }
        let frozen = found.iter().find(|parameter| !parameter.trainable);
        let trained = found.iter().find(|parameter| parameter.trainable);
        match frozen.zip(trained) {
            Some((frozen, trained)) => Err(format!(
                "its parameter {} was frozen and {} was trained, but both are in this model's {path}: \
                 train both, or neither",
                frozen.name, trained.name
            )),
            None => Ok(found),
        }
    }

    /// Returns whether the parameter at a module path was trained. It must be a checked parameter.
    fn was_trained(&self, path: &str) -> bool {
        let weight = self.map.get(path);
        // One component is enough: `check_parameter` refuses parameters of which only a part was
        // trained.
        let name = weight.map_or(path, |weight| &weight.composition().components()[0].name);
        self.by_name.get(name).is_some_and(|parameter| parameter.trainable)
    }

    /// Checks that the checkpoint has this running statistic with the same shape.
    fn check_buffer(&self, buffer: &Buffer) -> Result<(), String> {
        if buffer.kind() != BufferKind::RunningStatistic {
            return Ok(());
        }
        let (path, name) = (buffer.path(), self.map.stored_name(buffer.path()));
        let Some((_, shape)) = self.checkpoint.buffers().find(|(found, _)| *found == name) else {
            return Err(format!(
                "it has no float buffer {name}, as which this model's {path} would be saved: give the \
                 model that it was saved from"
            ));
        };
        if shape != &buffer.shape()[..] {
            let own = buffer.shape().to_vec();
            return Err(format!(
                "its buffer {name} has shape {shape:?}, but this model's {path} has {own:?}: give the \
                 model that it was saved from"
            ));
        }
        Ok(())
    }

    /// Reads a running statistic; `None` for integers and bools, which are not loaded.
    fn read_buffer(
        &self,
        buffer: &Buffer,
        warn: bool,
    ) -> Result<Option<TensorData>, TrainingCheckpointError> {
        if buffer.kind() != BufferKind::RunningStatistic {
            if warn {
                tracing::warn!(
                    "{}: integers and bools are not read from checkpoints of DeepSpeed; {} keeps \
                     its values",
                    self.checkpoint.path().display(),
                    buffer.path()
                );
            }
            return Ok(None);
        }
        let values = self.checkpoint.read_buffer(&self.map.stored_name(buffer.path()))?;
        let len = [values.len()];
        Ok(Some(TensorData::new(values, len)))
    }

    /// Returns the parameter `name`, which contains elements of the parameter at a module path.
    ///
    /// # Errors
    /// Returns the reason in an error message if the checkpoint has no such parameter.
    fn find(&self, path: &str, name: &str) -> Result<&'a SavedParameter, String> {
        self.by_name.get(name).copied().ok_or_else(|| {
            format!(
                "it has no parameter {name}, as which this model's {path} would be saved: give the \
                 model that it was saved from"
            )
        })
    }

    /// Reads a segment of an array, in the element order of this model.
    ///
    /// A transposed matrix is read completely, because a segment of it is not contiguous in the
    /// file.
    fn read(&self, segment: &StateSegment<'_>) -> Result<TensorData, TrainingCheckpointError> {
        let array = match segment.array {
            StateArray::Weights => Array::Weights,
            StateArray::Moment(moment) => Array::Moment(moment),
            StateArray::Gradient
            | StateArray::WorkerError(_)
            | StateArray::ServerError
            | StateArray::Local(..) => {
                unreachable!("a checkpoint of DeepSpeed has neither gradients nor errors")
            }
        };
        let values = match self.map.get(segment.path) {
            None => self.read_component(segment.path, array, segment.range.clone())?,
            Some(weight) => {
                let range = segment.range.clone();
                weight.composition().read(range, |name, range, values| {
                    let read = self.read_component(name, array, range)?;
                    // The first range is usually the whole segment, which is not copied.
                    match values.is_empty() {
                        true => *values = read,
                        false => values.extend(read),
                    }
                    Ok::<_, TrainingCheckpointError>(())
                })?
            }
        };
        let len = [values.len()];
        Ok(TensorData::new(values, len))
    }

    /// Reads a range of a parameter by its name in the PyTorch model.
    fn read_component(
        &self,
        name: &str,
        array: Array<'_>,
        range: Range<usize>,
    ) -> Result<Vec<f32>, DeepSpeedError> {
        // The checkpoint may have the parameter under another name: the first of tied names, or a
        // name in a layer of a pipeline.
        let name = self.by_name.get(name).map_or(name, |parameter| &parameter.name);
        self.checkpoint.read(name, array, range)
    }
}

/// Returns the composition of the parameter at a module path.
///
/// # Errors
/// Returns the reason in an error message if the shape overflows.
fn composition(map: &WeightMap, path: &str, shape: &[usize]) -> Result<Composition, String> {
    match map.get(path) {
        Some(weight) => Ok(weight.composition().clone()),
        None => Composition::join(0, vec![Component::whole(path, shape)])
            .map_err(|error| error.to_string()),
    }
}
