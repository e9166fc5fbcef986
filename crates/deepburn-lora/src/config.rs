//! The configuration of an adapter, under the names of PEFT.
//!
//! Main type: [`LoraConfig`]. It is the section `model.lora` of a job, and the file
//! `adapter_config.json`. Fields of PEFT that would change what is computed and are not supported
//! are errors, unless they have the value that switches them off.

mod fields;

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::LoraError;
use crate::pattern::{ModulePattern, ModuleRegex, PatternMap, layer_number};
use fields::Fields;

/// The largest rank. No model has layers so wide that a larger rank is low.
const LARGEST_RANK: u64 = 1 << 16;

/// The configuration of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank of the adapters (`r`).
    pub rank: usize,
    /// The scale of the adapters is this number divided by the rank (`lora_alpha`).
    pub alpha: f64,
    /// The adapted modules (`target_modules`).
    pub targets: Targets,
    /// Modules that are not adapted (`exclude_modules`).
    pub exclude: Option<ModulePattern>,
    /// The numbers of the layers that are adapted; `None` for all (`layers_to_transform`).
    pub layers: Option<Vec<usize>>,
    /// The names of the lists of layers; empty for any name (`layers_pattern`).
    pub layers_pattern: Vec<String>,
    /// The dropout probability of the input of the adapters (`lora_dropout`).
    pub dropout: f64,
    /// The biases that are trained (`bias`).
    pub biases: TrainedBiases,
    /// Whether the scale is `alpha / sqrt(r)` (`use_rslora`).
    pub rank_stabilized: bool,
    /// Whether the norms of columns are trained separately (`use_dora`).
    pub dora: bool,
    /// Whether adapters have a bias (`lora_bias`).
    pub adapter_bias: bool,
    /// Ranks of some modules (`rank_pattern`).
    pub rank_pattern: PatternMap<usize>,
    /// Values of alpha of some modules (`alpha_pattern`).
    pub alpha_pattern: PatternMap<f64>,
    /// Modules that are trained as a whole (`modules_to_save`).
    pub modules_to_save: Vec<String>,
    /// Whether a tied embedding and output projection stay one parameter if one of them is trained
    /// as a whole (`ensure_weight_tying`). Otherwise they become two.
    pub keeps_tie: bool,
    /// The tokens whose rows are trained (`trainable_token_indices`).
    pub tokens: TrainedTokens,
    /// The initial values of the adapters (`init_lora_weights`).
    pub initial: InitialFactors,
    /// The model that the adapter belongs to (`base_model_name_or_path`).
    pub base_model: Option<String>,
    /// The branch, tag or commit of the base model's repository (`revision`).
    pub revision: Option<String>,
}

/// The adapted modules.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Targets {
    /// The modules that PEFT adapts by default in a model of this family.
    #[default]
    OfFamily,
    /// All linear layers except the output projection.
    AllLinear,
    /// The selected modules.
    Selected(ModulePattern),
}

/// The tokens whose rows of the embedding or of the output projection are trained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TrainedTokens {
    /// None.
    #[default]
    None,
    /// Rows of the token embedding.
    OfEmbedding(Vec<usize>),
    /// Rows of the modules with these names.
    OfModules(Vec<(String, Vec<usize>)>),
}

impl TrainedTokens {
    /// Returns the value of `trainable_token_indices`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        match self {
            Self::None => Value::Null,
            Self::OfEmbedding(tokens) => json!(tokens),
            Self::OfModules(modules) => {
                modules.iter().map(|(name, tokens)| (name.clone(), json!(tokens))).collect()
            }
        }
    }
}

/// The biases of the base model that are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedBiases {
    /// None.
    #[default]
    None,
    /// The biases of adapted modules.
    Adapted,
    /// All.
    All,
}

/// The initial values of the factors of an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InitialFactors {
    /// A is uniform in ±1/√in, B is 0 (`true`).
    #[default]
    Uniform,
    /// A is normal with deviation 1/r, B is 0 (`"gaussian"`).
    Gaussian,
    /// A and B are uniform, so that the adapter changes the model at once (`false`).
    Nonzero,
}

