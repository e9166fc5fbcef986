//! Parameters with the positions of their stored values.
//!
//! Main types: [`Stored`], one parameter, and [`SavedState`], the common form of all stages. Each
//! stage has a module that finds the positions. Reading is the same for all stages: it collects
//! segments of tensors in files.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use deepburn_files::safetensors::FloatType;
use half::{bf16, f16};

use crate::model_states_file::{CommonFields, ModelStatesFile, Named};
use crate::tensor::{NamedTensors, Segments};
use crate::{DeepSpeedError, LossScale, SavedParameter};

/// The content of a checkpoint. The last element has the float buffers.
pub(crate) type Assembled = (CommonFields, SavedState, NamedTensors);

/// A parameter with the positions of its values.
#[derive(Debug)]
pub(crate) struct Stored {
    /// The name, the shape and the tied names.
    pub(crate) parameter: SavedParameter,
    /// The f32 masters if there are any, otherwise the model's weights.
    pub(crate) weights: Segments,
    /// The arrays in the order of [`SavedState::moments`]; empty for a frozen parameter.
    pub(crate) moments: Vec<Segments>,
    /// The model's copy in the working type. The weights, rounded to this type, must equal it.
    pub(crate) working: Option<Segments>,
    /// The copies in other pipeline stages, if the parameter is tied: weights and arrays, which
    /// must be equal to those above.
    pub(crate) replicas: Vec<Replica>,
}

/// A pipeline stage's copy of a parameter that another stage has, too.
#[derive(Debug)]
pub(crate) struct Replica {
    /// As [`Stored::weights`].
    pub(crate) weights: Segments,
    /// As [`Stored::moments`].
    pub(crate) moments: Vec<Segments>,
}

/// The common form of a checkpoint of any stage.
#[derive(Debug)]
pub(crate) struct SavedState {
    /// The ZeRO stage, 0 to 3.
    pub(crate) stage: u8,
    /// The parameters: trained ones first, then frozen ones.
    pub(crate) stored: Vec<Stored>,
    /// The names of the optimizer's arrays, the same for all trained parameters.
    pub(crate) moments: Vec<String>,
    /// The optimizer's step count; `None` if it does not count steps.
    pub(crate) steps: Option<u64>,
    /// The state of a dynamic loss scaler; `None` for a static scale.
    pub(crate) loss_scale: Option<LossScale>,
}

impl Stored {
    /// Returns a parameter without moments and without a working copy.
    pub(crate) fn new((name, shape): Named, trainable: bool, weights: Segments) -> Self {
        let parameter = SavedParameter { name, shape, aliases: vec![], trainable };
        Self { parameter, weights, moments: vec![], working: None, replicas: vec![] }
    }

