//! Language modelling on token sequences.
//!
//! Main type: [`Causal`], the recipe of all language models, which is compiled once for all of them. Documents are joined and packed into sequences of
//! `data.sequence_length` tokens without padding. Tokens at the end that do not fill a sequence are dropped. Inputs and
//! labels are the same tokens. As in `transformers`, the loss shifts the labels by one position. Conversations are samples
//! of their own instead ([`CausalData`]).
//!
//! The data loader of a rank is a [`CausalSource`]. A step takes the same number of sequences on every rank, so that all
//! ranks call the same collectives.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{Batch, BoxError, Engine, EvaluationStream, Interrupt};
use deepburn_chat::Day;
use deepburn_config::{BatchPlan, DataKind, DynamicBatchingPlan, Job, Plan, counted};
use deepburn_datasets::{
    BudgetSampler, Corpus, DataError, DataShard, IGNORE_INDEX, MicroBatch, Order, RowDocuments,
    StepShape, Tokenizer,
};
use deepburn_models::causal_lm::{CausalBatch, IGNORED_LABEL, InputError};
use deepburn_models::decoder::{AnyDecoder, Decoder};
use deepburn_models::hf::{
    ADAPTER_CONFIG, AdapterFolder, GENERATION_CONFIG, HfExport, ModelConfigError, ModelFolderError,
    ModelFolderWriter,
};
use deepburn_models::lora::{InitialFactors, LoraConfig};
use deepburn_models::{
    Architecture, FloatType, LanguageModelConfig, LanguageModelFamily, TokenLimits,
};
use serde_json::{Map, Value};

use crate::data::causal_data::{CausalData, CausalSource};
use crate::data::causal_task::{CausalTask, Objective};
use crate::data::chat::{ChatCorpus, SampleLimits, TEMPLATE_FILE, TEMPLATE_FOLDER};
use crate::data::companions::{Companions, kept_generation_config};
use crate::data::corpus::open_corpus;
use crate::data::job_tokenizer::{JobTokenizer, VocabularyOrigin};
use crate::data::lengths::check_length;
use crate::data::places::Places;
use crate::data::preference::{PreferenceBatch, PreferenceCorpus};
use crate::data::recipe::{
    EvaluationSettings, InitialWeights, JobInputs, Recipe, SubjectInfo, WeightOrigin,
};
use crate::data::sample_prompts::TextSampler;
use crate::data::unlearned_tokens::warn_of_unlearned_tokens;
use crate::data::vocabulary::{
    check_special_tokens, is_vocabulary_given, with_special_tokens, with_vocabulary,
};
use crate::failure::Failure;
use crate::job::adapted_model::adapter_in;
use crate::job::adapter_base::{base_name, check_base};
use crate::job::memory::check_step;

/// A language model and its data.
pub(crate) struct Causal {
    /// Configuration of the model, with the vocabulary and the special tokens of the tokenizer.
    config: AnyDecoder,
    /// The data of all splits, and the tokenizer.
    data: CausalData,
    /// The largest batch of the run.
    batch: BatchPlan,
    /// The order of training sequences.
    order: Order,
    /// The source of the initial weights.
    origin: WeightOrigin,
    /// The files that are exported unchanged.
    companions: Companions,
    /// The `generation_config.json` of the pretrained model, if it is exported unchanged.
    generation_config: Option<Map<String, Value>>,
    /// How the job evaluates.
    evaluation: EvaluationSettings,
    /// What is optimized.
    objective: Objective,
    /// What is generated after each evaluation.
    sampler: Option<Arc<TextSampler>>,
}

