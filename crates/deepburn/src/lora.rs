//! LoRA for any Burn module.
//!
//! Main type: [`Lora`], a module around a frozen module. It has two small matrices for each
//! selected weight, which are trained instead:
//!
//! ```text
//! W + s A B        W: [in, out], A: [in, r], B: [r, out], s = alpha / r
//! ```
//!
//! The wrapped module is not changed and does not know of the adapters. Its weights are replaced by
//! these sums for each pass, so a training pass holds every adapted weight in the type of the model
//! while autodiff needs it. In 16 bits, what is smaller than the precision of `W` is rounded away;
//! train in fp32. `finetune` trains language models without these sums, and in bf16.
//!
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Distribution, Tensor};
//! use burn_flex::{Flex, FlexDevice};
//! use deepburn::lora::{Lora, LoraConfig, Targets};
//! use deepburn::prelude::*;
//!
//! let plan = deepburn::plan(r#"{"train_micro_batch_size_per_gpu": 4,
//!     "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
//!     "zero_optimization": {"stage": 3}}"#, 2)?;
//! deepburn::run_ranks(2, |group| {
//!     let model: Linear<Training<Flex>> = LinearConfig::new(8, 8).init(&FlexDevice);
//!     let config = LoraConfig { rank: 2, targets: Targets::AllLinear, ..LoraConfig::default() };
//!     let mut engine = deepburn::initialize(Lora::new(model, config)?, &plan, group)?;
//!     let x = Tensor::<_, 2>::random([4, 8], Distribution::Default, &FlexDevice);
//!     let loss = engine.forward(|lora| lora.adapted().forward(x).powf_scalar(2.0).mean())?;
//!     engine.backward(loss)?;
//!     engine.step()?;
//!     Ok(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use deepburn_lora::{Adapter, ModelModule, ModuleKind};
use deepburn_weights::{InitialValues, Origin, WeightMap};

pub use deepburn_lora::{
    InitialFactors, LoraConfig, LoraError, ModulePattern, Targets, TrainedBiases, TrainedTokens,
};

/// A frozen module with trained adapters.
///
/// Modules are selected by their paths, `encoder.layers.0.attention.query` for example. Burn's
/// `Linear` and `Embedding` can be adapted.
#[derive(Module, Debug)]
pub struct Lora<B: Backend, M: Module<B>> {
    /// The wrapped module. Only the parameters that the configuration names are trained.
    base: M,
    /// The adapters, in the order of the module.
    factors: Vec<WeightFactors<B>>,
}

/// The adapter of one weight.
#[derive(Module, Debug)]
struct WeightFactors<B: Backend> {
    /// `A`, `[in, r]`.
    a: Param<Tensor<B, 2>>,
    /// `B`, `[r, out]`.
    b: Param<Tensor<B, 2>>,
    /// The path of the weight in the wrapped module.
    #[module(skip)]
    path: String,
    /// `s`.
    #[module(skip)]
    scale: f64,
}

impl<B: Backend, M: Module<B>> Lora<B, M> {
    /// Freezes `model` and adds adapters. The initial values are drawn from the random generator of
    /// the backend.
    ///
    /// # Errors
    /// Returns [`LoraError`] if the configuration selects no module, or one that cannot be adapted,
    /// and [`LoraError::Unsupported`] for `lora_dropout`, `use_dora`, `lora_bias` and
    /// `trainable_token_indices`, which a sum of weights cannot express.
    pub fn new(model: M, config: LoraConfig) -> Result<Self, LoraError> {
        check_supported(&config)?;
        let mut finder = Finder { path: Vec::new(), found: Vec::new(), shapes: Vec::new() };
        model.visit(&mut finder);
        let Finder { found, shapes, .. } = finder;
        let refuse = |error: deepburn_weights::WeightMapError| LoraError::Module {
            name: "model".to_owned(),
            reason: error.to_string(),
        };
        let map = WeightMap::as_trained(shapes).map_err(refuse)?;
        let adapter = Adapter::new(config, &found, &[], &map)?;
        let extended = adapter.extended(&map).map_err(refuse)?;
        let device = model.devices().first().cloned().unwrap_or_default();
        let factors = found.iter().filter_map(|module| {
            let adapted = adapter.module(&module.path)?;
            let [a, b] = module.kind.factor_names().map(|leaf| {
                let weight = extended.get(&format!("{}.{leaf}", module.path));
                weight.map(|weight| initial(&weight.shape(), weight.origin(), &device))
            });
            let path = parameter_of(&module.path);
            Some(WeightFactors { a: a?, b: b?, path, scale: adapted.scale })
        });
        let factors = factors.collect();
        let base = model.map(&mut Freezer { path: Vec::new(), adapter: &adapter });
        Ok(Self { base, factors })
    }

