//! Initial weights: random values, values from a file, or zeros.
//!
//! Main type: [`WeightInit`]. Shapes and the distributions of random values are in the model's
//! [`WeightMap`]. Random values are generated on the host, with the seed and the parameter's path
//! as the key of the generator. They do not depend on the device, the order in which parameters are
//! created or the number of threads. Each parameter is lazy: its values are created on first use.
//! Sharded training relies on this, because it moves most parameters out of the module before
//! memory is allocated for them.
//!
//! With an adapter, parameters of the base model come from its folder, and factors from the
//! adapter's folder, or they are drawn. Frozen parameters are marked in the module, which the
//! engine respects.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use deepburn_lora::Adapter;
use deepburn_lora::merge::column_norms;
use deepburn_weights::{InitialValues, Origin, Weight, WeightMap};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_distr::{Distribution, StandardNormal, StandardUniform};

use crate::fnv::{FNV_OFFSET, fnv1a};

/// A function that reads the values of the parameter at a module path. It panics with the error
/// message if they cannot be read.
pub(crate) type ReadWeights = dyn Fn(&str) -> Vec<f32> + Send + Sync;

/// The public path of each parameter, by its path in the module. Parameters that are not listed
/// have one path.
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

/// The adapter of a model, and the source of its values.
struct AdapterInit {
    adapter: Arc<Adapter>,
    /// The map of the model with the parameters of the adapter.
    map: WeightMap,
    /// The source of the parameters that are trained. With [`WeightSource::Seed`], parameters of
    /// the base model keep their values.
    source: WeightSource,
    /// The dropout probability of the adapter's input.
    dropout: f64,
}

/// What a layer computes with its adapter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterOptions {
    /// The factor of the adapter's output.
    pub(crate) scale: f64,
    /// The dropout probability of the adapter's input.
    pub(crate) dropout: f64,
}

/// Creates the parameters of one model.
pub(crate) struct WeightInit<'a, B: Backend> {
    /// The source of the values of all parameters of the base model.
    source: WeightSource,
    /// The parameters of the base model.
    map: WeightMap,
    /// The adapter.
    adapter: Option<AdapterInit>,
    /// The paths of parameters that start with the values of another parameter, with its path.
    copied: HashMap<String, String>,
    /// The paths in the map of parameters that have another path in the module.
    paths: Paths,
    /// The device of the parameters.
    device: &'a B::Device,
}

impl<'a, B: Backend> WeightInit<'a, B> {
    /// Returns an initializer with random values.
    pub(crate) fn new(map: WeightMap, seed: u64, device: &'a B::Device) -> Self {
        Self::from_source(WeightSource::Seed(seed), map, device)
    }

    /// Returns an initializer that reads values from weight files.
    pub(crate) fn reading(map: WeightMap, read: Arc<ReadWeights>, device: &'a B::Device) -> Self {
        Self::from_source(WeightSource::File(read), map, device)
    }

    /// Returns an initializer with zeros, for a model whose weights will be overwritten.
    pub(crate) fn zeros(map: WeightMap, device: &'a B::Device) -> Self {
        Self::from_source(WeightSource::Zeros, map, device)
    }

    fn from_source(source: WeightSource, map: WeightMap, device: &'a B::Device) -> Self {
        let (copied, paths) = (HashMap::new(), Paths::default());
        Self { source, map, adapter: None, copied, paths, device }
    }

    /// Returns the initializer of a module whose parameters have the keys of `paths` as their
    /// module paths.
    pub(crate) fn with_paths(self, paths: Paths) -> Self {
        Self { paths, ..self }
    }

    /// Returns the initializer of a model with an adapter. `map` is the map of the adapted model.
    /// The trained parameters are read with `read`; without it, the factors are drawn from `seed`,
    /// and other parameters keep the values of the base model.
    pub(crate) fn with_adapter(
        self,
        adapter: Arc<Adapter>,
        map: WeightMap,
        seed: u64,
        read: Option<Arc<ReadWeights>>,
    ) -> Self {
        let source = match (&self.source, read) {
            // The values of a checkpoint replace all zeros, including the adapter's.
            (WeightSource::Zeros, _) => WeightSource::Zeros,
            (_, Some(read)) => WeightSource::File(read),
            (_, None) => WeightSource::Seed(seed),
        };
        let dropout = adapter.config().dropout;
        Self { adapter: Some(AdapterInit { adapter, map, source, dropout }), ..self }
    }

