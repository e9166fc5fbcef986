//! The phases of a search: dry runs, then measurements.
//!
//! Main type: [`Tuner`]. What a model is, how much memory there is and how a plan is measured are
//! the caller's.

use std::path::PathBuf;

use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_forecast::cost::{Network, RankSpeed, SharedCores};
use deepburn_forecast::{Forecast, ForecastError};
use deepburn_learner::Interrupt;
use deepburn_tune::{
    Assessment, CandidateConfig, Measurement, PredictedStep, Search, SearchLimits, SearchSpace,
    StepMemory,
};
use serde_json::Value;

/// The largest number of micro-batches of a measured step, for each pipeline stage. Those between
/// the first and the last are alike, so a step with more of them is measured with this many, and
/// its time is extrapolated.
const MICRO_BATCHES: usize = 4;

/// The speed of a rank and of its exchanges, if there are this many ranks.
pub type SpeedOf<'a> = Box<dyn Fn(usize) -> (RankSpeed, Network) + 'a>;

/// Forecasts training with a plan, on a rank of each pipeline stage. Without a pipeline there is
/// one stage.
pub type ForecastOf<'a> = Box<dyn Fn(&Plan) -> Result<Vec<Forecast>, ForecastError> + 'a>;

/// Returns the memory of a plan with these forecasts of its pipeline stages, and what it lacks if
/// it does not fit.
pub type FitOf<'a> = Box<dyn Fn(&Plan, &[Forecast]) -> (StepMemory, Option<MemoryShortage>) + 'a>;

/// What a candidate lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryShortage {
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
    /// The cores that all ranks share, with which those that wait for other pipeline stages help
    /// the others; `None` if each rank has a device of its own.
    pub cores: Option<SharedCores>,
    /// Dry runs.
    pub forecast: ForecastOf<'a>,
    /// Memory limits.
    pub fit: FitOf<'a>,
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
    pub fn config(&self, candidate: &CandidateConfig) -> Value {
        candidate.apply(&self.config, self.nvme.as_deref())
    }

    /// Resolves a candidate.
    ///
    /// # Errors
    /// Returns the errors of its configuration in one line.
    pub fn plan(&self, candidate: &CandidateConfig) -> Result<Plan, String> {
        self.resolve(&self.config(candidate), candidate.ranks)
    }

    /// Resolves a configuration for `ranks` ranks.
    ///
    /// # Errors
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
    fn assess(&self, candidate: &CandidateConfig) -> Assessment {
        let forecast = self.plan(candidate).and_then(|plan| {
            let stages = (self.forecast)(&plan).map_err(|error| error.to_string())?;
            Ok((plan, stages))
        });
        let (plan, stages) = match forecast {
            Ok(forecast) => forecast,
            Err(reason) => return Assessment::Invalid { reason },
        };
        let (memory, shortage) = (self.fit)(&plan, &stages);
        if let Some(MemoryShortage { reason, bytes }) = shortage {
            return Assessment::TooLarge { memory, reason, shortfall: bytes };
        }
        // The stages of a pipeline have different shares of the operations of a step.
        let operations =
            stages.iter().map(Forecast::flops).sum::<u64>() / stages.len().max(1) as u64;
        match self.prediction(candidate.ranks, &stages) {
            Ok(prediction) => Assessment::Fits { memory, prediction, operations },
            Err(reason) => Assessment::Invalid { reason },
        }
    }

    /// Returns the predicted step.
    ///
    /// # Errors
    /// Returns an error if the speed of an offload is not known.
    fn prediction(&self, ranks: usize, stages: &[Forecast]) -> Result<PredictedStep, String> {
        let (speed, network) = (self.speed)(ranks);
        let cost = Forecast::pipeline_cost(stages, speed, &network, self.cores);
        let cost = cost.map_err(|error| error.to_string())?;
        // The stage that is idle for the shortest time determines the time of the step.
        let stage = cost.busiest().copied().unwrap_or_default();
        Ok(PredictedStep {
            // What it waits for is mostly the computation of other stages.
            compute: stage.compute + stage.idle,
            // Hidden communication takes no time of its own, because the rank computes meanwhile.
            exchange: (stage.communication - stage.hidden).max(0.0),
            offload: stage.offload,
        })
    }

    /// Measures candidates until the search ends or `interrupt` is triggered. `measure` measures
    /// the steps of a plan, and `observe` is called before and after each measurement.
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
        candidate: &CandidateConfig,
        measure: &mut impl FnMut(&Plan) -> Result<Measurement, String>,
    ) -> Result<Measurement, String> {
        let plan = self.plan(candidate)?;
        // A pipeline with few micro-batches would mostly be idle.
        let enough = MICRO_BATCHES * plan.mesh.pipeline_stages;
        if plan.batch.gradient_accumulation_steps <= enough {
            return measure(&plan);
        }
        let seconds = |plan: &Plan| {
            let stages = (self.forecast)(plan).map_err(|error| error.to_string())?;
            Ok::<_, String>(self.prediction(candidate.ranks, &stages)?.seconds())
        };
        let batch = plan.batch.resized(enough);
        let short = Plan { batch, ..plan.clone() };
        // The optimizer step takes the same time in both, so the number of micro-batches alone
        // would give too large a factor.
        let factor = seconds(&plan)? / seconds(&short)?;
        let mut measured = measure(&short)?;
        measured.seconds.iter_mut().for_each(|seconds| *seconds *= factor);
        Ok(measured)
    }
}