impl Causal {
    /// Reads and checks the data for a model with the configuration of the job.
    ///
    /// The limits of the configuration are checked before the data is tokenized, which may take minutes. The vocabulary
    /// is known only afterwards.
    ///
    /// # Errors
    /// Returns a user's mistake if the model or the data is invalid, or if they do not match.
    pub(crate) fn prepare(config: AnyDecoder, inputs: &JobInputs<'_>) -> Result<Self, Failure> {
        let JobInputs { job, places, pretrained, batch, order, day } = *inputs;
        let limits = config.limits();
        // Samples are shortened to the model's limit if they exceed it, and this is said.
        if job.data.kind.samples().is_none() {
            check_length(job, limits.max_len, limits.max_len_field)?;
        }
        check_step(batch, job.data.sequence_length)?;
        // Without a tokenizer, the vocabulary size of token files is unknown.
        let is_bare = matches!(job.data.kind, DataKind::Tokens) && job.data.tokenizer.is_none();
        // Token ids are checked against the vocabulary size of the model, if the job or a pretrained model sets it, or
        // if there is no tokenizer. Otherwise the tokenizer determines the size.
        let rows = (is_vocabulary_given(job) || is_bare).then_some(limits.vocab_size);
        let JobTokenizer { tokenizer, vocabulary } = JobTokenizer::of(job, places, pretrained)?;
        let data = open_data(job, places, tokenizer, rows, limits, day)?;
        let own_ends = config.extra().eos_token_ids();
        let mut config = with_vocabulary(config, job, data.tokenizer())?;
        // Token files of a model without pretrained weights and without a tokenizer have no known special tokens.
        if data.tokenizer().is_some() || pretrained.is_some() {
            let special = ["bos_token_id", "eos_token_id"];
            config = with_special_tokens(config, job, data.tokenizer(), vocabulary, &special)?;
        }
        check_special_tokens(job, config.limits().vocab_size)?;
        let tokenizer = data.tokenizer();
        // An end of text that the model already has changes nothing.
        let end = tokenizer.filter(|_| job.data.eos_token.is_some()).map(Tokenizer::end_of_text);
        let is_other_end = end.is_some_and(|end| end.is_none_or(|end| !own_ends.contains(&end)));
        let is_new = vocabulary == VocabularyOrigin::New || is_other_end;
        let generation_config = kept_generation_config(pretrained, !is_new, &job.model.config)?;
        let mut config = with_adapter(config, job, pretrained)?;
        warn_of_unlearned_tokens(&config, &data, pretrained)?;
        let objective = Objective::of(job);
        if let Objective::Preferences(_) = objective {
            refuse_random_adapter(&config)?;
            // Dropout would make the log-probabilities noisy; TRL disables it too.
            config = config.without_dropout();
        }
        let sampler = TextSampler::of_job(job, &data, &config, generation_config.as_ref())?;
        Ok(Self {
            companions: companions(&data, pretrained)?,
            sampler: sampler.map(Arc::new),
            generation_config,
            config,
            data,
            batch,
            order,
            origin: WeightOrigin::of(inputs),
            evaluation: EvaluationSettings::of(job),
            objective,
        })
    }
}

impl SubjectInfo for Causal {
    /// Returns the configuration, which determines parameters and activations.
    fn architecture(&self) -> &dyn Architecture {
        &self.config
    }

    fn adapted(&self) -> Option<&AnyDecoder> {
        self.config.adapter().map(|_| &self.config)
    }

    /// Returns the configuration, with the `generation_config.json` of the pretrained model if it is kept, and with the
    /// configuration of the adapter.
    fn hf_export(&self) -> HfExport {
        let mut export = self.config.hf_export();
        if let Some(adapter) = self.config.adapter() {
            export.set_document(ADAPTER_CONFIG, adapter.file_fields());
        }
        if let Some(fields) = &self.generation_config {
            export.set_document(GENERATION_CONFIG, fields.clone());
        }
        export
    }

    fn companions(&self) -> &Companions {
        &self.companions
    }

    fn longest(&self, limit: usize) -> usize {
        self.data.longest(limit)
    }

