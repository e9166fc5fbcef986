//! `save_16bit_model`: the weights alone, in 16 bits, as one safetensors file.
//!
//! Tensors are named by their module path and gathered one at a time while the file is written:
//! memory is one parameter, not the model. All ranks read in the order of the file; rank 0 writes.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Training, Zero, ZeroTensor};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, View};

use crate::engine::guard;
use crate::{Engine, EngineError};

/// The type in which weights are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HalfPrecision {
    /// IEEE half precision; a weight beyond 65504 is an error.
    F16,
    /// bfloat16.
    Bf16,
}

/// Why a model was not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// Gathering it failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The file cannot be written.
    #[error("{}: cannot be written ({reason}); give a path in a folder that can", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// A weight has no place in the type.
    #[error("parameter {path} has a value that f16 cannot hold (beyond 65504): save as bf16")]
    Overflow {
        /// Module path.
        path: String,
    },
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Writes the weights in 16 bits to the safetensors file `path`. All ranks call this together.
    ///
    /// Returns false and writes nothing at stage 3 unless the configuration sets
    /// `stage3_gather_16bit_weights_on_model_save`, as DeepSpeed does.
    ///
    /// # Errors
    /// When the file cannot be written, a weight does not fit the type, or a collective fails.
    /// Then there is no file, or the one that was there before.
    pub fn save_16bit_model(
        &self,
        path: &Path,
        precision: HalfPrecision,
    ) -> Result<bool, SaveError> {
        if self.states().stage().shards_parameters() && !self.gathers_for_saving() {
            tracing::warn!(
                "the model was not saved: stage 3 gathers it only with \
                 zero_optimization.stage3_gather_16bit_weights_on_model_save = true"
            );
            return Ok(false);
        }
        self.agree_buffers()?;
        self.states().start_saving_pass().map_err(EngineError::from)?;
        let mut handles = Handles { path: Vec::new(), found: Vec::new() };
        self.module().visit(&mut handles);
        handles.found.sort_by(|(left, _), (right, _)| left.cmp(right));

        let overflow = RefCell::new(None);
        let views = handles.found.into_iter().map(|(path, tensor)| {
            let shape = tensor.dims();
            (path.clone(), Half { path, tensor, shape, precision, overflow: &overflow })
        });
        let views: Vec<_> = views.collect();
        let written = if self.rank() == 0 {
            self.write(path, views, &overflow)
        } else {
            guard(|| views.iter().for_each(|(_, view)| drop(view.tensor.read())))
                .map_err(Into::into)
        };
        self.states().finish_pass().map_err(EngineError::from)?;
        written.map(|()| true)
    }

    /// Writes a sibling first and renames it when it is complete.
    fn write(
        &self,
        path: &Path,
        views: Vec<(String, Half<'_, B>)>,
        overflow: &RefCell<Option<String>>,
    ) -> Result<(), SaveError> {
        let partial = path.with_extension("partial");
        let failed = |reason: String| SaveError::File { path: path.to_owned(), reason };
        let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
        let names: Vec<_> = views.iter().map(|(_, view)| view.tensor.clone()).collect();
        let written = guard(|| safetensors::serialize_to_file(views, Some(metadata), &partial))?;
        if written.is_err() && !partial.exists() {
            // Nothing was read yet: keep the other ranks, which read everything, company.
            guard(|| names.iter().for_each(|tensor| drop(tensor.read())))?;
        }
        let result = match (written, overflow.borrow_mut().take()) {
            (Err(error), _) => Err(failed(error.to_string())),
            (Ok(()), Some(path)) => Err(SaveError::Overflow { path }),
            (Ok(()), None) => fs::rename(&partial, path).map_err(|error| failed(error.to_string())),
        };
        if result.is_err() {
            // Best effort: the error that is reported matters more than this one.
            let _ = fs::remove_file(&partial);
        }
        result
    }
}

/// A parameter or buffer that has not been read.
#[derive(Clone)]
struct Handle<B: Backend>(ZeroTensor<B>);

impl<B: Backend> Handle<B> {
    fn dims(&self) -> Vec<usize> {
        burn_backend::TensorMetadata::shape(&self.0).to_vec()
    }

    /// All values, gathered from all ranks where they are sharded.
    fn read(&self) -> Vec<f32> {
        let count = self.dims().iter().product::<usize>();
        let flat = Tensor::<Zero<B>, 1>::new(TensorPrimitive::Float(
            <Zero<B> as burn_backend::ops::FloatTensorOps<Zero<B>>>::float_reshape(
                self.0.clone(),
                burn_backend::Shape::from(vec![count]),
            ),
        ));
        flat.into_data().iter::<f32>().collect()
    }
}

/// Collects handles by module path.
struct Handles<B: Backend> {
    path: Vec<String>,
    found: Vec<(String, Handle<B>)>,
}

impl<B: Backend> ModuleVisitor<Training<B>> for Handles<B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        let tensor = param.val().inner().into_primitive().tensor();
        self.found.push((self.path.join("."), Handle(tensor)));
    }
}

/// A tensor that becomes 16-bit data when it is written.
struct Half<'a, B: Backend> {
    path: String,
    tensor: Handle<B>,
    shape: Vec<usize>,
    precision: HalfPrecision,
    overflow: &'a RefCell<Option<String>>,
}

impl<B: Backend> View for Half<'_, B> {
    fn dtype(&self) -> Dtype {
        match self.precision {
            HalfPrecision::F16 => Dtype::F16,
            HalfPrecision::Bf16 => Dtype::BF16,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = self.tensor.read();
        let bytes = match self.precision {
            HalfPrecision::F16 => values
                .iter()
                .flat_map(|value| {
                    let half = f16::from_f32(*value);
                    if half.is_infinite() && value.is_finite() {
                        self.overflow.borrow_mut().get_or_insert_with(|| self.path.clone());
                    }
                    half.to_le_bytes()
                })
                .collect(),
            HalfPrecision::Bf16 => {
                values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect()
            }
        };
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * 2
    }
}
