//! An adapter of a model: the adapted modules and their parameters.
//!
//! Main type: [`Adapter`]. A parameter has the path of its module followed by PEFT's name, such as
//! `layers.0.self_attn.q_proj.lora_A.weight`. In `adapter_model.safetensors`, it is called
//! `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` and is `[out, in]`, as in
//! PyTorch.

mod selection;

use std::collections::{BTreeMap, HashMap, HashSet};

use deepburn_weights::{
    Component, Composition, InitialValues, Origin, Weight, WeightMap, WeightMapError,
};
use serde_json::{Map, Value, json};

use crate::config::{InitialFactors, LoraConfig, Targets, TrainedBiases, TrainedTokens};
use crate::error::LoraError;
use crate::pattern::{ModulePattern, is_named, layer_number};
use selection::{modules_to_save, modules_with_rows, selected, target_names};

/// The start of all names in an adapter file.
const FILE_PREFIX: &str = "base_model.model.";

/// A module of a model, which an adapter may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelModule {
    /// The path of its parameters without the last name, such as `layers.0.self_attn.q_proj`.
    pub path: String,
    /// The path in `transformers`, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// What the module computes.
    pub kind: ModuleKind,
}

/// What a module computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKind {
    /// `x W` with `W: [inputs, outputs]`, plus a bias.
    Linear {
        /// Elements of `x`.
        inputs: usize,
        /// Elements of the result.
        outputs: usize,
    },
    /// The output projection, which cannot be adapted.
    Head {
        /// Whether it is the token embedding.
        is_tied: bool,
    },
    /// The rows of `[rows, width]` that belong to tokens.
    Embedding {
        /// Number of tokens.
        rows: usize,
        /// Elements of a row.
        width: usize,
    },
    /// Something that cannot be adapted, such as a norm.
    Other,
}

impl ModuleKind {
    /// Returns the number of inputs and outputs of the adapter; `None` for a module that cannot be
    /// adapted.
    fn sizes(self) -> Option<[usize; 2]> {
        match self {
            Self::Linear { inputs, outputs } => Some([inputs, outputs]),
            Self::Embedding { rows, width } => Some([rows, width]),
            Self::Head { .. } | Self::Other => None,
        }
    }

    //= peft 0.21.2 utils/save_and_load.py get_peft_model_state_dict
    /// Returns PEFT's names of the factors A and B, which follow the path of the module.
    #[must_use]
    pub fn factor_names(self) -> [&'static str; 2] {
        match self {
            Self::Embedding { .. } => ["lora_embedding_A", "lora_embedding_B"],
            _ => ["lora_A.weight", "lora_B.weight"],
        }
    }
}

/// A module with an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptedModule {
    /// The module.
    pub module: ModelModule,
    /// The rank.
    pub rank: usize,
    /// The factor of the adapter's output.
    pub scale: f64,
}

/// The rows of an embedding or of an output projection that are trained, while its other rows are
/// frozen.
#[derive(Clone, Debug)]
struct TokenRows {
    /// The tokens of the rows.
    tokens: Vec<usize>,
    /// The name of the rows in the adapter file.
    stored: String,
    /// Elements of a row.
    width: usize,
}

/// The adapter of a model.
#[derive(Clone, Debug)]
pub struct Adapter {
    config: LoraConfig,
    /// The adapted modules, by path.
    modules: HashMap<String, AdaptedModule>,
    /// The modules with trained rows, by path.
    token_rows: HashMap<String, TokenRows>,
    /// The paths of the parameters of the base model that are trained.
    trained: HashSet<String>,
    /// The names in the adapter file of the parameters of the base model that it contains.
    stored: Vec<(String, String)>,
    /// Whether a tied head becomes a parameter of its own.
    unties: bool,
    /// `target_modules` in `adapter_config.json`.
    target_names: Value,
}

impl Adapter {
    /// Applies a configuration to the modules of a model. `family_targets` are the names that PEFT
    /// adapts by default in models of the family. `base` is the map of the base model.
    ///
    /// # Errors
    /// Returns [`LoraError`] if a field selects no module, or a module that cannot be adapted or
    /// trained.
    pub fn new(
        config: LoraConfig,
        modules: &[ModelModule],
        family_targets: &[&str],
        base: &WeightMap,
    ) -> Result<Self, LoraError> {
        // Programs can build a configuration field by field, without the checks of reading it.
        config.check()?;
        let targets = match &config.targets {
            Targets::OfFamily => {
                let names = family_targets.iter().map(|name| (*name).to_owned()).collect();
                Targets::Selected(ModulePattern::Names(names))
            }
            targets => targets.clone(),
        };
        let selected = selected(&config, &targets, modules)?;
        let mut adapter = Self {
            target_names: target_names(&targets, &selected, modules)?,
            modules: HashMap::new(),
            token_rows: HashMap::new(),
            trained: HashSet::new(),
            stored: Vec::new(),
            unties: false,
            config,
        };
        // Factors first: the steps below refuse modules that have some.
        for module in selected {
            let adapted = adapter.adapted(module)?;
            adapter.modules.insert(module.path.clone(), adapted);
        }
        adapter.check_tie(modules)?;
        adapter.save_modules(modules, base)?;
        adapter.train_tokens(modules, base)?;
        adapter.train_biases(modules, base);
        adapter.store_embedding(base);
        Ok(adapter)
    }

