//! A tensor to be saved: its path, its type in the file, and access to its values.

use std::borrow::Cow;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, Bool, DType, Int, Tensor, TensorData, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use deepburn_checkpoint::ElementType;
use deepburn_files::safetensors::FloatType;
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Buffer, Training, Zero};

use super::SaveError;
use crate::checkpoint::element::element_type;

/// A tensor whose values have not been read yet.
pub(super) struct SavedTensor<B: OptimizerOps> {
    /// Module path.
    pub(super) path: String,
    /// Type in the file.
    pub(super) element: ElementType,
    /// Shape, in Burn's order of dimensions.
    pub(super) shape: Vec<usize>,
    /// Access to the values, which may be a collective.
    values: TensorSource<B>,
}

/// The source of a tensor's bytes.
enum TensorSource<B: OptimizerOps> {
    /// A float parameter, sharded or replicated, saved in 16 bits.
    Half(FloatTensor<Zero<B>>, FloatType),
    /// A tensor that every rank holds, saved in its own type.
    Exact(Box<dyn Fn() -> TensorData>),
}

impl<B: OptimizerOps> SavedTensor<B> {
    /// Lists all parameters and buffers of a module in file order, which is the same on all ranks:
    /// by alignment, as the safetensors format recommends, then by path.
    ///
    /// # Errors
    /// Returns an error if a tensor has a type that safetensors does not support.
    pub(super) fn of_module<M: Module<Training<B>>>(
        module: &M,
        buffers: &[Buffer],
        float: FloatType,
    ) -> Result<Vec<Self>, SaveError> {
        let mut found = Visitor { buffers, path: Vec::new(), float, found: Ok(Vec::new()) };
        module.visit(&mut found);
        let mut tensors = found.found?;
        tensors.sort_by_cached_key(|tensor| (tensor.element.file_order(), tensor.path.clone()));
        Ok(tensors)
    }

    /// Takes part in gathering the values and drops them, for ranks that do not write the file.
    /// Copies nothing if the tensor is not sharded.
    pub(super) fn gather(&self) {
        if let TensorSource::Half(tensor, _) = &self.values {
            tensor.clone().take_part_in_reading();
        }
    }

    /// Returns the bytes for the file, gathered from all ranks if the tensor is sharded.
    ///
    /// # Errors
    /// Returns an error if a value exceeds the range of the type.
    pub(super) fn read(&self) -> Result<Vec<u8>, SaveError> {
        match &self.values {
            TensorSource::Half(tensor, float) => self.rounded(&floats(tensor), *float),
            TensorSource::Exact(read) => {
                let data = read();
                // The size of a bool depends on the device; the file has one byte per bool.
                Ok(match data.dtype {
                    DType::Bool(_) => data.iter::<bool>().map(u8::from).collect(),
                    _ => data.as_bytes().to_vec(),
                })
            }
        }
    }

    /// Rounds f32 values to the nearest 16-bit value. Values that are already infinite or NaN are
    /// kept, with a warning.
    ///
    /// # Errors
    /// Returns an error if a finite value would become infinite.
    fn rounded(&self, values: &TensorData, float: FloatType) -> Result<Vec<u8>, SaveError> {
        let values = match values.as_slice::<f32>() {
            Ok(values) => Cow::Borrowed(values),
            Err(_) => Cow::Owned(values.iter::<f32>().collect()),
        };
        if let Some(found) = float.overflow(&values) {
            return Err(SaveError::Overflow { path: self.path.clone(), found, float });
        }
        let count = values.iter().filter(|value| !value.is_finite()).count();
        if count > 0 {
            let (path, total) = (&self.path, values.len());
            tracing::warn!(
                "parameter {path}: {count} of {total} values are infinite or NaN, and are saved as they are"
            );
        }
        let mut bytes = Vec::with_capacity(values.len() * float.size());
        float.encode(&values, &mut bytes);
        Ok(bytes)
    }
}

/// Returns all values of a float tensor as flat data.
fn floats<B: OptimizerOps>(tensor: &FloatTensor<Zero<B>>) -> TensorData {
    let count = burn_backend::TensorMetadata::shape(tensor).num_elements();
    let shape = burn_backend::Shape::from(vec![count]);
    let flat = <Zero<B> as FloatTensorOps<Zero<B>>>::float_reshape(tensor.clone(), shape);
    Tensor::<Zero<B>, 1>::new(TensorPrimitive::Float(flat)).into_data()
}

/// A module visitor that collects the tensors to save.
struct Visitor<'a, B: OptimizerOps> {
    /// The buffers, which keep their type even if they are floats.
    buffers: &'a [Buffer],
    /// The names of the fields around the current one.
    path: Vec<String>,
    /// The type of float parameters in the file.
    float: FloatType,
    /// The tensors so far, or the first error.
    found: Result<Vec<SavedTensor<B>>, SaveError>,
}

impl<B: OptimizerOps> Visitor<'_, B> {
    /// Adds a tensor at the current path.
    fn enter(&mut self, element: ElementType, shape: Vec<usize>, values: TensorSource<B>) {
        if let Ok(found) = &mut self.found {
            found.push(SavedTensor { path: self.path.join("."), element, shape, values });
        }
    }

    /// Adds a tensor that keeps its own type. `read` returns its values when the file is written.
    fn enter_exact<T: Backend, const D: usize, K: BasicOps<T> + 'static>(
        &mut self,
        tensor: Tensor<T, D, K>,
    ) {
        let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
        let read = move || tensor.to_data();
        match element_type(dtype) {
            Ok(element) => self.enter(element, shape, TensorSource::Exact(Box::new(read))),
            Err(_) => {
                let path = self.path.join(".");
                self.found = Err(SaveError::ElementType { path, dtype: dtype.name() });
            }
        }
    }
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for Visitor<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        let value = param.val().inner();
        let path = self.path.join(".");
        // Running statistics are float parameters to Burn, and rounding them would change
        // evaluations.
        if self.buffers.iter().any(|buffer| buffer.path() == path) {
            return self.enter_exact(value);
        }
        let shape = value.dims().to_vec();
        let source = TensorSource::Half(value.into_primitive().tensor(), self.float);
        self.enter(self.float.element(), shape, source);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Int>>) {
        self.enter_exact(param.val());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Bool>>) {
        self.enter_exact(param.val());
    }
}