impl TrainedBiases {
    /// The names of the values.
    const NAMES: [(Self, &'static str); 3] =
        [(Self::None, "none"), (Self::Adapted, "lora_only"), (Self::All, "all")];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(own, _)| *own == self).map_or("none", |(_, name)| name)
    }
}

impl Default for LoraConfig {
    /// Returns the defaults of PEFT.
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 8.0,
            targets: Targets::default(),
            exclude: None,
            layers: None,
            layers_pattern: Vec::new(),
            dropout: 0.0,
            biases: TrainedBiases::default(),
            rank_stabilized: false,
            dora: false,
            adapter_bias: false,
            rank_pattern: PatternMap::default(),
            alpha_pattern: PatternMap::default(),
            modules_to_save: Vec::new(),
            keeps_tie: false,
            tokens: TrainedTokens::default(),
            initial: InitialFactors::default(),
            base_model: None,
            revision: None,
        }
    }
}

/// Fields that are read.
const READ: [&str; 20] = [
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "bias",
    "use_rslora",
    "use_dora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "init_lora_weights",
    "ensure_weight_tying",
    "base_model_name_or_path",
    "peft_type",
    "revision",
];

/// Fields that describe the file, or the layout of PyTorch modules, and that do not change what is
/// computed, with the reason.
const DESCRIPTIVE: [(&str, &str); 9] = [
    ("auto_mapping", OF_FILE),
    ("fan_in_fan_out", "the model knows the axes of its weights"),
    ("inference_mode", OF_FILE),
    ("megatron_core", OF_FILE),
    ("peft_version", OF_FILE),
    ("qalora_group_size", "it only affects use_qalora, which is not supported"),
    ("task_type", "the model determines the task"),
    ("loftq_config", "it only affects init_lora_weights \"loftq\", which is not supported"),
    ("runtime_config", OF_FILE),
];

/// The accepted value of `peft_type`.
const PEFT_TYPE: &str = "\"LORA\"";

/// The reason for fields that PEFT writes to files.
const OF_FILE: &str = "it describes a file of PEFT";

/// Fields of a file that name the base model. In a job, `model.pretrained` names it.
const BASE_MODEL: [&str; 2] = ["base_model_name_or_path", "revision"];

/// The consequence of a field for the initial values of the factors.
const OTHER_FACTORS: &str =
    "the factors would have other initial values; use init_lora_weights true or \"gaussian\"";

/// Fields of PEFT that are not supported, and what would be computed wrongly without them.
const UNSUPPORTED: [(&str, &str); 14] = [
    (
        "autocast_adapter_dtype",
        "with bf16 or fp16, adapters compute in the type of the model and have a master copy in fp32; for adapters in \
         fp32, use deepspeed.torch_autocast, which keeps the frozen weights in fp32 too",
    ),
    ("layer_replication", "the model would lack the repeated layers"),
    ("target_parameters", "these parameters would not be adapted"),
    ("use_qalora", "the adapter of a group of inputs would be applied to single inputs"),
    ("use_bdlora", "the factors would not be block-diagonal"),
    ("megatron_config", "the layers of Megatron are not split here"),
    ("alora_invocation_tokens", "the adapter would also change tokens before its invocation"),
    ("arrow_config", "the adapters would not be routed"),
    ("eva_config", OTHER_FACTORS),
    ("corda_config", OTHER_FACTORS),
    ("kasa_config", "the base weights would not be truncated"),
    ("lora_ga_config", OTHER_FACTORS),
    ("velora_config", "the inputs would not be projected"),
    ("monteclora_config", "the factors would not be sampled"),
];

/// Returns whether a value is none, or empty.
fn is_empty(value: &Value) -> bool {
    matches!(value, Value::Object(fields) if fields.is_empty()) || is_off("", value)
}

//= peft 0.21.2 tuners/lora/config.py _get_lora_subconfig
/// Returns whether a value switches the feature `name` off. An empty object does not: PEFT fills in
/// the defaults of the feature.
fn is_off(name: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        // PEFT takes any list of tokens for an invocation.
        Value::Array(list) => list.is_empty() && name != "alora_invocation_tokens",
        _ => false,
    }
}

