//! The first value of a parameter, which rank 0 draws or reads and the other ranks receive.
//!
//! Burn's parameters are lazy: one that was not used yet has a closure that makes its value. Rank 0
//! runs the closures of one parameter after the other while it shards them, so that no rank ever
//! holds all values. On the other ranks a lazy parameter is taken out of the module without a
//! value. Main type: [`InitialValue`].

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, ParamMapper};
use burn::tensor::{Bool, Int, Tensor};
use burn_backend::{Backend, FloatDType, Shape, TensorMetadata};
use deepburn_comm::{CommError, Tag, panic_message};
use deepburn_ops::OptimizerOps;

use crate::array::DeviceArray;
use crate::error::ZeroError;
use crate::group::Group;
use crate::sharding::Training;

/// What a rank has of a parameter before it is sharded.
pub(crate) enum InitialValue<B: Backend> {
    /// A value, and whether it is trained.
    Present { tensor: B::FloatTensorPrimitive, trainable: bool },
    /// Nothing: the parameter is lazy, and rank 0 makes its value. It will be on this device.
    Absent(B::Device),
}

/// A float parameter that was taken out of its module.
pub(crate) struct TakenParam<B: OptimizerOps, const D: usize> {
    pub(crate) id: ParamId,
    /// What the parameter does when it is loaded and saved.
    pub(crate) mapper: ParamMapper<Tensor<Training<B>, D>>,
    pub(crate) value: InitialValue<B>,
}

impl<B: OptimizerOps, const D: usize> TakenParam<B, D> {
    /// Takes `param` out of the module on `rank`. A lazy parameter is initialised on rank 0 alone,
    /// with one exception: Burn gives out a load mapper only together with the value.
    ///
    /// # Errors
    /// The reason why a closure panicked.
    pub(crate) fn new(param: Param<Tensor<Training<B>, D>>, rank: usize) -> Result<Self, String> {
        if rank != 0 && !param.is_initialized() && !has_load_mapper(&param) {
            return Ok(Self::without_value(param));
        }
        let (id, tensor, mapper) = caught(|| param.consume())?;
        let trainable = tensor.is_require_grad();
        let tensor = tensor.inner().into_primitive().tensor().into_full();
        Ok(Self { id, mapper, value: InitialValue::Present { tensor, trainable } })
    }

    fn without_value(param: Param<Tensor<Training<B>, D>>) -> Self {
        let (id, device) = (param.id, param.lazy_device());
        // Loading a value is Burn's only way at the mapper that does not run the closure.
        let (id, _, mapper) =
            param.transform_for_load(Tensor::zeros([1; D], &device), id).consume();
        Self { id, mapper, value: InitialValue::Absent(device) }
    }
}

/// Whether a load mapper would change what is loaded into `param`. Only the debug text tells.
fn has_load_mapper<B: Backend, const D: usize>(param: &Param<Tensor<B, D>>) -> bool {
    format!("{param:?}").contains("load: true")
}

/// Runs the closure of a lazy parameter, whose only way to fail is a panic.
fn caught<T>(initialise: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(initialise)).map_err(|panic| {
        // The failure of a collective has a type of its own.
        if panic.is::<CommError>() { resume_unwind(panic) } else { panic_message(&*panic) }
    })
}

/// A parameter's value on every rank.
pub(crate) struct Distributed<B: Backend> {
    /// All elements, in their flat order. Ranks of one process may share the allocation.
    pub(crate) flat: B::FloatTensorPrimitive,
    pub(crate) shape: Shape,
    pub(crate) trainable: bool,
}

impl<B: OptimizerOps> InitialValue<B> {
    pub(crate) fn device(&self) -> B::Device {
        match self {
            Self::Present { tensor, .. } => B::float_device(tensor),
            Self::Absent(device) => device.clone(),
        }
    }