    fn reference_fingerprint(&self) -> Result<Option<String>, ModelFolderError> {
        let CausalData::Pairs(_) = self.data else { return Ok(None) };
        let base = match &self.origin.pretrained {
            Some(folder) => self.config.base_fingerprint(folder)?,
            None => format!("seed {}", self.origin.seed),
        };
        let adapter = self.config.adapter_fingerprint()?;
        Ok(Some(adapter.map_or(base.clone(), |adapter| format!("{base} {adapter}"))))
    }

    /// Returns 2, because the first token of a sequence is not predicted.
    fn min_tokens(&self) -> usize {
        2
    }

    /// Returns the number of sequences of a rank in an epoch, which is the same on all ranks.
    fn samples_per_epoch(&self, shard: DataShard) -> Result<usize, DataError> {
        self.data.samples_per_epoch(shard, self.order, self.batch)
    }

    fn num_samples(&self) -> Result<usize, DataError> {
        Ok(self.data.num_samples())
    }

    /// Returns a hash of the training tokens.
    fn data_fingerprint(&self) -> Result<String, DataError> {
        self.data.fingerprint()
    }

    /// Returns a hash of the evaluation tokens; `None` without an evaluation split.
    fn evaluation_fingerprint(&self) -> Result<Option<String>, DataError> {
        self.data.evaluation_fingerprint()
    }

    /// Returns an error that says how many tokens a micro-batch has instead.
    ///
    /// # Errors
    /// Always returns a user's mistake.
    fn budget_sampler(
        &self,
        _shape: StepShape,
        _dynamic: &DynamicBatchingPlan,
    ) -> Result<BudgetSampler, Failure> {
        let instead = match self.data {
            CausalData::Stream(_) => "the text is joined into sequences of one length",
            CausalData::Samples(_) => {
                "data.packing joins samples into sequences of data.sequence_length tokens, so that each micro-batch has as \
                 many"
            }
            CausalData::Pairs(_) => "a micro-batch has train_micro_batch_size_per_gpu pairs",
        };
        Err(Failure::mistake(format!(
            "deepspeed.data_efficiency.data_sampling.dynamic_batching.enabled: supported only for data of kind \
             \"classification\"; set it to false: {instead}"
        )))
    }
}

impl<B: FusedOps + OptimizerOps> Recipe<B> for Causal {
    /// The language model on the training backend.
    type Model = Decoder<Training<B>>;
    /// Next-token prediction, or preference optimization.
    type Task = CausalTask<AnyDecoder, B::Device>;
    /// Sequences of one rank.
    type Source = CausalSource;

    /// Builds the model. Its weights are initialized or read when they are first used.
    fn model(&self, weights: InitialWeights, device: &B::Device) -> Result<Self::Model, Failure> {
        self.origin.model(&self.config, weights, device)
    }

    /// Reads and checks the pretrained weights, if there are some.
    fn check_weights(&self) -> Result<(), Failure> {
        self.origin.check(&self.config)
    }

    fn task(&self, device: B::Device) -> Self::Task {
        let task = CausalTask::new(self.config.clone(), device, self.objective);
        task.with_sampler(self.sampler.clone())
    }

    /// Starts the data loader, with the evaluation settings of the job.
    fn source(&self, shard: DataShard, plan: &Plan) -> Result<CausalSource, DataError> {
        self.data.source(shard, self.order, plan, self.evaluation)
    }

