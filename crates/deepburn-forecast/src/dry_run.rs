//! Training steps without data.
//!
//! ```text
//!  Engine                 the real passes and steps
//!    Training<Meta>       the model's ops, autodiff, gathers, reductions: shapes instead of values
//!    SimulatedGroup       one rank of any world: collectives return at once and are counted
//!    Ledger               the bytes that a real run would hold, by tier and category
//! ```
//!
//! The first step records the order in which parameters are read, and later steps prefetch by it. A
//! dry run therefore takes two steps, and reports the second one. All micro-batches of a step
//! between the first and the last are alike, so at most one of them is run.
//!
//! A dry run has the collectives of the engine. Programs have training loops of their own, so the
//! collectives of a loop are not included: [`deepburn_learner::train`] sums a few numbers over the
//! ranks twice per step.
//!
//! There is no second description of a model, and no second implementation of gathering, buckets,
//! recomputation, offload or updates. Offloaded arrays enter the ledger and have no bytes
//! (`Store::Counted` of `deepburn-zero`). Fused ops return tensors of the shapes and types of the
//! flex kernels (`deepburn-ops/src/meta`). Code that computes on the host asks `is_without_data`
//! and does nothing: random numbers, updates of offloaded states, sums of squares. A new op family
//! has to be implemented for [`Meta`], and new work on the host has to be skipped there.
//!
//! Tests in `tests/dry_run` compare a dry run with a real one: every category of every tier to the
//! byte, every collective, and the operations of every module.

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use deepburn_comm::{SimulatedGroup, Statistics};
use deepburn_config::Plan;
use deepburn_learner::{BoxError, Cause, Engine, MicroBatches, initialize, initialize_pipeline};
use deepburn_meta::{Meta, MetaDevice, observe_work};
use deepburn_zero::{Group, ModuleOperations, Training};

use crate::cost::{
    Network, PipelineCost, PipelineCostError, RankSpeed, SharedCores, StepCost, UnknownBandwidth,
};
use crate::layout::pipeline_layout;
use crate::memory::MemoryPeaks;
use crate::simulated_rank::{ForecastError, on_simulated_rank};
use crate::timeline::{MessageNumbers, Recorder, Stretch, Timeline};

/// Optimizer steps of a dry run.
const STEPS: usize = 2;

/// The largest number of micro-batches that a step of a dry run has: the first, one of those
/// between, and the last.
const MICRO_BATCHES: usize = 3;

/// What one rank needs to train.
#[derive(Debug, Clone)]
pub struct Forecast {
    /// The blocks of the rank's pipeline stage and their share of the operations, as text; `None`
    /// without a pipeline.
    pub part: Option<String>,
    /// The peaks while the model is sharded, before the first step.
    pub start: MemoryPeaks,
    /// The peaks of a training step.
    pub step: MemoryPeaks,
    /// The engine's collectives of a training step. A training loop may add others.
    pub collectives: Statistics,
    /// The floating-point operations of a training step, by module.
    pub operations: Vec<ModuleOperations>,
    /// The ops, transfers, collectives and messages of a training step.
    timeline: Timeline,
    /// The number of ranks.
    world_size: usize,
}

impl Forecast {
    /// Returns the floating-point operations of a training step on one rank.
    pub fn flops(&self) -> u64 {
        self.operations.iter().map(|module| module.forward + module.backward).sum()
    }

    /// Predicts the time of a training step on ranks of this `speed`.
    ///
    /// # Errors
    /// Returns an error if the step offloads to a tier whose bandwidth is not known.
    pub fn cost(&self, speed: RankSpeed, network: &Network) -> Result<StepCost, UnknownBandwidth> {
        self.timeline.cost(self.world_size as u64, speed, network)
    }

    /// Predicts the time of a training step of a pipeline with these `stages`, as
    /// [`forecast_stages`] returns them. With one stage, this is its [`cost`](Self::cost).
    ///
    /// `speed` is the speed of a rank while all ranks compute, and `cores` are the cores that all
    /// ranks share as threads of one process; `None` if each rank has hardware of its own.
    ///
    /// # Errors
    /// Returns an error if a stage offloads to a tier whose bandwidth is not known, or if the
    /// stages are of different plans.
    pub fn pipeline_cost(
        stages: &[Self],
        speed: RankSpeed,
        network: &Network,
        cores: Option<SharedCores>,
    ) -> Result<PipelineCost, PipelineCostError> {
        let timelines: Vec<_> = stages.iter().map(|stage| &stage.timeline).collect();
        let ranks = stages.first().map_or(0, |stage| stage.world_size as u64);
        PipelineCost::of_timelines(&timelines, ranks, speed, network, cores)
    }
}

