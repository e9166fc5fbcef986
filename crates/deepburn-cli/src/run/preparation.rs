//! Everything that can be checked before training starts.
//!
//! [`prepare`] goes from a command line to a [`Preparation`]: a job whose model, data and plan fit
//! together. What is wrong up to here is the user's to mend, and nothing has been written.

use std::fs::{File, TryLockError};
use std::path::Path;

use burn::tensor::DType;
use deepburn::zero::estimate::ParameterSize;
use deepburn_config::{
    Architecture, Backend, BatchPlan, BatchSchedule, DataKind, Diagnosis, DynamicBatchingPlan,
    Facts, Job, JobRequest, ModelParameter, NoDecay, OptimizerPlan, ParamGroupError, ParamGroups,
    Plan, Precision, ResolvedJob, Severity, UpdateSettings, Written, resolve, resolve_batch,
};
use deepburn_datasets::{DataError, Order, Shard, StepShape};
use deepburn_models::gpt2::ParameterShape;
use serde_json::Value;

use crate::counted::counted;
use crate::data::causal::Causal;
use crate::data::classification::Classification;
use crate::data::places::Places;
use crate::data::recipe::Subject;
use crate::failure::Failure;
use crate::job::known_model::KnownModel;
use crate::job::made_folders::MadeFolders;
use crate::run::resume::Origin;

/// A job that is ready to run.
pub(crate) struct Preparation {
    pub(crate) job: Job,
    pub(crate) plan: Plan,
    /// Of all parameters; those of a frozen group are not trainable.
    pub(crate) sizes: Vec<ParameterSize>,
    pub(crate) subject: Subject,
    pub(crate) batch_sizes: BatchSchedule,
    pub(crate) max_steps: u64,
    pub(crate) data: DataIdentity,
    /// The content of `job.json`.
    pub(crate) record: Value,
    /// What the run goes on from.
    pub(crate) resume: Option<Origin>,
}

/// What a checkpoint records of the data.
pub(crate) struct DataIdentity {
    /// Samples of an epoch.
    pub(crate) samples: usize,
    /// A hash of the tokens and labels of training. Computed once, because it reads up to 16M tokens.
    pub(crate) training: String,
    /// A hash of the tokens and labels of evaluation, and of how many of them it takes.
    pub(crate) evaluation: u64,
}

impl DataIdentity {
    fn of(subject: &Subject, eval_max_samples: Option<usize>) -> Result<Self, DataError> {
        let whole = Shard { rank: 0, num_ranks: 1 };
        let digits = subject.evaluation_fingerprint()?.unwrap_or_default();
        let hash = digits.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        Ok(Self {
            samples: subject.samples_per_epoch(whole)?,
            training: subject.data_fingerprint()?,
            evaluation: hash.unwrap_or(0).wrapping_add(eval_max_samples.unwrap_or(0) as u64),
        })
    }
}

/// Reads and checks everything that `request` names. `check` sees the job before its data is read, which may take
/// minutes.
///
/// # Errors
/// Always a user's mistake, that of `check` included.
pub(crate) fn prepare(
    request: &JobRequest,
    check: impl FnOnce(&Job) -> Result<(), Failure>,
) -> Result<Preparation, Failure> {
    let (mut job, written) = Job::load(request).map_err(Failure::mistake)?;
    check(&job)?;
    check_backend(job.training.backend)?;
    let mut facts = job.facts();
    let (batch, dynamic) = resolve_batch(&written, &facts).map_err(Failure::mistake)?;
    let batch_sizes = batch_sizes(&job, batch, dynamic.as_ref())?;
    let order = match job.data.shuffle {
        true => Order::Shuffled { seed: job.training.seed },
        false => Order::Sequential,
    };
    let (places, largest) = (Places::default(), batch_sizes.largest());
    let subject = match (job.model.architecture, &job.data.kind) {
        (Architecture::ImdbEncoder, _) => {
            Subject::Encoder(Box::new(Classification::of_encoder(&job, &places, largest, order)?))
        }
        (Architecture::Gpt2, DataKind::Classification { .. }) => Subject::Gpt2Classifier(Box::new(
            Classification::of_gpt2(&job, &places, largest, order)?,
        )),
        (Architecture::Gpt2, _) => {
            Subject::Causal(Box::new(Causal::prepare(&job, &places, largest, order)?))
        }
    };
    let max_steps = match &dynamic {
        Some(dynamic) => steps_within_budget(&job, &subject, batch, dynamic)?,
        None => num_steps(&job, &subject, &batch_sizes)?,
    };
    facts.hidden_size = Some(subject.model().width());
    facts.total_steps = Some(max_steps);
    add_notes(&mut job, dynamic.as_ref(), max_steps);
    let (plan, record) = resolve_plan(&job, &written, &facts)?;
    Ok(Preparation {
        sizes: grouped_sizes(&subject.model(), &plan)?,
        data: DataIdentity::of(&subject, job.training.eval_max_samples).map_err(Failure::run)?,
        max_steps: max_steps as u64,
        resume: None,
        job,
        plan,
        subject,
        batch_sizes,
        record,
    })
}

