//! `finetune`: the main job, from a job file to a trained model.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use burn::tensor::backend::Backend;
use clap::Parser;
use deepburn::metrics::{MetricsError, MetricsWriter};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Group, ZeroError};
use deepburn::{
    BestEvaluation, BestMetric, BestPlan, CheckpointPlan, EarlyStopping, EngineError,
    EvaluationEnd, Hook, LoopState, Outcome, OutsideError, Ranks, RanksError, TrainError,
    TrainPlan, TrainingCheckpointError,
};
use deepburn_config::{JobRequest, ModelMetric, MonitorFolder, TrainingJob};
use deepburn_datasets::{DataError, Shard};
use deepburn_models::gpt2::CheckpointError;
use deepburn_monitor::{MonitorError, MonitorFolders, Monitors, Profiler};

use crate::counted::counted;
use crate::data::recipe::{InitialWeights, Recipe, Subject};
use crate::failure::Failure;
use crate::job::devices::Devices;
#[cfg(feature = "cuda")]
use crate::job::devices::cuda_devices;
#[cfg(feature = "wgpu")]
use crate::job::devices::wgpu_devices;
use crate::run::agreement::{agree, check_shared, one_per_host_first, shown_by_its_rank};
use crate::run::forecast::RunForecast;
use crate::run::monitoring::check_monitors;
use crate::run::preparation::{Preparation, check_types, claim_output, prepare};
use crate::run::progress::{Progress, shown, tell};
use crate::run::results::{record_test, save_model, write_report, write_whole};
use crate::run::resume::{self, Origin};
use crate::run::signals::Signals;
use crate::run::swap::{announce_swap, check_swap, report_swap};
use crate::run::watch::{Operations, Record, Steps, Trace, Watch};

/// Trains a language model or a classifier, sharded over ranks as a DeepSpeed configuration says.
#[derive(Debug, Parser)]
#[command(name = "finetune", version)]
pub struct Arguments {
    /// Job file: as given, or in configs/.
    #[arg(long)]
    config: PathBuf,
    /// Set one value of the job file, such as `training.max_steps=10`.
    #[arg(long = "set", value_name = "PATH.TO.KEY=VALUE")]
    sets: Vec<String>,
    /// Ranks, each a thread of this process. Under mpirun or srun every process is one rank.
    #[arg(long, visible_alias = "num_gpus", value_name = "N", allow_negative_numbers = true)]
    ranks: Option<usize>,
    /// DeepSpeed configuration in place of the job file's.
    #[arg(long, value_name = "FILE")]
    deepspeed: Option<PathBuf>,
    /// Where tensors live: flex, or wgpu, cuda or tch where compiled in.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Folder for everything that is written.
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Resume from the latest checkpoint in output_dir/checkpoints, from the one of this name, or from
    /// a folder that DeepSpeed saved.
    #[arg(long, value_name = "TAG|FOLDER", num_args = 0..=1)]
    resume: Option<Option<String>>,
}

/// A failure of one rank.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RankError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Zero(#[from] ZeroError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(
        "parameter {path} is not finite, so the model was not saved: training diverged in its last \
         step; lower the learning rate"
    )]
    Diverged { path: String },
    #[error("job.json: {cause}")]
    Record { cause: OutsideError },
    #[error("test.json cannot be written ({cause}); make room in the output folder")]
    Test { cause: std::io::Error },
    #[error(transparent)]
    Resume(#[from] TrainingCheckpointError),
    #[error("--resume: the place in the data: {cause}")]
    Place { cause: OutsideError },
    #[error("step {step}: saving the model: {cause}")]
    Save { step: u64, cause: Box<RankError> },
}

