//! Resolves and checks a job before training starts.
//!
//! Main function: [`prepare`]. It resolves the command line to a [`Preparation`] with a model, data
//! and a plan that are consistent with each other. It writes nothing to the output folder, and its
//! errors are user's mistakes.
//!
//! The cheapest checks run first: the job file, the backend and the configuration. Then the data is
//! read, whose download and tokenization may take minutes. The final plan is resolved last, because
//! it depends on the data.
//!
//! An error names the key in the job file:
//!
//! ```text
//! error: training.epochs: 1: a rank has 3 samples in all, but a step takes 8, so that no step is complete; raise
//! training.epochs, lower deepspeed.train_batch_size or set data.drop_last to false
//! ```

use std::path::PathBuf;

use deepburn::weights::WeightMap;
use deepburn::zero::ParameterSize;
use deepburn::{BatchSchedule, Interval, dtype_of};
use deepburn_chat::Day;
use deepburn_config::{
    Backend, BatchPlan, Cadence, Diagnosis, DynamicBatchingPlan, Job, JobRequest, Plan, RawConfig,
    ResolvedJob, RunContext, Severity, StepCount, TrainingJob, counted, resolve,
    resolve_preliminary,
};
use deepburn_datasets::DataShard;
use deepburn_models::Architecture;
use serde_json::Value;

use crate::data::lengths::check_curriculum;
use crate::data::places::Places;
use crate::data::recipe::{JobInputs, SubjectInfo};
use crate::data::subject::Subject;
use crate::failure::Failure;
use crate::job::memory::check_tokens;
use crate::job::param_groups::grouped_sizes;
use crate::job::quantization::quantization_plan;
use crate::models;
use crate::run::base_model::omitted_parameters;
use crate::run::effects::add_notes;
use crate::run::input_paths::{check_input_files, check_model_folders};
use crate::run::training_length::{Progress, TrainingLength, num_steps, steps_within_budget};

/// A job that is ready to run.
pub(crate) struct Preparation {
    /// The job as written, with overrides and notes.
    pub(crate) job: Job,
    /// The resolved `deepspeed` section, in which no value is `"auto"`.
    pub(crate) plan: Plan,
    /// Folder of the pretrained model; `None` for random initial weights.
    pub(crate) pretrained: Option<PathBuf>,
    /// The map of the model, in which the parameters that checkpoints omit have the origin
    /// `Frozen`; `None` if checkpoints contain all parameters.
    pub(crate) omitted: Option<WeightMap>,
    /// Sizes of all parameters. Parameters of a frozen group are not trainable.
    pub(crate) sizes: Vec<ParameterSize>,
    /// Model and data.
    pub(crate) subject: Subject,
    /// Steps and samples of the run.
    pub(crate) length: TrainingLength,
    /// The day that chat templates print as the current one.
    pub(crate) day: Day,
    /// The identity of the data, which has to match the checkpoint's.
    pub(crate) data: DataIdentity,
    /// The run for which `deepspeed` was resolved.
    pub(crate) context: RunContext,
    /// The content of `job.json`.
    pub(crate) record: Value,
}

impl Preparation {
    /// Returns the interval of the training loop for a cadence of the job.
    pub(crate) fn interval(&self, cadence: Option<Cadence>) -> Option<Interval> {
        Some(match cadence? {
            Cadence::Epoch => Interval::Epochs { samples: self.length.epoch_samples },
            Cadence::Every(steps) => Interval::Steps(self.length.steps_of(steps)),
        })
    }
}

/// What the data and the length of a run take from the checkpoint that it resumes from.
#[derive(Debug, Default)]
pub(crate) struct Resumed {
    /// Its steps and samples.
    pub(crate) progress: Option<Progress>,
    /// The day that chat templates printed as the current one.
    pub(crate) day: Option<Day>,
}

/// The identity of the data, which a checkpoint records.
///
/// A run resumes only with the data that its checkpoint was saved with, because data-loader
/// positions are only valid for that data.
pub(crate) struct DataIdentity {
    /// Samples of an epoch.
    pub(crate) samples: usize,
    /// A hash of the training tokens and labels. It is computed only once, because it reads up to
    /// 16M tokens.
    pub(crate) training: String,
    /// A hash of the evaluation tokens and labels, and of the keys that determine the loss of an
    /// evaluation: `training.eval_max_samples`, `training.label_smoothing_factor` and
    /// `training.dpo`.
    pub(crate) evaluation: u64,
    /// A hash of the initial weights, for data with which the model is compared to them.
    pub(crate) reference: Option<String>,
}