    /// Hands the value of rank 0 to all ranks. A parameter of `D` dimensions with an `index` and a
    /// `path`; all ranks call this together.
    ///
    /// # Errors
    /// When the collective fails, or the shape here is not that of rank 0.
    pub(crate) fn distribute<const D: usize>(
        self,
        group: &Group<B>,
        index: usize,
        path: &str,
    ) -> Result<Distributed<B>, ZeroError> {
        let tag = |purpose| Tag::new(purpose, index as u64).naming([path.into()]);
        let own = match &self {
            Self::Present { tensor, trainable } => ShapeRecord::of(&tensor.shape(), *trainable),
            Self::Absent(_) => ShapeRecord(vec![0; D + 1]),
        };
        // What a lazy parameter says of its shape may differ from what its closure makes.
        let first =
            ShapeRecord::read(&group.broadcast_bytes(tag("initial shape"), &own.bytes(), 0)?);
        let (array, record) = match self {
            Self::Present { tensor, .. } if own.shape() == first.shape() => (tensor, own),
            Self::Present { .. } => {
                let (path, found, expected) = (path.to_owned(), own.shape(), first.shape());
                return Err(ZeroError::ShapesDiffer {
                    path,
                    found: found.to_vec(),
                    expected: expected.to_vec(),
                });
            }
            Self::Absent(device) => {
                (elements_to_come::<B>(first.shape().num_elements(), &device), first)
            }
        };
        let array = vec![DeviceArray::Dense(array)];
        let mut values = group.arrays().broadcast(tag("initial weights"), array, 0)?.wait()?;
        let flat = values.swap_remove(0).into_flat();
        Ok(Distributed { flat, shape: record.shape(), trainable: record.trainable() })
    }
}

/// The lengths of a parameter's axes, and at last whether it is trained.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ShapeRecord(Vec<u64>);

impl ShapeRecord {
    fn of(shape: &Shape, trainable: bool) -> Self {
        Self(shape.iter().map(|len| *len as u64).chain([u64::from(trainable)]).collect())
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    fn read(bytes: &[u8]) -> Self {
        Self(bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number)).collect())
    }

    fn shape(&self) -> Shape {
        let axes = &self.0[..self.0.len() - 1];
        Shape::from(axes.iter().map(|len| *len as usize).collect::<Vec<_>>())
    }

    fn trainable(&self) -> bool {
        self.0.last() == Some(&1)
    }
}

/// Says where an array is to be received: a view of one element, which takes no memory.
fn elements_to_come<B: Backend>(numel: usize, device: &B::Device) -> B::FloatTensorPrimitive {
    let shape = |len| Shape::from(vec![len]);
    match numel {
        0 | 1 => B::float_zeros(shape(numel), device, FloatDType::F32),
        _ => B::float_expand(B::float_zeros(shape(1), device, FloatDType::F32), shape(numel)),
    }
}

/// A clone of `module` in which each lazy float is a single zero, so that nothing is initialised by what
/// is done with it. It shares running statistics with `module`, as every clone does.
pub(crate) fn without_lazy_values<B: OptimizerOps, M: Module<Training<B>>>(module: &M) -> M {
    module.clone().map(&mut LazyToZero)
}

struct LazyToZero;

impl<B: OptimizerOps> ModuleMapper<Training<B>> for LazyToZero {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Param<Tensor<Training<B>, D>> {
        if param.is_initialized() {
            return param;
        }
        let zero = Tensor::zeros([1; D], &param.lazy_device()).require_grad();
        Param::initialized(param.id, zero)
    }
}

/// Makes the values of lazy integer and bool parameters, which all ranks keep whole, and tells whether
/// a float of `module` is initialised.
pub(crate) fn initialise_constants<B: OptimizerOps, M: Module<Training<B>>>(module: &M) -> bool {
    let mut constants = Constants { has_float: false };
    module.visit(&mut constants);
    constants.has_float
}

struct Constants {
    has_float: bool,
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for Constants {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        self.has_float |= param.is_initialized();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Int>>) {
        drop(param.val());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Bool>>) {
        drop(param.val());
    }
}