    /// Returns the wrapped module with the adapters in its weights, for one pass. On a backend
    /// without autodiff, this is the merged model.
    pub fn adapted(&self) -> M {
        let factors = self.factors.iter().map(|own| (own.path.as_str(), own)).collect();
        self.base.clone().map(&mut Adder { path: Vec::new(), factors })
    }

    /// Returns the wrapped module without the adapters.
    pub fn base(&self) -> &M {
        &self.base
    }
}

/// Refuses what a sum of weights cannot express.
fn check_supported(config: &LoraConfig) -> Result<(), LoraError> {
    let given = [
        ("lora_dropout", config.dropout > 0.0, config.dropout.to_string()),
        ("use_dora", config.dora, "true".to_owned()),
        ("lora_bias", config.adapter_bias, "true".to_owned()),
        (
            "trainable_token_indices",
            config.tokens != TrainedTokens::None,
            config.tokens.to_json().to_string(),
        ),
    ];
    let consequence =
        "the adapter is added to the weight, and its input is not known; leave it at its default";
    match given.into_iter().find(|(_, is_given, _)| *is_given) {
        None => Ok(()),
        Some((name, _, value)) => Err(LoraError::Unsupported {
            name: name.to_owned(),
            value,
            consequence: consequence.to_owned(),
        }),
    }
}

/// Returns the path of the weight of a module. A module on its own has no path.
fn parameter_of(module: &str) -> String {
    if module.is_empty() { "weight".to_owned() } else { format!("{module}.weight") }
}

/// Returns a factor with its initial values.
fn initial<B: Backend>(
    shape: &[usize],
    origin: &Origin,
    device: &B::Device,
) -> Param<Tensor<B, 2>> {
    let shape = [shape[0], shape[1]];
    Param::from_tensor(match origin {
        Origin::Fresh(InitialValues::Uniform { bound }) => {
            Tensor::random(shape, Distribution::Uniform(-bound, *bound), device)
        }
        Origin::Fresh(InitialValues::Normal { std }) => {
            Tensor::random(shape, Distribution::Normal(0.0, *std), device)
        }
        // The remaining initial values are zeros: of B, so that the adapted model starts as the
        // base model.
        _ => Tensor::zeros(shape, device),
    })
}

/// Lists the modules and the parameters of a module.
struct Finder {
    path: Vec<(String, String)>,
    /// The modules that have a parameter `weight`.
    found: Vec<ModelModule>,
    /// The paths and shapes of all parameters.
    shapes: Vec<(String, Vec<usize>)>,
}

/// Returns the path of the current parameter.
fn joined(path: &[(String, String)]) -> String {
    path.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
}

impl<B: Backend> ModuleVisitor<B> for Finder {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push((name.to_owned(), container.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // The shape is read without creating the values, which the engine may do on one rank only.
        let (path, shape) = (joined(&self.path), param.lazy_shape().to_vec());
        // Burn passes `Struct:Linear` for a field of its linear layer.
        let container = self.path.last().map_or("", |(_, container)| container.as_str());
        if let Some(module) = path.strip_suffix("weight") {
            let module = module.strip_suffix('.').unwrap_or(module).to_owned();
            let kind = match (container, &shape[..]) {
                ("Struct:Linear", &[inputs, outputs]) => ModuleKind::Linear { inputs, outputs },
                ("Struct:Embedding", &[rows, width]) => ModuleKind::Embedding { rows, width },
                _ => ModuleKind::Other,
            };
            self.found.push(ModelModule { path: module.clone(), name: module, kind });
        }
        self.shapes.push((path, shape));
    }
}

/// Freezes the parameters that are not trained.
struct Freezer<'a> {
    path: Vec<(String, String)>,
    adapter: &'a Adapter,
}

impl<B: Backend> ModuleMapper<B> for Freezer<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push((name.to_owned(), container.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.set_require_grad(self.adapter.trains(&joined(&self.path)))
    }
}

/// Adds adapters to weights.
struct Adder<'a, B: Backend> {
    path: Vec<(String, String)>,
    /// The adapters, by the path of their weight.
    factors: HashMap<&'a str, &'a WeightFactors<B>>,
}

impl<B: Backend> ModuleMapper<B> for Adder<'_, B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push((name.to_owned(), container.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(WeightFactors { a, b, scale, .. }) = self.factors.get(joined(&self.path).as_str())
        else {
            return param;
        };
        // The sum has the id of the weight, so that the module stays the same for its record and
        // for the engine.
        let (id, weight, mapper) = param.consume();
        let shape = weight.dims();
        let added = (a.val() * *scale).matmul(b.val());
        Param::from_mapped_value(id, added.reshape(shape) + weight, mapper)
    }
}
