//! Language modeling on token sequences.
//!
//! Main type: [`Causal`], the recipe of all language models, which is compiled once for all of
//! them. Documents are joined and packed into sequences of `data.sequence_length` tokens without
//! padding. Tokens at the end that do not fill a sequence are dropped. Inputs and labels are the
//! same tokens. As in `transformers`, the loss shifts the labels by one position. Conversations are
//! samples of their own instead ([`CausalData`]).
//!
//! The data loader of a rank is a [`CausalSource`]. A step takes the same number of sequences on
//! every rank, so that all ranks call the same collectives.

use std::path::Path;
use std::sync::Arc;

use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{BoxError, Engine, EvaluationStream, Interrupt};
use deepburn_chat::Day;
use deepburn_config::{BatchPlan, DataKind, DynamicBatchingPlan, Job, Plan};
use deepburn_datasets::{BudgetSampler, Corpus, DataError, DataShard, StepShape, Tokenizer};
use deepburn_models::decoder::{AnyDecoder, Decoder};
use deepburn_models::hf::{ADAPTER_CONFIG, GENERATION_CONFIG, HfExport, ModelFolderError};
use deepburn_models::{Architecture, LanguageModelConfig, TokenLimits};
use serde_json::{Map, Value};

use crate::data::causal_data::{CausalData, CausalSource};
use crate::data::causal_task::{CausalTask, Objective};
use crate::data::chat::{ChatCorpus, SampleLimits, TEMPLATE_FILE, TEMPLATE_FOLDER};
use crate::data::companions::{Companions, kept_generation_config, own_generation_config};
use crate::data::corpus::open_corpus;
use crate::data::job_adapter::{LARGER_BASE, refuse_random_adapter, with_adapter};
use crate::data::job_tokenizer::JobTokenizer;
use crate::data::lengths::check_length;
use crate::data::places::Places;
use crate::data::preference::PreferenceCorpus;
use crate::data::recipe::{JobInputs, Recipe, RecipeSettings, SubjectInfo, WeightOrigin};
use crate::data::text_sampler::TextSampler;
use crate::data::token_batch::TokenBatch;
use crate::data::turn_ends::{end_tokens, replaces_tokens, warn_of_other_ends};
use crate::data::unlearned_tokens::warn_of_unlearned_tokens;
use crate::data::vocabulary::{
    check_special_tokens, is_vocabulary_given, with_special_tokens, with_vocabulary,
};
use crate::failure::Failure;
use crate::job::memory::check_step;

/// A language model and its data.
pub(crate) struct Causal {
    /// Configuration of the model, with the vocabulary and the special tokens of the tokenizer.
    config: AnyDecoder,
    /// The data of all splits, and the tokenizer.
    data: CausalData,
    /// The largest batch of the run.
    batch: BatchPlan,
    /// Order, initial weights, exported files and evaluation.
    settings: RecipeSettings,
    /// The `generation_config.json` of the pretrained model, if it is exported unchanged.
    generation_config: Option<Map<String, Value>>,
    /// What is optimized.
    objective: Objective,
    /// What is generated after each evaluation.
    sampler: Option<Arc<TextSampler>>,
}