/// Forecasts the memory, the collectives and the operations of a training step on rank 0, without
/// running it. The plan determines the number of ranks. In a pipeline, this is the forecast of the
/// stage that needs the most memory ([`forecast_stages`]).
///
/// `build` creates the model, and `loss` computes the loss of one micro-batch of the size that is
/// to be forecast. Tensors have no values, so both should depend on shapes only: reading a tensor
/// returns zeros.
///
/// # Errors
/// Returns an error if the plan does not fit the model, the error of `build` or `loss`, or their
/// panic.
///
/// # Example
/// How much memory does a layer of 4096 by 4096 weights need on each of 64 ranks?
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::Tensor;
/// # use deepburn_config::{RawConfig, RunContext, resolve};
/// # use deepburn_forecast::forecast;
/// # let json = r#"{"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW"},
/// #     "zero_optimization": {"stage": 3}}"#;
/// # let plan = resolve(&RawConfig::from_json(json)?, &RunContext::on_host(64))?.plan;
/// let forecast = forecast(
///     &plan,
///     |device| Ok(LinearConfig::new(4096, 4096).with_bias(false).init(device)),
///     |layer| {
///         let x = Tensor::<_, 2>::zeros([8, 4096], &layer.weight.device());
///         Ok(layer.forward(x).powf_scalar(2.0).mean())
///     },
/// )?;
/// // 16 bytes for each parameter of the shard: weight, gradient and two moments in f32.
/// assert_eq!(forecast.step.device.model_states(), 16 * 4096 * 4096 / 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn forecast<M: AutodiffModule<Training<Meta>>>(
    plan: &Plan,
    build: impl Fn(&MetaDevice) -> Result<M, BoxError> + Send + Sync,
    loss: impl Fn(&M) -> Result<Tensor<Training<Meta>, 1>, BoxError> + Send + Sync,
) -> Result<Forecast, ForecastError> {
    if plan.pipeline.is_some() {
        let stages = forecast_stages(plan, build, loss)?;
        let largest = stages.into_iter().max_by_key(|stage| stage.step.device.total);
        return largest.ok_or_else(|| ForecastError::Model("a pipeline without stages".to_owned()));
    }
    let times = plan.batch.gradient_accumulation_steps;
    // The engine runs the shortened step, and `run` reports it as one of `times` micro-batches.
    let short = shortened(plan);
    let world_size = plan.mesh.world_size();
    on_recorded_rank(0, world_size, Recorder::default(), move |group, recorder| {
        let model = build(&MetaDevice).map_err(ForecastError::Loss)?;
        let engine = initialize(model, &short, Group::new(group.clone()))?;
        let steps = Steps { engine, group, recorder, loss: &loss };
        steps.forecast(None, |steps, report| steps.run(times, report))
    })
}

/// Forecasts a training step on the first rank of each pipeline stage, without running it. Without
/// a pipeline there is one stage, and this is [`forecast`].
///
/// The stages of the model are found as [`pipeline_layout`](crate::pipeline_layout) does. Stages
/// wait for each other in a real run: [`Forecast::pipeline_cost`] predicts the time of their step,
/// while the [cost](Forecast::cost) of one stage has no time in which it waits for others.
///
/// # Errors
/// Returns the errors of [`forecast`], and an error if the model cannot be divided.
pub fn forecast_stages<M: AutodiffModule<Training<Meta>>>(
    plan: &Plan,
    build: impl Fn(&MetaDevice) -> Result<M, BoxError> + Send + Sync,
    loss: impl Fn(&M) -> Result<Tensor<Training<Meta>, 1>, BoxError> + Send + Sync,
) -> Result<Vec<Forecast>, ForecastError> {
    if plan.pipeline.is_none() {
        return Ok(vec![forecast(plan, build, loss)?]);
    }
    let layout = pipeline_layout(plan, &build, &loss, None)?;
    let (world_size, ranks) = (plan.mesh.world_size(), plan.mesh.data_parallel_size());
    let messages = MessageNumbers::default();
    let forecast_stage = |stage| {
        let recorder = Recorder::new(messages.clone());
        on_recorded_rank(stage * ranks, world_size, recorder, |group, recorder| {
            let model = build(&MetaDevice).map_err(ForecastError::Loss)?;
            let member = Group::new(group.clone());
            let engine = initialize_pipeline(model, plan, layout.clone(), member)?;
            let steps = Steps { engine, group, recorder, loss: &loss };
            steps.forecast(layout.descriptions().get(stage).cloned(), Steps::run_schedule)
        })
    };
    (0..layout.stages()).map(forecast_stage).collect()
}

/// Returns the plan with at most [`MICRO_BATCHES`] micro-batches a step.
fn shortened(plan: &Plan) -> Plan {
    let micro_batches = plan.batch.gradient_accumulation_steps.min(MICRO_BATCHES);
    Plan { batch: plan.batch.resized(micro_batches), ..plan.clone() }
}

