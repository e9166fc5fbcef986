//! The search for the fastest configuration of a model that fits.
//!
//! Main function: [`tune()`]. Programs with memory limits, outputs or measurements of their own use
//! [`Tuner`], whose parts are the phases of the search:
//!
//! ```text
//! Tuner::search    a dry run of each candidate: memory, and the time of a step by the cost model
//! Tuner::run       measures the most promising candidates, and again in turns those that are as good as the best
//! ```
//!
//! A candidate is measured with the real engine on made-up micro-batches. All measurements of a
//! search run in this process, one after the other, so no candidate needs memory while another one
//! is measured.

mod measure;
mod space;
mod tuner;

use std::path::PathBuf;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use deepburn_config::{ConfigReport, Plan, RawConfig, RunContext, resolve};
use deepburn_forecast::cost::{Network, RankSpeed};
use deepburn_forecast::{
    Forecast, ForecastError, MemoryPeaks, Meta, MetaDevice, forecast_stages, pipeline_layout,
};
use deepburn_learner::{BoxError, Interrupt};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{PipelineLayout, Training};
use serde_json::Value;

use crate::Ranks;
use crate::machine::{
    MeasuredSizes, dtype_of, machine_speed, shared_by_threads, shared_cores, thread_latency,
};

pub use deepburn_tune::{
    Assessment, Buffers, Calibration, CandidateConfig, Measurement, PredictedStep, Search,
    SearchLimits, SearchSpace, StatePlacement, StepMemory, Trial, TuningFiles, TuningFilesError,
    page, policy_name, spearman, table,
};
pub use measure::{MeasuredSteps, measure_steps, memory_of};
pub use space::{narrow, search_space, split};
pub use tuner::{FitOf, ForecastOf, MemoryShortage, SpeedOf, TuneEvent, Tuner};

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
    /// Returns an error that ends the search.
    fn model(&self, device: &B::Device) -> Result<Self::Model, BoxError>;

    /// Computes the mean loss of a made-up micro-batch of this many samples.
    ///
    /// # Errors
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
    /// Numbers of rank threads to try, of all pipeline stages together.
    pub ranks: Vec<usize>,
    /// Numbers of pipeline stages to try; empty for the configuration's own (`pipeline.stages`). A
    /// model that cannot be divided into so many stages, or that a pipeline does not support, has
    /// no such candidates.
    pub pipeline_stages: Vec<usize>,
    /// Whether tensors are in host memory, as on a CPU backend. There is then no offload to the
    /// host.
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
            pipeline_stages: Vec::new(),
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
    Config(#[from] ConfigReport),
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

/// Finds the fastest configuration of a model that fits, on rank threads of this process.
///
/// `config` is a DeepSpeed configuration in JSON. Its section `autotuning` limits the search. The
/// number of samples of a step is kept unless the section asks otherwise. A search measures at most
/// six configurations, which takes seconds for a small model.
///
/// # Errors
/// Returns an error if the configuration is not valid, if nothing fits, or if no measurement
/// succeeds.
///
/// # Example
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
    if !options.pipeline_stages.is_empty() {
        space.pipeline_stages.clone_from(&options.pipeline_stages);
    }
    narrow(&mut space, &autotuning, plan.batch.train_batch_size)?;
    let device = devices.first().cloned().unwrap_or_default();
    let speed = measured_speed::<B>(&device, &plan, options)?;
    let tuner = Tuner {
        config: written.to_json(),
        context,
        nvme: options.nvme.clone(),
        speed: Box::new(speed),
        cores: options.device_is_host.then(shared_cores),
        forecast: Box::new(|plan| forecast_of(model, plan)),
        fit: Box::new(|plan, stages| fit(plan, stages, options.memory)),
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
    let measure = |plan: &Plan| {
        let layout = layout_of(model, plan).map_err(|error| error.to_string())?;
        measure_steps::<B, T>(model, plan, layout.as_ref(), &ranks, devices, steps)
    };
    tuner.run(&mut search, &options.interrupt, measure, |_, _| {});
    let best = search.best().ok_or_else(|| failure(&search))?;
    let candidate = search.trials()[best].candidate;
    let plan = tuner.plan(&candidate).map_err(|reason| TuneError::Failed { reason })?;
    Ok(Tuned { config: tuner.config(&candidate), plan, ranks: candidate.ranks, search })
}

/// Forecasts `model` with the micro-batches of `plan`, on a rank of each pipeline stage.
///
/// # Errors
/// Returns an error if the plan does not fit the model.
pub fn forecast_of<T: Tunable<Meta>>(
    model: &T,
    plan: &Plan,
) -> Result<Vec<Forecast>, ForecastError> {
    let samples = plan.batch.micro_batch_size;
    let loss = |module: &T::Model| model.loss(module, samples, &MetaDevice);
    forecast_stages(plan, |device| model.model(device), loss)
}

/// Divides `model` into the pipeline stages of `plan`; `None` without a pipeline.
///
/// # Errors
/// Returns an error if the model has fewer parts than stages.
pub fn layout_of<T: Tunable<Meta>>(
    model: &T,
    plan: &Plan,
) -> Result<Option<PipelineLayout>, ForecastError> {
    if plan.pipeline.is_none() {
        return Ok(None);
    }
    let samples = plan.batch.micro_batch_size;
    let loss = |module: &T::Model| model.loss(module, samples, &MetaDevice);
    pipeline_layout(plan, |device| model.model(device), loss, None).map(Some)
}

/// Measures the speed of the machine that rank threads share, and returns the speed of a rank by
/// their number.
///
/// # Errors
/// Returns an error if threads cannot be started, or if the disk cannot be used.
fn measured_speed<B: OptimizerOps>(
    device: &B::Device,
    plan: &Plan,
    options: &TuneOptions,
) -> Result<impl Fn(usize) -> (RankSpeed, Network) + use<B>, TuneError> {
    // Sizes of a small layer: the calibration corrects what they get wrong.
    const ROWS_OF_SAMPLE: u64 = 64;
    const WIDTH: u64 = 512;
    let sizes = MeasuredSizes {
        rows: plan.batch.train_batch_size as u64 * ROWS_OF_SAMPLE,
        fewest_rows: ROWS_OF_SAMPLE,
        width: WIDTH,
        dtype: dtype_of(plan.precision.of_products()),
    };
    let mut speed = machine_speed::<B>(device, sizes);
    if let Some(folder) = &options.nvme {
        speed.disk_bandwidth = Some(deepburn_zero::disk_bandwidth(folder)?);
    }
    // The link between device and host is not measured. Copies are at most as fast as the memory.
    speed.host_bandwidth = Some(speed.memory_bandwidth);
    let most = options.ranks.iter().copied().max().unwrap_or(1);
    let latency =
        thread_latency(most).map_err(|failure| TuneError::Speed(failure.to_string().into()))?;
    Ok(move |ranks| shared_by_threads(speed, latency, ranks))
}

/// Compares the tensors of all ranks with a limit.
fn fit(
    plan: &Plan,
    stages: &[Forecast],
    limit: Option<u64>,
) -> (StepMemory, Option<MemoryShortage>) {
    let memory = memory_of(&largest_stage(stages));
    // All ranks are threads of this process and share its memory.
    let of_ranks = stages.iter().map(|stage| stage.step.device.total + stage.step.host.total);
    let needed = of_ranks.sum::<u64>().saturating_mul(plan.mesh.data_parallel_size() as u64);
    let shortage = limit.filter(|limit| needed > *limit).map(|limit| MemoryShortage {
        reason: format!("the tensors of all ranks need {needed} bytes, and the limit is {limit}"),
        bytes: needed - limit,
    });
    (memory, shortage)
}

/// Returns the peaks of a rank of the pipeline stage that needs the most device memory.
pub fn largest_stage(stages: &[Forecast]) -> MemoryPeaks {
    let peaks = stages.iter().map(|stage| stage.step);
    peaks.max_by_key(|peaks| peaks.device.total).unwrap_or_default()
}

/// Returns why a search has no best candidate.
pub fn failure(search: &Search) -> TuneError {
    // The reasons come in the order of how far a candidate got: measured, forecast, resolved.
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