/// Runs the job, or the rank of it that this process is. `profiler` records the steps of which the job
/// asks for a profile.
///
/// # Errors
/// A user's mistake before anything was written, or a failure while running.
pub fn finetune(arguments: Arguments, profiler: &Profiler) -> Result<(), Failure> {
    // First of all: a launcher may ask for the end while ranks connect.
    let signals = Signals::prepare().map_err(Failure::run)?;
    let ranks = Ranks::connect().map_err(|error| match error {
        // A rank or a host that was lost: a restart may help.
        RanksError::Comm(_) => Failure::run(error),
        _ => Failure::mistake(error),
    })?;
    if let Some(placement) = ranks.placement() {
        deepburn::divide_cores(placement);
    }
    deepburn::start_threads().map_err(Failure::run)?;
    let request = JobRequest {
        config: arguments.config,
        sets: arguments.sets,
        deepspeed: arguments.deepspeed,
        ranks: arguments.ranks,
        launched: ranks.placement().map(|placement| placement.world_size),
        backend: arguments.backend,
        output_dir: arguments.output_dir,
    };
    let (preparation, forecast) = one_per_host_first(&ranks, || {
        let resume = arguments.resume.as_ref();
        let mut preparation = prepare(&request, |job| resume::check_start(job, resume))?;
        check_monitors(&preparation, &request.config)?;
        preparation.resume = resume::origin(&preparation, resume)?;
        let forecast = RunForecast::new(&preparation, &ranks);
        preparation.record["memory_forecast"] = forecast.record();
        Ok((preparation, forecast))
    })?;
    let job = RunningJob {
        preparation: &preparation,
        forecast: &forecast,
        ranks: &ranks,
        signals: &signals,
        profiler,
    };
    if let Some(profile) = &preparation.plan.monitor.profile
        && ranks.has_first()
    {
        let folder = profile.under(&preparation.job.training.output_dir);
        profiler.profile(profile.steps.clone(), &folder);
    }
    match preparation.job.training.backend {
        #[cfg(feature = "cuda")]
        deepburn_config::Backend::Cuda => run_on::<burn_cuda::Cuda<f32, i32>>(job, &cuda_devices()),
        #[cfg(feature = "tch")]
        deepburn_config::Backend::Tch => {
            run_on::<burn_tch::LibTorch<f32>>(job, &[burn_tch::LibTorchDevice::Cpu])
        }
        #[cfg(feature = "wgpu")]
        deepburn_config::Backend::Wgpu => run_on::<burn_wgpu::Wgpu<f32, i32>>(job, &wgpu_devices()),
        _ => run_on::<burn_flex::Flex>(job, &[burn_flex::FlexDevice]),
    }?;
    if !ranks.has_first() {
        return Ok(());
    }
    profiler.finish().map_err(Failure::run)?;
    write_report(&request, &preparation)
}

/// A job that is ready to run, and the ranks of this process that run it.
#[derive(Clone, Copy)]
struct RunningJob<'a> {
    preparation: &'a Preparation,
    forecast: &'a RunForecast,
    ranks: &'a Ranks,
    signals: &'a Signals,
    profiler: &'a Profiler,
}

/// Trains on backend `B`, the ranks on those of the `visible` devices that the job chooses.
fn run_on<B: FusedOps + OptimizerOps>(
    job: RunningJob<'_>,
    visible: &[B::Device],
) -> Result<(), Failure> {
    match &job.preparation.subject {
        Subject::Causal(recipe) => run::<B, _>(job, &**recipe, visible),
        Subject::Encoder(recipe) => run::<B, _>(job, &**recipe, visible),
        Subject::Gpt2Classifier(recipe) => run::<B, _>(job, &**recipe, visible),
    }
}

