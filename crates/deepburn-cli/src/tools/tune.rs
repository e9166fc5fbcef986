//! `deepburn tune`: find the fastest configuration of a job that fits.
//!
//! The search is the library's ([`deepburn::tune`]). This module prepares the job as a run does,
//! compares each candidate with the memory of this host, shows the progress and writes the results.
//!
//! ```text
//! 168 candidates: 22 fit, 12 too large, 134 that cannot be faster than one that fits
//! measuring z1_gas1_tmbspg8_ranks2, 1 of at most 6; at most 40 s left
//! ```
//!
//! The precision, the optimizer and the batch size determine what is trained, so they are not
//! tuned. Stages, offload, recomputation, micro-batches and pipeline stages change only how it is
//! computed. Numbers of pipeline stages are tried only if the command line has them, because each
//! of them multiplies the candidates.

mod job;
mod remedy;

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use deepburn::tune::{
    Assessment, MeasuredSteps, Search, SearchLimits, Trial, TuneEvent, TuningFiles,
    TuningFilesError, failure, spearman, table,
};
use deepburn_config::{AutotuningPlan, counted};

use crate::console;
use crate::failure::Failure;
use crate::run::signals::Signals;
use crate::tools::checkpoint_tools::Size;
use job::TunedJob;
use remedy::remedy;

/// Options of `deepburn tune`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct TuneArguments {
    /// Job file of finetune; also looked up in `configs/`.
    #[arg(long)]
    pub(crate) config: PathBuf,
    /// Override a value of the job file, such as `training.max_steps=10`; repeatable.
    #[arg(long = "set", value_name = "PATH.TO.KEY=VALUE")]
    pub(crate) sets: Vec<String>,
    /// Numbers of rank threads to try, such as 1,2,4 [default: the job's].
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) ranks: Vec<u16>,
    /// Numbers of pipeline stages to try, such as 1,2 [default: the job's].
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=63))]
    pub(crate) pipeline_stages: Vec<u8>,
    /// ZeRO stages to try [default: all].
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) stages: Vec<u8>,
    /// Policies of activation checkpointing to try: off, selective, every-2 or full [default: all].
    #[arg(long, value_name = "POLICY,..", value_delimiter = ',', value_parser = ["off", "selective", "every-2", "full"])]
    pub(crate) recompute: Vec<String>,
    /// DeepSpeed configuration that replaces the job file's.
    #[arg(long, value_name = "FILE")]
    pub(crate) deepspeed: Option<PathBuf>,
    /// Tensor backend: flex, or wgpu, cuda or tch if compiled in.
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    #[command(flatten)]
    pub(crate) memory: MemoryArguments,
    /// Folder of the results [default: autotuning.results_dir].
    #[arg(long, value_name = "DIR")]
    pub(crate) results_dir: Option<PathBuf>,
    /// Maximum number of configurations that are measured [default: autotuning.tuner_num_trials,
    /// else 6].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) trials: Option<u16>,
    /// Measure every configuration that fits, and compare forecasts with measurements.
    #[arg(long, conflicts_with = "trials")]
    pub(crate) exhaustive: bool,
}

/// Options for the memory and the disk that a configuration may use.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct MemoryArguments {
    /// Memory of a device, or of this host on a CPU backend, such as 24GB [default: what is there].
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Space on the disk of --nvme [default: what is free].
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk: Option<Size>,
    /// Folder on a local disk, to try offload to NVMe [default: nvme_path of the configuration].
    #[arg(long, value_name = "DIR")]
    pub(crate) nvme: Option<PathBuf>,
}

/// Searches, prints the table and writes the results. Returns the options of `finetune` that select
/// the best configuration, beside those that name the job.
///
/// # Errors
/// Returns a user's mistake if the job is not valid or nothing fits, and a failure while running if
/// no measurement succeeds, if a file cannot be written, or if a signal ended the search.
pub(crate) fn tune(arguments: &TuneArguments) -> Result<Vec<String>, Failure> {
    let started = Instant::now();
    let signals = Signals::prepare().map_err(Failure::run)?;
    let job = TunedJob::read(arguments)?;
    let (tuner, autotuning) = (job.tuner()?, &job.autotuning);
    let mut search = tuner.search(&job.space()?, limits(arguments, autotuning));
    console::eprint(&counts(&search));
    if search.next().is_none() {
        let (reason, closes) = (failure(&search), remedy(&job, &tuner, &search));
        return Err(Failure::mistake(format!("{}: {reason}; {closes}", job.name())));
    }
    let (config, command) = (|it: &_| tuner.config(it), |it: &_, file: &_| job.command(it, file));
    let folder = arguments.results_dir.clone();
    let results = TuningFiles {
        results: folder.unwrap_or_else(|| autotuning.results_dir.clone()),
        exps: autotuning.exps_dir.clone(),
        title: job.name(),
        config: &config,
        command: &command,
    };
    results.open(autotuning.overwrite).map_err(Failure::mistake)?;
    // Until here a signal ends the program at once, because there is no result to keep.
    signals.listen(true).map_err(Failure::run)?;

    let steps =
        MeasuredSteps { warmup: autotuning.warmup_steps, measured: autotuning.measured_steps };
    // Later files could not be written either, so the first failure ends the search.
    let (unwritten, interrupt) = (RefCell::new(None::<TuningFilesError>), signals.interrupt());
    let observe = |search: &Search, event| match event {
        TuneEvent::Measuring { index, again } => {
            console::eprint(&progress(search, index, again, steps));
        }
        TuneEvent::Measured { index } => {
            if let Err(error) = results.write_trial(search, index) {
                unwritten.borrow_mut().get_or_insert(error);
                interrupt.ask();
            }
        }
    };
    tuner.run(&mut search, &interrupt, |plan| job.measure(plan, steps), observe);
    if let Some(error) = unwritten.take() {
        return Err(Failure::run(error));
    }
    let best = results.finish(&search, started.elapsed()).map_err(Failure::run)?;
    console::print(&table(&search).join("\n"))?;
    if arguments.exhaustive {
        console::print(&agreement(&search).join("\n"))?;
    }
    let options = conclude(&job, &search, best)?;
    console::eprint(&format!("results are in {}", results.results.display()));
    if interrupt.is_asked() {
        let (signal, name) = signals.last();
        let message = format!(
            "stopped by {name}; the best configuration so far is in {}",
            results.results.display()
        );
        return Err(Failure::Interrupted { signal, message });
    }
    Ok(options)
}

