//! `finetune`: the main job, from a job file to a trained model.
//!
//! [`finetune`] reads from top to bottom as the phases of a run:
//!
//! 1. Connect the ranks that a launcher started. Without a launcher, ranks are threads.
//! 2. Resolve the job, prepare its data and predict its memory ([`PreparedRun`]).
//! 3. Choose the backend, a device for each rank, and build the models ([`Run::build`]).
//! 4. Open the output folder and train on all ranks ([`Run::train_ranks`]). Each rank trains,
//!    exports and tests the model ([`train_rank`]).
//! 5. Merge the adapter, if the job asks for it, and write the report.
//!
//! With `--evaluate`, the ranks evaluate the model in phase 4, and there is no phase 5.
//!
//! Phases 1 to 3 write nothing. Most errors in them are a user's mistake, with exit status 2. If
//! ranks are processes, each phase ends with [`agree`], so that a failure of one process ends all
//! of them with one message.
//!
//! | File | Phase |
//! |---|---|
//! | `preparation.rs`, `effects.rs`, `prepared.rs` | job, data, checkpoint, forecast |
//! | `forecast.rs`, `swap.rs`, `monitoring.rs` | checks of memory, disk space and output paths |
//! | `output_folder.rs` | lock of the output folder, and first writes |
//! | `rank.rs`, `resume.rs`, `hooks.rs` | training |
//! | `results.rs` | model, test record and report |
//! | `agreement.rs`, `signals.rs`, `launcher_env.rs` | processes, signals and launcher |

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use deepburn::checkpoint::Checkpoint;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Group;
use deepburn::{Ranks, RanksError};
use deepburn_config::{Backend, JobRequest, TrainingJob, counted};
use deepburn_monitor::Profiler;

use crate::console;
use crate::data::recipe::{InitialWeights, Recipe};
use crate::data::subject::with_recipe;
use crate::failure::Failure;
use crate::job::device_check::check_device;
use crate::job::device_panics;
use crate::job::devices::{Devices, VisibleDevices, set_matmul_precision, with_backend};
use crate::job::instructions::instructions_in_words;
use crate::run::agreement::{agree, check_shared, failure_of_rank, one_per_host_first};
use crate::run::hooks::{DeviceHook, StepCounter, hooks};
use crate::run::output_folder::open_output;
use crate::run::preparation::check_types;
use crate::run::prepared::{PreparedRun, Purpose};
use crate::run::rank::{RankOutcome, RankRun, train_rank};
use crate::run::results::{save_merged, write_report};
use crate::run::resume::{ResumedCheckpoint, folder};
use crate::run::signals::Signals;
use crate::run::swap::{announce_swap, check_swap};
use crate::tools::tune::TuneArguments;