/// The source of the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldSource {
    /// A job, in which an unknown field is a mistake.
    Job,
    /// A file of PEFT, whose newer versions add fields.
    File,
}

impl LoraConfig {
    /// Reads the section of a job.
    ///
    /// # Errors
    /// Returns [`LoraError`] for the first field that is unknown, not supported, has the wrong
    /// type, or is out of range.
    pub fn of_job(fields: &Map<String, Value>) -> Result<Self, LoraError> {
        Self::read(fields, FieldSource::Job)
    }

    /// Returns the fields of the section of a job that are not read, with the reason. Values that
    /// PEFT writes for every adapter of a language model are not among them.
    pub fn unread_in_job(fields: &Map<String, Value>) -> Vec<(&str, &'static str)> {
        let reason = |name: &str| {
            let described = DESCRIPTIVE.iter().find(|(known, _)| *known == name);
            let of_base =
                BASE_MODEL.contains(&name).then_some("model.pretrained names the base model");
            described.map(|(_, reason)| *reason).or(of_base)
        };
        let usual = [json!("CAUSAL_LM"), json!("LORA")];
        let given = fields.iter().filter(|(_, value)| !is_empty(value) && !usual.contains(value));
        given.filter_map(|(name, _)| Some((name.as_str(), reason(name)?))).collect()
    }

    /// Reads an `adapter_config.json`. Unknown fields are ignored if they have a value that
    /// switches them off.
    ///
    /// # Errors
    /// Returns [`LoraError`] for the first field that may change what is computed and is not
    /// supported, has the wrong type, or is out of range.
    pub fn of_file(fields: &Map<String, Value>) -> Result<Self, LoraError> {
        Self::read(fields, FieldSource::File)
    }

    //= peft 0.21.2 config.py _get_peft_type
    fn read(fields: &Map<String, Value>, source: FieldSource) -> Result<Self, LoraError> {
        check_names(fields, source)?;
        // Names are checked before values, so that a misspelled field is not taken for a missing
        // one.
        let reader = Fields(fields);
        match (reader.given("peft_type"), source) {
            (None, FieldSource::Job) => {}
            (None, FieldSource::File) => {
                let rule =
                    format!("{PEFT_TYPE}; add it if this is the adapter_config.json of LoRA");
                return Err(LoraError::value("peft_type", "missing", rule));
            }
            (Some(kind), _) if *kind == json!("LORA") => {}
            (Some(kind), _) => return Err(LoraError::value("peft_type", kind, PEFT_TYPE)),
        }
        let default = Self::default();
        let config = Self {
            rank: reader.rank("r")?.unwrap_or(default.rank),
            alpha: reader.number("lora_alpha")?.unwrap_or(default.alpha),
            targets: reader.targets()?,
            exclude: reader.pattern("exclude_modules")?,
            layers: reader.layers()?,
            layers_pattern: reader.names("layers_pattern")?,
            dropout: reader.number("lora_dropout")?.unwrap_or(default.dropout),
            biases: reader.biases()?,
            rank_stabilized: reader.flag("use_rslora")?,
            dora: reader.flag("use_dora")?,
            adapter_bias: reader.flag("lora_bias")?,
            rank_pattern: reader.pattern_map("rank_pattern", Fields::rank_of)?,
            alpha_pattern: reader.pattern_map("alpha_pattern", Fields::number_of)?,
            modules_to_save: reader.names("modules_to_save")?,
            keeps_tie: reader.flag("ensure_weight_tying")?,
            tokens: reader.tokens()?,
            initial: reader.initial()?,
            base_model: reader.text("base_model_name_or_path")?,
            revision: reader.text("revision")?,
        };
        config.check()?;
        Ok(config)
    }

