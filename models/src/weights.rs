//! Initial weights: random values, values from a file, or zeros.
//!
//! Main type: [`WeightInit`]. Shapes and the distributions of random values are in the model's [`WeightMap`]. Random
//! values are generated on the host, with the seed and the parameter's path as the key of the generator. They do not
//! depend on the device, the order in which parameters are created or the number of threads. Each parameter is lazy: its values are created on first use. Sharded training relies on this, because it
//! moves most parameters out of the module before memory is allocated for them.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use deepburn_weights::{InitialValues, Origin, WeightMap};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_distr::{Distribution, StandardNormal};

/// A function that reads the values of the parameter at a module path. It panics with the error message if they cannot
/// be read.
pub(crate) type ReadWeights = dyn Fn(&str) -> Vec<f32> + Send + Sync;

/// The public path of each parameter, by its path in the module. Parameters that are not listed have one path.
pub(crate) type Paths = Arc<HashMap<String, String>>;

/// The source of a model's initial values.
#[derive(Clone)]
enum WeightSource {
    /// Random values from a generator with this seed.
    Seed(u64),
    /// Read from weight files.
    File(Arc<ReadWeights>),
    /// Zeros for every parameter, regardless of its [`InitialValues`].
    Zeros,
}

/// Creates the parameters of one model.
#[derive(Debug)]
pub(crate) struct WeightInit<'a, B: Backend> {
    /// The source of the values of all parameters.
    source: WeightSource,
    /// The parameters.
    map: WeightMap,
    /// The paths in the map of parameters that have another path in the module.
    paths: Paths,
    /// The device of the parameters.
    device: &'a B::Device,
}

impl<'a, B: Backend> WeightInit<'a, B> {
    /// Returns an initialiser with random values.
    pub(crate) fn new(map: WeightMap, seed: u64, device: &'a B::Device) -> Self {
        Self::from_source(WeightSource::Seed(seed), map, device)
    }

    /// Returns an initialiser that reads values from weight files.
    pub(crate) fn reading(map: WeightMap, read: Arc<ReadWeights>, device: &'a B::Device) -> Self {
        Self::from_source(WeightSource::File(read), map, device)
    }

    /// Returns an initialiser with zeros, for a model whose weights will be overwritten.
    pub(crate) fn zeros(map: WeightMap, device: &'a B::Device) -> Self {
        Self::from_source(WeightSource::Zeros, map, device)
    }

    fn from_source(source: WeightSource, map: WeightMap, device: &'a B::Device) -> Self {
        Self { source, map, paths: Paths::default(), device }
    }

    /// Returns the initialiser of a module whose parameters have the keys of `paths` as their module paths.
    pub(crate) fn with_paths(self, paths: Paths) -> Self {
        Self { paths, ..self }
    }

    /// Returns the parameter at module path `path`; `None` if the map has none, or if it is tied to another parameter.
    ///
    /// # Panics
    /// Panics if the parameter does not have `D` dimensions.
    pub(crate) fn optional_param<const D: usize>(&self, path: &str) -> Option<Param<Tensor<B, D>>> {
        let weight = self.map.get(self.path_in_map(path))?;
        (!matches!(weight.origin(), Origin::Tied { .. })).then(|| self.param(path))
    }

    /// Returns the path in the map of the parameter at a module path.
    fn path_in_map<'b>(&'b self, path: &'b str) -> &'b str {
        self.paths.get(path).map_or(path, String::as_str)
    }

    /// Returns the parameter at module path `path`. It is initialised when it is first used.
    ///
    /// The parameter is trainable, and its shape is known before it is initialised.
    ///
    /// # Panics
    /// Panics if the map has no such parameter of `D` dimensions.
    pub(crate) fn param<const D: usize>(&self, path: &str) -> Param<Tensor<B, D>> {
        let path = self.path_in_map(path);
        let weight = self.map.get(path);
        let shape: Option<[usize; D]> = weight.and_then(|it| it.shape().try_into().ok());
        let (Some(weight), Some(shape)) = (weight, shape) else {
            panic!("the weight map has no parameter {path} of {D} dimensions")
        };
        let values = match weight.origin() {
            Origin::Fresh(values) => *values,
            // Only random values use it.
            _ => InitialValues::Zeros,
        };
        let (source, path) = (self.source.clone(), path.to_owned());
        Param::uninitialized(
            ParamId::new(),
            move |device, require_grad| {
                source.tensor(&path, shape, values, device).set_require_grad(require_grad)
            },
            self.device.clone(),
            true,
            shape.into(),
        )
    }
}

