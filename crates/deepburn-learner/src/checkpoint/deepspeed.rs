//! Going on from a checkpoint that DeepSpeed saved.

use std::collections::HashMap;

use burn::module::AutodiffModule;
use burn::tensor::TensorData;
use deepburn_config::OptimizerPlan;
use deepburn_deepspeed::{Array, Counters, DeepSpeedCheckpoint, LossScale, Parameter};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Buffer, BufferKind, Piece, StateArray, Training, moments};

use super::counters::check_deepspeed_counters;
use super::load::{LoadPlan, listed};
use super::{TrainingCheckpointError, exchange};
use crate::engine::Progress;
use crate::{Engine, ScalerState};

/// How a Burn model's parameters are kept in PyTorch.
pub trait TorchModel {
    /// The name there of the parameter or running statistic at a module path here.
    fn name(&self, path: &str) -> String;

    /// Whether the matrix at a module path has rows there for columns here, as the weights of
    /// `torch.nn.Linear` have for those of Burn's `Linear`.
    fn is_transposed(&self, _path: &str) -> bool {
        false
    }
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Goes on from a checkpoint of DeepSpeed, of any stage and number of ranks. All ranks call this
    /// together. Weights, running statistics (those of DeepSpeed's rank 0), moments, schedule, loss
    /// scale and counters are taken as `plan` says. Integer and bool parameters keep the values that
    /// they have here, with a warning. What DeepSpeed does not save is not there: random streams stay
    /// as they are here, and the place in the data is the caller's.
    ///
    /// # Errors
    /// When the checkpoint is not one of this model and optimizer: then the engine is as it was.
    /// When reading or a collective fails later on: then it is of no use any more.
    pub fn load_deepspeed_checkpoint(
        &mut self,
        checkpoint: &DeepSpeedCheckpoint,
        model: &dyn TorchModel,
        plan: LoadPlan,
    ) -> Result<(), TrainingCheckpointError> {
        self.check_settled("load_deepspeed_checkpoint")?;
        let stored = Stored::new(checkpoint, model);
        let own = self.parameters().iter().map(|parameter| Own {
            path: parameter.path(),
            shape: parameter.shape(),
            trainable: parameter.is_trainable(),
        });
        let optimizer_states = matches!(plan, LoadPlan::Training { optimizer_states: true, .. });
        let moments = optimizer_states.then(|| self.moments_beside(checkpoint.moments()));
        let fits = stored.check(own, moments);
        let fits =
            fits.and_then(|()| self.buffers().iter().try_for_each(|it| stored.check_buffer(it)));
        let fits = fits.map(|()| checkpoint.path().to_owned());
        let fits = fits.map_err(|reason| stored.unfit(reason));
        let paths = exchange(self.group(), "DeepSpeed checkpoint to load", Some(fits))?;
        if let Some(other) = paths.iter().find(|path| **path != paths[0]) {
            return Err(stored.unfit(format!("another rank loads {}", other.display())));
        }
        let (counters, schedule) = (stored.checkpoint.counters(), stored.checkpoint.schedule());
        check_deepspeed_counters(&counters, schedule, scaler_state(stored.checkpoint))
            .map_err(|reason| stored.unfit(reason))?;
        self.adopt_deepspeed(&stored, plan)
    }