    /// Returns the batches of the whole test split. `eval_max_samples` does not limit it.
    fn test(
        &self,
        shard: DataShard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, TokenBatch>>, DataError> {
        self.data.test(shard, self.evaluation.batch_size(plan))
    }

    fn measure_reference(
        &self,
        engine: &Engine<B, Self::Model>,
        device: &B::Device,
        plan: &Plan,
        interrupt: &Interrupt,
    ) -> Result<bool, BoxError> {
        let CausalData::Pairs(corpus) = &self.data else { return Ok(true) };
        let rows = self.evaluation.batch_size(plan);
        corpus.measure_reference(engine, (&self.config, device), rows, interrupt)
    }

    /// Starts the export, with weights in f32.
    fn writer(&self, folder: &Path) -> Result<ModelFolderWriter, ModelFolderError> {
        let mut writer = self.config.folder_writer(folder, FloatType::F32)?;
        if let Some(fields) = &self.generation_config {
            writer.set_document(GENERATION_CONFIG, fields.clone());
        }
        Ok(writer)
    }

    /// Returns the tokenizer; `None` for token files without one.
    fn tokenizer(&self) -> Option<&Tokenizer> {
        self.data.tokenizer()
    }
}

/// Returns the failure for data that cannot be opened. With an adapter, a tokenizer with more tokens than the embedding has
/// rows needs another remedy than a larger vocabulary.
fn of_corpus(error: DataError, job: &Job, rows: usize) -> Failure {
    match error {
        DataError::Setting { name, .. }
            if job.model.has_adapter() && name == "model.config.vocab_size" =>
        {
            Failure::mistake(format!(
                "data.tokenizer: has more tokens than the embedding of the pretrained model has rows ({rows}), which cannot \
                 grow with an adapter; use the model's own tokenizer, or {LARGER_BASE}"
            ))
        }
        error => Failure::mistake(error),
    }
}

/// Returns the model with the adapter of the job, if it has one.
///
/// # Errors
/// Returns a user's mistake if the adapter does not fit the model, or if the vocabulary is larger than the pretrained
/// model's.
fn with_adapter(
    config: AnyDecoder,
    job: &Job,
    pretrained: Option<&Path>,
) -> Result<AnyDecoder, Failure> {
    let Some(folder) = pretrained.filter(|_| job.model.has_adapter()) else { return Ok(config) };
    refuse_changes(&job.model.config)?;
    refuse_new_rows(&config, folder)?;
    let place = job.model.pretrained.as_ref();
    let base = base_name(place, folder);
    let (key, config) = match (&job.model.lora, &job.model.adapter) {
        (Some(fields), _) => {
            let of_key = |error| Failure::mistake(format!("model.lora: {error}"));
            let lora = LoraConfig::of_job(fields).map_err(of_key)?.with_base_model(&base);
            let config = config.with_adapter(lora).map_err(of_key)?;
            for setting in config.unused_settings().map_err(of_key)? {
                tracing::warn!("model.lora.{setting} has no effect: it selects nothing; remove it");
            }
            ("model.lora", config)
        }
        (None, Some(given)) => {
            let of_key = |error| Failure::mistake(format!("model.adapter: {error}"));
            // A run has its adapter in a subfolder.
            let adapter = adapter_in(given).unwrap_or_else(|| given.clone());
            let adapter = AdapterFolder::open(&adapter).map_err(of_key)?;
            check_base("model.pretrained", &adapter, &config, (place, folder))?;
            let adapter = adapter.with_base_model(&base);
            ("model.adapter", config.with_trained_adapter(adapter).map_err(of_key)?)
        }
        (None, None) => return Ok(config),
    };
    if job.training.save_merged {
        let of_key = |error| Failure::mistake(format!("training.save_merged: {key}: {error}"));
        config.check_mergeable().map_err(of_key)?;
    }
    if let Some(adapter) = config.adapter() {
        let trained = config.parameters().into_iter().filter(|it| !it.is_frozen);
        let trained: usize = trained.map(|it| it.num_elements()).sum();
        let (modules, all) = (counted(adapter.num_modules(), "module"), config.num_parameters());
        tracing::info!("{key}: adapters in {modules}; {trained} of {all} parameters are trained");
    }
    Ok(config)
}

/// Refuses a vocabulary that is larger than the pretrained model's. PEFT's files name the base model, whose embeddings lack
/// the new rows.
///
/// # Errors
/// Returns a user's mistake with the remedy.
fn refuse_new_rows(config: &AnyDecoder, folder: &Path) -> Result<(), Failure> {
    match config.new_rows(folder).map_err(Failure::mistake)? {
        0 => Ok(()),
        new_rows => Err(Failure::mistake(format!(
            "model.config.vocab_size: adds {new_rows} rows to the embeddings of {}, which is not supported with an adapter: \
             its files would belong to a base model without these rows; {LARGER_BASE}",
            folder.display()
        ))),
    }
}

/// The remedy if a job with an adapter needs a larger vocabulary.
const LARGER_BASE: &str = "resize the base model first (transformers: resize_token_embeddings, save_pretrained), give the \
     result as model.pretrained, and train its new rows with trainable_token_indices or modules_to_save; or train the whole \
     model";

/// Refuses overrides of the model's configuration that change what it computes. An adapter names its base model and has
/// no place for them, so programs that read it would compute something else.
///
/// # Errors
/// Returns a user's mistake that names the field.
fn refuse_changes(overrides: &Map<String, Value>) -> Result<(), Failure> {
    // Dropout is only used in training, the vocabulary is checked with the files, and token ids do not belong to the model.
    let is_harmless = |name: &str| {
        ["dropout", "pdrop", "_token_id", "dtype"].iter().any(|part| name.contains(part))
            || name == "vocab_size"
    };
    match overrides.iter().find(|(name, value)| !is_harmless(name) && !value.is_null()) {
        None => Ok(()),
        Some((name, _)) => Err(Failure::mistake(format!(
            "model.config.{name}: cannot be changed with an adapter, whose files name the base model but not this change; \
             change the config.json of the base model, or remove it"
        ))),
    }
}

/// Opens the data of a job for a model with these `limits`. `rows` is its vocabulary size, if it is known.
///
/// # Errors
/// Returns a user's mistake if the data is invalid.
fn open_data(
    job: &Job,
    places: &Places,
    tokenizer: Option<Tokenizer>,
    rows: Option<usize>,
    limits: TokenLimits,
    day: Day,
) -> Result<CausalData, Failure> {
    let Some(chat) = job.data.kind.samples() else {
        let corpus = open_corpus(job, places, tokenizer, rows)
            .map_err(|error| of_corpus(error, job, limits.vocab_size))?;
        log_separator(&corpus);
        return Ok(CausalData::Stream(Box::new(corpus)));
    };
    let tokenizer = tokenizer.ok_or_else(|| {
        Failure::mistake(format!(
            "data.tokenizer: is missing, and kind \"{}\" needs a tokenizer; give it, or model.pretrained",
            job.data.kind.name()
        ))
    })?;
    let vocab_size = rows.unwrap_or_else(|| tokenizer.vocab_size());
    let limits = SampleLimits { vocab_size, max_len: limits.max_len };
    Ok(match job.data.kind {
        DataKind::Preference(_) => {
            let corpus = PreferenceCorpus::open(job, chat, places, tokenizer, limits, day)?;
            CausalData::Pairs(Box::new(corpus))
        }
        _ => {
            let corpus = ChatCorpus::open(job, chat, places, tokenizer, limits, day)?;
            CausalData::Samples(Box::new(corpus))
        }
    })
}

/// Refuses an adapter with random factors for preference optimization: the reference is the model at the start of the
/// run, and has to be the base model.
///
/// # Errors
/// Returns a user's mistake.
fn refuse_random_adapter(config: &AnyDecoder) -> Result<(), Failure> {
    let is_new = config.trained_adapter().is_none();
    match config.adapter().filter(|_| is_new).map(|adapter| adapter.config().initial) {
        Some(InitialFactors::Nonzero) => Err(Failure::mistake(
            "model.lora.init_lora_weights: false starts with another model than the base model, which preference \
             optimization compares with; write true or \"gaussian\"",
        )),
        _ => Ok(()),
    }
}

/// Returns the files that are exported unchanged. A template of the job replaces the tokenizer's: a model has to be
/// used with the template that it was trained with.
///
/// # Errors
/// Returns a user's mistake if a folder cannot be read.
fn companions(data: &CausalData, pretrained: Option<&Path>) -> Result<Companions, Failure> {
    let mut companions = Companions::find(pretrained, data.tokenizer())?;
    let template = match data {
        CausalData::Stream(_) => None,
        CausalData::Samples(corpus) => corpus.template.as_ref(),
        CausalData::Pairs(corpus) => corpus.template.as_ref(),
    };
    if let Some(template) = template {
        companions.files.retain(|name, _| !name.starts_with(TEMPLATE_FOLDER));
        companions.replace(TEMPLATE_FILE, template);
    }
    Ok(companions)
}

/// Logs the token between documents, because the tokenizer determines it unless the job names it.
fn log_separator(corpus: &Corpus) {
    let token = corpus.tokenizer.as_ref().and_then(Tokenizer::end_of_text_token);
    if let (Some(id), Some(token)) = (corpus.separator, token) {
        tracing::info!("documents are separated by the end-of-text token `{token}`, id {id}");
    }
}

/// Returns the configuration of the pretrained model, or the default one, with the overrides of the job. Logs an
/// enlarged vocabulary, because the weights then have new rows.
///
/// # Errors
/// Returns a user's mistake if the folder has no model, or if a field is unknown, out of range, or not read although it
/// may change what the model computes.
pub(crate) fn model_config<C: LanguageModelFamily>(
    job: &Job,
    pretrained: Option<&Path>,
) -> Result<C, Failure> {
    let base = match pretrained {
        Some(folder) => C::open(folder).map_err(Failure::mistake)?,
        None => C::default_size(),
    };
    let named = |error| invalid_field(job, pretrained, &error);
    let config = base.with_overrides(&without_dtype(&job.model.config)).map_err(named)?;
    config.validate().map_err(named)?;
    let (old, new) = (base.limits().vocab_size, config.limits().vocab_size);
    if pretrained.is_some() {
        warn_of_other_computation(&base, &config);
    }
    if pretrained.is_some() && new > old {
        tracing::info!(
            "model.config.vocab_size: the pretrained model has {old} tokens and gets {new}: each new row of its embedding \
             and output layer is the mean of the existing rows"
        );
    }
    Ok(config)
}

/// Returns the overrides of a model's configuration without the type of its weights, which has no effect. Logs a warning
/// if it is given.
///
/// Training follows the `deepspeed` section, and the exported weights are in fp32. A type in `config.json` would only
/// contradict them.
pub(crate) fn without_dtype(overrides: &Map<String, Value>) -> Map<String, Value> {
    let mut fields = overrides.clone();
    for name in ["dtype", "torch_dtype"] {
        if let Some(value) = fields.remove(name).filter(|value| !value.is_null()) {
            tracing::warn!(
                "model.config.{name}: {value} has no effect: deepspeed.bf16.enabled and deepspeed.fp16.enabled set the type \
                 of training, and the model is exported in fp32; remove it"
            );
        }
    }
    fields
}

/// Fields that change what pretrained weights compute, but not their shapes.
const COMPUTING: [&str; 6] = [
    "activation_function",
    "layer_norm_epsilon",
    "n_head",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
];

/// Warns of overrides with which pretrained weights compute something else than they were trained for.
fn warn_of_other_computation<C: LanguageModelConfig>(base: &C, config: &C) {
    let fields = |config: &C| config.hf_export().documents.remove("config.json");
    let Some((base, config)) = fields(base).zip(fields(config)) else { return };
    for name in COMPUTING {
        if let Some((own, given)) = base.get(name).zip(config.get(name))
            && own != given
        {
            tracing::warn!(
                "model.config.{name}: {given} instead of the pretrained model's {own} changes what its weights compute; \
                 remove it to keep the model's"
            );
        }
    }
}

/// Returns the failure for an invalid field of the model's configuration. It names the file of a field that only the
/// pretrained model has, and the key that can remove the field.
fn invalid_field(job: &Job, pretrained: Option<&Path>, error: &ModelConfigError) -> Failure {
    let of_file = |field: &str| pretrained.filter(|_| !job.model.config.contains_key(field));
    let file = |folder: &Path| folder.join("config.json").display().to_string();
    if let ModelConfigError::Unknown { name, .. } = error
        && let Some(folder) = of_file(name)
    {
        return Failure::mistake(format!("{}: {error}", file(folder)));
    }
    if let Some(field) = error.unsupported_field()
        && let Some(folder) = of_file(field)
    {
        let key = format!("model.config.{field}");
        return Failure::mistake(format!("{}: {error} ({key} in the job)", file(folder)));
    }
    Failure::mistake(format!("model.config: {error}"))
}

/// A micro-batch of token sequences.
#[derive(Debug)]
pub(crate) enum TokenBatch {
    /// Sequences. The labels are the input tokens, or ignored. The loss shifts them by one position.
    Sequences(MicroBatch),
    /// Pairs of completions.
    Pairs(PreferenceBatch),
}

impl From<MicroBatch> for TokenBatch {
    fn from(batch: MicroBatch) -> Self {
        Self::Sequences(batch)
    }
}

impl TokenBatch {
    /// Returns the sequences.
    fn sequences(&self) -> &MicroBatch {
        match self {
            Self::Sequences(batch) => batch,
            Self::Pairs(pairs) => &pairs.batch.sequences,
        }
    }