    /// Returns the adapter of a module.
    ///
    /// # Errors
    /// Returns [`LoraError`] if the module cannot be adapted.
    fn adapted(&self, module: &ModelModule) -> Result<AdaptedModule, LoraError> {
        let config = &self.config;
        let refuse = |reason: String| Err(LoraError::module("target_modules", reason));
        let name = &module.name;
        match module.kind {
            ModuleKind::Other => {
                return refuse(format!("`{name}` is neither a linear layer nor an embedding"));
            }
            ModuleKind::Head { .. } => {
                return refuse(format!(
                    "`{name}` is the output projection, whose adapter is not supported; train it as a whole with \
                     modules_to_save, or adapt the layers"
                ));
            }
            ModuleKind::Embedding { .. } if config.dora => {
                return refuse(format!("`{name}`: use_dora is supported for linear layers only"));
            }
            ModuleKind::Embedding { .. } if config.adapter_bias => {
                return refuse(format!("`{name}` is an embedding, which has no lora_bias"));
            }
            _ => {}
        }
        // The patterns see the names of `transformers`, which PEFT matches as well.
        let rank = config.rank_pattern.value_for("rank_pattern", name)?.unwrap_or(config.rank);
        let alpha = config.alpha_pattern.value_for("alpha_pattern", name)?.unwrap_or(config.alpha);
        Ok(AdaptedModule { module: module.clone(), rank, scale: config.scale(rank, alpha) })
    }

    /// Refuses a tied embedding whose adapter would have to be the head's too.
    ///
    /// # Errors
    /// Returns [`LoraError::Module`].
    fn check_tie(&self, modules: &[ModelModule]) -> Result<(), LoraError> {
        let is_tied =
            modules.iter().any(|it| matches!(it.kind, ModuleKind::Head { is_tied: true }));
        let adapts =
            self.modules.values().any(|it| matches!(it.module.kind, ModuleKind::Embedding { .. }));
        if !(self.config.keeps_tie && is_tied && adapts) {
            return Ok(());
        }
        Err(LoraError::module(
            "ensure_weight_tying",
            "an adapter of the embedding is not applied to the tied output projection here, as PEFT does with this \
             setting; remove it, or train the embedding as a whole with modules_to_save",
        ))
    }

    /// Marks the modules that are trained as a whole.
    ///
    /// # Errors
    /// Returns [`LoraError`] if a name selects no module, or an adapted one.
    fn save_modules(&mut self, modules: &[ModelModule], base: &WeightMap) -> Result<(), LoraError> {
        for name in self.config.modules_to_save.clone() {
            for module in modules_to_save(&name, modules)? {
                if self.modules.contains_key(&module.path) {
                    let reason = format!(
                        "`{}`, whose name ends with `{name}`, is adapted; it cannot be trained as a whole too",
                        module.name
                    );
                    return Err(LoraError::module("modules_to_save", reason));
                }
                self.save_module(module, modules, base);
            }
        }
        Ok(())
    }

    //= peft 0.21.2 utils/other.py ModulesToSaveWrapper
    /// Marks a module that is trained as a whole.
    fn save_module(&mut self, module: &ModelModule, modules: &[ModelModule], base: &WeightMap) {
        let tied_head =
            modules.iter().find(|it| matches!(it.kind, ModuleKind::Head { is_tied: true }));
        let embedding = modules.iter().find(|it| matches!(it.kind, ModuleKind::Embedding { .. }));
        let is_of_tie = |it: Option<&ModelModule>| it.is_some_and(|it| it.path == module.path);
        let mut saved = vec![module];
        // Such a head has no parameter of its own: it is untied, or saved together with the
        // embedding.
        if let (Some(head), Some(embedding)) = (tied_head, embedding)
            && (is_of_tie(tied_head) || is_of_tie(Some(embedding)))
        {
            self.unties = !self.config.keeps_tie;
            if self.config.keeps_tie {
                saved = vec![embedding, head];
            }
        }
        for module in saved {
            for leaf in ["weight", "bias"] {
                let path = format!("{}.{leaf}", module.path);
                // A module may be selected by several names, and a linear layer may have no bias.
                if base.get(&path).is_some() && self.trained.insert(path.clone()) {
                    self.stored.push((path, format!("{FILE_PREFIX}{}.{leaf}", module.name)));
                }
            }
        }
    }