impl Causal {
    /// Reads and checks the data for a model with the configuration of the job.
    ///
    /// The limits of the configuration are checked before the data is tokenized, which may take
    /// minutes. The vocabulary is known only afterwards.
    ///
    /// # Errors
    /// Returns a user's mistake if the model or the data is invalid, or if they do not match.
    pub(crate) fn prepare(config: AnyDecoder, inputs: &JobInputs<'_>) -> Result<Self, Failure> {
        let JobInputs { job, places, pretrained, batch, day, .. } = *inputs;
        let limits = config.limits();
        // Samples are shortened to the model's limit if they exceed it, and this is said.
        if job.data.kind.samples().is_none() {
            check_length(job, limits.max_len, limits.max_len_field)?;
        }
        check_step(batch, job.data.sequence_length)?;
        // Without a tokenizer, the vocabulary size of token files is unknown.
        let is_bare = matches!(job.data.kind, DataKind::Tokens) && job.data.tokenizer.is_none();
        // Token ids are checked against the vocabulary size of the model, if the job or a
        // pretrained model sets it, or if there is no tokenizer. Otherwise the tokenizer determines
        // the size.
        let rows = (is_vocabulary_given(job) || is_bare).then_some(limits.vocab_size);
        let JobTokenizer { tokenizer, vocabulary } = JobTokenizer::of(job, places, pretrained)?;
        let data = open_data(job, places, tokenizer, rows, limits, day)?;
        // Read before the ids of the tokenizer replace them.
        let generation_config = own_generation_config(pretrained)?;
        let own_ends = end_tokens(&config, generation_config.as_ref()).map_err(Failure::mistake)?;
        // From here on the tokenizer is the one of the data, which may have been trained on it.
        let mut config = with_vocabulary(config, job, data.tokenizer())?;
        // Token files of a model without pretrained weights and without a tokenizer have no known
        // special tokens.
        if data.tokenizer().is_some() || pretrained.is_some() {
            let special = ["bos_token_id", "eos_token_id"];
            config = with_special_tokens(config, job, data.tokenizer(), vocabulary, &special)?;
        }
        check_special_tokens(job, config.limits().vocab_size)?;
        let tokenizer = data.tokenizer();
        let is_new = replaces_tokens(&own_ends, job, tokenizer, vocabulary);
        let generation_config =
            kept_generation_config(generation_config, !is_new, &job.model.config);
        // The adapter selects modules and rows of the final model, so the vocabulary has its size
        // by now.
        let config = with_adapter(config, job, pretrained)?;
        let ends = end_tokens(&config, generation_config.as_ref()).map_err(Failure::mistake)?;
        // A stream of text has no turns.
        if let Some((samples, tokenizer)) = data.train_samples().zip(tokenizer) {
            if let Some(folder) = pretrained {
                warn_of_unlearned_tokens(&config, folder, samples, tokenizer)?;
            }
            warn_of_other_ends(job, samples, tokenizer, &ends)?;
        }
        let (config, objective) = of_objective(config, job)?;
        // Last, because texts end at the tokens with which the model is exported.
        let sampler = TextSampler::of_job(job, &data, &config, ends)?;
        Ok(Self {
            settings: RecipeSettings::new(inputs, companions(&data, pretrained)?),
            sampler: sampler.map(Arc::new),
            generation_config,
            config,
            data,
            batch,
            objective,
        })
    }
}

impl SubjectInfo for Causal {
    fn architecture(&self) -> &dyn Architecture {
        &self.config
    }

    fn adapted(&self) -> Option<&AnyDecoder> {
        self.config.adapter().map(|_| &self.config)
    }

    /// Returns the configuration, with the `generation_config.json` of the pretrained model if it
    /// is kept, and with the configuration of the adapter.
    fn hf_export(&self) -> HfExport {
        let mut export = self.config.hf_export();
        if let Some(adapter) = self.config.adapter() {
            // Checkpoints contain this document, from which tools build the adapted model again.
            export.set_document(ADAPTER_CONFIG, adapter.file_fields());
        }
        if let Some(fields) = &self.generation_config {
            export.set_document(GENERATION_CONFIG, fields.clone());
        }
        export
    }

    fn settings(&self) -> &RecipeSettings {
        &self.settings
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        self.data.tokenizer()
    }

    fn longest(&self, limit: usize) -> usize {
        self.data.longest(limit)
    }

    fn reference_fingerprint(&self) -> Result<Option<String>, ModelFolderError> {
        // Only preferences are compared with the model at the start of the run.
        let CausalData::Pairs(_) = self.data else { return Ok(None) };
        let WeightOrigin { pretrained, seed } = &self.settings.origin;
        let base = match pretrained {
            Some(folder) => self.config.base_fingerprint(folder)?,
            None => format!("seed {seed}"),
        };
        // `None` for a new adapter, which does not change what the base model computes.
        let adapter = self.config.adapter_fingerprint()?;
        Ok(Some(adapter.map_or(base.clone(), |adapter| format!("{base} {adapter}"))))
    }

    /// Returns 2, because the first token of a sequence is not predicted.
    fn min_tokens(&self) -> usize {
        2
    }

