//! Implements `save_16bit_model`, which saves the weights in 16 bits as one safetensors file.
//!
//! Tensors are named by their module path, or by a [`WeightMap`]. They are gathered one at a time
//! while the file is written, so only one complete parameter is in memory. All ranks gather in the
//! order of the file. Rank 0 writes the file and sends the result to the other ranks. If the file
//! cannot be written, every rank returns an error and training can continue. In a pipeline, rank 0
//! receives the parameters of other stages.

mod file_plan;
mod tensor;

use std::path::{Path, PathBuf};

use burn::module::AutodiffModule;
use deepburn_files::safetensors::FloatType;
use deepburn_ops::OptimizerOps;
use deepburn_weights::WeightMap;
use deepburn_zero::Training;

use self::file_plan::{FilePlan, failure};
use self::tensor::SavedTensor;
use crate::engine::guard;
use crate::exchange::{FailureElsewhere, exchange};
use crate::{Engine, EngineError};

/// The element type in which weights are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HalfPrecision {
    /// IEEE half precision; a finite weight beyond 65504 is an error.
    F16,
    /// bfloat16; a finite weight beyond 3.39e38 is an error.
    Bf16,
}

/// The reason why a model was not saved. All ranks fail together.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The engine failed, and the run is over.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The file cannot be written.
    #[error("cannot write {}: {reason}; choose a path in a writable folder", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        reason: String,
    },
    /// A finite weight would become infinite in 16 bits.
    #[error(
        "parameter {path} has a value of magnitude {found:e}, and the largest finite {} is {:e}: {}",
        .float.torch_name(), .float.largest(), remedy_of_overflow(*.float)
    )]
    Overflow {
        /// Module path.
        path: String,
        /// The largest magnitude of its finite values.
        found: f32,
        /// The type of the file.
        float: FloatType,
    },
    /// A tensor has a type that safetensors does not support.
    #[error("{path} is of type {dtype}, which a safetensors file does not hold: cast it before")]
    ElementType {
        /// Module path.
        path: String,
        /// Its element type.
        dtype: &'static str,
    },
    /// The model and the weight map differ.
    #[error("the weight map does not fit the model: {reason}; make the map from this model")]
    Map {
        /// The difference.
        reason: String,
    },
    /// Another rank cannot write its part.
    #[error(transparent)]
    Elsewhere(#[from] FailureElsewhere),
}

/// Returns the type that can represent a weight which `float` cannot.
fn remedy_of_overflow(float: FloatType) -> &'static str {
    match float {
        FloatType::F16 => "save as bf16",
        _ => "save a checkpoint and export it in f32",
    }
}

impl SaveError {
    /// Returns true if training can continue: no file was created, and the engine is unchanged.
    pub fn is_recoverable(&self) -> bool {
        !matches!(self, Self::Engine(_))
    }
}

impl HalfPrecision {
    /// Returns the type of the elements in the file.
    fn float(self) -> FloatType {
        match self {
            Self::F16 => FloatType::F16,
            Self::Bf16 => FloatType::Bf16,
        }
    }
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Writes the model to the safetensors file `path`.
    ///
    /// Float parameters are saved in 16 bits; running statistics, integers and bools keep their
    /// type. Weights that are already infinite or NaN are saved as they are, with a warning that
    /// names the parameter. All ranks call this together and return the same result: `true` once
    /// the complete file exists.
    ///
    /// At stage 3, returns `false` and writes nothing unless
    /// `stage3_gather_16bit_weights_on_model_save` is set, as in DeepSpeed.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written or a weight exceeds the range of the type. An
    /// existing file is kept, and training can continue
    /// ([`is_recoverable`](SaveError::is_recoverable)). The failure of a collective ends the run.
    pub fn save_16bit_model(
        &self,
        path: &Path,
        precision: HalfPrecision,
    ) -> Result<bool, SaveError> {
        self.save_with(path, precision, None)
    }

    /// Returns the map in which all parameters are stored as in the module, under their module
    /// paths. Maps to other programs are made from it.
    pub fn weight_map(&self) -> WeightMap {
        let parameters = self.parameters().iter();
        let parameters = parameters.map(|it| (it.path().to_owned(), it.shape().to_vec()));
        WeightMap::as_trained(parameters).expect("the parameters of a module have different paths")
    }

    /// Writes the model like [`save_16bit_model`](Self::save_16bit_model), as the tensors of `map`,
    /// for example under PyTorch's names and transposed. Tensors that are not in the map are saved
    /// under their module paths.
    ///
    /// # Errors
    /// Returns the errors of [`save_16bit_model`](Self::save_16bit_model), and [`SaveError::Map`]
    /// if model and map differ in a parameter.
    pub fn save_16bit_model_as(
        &self,
        path: &Path,
        precision: HalfPrecision,
        map: &WeightMap,
    ) -> Result<bool, SaveError> {
        self.save_with(path, precision, Some(map))
    }

    /// Saves the model, unless stage 3 may not gather it.
    ///
    /// # Errors
    /// Returns the errors of [`save_16bit_model_as`](Self::save_16bit_model_as).
    fn save_with(
        &self,
        path: &Path,
        precision: HalfPrecision,
        map: Option<&WeightMap>,
    ) -> Result<bool, SaveError> {
        self.check_group()?;
        if self.states().stage().shards_parameters() && !self.settings.gathers_for_saving {
            tracing::warn!(
                "the model was not saved: stage 3 gathers it only with \
                 zero_optimization.stage3_gather_16bit_weights_on_model_save = true"
            );
            return Ok(false);
        }
        let result = self.save_module(path, precision, map);
        match result {
            Err(SaveError::Engine(error)) => Ok(self.note(Err(error))?),
            result => result.map(|()| true),
        }
    }

    /// Gathers the tensors on all ranks, writes the file on rank 0, and sends the result of rank 0
    /// to all ranks.
    ///
    /// # Errors
    /// Returns the error of rank 0, or a failure of a collective.
    fn save_module(
        &self,
        path: &Path,
        precision: HalfPrecision,
        map: Option<&WeightMap>,
    ) -> Result<(), SaveError> {
        self.agree_buffers()?;
        let tensors = SavedTensor::of_module(self.module(), self.buffers(), precision.float())?;
        let plan = FilePlan::new(tensors, map)?;
        self.states().start_saving_pass().map_err(EngineError::from)?;
        let _context = self.states().enter(None);
        let written = if self.rank() == 0 {
            Some(write(path, &plan)?)
        } else {
            // Only rank 0 keeps the values. The others take part in the gathers, in the same order.
            guard(|| plan.tensors().for_each(SavedTensor::gather))?;
            None
        };
        self.states().finish_pass().map_err(EngineError::from)?;
        exchange(self.group(), "16-bit model", written).map(|_| ())
    }
}

/// Writes the file. The outer error ends the run, the inner one does not.
///
/// Every tensor is gathered even after the file has failed. The other ranks take part in all
/// gathers and would wait forever for a gather that this rank skipped.
fn write<B: OptimizerOps>(
    path: &Path,
    plan: &FilePlan<B>,
) -> Result<Result<(), SaveError>, EngineError> {
    let mut file = plan.create(path);
    for tensor in plan.tensors() {
        file = match file {
            Ok(mut file) => {
                let bytes = guard(|| tensor.read())?;
                let written = bytes
                    .and_then(|bytes| plan.write(tensor, &bytes, &mut file).map_err(failure(path)));
                written.map(|()| file)
            }
            Err(error) => {
                guard(|| tensor.gather())?;
                Err(error)
            }
        };
    }
    Ok(file.and_then(|file| file.finish().map_err(failure(path))))
}
