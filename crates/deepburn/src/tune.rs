//! The search for the fastest configuration of a model that fits.
//!
//! Main function: [`tune`]. Programs with memory limits, outputs or measurements of their own use [`Tuner`], whose parts
//! are the phases of the search:
//!
//! ```text
//! Tuner::search    a dry run of each candidate: memory, and the time of a step by the cost model
//! Tuner::run       measures the most promising candidates, and again in turns those that are as good as the best
//! ```
//!
//! A candidate is measured with the real engine on made-up micro-batches. All measurements of a search run in this process,
//! one after the other, so no candidate needs memory while another one is measured.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::module::AutodiffModule;
use burn::tensor::{DType, Tensor};
use deepburn_config::{
    AutotuningPlan, Plan, Precision, RawConfig, RecomputePolicy, Report, RunContext, SizeLimits,
    Stage, autotuning, resolve,
};
use deepburn_forecast::cost::{Network, RankSpeed};
use deepburn_forecast::{Forecast, ForecastError, MemoryPeaks, Meta, forecast};
use deepburn_learner::{BoxError, Engine, Interrupt, initialize};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Group, Training};
use serde_json::Value;

use crate::machine::{MeasuredSizes, machine_speed, thread_latency};
use crate::{COLLECTIVE_TIMEOUT, Ranks};

pub use deepburn_tune::{
    Assessment, Buffers, Calibration, Candidate, Measurement, Memory, Prediction, Results,
    ResultsError, Search, SearchLimits, SearchSpace, StatePlacement, Trial, page, policy_name,
    spearman, table,
};

/// The largest number of micro-batches of a measured step. Those between the first and the last are alike, so a step with
/// more of them is measured with this many, and its time is extrapolated.
const MICRO_BATCHES: usize = 4;

/// A model that is tuned: how it is built, and the loss of a made-up micro-batch.
///
/// Implement it for every backend `B`, so that the model can be run without data, too:
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use deepburn::BoxError;
/// use deepburn::ops::OptimizerOps;
/// use deepburn::prelude::*;
/// use deepburn::tune::Tunable;
///
/// struct Regression;
///
/// impl<B: OptimizerOps> Tunable<B> for Regression {
///     type Model = Linear<Training<B>>;
///
///     fn model(&self, device: &B::Device) -> Result<Self::Model, BoxError> {
///         Ok(LinearConfig::new(16, 1).init(device))
///     }
///
///     fn loss(
///         &self,
///         model: &Self::Model,
///         samples: usize,
///         device: &B::Device,
///     ) -> Result<Tensor<Training<B>, 1>, BoxError> {
///         let x = Tensor::<_, 2>::ones([samples, 16], device);
///         Ok(model.forward(x).powf_scalar(2.0).mean())
///     }
/// }
/// ```
pub trait Tunable<B: OptimizerOps>: Sync {
    /// The model.
    type Model: AutodiffModule<Training<B>>;

    /// Builds the model.
    ///
    /// # Errors
    ///
    /// Returns an error that ends the search.
    fn model(&self, device: &B::Device) -> Result<Self::Model, BoxError>;

    /// Computes the mean loss of a made-up micro-batch of this many samples.
    ///
    /// # Errors
    ///
    /// Returns an error that ends the measurement.
    fn loss(
        &self,
        model: &Self::Model,
        samples: usize,
        device: &B::Device,
    ) -> Result<Tensor<Training<B>, 1>, BoxError>;
}

/// The settings of [`tune`].
#[derive(Debug, Clone)]
pub struct TuneOptions {
    /// Numbers of rank threads to try.
    pub ranks: Vec<usize>,
    /// Whether tensors are in host memory, as on a CPU backend. There is then no offload to the host.
    pub device_is_host: bool,
    /// Bytes of memory for the tensors of all ranks together; `None` for no limit.
    pub memory: Option<u64>,
    /// Folder on a local disk for offloaded states; `None` without offload to NVMe.
    pub nvme: Option<PathBuf>,
    /// Ends the search early. The best candidate so far is returned.
    pub interrupt: Interrupt,
}