/// Refuses backends that this program was built without.
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
        "training.backend: \"{0}\" is not compiled in: build with `--features {0}`, or use \"flex\"",
        backend.name()
    )))
}

/// Refuses float types that the device cannot compute with.
pub(crate) fn check_types<B: burn::tensor::backend::Backend>(
    preparation: &Preparation,
    device: &B::Device,
) -> Result<(), Failure> {
    let precision = &preparation.plan.precision;
    for (wanted, key) in [
        (precision.compute, "deepspeed.{}.enabled"),
        (precision.autocast.unwrap_or(precision.compute), "deepspeed.torch_autocast.dtype"),
        (precision.communication, "deepspeed.communication_data_type"),
        (precision.accumulation, "deepspeed.data_types.grad_accum_dtype"),
    ] {
        let dtype = match wanted {
            Precision::Fp32 => DType::F32,
            Precision::Fp16 => DType::F16,
            Precision::Bf16 => DType::BF16,
        };
        if !B::supports_dtype(device, dtype) {
            return Err(Failure::mistake(format!(
                "{}: the device of training.backend \"{}\" cannot compute in {2}; use another type \
                 or \"flex\"",
                key.replace("{}", wanted.name()),
                preparation.job.training.backend.name(),
                wanted.name()
            )));
        }
    }
    Ok(())
}

/// Notes what in the job changes nothing, now that model, data and length are known.
fn add_notes(job: &mut Job, dynamic: Option<&DynamicBatchingPlan>, max_steps: usize) {
    let mut note = |severity, key: &str, message: String| {
        job.notes.push(Diagnosis::new(severity, key, message, ""));
    };
    if dynamic.is_some() {
        let message = "is not used: dynamic batching has an order of its own, \
                       sequence_picking_order";
        note(Severity::Note, "data.shuffle", message.to_owned());
        if job.data.drop_last {
            let message = "is not used: dynamic batching drops no sample";
            note(Severity::Warning, "data.drop_last", message.to_owned());
        }
    }
    let late = job.training.batch_size_schedule.iter().find(|(step, _)| *step > max_steps);
    if let Some((step, size)) = late {
        let message = format!(
            "the change to {size} at step {step} never comes: training ends after step {max_steps}"
        );
        note(Severity::Warning, "training.batch_size_schedule", message);
    }
}

/// Samples of each step.
fn batch_sizes(
    job: &Job,
    batch: BatchPlan,
    dynamic: Option<&DynamicBatchingPlan>,
) -> Result<BatchSchedule, Failure> {
    let changes = &job.training.batch_size_schedule;
    if dynamic.is_some() && !changes.is_empty() {
        return Err(Failure::mistake(
            "training.batch_size_schedule: dynamic batching decides how many samples a step has; \
             remove it, or set dynamic_batching.enabled to false",
        ));
    }
    // Steps of a job count from 1, as in its record.
    BatchSchedule::new(batch, changes.iter().map(|&(step, size)| (step - 1, size)))
        .map_err(|error| Failure::mistake(format!("training.batch_size_schedule: {error}")))
}

/// Epochs whose batches are counted one by one, each in some milliseconds.
const MOST_EPOCHS: usize = 10_000;