    /// Returns the positions of everything that is stored of the parameter.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = &Segments> {
        let replicas = self.replicas.iter();
        let replicas = replicas.flat_map(|it| [&it.weights].into_iter().chain(&it.moments));
        [&self.weights].into_iter().chain(&self.moments).chain(&self.working).chain(replicas)
    }

    /// Checks that each array has exactly one value per element.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Layout`] for the first array of another length.
    pub(crate) fn check(&self, path: &Path) -> Result<(), DeepSpeedError> {
        let numel = self.parameter.numel();
        for segments in self.arrays() {
            if segments.len() != numel {
                return Err(DeepSpeedError::Layout {
                    path: segments.path().unwrap_or(path).to_owned(),
                    value: self.parameter.name.clone(),
                    found: format!("stored in {} elements", segments.len()),
                    rule: format!("{numel} as its shape {:?} says", self.parameter.shape),
                });
            }
        }
        Ok(())
    }

    /// Reads elements `range` of the weights and checks that they round to the model's own copy.
    ///
    /// The check proves that masters and model are from one save and that the order of parameters
    /// in flat groups is correct: another order would give other values.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Mixed`] with the first element that does not round to the copy, or
    /// a read error.
    pub(crate) fn read_weights(&self, range: Range<usize>) -> Result<Vec<f32>, DeepSpeedError> {
        let weights = self.weights.read(range.clone())?;
        for replica in &self.replicas {
            self.check_replica("its weights", &weights, &replica.weights, range.clone())?;
        }
        // Stage 3 and frozen parameters have no second copy to compare.
        let Some(working) = &self.working else { return Ok(weights) };
        let rounded = working.read(range.clone())?;
        let round = |value: f32| match working.element() {
            Some(FloatType::F16) => f16::from_f32(value).to_f32(),
            Some(FloatType::Bf16) => bf16::from_f32(value).to_f32(),
            Some(FloatType::F32) | None => value,
        };
        let same = |(value, copy): (&f32, &f32)| {
            // Bits are compared, because 0 and -0 are equal as numbers but differ in the model.
            // NaNs have many bit patterns.
            round(*value).to_bits() == copy.to_bits() || value.is_nan() && copy.is_nan()
        };
        match weights.iter().zip(&rounded).position(|pair| !same(pair)) {
            None => Ok(weights),
            Some(at) => {
                let path = |it: &Segments| it.path().map(Path::to_owned).unwrap_or_default();
                let reason = format!(
                    "element {} of {} is {}, and {} in the model of {}",
                    range.start + at,
                    self.parameter.name,
                    weights[at],
                    rounded[at],
                    path(working).display()
                );
                Err(DeepSpeedError::mixed(&path(&self.weights), reason))
            }
        }
    }

    /// Reads elements `range` of the array `at` of the optimizer, whose name is `moment`.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Mixed`] if pipeline stages have different values, or a read error.
    pub(crate) fn read_moment(
        &self,
        at: usize,
        moment: &str,
        range: Range<usize>,
    ) -> Result<Vec<f32>, DeepSpeedError> {
        let values = self.moments[at].read(range.clone())?;
        for replica in &self.replicas {
            self.check_replica(moment, &values, &replica.moments[at], range.clone())?;
        }
        Ok(values)
    }

    /// Checks that the copy of an array in another pipeline stage is equal.
    ///
    /// # Errors
    /// Returns [`DeepSpeedError::Mixed`] with the first element that differs.
    fn check_replica(
        &self,
        what: &str,
        values: &[f32],
        replica: &Segments,
        range: Range<usize>,
    ) -> Result<(), DeepSpeedError> {
        let start = range.start;
        let copy = replica.read(range)?;
        let differ = |(value, copy): (&f32, &f32)| value.to_bits() != copy.to_bits();
        let Some(at) = values.iter().zip(&copy).position(differ) else { return Ok(()) };
        let reason = format!(
            "{what}, element {} of the tied {}: {} here and {} in another pipeline stage",
            start + at,
            self.parameter.name,
            copy[at],
            values[at]
        );
        let path = replica.path().map(Path::to_owned).unwrap_or_default();
        Err(DeepSpeedError::mixed(&path, reason))
    }
}

/// Adds the tied names of a model file to their parameters and checks that no name occurs twice.
///
/// # Errors
/// Returns [`DeepSpeedError::Layout`] for a name that occurs twice, or a tied name whose parameter
/// is not listed.
pub(crate) fn tie(model: &ModelStatesFile, stored: &mut [Stored]) -> Result<(), DeepSpeedError> {
    let path = model.path();
    let Some(tied) = &model.tied else {
        return Err(model.contents.root().refuse("a dict with `shared_params`"));
    };
    let layout = |name: &str, found: String, rule: &str| {
        let (path, value, rule) = (path.to_owned(), name.to_owned(), rule.to_owned());
        Err(DeepSpeedError::Layout { path, value, found, rule })
    };
    let mut names = HashMap::new();
    for (at, it) in stored.iter().enumerate() {
        if names.insert(it.parameter.name.clone(), at).is_some() {
            return layout(&it.parameter.name, "listed twice".into(), "listed once");
        }
    }
    let mut aliases = HashSet::new();
    for (alias, name) in tied {
        if names.contains_key(alias) || !aliases.insert(alias) {
            return layout(alias, format!("tied to {name} and listed besides"), "one of the two");
        }
        let Some(at) = names.get(name) else {
            return layout(alias, format!("tied to {name}"), "tied to a parameter that is listed");
        };
        stored[*at].parameter.aliases.push(alias.clone());
    }
    Ok(())
}