impl WeightSource {
    /// Returns the parameter at `path`. `values` is only used for random weights. Zeros are created on the device, because a
    /// forecast has no memory for them.
    fn tensor<B: Backend, const D: usize>(
        &self,
        path: &str,
        shape: [usize; D],
        values: InitialValues,
        device: &B::Device,
    ) -> Tensor<B, D> {
        let count = shape.iter().product();
        let data = match self {
            Self::Zeros => return Tensor::zeros(shape, (device, DType::F32)),
            Self::Seed(seed) => draw(*seed, path, count, values),
            Self::File(read) => read(path),
        };
        Tensor::from_data(TensorData::new(data, shape), device)
    }
}

impl fmt::Debug for WeightSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seed(seed) => write!(f, "Seed({seed})"),
            Self::File(_) => f.write_str("File"),
            Self::Zeros => f.write_str("Zeros"),
        }
    }
}

/// Generates `count` values for the parameter at `path`, with one ChaCha stream per path.
///
/// The stream number is the hash of the path. Values are generated and scaled in f64, then rounded to f32.
fn draw(seed: u64, path: &str, count: usize, values: InitialValues) -> Vec<f32> {
    match values {
        InitialValues::Zeros => vec![0.0; count],
        InitialValues::Ones => vec![1.0; count],
        InitialValues::Normal { std } => {
            let mut generator = ChaCha8Rng::seed_from_u64(seed);
            // Streams with the same seed are independent, so the values of a parameter do not depend on other
            // parameters.
            generator.set_stream(fnv1a(path));
            StandardNormal
                .sample_iter(&mut generator)
                .take(count)
                .map(|value: f64| (value * std) as f32)
                .collect()
        }
    }
}

/// Returns the 64-bit FNV-1a hash (Fowler, Noll, Vo), which is the same in every build.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;
    use deepburn_weights::{Composition, Weight};

    const NORMAL: InitialValues = InitialValues::Normal { std: 0.02 };

    #[test]
    fn values_depend_on_seed_and_path_alone() {
        let first = draw(7, "h.0.c_fc", 1000, NORMAL);
        assert_eq!(first, draw(7, "h.0.c_fc", 1000, NORMAL));
        assert_eq!(first[..10], draw(7, "h.0.c_fc", 10, NORMAL)[..]);
        assert_ne!(first, draw(8, "h.0.c_fc", 1000, NORMAL));
        assert_ne!(first, draw(7, "h.1.c_fc", 1000, NORMAL));
    }

    #[test]
    fn normal_values_have_the_asked_moments() {
        let values = draw(3, "wte", 200_000, NORMAL);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / 2e5;
        let std = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 2e5).sqrt();
        // Five standard errors: 0.02 / sqrt(2e5) and 0.02 / sqrt(4e5).
        assert!(mean.abs() < 2.3e-4, "{mean}");
        assert!((std - 0.02).abs() < 1.6e-4, "{std}");
    }

    #[test]
    fn hash_matches_published_vectors() {
        assert_eq!(fnv1a(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_copied_parameter_draws_the_same_values() {
        let device = Default::default();
        let weight = Weight::new("w", Composition::whole("w", &[3, 5]));
        let map = WeightMap::new(vec![weight.with_origin(Origin::Fresh(NORMAL))]).unwrap();
        let param = WeightInit::<Flex>::new(map, 1, &device).param::<2>("w");
        let copy = param.clone();
        assert!(!param.is_initialized());
        assert_eq!(param.val().into_data(), copy.val().into_data());
    }
}