    /// Returns the initializer of a model whose adapter has no dropout.
    pub(crate) fn without_dropout(mut self) -> Self {
        self.adapter.iter_mut().for_each(|adapter| adapter.dropout = 0.0);
        self
    }

    /// Returns the initializer of a model in which the parameter at `path` starts with the values
    /// of the one at `of`.
    pub(crate) fn with_copy(mut self, path: String, of: String) -> Self {
        self.copied.insert(path, of);
        self
    }

    /// Returns what the layer at module path `path` computes with its adapter; `None` without one.
    pub(crate) fn adapter(&self, path: &str) -> Option<AdapterOptions> {
        let AdapterInit { adapter, dropout, .. } = self.adapter.as_ref()?;
        let weight = format!("{path}.weight");
        let module = self.path_in_map(&weight).strip_suffix(".weight")?;
        let scale = adapter.module(module)?.scale;
        Some(AdapterOptions { scale, dropout: *dropout })
    }

    /// Returns the tokens whose rows of the table at module path `path` are trained; `None` if the
    /// table has no such rows.
    pub(crate) fn trained_tokens(&self, path: &str) -> Option<&[usize]> {
        let AdapterInit { adapter, .. } = self.adapter.as_ref()?;
        let weight = format!("{path}.weight");
        adapter.trained_tokens(self.path_in_map(&weight).strip_suffix(".weight")?)
    }

    /// Returns the parameter at module path `path`; `None` if the map has none, or if it is tied to
    /// another parameter.
    ///
    /// # Panics
    /// Panics if the parameter does not have `D` dimensions.
    pub(crate) fn optional_param<const D: usize>(&self, path: &str) -> Option<Param<Tensor<B, D>>> {
        let weight = self.weight(self.path_in_map(path))?;
        (!matches!(weight.origin(), Origin::Tied { .. })).then(|| self.param(path))
    }

    /// Returns the path in the map of the parameter at a module path.
    fn path_in_map<'b>(&'b self, path: &'b str) -> &'b str {
        self.paths.get(path).map_or(path, String::as_str)
    }

    /// Returns the parameter at a path in the map.
    fn weight(&self, path: &str) -> Option<&Weight> {
        // An adapter may untie a parameter that is tied in the base model.
        self.adapter.as_ref().map_or(&self.map, |adapter| &adapter.map).get(path)
    }

    /// Returns the parameter at module path `path`. It is initialized when it is first used.
    ///
    /// The parameter is trainable, unless it is frozen next to an adapter, and its shape is known
    /// before it is initialized.
    ///
    /// # Panics
    /// Panics if the map has no such parameter of `D` dimensions.
    pub(crate) fn param<const D: usize>(&self, path: &str) -> Param<Tensor<B, D>> {
        let path = self.path_in_map(path);
        let weight = self.weight(path);
        let shape: Option<[usize; D]> = weight.and_then(|it| it.shape().try_into().ok());
        let (Some(_), Some(shape)) = (weight, shape) else {
            panic!("the weight map has no parameter {path} of {D} dimensions")
        };
        let values = self.values(path);
        let is_trained = self.adapter.as_ref().is_none_or(|it| it.adapter.trains(path));
        Param::uninitialized(
            ParamId::new(),
            move |device, require_grad| values.tensor(shape, device).set_require_grad(require_grad),
            self.device.clone(),
            is_trained,
            shape.into(),
        )
    }