/// Trains what `recipe` says on backend `B`, each rank on its device.
fn run<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    job: RunningJob<'_>,
    recipe: &R,
    visible: &[B::Device],
) -> Result<(), Failure> {
    let RunningJob { preparation, forecast, ranks, signals, profiler } = job;
    let training = &preparation.job.training;
    let ready = own_devices(job, visible).and_then(|devices| {
        for device in &devices {
            check_types::<B>(preparation, device)?;
        }
        forecast.check(preparation, ranks)?;
        let local_ranks = ranks.placement().map_or(training.ranks, |it| it.local_size);
        check_swap(preparation, local_ranks, forecast.offloaded_activations())?;
        let models = models(job, recipe, &devices)?;
        Ok((devices, models))
    });
    let (devices, models) = agree(ranks, "model", ready)?;
    let claim = ranks.has_first().then(|| open_output(preparation)).transpose();
    let _claim = agree(ranks, "output", claim)?;
    check_shared(ranks, &training.output_dir)?;

    tracing::info!(
        "{} parameters, ZeRO stage {}, {}, {}",
        preparation.subject.model().num_parameters(),
        preparation.plan.zero.stage.number(),
        counted(training.ranks, "rank"),
        counted(preparation.max_steps as usize, "step")
    );
    announce_swap(preparation);
    let models = Mutex::new(models);
    let checkpoints = resume::plan(preparation);
    agree(ranks, "signals", signals.listen().map_err(Failure::run))?;
    let steps = Steps::default();
    ranks.count_steps(steps.0.clone());
    ranks.watch_termination(signals.terminated());
    // Ranks of this process are counted from the first of them.
    let first = ranks.placement().map_or(0, |placement| placement.rank);
    let timeout = Duration::from_secs(training.collective_timeout as u64);
    let trained = ranks.run(training.ranks, timeout, |group: Group<B>| {
        let index = group.rank() - first;
        let model = models.lock().unwrap_or_else(PoisonError::into_inner)[index].take();
        let mut hooks = hooks(preparation, group.rank(), profiler)?;
        hooks.insert(0, Box::new(steps.clone()));
        let device = devices[index].clone();
        let run = RankRun { group, device, hooks, checkpoints: &checkpoints };
        Ok(train_rank(preparation, recipe, model, run, signals)?)
    });
    let outcomes = trained.map_err(|failure| shown_by_its_rank(ranks, steps.placed(failure)))?;
    let (signal, name) = signals.last();
    let message = match outcomes.into_iter().next() {
        Some(RankEnd::Interrupted { checkpoint }) => ending(preparation, name, checkpoint),
        Some(RankEnd::WithoutTest) => ending_without_test(training, name),
        Some(RankEnd::Finished) | None => return Ok(()),
    };
    match ranks.has_first() {
        true => Err(Failure::Interrupted { signal, message }),
        false => Err(Failure::Elsewhere { status: 128 + signal }),
    }
}

/// How a rank ended.
enum RankEnd {
    /// The model is saved, and tested if there is a test split.
    Finished,
    /// A signal stopped training.
    Interrupted {
        /// What it resumes from.
        checkpoint: Option<PathBuf>,
    },
    /// A signal stopped the test of the model, which is saved.
    WithoutTest,
}

/// The device of each rank of this process.
fn own_devices<D: Clone>(job: RunningJob<'_>, visible: &[D]) -> Result<Vec<D>, Failure> {
    let training = &job.preparation.job.training;
    Ok(match job.ranks.placement() {
        // Threads are all on this host.
        None => {
            let devices = Devices::choose(visible, training, training.ranks)?;
            (0..training.ranks).map(|rank| devices.of(rank).clone()).collect()
        }
        Some(placement) => {
            let devices = Devices::choose(visible, training, placement.local_size)?;
            vec![devices.of(placement.local_rank).clone()]
        }
    })
}

/// Takes possession of the output folder, and leaves nothing there that an earlier run has made and that
/// would pass for this one's, should this one fail.
fn open_output(preparation: &Preparation) -> Result<Option<File>, Failure> {
    let output = &preparation.job.training.output_dir;
    let claim = claim_output(output)?;
    let record = serde_json::to_string_pretty(&preparation.record).map_err(Failure::run)?;
    let path = output.join("job.json");
    write_whole(&path, &record).map_err(|error| {
        Failure::run(format!("{} cannot be written: {error}; make room there", path.display()))
    })?;
    for name in ["report.html", "test.json"] {
        match fs::remove_file(output.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Failure::run(error));
            }
            _ => {}
        }
    }
    if output.join("model").exists() {
        tracing::info!("until this run ends, {}/model is an earlier one's", output.display());
    }
    Ok(claim)
}