    /// Checks the values together.
    ///
    /// # Errors
    /// Returns [`LoraError::Value`] for the first contradiction.
    pub(crate) fn check(&self) -> Result<(), LoraError> {
        if self.rank == 0 || self.rank_pattern.entries().any(|(_, rank)| rank == 0) {
            return Err(LoraError::value("r", 0, "at least 1"));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(LoraError::value("lora_dropout", self.dropout, "from 0 to below 1"));
        }
        let alphas = self.alpha_pattern.entries();
        let alphas = alphas.map(|(key, alpha)| (format!("alpha_pattern.{key}"), alpha));
        for (name, alpha) in [("lora_alpha".to_owned(), self.alpha)].into_iter().chain(alphas) {
            if alpha == 0.0 || !alpha.is_finite() {
                let rule = "another number: an adapter with scale 0 learns nothing";
                return Err(LoraError::value(&name, alpha, rule));
            }
            // The scale is applied in f32.
            if !(alpha as f32).is_finite() {
                let rule = format!("at most {:e}, the largest number of f32", f32::MAX);
                return Err(LoraError::value(&name, format!("{alpha:e}"), rule));
            }
        }
        if let Some(layers) = &self.layers {
            if !matches!(self.targets, Targets::Selected(ModulePattern::Names(_))) {
                let rule = "absent unless target_modules is a list of names, as in PEFT";
                return Err(LoraError::value("layers_to_transform", json!(layers), rule));
            }
        } else if !self.layers_pattern.is_empty() {
            let rule = "absent without layers_to_transform";
            return Err(LoraError::value("layers_pattern", json!(self.layers_pattern), rule));
        }
        // Compiles the expressions. An empty name is in no layer.
        layer_number(&self.layers_pattern, "")?;
        if self.dora && self.adapter_bias {
            return Err(LoraError::value("lora_bias", true, "false with use_dora, as in PEFT"));
        }
        Ok(())
    }

    /// Returns the fields of `adapter_config.json`, sorted by name. `targets` are the names of the
    /// adapted modules if the configuration has no list of its own.
    pub fn to_fields(&self, targets: Value) -> Map<String, Value> {
        let patterns = |entries: &mut dyn Iterator<Item = (&str, Value)>| {
            Value::Object(entries.map(|(key, value)| (key.to_owned(), value)).collect())
        };
        let or_null = |names: &[String]| if names.is_empty() { Value::Null } else { json!(names) };
        let initial = match self.initial {
            InitialFactors::Uniform => json!(true),
            InitialFactors::Gaussian => json!("gaussian"),
            InitialFactors::Nonzero => json!(false),
        };
        let fields = json!({
            "alpha_pattern":
                patterns(&mut self.alpha_pattern.entries().map(|(key, it)| (key, number(it)))),
            "auto_mapping": null,
            "base_model_name_or_path": self.base_model,
            "bias": self.biases.name(),
            "ensure_weight_tying": self.keeps_tie,
            "exclude_modules": self.exclude.as_ref().map(ModulePattern::to_json),
            "fan_in_fan_out": false,
            // PEFT saves this value too: a loaded adapter is not trained unless asked for.
            "inference_mode": true,
            "init_lora_weights": initial,
            "layers_pattern": or_null(&self.layers_pattern),
            "layers_to_transform": self.layers,
            "lora_alpha": number(self.alpha),
            "lora_bias": self.adapter_bias,
            "lora_dropout": self.dropout,
            "modules_to_save": or_null(&self.modules_to_save),
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern":
                patterns(&mut self.rank_pattern.entries().map(|(key, it)| (key, json!(it)))),
            "revision": self.revision,
            "target_modules": targets,
            "task_type": "CAUSAL_LM",
            "trainable_token_indices": self.tokens.to_json(),
            "use_dora": self.dora,
            "use_rslora": self.rank_stabilized,
        });
        match fields {
            Value::Object(fields) => fields,
            _ => unreachable!("it is an object"),
        }
    }

    /// Returns the configuration of an adapter of the base model `name`: an absolute path, or a
    /// repository, which `@` and its revision may follow.
    #[must_use]
    pub fn with_base_model(mut self, name: &str) -> Self {
        let is_path = Path::new(name).is_absolute();
        // A path may contain an `@`.
        let (name, revision) = match name.split_once('@').filter(|_| !is_path) {
            Some((name, revision)) => (name, Some(revision.to_owned())),
            None => (name, None),
        };
        (self.base_model, self.revision) = (Some(name.to_owned()), revision);
        self
    }

