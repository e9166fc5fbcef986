//! Everything that can be checked before training starts.
//!
//! [`prepare`] goes from a command line to a [`Preparation`]: a job whose model, data and plan fit
//! together. What is wrong up to here is the user's to mend, and nothing has been written.

use std::fs;
use std::path::Path;

use burn::tensor::DType;
use deepburn_config::{
    Backend, BatchPlan, Diagnosis, Facts, Job, JobRequest, Plan, Precision, ResolvedJob, Severity,
    Written, resolve, resolve_batch,
};
use deepburn_datasets::{Corpus, DistributedSampler, Order, Shard};
use deepburn_models::gpt2::{Checkpoint, Gpt2Config};
use serde_json::{Map, Value};

use crate::corpus::open_corpus;
use crate::failure::Failure;
use crate::memory::{check_model, check_step};

/// A job that is ready to run.
pub(crate) struct Preparation {
    pub(crate) job: Job,
    pub(crate) plan: Plan,
    pub(crate) model: Gpt2Config,
    pub(crate) corpus: Corpus,
    pub(crate) order: Order,
    pub(crate) max_steps: u64,
    /// The content of `job.json`.
    pub(crate) record: Value,
}

/// Reads and checks everything that `request` names.
///
/// # Errors
/// Always a user's mistake.
pub(crate) fn prepare(request: &JobRequest) -> Result<Preparation, Failure> {
    let (job, written) = Job::load(request).map_err(Failure::mistake)?;
    check_backend(job.training.backend)?;
    let mut facts = job.facts();
    let batch = resolve_batch(&written, &facts).map_err(Failure::mistake)?;
    let model = model_config(&job)?;
    check_length(&job, &model)?;
    check_model(&model)?;
    check_step(batch, job.data.sequence_length)?;
    let corpus = open_corpus(&job, &model).map_err(Failure::mistake)?;
    let model = with_tokenizer(model, &job, &corpus)?;

    let order = match job.data.shuffle {
        true => Order::Shuffled { seed: job.training.seed },
        false => Order::Sequential,
    };
    let max_steps = num_steps(&job, &corpus, order, batch)?;
    facts.hidden_size = Some(model.n_embd);
    facts.total_steps = Some(max_steps);
    let (plan, record) = resolve_plan(&job, &written, &facts)?;
    Ok(Preparation { job, plan, model, corpus, order, max_steps: max_steps as u64, record })
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

/// The checkpoint's config, or GPT-2 small, with the job's overrides.
fn model_config(job: &Job) -> Result<Gpt2Config, Failure> {
    let base = match &job.model.pretrained {
        Some(folder) => Checkpoint::open(folder).map_err(Failure::mistake)?.config().clone(),
        None => Gpt2Config::small(),
    };
    let named = |error| Failure::mistake(format!("model.config: {error}"));
    let config = base.with_overrides(&job.model.config).map_err(named)?;
    config.validate().map_err(named)?;
    Ok(config)
}

fn check_length(job: &Job, model: &Gpt2Config) -> Result<(), Failure> {
    let length = job.data.sequence_length;
    if length <= model.n_positions {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "data.sequence_length: {length} is longer than the model allows \
         (model.config.n_positions = {}); use at most that",
        model.n_positions
    )))
}

/// A new model ends its texts as the tokenizer does; a pretrained one has its own way.
fn with_tokenizer(model: Gpt2Config, job: &Job, corpus: &Corpus) -> Result<Gpt2Config, Failure> {
    let end = corpus.tokenizer.as_ref().and_then(|tokenizer| tokenizer.end_of_text());
    let (None, Some(end)) = (&job.model.pretrained, end) else {
        return Ok(model);
    };
    let mut ids = Map::new();
    for name in ["bos_token_id", "eos_token_id"] {
        if !job.model.config.contains_key(name) {
            ids.insert(name.to_owned(), end.into());
        }
    }
    model.with_overrides(&ids).map_err(Failure::mistake)
}

/// Optimizer steps: `max_steps`, or what the epochs give, whichever is less.
fn num_steps(job: &Job, corpus: &Corpus, order: Order, batch: BatchPlan) -> Result<usize, Failure> {
    let shard = Shard { rank: 0, num_ranks: job.training.ranks };
    let sampler = DistributedSampler::new(corpus.train.len(), shard, order);
    let per_rank = sampler.map_err(Failure::mistake)?.samples_per_epoch();
    let per_step = batch.micro_batch_size * batch.gradient_accumulation_steps;
    let by_epochs = job.training.epochs.map(|epochs| {
        let samples = epochs.saturating_mul(per_rank);
        if job.data.drop_last { samples / per_step } else { samples.div_ceil(per_step) }
    });
    let steps = [job.training.max_steps, by_epochs].into_iter().flatten().min().unwrap_or(0);
    if steps == 0 {
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

fn show(note: &Diagnosis) {
    match note.severity {
        Severity::Warning => tracing::warn!("{note}"),
        _ => tracing::info!("{note}"),
    }
}

/// Makes sure that results can be written, before hours are spent on them.
pub(crate) fn check_output(folder: &Path) -> Result<(), Failure> {
    let refused = |error: std::io::Error| {
        Failure::mistake(format!(
            "training.output_dir: {} cannot be written to ({error}); give a folder that can",
            folder.display()
        ))
    };
    fs::create_dir_all(folder).map_err(refused)?;
    let probe = tempfile_in(folder);
    fs::write(&probe, b"").and_then(|()| fs::remove_file(&probe)).map_err(refused)?;
    let in_the_way = ["metrics.jsonl", "job.json", "report.html"].map(|it| folder.join(it));
    let in_the_way = in_the_way.iter().find(|it| it.is_dir());
    let model = folder.join("model");
    match in_the_way.or((model.exists() && !model.is_dir()).then_some(&model)) {
        None => Ok(()),
        Some(path) => Err(Failure::mistake(format!(
            "training.output_dir: {} is in the way of the results; move it or give another folder",
            path.display()
        ))),
    }
}

fn tempfile_in(folder: &Path) -> std::path::PathBuf {
    folder.join(format!(".writable-{}", std::process::id()))
}