    /// What the optimizer keeps of a parameter of which it keeps something else than `stored`; of any, where there is
    /// none such. DeepSpeed's checkpoints have the same arrays of every parameter.
    fn moments_beside(&self, stored: &[String]) -> &'static [&'static str] {
        let trained = self.parameters().iter().filter(|parameter| parameter.is_trainable());
        let mut kept = trained.map(|parameter| self.states().moments(parameter.index()));
        let any = kept.clone().next().unwrap_or_default();
        kept.find(|kept| *kept != stored).unwrap_or(any)
    }

    /// Replaces what this engine has by what was saved.
    fn adopt_deepspeed(
        &mut self,
        stored: &Stored<'_>,
        plan: LoadPlan,
    ) -> Result<(), TrainingCheckpointError> {
        let read = |piece: &Piece<'_>| stored.read(piece);
        self.zero_grad();
        self.states.load_weights(read)?;
        let is_first = self.rank() == 0;
        self.load_buffers(|buffer| stored.read_buffer(buffer, is_first))?;
        let LoadPlan::Training { optimizer_states, lr_scheduler_states } = plan else {
            return Ok(());
        };
        let Counters { global_steps, skipped_steps, global_samples, optimizer_steps } =
            stored.checkpoint.counters();
        self.progress = Progress {
            micro_steps: global_steps * self.batch().gradient_accumulation_steps as u64,
            global_steps,
            skipped_steps,
            global_samples,
            ..Progress::default()
        };
        if optimizer_states {
            self.states.load_moments(optimizer_steps, read)?;
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

fn scaler_state(checkpoint: &DeepSpeedCheckpoint) -> Option<ScalerState> {
    checkpoint.loss_scale().map(|LossScale { scale, hysteresis, last_overflow, iteration }| {
        ScalerState { scale, hysteresis, last_overflow, iteration }
    })
}

/// Makes sure that a checkpoint of DeepSpeed is one of a model whose parameters, all trained, have
/// these module paths and shapes, and of this optimizer: all that can be said before there is an
/// engine.
///
/// # Errors
/// [`TrainingCheckpointError::Unfit`], naming the first difference.
pub fn check_deepspeed_checkpoint<'a>(
    checkpoint: &DeepSpeedCheckpoint,
    model: &dyn TorchModel,
    parameters: impl IntoIterator<Item = (&'a str, &'a [usize])>,
    optimizer: &OptimizerPlan,
) -> Result<(), TrainingCheckpointError> {
    let stored = Stored::new(checkpoint, model);
    let own = parameters.into_iter().map(|(path, shape)| Own { path, shape, trainable: true });
    stored.check(own, Some(moments(optimizer))).map_err(|reason| stored.unfit(reason))
}

/// A parameter here.
struct Own<'a> {
    path: &'a str,
    shape: &'a [usize],
    trainable: bool,
}

/// A checkpoint, seen with the names of a model.
struct Stored<'a> {
    checkpoint: &'a DeepSpeedCheckpoint,
    model: &'a dyn TorchModel,
    by_name: HashMap<&'a str, &'a Parameter>,
}