    /// Truncates every sequence to its first `length` tokens, at least 1.
    pub(crate) fn truncate(&mut self, length: usize) {
        match self {
            Self::Sequences(batch) => batch.truncate(length),
            Self::Pairs(pairs) => pairs.batch.sequences.truncate(length),
        }
    }
}

impl Batch for TokenBatch {
    /// Returns the tokens of all sequences, without padding.
    fn num_tokens(&self) -> usize {
        self.sequences().num_tokens()
    }

    /// Counts the positions that predict a token, or the pairs. The loss of a batch is weighted by this number.
    fn num_targets(&self) -> usize {
        match self {
            Self::Sequences(batch) => batch.num_targets(),
            Self::Pairs(pairs) => pairs.batch.pairs.len(),
        }
    }
}

/// Copies a batch to a device and checks it against the vocabulary size and the maximum length of the model.
///
/// # Errors
/// Returns [`InputError`] for a token outside the vocabulary or a sequence that is too long.
pub(crate) fn causal_batch<B: Backend>(
    batch: &MicroBatch,
    config: &impl LanguageModelConfig,
    device: &B::Device,
) -> Result<CausalBatch<B>, InputError> {
    let MicroBatch { input_ids, labels, shape, .. } = batch;
    // Token ids are never negative. The only negative label is the one of padding.
    let ids: Vec<u32> = input_ids.iter().map(|id| *id as u32).collect();
    let label = |label: &i32| if *label == IGNORE_INDEX { IGNORED_LABEL } else { (*label).into() };
    let labels: Vec<i64> = labels.iter().map(label).collect();
    match document_starts(batch) {
        Some(starts) => {
            CausalBatch::of_documents(config, &ids, Some(&labels), starts, *shape, device)
        }
        None => CausalBatch::new(config, &ids, Some(&labels), *shape, device),
    }
}

/// Returns the position of the first token of the document of each token; `None` if each row is one document. Padding
/// follows a document, so that no token attends to it, and it starts a document where there are several.
fn document_starts(batch: &MicroBatch) -> Option<Arc<[usize]>> {
    let RowDocuments::Separate(rows) = &batch.documents else { return None };
    if rows.iter().all(|documents| documents.len() < 2) {
        return None;
    }
    let length = batch.shape[1];
    let mut starts = Vec::with_capacity(rows.len() * length);
    for documents in rows {
        let mut start = 0;
        for document in documents {
            starts.resize(starts.len() + document, start);
            start += document;
        }
        starts.resize(starts.len() + length - start, start);
    }
    Some(starts.into())
}