impl DataIdentity {
    /// Hashes the data of `subject`.
    ///
    /// # Errors
    /// Returns an error if the data or the initial weights cannot be read.
    fn new(subject: &dyn SubjectInfo, training: &TrainingJob) -> Result<Self, Failure> {
        let digits = subject.evaluation_fingerprint().map_err(Failure::run)?.unwrap_or_default();
        let hash = digits.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        Ok(Self {
            samples: subject.num_samples().map_err(Failure::run)?,
            training: subject.data_fingerprint().map_err(Failure::run)?,
            reference: subject.reference_fingerprint().map_err(Failure::mistake)?,
            // Without a limit and without label smoothing, it is the hash of the data.
            evaluation: hash
                .unwrap_or(0)
                // Every default adds 0, so that checkpoints from before these keys keep their hash.
                .wrapping_add(training.evaluation.eval_max_samples.unwrap_or(0) as u64)
                .wrapping_add(training.objective.label_smoothing_factor.abs().to_bits())
                .wrapping_add(
                    training
                        .objective
                        .dpo
                        // The rotation tells the types of loss apart.
                        .map_or(0, |dpo| dpo.beta.to_bits().rotate_left(dpo.loss_type as u32 + 1)),
                ),
        })
    }
}

/// Reads and checks everything that `request` names.
///
/// The plan is resolved twice. The preliminary plan has the batch sizes, which the data loaders
/// need. The final plan needs the data: schedules with `"auto"` depend on the number of steps, and
/// bucket sizes on the width of the model.
///
/// Reading the data may take minutes, so errors in the configuration are reported before. `check`
/// is called with the job and the preliminary plan at that point. It returns the checkpoint that
/// the run resumes from, as far as its data and length depend on it.
///
/// # Errors
/// Returns a user's mistake, or the error of `check`.
pub(crate) fn prepare(
    request: &JobRequest,
    check: impl FnOnce(&Job, &Plan) -> Result<Resumed, Failure>,
) -> Result<Preparation, Failure> {
    let (mut job, written) = Job::load(request).map_err(Failure::mistake)?;
    // What the files alone decide: milliseconds.
    check_backend(job.training.placement.backend)?;
    check_input_files(request, &job)?;
    let mut facts = job.run_context();
    let preliminary = resolve_preliminary(&written, &facts).map_err(Failure::mistake)?;
    let Resumed { progress, day } = check(&job, &preliminary)?;
    let day = day.unwrap_or_else(Day::today);
    let (batch, dynamic) = (preliminary.batch, preliminary.data_efficiency.dynamic_batching);
    let batch_sizes = batch_sizes(&job, batch, dynamic.as_ref())?;
    check_evaluation(&job, dynamic.as_ref())?;
    // Limits on a step apply to the largest batch of the schedule.
    let (places, largest) = (Places::default(), batch_sizes.largest());
    // Model and data, which may be downloaded and tokenized: minutes.
    let pretrained = pretrained_folder(&job, &places)?;
    let inputs = JobInputs {
        job: &job,
        places: &places,
        pretrained: pretrained.as_deref(),
        batch: largest,
        day,
    };
    let model = models::of_job(&job, inputs.pretrained)?;
    let subject = (model.prepare)(&inputs)?;
    // `job.json` names the architecture even if the job does not.
    job.model.architecture = Some(model.architecture);
    // What depends on the data: lengths, steps, and with them the final plan.
    check_curriculum(&job, &preliminary, subject.info().min_tokens())?;
    let epoch_samples = epoch_samples(subject.info(), batch, dynamic.is_some())?;
    let (info, progress) = (subject.info(), progress.as_ref());
    let max_steps = match &dynamic {
        Some(dynamic) => steps_within_budget(&job, info, batch, dynamic, progress)?,
        None => num_steps(&job, info, epoch_samples, &batch_sizes, progress)?,
    };
    // Ratios become steps before the notes, which compare them with the length of the run.
    set_total_steps(&mut job, max_steps)?;
    let architecture = subject.info().architecture();
    add_context(&mut facts, &job, architecture, max_steps)?;
    add_notes(&mut job, dynamic.as_ref(), max_steps);
    let (plan, mut record) = resolve_plan(&job, &written, &facts)?;
    record["total_steps"] = max_steps.into();
    record["samples_per_epoch"] = epoch_samples.into();
    Ok(Preparation {
        omitted: omitted_parameters(&job, &plan, architecture, pretrained.as_deref())?,
        pretrained,
        sizes: grouped_sizes(architecture, &plan)?,
        data: DataIdentity::new(subject.info(), &job.training)?,
        length: TrainingLength::new(batch_sizes, max_steps, epoch_samples),
        day,
        job,
        plan,
        subject,
        context: facts,
        record,
    })
}