    fn samples_per_epoch(&self, shard: DataShard) -> Result<usize, DataError> {
        self.data.samples_per_epoch(shard, self.settings.order, self.batch)
    }

    fn num_samples(&self) -> Result<usize, DataError> {
        Ok(self.data.num_samples())
    }

    fn data_fingerprint(&self) -> Result<String, DataError> {
        self.data.fingerprint()
    }

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
    type Config = AnyDecoder;
    type Model = Decoder<Training<B>>;
    /// Next-token prediction, or preference optimization.
    type Task = CausalTask<B::Device>;
    type Source = CausalSource;

    fn config(&self) -> &AnyDecoder {
        &self.config
    }

    fn task(&self, device: B::Device) -> Self::Task {
        CausalTask::new(self.config.clone(), device, self.objective, self.sampler.clone())
    }

    fn source(&self, shard: DataShard, plan: &Plan) -> Result<CausalSource, DataError> {
        self.data.source(shard, plan, &self.settings)
    }

    fn test(
        &self,
        shard: DataShard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, TokenBatch>>, DataError> {
        self.data.test(shard, self.settings.eval_batch_size(plan))
    }

    fn measure_reference(
        &self,
        engine: &Engine<B, Self::Model>,
        device: &B::Device,
        plan: &Plan,
        interrupt: &Interrupt,
    ) -> Result<bool, BoxError> {
        // Other data has no reference. The answer is the same on all ranks, so none of them waits.
        let CausalData::Pairs(corpus) = &self.data else { return Ok(true) };
        let rows = self.settings.eval_batch_size(plan);
        corpus.measure_reference(engine, (&self.config, device), rows, interrupt)
    }
}

/// Returns the failure for data that cannot be opened. With an adapter, a tokenizer with more
/// tokens than the embedding has rows needs another remedy than a larger vocabulary.
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

/// Opens the data of a job for a model with these `limits`. `rows` is its vocabulary size, if it is
/// known.
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
    // A new model without a size of its own gets the one of the tokenizer.
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

/// Returns the files that are exported unchanged. A template of the job replaces the tokenizer's: a
/// model has to be used with the template that it was trained with.
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
        // Templates for other purposes, such as tools, belong to the template that is replaced.
        companions.files.retain(|name, _| !name.starts_with(TEMPLATE_FOLDER));
        companions.replace(TEMPLATE_FILE, template);
    }
    Ok(companions)
}

/// Returns the model as the objective of the job trains it, and the objective.
///
/// # Errors
/// Returns a user's mistake if preferences cannot be learned by the model's adapter.
fn of_objective(config: AnyDecoder, job: &Job) -> Result<(AnyDecoder, Objective), Failure> {
    let objective = Objective::of(job);
    let Objective::Preferences(_) = objective else { return Ok((config, objective)) };
    refuse_random_adapter(&config)?;
    for key in unused_dropout(job) {
        tracing::info!("{key} has no effect: preferences are trained without dropout, as in TRL");
    }
    // Dropout would make the log-probabilities noisy; TRL disables it too.
    Ok((config.without_dropout(), objective))
}

/// Returns the keys of a job that set a dropout.
fn unused_dropout(job: &Job) -> Vec<String> {
    let sections =
        [("model.lora", job.model.lora.as_ref()), ("model.config", Some(&job.model.config))];
    let fields = sections.into_iter().flat_map(|(section, fields)| {
        fields.into_iter().flatten().map(move |(name, value)| (section, name, value))
    });
    let is_dropout = |name: &str| name.contains("dropout") || name.contains("pdrop");
    let set = fields.filter(|(_, name, value)| {
        is_dropout(name) && value.as_f64().is_some_and(|probability| probability > 0.0)
    });
    set.map(|(section, name, _)| format!("{section}.{name}")).collect()
}

/// Logs the token between documents, because the tokenizer determines it unless the job names it.
fn log_separator(corpus: &Corpus) {
    let token = corpus.tokenizer.as_ref().and_then(Tokenizer::end_of_text_token);
    if let (Some(id), Some(token)) = (corpus.separator, token) {
        tracing::info!("documents are separated by the end-of-text token `{token}`, id {id}");
    }
}