    /// Marks the rows that are trained.
    ///
    /// # Errors
    /// Returns [`LoraError`] if a name does not select an embedding or output projection, if its
    /// weight has an adapter or is trained as a whole, or if it has no row for a token.
    fn train_tokens(&mut self, modules: &[ModelModule], base: &WeightMap) -> Result<(), LoraError> {
        for (module, tokens) in modules_with_rows(&self.config.tokens, modules)? {
            let ModelModule { path, name, .. } = module;
            let refuse = |reason| Err(LoraError::module(TOKENS, reason));
            let weight = format!("{path}.weight");
            let shape = base.get(&weight).map(Weight::shape).unwrap_or_default();
            let [rows, width] = shape[..] else {
                return refuse(format!("`{name}` has no rows of tokens"));
            };
            if let Some(token) = tokens.iter().find(|token| **token >= rows) {
                return refuse(format!(
                    "token {token} has no row in `{name}`, which has {rows}; give ids below {rows}"
                ));
            }
            if self.modules.contains_key(path) {
                return refuse(format!("`{name}` is adapted; remove it from target_modules"));
            }
            // Two fields would train the same rows, or rows of a head that becomes another array.
            if self.trained.contains(&weight) || self.unties {
                return refuse(format!(
                    "modules_to_save trains all rows of `{name}`, or unties it; use one of the two fields"
                ));
            }
            let stored = format!("{FILE_PREFIX}{name}.{TOKEN_ROWS}");
            self.token_rows.insert(path.clone(), TokenRows { tokens, stored, width });
        }
        Ok(())
    }

    /// Marks the biases that are trained.
    fn train_biases(&mut self, modules: &[ModelModule], base: &WeightMap) {
        for module in modules {
            let is_adapted = self.modules.contains_key(&module.path);
            let trains = match self.config.biases {
                TrainedBiases::None => false,
                TrainedBiases::Adapted => is_adapted,
                TrainedBiases::All => true,
            };
            let path = format!("{}.bias", module.path);
            if trains && base.get(&path).is_some() && self.trained.insert(path.clone()) {
                // PEFT wraps an adapted module, whose own parameters are then below `base_layer`.
                let inner = if is_adapted { ".base_layer" } else { "" };
                self.stored.push((path, format!("{FILE_PREFIX}{}{inner}.bias", module.name)));
            }
        }
    }