impl Default for TuneOptions {
    fn default() -> Self {
        Self {
            ranks: vec![1],
            device_is_host: true,
            memory: None,
            nvme: None,
            interrupt: Interrupt::default(),
        }
    }
}

/// The result of [`tune`].
#[derive(Debug)]
pub struct Tuned {
    /// The best configuration: the given one with the settings of the best candidate.
    pub config: Value,
    /// Its plan.
    pub plan: Plan,
    /// Number of ranks of the best candidate.
    pub ranks: usize,
    /// All candidates, with what is known of them.
    pub search: Search,
}

/// The reason why nothing was tuned.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// The configuration has invalid values.
    #[error(transparent)]
    Config(#[from] Report),
    /// The configuration is not valid JSON.
    #[error(transparent)]
    Unreadable(#[from] deepburn_config::ConfigError),
    /// The search space has no candidates.
    #[error("no configuration can be tried: {reason}")]
    Empty {
        /// The reason.
        reason: String,
    },
    /// No candidate fits.
    #[error("no configuration fits: {closest}")]
    TooLarge {
        /// The candidate that comes closest, and what it lacks.
        closest: String,
    },
    /// No measurement succeeded.
    #[error("no configuration could be measured: {reason}")]
    Failed {
        /// The reason of the first failure.
        reason: String,
    },
    /// The speed of the machine could not be measured.
    #[error("the speed of the machine cannot be measured: {0}")]
    Speed(BoxError),
    /// A disk cannot be used.
    #[error(transparent)]
    Disk(#[from] deepburn_zero::SwapError),
}

/// The speed of a rank and of its exchanges, if there are this many ranks.
pub type SpeedOf<'a> = Box<dyn Fn(usize) -> (RankSpeed, Network) + 'a>;

/// Forecasts training with a plan.
pub type ForecastOf<'a> = Box<dyn Fn(&Plan) -> Result<Forecast, ForecastError> + 'a>;

/// Returns the memory of a plan with this forecast, and what it lacks if it does not fit.
pub type FitOf<'a> = Box<dyn Fn(&Plan, &Forecast) -> (Memory, Option<Shortage>) + 'a>;

/// What a candidate lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    /// The tier, what the candidate needs there, and the limit.
    pub reason: String,
    /// Bytes that are missing.
    pub bytes: u64,
}

/// A search whose forecasts, limits and measurements are the caller's.
pub struct Tuner<'a> {
    /// The configuration, whose other settings all candidates have.
    pub config: Value,
    /// The run for which candidates are resolved. The number of ranks is the candidate's.
    pub context: RunContext,
    /// Folder for states on NVMe; `None` if no candidate needs it.
    pub nvme: Option<PathBuf>,
    /// The speed of the machine.
    pub speed: SpeedOf<'a>,
    /// Dry runs.
    pub forecast: ForecastOf<'a>,
    /// Memory limits.
    pub fit: FitOf<'a>,
}

/// Steps of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredSteps {
    /// Steps before the measured ones.
    pub warmup: usize,
    /// Measured steps.
    pub measured: usize,
}

/// What a search does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TuneEvent {
    /// A candidate is measured.
    Measuring {
        /// Its index.
        index: usize,
        /// Whether it was measured before.
        again: bool,
    },
    /// The candidate with this index was measured.
    Measured {
        /// Its index.
        index: usize,
    },
}