/// The model of each rank of this process, on its device. None has weights yet: rank 0 draws or reads one
/// after the other while the ranks shard them.
fn models<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    job: RunningJob<'_>,
    recipe: &R,
    devices: &[B::Device],
) -> Result<Vec<Option<R::Model>>, Failure> {
    let weights = match &job.preparation.resume {
        Some(_) => InitialWeights::Zeros,
        None => InitialWeights::OfJob,
    };
    if job.ranks.has_first() && weights == InitialWeights::OfJob {
        recipe.check_weights()?;
    }
    B::in_shared_stream(|| {
        devices.iter().map(|device| Ok(Some(recipe.model(weights, device)?))).collect()
    })
}

/// What is said of a run that a signal stopped.
fn ending(preparation: &Preparation, signal: &str, checkpoint: Option<PathBuf>) -> String {
    let how = match preparation.resume {
        Some(Origin::DeepSpeed(_)) => "--resume alone, without DeepSpeed's folder,",
        _ => "--resume",
    };
    match checkpoint {
        Some(path) => format!(
            "stopped by {signal}; {} is saved: give the same command with {how} to resume",
            path.display()
        ),
        None => format!(
            "stopped by {signal}; its last step could not be saved: the same command with {how} goes \
             on from the checkpoint before, if there is one"
        ),
    }
}

/// What is said of a run whose test a signal stopped.
fn ending_without_test(training: &TrainingJob, signal: &str) -> String {
    let remedy = match training.save_steps {
        Some(_) => "give the same command with --resume to test it",
        None => "set training.save_steps to be able to test it later with --resume",
    };
    format!(
        "stopped by {signal} in the test: the model is saved, test.json is not written; {remedy}"
    )
}

/// What a rank has of its own.
struct RankRun<'a, B: Backend> {
    group: Group<B>,
    device: B::Device,
    hooks: Vec<Box<dyn Hook>>,
    checkpoints: &'a CheckpointPlan,
}

/// What one rank does.
fn train_rank<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    preparation: &Preparation,
    recipe: &R,
    model: Option<R::Model>,
    run: RankRun<'_, B>,
    signals: &Signals,
) -> Result<RankEnd, RankError> {
    let Preparation { job, plan, .. } = preparation;
    let RankRun { group, device, mut hooks, checkpoints } = run;
    let Some(model) = model else {
        unreachable!("there is a model for every rank");
    };
    let shard = Shard { rank: group.rank(), num_ranks: group.world_size() };
    let mut source = recipe.source(shard, plan)?;
    let mut engine = deepburn::initialize(model, plan, group)?;
    engine.seed(job.training.seed);
    let resumed = match &preparation.resume {
        Some(origin) => resume::go_on(&mut engine, origin, &mut source, preparation)?,
        None => LoopState::default(),
    };

    let task = recipe.task(device);
    let train_plan = TrainPlan {
        max_steps: preparation.max_steps,
        batch_sizes: Some(preparation.batch_sizes.clone()),
        eval_steps: job.training.eval_steps.map(|steps| steps as u64),
        counted_step: plan.monitor.flops.as_ref().map(|flops| flops.profile_step),
        checkpoints: Some(checkpoints.clone()),
        interrupt: signals.interrupt(),
        best: best_plan(preparation),
        resumed,
    };
    let outcome = deepburn::train(&mut engine, &task, &mut source, &train_plan, &mut hooks)?;
    let (step, best) = match outcome {
        Outcome::Finished { step, best } => (step, best),
        Outcome::Interrupted { checkpoint } => return Ok(RankEnd::Interrupted { checkpoint }),
    };
    if engine.rank() == 0 {
        report_best(preparation, step, best);
    }
    drop(hooks);
    drop(source);
    if let (0, Some(statistics)) = (engine.rank(), engine.states().io_statistics()) {
        report_swap(&statistics, step);
    }
    // The model first: a signal or a failure in the test loses the test alone. A signal while the model is written
    // stops the test.
    save_model(&engine, recipe, &job.training.output_dir)
        .map_err(|cause| RankError::Save { step, cause: Box::new(cause) })?;
    if let Some(test) = recipe.test(shard, plan)? {
        let is_first = engine.rank() == 0;
        let test = if is_first { shown("evaluating the test split", test) } else { test };
        let failed = |cause| TrainError { step, cause };
        let ended = deepburn::evaluate_until(&engine, &task, test, &signals.interrupt(), |_| {});
        let measured = match ended.map_err(failed)? {
            EvaluationEnd::Completed(measured) => measured,
            EvaluationEnd::Interrupted => return Ok(RankEnd::WithoutTest),
            EvaluationEnd::Unreadable(cause) => {
                return Err(failed(deepburn::data_failure(&engine, cause, None)).into());
            }
        };
        if is_first {
            record_test(&measured, &job.training.output_dir)?;
        }
    }
    Ok(RankEnd::Finished)
}