/// Returns the limits of the search, which are in the command line or else in the job.
fn limits(arguments: &TuneArguments, autotuning: &AutotuningPlan) -> SearchLimits {
    SearchLimits {
        measurements: arguments.trials.map_or(autotuning.trials, usize::from),
        patience: autotuning.patience,
        metric: autotuning.metric,
        exhaustive: arguments.exhaustive,
    }
}

/// Returns the options of the best configuration, whose file is `file`, and prints how to train
/// with it.
///
/// # Errors
/// Returns a failure while running if nothing was measured.
fn conclude(
    job: &TunedJob,
    search: &Search,
    file: Option<PathBuf>,
) -> Result<Vec<String>, Failure> {
    let best = search.best().map(|best| &search.trials()[best].candidate).zip(file);
    let Some((candidate, file)) = best else {
        return Err(Failure::run(format!("{}: {}", job.name(), failure(search))));
    };
    console::print(&format!("best: {}\n{}", candidate.name(), job.command(candidate, &file)))?;
    Ok(job.options(candidate, &file))
}

/// Returns the line of the numbers of candidates.
fn counts(search: &Search) -> String {
    let count = |is: fn(&Assessment) -> bool| {
        search.trials().iter().filter(|trial| is(&trial.assessment)).count()
    };
    format!(
        "{}: {} fit, {} too large, {} that cannot be faster than one that fits, {} that are not valid",
        counted(search.trials().len(), "candidate"),
        count(|it| matches!(it, Assessment::Fits { .. })),
        count(|it| matches!(it, Assessment::TooLarge { .. })),
        count(|it| matches!(it, Assessment::Dominated { .. })),
        count(|it| matches!(it, Assessment::Invalid { .. })),
    )
}

/// Returns the line about a candidate that is measured next, with the time that the search may
/// still take.
fn progress(search: &Search, index: usize, again: bool, steps: MeasuredSteps) -> String {
    let trial = &search.trials()[index];
    let fitting = search.trials().iter().filter(|trial| trial.prediction().is_some()).count();
    let most = match search.limits().exhaustive {
        true => fitting,
        false => search.limits().measurements.min(fitting),
    };
    let seconds = trial.prediction().map_or(0.0, |it| search.calibration().seconds(it));
    let steps = (steps.warmup + steps.measured) as f64;
    let name = trial.candidate.name();
    if again {
        return format!(
            "measuring {name} again, because others are as fast; about {:.0} s",
            seconds * steps
        );
    }
    let number = search.measured().len() + 1;
    // As if all others were as slow as this one.
    let left = (most + 1).saturating_sub(number) as f64 * seconds * steps;
    format!("measuring {name}, {number} of at most {most}; about {left:.0} s left")
}

/// Returns how well forecasts agree with the measurements of an exhaustive search.
fn agreement(search: &Search) -> Vec<String> {
    let measured: Vec<(&Trial, f64)> = search
        .trials()
        .iter()
        .filter_map(|trial| Some((trial, trial.measurement()?.fastest())))
        .collect();
    let seconds: Vec<_> = measured.iter().map(|(_, seconds)| *seconds).collect();
    let calibration = search.calibration();
    let predicted = |of: &dyn Fn(&deepburn::tune::PredictedStep) -> f64| -> Vec<f64> {
        measured.iter().filter_map(|(trial, _)| trial.prediction().map(of)).collect()
    };
    let plain = spearman(&predicted(&|it| it.seconds()), &seconds);
    let corrected = spearman(&predicted(&|it| calibration.seconds(it)), &seconds);
    let ratios = |of: fn(&deepburn::tune::StepMemory) -> Option<u64>| -> String {
        let ratio = |(trial, _): &(&Trial, f64)| {
            let forecast = of(trial.memory()?)? as f64;
            Some(forecast / of(&trial.measurement()?.memory)? as f64)
        };
        let ratios: Vec<f64> = measured.iter().filter_map(ratio).collect();
        let [least, most] = [f64::min, f64::max].map(|pick| ratios.iter().copied().reduce(pick));
        least.zip(most).map_or("-".to_owned(), |(least, most)| format!("{least:.3} to {most:.3}"))
    };
    vec![
        format!(
            "  rank correlation of {} with measured seconds: {plain:.3}, calibrated {corrected:.3}",
            counted(measured.len(), "forecast")
        ),
        format!("  forecast / measured peak of a rank: {}", ratios(|it| Some(it.device))),
        format!("  forecast / measured resident set: {}", ratios(|it| it.resident)),
    ]
}