/// Train a language model or a text classifier, sharded over ranks with a DeepSpeed configuration.
#[derive(Debug, Parser)]
#[command(name = "finetune", version)]
pub struct Arguments {
    /// Job file; also looked up in `configs/`.
    #[arg(long)]
    config: PathBuf,
    /// Override a value of the job file, such as `training.max_steps=10`; repeatable.
    #[arg(long = "set", value_name = "PATH.TO.KEY=VALUE")]
    sets: Vec<String>,
    /// Number of ranks, each a thread of this process. Under mpirun or srun each process is one
    /// rank.
    #[arg(long, visible_alias = "num_gpus", value_name = "N", allow_negative_numbers = true)]
    ranks: Option<usize>,
    /// DeepSpeed configuration that replaces the job file's.
    #[arg(long, value_name = "FILE")]
    deepspeed: Option<PathBuf>,
    /// Tensor backend: flex, or wgpu, cuda or tch if compiled in.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Output folder for metrics, checkpoints, model and report.
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Resume from a checkpoint: the latest one in output_dir/checkpoints, the one named TAG (or
    /// its path), or a FOLDER saved by DeepSpeed.
    #[arg(long, value_name = "TAG|FOLDER", num_args = 0..=1)]
    resume: Option<Option<String>>,
    /// Evaluate model.pretrained, with model.adapter if given, on the eval and test splits, without
    /// training.
    #[arg(long, conflicts_with = "resume")]
    evaluate: bool,
}

/// Runs the job. If a launcher started one process per rank, this process runs only its own rank.
///
/// `profiler` records the steps that the job selects for profiling.
///
/// # Errors
/// Returns a user's mistake before anything is written, or a failure while running.
pub fn finetune(arguments: Arguments, profiler: &Profiler) -> Result<(), Failure> {
    // The handler of SIGUSR1 is registered first, because a launcher may stop the job with it while
    // the ranks still connect.
    let signals = Signals::prepare().map_err(Failure::run)?;
    let ranks = connect()?;
    let purpose = match arguments.evaluate {
        true => Purpose::Evaluate,
        false => Purpose::Train { resume: arguments.resume.clone() },
    };
    let request = arguments.request(&ranks);

    let prepare = || PreparedRun::new(&request, purpose.clone(), &ranks);
    // Every process prepares the job on its own, so that nothing has to be sent.
    let prepared = one_per_host_first(&ranks, prepare)?;
    let run = Run { prepared, ranks: &ranks, signals: &signals, profiler };
    run.start_profiler();

    device_panics::watch();
    set_matmul_precision(run.training());
    let backend = run.training().placement.backend;
    with_backend!(backend, B, devices => run.train::<B>(devices))?;

    if ranks.has_first() {
        profiler.finish().map_err(Failure::run)?;
        match run.prepared.purpose {
            Purpose::Train { .. } => write_report(&request, &run.prepared.preparation)?,
            Purpose::Evaluate => {
                console::eprint(&format!("metrics are in {}", run.training().output_dir.display()));
            }
        }
    }
    Ok(())
}

/// Connects the processes of the job and divides the cores of this host among them.
///
/// # Errors
/// Returns a user's mistake if launcher and program do not match, and a failure while running if a
/// rank or a host is lost.
fn connect() -> Result<Ranks, Failure> {
    let ranks = Ranks::connect().map_err(|error| match error {
        // A lost rank or host is not a user's mistake: a restart may help.
        RanksError::Comm(_) => Failure::run(error),
        _ => Failure::mistake(error),
    })?;
    if let Some(placement) = ranks.placement() {
        deepburn::divide_cores(placement);
    }
    deepburn::start_threads().map_err(Failure::run)?;
    Ok(ranks)
}

impl Arguments {
    /// Returns the search for the configuration of this job on `ranks` ranks.
    ///
    /// # Errors
    /// Returns a user's mistake if the command asks for another number of ranks, or does not train.
    pub(crate) fn tuned_for(&self, ranks: usize) -> Result<TuneArguments, Failure> {
        if self.evaluate {
            return Err(Failure::mistake(
                "--autotuning: --evaluate does not train; remove one of them",
            ));
        }
        if let Some(own) = self.ranks.filter(|own| *own != ranks) {
            return Err(Failure::mistake(format!(
                "--autotuning: the launcher starts {}, and the command has --ranks {own}; remove it",
                counted(ranks, "rank")
            )));
        }
        Ok(TuneArguments {
            config: self.config.clone(),
            sets: self.sets.clone(),
            ranks: vec![ranks as u16],
            deepspeed: self.deepspeed.clone(),
            backend: self.backend.clone(),
            ..TuneArguments::default()
        })
    }

    /// Returns the words of this command with other options for its configuration, which `options`
    /// are. The other options of the command are kept.
    pub(crate) fn with_options(&self, program: &str, options: Vec<String>) -> Vec<String> {
        let text = |path: &Path| path.display().to_string();
        let mut words = vec![program.to_owned(), "--config".to_owned(), text(&self.config)];
        words.extend(options);
        if let Some(folder) = &self.output_dir {
            words.extend(["--output-dir".to_owned(), text(folder)]);
        }
        if let Some(checkpoint) = &self.resume {
            words.push("--resume".to_owned());
            words.extend(checkpoint.clone());
        }
        words
    }

