//! Going on from a checkpoint that DeepSpeed saved.

use std::collections::HashMap;

use burn::module::AutodiffModule;
use burn::tensor::TensorData;
use deepburn_deepspeed::{Array, Counters, DeepSpeedCheckpoint, LossScale, Parameter};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Piece, StateArray, Training};

use super::load::{LoadPlan, listed};
use super::{TrainingCheckpointError, exchange};
use crate::engine::Progress;
use crate::{Engine, ScalerState};

/// How a Burn model's parameters are kept in PyTorch.
pub trait TorchModel {
    /// The name there of the parameter at a module path here.
    fn name(&self, path: &str) -> String;

    /// Whether the matrix at a module path has rows there for columns here, as the weights of
    /// `torch.nn.Linear` have for those of Burn's `Linear`.
    fn is_transposed(&self, _path: &str) -> bool {
        false
    }
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Goes on from a checkpoint of DeepSpeed, of any stage and number of ranks. All ranks call this
    /// together. Weights, moments, schedule, loss scale and counters are taken as `plan` says. What
    /// DeepSpeed does not save is not there: random streams stay as they are here, and the place in
    /// the data is the caller's.
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
        let fits = self.check_deepspeed(&stored, plan).map(|()| checkpoint.path().to_owned());
        let fits = fits.map_err(|reason| stored.unfit(reason));
        let paths = exchange(self.group(), "DeepSpeed checkpoint to load", Some(fits))?;
        if let Some(other) = paths.iter().find(|path| **path != paths[0]) {
            return Err(stored.unfit(format!("another rank loads {}", other.display())));
        }
        self.adopt_deepspeed(&stored, plan)
    }

    /// The model has the checkpoint's parameters and no other, and the optimizer its moments.
    fn check_deepspeed(&self, stored: &Stored<'_>, plan: LoadPlan) -> Result<(), String> {
        let mut missed: Vec<&Parameter> = stored.checkpoint.parameters().iter().collect();
        for own in self.parameters() {
            let path = own.path();
            let (name, parameter) = stored.find(path)?;
            let mut shape = parameter.shape.clone();
            if stored.model.is_transposed(path) {
                if shape.len() != 2 {
                    return Err(format!(
                        "its parameter {name} is of shape {shape:?}, and only matrices are \
                         transposed: see TorchModel::is_transposed"
                    ));
                }
                shape.reverse();
            }
            if shape[..] != own.shape()[..] {
                return Err(format!(
                    "its parameter {name} is of shape {:?}, and this model's {path} of {:?}",
                    parameter.shape,
                    own.shape().to_vec()
                ));
            }
            if parameter.trainable != own.is_trainable() {
                let is = |trainable| if trainable { "trained" } else { "frozen" };
                return Err(format!(
                    "its parameter {name} is {} and this model's {path} {}",
                    is(parameter.trainable),
                    is(own.is_trainable())
                ));
            }
            missed.retain(|missed| missed.name != parameter.name);
        }
        if let Some(parameter) = missed.first() {
            return Err(format!("this model has no parameter {}, as it has", parameter.name));
        }
        let moments: Vec<&str> = stored.checkpoint.moments().iter().map(String::as_str).collect();
        let optimizer_states = matches!(plan, LoadPlan::Training { optimizer_states: true, .. });
        if optimizer_states && moments != self.states().moments() {
            return Err(format!(
                "its optimizer kept {} of each parameter and this one keeps {}: use the optimizer \
                 that saved it, or load without optimizer states",
                listed(&moments),
                listed(self.states().moments())
            ));
        }
        Ok(())
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
            if let Some(state) = stored.checkpoint.loss_scale() {
                let LossScale { scale, hysteresis, last_overflow, iteration } = state;
                self.scaler.restore(ScalerState { scale, hysteresis, last_overflow, iteration });
            }
        }
        if let Some(position) = stored.checkpoint.schedule().filter(|_| lr_scheduler_states) {
            self.schedule.seek(position);
        }
        Ok(())
    }
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

    /// The parameter at a module path, and its name.
    fn find(&self, path: &str) -> Result<(String, &'a Parameter), String> {
        let name = self.model.name(path);
        match self.by_name.get(name.as_str()) {
            Some(parameter) => Ok((name, parameter)),
            None => Err(format!("it has no parameter {name}, which this model's {path} is there")),
        }
    }

    fn read(&self, piece: &Piece<'_>) -> Result<TensorData, TrainingCheckpointError> {
        let (name, parameter) = self.find(piece.path).map_err(|reason| self.unfit(reason))?;
        let array = match piece.array {
            StateArray::Weights => Array::Weights,
            StateArray::Moment(moment) => Array::Moment(moment),
            StateArray::Gradient => unreachable!("a checkpoint of DeepSpeed has no gradients"),
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