/// Optimizer steps under a budget of tokens: `max_steps`, or what the epochs give, whichever is
/// less.
fn steps_within_budget(
    job: &Job,
    subject: &Subject,
    batch: BatchPlan,
    dynamic: &DynamicBatchingPlan,
) -> Result<usize, Failure> {
    let shape =
        StepShape { num_ranks: batch.world_size, accumulation: batch.gradient_accumulation_steps };
    let mut sampler = subject.budget_sampler(shape, dynamic)?;
    let epochs = job.training.epochs.unwrap_or(usize::MAX);
    let max_steps = job.training.max_steps.unwrap_or(usize::MAX);
    if epochs > MOST_EPOCHS && max_steps == usize::MAX {
        return Err(Failure::mistake(format!(
            "training.epochs: {epochs} are more than the {MOST_EPOCHS} whose dynamic batches are \
             counted beforehand; give training.max_steps"
        )));
    }
    let mut steps = 0;
    for epoch in 0..epochs {
        let plan = sampler.plan();
        if dynamic.verbose && epoch < 10 {
            tracing::info!(
                "epoch {epoch}: {} in {}, {}, {:.1} % padding",
                counted(plan.num_samples(), "sample"),
                counted(plan.num_steps(), "step"),
                counted(plan.num_tokens() as usize, "token"),
                100.0 * plan.padding()
            );
        }
        steps += plan.num_steps();
        if steps >= max_steps {
            return Ok(max_steps);
        }
        sampler.next_epoch();
    }
    Ok(steps)
}

/// Optimizer steps: `max_steps`, or what the epochs give, whichever is less.
fn num_steps(job: &Job, subject: &Subject, batches: &BatchSchedule) -> Result<usize, Failure> {
    let num_ranks = job.training.ranks;
    let shard = Shard { rank: 0, num_ranks };
    let per_rank = subject.samples_per_epoch(shard).map_err(Failure::mistake)?;
    let by_epochs = job.training.epochs.map(|epochs| {
        let samples = epochs.saturating_mul(per_rank).saturating_mul(num_ranks);
        let whole = batches.steps_within(samples);
        let rest = !job.data.drop_last && batches.samples_before(whole) < samples;
        whole + usize::from(rest)
    });
    let steps = [job.training.max_steps, by_epochs].into_iter().flatten().min().unwrap_or(0);
    if steps == 0 {
        let per_step = batches.at(0).train_batch_size / num_ranks;
        return Err(Failure::mistake(format!(
            "training.epochs: the train split has {per_rank} samples a rank and a step takes \
             {per_step}, so no step is ever complete; lower deepspeed.train_batch_size, set \
             data.drop_last to false or give training.max_steps"
        )));
    }
    Ok(steps)
}

/// Resolves the DeepSpeed part, shows what was noted about it and puts `job.json` together.
fn resolve_plan(job: &Job, written: &Written, facts: &Facts) -> Result<(Plan, Value), Failure> {
    let resolved = resolve(written, facts).map_err(Failure::mistake)?;
    for note in job.notes.iter().chain(&resolved.notes) {
        show(note);
    }
    let plan = resolved.plan.clone();
    if plan.zero.parameters.gather_16bit_weights_on_model_save {
        let key = "zero_optimization.stage3_gather_16bit_weights_on_model_save";
        tracing::info!(
            "{key}: finetune saves the model in fp32; only save_16bit_model asks for it"
        );
    }
    let record = ResolvedJob::new(job.clone(), written, resolved);
    let record = serde_json::to_value(record).map_err(Failure::run)?;
    Ok((plan, record))
}

/// Sizes of all parameters, once it is clear how each is updated.
pub(crate) fn grouped_sizes(
    model: &KnownModel,
    plan: &Plan,
) -> Result<Vec<ParameterSize>, Failure> {
    let parameters = model.parameters();
    // Names tell which are embeddings and output layers.
    let known: Vec<_> = parameters
        .iter()
        .map(|it| ModelParameter {
            path: &it.path,
            shape: &it.shape,
            layer: "",
            is_announced: false,
        })
        .collect();
    let updates = plan.param_groups.assign(&plan.optimizer, &known);
    let updates = updates.map_err(|error| match error {
        ParamGroupError::NoMatrix { .. } | ParamGroupError::MuonRate { .. } => {
            Failure::mistake(format!("deepspeed.{error}"))
        }
        _ => Failure::mistake(format!("training.{error}")),
    })?;
    let size = |(parameter, update): (&ParameterShape, &Option<UpdateSettings>)| {
        let lens = parameter.shape.iter();
        let numel = lens.fold(1, |numel: u64, len| numel.saturating_mul(*len as u64));
        ParameterSize::new(numel, update.as_ref().map(|update| &update.optimizer))
    };
    let sizes = parameters.iter().zip(&updates).map(size).collect();
    report_groups(plan, &updates);
    Ok(sizes)
}

