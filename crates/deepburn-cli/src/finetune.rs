//! `finetune`: the main job, from a job file to a trained model.

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use clap::Parser;
use deepburn::metrics::{MetricsError, MetricsWriter};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Group, ZeroError};
use deepburn::{
    CheckpointPlan, EngineError, Hook, Outcome, OutsideError, TrainError, TrainPlan,
    TrainingCheckpointError,
};
use deepburn_config::{JobRequest, MonitorFolder};
use deepburn_datasets::{DataError, Shard};
use deepburn_models::gpt2::CheckpointError;
use deepburn_monitor::{MonitorError, MonitorFolders, Monitors, Profiler};

use crate::devices::Devices;
#[cfg(feature = "cuda")]
use crate::devices::cuda_devices;
#[cfg(feature = "wgpu")]
use crate::devices::wgpu_devices;
use crate::failure::Failure;
use crate::monitoring::check_monitors;
use crate::preparation::{Preparation, check_types, claim_output, prepare};
use crate::progress::Progress;
use crate::progress::tell;
use crate::recipe::{Recipe, Subject};
use crate::results::{record_test, save_model, write_report, write_whole};
use crate::resume::{self, Origin};
use crate::signals::Signals;
use crate::watch::{Operations, Record, Trace, Watch};

/// Trains a language model or a classifier, sharded over ranks as a DeepSpeed configuration says.
#[derive(Debug, Parser)]
#[command(name = "finetune", version)]
pub struct Arguments {
    /// Job file: as given, or in configs/.
    #[arg(long)]
    config: PathBuf,
    /// Sets one value of the job file, such as `training.max_steps=10`.
    #[arg(long = "set", value_name = "PATH.TO.KEY=VALUE")]
    sets: Vec<String>,
    /// Ranks, each a thread of this process.
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
    /// Goes on from the checkpoint of this name in output_dir/checkpoints, from the latest, or from
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
    #[error("test.json cannot be written ({cause}); make room in the output folder")]
    Test { cause: std::io::Error },
    #[error(transparent)]
    Resume(#[from] TrainingCheckpointError),
    #[error("--resume: the place in the data: {cause}")]
    Place { cause: OutsideError },
    #[error("step {step}: saving the model: {cause}")]
    Save { step: u64, cause: Box<RankError> },
}

/// Runs the job. `profiler` records the steps of which the job asks for a profile.
///
/// # Errors
/// A user's mistake before anything was written, or a failure while running.
pub fn finetune(arguments: Arguments, profiler: &Profiler) -> Result<(), Failure> {
    let request = JobRequest {
        config: arguments.config,
        sets: arguments.sets,
        deepspeed: arguments.deepspeed,
        ranks: arguments.ranks,
        backend: arguments.backend,
        output_dir: arguments.output_dir,
    };
    let mut preparation = prepare(&request)?;
    check_monitors(&preparation, &request.config)?;
    match &arguments.resume {
        Some(tag) => preparation.resume = Some(resume::open(&preparation, tag.as_deref())?),
        None => resume::refuse_earlier(&preparation)?,
    }
    if let Some(profile) = &preparation.plan.monitor.profile {
        let folder = profile.under(&preparation.job.training.output_dir);
        profiler.profile(profile.steps.clone(), &folder);
    }
    match preparation.job.training.backend {
        #[cfg(feature = "cuda")]
        deepburn_config::Backend::Cuda => {
            run_on::<burn_cuda::Cuda<f32, i32>>(&preparation, &cuda_devices(), profiler)
        }
        #[cfg(feature = "tch")]
        deepburn_config::Backend::Tch => run_on::<burn_tch::LibTorch<f32>>(
            &preparation,
            &[burn_tch::LibTorchDevice::Cpu],
            profiler,
        ),
        #[cfg(feature = "wgpu")]
        deepburn_config::Backend::Wgpu => {
            run_on::<burn_wgpu::Wgpu<f32, i32>>(&preparation, &wgpu_devices(), profiler)
        }
        _ => run_on::<burn_flex::Flex>(&preparation, &[burn_flex::FlexDevice], profiler),
    }?;
    profiler.finish().map_err(Failure::run)?;
    write_report(&request, &preparation)
}

/// Trains on backend `B`, the ranks on those of the `visible` devices that the job chooses.
fn run_on<B: FusedOps + OptimizerOps>(
    preparation: &Preparation,
    visible: &[B::Device],
    profiler: &Profiler,
) -> Result<(), Failure> {
    let training = &preparation.job.training;
    // Ranks are threads: all of them are on this host.
    let devices = Devices::choose(visible, training, training.ranks)?;
    match &preparation.subject {
        Subject::Causal(recipe) => run::<B, _>(preparation, &**recipe, &devices, profiler),
        Subject::Encoder(recipe) => run::<B, _>(preparation, &**recipe, &devices, profiler),
        Subject::Gpt2Classifier(recipe) => run::<B, _>(preparation, &**recipe, &devices, profiler),
    }
}

/// Trains what `recipe` says on backend `B`, each rank on its device.
fn run<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    preparation: &Preparation,
    recipe: &R,
    devices: &Devices<B::Device>,
    profiler: &Profiler,
) -> Result<(), Failure> {
    let ranks = preparation.job.training.ranks;
    for device in devices.used(ranks) {
        check_types::<B>(preparation, device)?;
    }
    let output = &preparation.job.training.output_dir;
    let models = models(recipe, devices, ranks)?;
    let _claim = claim_output(output)?;
    let record = serde_json::to_string_pretty(&preparation.record).map_err(Failure::run)?;
    write_whole(&output.join("job.json"), &record).map_err(Failure::run)?;
    // An earlier run's would pass for this one's, should this one fail.
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

    tracing::info!(
        "{} parameters, ZeRO stage {}, {ranks} ranks, {} steps",
        preparation.subject.num_parameters(),
        preparation.plan.zero.stage.number(),
        preparation.max_steps
    );
    let models = Mutex::new(models);
    let checkpoints = resume::plan(preparation)?;
    let signals = Signals::listen().map_err(Failure::run)?;
    let trained = deepburn::run_ranks(ranks, |group: Group<B>| {
        let rank = group.rank();
        let model = models.lock().unwrap_or_else(PoisonError::into_inner)[rank].take();
        let hooks = hooks(preparation, rank, profiler)?;
        let device = devices.of(rank).clone();
        let run = RankRun { group, device, hooks, checkpoints: &checkpoints };
        Ok(train_rank(preparation, recipe, model, run, &signals)?)
    });
    let outcomes = trained.map_err(|failure| Failure::run(failure.to_string()))?;
    match outcomes.into_iter().next() {
        Some(Outcome::Interrupted { checkpoint }) => {
            let (signal, name) = signals.last();
            Err(Failure::Interrupted { signal, message: ending(preparation, name, checkpoint) })
        }
        _ => Ok(()),
    }
}