impl Tuner<'_> {
    /// Returns the configuration of a candidate.
    pub fn config(&self, candidate: &Candidate) -> Value {
        candidate.apply(&self.config, self.nvme.as_deref())
    }

    /// Resolves a candidate.
    ///
    /// # Errors
    ///
    /// Returns the errors of its configuration in one line.
    pub fn plan(&self, candidate: &Candidate) -> Result<Plan, String> {
        self.resolve(&self.config(candidate), candidate.ranks)
    }

    /// Resolves a configuration for `ranks` ranks.
    ///
    /// # Errors
    ///
    /// Returns the errors of the configuration in one line.
    pub fn resolve(&self, config: &Value, ranks: usize) -> Result<Plan, String> {
        let written = RawConfig::from_value(config).map_err(|error| error.to_string())?;
        let context = RunContext { world_size: ranks, ..self.context.clone() };
        let resolved = resolve(&written, &context).map_err(|report| {
            report.errors().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        })?;
        Ok(resolved.plan)
    }

    /// Forecasts the candidates of `space`.
    pub fn search(&self, space: &SearchSpace, limits: SearchLimits) -> Search {
        Search::new(space.candidates(), limits, |candidate| self.assess(candidate))
    }

    /// Forecasts a candidate.
    fn assess(&self, candidate: &Candidate) -> Assessment {
        let forecast = self.plan(candidate).and_then(|plan| {
            let forecast = (self.forecast)(&plan).map_err(|error| error.to_string())?;
            Ok((plan, forecast))
        });
        let (plan, forecast) = match forecast {
            Ok(forecast) => forecast,
            Err(reason) => return Assessment::Invalid { reason },
        };
        let (memory, shortage) = (self.fit)(&plan, &forecast);
        if let Some(Shortage { reason, bytes }) = shortage {
            return Assessment::TooLarge { memory, reason, shortfall: bytes };
        }
        match self.prediction(candidate.ranks, &forecast) {
            Ok(prediction) => Assessment::Fits { memory, prediction, operations: forecast.flops() },
            Err(reason) => Assessment::Invalid { reason },
        }
    }

    /// Returns the predicted step.
    ///
    /// # Errors
    ///
    /// Returns an error if the speed of an offload is not known.
    fn prediction(&self, ranks: usize, forecast: &Forecast) -> Result<Prediction, String> {
        let (speed, network) = (self.speed)(ranks);
        let cost = forecast.cost(speed, &network).map_err(|error| error.to_string())?;
        Ok(Prediction {
            compute: cost.compute,
            exchange: (cost.communication - cost.hidden).max(0.0),
            offload: cost.offload,
        })
    }

    /// Measures candidates until the search ends or `interrupt` is triggered. `measure` measures the steps of a plan, and
    /// `observe` is called before and after each measurement.
    pub fn run(
        &self,
        search: &mut Search,
        interrupt: &Interrupt,
        mut measure: impl FnMut(&Plan) -> Result<Measurement, String>,
        mut observe: impl FnMut(&Search, TuneEvent),
    ) {
        let mut tried = |search: &mut Search, index: usize, again: bool| {
            observe(search, TuneEvent::Measuring { index, again });
            let measured = self.measure(&search.trials()[index].candidate, &mut measure);
            search.record(index, measured);
            observe(search, TuneEvent::Measured { index });
        };
        while let Some(next) = search.next().filter(|_| !interrupt.is_asked()) {
            tried(search, next, false);
        }
        // In turns, so that a machine that becomes slower does so for all of them.
        const TURNS: usize = 3;
        for _ in 0..TURNS {
            for rival in search.rivals() {
                if interrupt.is_asked() {
                    return;
                }
                tried(search, rival, true);
            }
        }
    }

    /// Measures a candidate. A step with many micro-batches is measured with a few.
    fn measure(
        &self,
        candidate: &Candidate,
        measure: &mut impl FnMut(&Plan) -> Result<Measurement, String>,
    ) -> Result<Measurement, String> {
        let plan = self.plan(candidate)?;
        let micro_batches = plan.batch.gradient_accumulation_steps;
        if micro_batches <= MICRO_BATCHES {
            return measure(&plan);
        }
        let seconds = |plan: &Plan| {
            let forecast = (self.forecast)(plan).map_err(|error| error.to_string())?;
            Ok::<_, String>(self.prediction(candidate.ranks, &forecast)?.seconds())
        };
        let batch = plan.batch.resized(MICRO_BATCHES, candidate.ranks);
        let short = Plan { batch, ..plan.clone() };
        let factor = seconds(&plan)? / seconds(&short)?;
        let mut measured = measure(&short)?;
        measured.seconds.iter_mut().for_each(|seconds| *seconds *= factor);
        Ok(measured)
    }
}

