//! Distribution of initial parameter values: rank 0 generates or loads them, and the other ranks
//! receive them.
//!
//! Burn's parameters are lazy: until its first use, a parameter is a closure that creates the
//! value. Rank 0 runs these closures one after the other while it shards the parameters, so at
//! stage 3 no rank ever holds the complete model. While rank 0 computes a value, the other ranks
//! wait. On these ranks a lazy parameter is removed from the module without being initialized. Main
//! type: [`InitialValue`].
//!
//! ```text
//!           rank 0                          other ranks
//!  take     run the closure, f32 value      keep id and mapper, no value
//!  exchange broadcast shape, trainability   compare with own value or declared shape
//!  quantize a frozen matrix, if planned
//!  exchange broadcast the elements or blocks receive them
//!  shard    keep the owned slice, drop the rest
//! ```
//!
//! Declared shapes are not trusted, because an init mapper may change them: the shape of rank 0's
//! value counts. A closure cannot return an error. If it panics on rank 0, all ranks end with an
//! error that names the parameter.
//!
//! Modules that are initialized on all ranks are supported too, but need the memory of the whole
//! model. Their shapes must be the same on all ranks, and the values of rank 0 replace the values
//! of the other ranks. Parameters with a load mapper (a column-major `Linear`) are always
//! initialized on all ranks (`TakenParam::new`).

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn_backend::{Backend, FloatDType, Shape, TensorMetadata};
use bytemuck::{Pod, cast_slice};
use deepburn_comm::{CollectiveTag, CommError, panic_message};
use deepburn_kernels::{BlockFormat, Element};
use deepburn_ops::{OptimizerOps, float_bytes, is_without_data, quantize};
use half::{bf16, f16};

use crate::decorator::Training;
use crate::error::ZeroError;
use crate::group::{DeviceArray, Group, elements_to_come};
use crate::holders::Holders;
use crate::module::{
    Bool, Int, Module, ModuleMapper, ModuleVisitor, Param, ParamId, ParamMapper, Tensor,
};
use crate::parameter::Storage;
use crate::pipeline::ParameterHomes;

/// The state of a parameter on one rank before it is sharded.
pub(crate) enum InitialValue<B: Backend> {
    /// An initialized parameter, and whether it is trained. `declared` is the declared shape of a
    /// lazy parameter, and `None` if the parameter was already initialized. The value can have
    /// another shape than declared if the parameter has an init mapper.
    Present { tensor: B::FloatTensorPrimitive, trainable: bool, declared: Option<Shape> },
    /// A lazy parameter, whose value rank 0 creates. `device` is the device on which the value will
    /// be stored.
    Absent { device: B::Device, declared: Shape },
}

/// A float parameter that was taken out of its module.
pub(crate) struct TakenParam<B: OptimizerOps, const D: usize> {
    /// Burn's id. Tied parameters have the same id within a process.
    pub(crate) id: ParamId,
    /// The conversions that the parameter applies when it is loaded and saved.
    pub(crate) mapper: ParamMapper<Tensor<Training<B>, D>>,
    /// The value, if this rank has one.
    pub(crate) value: InitialValue<B>,
}

impl<B: OptimizerOps, const D: usize> TakenParam<B, D> {
    /// Takes `param` out of the module on `rank`.
    ///
    /// A lazy parameter is initialized on rank 0 only. A parameter with a load mapper is
    /// initialized on all ranks, because Burn returns the mapper only together with the value.
    ///
    /// # Errors
    /// Returns the panic message if the parameter's closure panics.
    pub(crate) fn new(param: Param<Tensor<Training<B>, D>>, rank: usize) -> Result<Self, String> {
        // Without data, a value costs nothing, and a simulated rank receives its own.
        let receives = rank != 0 && !is_without_data::<B>();
        if receives && !param.is_initialized() && !has_load_mapper(&param) {
            return Ok(Self::without_value(param));
        }
        // The shape is read before the closure runs, which makes the parameter an initialized one.
        let declared = (!param.is_initialized()).then(|| param.lazy_shape());
        let (id, tensor, mapper) = caught(|| param.consume())?;
        let trainable = tensor.is_require_grad();
        let tensor = tensor.inner().into_primitive().tensor().into_value().into_full();
        Ok(Self { id, mapper, value: InitialValue::Present { tensor, trainable, declared } })
    }

    /// Takes a lazy parameter out of the module without running its closure.
    fn without_value(param: Param<Tensor<Training<B>, D>>) -> Self {
        let (id, device, declared) = (param.id, param.lazy_device(), param.lazy_shape());
        // Loading a value is the only way in Burn to get the mapper without running the closure.
        let (id, _, mapper) =
            param.transform_for_load(Tensor::zeros([1; D], &device), id).consume();
        Self { id, mapper, value: InitialValue::Absent { device, declared } }
    }
}

/// Returns true if the parameter has a load mapper, which changes loaded values. Burn exposes this
/// only in the `Debug` output.
fn has_load_mapper<B: Backend, const D: usize>(param: &Param<Tensor<B, D>>) -> bool {
    format!("{param:?}").contains("load: true")
}