/// Says whether training stopped early, and which model is saved.
fn report_best(preparation: &Preparation, step: u64, best: Option<BestEvaluation>) {
    let training = &preparation.job.training;
    if step < preparation.max_steps
        && let Some(patience) = training.early_stopping_patience
    {
        tell(&format!(
            "stopped early after step {step}: {} without a better one",
            counted(patience, "evaluation")
        ));
    }
    if training.load_best_model_at_end
        && let Some(BestEvaluation { step, metric, by, .. }) = best
    {
        let metric = match by {
            BestMetric::Loss => format!("eval loss {metric:.4}"),
            BestMetric::Accuracy => format!("eval accuracy {:.2} %", 100.0 * (1.0 - metric)),
        };
        tell(&format!("the saved model is the best one: step {step}, {metric}"));
    }
}

/// What the job wants of its best model.
fn best_plan(preparation: &Preparation) -> BestPlan {
    let training = &preparation.job.training;
    BestPlan {
        evaluation_data: preparation.data.evaluation,
        metric: match training.metric_for_best_model {
            ModelMetric::Loss => BestMetric::Loss,
            ModelMetric::Accuracy => BestMetric::Accuracy,
        },
        load_at_end: training.load_best_model_at_end,
        early_stopping: training.early_stopping_patience.map(|patience| EarlyStopping {
            patience: patience as u64,
            threshold: training.early_stopping_threshold,
        }),
    }
}

/// What watches the run: rank 0 records and shows it, all ranks are profiled.
fn hooks(
    preparation: &Preparation,
    rank: usize,
    profiler: &Profiler,
) -> Result<Vec<Box<dyn Hook>>, RankError> {
    let (job, plan) = (&preparation.job, &preparation.plan);
    let output = &job.training.output_dir;
    let mut hooks: Vec<Box<dyn Hook>> = Vec::new();
    if plan.monitor.profile.is_some() {
        hooks.push(Box::new(Trace { profiler: profiler.clone(), rank }));
    }
    if rank != 0 {
        return Ok(hooks);
    }
    let metrics = output.join("metrics.jsonl");
    let record = match &preparation.resume {
        Some(Origin::Own(checkpoint)) => MetricsWriter::resume(&metrics, checkpoint.run().step)?,
        _ => MetricsWriter::create(&metrics)?,
    };
    let job_record = serde_json::to_string_pretty(&preparation.record)
        .map_err(|error| RankError::Record { cause: error.into() })?;
    hooks.push(Box::new(Record::new(record, (output.join("job.json"), job_record))));
    let under = |folder: &MonitorFolder| folder.under(output);
    let folders = MonitorFolders {
        tensorboard: plan.monitor.tensorboard.as_ref().map(under),
        csv: plan.monitor.csv.as_ref().map(under),
        loss_scale: plan.precision.uses_fp16(),
        resumed_after: preparation.resume.as_ref().map_or(0, Origin::samples),
    };
    hooks.push(Box::new(Watch::new(Monitors::create(&folders)?)));
    if let Some(flops) = &plan.monitor.flops {
        hooks.push(Box::new(Operations {
            plan: flops.clone(),
            name: preparation.subject.name(),
            parameters: preparation.subject.model().parameters(),
            ranks: job.training.ranks,
        }));
    }
    let every = job.training.logging_steps.or(plan.report.steps_per_print);
    let every = every.map(|steps| steps as u64);
    let breakdown = plan.report.wall_clock_breakdown;
    hooks.push(Box::new(Progress::new(preparation.max_steps, every, breakdown)));
    Ok(hooks)
}
