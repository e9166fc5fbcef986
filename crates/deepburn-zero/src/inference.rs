//! Modules for inference whose matrices are held in the formats of GGUF files.
//!
//! Main function: [`encoded`]. It replaces matrices of a module with handles to encoded ones. Ops
//! that can use the blocks get them, as with the quantized parameters of a trained model; all
//! others get the elements. No model is bound to the thread, so [`Zero`] is a plain wrapper around
//! the backend, and nothing is trained or sharded.
//!
//! `deepburn-kernels/src/quantized/rows.rs` has the formats. Blocks lie along the axis over which a
//! product adds, so the weight of a linear layer, `[in, out]`, is stored column by column
//! ([`RowOrder`]). A product with one vector reads the blocks; all other ops decode them. Models
//! need no code for this.

use std::sync::Arc;

use burn_backend::{Bytes, DType, Shape, TensorData};
use bytemuck::cast_slice;
use deepburn_comm::Partition;
use deepburn_kernels::RowEncoding;
use deepburn_ops::{OptimizerOps, float_bytes, float_from_host};

use crate::decorator::{PlacedTensor, Zero, ZeroTensor};
use crate::holders::Holders;
use crate::ledger::Ledger;
use crate::module::{Module, ModuleMapper, ModulePath, Param, Tensor, TensorPrimitive, keep_path};
use crate::parameter::{Description, Parameter, Role, RowOrder, Storage};
use crate::sharding::caught;

/// The elements of a matrix in blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedMatrix {
    /// The format.
    pub format: RowEncoding,
    /// Which elements follow each other.
    pub order: RowOrder,
    /// The blocks, as 32-bit words.
    pub words: Vec<u32>,
}

/// A parameter of two dimensions that may be encoded.
pub struct Candidate<'a> {
    /// The module path.
    pub path: &'a str,
    /// The rows and columns.
    pub shape: [usize; 2],
    values: &'a dyn Fn() -> Result<Vec<f32>, String>,
}

impl Candidate<'_> {
    /// Returns the elements in row-major order. A lazy parameter is initialized for this, and
    /// dropped if it is encoded.
    ///
    /// # Errors
    /// Returns the reason if the initial value cannot be created, for example because its file
    /// cannot be read.
    pub fn values(&self) -> Result<Vec<f32>, String> {
        (self.values)()
    }
}

/// Replaces matrices of `module` with encoded ones. `encode` is called with each parameter of two
/// dimensions, and returns `None` for one that stays as it is. One matrix at a time is in memory in
/// f32.
///
/// # Errors
/// Returns the first error of `encode`.
///
/// # Panics
/// Panics if the number of words is not the one of the parameter.
pub fn encoded<B: OptimizerOps, M: Module<Zero<B>>, E>(
    module: M,
    encode: impl FnMut(&Candidate<'_>) -> Result<Option<EncodedMatrix>, E>,
) -> Result<M, E> {
    let mut replacer =
        MatrixReplacer { encode, path: ModulePath::default(), count: 0, failure: None };
    let module = module.map(&mut replacer);
    match replacer.failure {
        Some(failure) => Err(failure),
        None => Ok(module),
    }
}

/// The mapper that replaces matrices.
struct MatrixReplacer<F, E> {
    encode: F,
    /// The path of the current module or parameter.
    path: ModulePath,
    /// The number of matrices so far.
    count: usize,
    /// The first error. A module mapper cannot return an error, so the rest of the module is passed
    /// through unchanged.
    failure: Option<E>,
}

impl<B, F, E> ModuleMapper<Zero<B>> for MatrixReplacer<F, E>
where
    B: OptimizerOps,
    F: FnMut(&Candidate<'_>) -> Result<Option<EncodedMatrix>, E>,
{
    keep_path!();

    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Zero<B>, D>>,
    ) -> Param<Tensor<Zero<B>, D>> {
        let shape = param.lazy_shape();
        // Only matrices have encoded forms. After a failure, the module is dropped.
        let (Ok(shape), None) = (<[usize; 2]>::try_from(shape.as_slice()), &self.failure) else {
            return param;
        };
        let path = self.path.joined();
        // A lazy parameter is read through a copy, which is dropped with its value.
        let values = || caught(|| values_of(param.clone().val()));
        match (self.encode)(&Candidate { path: &path, shape, values: &values }) {
            Ok(None) => param,
            Ok(Some(matrix)) => {
                let parameter = matrix.parameter::<B>(self.count, path, shape, param.lazy_device());
                self.count += 1;
                let primitive = TensorPrimitive::Float(PlacedTensor::Everywhere(
                    ZeroTensor::parameter(Arc::new(parameter)),
                ));
                Param::initialized(param.id, Tensor::from_primitive(primitive))
            }
            Err(error) => {
                self.failure = Some(error);
                param
            }
        }
    }
}

/// Returns the elements of a tensor.
fn values_of<B: OptimizerOps, const D: usize>(tensor: Tensor<Zero<B>, D>) -> Vec<f32> {
    let bytes = float_bytes::<B>(
        tensor.cast(DType::F32).into_primitive().tensor().into_value().into_full(),
    );
    cast_slice(&bytes).to_vec()
}

impl EncodedMatrix {
    /// Returns the parameter number `index` of a module, which has these elements.
    fn parameter<B: OptimizerOps>(
        self,
        index: usize,
        path: String,
        shape: [usize; 2],
        device: B::Device,
    ) -> Parameter<B> {
        let Self { format, order, words } = self;
        let (storage, count) = (Storage::Encoded { format, order }, words.len());
        let data = TensorData::from_bytes(Bytes::from_elems(words), vec![count], DType::F32);
        let words = float_from_host::<B>(data, &device);
        let description = Description {
            index,
            path: path.into(),
            shape: Shape::from(shape),
            dtype: DType::F32,
            device,
            storage,
            partition: Partition::new(count, 1),
            trainable: false,
            homes: Holders::ALL,
            role: Role::Owner,
        };
        Parameter::whole(description, words, Ledger::new())
    }
}