    //= peft 0.21.2 tuners/lora/layer.py LoraLayer.scaling
    /// Returns the scale of an adapter with this rank and alpha.
    pub(crate) fn scale(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        alpha / if self.rank_stabilized { rank.sqrt() } else { rank }
    }
}

/// Returns a number as JSON, without a fraction if it is an integer, as PEFT writes it.
fn number(value: f64) -> Value {
    // Above 1e15, not every integer is a double, and the cast could saturate.
    match value.fract() == 0.0 && value.abs() < 1e15 {
        true => json!(value as i64),
        false => json!(value),
    }
}

/// Checks that all fields are known and that features that are not supported are switched off.
fn check_names(fields: &Map<String, Value>, source: FieldSource) -> Result<(), LoraError> {
    for (name, value) in fields {
        let name = name.as_str();
        if READ.contains(&name) || DESCRIPTIVE.iter().any(|(known, _)| *known == name) {
            continue;
        }
        let unsupported = UNSUPPORTED.iter().find(|(other, _)| *other == name);
        let consequence = match (unsupported, source) {
            _ if is_off(name, value) && (unsupported.is_some() || source == FieldSource::File) => {
                continue;
            }
            (Some((_, consequence)), _) => (*consequence).to_owned(),
            (None, FieldSource::File) => {
                "it may change what the adapter computes; remove it if it does not".to_owned()
            }
            (None, FieldSource::Job) => {
                // Up to three edits count as a typing error.
                let near = |known: &&&str| strsim::damerau_levenshtein(known, name);
                let nearest = READ.iter().min_by_key(near).filter(|known| near(known) <= 3);
                let hint = match nearest {
                    Some(known) => format!("did you mean `{known}`?"),
                    // The last three fields are for files, not for jobs.
                    None => format!("its fields are {}", READ[..17].join(", ")),
                };
                return Err(LoraError::Unknown { name: name.to_owned(), hint });
            }
        };
        let (name, value) = (name.to_owned(), value.to_string());
        return Err(LoraError::Unsupported { name, value, consequence });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(fields: Value) -> Result<LoraConfig, String> {
        LoraConfig::of_job(fields.as_object().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn fields_are_read_and_written() {
        assert_eq!(job(json!({})).unwrap(), LoraConfig::default());
        let fields = json!({
            "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.05,
            "layers_to_transform": 1, "layers_pattern": "layers", "bias": "lora_only", "use_rslora": true,
            "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 0.5}, "modules_to_save": ["lm_head"],
            "init_lora_weights": "gaussian", "exclude_modules": ".*\\.3\\..*",
        });
        let config = job(fields).unwrap();
        assert_eq!((config.rank, config.layers.clone()), (4, Some(vec![1])));
        assert_eq!(config.scale(4, 16.0), 8.0);
        let written = config.to_fields(json!(["q_proj", "v_proj"]));
        assert_eq!(LoraConfig::of_file(&written), Ok(config));
        assert_eq!(written["lora_alpha"].to_string(), "16");
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        for (fields, expected) in [
            (json!({"r": 0}), "`r` is 0, but it must be a whole number from 1"),
            (
                json!({"r": "8"}),
                "`r` is \"8\", but it must be a whole number from 1 to 65536; write 8",
            ),
            (json!({"lora_alpha": "16.5"}), "must be a finite number; write 16.5"),
            (json!({"use_rslora": "True"}), "must be true or false; write true"),
            (json!({"lora_r": 8}), "`lora_r` is not a field of LoRA; its fields are r, lora_alpha"),
            (json!({"lora_alfa": 8}), "did you mean `lora_alpha`?"),
            (json!({"lora_alpha": 0}), "learns nothing"),
            (
                json!({"lora_alpha": 1e39}),
                "`lora_alpha` is 1e39, but it must be at most 3.4028235e38",
            ),
            (json!({"lora_dropout": 1}), "from 0 to below 1"),
            (json!({"bias": true}), "\"none\", \"lora_only\" or \"all\""),
            (json!({"target_modules": []}), "absent or not empty"),
            (json!({"target_modules": 3}), "a list of names"),
            (json!({"target_modules": "all-linear", "layers_to_transform": [1]}), "as in PEFT"),
            (json!({"layers_pattern": "h"}), "absent without layers_to_transform"),
            (json!({"trainable_token_indices": [3, -1]}), "a list of token ids"),
            (json!({"trainable_token_indices": {"wte": 3}}), "`trainable_token_indices.wte` is 3"),
            (json!({"trainable_token_indices": [3, 4, 3]}), "3 occurs twice"),
            (json!({"init_lora_weights": "pissa"}), "would have other values"),
            (json!({"autocast_adapter_dtype": true}), "use deepspeed.torch_autocast"),
            (json!({"rank_pattern": {"q_proj": -1}}), "`rank_pattern.q_proj` is -1"),
            (json!({"peft_type": "IA3"}), "`peft_type` is \"IA3\", but it must be \"LORA\""),
        ] {
            let error = job(fields.clone()).unwrap_err();
            assert!(error.contains(expected), "{fields}: {error}");
        }
    }

    //= peft 0.21.2 tuners/lora/config.py _get_lora_subconfig
    #[test]
    fn features_with_their_defaults_are_not_off() {
        for (name, _) in UNSUPPORTED {
            for value in [json!({}), json!([]), json!(null)] {
                let is_accepted = match (name, &value) {
                    (_, Value::Null) => true,
                    ("alora_invocation_tokens", _) => false,
                    (_, value) => value.is_array(),
                };
                let read = job(json!({ name: value }));
                assert_eq!(read.is_ok(), is_accepted, "{name}: {value}");
            }
        }
        let error = job(json!({"kasa_config": {}})).unwrap_err();
        assert!(error.contains("`kasa_config` is {}, which is not supported: the base"), "{error}");
    }

    #[test]
    fn repositories_may_have_a_revision() {
        for (name, model, revision) in [
            ("owner/name", "owner/name", None),
            ("owner/name@v1.0", "owner/name", Some("v1.0")),
            ("/runs/a@b/model", "/runs/a@b/model", None),
        ] {
            let fields = LoraConfig::default().with_base_model(name).to_fields(Value::Null);
            assert_eq!(fields["base_model_name_or_path"], json!(model));
            assert_eq!(fields["revision"], json!(revision));
        }
    }

    #[test]
    fn fields_of_a_job_that_are_not_read_have_a_reason() {
        let unread = |fields: Value| {
            let names = LoraConfig::unread_in_job(fields.as_object().unwrap()).into_iter();
            names.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
        };
        let fields = json!({
            "r": 4, "peft_type": "LORA", "task_type": "CAUSAL_LM", "loftq_config": {},
            "fan_in_fan_out": false, "revision": null, "init_lora_weights": true,
        });
        assert_eq!(unread(fields), [""; 0]);
        let fields = json!({
            "task_type": "SEQ_CLS", "loftq_config": {"loftq_bits": 4}, "fan_in_fan_out": true,
            "base_model_name_or_path": "x", "revision": "main",
        });
        assert_eq!(unread(fields.clone()).len(), fields.as_object().unwrap().len());
    }

    //= peft 0.21.2 config.py _get_peft_type
    #[test]
    fn files_of_newer_versions_are_read_unless_they_compute_something_else() {
        let read = |fields: Value| LoraConfig::of_file(fields.as_object().unwrap());
        let file =
            json!({"peft_type": "LORA", "new_config": null, "use_new": false, "loftq_config": {}});
        assert_eq!(read(file), Ok(LoraConfig::default()));
        for (fields, part) in [
            (json!({"use_new": true}), "`use_new` is true, which is not supported: it may change"),
            (json!({"new_config": {}}), "`new_config` is {}, which is not supported"),
            (json!({}), "`peft_type` is missing, but it must be \"LORA\""),
            (json!({"peft_type": null}), "`peft_type` is missing, but it must be \"LORA\""),
        ] {
            let error = read(fields).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let error = job(json!({"use_new": false})).unwrap_err();
        assert!(error.contains("not a field of LoRA"), "{error}");
    }
}