/// Measures the steps of `plan` on its number of ranks, with the real engine.
///
/// `devices` has a device for each rank of this process, in rank order; if there are fewer, ranks share them. The memory is
/// rank 0's after the warm-up, and the resident set this process's.
///
/// # Errors
///
/// Returns the failure of a rank.
pub fn measure_steps<B: OptimizerOps, T: Tunable<B>>(
    model: &T,
    plan: &Plan,
    ranks: &Ranks,
    devices: &[B::Device],
    steps: MeasuredSteps,
) -> Result<Measurement, String> {
    reset_resident_peak();
    let results = ranks.run(plan.batch.world_size, COLLECTIVE_TIMEOUT, |group: Group<B>| {
        let device = devices[group.rank() % devices.len().max(1)].clone();
        let module = model.model(&device)?;
        let mut engine = initialize(module, plan, group)?;
        let mut seconds = Vec::with_capacity(steps.measured);
        for step in 0..steps.warmup + steps.measured {
            // The first step records the order of reads; later ones have other peaks.
            engine.ledger().reset_peaks();
            let started = Instant::now();
            train_step(&mut engine, model, plan, &device)?;
            if step >= steps.warmup {
                seconds.push(started.elapsed());
            }
        }
        Ok((seconds, MemoryPeaks::of(engine.ledger())))
    });
    let results = results.map_err(|failure| failure.to_string())?;
    // A step ends when its slowest rank has ended it.
    let slowest = |step: usize| results.iter().map(|(seconds, _)| seconds[step]).max();
    let seconds = (0..steps.measured).filter_map(slowest).map(|it: Duration| it.as_secs_f64());
    let peaks = results.first().map(|(_, peaks)| *peaks).unwrap_or_default();
    let memory = Memory { resident: resident_peak(), ..memory_of(&peaks) };
    Ok(Measurement { seconds: seconds.collect(), memory })
}

/// Takes one optimizer step on made-up micro-batches, and waits for the device.
fn train_step<B: OptimizerOps, T: Tunable<B>>(
    engine: &mut Engine<B, T::Model>,
    model: &T,
    plan: &Plan,
    device: &B::Device,
) -> Result<(), BoxError> {
    let samples = plan.batch.micro_batch_size;
    for _ in 0..plan.batch.gradient_accumulation_steps {
        let loss = engine.forward(|module| model.loss(module, samples, device))??;
        engine.backward(loss)?;
        engine.step()?;
    }
    B::sync(device).map_err(|error| format!("the device failed: {error:?}"))?;
    Ok(())
}

/// Returns the peaks of a rank on each tier.
pub fn memory_of(peaks: &MemoryPeaks) -> Memory {
    let MemoryPeaks { device, host, disk } = peaks;
    Memory { device: device.total, host: host.total, disk: disk.total, resident: None }
}