/// Logs how many parameters the optimizer's own settings do not apply to.
fn report_groups(plan: &Plan, updates: &[Option<UpdateSettings>]) {
    let ParamGroups { groups, no_decay } = &plan.param_groups;
    let frozen = updates.iter().filter(|update| update.is_none()).count();
    if frozen > 0 {
        tracing::info!("{frozen} of {} are frozen", counted(updates.len(), "parameter"));
    }
    if matches!(plan.optimizer, OptimizerPlan::Muon(_)) {
        let orthogonalised = updates.iter().flatten().filter(|update| update.matrices.is_some());
        let (count, all) = (orthogonalised.count(), counted(updates.len(), "parameter"));
        tracing::info!("Muon updates {count} of {all}; Adam updates the others");
    }
    let decay = plan.optimizer.weight_decay();
    let trained = updates.iter().flatten();
    let spared = trained.filter(|update| update.optimizer.weight_decay() == 0.0).count();
    if decay > 0.0 && spared > 0 {
        let why = match (groups.is_empty(), no_decay) {
            (true, _) => "training.no_decay",
            (false, NoDecay::Nothing) => "training.param_groups",
            (false, NoDecay::BiasesAndNorms) => "training.no_decay, training.param_groups",
        };
        let all = counted(updates.len(), "parameter");
        tracing::info!("weight decay {decay} leaves {spared} of {all} alone ({why})");
    }
}

fn show(note: &Diagnosis) {
    match note.severity {
        // The log names the severity itself.
        Severity::Warning => tracing::warn!("{}", note.finding()),
        _ => tracing::info!("{}", note.finding()),
    }
}

/// Makes sure that results can be written, before hours are spent on them, and that nobody else
/// writes theirs there as long as what is returned is held.
pub(crate) fn claim_output(folder: &Path) -> Result<Option<File>, Failure> {
    let refused = |error: std::io::Error| {
        Failure::mistake(format!(
            "training.output_dir: {} cannot be written to ({error}); give a folder that can",
            folder.display()
        ))
    };
    let made = MadeFolders::make_writable(folder).map_err(refused)?;
    let in_the_way = ["metrics.jsonl", "job.json", "report.html"].map(|it| folder.join(it));
    let in_the_way = in_the_way.iter().find(|it| it.is_dir());
    let model = folder.join("model");
    match in_the_way.or((model.exists() && !model.is_dir()).then_some(&model)) {
        None => {
            let claim = lock(folder)?;
            made.keep();
            Ok(claim)
        }
        Some(path) => Err(Failure::mistake(format!(
            "training.output_dir: {} is in the way of the results; move it or give another folder",
            path.display()
        ))),
    }
}

/// Locks a folder, where the system has such locks; the end of the process releases it.
fn lock(folder: &Path) -> Result<Option<File>, Failure> {
    let Ok(handle) = File::open(folder) else { return Ok(None) };
    match handle.try_lock() {
        Err(TryLockError::WouldBlock) => Err(in_use(folder)),
        _ => Ok(Some(handle)),
    }
}

/// Refuses a folder that another run has locked. The lock of this check is shared, so that the processes of one job
/// may check at the same time.
///
/// # Errors
/// A user's mistake.
pub(crate) fn refuse_running(folder: &Path) -> Result<(), Failure> {
    let Ok(handle) = File::open(folder) else { return Ok(()) };
    match handle.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Err(in_use(folder)),
        _ => Ok(()),
    }
}

fn in_use(folder: &Path) -> Failure {
    Failure::mistake(format!(
        "training.output_dir: another run is writing to {}; wait for it, or give another folder",
        folder.display()
    ))
}