/// The model of each rank. It is built once; ranks on the same device start from handles on one copy.
fn models<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    recipe: &R,
    devices: &Devices<B::Device>,
    ranks: usize,
) -> Result<Vec<Option<R::Model>>, Failure> {
    B::in_shared_stream(|| {
        // In the order of the ranks, which begins again after the last.
        let used = devices.used(ranks);
        let model = recipe.model(&used[0])?;
        // Weights are drawn when first used; all ranks are to share one draw.
        model.visit(&mut Draw);
        let on = |device: &B::Device| match *device == used[0] {
            true => model.clone(),
            false => model.clone().fork(device),
        };
        let copies: Vec<_> = used.iter().map(on).collect();
        Ok(copies.iter().cycle().take(ranks).cloned().map(Some).collect())
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
            "stopped by {signal}; {} is saved: give the same command with {how} to go on",
            path.display()
        ),
        None => format!(
            "stopped by {signal}; its last step could not be saved: the same command with {how} goes \
             on from the checkpoint before, if there is one"
        ),
    }
}

/// What a rank has of its own.
struct RankRun<'a, B: Backend> {
    group: Group<B>,
    device: B::Device,
    hooks: Vec<Box<dyn Hook>>,
    checkpoints: &'a CheckpointPlan,
}

struct Draw;

impl<B: Backend> ModuleVisitor<B> for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        drop(param.val());
    }
}

/// What one rank does.
fn train_rank<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    preparation: &Preparation,
    recipe: &R,
    model: Option<R::Model>,
    run: RankRun<'_, B>,
    signals: &Signals,
) -> Result<Outcome, RankError> {
    let Preparation { job, plan, .. } = preparation;
    let RankRun { group, device, mut hooks, checkpoints } = run;
    let Some(model) = model else {
        unreachable!("there is a model for every rank");
    };
    let shard = Shard { rank: group.rank(), num_ranks: group.world_size() };
    let mut source = recipe.source(shard, plan)?;
    let mut engine = deepburn::initialize(model, plan, group)?;
    engine.seed(job.training.seed);
    if let Some(origin) = &preparation.resume {
        resume::go_on(&mut engine, origin, &mut source, preparation)?;
    }

    let task = recipe.task(device);
    let eval_steps = job.training.eval_steps.map(|steps| steps as u64);
    let batch_sizes = Some(preparation.batch_sizes.clone());
    let length = TrainPlan {
        max_steps: preparation.max_steps,
        batch_sizes,
        eval_steps,
        counted_step: plan.monitor.flops.as_ref().map(|flops| flops.profile_step),
        checkpoints: Some(checkpoints.clone()),
        interrupt: signals.interrupt(),
    };
    let outcome = deepburn::train(&mut engine, &task, &mut source, &length, &mut hooks)?;
    signals.end_at_once();
    if outcome != Outcome::Finished {
        return Ok(outcome);
    }
    drop(hooks);
    drop(source);
    let step = engine.global_steps();
    if let Some(test) = recipe.test(shard, plan)? {
        if engine.rank() == 0 {
            tell("evaluating the test split");
        }
        let measured = deepburn::evaluate(&engine, &task, &test)
            .map_err(|cause| TrainError { step, cause })?;
        if engine.rank() == 0 {
            record_test(&measured, &job.training.output_dir)?;
        }
    }
    save_model(&engine, recipe, &job.training.output_dir)
        .map_err(|cause| RankError::Save { step, cause: Box::new(cause) })?;
    Ok(outcome)
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
    hooks.push(Box::new(Record::new(record)));
    let under = |folder: &MonitorFolder| folder.under(output);
    let folders = MonitorFolders {
        tensorboard: plan.monitor.tensorboard.as_ref().map(under),
        csv: plan.monitor.csv.as_ref().map(under),
        loss_scale: plan.precision.uses_fp16(),
        resumed_after: preparation.resume.as_ref().map_or(0, Origin::samples),
    };
    hooks.push(Box::new(Watch(Monitors::create(&folders)?)));
    if let Some(flops) = &plan.monitor.flops {
        hooks.push(Box::new(Operations {
            plan: flops.clone(),
            name: preparation.subject.name(),
            parameters: preparation.subject.parameters(),
            ranks: job.training.ranks,
        }));
    }
    let every = job.training.logging_steps.or(plan.report.steps_per_print);
    let every = every.map(|steps| steps as u64);
    let breakdown = plan.report.wall_clock_breakdown;
    hooks.push(Box::new(Progress::new(preparation.max_steps, every, breakdown)));
    Ok(hooks)
}