/// Starts a new measurement of the largest resident set of this process. Without Linux's `/proc` nothing happens.
fn reset_resident_peak() {
    // Without the permission, it is the peak since the start of the process.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Returns the largest resident set of this process since the last reset, in bytes; `None` without Linux's `/proc`.
fn resident_peak() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

/// Returns the search space of a configuration whose plan is `plan`: all stages and policies, offload to host memory if the
/// device is not the host, and offload to NVMe if there is a folder.
///
/// An optimizer that exchanges its momentum needs all states on every rank, so it has neither other stages nor offload.
pub fn search_space(
    plan: &Plan,
    context: &RunContext,
    ranks: Vec<usize>,
    has_nvme: bool,
) -> SearchSpace {
    let batch_sizes = vec![plan.batch.train_batch_size];
    if plan.optimizer.exchanges_momentum() {
        let stages = vec![Stage::Disabled];
        return SearchSpace { ranks, batch_sizes, stages, ..SearchSpace::default() };
    }
    let states = StatePlacement::ALL.into_iter().filter(|states| match states {
        StatePlacement::Device => true,
        StatePlacement::OptimizerOnHost | StatePlacement::AllOnHost => !context.host_device,
        StatePlacement::OptimizerOnNvme | StatePlacement::AllOnNvme => has_nvme,
    });
    let mut recompute = SearchSpace::default().recompute;
    if let policy @ RecomputePolicy::EveryNth(_) = plan.activations.recompute
        && !recompute.contains(&policy)
    {
        recompute.push(policy);
    }
    SearchSpace {
        ranks,
        batch_sizes,
        states: states.collect(),
        recompute,
        buffers: vec![Buffers::AsConfigured, Buffers::Small],
        ..SearchSpace::default()
    }
}

/// Finds the fastest configuration of a model that fits, on rank threads of this process.
///
/// `config` is a DeepSpeed configuration in JSON. Its section `autotuning` limits the search. The number of samples of a
/// step is kept unless the section asks otherwise. A search measures at most six configurations, which takes seconds for a
/// small model.
///
/// # Errors
///
/// Returns an error if the configuration is not valid, if nothing fits, or if no measurement succeeds.
///
/// # Example
///
/// The model of [`Tunable`]'s example, with at most 1 GB for all ranks:
///
/// ```
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Tensor;
/// # use deepburn::{BoxError, ops::OptimizerOps, prelude::*, tune::Tunable};
/// # struct Regression;
/// # impl<B: OptimizerOps> Tunable<B> for Regression {
/// #     type Model = Linear<Training<B>>;
/// #     fn model(&self, device: &B::Device) -> Result<Self::Model, BoxError> {
/// #         Ok(LinearConfig::new(16, 1).init(device))
/// #     }
/// #     fn loss(&self, model: &Self::Model, samples: usize, device: &B::Device) -> Result<Tensor<Training<B>, 1>, BoxError> {
/// #         let x = Tensor::<_, 2>::ones([samples, 16], device);
/// #         Ok(model.forward(x).powf_scalar(2.0).mean())
/// #     }
/// # }
/// use burn_flex::{Flex, FlexDevice};
/// use deepburn::tune::{TuneOptions, tune};
///
/// let options = TuneOptions { ranks: vec![1, 2], memory: Some(1 << 30), ..TuneOptions::default() };
/// let tuned = tune::<Flex, _>(&Regression, r#"{"train_batch_size": 8}"#, &[FlexDevice], &options)?;
/// assert_eq!(tuned.config["train_batch_size"], 8);
/// println!("{} ranks, stage {:?}", tuned.ranks, tuned.plan.zero.stage);
/// # Ok::<(), deepburn::tune::TuneError>(())
/// ```
pub fn tune<B, T>(
    model: &T,
    config: &str,
    devices: &[B::Device],
    options: &TuneOptions,
) -> Result<Tuned, TuneError>
where
    B: OptimizerOps,
    T: Tunable<Meta> + Tunable<B>,
{
    let (written, autotuning) = split(&RawConfig::from_json(config)?)?;
    let most_ranks = options.ranks.iter().copied().max().unwrap_or(1);
    let context =
        RunContext { host_device: options.device_is_host, ..RunContext::on_host(most_ranks) };
    let plan = resolve(&written, &context)?.plan;
    let mut space = search_space(&plan, &context, options.ranks.clone(), options.nvme.is_some());
    narrow(&mut space, &autotuning, plan.batch.train_batch_size)?;
    let device = devices.first().cloned().unwrap_or_default();
    let speed = measured_speed::<B>(&device, &plan, options)?;
    let tuner = Tuner {
        config: written.to_json(),
        context,
        nvme: options.nvme.clone(),
        speed: Box::new(speed),
        forecast: Box::new(|plan| forecast_of(model, plan)),
        fit: Box::new(|plan, forecast| fit(plan, forecast, options.memory)),
    };
    let limits = SearchLimits {
        measurements: autotuning.trials,
        patience: autotuning.patience,
        metric: autotuning.metric,
        exhaustive: false,
    };
    let mut search = tuner.search(&space, limits);
    let steps =
        MeasuredSteps { warmup: autotuning.warmup_steps, measured: autotuning.measured_steps };
    let ranks = Ranks::threads();
    let devices = if devices.is_empty() { std::slice::from_ref(&device) } else { devices };
    let measure = |plan: &Plan| measure_steps::<B, T>(model, plan, &ranks, devices, steps);
    tuner.run(&mut search, &options.interrupt, measure, |_, _| {});
    let best = search.best().ok_or_else(|| failure(&search))?;
    let candidate = search.trials()[best].candidate;
    let plan = tuner.plan(&candidate).map_err(|reason| TuneError::Failed { reason })?;
    Ok(Tuned { config: tuner.config(&candidate), plan, ranks: candidate.ranks, search })
}

/// Separates the section `autotuning` from a configuration: returns the configuration of a training run, and what the
/// section asks for. Notes about the section are logged.
///
/// # Errors
///
/// Returns the errors of the section.
pub fn split(config: &RawConfig) -> Result<(RawConfig, AutotuningPlan), TuneError> {
    let (plan, notes) = autotuning(config)?;
    for note in notes {
        tracing::info!("{}", note.finding());
    }
    let mut rest = config.to_json();
    if let Some(keys) = rest.as_object_mut() {
        keys.remove("autotuning");
    }
    Ok((RawConfig::from_value(&rest)?, plan))
}

/// Restricts a search space to what the section `autotuning` asks for. `batch_size` is the one of the configuration, of
/// which others are multiples and halves.
///
/// # Errors
///
/// Returns an error if no candidate is left.
pub fn narrow(
    space: &mut SearchSpace,
    autotuning: &AutotuningPlan,
    batch_size: usize,
) -> Result<(), TuneError> {
    if autotuning.fast {
        space.states.retain(|states| *states == StatePlacement::Device);
        space.recompute.retain(|policy| *policy == RecomputePolicy::Off);
        space.buffers.retain(|buffers| *buffers == Buffers::AsConfigured);
    }
    if let Some(limits) = autotuning.batch_sizes {
        space.batch_sizes = batch_sizes(batch_size, limits);
    }
    space.micro_batch_sizes = autotuning.micro_batch_sizes;
    if let Some(most) = autotuning.num_micro_batch_sizes {
        let mut sizes: Vec<_> = space.candidates().iter().map(|it| it.micro_batch).collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        sizes.dedup();
        space.micro_batch_sizes.min = sizes.get(most - 1).copied().or(space.micro_batch_sizes.min);
    }
    match space.candidates().is_empty() {
        true => Err(TuneError::Empty { reason: nothing_left(space, autotuning, batch_size) }),
        false => Ok(()),
    }
}

/// Returns the batch sizes within `limits`: halves and doubles of `batch_size`. Without an upper limit there are no larger
/// ones.
fn batch_sizes(batch_size: usize, limits: SizeLimits) -> Vec<usize> {
    let most = limits.max.unwrap_or(batch_size);
    let half = |size: &usize| size.is_multiple_of(2).then_some(size / 2);
    let smaller = std::iter::successors(Some(batch_size), half);
    let larger = std::iter::successors(batch_size.checked_mul(2), |size| size.checked_mul(2));
    let larger = larger.take_while(|size| *size <= most);
    smaller.chain(larger).filter(|size| limits.contains(*size)).collect()
}

/// Returns why a search space has no candidates.
fn nothing_left(space: &SearchSpace, autotuning: &AutotuningPlan, batch_size: usize) -> String {
    let limits = |limits: SizeLimits| {
        let side = |value: Option<usize>| value.map_or("no limit".to_owned(), |it| it.to_string());
        format!("{} to {}", side(limits.min), side(limits.max))
    };
    if space.batch_sizes.is_empty() {
        let given = autotuning.batch_sizes.map(limits).unwrap_or_default();
        return format!(
            "autotuning: no half or double of train_batch_size, {batch_size}, is within min_train_batch_size and \
             max_train_batch_size, {given}; widen them"
        );
    }
    let divides = |ranks: &usize| space.batch_sizes.iter().any(|size| size.is_multiple_of(*ranks));
    if !space.ranks.iter().any(divides) {
        let list = |numbers: &[usize]| -> String {
            numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
        };
        return format!(
            "train_batch_size: {} is not a multiple of {} ranks; give another number",
            list(&space.batch_sizes),
            list(&space.ranks)
        );
    }
    format!(
        "autotuning: no micro-batch that divides the batch is within min_train_micro_batch_size_per_gpu and \
         max_train_micro_batch_size_per_gpu, {}; widen them",
        limits(space.micro_batch_sizes)
    )
}

/// Forecasts `model` with the micro-batches of `plan`.
///
/// # Errors
///
/// Returns an error if the plan does not fit the model.
pub fn forecast_of<T: Tunable<Meta>>(model: &T, plan: &Plan) -> Result<Forecast, ForecastError> {
    let (device, samples) = (deepburn_forecast::MetaDevice, plan.batch.micro_batch_size);
    forecast(plan, |device| model.model(device), |module| model.loss(module, samples, &device))
}

/// Measures the speed of the machine that rank threads share, and returns the speed of a rank by their number.
///
/// # Errors
///
/// Returns an error if threads cannot be started, or if the disk cannot be used.
fn measured_speed<B: OptimizerOps>(
    device: &B::Device,
    plan: &Plan,
    options: &TuneOptions,
) -> Result<impl Fn(usize) -> (RankSpeed, Network) + use<B>, TuneError> {
    // Sizes of a small layer: the calibration corrects what they get wrong.
    const WIDTH: u64 = 512;
    let rows = plan.batch.train_batch_size as u64 * 64;
    let dtype = compute_type(plan);
    let mut speed = machine_speed::<B>(device, MeasuredSizes { rows, width: WIDTH, dtype });
    if let Some(folder) = &options.nvme {
        speed.disk_bandwidth = Some(deepburn_zero::disk_bandwidth(folder)?);
    }
    speed.host_bandwidth = Some(speed.memory_bandwidth);
    let most = options.ranks.iter().copied().max().unwrap_or(1);
    let latency =
        thread_latency(most).map_err(|failure| TuneError::Speed(failure.to_string().into()))?;
    Ok(move |ranks| shared_by_threads(speed, latency, ranks))
}

/// Returns the speed of one of `ranks` rank threads that share a machine of this `speed`, and their network.
pub fn shared_by_threads(speed: RankSpeed, latency: f64, ranks: usize) -> (RankSpeed, Network) {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    (speed.shared_by(ranks as u64, cores), Network::Threads { latency })
}

/// Returns the type of a plan's matrix products.
pub fn compute_type(plan: &Plan) -> DType {
    match plan.precision.autocast.unwrap_or(plan.precision.compute) {
        Precision::Fp32 => DType::F32,
        Precision::Fp16 => DType::F16,
        Precision::Bf16 => DType::BF16,
    }
}

/// Compares the tensors of all ranks with a limit.
fn fit(plan: &Plan, forecast: &Forecast, limit: Option<u64>) -> (Memory, Option<Shortage>) {
    let memory = memory_of(&forecast.step);
    let needed = (memory.device + memory.host).saturating_mul(plan.batch.world_size as u64);
    let shortage = limit.filter(|limit| needed > *limit).map(|limit| Shortage {
        reason: format!("the tensors of all ranks need {needed} bytes, and the limit is {limit}"),
        bytes: needed - limit,
    });
    (memory, shortage)
}

/// Returns why a search has no best candidate.
pub fn failure(search: &Search) -> TuneError {
    let failed = search.trials().iter().find_map(|trial| match &trial.measured {
        Some(Err(reason)) => Some(reason.clone()),
        _ => None,
    });
    if let Some(reason) = failed {
        return TuneError::Failed { reason };
    }
    let large = search.trials().iter().filter_map(|trial| match &trial.assessment {
        Assessment::TooLarge { reason, shortfall, .. } => Some((*shortfall, trial, reason)),
        _ => None,
    });
    if let Some((_, trial, reason)) = large.min_by_key(|(shortfall, ..)| *shortfall) {
        let name = trial.candidate.name();
        return TuneError::TooLarge { closest: format!("{name} comes closest: {reason}") };
    }
    let invalid = search.trials().iter().find_map(|trial| match &trial.assessment {
        Assessment::Invalid { reason } => Some(reason.clone()),
        _ => None,
    });
    match invalid {
        Some(reason) => TuneError::Empty { reason },
        None => TuneError::Failed { reason: "the search was interrupted".to_owned() },
    }
}