/// Runs the closure of a lazy parameter and converts a panic to an error. The closure has no other
/// way to report errors.
pub(crate) fn caught<T>(initialize: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(initialize)).map_err(|panic| {
        // A failed collective panics with a `CommError`, which is passed on.
        if panic.is::<CommError>() { resume_unwind(panic) } else { panic_message(&*panic) }
    })
}

/// The value of a parameter whose shape and trainability are the same on every rank. Only rank 0
/// needs to have its elements.
pub(crate) struct Announced<B: Backend> {
    /// The elements; `None` on a rank that receives them.
    tensor: Option<B::FloatTensorPrimitive>,
    /// The device on which the value is stored.
    device: B::Device,
    /// The shape and the trainability of the value on rank 0.
    header: BroadcastHeader,
}

impl<B: OptimizerOps> Announced<B> {
    /// Returns the shape of the value on rank 0.
    pub(crate) fn shape(&self) -> &Shape {
        &self.header.shape
    }

    /// Returns the device on which the value is stored.
    pub(crate) fn device(&self) -> &B::Device {
        &self.device
    }

    /// Returns whether it requires a gradient on rank 0.
    pub(crate) fn is_trainable(&self) -> bool {
        self.header.trainable
    }

    /// Distributes the elements of rank 0 to the ranks of pipeline stages, and returns them in flat
    /// order. With a `format`, rank 0 quantizes them first, and hashes them in the type in which
    /// ops compute. Rank threads of one process may share the allocation. All ranks that take part
    /// call this together, with the same arguments.
    ///
    /// # Errors
    /// Returns an error if the collective fails.
    pub(crate) fn distribute(
        self,
        (route, stages): (&ParameterHomes<'_, B>, Holders),
        index: usize,
        path: &str,
        (format, compute): (Option<BlockFormat>, FloatDType),
    ) -> Result<(B::FloatTensorPrimitive, Storage), ZeroError> {
        let tag = |purpose| CollectiveTag::new(purpose, index as u64).naming([path.into()]);
        let numel = self.header.shape.num_elements();
        let to_come = |len| elements_to_come::<B>(len, FloatDType::F32, &self.device);
        let (array, storage) = match format {
            None => (self.tensor.unwrap_or_else(|| to_come(numel)), Storage::Plain),
            Some(format) => {
                // Other ranks may have values too, but only the ones of rank 0 are used.
                let own = self.tensor.filter(|_| route.groups.world().rank() == 0);
                let hash = own.clone().map_or([0; 32], |it| hash_in_type::<B>(it, compute));
                // The other ranks cannot compute the hash, because they receive blocks and not the
                // elements.
                let hash = route.distribute_bytes(stages, tag("hash of initial weights"), &hash)?;
                let original = hash.try_into().unwrap_or([0; 32]);
                let words = own.map(|it| quantize::<B>(it, format));
                let words = words.unwrap_or_else(|| to_come(format.words(numel)));
                (words, Storage::Blocks { format, original: Some(original) })
            }
        };
        let array = DeviceArray::Dense(array);
        let value = route.distribute(stages, tag("initial weights"), array)?;
        Ok((value.into_flat(), storage))
    }
}

/// The number of elements that are converted at a time to be hashed.
const HASHED_AT_A_TIME: usize = 1 << 20;

/// Returns the BLAKE3 hash of f32 elements after they were rounded to `dtype`. Tensors without data
/// have a hash of zeros.
fn hash_in_type<B: Backend>(tensor: B::FloatTensorPrimitive, dtype: FloatDType) -> [u8; 32] {
    /// Hashes elements in a 16-bit type.
    fn rounded<E: Element + Pod>(values: &[f32], hasher: &mut blake3::Hasher) {
        let mut room = vec![E::zeroed(); HASHED_AT_A_TIME.min(values.len())];
        // The rounded elements exist in pieces, so that there is no second copy of a whole matrix.
        for values in values.chunks(HASHED_AT_A_TIME) {
            let room = &mut room[..values.len()];
            E::narrow_all(values, room);
            hasher.update(cast_slice(room));
        }
    }
    if is_without_data::<B>() {
        return [0; 32];
    }
    let bytes = float_bytes::<B>(tensor);
    let mut hasher = blake3::Hasher::new();
    match dtype {
        FloatDType::F16 => rounded::<f16>(cast_slice(&bytes), &mut hasher),
        FloatDType::BF16 => rounded::<bf16>(cast_slice(&bytes), &mut hasher),
        _ => {
            hasher.update(&bytes);
        }
    }
    *hasher.finalize().as_bytes()
}

impl<B: OptimizerOps> InitialValue<B> {
    /// Returns the device of the value, or the device on which it will be stored.
    pub(crate) fn device(&self) -> B::Device {
        match self {
            Self::Present { tensor, .. } => B::float_device(tensor),
            Self::Absent { device, .. } => device.clone(),
        }
    }