/// Returns the folder of `model.pretrained`, if the job has one.
///
/// # Errors
/// Returns a user's mistake if it is not a complete model, or if the run would replace it.
fn pretrained_folder(job: &Job, places: &Places) -> Result<Option<PathBuf>, Failure> {
    let folder = places.pretrained(job)?;
    check_model_folders(job, folder.as_deref())?;
    Ok(folder)
}

/// Adds to the context of a run what the model and its data determine.
///
/// # Errors
/// Returns a user's mistake if `model.quantization_config` does not fit the model.
fn add_context(
    context: &mut RunContext,
    job: &Job,
    architecture: &dyn Architecture,
    max_steps: usize,
) -> Result<(), Failure> {
    let freezes = !job.training.param_groups.is_empty();
    let quantization = job.model.quantization.as_ref();
    let quantization = quantization.map(|it| quantization_plan(it, architecture, freezes));
    context.quantization = quantization
        .transpose()
        .map_err(|error| Failure::mistake(format!("model.quantization_config.{error}")))?;
    context.hidden_size = Some(architecture.width());
    context.total_steps = Some(max_steps);
    context.warmup_steps = job.training.deepspeed_defaults.warmup_steps;
    Ok(())
}

/// Returns the number of samples of an epoch. Dynamic batching takes every sample once, and
/// otherwise all ranks take the same number.
///
/// # Errors
/// Returns a user's mistake if a rank has no samples.
fn epoch_samples(
    info: &dyn SubjectInfo,
    batch: BatchPlan,
    is_dynamic: bool,
) -> Result<usize, Failure> {
    // Without dynamic batching, ranks take equal shares, which may count samples twice or drop
    // some.
    let (shard, shards) = match (is_dynamic, batch.data_parallel_size) {
        (true, _) => (DataShard::WHOLE, 1),
        (false, num_ranks) => (DataShard { rank: 0, num_ranks }, num_ranks),
    };
    info.samples_per_epoch(shard).map(|samples| samples * shards).map_err(Failure::mistake)
}

/// Replaces the ratios of the job with numbers of steps.
///
/// # Errors
/// Returns a user's mistake if checkpoints are then not saved together with evaluations, which
/// `save_best_limit` needs.
fn set_total_steps(job: &mut Job, max_steps: usize) -> Result<(), Failure> {
    let training = &mut job.training;
    training.set_total_steps(max_steps);
    // `None` means that the intervals cannot be compared before the run.
    if training.saving.save_best_limit.is_none() || training.evaluates_checkpoints() != Some(false)
    {
        return Ok(());
    }
    let steps = |cadence| match cadence {
        Some(Cadence::Every(StepCount::Steps(steps))) => steps,
        _ => 0,
    };
    Err(Failure::mistake(format!(
        "training.save_best_limit: checkpoints are judged by an evaluation in the step that they are saved in; of the \
         {}, training.save_steps is every {} and training.eval_steps every {}; make save_steps a multiple",
        counted(max_steps, "step"),
        steps(training.saving.save_steps),
        steps(training.evaluation.eval_steps)
    )))
}

/// Refuses a backend that this program was built without.
///
/// # Errors
/// Returns a user's mistake that names the feature to build with.
fn check_backend(backend: Backend) -> Result<(), Failure> {
    let compiled = match backend {
        Backend::Flex => true,
        Backend::Cuda => cfg!(feature = "cuda"),
        Backend::Tch => cfg!(feature = "tch"),
        Backend::Wgpu => cfg!(feature = "wgpu"),
    };
    if compiled {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "training.backend: \"{0}\" is not compiled in; build with `--features {0}`, or use \"flex\"",
        backend.name()
    )))
}