/// Calls `run` as [`on_simulated_rank`] does, with `recorder`, which records its ops, collectives
/// and messages.
fn on_recorded_rank<R: Send>(
    rank: usize,
    world_size: usize,
    recorder: Recorder,
    run: impl FnOnce(SimulatedGroup, Recorder) -> Result<R, ForecastError> + Send,
) -> Result<R, ForecastError> {
    // Both the group and the backend report to the recorder, on the thread of the rank, so its
    // events are in order.
    on_simulated_rank(rank, world_size, move |group| {
        let observer = recorder.clone();
        let group = group.observed(move |event| observer.group(event));
        let observer = recorder.clone();
        observe_work(move |work| observer.compute(work), || run(group, recorder))
    })
}

/// The steps of a dry run.
struct Steps<'a, M: AutodiffModule<Training<Meta>>, F> {
    engine: Engine<Meta, M>,
    group: SimulatedGroup,
    recorder: Recorder,
    /// Computes the loss of a micro-batch.
    loss: &'a F,
}

/// What a step took.
#[derive(Default)]
struct StepReport {
    collectives: Statistics,
    operations: Vec<ModuleOperations>,
    timeline: Timeline,
}

impl<M, F> Steps<'_, M, F>
where
    M: AutodiffModule<Training<Meta>>,
    F: Fn(&M) -> Result<Tensor<Training<Meta>, 1>, BoxError>,
{
    /// Takes the steps of a dry run with `run`, and returns the forecast of the last one.
    fn forecast(
        mut self,
        part: Option<String>,
        run: impl Fn(&mut Self, &mut StepReport) -> Result<(), ForecastError>,
    ) -> Result<Forecast, ForecastError> {
        let start = MemoryPeaks::of(self.engine.ledger());
        let mut report = StepReport::default();
        for _ in 0..STEPS {
            self.engine.ledger().reset_peaks();
            self.recorder.take();
            report = StepReport::default();
            run(&mut self, &mut report)?;
        }
        let step = MemoryPeaks::of(self.engine.ledger());
        let world_size = self.engine.group().world_size();
        let StepReport { collectives, operations, timeline } = report;
        Ok(Forecast { part, start, step, collectives, operations, timeline, world_size })
    }

    /// Runs an optimizer step, and reports it as one of `micro_batches` micro-batches.
    fn run(&mut self, micro_batches: usize, report: &mut StepReport) -> Result<(), ForecastError> {
        let run = micro_batches.min(MICRO_BATCHES);
        let omitted = (micro_batches - run) as u64;
        for index in 0..run {
            // The one in the middle stands for all that are omitted.
            let times = if index == 1 { 1 + omitted } else { 1 };
            self.record(times, report, |engine, loss| {
                let loss = engine.forward(loss)?.map_err(ForecastError::Loss)?;
                engine.backward(loss)?;
                engine.step()?;
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Runs an optimizer step of a pipeline stage.
    fn run_schedule(&mut self, report: &mut StepReport) -> Result<(), ForecastError> {
        // All micro-batches are run: in a pipeline their passes interleave, and the number of open
        // ones determines the memory.
        let count = self.engine.batch().gradient_accumulation_steps;
        self.record(1, report, |engine, loss| {
            let trained = engine.train_batch(&mut Alike { loss, count });
            trained.map(drop).map_err(|cause| match cause {
                Cause::Engine(error) => ForecastError::Engine(error),
                other => ForecastError::Loss(other.to_string().into()),
            })
        })
    }

    /// Calls `run`, and adds what it took, `times` times, to the report.
    fn record(
        &mut self,
        times: u64,
        report: &mut StepReport,
        run: impl FnOnce(&mut Engine<Meta, M>, &F) -> Result<(), ForecastError>,
    ) -> Result<(), ForecastError> {
        let before = self.group.statistics();
        self.engine.states().start_counting();
        run(&mut self.engine, self.loss)?;
        add(&mut report.operations, self.engine.states().stop_counting(), times);
        report.collectives.add(&self.group.statistics().since(&before), times);
        report.timeline.parts.push(Stretch { events: self.recorder.take(), times });
        Ok(())
    }
}

/// Micro-batches of the same size and weight.
struct Alike<'a, F> {
    loss: &'a F,
    count: usize,
}

impl<M, F> MicroBatches<Meta, M> for Alike<'_, F>
where
    M: AutodiffModule<Training<Meta>>,
    F: Fn(&M) -> Result<Tensor<Training<Meta>, 1>, BoxError>,
{
    fn loss(&mut self, model: &M, _index: usize) -> Result<Tensor<Training<Meta>, 1>, Cause> {
        (self.loss)(model).map_err(Cause::Outside)
    }

    fn weight(&self, _index: usize) -> f64 {
        1.0 / self.count as f64
    }
}

/// Adds the operations of a micro-batch that occurs `times` times. Micro-batches run the same
/// modules.
fn add(sum: &mut Vec<ModuleOperations>, one: Vec<ModuleOperations>, times: u64) {
    if sum.is_empty() {
        sum.extend(one.iter().map(|it| ModuleOperations { forward: 0, backward: 0, ..it.clone() }));
    }
    for (sum, one) in sum.iter_mut().zip(one) {
        sum.forward += times * one.forward;
        sum.backward += times * one.backward;
    }
}