    /// Adds an adapted embedding to the adapter file. PEFT stores it, although it is not trained.
    fn store_embedding(&mut self, base: &WeightMap) {
        let is_embedding =
            |it: &&AdaptedModule| matches!(it.module.kind, ModuleKind::Embedding { .. });
        let stored = self.modules.values().filter(is_embedding).map(|adapted| {
            let ModelModule { path, name, .. } = &adapted.module;
            (format!("{path}.weight"), format!("{FILE_PREFIX}{name}.base_layer.weight"))
        });
        let stored: Vec<_> = stored.filter(|(path, _)| base.get(path).is_some()).collect();
        self.stored.extend(stored);
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Returns the adapter of the module at `path`.
    #[must_use]
    pub fn module(&self, path: &str) -> Option<&AdaptedModule> {
        self.modules.get(path)
    }

    /// Returns whether both adapters have the same parameters and compute the same, however their
    /// configurations select modules.
    #[must_use]
    pub fn computes_as(&self, other: &Self) -> bool {
        let settings = |it: &Self| {
            let LoraConfig { dropout, dora, adapter_bias, .. } = it.config;
            (dropout, dora, adapter_bias, it.unties)
        };
        let tokens = |it: &Self| -> BTreeMap<String, Vec<usize>> {
            it.token_rows.iter().map(|(path, rows)| (path.clone(), rows.tokens.clone())).collect()
        };
        settings(self) == settings(other)
            && self.modules == other.modules
            && tokens(self) == tokens(other)
            && self.trained == other.trained
    }

    /// Returns the number of adapted modules.
    #[must_use]
    pub fn num_modules(&self) -> usize {
        self.modules.len()
    }

    /// Returns whether a tied head becomes a parameter of its own, whose first values are the
    /// embedding's.
    #[must_use]
    pub fn unties(&self) -> bool {
        self.unties
    }

    /// Returns the tokens whose rows of the module at `path` are trained.
    #[must_use]
    pub fn trained_tokens(&self, path: &str) -> Option<&[usize]> {
        self.token_rows.get(path).map(|rows| &*rows.tokens)
    }

    /// Returns the path of the module if the parameter at `path` holds its trained rows.
    #[must_use]
    pub fn table_of<'p>(&self, path: &'p str) -> Option<&'p str> {
        let module = path.strip_suffix(TOKEN_ROWS)?.strip_suffix('.')?;
        self.token_rows.contains_key(module).then_some(module)
    }

    /// Returns whether the parameter at `path` is a part of an adapter.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        // Rows are not below a name with `lora_`.
        if self.table_of(path).is_some() {
            return true;
        }
        let module = path.split_once(".lora_").map(|(module, _)| module);
        module.is_some_and(|module| self.modules.contains_key(module))
    }

    /// Returns the path of the layer if the parameter at `path` holds the norms of its columns.
    #[must_use]
    pub fn magnitude_of<'p>(&self, path: &'p str) -> Option<&'p str> {
        path.strip_suffix(MAGNITUDE)?.strip_suffix('.').filter(|_| self.contains(path))
    }

    /// Returns whether the parameter at `path` is trained: a part of an adapter, or of the base
    /// model.
    #[must_use]
    pub fn trains(&self, path: &str) -> bool {
        self.trained.contains(path) || self.contains(path)
    }

    /// Returns the map of the model with the parameters of the adapter, in the order of the module.
    /// Parameters that are not trained have the origin [`Origin::Frozen`].
    ///
    /// # Errors
    /// Returns an error if the sizes of a parameter overflow.
    pub fn extended(&self, base: &WeightMap) -> Result<WeightMap, WeightMapError> {
        let mut weights = Vec::new();
        let mut all = base.weights().iter().peekable();
        while let Some(weight) = all.next() {
            // A tied parameter keeps its origin, which is its only link to the other one.
            let is_tied = matches!(weight.origin(), Origin::Tied { .. });
            weights.push(match is_tied || self.trains(weight.path()) {
                true => weight.clone(),
                false => weight.clone().with_origin(Origin::Frozen),
            });
            // The adapter follows the last parameter of its module.
            let module = module_of(weight.path());
            if all.peek().is_some_and(|next| module_of(next.path()) == module) {
                continue;
            }
            if let Some(adapted) = self.modules.get(module) {
                weights.extend(self.weights_of(adapted)?);
            }
            if let Some(TokenRows { tokens, stored, width }) = self.token_rows.get(module) {
                let composition = Composition::whole(stored.clone(), &[tokens.len(), *width]);
                let rows = Weight::new(format!("{module}.{TOKEN_ROWS}"), composition);
                weights.push(rows.with_origin(Origin::Fresh(InitialValues::Zeros)));
            }
        }
        WeightMap::new(weights).map(|map| map.like(base))
    }

    //= peft 0.21.2 utils/save_and_load.py get_peft_model_state_dict
    /// Returns the map of `adapter_model.safetensors`. `extended` is the map of the adapted model.
    /// As in PEFT, a tied head that is trained with its embedding is a tensor of its own, with the
    /// same values.
    ///
    /// # Errors
    /// Returns an error if the sizes of a parameter overflow.
    pub fn file_map(&self, extended: &WeightMap) -> Result<WeightMap, WeightMapError> {
        let own = extended.weights().iter().filter(|weight| self.contains(weight.path()));
        let mut weights: Vec<Weight> = own.cloned().collect();
        for (path, stored) in &self.stored {
            let Some(weight) = extended.get(path) else { continue };
            let composition = weight.composition().clone().renamed(|_| stored.clone());
            weights.push(Weight::new(path.clone(), composition));
        }
        WeightMap::new(weights)
    }

    /// Returns the parameters of the adapter of a module, in the order of the module.
    ///
    /// # Errors
    /// Returns an error if the sizes of a parameter overflow.
    fn weights_of(&self, adapted: &AdaptedModule) -> Result<Vec<Weight>, WeightMapError> {
        let AdaptedModule { module: ModelModule { path, name, kind }, rank, .. } = adapted;
        let Some([inputs, outputs]) = kind.sizes() else { return Ok(Vec::new()) };
        let (leaves, is_table) =
            (kind.factor_names(), matches!(kind, ModuleKind::Embedding { .. }));
        let [a, b] = self.initial_factors(inputs, *rank, is_table);
        let stored = |leaf: &str| format!("{FILE_PREFIX}{name}.{leaf}");
        let fresh = |leaf: &str, composition: Composition, initial| {
            let weight = Weight::new(format!("{path}.{leaf}"), composition);
            weight.with_origin(Origin::Fresh(initial))
        };
        // All factors are stored as `[out, in]`.
        let factor = |leaf: &str, [rows, columns]: [usize; 2], initial| {
            let component = Component::whole(stored(leaf), &[columns, rows]).transposed();
            Ok(fresh(leaf, Composition::join(0, vec![component])?, initial))
        };
        let vector = |leaf: &str| {
            let component = Component::whole(stored(leaf), &[outputs]);
            Ok(fresh(leaf, Composition::join(0, vec![component])?, InitialValues::Zeros))
        };
        let mut weights =
            vec![factor(leaves[0], [inputs, *rank], a)?, factor(leaves[1], [*rank, outputs], b)?];
        if self.config.adapter_bias {
            weights.push(vector(ADAPTER_BIAS)?);
        }
        if self.config.dora {
            weights.push(vector(MAGNITUDE)?);
        }
        Ok(weights)
    }

    //= peft 0.21.2 tuners/lora/layer.py reset_lora_parameters
    /// Returns the initial values of the factors A and B.
    fn initial_factors(&self, inputs: usize, rank: usize, is_table: bool) -> [InitialValues; 2] {
        let uniform =
            |inputs: usize| InitialValues::Uniform { bound: 1.0 / (inputs as f64).sqrt() };
        let normal = |std| InitialValues::Normal { std };
        let zeros = InitialValues::Zeros;
        // Except for `Nonzero`, one factor is zero, so that training starts at the base model.
        match (self.config.initial, is_table) {
            (InitialFactors::Nonzero, true) => [normal(1.0), normal(1.0)],
            // For embeddings, PEFT sets A to zero instead of B.
            (_, true) => [zeros, normal(1.0)],
            (InitialFactors::Uniform, false) => [uniform(inputs), zeros],
            (InitialFactors::Gaussian, false) => [normal(1.0 / rank as f64), zeros],
            (InitialFactors::Nonzero, false) => [uniform(inputs), uniform(rank)],
        }
    }

    /// Returns the settings that select nothing, so that they have no effect.
    ///
    /// # Errors
    /// Returns [`LoraError`] for an expression that takes too long.
    pub fn unused_settings(&self, modules: &[ModelModule]) -> Result<Vec<String>, LoraError> {
        let adapted: Vec<&str> =
            self.modules.values().map(|adapted| adapted.module.name.as_str()).collect();
        let LoraConfig { rank_pattern, alpha_pattern, exclude, biases, .. } = &self.config;
        let mut unused = Vec::new();
        for key in rank_pattern.unmatched("rank_pattern", &adapted)? {
            unused.push(format!("rank_pattern.{key}"));
        }
        for key in alpha_pattern.unmatched("alpha_pattern", &adapted)? {
            unused.push(format!("alpha_pattern.{key}"));
        }
        let mut found = Vec::new();
        for name in &adapted {
            found.extend(layer_number(&self.config.layers_pattern, name)?);
        }
        let layers = self.config.layers.iter().flatten().filter(|layer| !found.contains(layer));
        unused.extend(layers.map(|layer| format!("layers_to_transform: {layer}")));
        if let Some(pattern) = exclude {
            let mut excludes = false;
            for module in modules {
                excludes |= pattern.selects("exclude_modules", &module.name)?;
            }
            if !excludes {
                unused.push("exclude_modules".to_owned());
            }
        }
        // Models such as Llama have no biases at all.
        let has_bias = self.trained.iter().any(|path| path.ends_with(".bias"));
        if *biases != TrainedBiases::None && !has_bias {
            unused.push("bias".to_owned());
        }
        Ok(unused)
    }

    /// Returns the content of `adapter_config.json`.
    #[must_use]
    pub fn file_fields(&self) -> Map<String, Value> {
        self.config.to_fields(self.target_names.clone())
    }
}

/// PEFT's name of the norms of columns, which follows the path of the module.
pub const MAGNITUDE: &str = "lora_magnitude_vector";
//= peft 0.21.2 tuners/trainable_tokens/layer.py TrainableTokensLayer
/// PEFT's name of the trained rows, which follows the path of the module. It holds the rows, not
/// their changes.
pub const TOKEN_ROWS: &str = "token_adapter.trainable_tokens_delta";
/// The field that selects rows.
const TOKENS: &str = "trainable_token_indices";
/// PEFT's name of an adapter's bias.
pub const ADAPTER_BIAS: &str = "lora_B.bias";

/// Returns the path of the module of a parameter.
fn module_of(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}

#[cfg(test)]
mod tests;