    /// Returns where the values of the parameter at a path in the map come from.
    fn values(&self, path: &str) -> ParameterValues {
        let initial = |map: &WeightMap, path: &str| match map.get(path).map(Weight::origin) {
            Some(Origin::Fresh(values)) => *values,
            // Only random values use it.
            _ => InitialValues::Zeros,
        };
        let base = || {
            let path = self.copied.get(path).map_or(path, String::as_str);
            let source = self.source.clone();
            ParameterValues::Of { source, path: path.to_owned(), initial: initial(&self.map, path) }
        };
        let Some(AdapterInit { adapter, map, source, .. }) = &self.adapter else { return base() };
        let is_drawn = matches!(source, WeightSource::Seed(_));
        // `B` starts as 0, so with the norms of the base weight DoRA changes nothing at first.
        if let Some(layer) = adapter.magnitude_of(path).filter(|_| is_drawn) {
            let weight = format!("{layer}.weight");
            let count = self.weight(&weight).map_or(0, Weight::num_elements);
            return ParameterValues::ColumnNorms { matrix: Box::new(self.values(&weight)), count };
        }
        // Trained rows start as the rows of the base model.
        if let Some(module) = adapter.table_of(path).filter(|_| is_drawn) {
            let table = format!("{module}.weight");
            let count = self.weight(&table).map_or(0, Weight::num_elements);
            let tokens = adapter.trained_tokens(module).unwrap_or_default().to_vec();
            return ParameterValues::OfTokens {
                table: Box::new(self.values(&table)),
                count,
                tokens,
            };
        }
        // The file of a trained adapter also has the parameters that are trained as a whole. In a
        // new adapter, these start with the values of the base model.
        match adapter.contains(path) || adapter.trains(path) && !is_drawn {
            true => ParameterValues::Of {
                source: source.clone(),
                path: path.to_owned(),
                initial: initial(map, path),
            },
            false => base(),
        }
    }
}

/// Where the values of a parameter come from.
enum ParameterValues {
    /// From a source. `initial` is only used for random values.
    Of { source: WeightSource, path: String, initial: InitialValues },
    /// The norm of each column of a matrix, which has `count` elements.
    ColumnNorms { matrix: Box<ParameterValues>, count: usize },
    /// The rows of these tokens in a table, which has `count` elements.
    OfTokens { table: Box<ParameterValues>, count: usize, tokens: Vec<usize> },
}

impl ParameterValues {
    /// Returns the parameter. Zeros are created on the device, because a forecast has no memory for
    /// them.
    fn tensor<B: Backend, const D: usize>(
        &self,
        shape: [usize; D],
        device: &B::Device,
    ) -> Tensor<B, D> {
        match self.on_host(shape.iter().product()) {
            Some(values) => Tensor::from_data(TensorData::new(values, shape), device),
            None => Tensor::zeros(shape, (device, DType::F32)),
        }
    }

    /// Returns `count` values; `None` if all of them are 0.
    fn on_host(&self, count: usize) -> Option<Vec<f32>> {
        match self {
            Self::Of { source, path, initial } => match source {
                WeightSource::Zeros => None,
                WeightSource::Seed(seed) => Some(draw(*seed, path, count, *initial)),
                WeightSource::File(read) => Some(read(path)),
            },
            Self::ColumnNorms { matrix, count: elements } => {
                Some(column_norms(&matrix.on_host(*elements)?, count))
            }
            Self::OfTokens { table, count: elements, tokens } => {
                let (table, width) = (table.on_host(*elements)?, count / tokens.len());
                let row = |token: &usize| &table[token * width..][..width];
                Some(tokens.iter().flat_map(row).copied().collect())
            }
        }
    }
}

/// Generates `count` values for the parameter at `path`, with one ChaCha stream per path.
///
/// The stream number is the hash of the path. ParameterValues are generated and scaled in f64, then
/// rounded to f32.
fn draw(seed: u64, path: &str, count: usize, values: InitialValues) -> Vec<f32> {
    match values {
        InitialValues::Zeros => vec![0.0; count],
        InitialValues::Ones => vec![1.0; count],
        InitialValues::Uniform { bound } => {
            let values = StandardUniform.sample_iter(stream(seed, path)).take(count);
            // From [0, 1) to [-bound, bound).
            values.map(|value: f64| ((2.0 * value - 1.0) * bound) as f32).collect()
        }
        InitialValues::Normal { std } => {
            let values = StandardNormal.sample_iter(stream(seed, path)).take(count);
            values.map(|value: f64| (value * std) as f32).collect()
        }
    }
}

/// Returns the generator of the parameter at `path`. Streams with the same seed are independent, so
/// the values of a parameter do not depend on other parameters.
fn stream(seed: u64, path: &str) -> ChaCha8Rng {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    generator.set_stream(fnv1a(FNV_OFFSET, path.as_bytes()));
    generator
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