    /// Broadcasts the shape and the trainability of rank 0's value. `index` and `path` identify the
    /// parameter, which has `D` dimensions. All ranks call this together.
    ///
    /// # Errors
    /// Returns an error if the collective fails, or if the shape or the trainability on this rank
    /// differs from rank 0's.
    pub(crate) fn announce<const D: usize>(
        self,
        group: &Group<B>,
        index: usize,
        path: &str,
    ) -> Result<Announced<B>, ZeroError> {
        let tag = CollectiveTag::new("initial shape", index as u64).naming([path.into()]);
        let own = self.description::<D>();
        let bytes = group.broadcast_bytes(tag, &own.bytes(), 0)?;
        let first = BroadcastHeader::read::<D>(&bytes);
        let device = self.device();
        let tensor = match self {
            Self::Present { tensor, trainable, .. } => {
                same_shape(path, &own.shape, &first.shape)?;
                if trainable != first.trainable {
                    let path = path.to_owned();
                    return Err(ZeroError::TrainabilityDiffers { path, trainable });
                }
                Some(tensor)
            }
            Self::Absent { declared, .. } => {
                // An init mapper may change the shape, so a declared shape can only be compared
                // with another declared shape. A value always has the declared number of elements.
                match &first.declared {
                    Some(first) => same_shape(path, &declared, first)?,
                    None if declared.num_elements() == first.shape.num_elements() => {}
                    None => same_shape(path, &declared, &first.shape)?,
                }
                None
            }
        };
        Ok(Announced { tensor, device, header: first })
    }

    /// Describes this value of `D` dimensions. The shape of an absent value is all zeros. It is
    /// never used, because rank 0 has all values and only its description is broadcast.
    fn description<const D: usize>(&self) -> BroadcastHeader {
        match self {
            Self::Present { tensor, trainable, declared } => BroadcastHeader {
                shape: tensor.shape(),
                trainable: *trainable,
                declared: declared.clone(),
            },
            Self::Absent { declared, .. } => BroadcastHeader {
                shape: Shape::from([0; D]),
                trainable: false,
                declared: Some(declared.clone()),
            },
        }
    }
}

/// Returns an error if the shape of the parameter at `path` differs from rank 0's.
fn same_shape(path: &str, here: &Shape, first: &Shape) -> Result<(), ZeroError> {
    if here == first {
        return Ok(());
    }
    let (path, found, expected) = (path.to_owned(), here.to_vec(), first.to_vec());
    Err(ZeroError::ShapesDiffer { path, found, expected })
}

/// The metadata of a parameter, which rank 0 broadcasts before the elements.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BroadcastHeader {
    /// The shape of the value.
    shape: Shape,
    /// Whether the parameter is trained.
    trainable: bool,
    /// The declared shape, if the parameter was lazy.
    declared: Option<Shape>,
}

impl BroadcastHeader {
    /// Encodes the header as little-endian `u64` words: the dimensions of the value, 1 if the
    /// parameter is trained and 0 otherwise, and the declared dimensions. Without a declared shape,
    /// these are `u64::MAX`, because the messages of all ranks must have the same length.
    fn bytes(&self) -> Vec<u8> {
        let axes = |shape: &Shape| shape.iter().map(|len| *len as u64).collect::<Vec<_>>();
        let value = axes(&self.shape);
        let declared = self.declared.as_ref().map_or(vec![u64::MAX; value.len()], axes);
        let words = value.into_iter().chain([u64::from(self.trainable)]).chain(declared);
        words.flat_map(u64::to_le_bytes).collect()
    }

    /// Decodes the [`bytes`](Self::bytes) of rank 0 for a parameter of `D` dimensions.
    fn read<const D: usize>(bytes: &[u8]) -> Self {
        let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let words: Vec<u64> = words.collect();
        let axes =
            |words: &[u64]| Shape::from(words.iter().map(|len| *len as usize).collect::<Vec<_>>());
        let declared = &words[D + 1..];
        Self {
            shape: axes(&words[..D]),
            trainable: words[D] == 1,
            declared: (!declared.contains(&u64::MAX)).then(|| axes(declared)),
        }
    }
}

/// Returns a clone of `module` in which each lazy float parameter is a single zero, so that no
/// operation on the clone initializes a parameter. The clone shares running statistics with
/// `module`.
pub(crate) fn without_lazy_values<B: OptimizerOps, M: Module<Training<B>>>(module: &M) -> M {
    module.clone().map(&mut LazyToZero)
}

/// A mapper that replaces each lazy float parameter with a single zero.
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

/// Initializes lazy integer and bool parameters, which are not sharded. Returns true if a float
/// parameter of `module` is already initialized.
pub(crate) fn initialize_constants<B: OptimizerOps, M: Module<Training<B>>>(module: &M) -> bool {
    let mut constants = Constants { has_float: false };
    module.visit(&mut constants);
    constants.has_float
}

/// A visitor that initializes integer and bool parameters.
struct Constants {
    /// Whether an initialized float parameter was visited.
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