/// Refuses float types that `device` does not support.
///
/// # Errors
/// Returns a user's mistake that names the key of the type.
pub(crate) fn check_types<B: burn::tensor::backend::Backend>(
    preparation: &Preparation,
    device: &B::Device,
) -> Result<(), Failure> {
    let precision = &preparation.plan.precision;
    for (wanted, key) in [
        (precision.compute, "deepspeed.{}.enabled"),
        (precision.of_products(), "deepspeed.torch_autocast.dtype"),
        (precision.communication, "deepspeed.communication_data_type"),
        (precision.accumulation, "deepspeed.data_types.grad_accum_dtype"),
    ] {
        if !B::supports_dtype(device, dtype_of(wanted)) {
            return Err(Failure::mistake(format!(
                "{}: the device of training.backend \"{}\" does not support {2}; use \
                 another type or \"flex\"",
                key.replace("{}", wanted.name()),
                preparation.job.training.placement.backend.name(),
                wanted.name()
            )));
        }
    }
    Ok(())
}

/// Refuses a batch size of evaluations that dynamic batching would ignore, and evaluation batches
/// with more tokens than a step may have.
///
/// # Errors
/// Returns a user's mistake.
fn check_evaluation(job: &Job, dynamic: Option<&DynamicBatchingPlan>) -> Result<(), Failure> {
    let key = "training.per_device_eval_batch_size";
    let Some(rows) = job.training.evaluation.per_device_eval_batch_size else { return Ok(()) };
    if dynamic.is_some() {
        return Err(Failure::mistake(format!(
            "{key}: not supported with dynamic batching, whose token budget sets the batches of evaluations too; remove it"
        )));
    }
    check_tokens(key, rows, job.data.sequence_length)
}

/// Returns the number of samples of each step.
///
/// The first size is the plan's batch size. Each change in `training.batch_size_schedule` applies
/// from its step on.
///
/// # Errors
/// Returns a user's mistake if a schedule is combined with dynamic batching, or if a size is not
/// divisible by the micro-batch size times the number of ranks.
fn batch_sizes(
    job: &Job,
    batch: BatchPlan,
    dynamic: Option<&DynamicBatchingPlan>,
) -> Result<BatchSchedule, Failure> {
    let changes = &job.training.batch_size_schedule;
    if dynamic.is_some() && !changes.is_empty() {
        return Err(Failure::mistake(
            "training.batch_size_schedule: not supported with dynamic batching, which sets the samples of \
             each step; remove it, or set dynamic_batching.enabled to false",
        ));
    }
    // Steps of a job file count from 1, as in metrics.jsonl.
    BatchSchedule::new(batch, changes.iter().map(|&(step, size)| (step - 1, size)))
        .map_err(Failure::of_key("training.batch_size_schedule"))
}

/// Resolves the `deepspeed` section, logs its notes and returns the plan with the content of
/// `job.json`.
///
/// `job.json` has the job as written, the resolved plan, and every value of `"auto"` with its
/// reason.
///
/// # Errors
/// Returns a user's mistake with all errors of the configuration.
fn resolve_plan(
    job: &Job,
    written: &RawConfig,
    facts: &RunContext,
) -> Result<(Plan, Value), Failure> {
    let resolved = resolve(written, facts).map_err(Failure::mistake)?;
    for note in job.notes.iter().chain(&resolved.notes) {
        log(note);
    }
    let plan = resolved.plan.clone();
    if plan.zero.parameters.gather_16bit_weights_on_model_save {
        let key = "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save";
        tracing::info!(
            "{key}: finetune saves the model in fp32; only save_16bit_model asks for it"
        );
    }
    let record = ResolvedJob::new(job.clone(), written, resolved);
    let record = serde_json::to_value(record).map_err(Failure::run)?;
    Ok((plan, record))
}

/// Logs a note. The log already shows its severity.
///
/// Without `RUST_LOG` only rank 0 shows logs, so every rank may log the same notes.
fn log(note: &Diagnosis) {
    match note.severity {
        Severity::Warning => tracing::warn!("{}", note.finding()),
        _ => tracing::info!("{}", note.finding()),
    }
}