    /// Returns the job that the command line describes, on the number of ranks that the launcher
    /// started.
    fn request(self, ranks: &Ranks) -> JobRequest {
        JobRequest {
            config: self.config,
            sets: self.sets,
            deepspeed: self.deepspeed,
            ranks: self.ranks,
            launched: ranks.placement().map(|placement| placement.world_size),
            backend: self.backend,
            output_dir: self.output_dir,
        }
    }
}

/// A prepared run and the ranks of this process that execute it.
struct Run<'a> {
    /// Job, checkpoint and forecast.
    prepared: PreparedRun,
    /// All ranks of the job, of which this process runs one or all.
    ranks: &'a Ranks,
    /// The signals that stop the run.
    signals: &'a Signals,
    /// Records the steps that the job selects.
    profiler: &'a Profiler,
}

/// The device and the model of each rank of this process, in rank order.
struct Placed<D, M> {
    /// Device of each rank of this process.
    devices: Vec<D>,
    /// Models of the ranks. Each rank takes its model out when it starts.
    models: Mutex<Vec<Option<M>>>,
}

impl Run<'_> {
    /// Returns the `training` section of the job.
    fn training(&self) -> &TrainingJob {
        &self.prepared.preparation.job.training
    }

    /// Passes the steps to record to the profiler. Only the process of rank 0 writes a profile.
    fn start_profiler(&self) {
        if let Some(profile) = &self.prepared.preparation.plan.outputs.monitor.profile
            && self.ranks.has_first()
        {
            self.profiler
                .profile(profile.steps.clone(), &profile.under(&self.training().output_dir));
        }
    }

    /// Trains on backend `B`. Ranks use the `visible` devices that the job selects.
    ///
    /// All functions below are generic over the recipe, so that each kind of job is compiled for
    /// each backend.
    ///
    /// # Errors
    /// Returns a user's mistake before training, or a failure while running.
    fn train<B: FusedOps + OptimizerOps>(
        &self,
        visible: &VisibleDevices<B::Device>,
    ) -> Result<(), Failure> {
        let subject = &self.prepared.preparation.subject;
        with_recipe!(subject, recipe => self.train_recipe::<B, _>(recipe, visible))
    }

    /// Trains the model of `recipe` on backend `B`: builds the models, locks the output folder,
    /// trains, and returns how the run ended.
    fn train_recipe<B: FusedOps + OptimizerOps, R: Recipe<B>>(
        &self,
        recipe: &R,
        visible: &VisibleDevices<B::Device>,
    ) -> Result<(), Failure> {
        let (preparation, ranks) = (&self.prepared.preparation, self.ranks);
        let placed = agree(ranks, "model", self.build::<B, R>(recipe, visible))?;

        // From here on files are written. The lock is held until all ranks have ended.
        let lock = ranks.has_first().then(|| open_output(preparation)).transpose();
        let _lock = agree(ranks, "output", lock)?;
        // Only now, because the folder may have been made by rank 0 just before.
        check_shared(ranks, &self.training().output_dir)?;
        let steps = match self.prepared.purpose {
            Purpose::Train { .. } => counted(preparation.length.max_steps as usize, "step"),
            Purpose::Evaluate => "evaluation without training".to_owned(),
        };
        tracing::info!(
            "{} parameters, ZeRO stage {}{}, {}, {steps}",
            preparation.subject.info().architecture().num_parameters(),
            preparation.plan.zero.stage.number(),
            preparation.plan.sharding(),
            counted(self.training().placement.ranks, "rank"),
        );
        if self.training().placement.backend == Backend::Flex {
            tracing::info!("CPU kernels: {}", instructions_in_words());
        }
        announce_swap(preparation);

        let outcomes = self.train_ranks(recipe, &placed)?;
        // All ranks have the same outcome, so the first one is enough.
        let Some(outcome) = outcomes.into_iter().next() else { return Ok(()) };
        if ranks.has_first() && outcome.has_model() {
            save_merged(preparation).map_err(|cause| {
                Failure::run(format!(
                    "the adapter is saved, and merging it failed: {cause}; merge it with `deepburn merge`"
                ))
            })?;
        }
        self.conclude(outcome)
    }

    /// Assigns devices to the ranks of this process, checks that the run fits, and builds their
    /// models.
    ///
    /// The checks are those that need the device or the host: supported float types, a self-test,
    /// memory, and the folders of swap files.
    fn build<B: FusedOps + OptimizerOps, R: Recipe<B>>(
        &self,
        recipe: &R,
        visible: &VisibleDevices<B::Device>,
    ) -> Result<Placed<B::Device, R::Model>, Failure> {
        let PreparedRun { preparation, forecast, .. } = &self.prepared;
        let devices = self.place(visible)?;
        for (rank, device) in devices.iter().enumerate() {
            check_types::<B>(preparation, device)?;
            // Ranks may share a device.
            if !devices[..rank].contains(device) {
                let precision = preparation.plan.precision.of_products();
                check_device::<B>(self.training().placement.backend, device, precision)?;
            }
        }
        // Before the models are built: a run that does not fit would be killed without a message.
        forecast.check(preparation, self.ranks)?;
        check_swap(preparation, self.ranks_on_host(), forecast.offloaded_activations())?;
        let models = Mutex::new(self.models(recipe, &devices)?);
        Ok(Placed { devices, models })
    }

    /// Returns the number of ranks on this host.
    ///
    /// All of them share its memory and its disks.
    fn ranks_on_host(&self) -> usize {
        self.ranks
            .placement()
            .map_or(self.training().placement.ranks, |placement| placement.local_size)
    }

    /// Returns the device of each rank of this process.
    ///
    /// # Errors
    /// Returns a user's mistake if no device is visible, or if a device that the job lists is not.
    fn place<D: Clone>(&self, visible: &VisibleDevices<D>) -> Result<Vec<D>, Failure> {
        let devices = Devices::choose(visible, self.training(), self.ranks_on_host())?;
        let local_ranks = match self.ranks.placement() {
            // Threads are all on this host.
            None => 0..self.training().placement.ranks,
            Some(placement) => placement.local_rank..placement.local_rank + 1,
        };
        Ok(local_ranks.map(|rank| devices.of(rank).clone()).collect())
    }

    /// Builds the model of each rank of this process, without weights. While the model is sharded,
    /// rank 0 initializes or reads one parameter at a time, so that no rank ever holds all weights.
    ///
    /// # Errors
    /// Returns a user's mistake if the weights do not fit the model.
    fn models<B: FusedOps + OptimizerOps, R: Recipe<B>>(
        &self,
        recipe: &R,
        devices: &[B::Device],
    ) -> Result<Vec<Option<R::Model>>, Failure> {
        // The checkpoint replaces all weights, so the job's initial weights are not read. They are
        // if this checkpoint or a later one omits parameters of the pretrained model, and if
        // preferences are compared with the initial model.
        let PreparedRun { preparation, checkpoint, .. } = &self.prepared;
        let weights = match checkpoint {
            Some(checkpoint)
                if preparation.omitted.is_none()
                    && !checkpoint.omits_parameters()
                    && preparation.data.reference.is_none() =>
            {
                InitialWeights::Zeros
            }
            _ => InitialWeights::OfJob,
        };
        if self.ranks.has_first() && weights == InitialWeights::OfJob {
            recipe.settings().origin.check(recipe.architecture())?;
        }
        B::in_shared_stream(|| {
            devices.iter().map(|device| recipe.model(weights, device).map(Some)).collect()
        })
    }

    /// Trains on every rank of this process, and returns how each rank ended.
    ///
    /// From the first collective on, a failure of one rank ends all ranks. The error of a failed
    /// collective has no step number, which the [`StepCounter`] adds to the message.
    fn train_ranks<B: FusedOps + OptimizerOps, R: Recipe<B>>(
        &self,
        recipe: &R,
        placed: &Placed<B::Device, R::Model>,
    ) -> Result<Vec<RankOutcome>, Failure> {
        let Self { ranks, signals, .. } = self;
        // Until here SIGTERM and SIGINT end the process immediately, because there is nothing to
        // save.
        let first = ranks.placement().map_or(0, |placement| placement.rank);
        agree(ranks, "signals", signals.listen(first == 0).map_err(Failure::run))?;
        let steps = StepCounter::default();
        ranks.count_steps(steps.0.clone());
        ranks.watch_termination(signals.terminated());
        let timeout = Duration::from_secs(self.training().placement.collective_timeout as u64);
        let outcomes = ranks.run(self.training().placement.ranks, timeout, |group: Group<B>| {
            // Models and devices are indexed from the first rank of this process.
            let index = group.rank() - first;
            // A rank takes its model out, so that it is freed as soon as the rank has sharded it.
            let model = placed.models.lock().unwrap_or_else(PoisonError::into_inner)[index].take();
            let Some(model) = model else { unreachable!("every rank has a model") };
            let mut hooks = hooks(&self.prepared, group.rank(), self.profiler)?;
            // First, so that the step is counted even if a later hook fails.
            hooks.hooks.insert(0, Box::new(steps.clone()));
            hooks.hooks.insert(1, Box::new(DeviceHook));
            let device = placed.devices[index].clone();
            train_rank(&self.prepared, RankRun { recipe, model, group, device, hooks, signals })
        });
        outcomes.map_err(|failure| failure_of_rank(ranks, steps.add_step(failure)))
    }

    /// Converts the outcome of the ranks to the result of the process.
    ///
    /// A run that a signal stopped is not a success. Its status is 128 plus the signal number, as
    /// in shells, so that scripts and schedulers see that the run is not complete. Only the process
    /// of rank 0 prints the message.
    fn conclude(&self, outcome: RankOutcome) -> Result<(), Failure> {
        let (signal, name) = self.signals.last();
        let message = match outcome {
            RankOutcome::Finished | RankOutcome::Evaluated => return Ok(()),
            RankOutcome::WithoutEvaluation => format!(
                "stopped by {name} in the evaluation; give the same command with another --output-dir to repeat it"
            ),
            RankOutcome::WithoutSteps => format!(
                "stopped by {name} before the first step; give the same command to start again"
            ),
            RankOutcome::Interrupted { checkpoint } => self.interrupted(name, checkpoint),
            RankOutcome::WithoutTest { step } => self.interrupted_in_test(name, step),
        };
        match self.ranks.has_first() {
            true => Err(Failure::Interrupted { signal, message }),
            false => Err(Failure::Elsewhere { status: 128 + signal }),
        }
    }

    /// Returns the message of a run that a signal stopped.
    ///
    /// `checkpoint` is the checkpoint that was saved because of the signal.
    fn interrupted(&self, signal: &str, checkpoint: Option<PathBuf>) -> String {
        let how = self.resuming();
        match checkpoint {
            Some(path) => format!(
                "stopped by {signal}; {} is saved: give the same command with {how} to resume",
                path.display()
            ),
            None => format!(
                "stopped by {signal}; the last step could not be saved: give the same command with {how} to resume \
                 from the previous checkpoint, if there is one"
            ),
        }
    }

    /// Returns the option with which the same command resumes from the checkpoints of this run.
    fn resuming(&self) -> &'static str {
        match self.prepared.checkpoint {
            Some(ResumedCheckpoint::DeepSpeed(_)) => "--resume alone, without DeepSpeed's folder,",
            _ => "--resume",
        }
    }

    /// Returns the message of a run that a signal stopped in its final test, after `step`.
    ///
    /// The last step may have a checkpoint without `save_steps`, if it has the best model. With
    /// `save_steps`, it has none if saving it failed.
    fn interrupted_in_test(&self, signal: &str, step: u64) -> String {
        let how = self.resuming();
        // The folder is read again: saves may have failed, and retention deletes older checkpoints.
        let latest = Checkpoint::open(&folder(&self.training().output_dir), None);
        let remedy = match latest.map(|checkpoint| checkpoint.run().step) {
            Ok(latest) if latest == step => {
                format!("give the same command with {how} to test it")
            }
            Ok(latest) => format!(
                "the latest checkpoint is of step {latest}: the same command with {how} repeats the steps after it and \
                 the test"
            ),
            Err(_) => "there is no checkpoint; set training.save_steps, so that --resume can repeat an interrupted test"
                .to_owned(),
        };
        format!(
            "stopped by {signal} in the test: the model is saved, test.json is not written; {remedy}"
        )
    }
}
