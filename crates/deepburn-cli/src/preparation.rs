//! Everything that can be checked before training starts.
//!
//! [`prepare`] goes from a command line to a [`Preparation`]: a job whose model, data and plan fit
//! together. What is wrong up to here is the user's to mend, and nothing has been written.

use std::fs;
use std::path::Path;

use burn::tensor::DType;
use deepburn_config::{
    Architecture, Backend, BatchPlan, Diagnosis, Facts, Job, JobRequest, Plan, Precision,
    ResolvedJob, Severity, Written, resolve, resolve_batch,
};
use deepburn_datasets::{Order, Shard};
use serde_json::Value;

use crate::causal::Causal;
use crate::classification::Classification;
use crate::failure::Failure;
use crate::recipe::Subject;

/// A job that is ready to run.
pub(crate) struct Preparation {
    pub(crate) job: Job,
    pub(crate) plan: Plan,
    pub(crate) subject: Subject,
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
    let order = match job.data.shuffle {
        true => Order::Shuffled { seed: job.training.seed },
        false => Order::Sequential,
    };
    let subject = match job.model.architecture {
        Architecture::Gpt2 => Subject::Causal(Box::new(Causal::prepare(&job, batch, order)?)),
        Architecture::ImdbEncoder => {
            Subject::Classification(Box::new(Classification::prepare(&job, batch, order)?))
        }
    };
    let max_steps = num_steps(&job, &subject, batch)?;
    facts.hidden_size = Some(subject.width());
    facts.total_steps = Some(max_steps);
    let (plan, record) = resolve_plan(&job, &written, &facts)?;
    Ok(Preparation { job, plan, subject, max_steps: max_steps as u64, record })
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

/// Optimizer steps: `max_steps`, or what the epochs give, whichever is less.
fn num_steps(job: &Job, subject: &Subject, batch: BatchPlan) -> Result<usize, Failure> {
    let shard = Shard { rank: 0, num_ranks: job.training.ranks };
    let per_rank = subject.samples_per_epoch(shard).map_err(Failure::mistake)?;
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