impl<'a> Stored<'a> {
    fn new(checkpoint: &'a DeepSpeedCheckpoint, model: &'a dyn TorchModel) -> Self {
        let names = |parameter: &'a Parameter| {
            let names = [&parameter.name].into_iter().chain(&parameter.aliases);
            names.map(move |name| (name.as_str(), parameter))
        };
        let by_name = checkpoint.parameters().iter().flat_map(names).collect();
        Self { checkpoint, model, by_name }
    }

    /// The model has the checkpoint's parameters and no other, and the optimizer its moments.
    fn check<'p>(
        &self,
        parameters: impl Iterator<Item = Own<'p>>,
        moments: Option<&[&str]>,
    ) -> Result<(), String> {
        let mut missed: Vec<&Parameter> = self.checkpoint.parameters().iter().collect();
        for own in parameters {
            let parameter = self.check_parameter(&own)?;
            missed.retain(|missed| missed.name != parameter.name);
        }
        if let Some(Parameter { name, .. }) = missed.first() {
            return Err(format!(
                "it has a parameter {name}, and this model has none of that name: give the model \
                 that it was saved of"
            ));
        }
        let stored: Vec<&str> = self.checkpoint.moments().iter().map(String::as_str).collect();
        match moments {
            // Of their trust ratios and factors, which updates need, this reads nothing.
            Some(own) if own.contains(&"exp_avg_sq_fresh") => Err(format!(
                "loading optimizer states of OneBitLamb from a DeepSpeed checkpoint is not supported, and it kept {}: \
                 finish the run with DeepSpeed, or start from its weights (a program of your own can load the weights \
                 alone)",
                listed(&stored)
            )),
            Some(own) if own != stored => Err(format!(
                "its optimizer kept {} of each parameter and this one keeps {}: use the optimizer \
                 that saved it (a program of your own can load the weights alone)",
                listed(&stored),
                listed(own)
            )),
            _ => Ok(()),
        }
    }

    fn check_parameter(&self, own: &Own<'_>) -> Result<&'a Parameter, String> {
        let &Own { path, shape: own_shape, trainable } = own;
        let (name, parameter) = self.find(path)?;
        let mut shape = parameter.shape.clone();
        if self.model.is_transposed(path) {
            if shape.len() != 2 {
                return Err(format!(
                    "its parameter {name} is of shape {shape:?}, and only matrices are transposed: \
                     see TorchModel::is_transposed"
                ));
            }
            shape.reverse();
        }
        if shape != own_shape {
            return Err(format!(
                "its parameter {name} is of shape {:?}, and this model's {path} of {own_shape:?}: \
                 give the model that it was saved of",
                parameter.shape
            ));
        }
        if parameter.trainable != trainable {
            let is = |trainable| if trainable { "trained" } else { "frozen" };
            return Err(format!(
                "its parameter {name} is {}, and this model's {path} is {}: freeze the same ones",
                is(parameter.trainable),
                is(trainable)
            ));
        }
        Ok(parameter)
    }

    /// The checkpoint has this running statistic.
    fn check_buffer(&self, buffer: &Buffer) -> Result<(), String> {
        if buffer.kind() != BufferKind::RunningStatistic {
            return Ok(());
        }
        let (path, name) = (buffer.path(), self.model.name(buffer.path()));
        let Some((_, shape)) = self.checkpoint.buffers().find(|(found, _)| *found == name) else {
            return Err(format!(
                "it has no float buffer {name}, as which this model's {path} would be saved: give the \
                 model that it was saved of"
            ));
        };
        if shape != &buffer.shape()[..] {
            let own = buffer.shape().to_vec();
            return Err(format!(
                "its buffer {name} is of shape {shape:?}, and this model's {path} of {own:?}: give the \
                 model that it was saved of"
            ));
        }
        Ok(())
    }

    /// A running statistic; integers and bools are not taken over.
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
        let values = self.checkpoint.read_buffer(&self.model.name(buffer.path()))?;
        let len = [values.len()];
        Ok(Some(TensorData::new(values, len)))
    }

    /// The parameter at a module path, and its name.
    fn find(&self, path: &str) -> Result<(String, &'a Parameter), String> {
        let name = self.model.name(path);
        match self.by_name.get(name.as_str()) {
            Some(parameter) => Ok((name, parameter)),
            None => Err(format!(
                "it has no parameter {name}, as which this model's {path} would be saved: give the \
                 model that it was saved of"
            )),
        }
    }

    fn read(&self, piece: &Piece<'_>) -> Result<TensorData, TrainingCheckpointError> {
        let (name, parameter) = self.find(piece.path).map_err(|reason| self.unfit(reason))?;
        let array = match piece.array {
            StateArray::Weights => Array::Weights,
            StateArray::Moment(moment) => Array::Moment(moment),
            StateArray::Gradient
            | StateArray::WorkerError(_)
            | StateArray::ServerError
            | StateArray::Local(..) => {
                unreachable!("a checkpoint of DeepSpeed has neither gradients nor errors")
            }
        };
        let values = match (&parameter.shape[..], self.model.is_transposed(piece.path)) {
            (&[rows, columns], true) => {
                let whole = self.checkpoint.read(&name, array, 0..rows * columns)?;
                // Here a row has `rows` elements.
                let place = |index: usize| index % rows * columns + index / rows;
                piece.range.clone().map(|index| whole[place(index)]).collect()
            }
            _ => self.checkpoint.read(&name, array, piece.range.clone())?,
        };
        let len = [values.len()];
        Ok(TensorData::new(values, len))
    }

    fn unfit(&self, reason: String) -> TrainingCheckpointError {
        TrainingCheckpointError::Unfit { path: self.checkpoint.path().to_owned(), reason }
    }
}
