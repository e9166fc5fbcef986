//! Pipelines of every model, compared bit by bit with one stage, and their memory with its
//! forecast.

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn_flex::Flex;
use deepburn::config::{PipelinePlan, PipelineSchedule, StagePartition};
use deepburn::prelude::*;
use deepburn::{
    BoxError, Cause, EngineError, Forecast, ForecastError, MemoryPeaks, MetaDevice, MicroBatches,
    PipelineLayout, run_ranks,
};

use crate::harness::{
    Evaluation, Job, Network, Precision, Recompute, SEED, Trainable, Trained, WithoutData,
    evaluate, seeded,
};
use crate::samples::Samples;

/// The number of steps of a run.
const STEPS: usize = 2;

/// A pipeline, or one stage.
#[derive(Debug, Clone, Copy)]
struct PipelineJob {
    /// Its `ranks` are the data-parallel ranks.
    job: Job,
    stages: usize,
    micro_batches: usize,
    schedule: PipelineSchedule,
}

impl PipelineJob {
    fn plan(&self) -> Plan {
        let mut plan = self.job.plan();
        plan.batch = plan.batch.resized(self.micro_batches);
        plan.mesh.pipeline_stages = self.stages;
        plan.pipeline = (self.stages > 1)
            .then(|| PipelinePlan { schedule: self.schedule, partition: StagePartition::Best });
        plan
    }

    /// Finds the stages of the model by a dry run, and forecasts each of them.
    fn dry_run<F>(&self) -> Result<(PipelineLayout, Vec<Forecast>), ForecastError>
    where
        F: Network<WithoutData> + AutodiffModule<WithoutData>,
    {
        let (plan, samples) = (self.plan(), Samples::of_step(0, 0, self.job.ranks));
        let build = |device: &MetaDevice| Ok(F::new(device));
        let loss = |model: &F| Ok(model.loss(&samples));
        let layout = deepburn::pipeline_layout(&plan, build, loss, None)?;
        Ok((layout, deepburn::forecast_stages(&plan, build, loss)?))
    }
}

/// The micro-batches of a step.
struct StepSamples {
    first: u64,
    rank: usize,
    ranks: usize,
    count: usize,
}

impl<M: Trainable> MicroBatches<Flex, M> for StepSamples {
    fn loss(&mut self, model: &M, index: usize) -> Result<Tensor<Trained, 1>, Cause> {
        let samples = Samples::of_step(self.first + index as u64, self.rank, self.ranks);
        Ok(model.loss(&samples))
    }

    fn weight(&self, _index: usize) -> f64 {
        1.0 / self.count as f64
    }
}

/// What a rank has after training.
#[derive(Debug)]
struct Trace {
    losses: Vec<Vec<f64>>,
    norms: Vec<Option<f64>>,
    evaluation: Evaluation,
    /// The peaks of the last step.
    peaks: MemoryPeaks,
}

/// Trains on the stages of `layout`, or on one stage without one. Returns the trace of each rank.
fn train<M: Trainable>(
    job: PipelineJob,
    layout: Option<&PipelineLayout>,
) -> Result<Vec<Trace>, String> {
    let plan = job.plan();
    let ranks = run_ranks(job.stages * job.job.ranks, |group| {
        // Rank 0 has the weights of the seed, and each other rank has different weights.
        let model = seeded::<Trained, M>(SEED + group.rank() as u64);
        let mut engine = match layout {
            None => deepburn::initialize(model, &plan, group)?,
            Some(layout) => deepburn::initialize_pipeline(model, &plan, layout.clone(), group)?,
        };
        engine.seed(11);
        let data = engine.states().data_group();
        let (rank, ranks) = (data.rank(), data.world_size());
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let (first, count) = ((step * job.micro_batches) as u64, job.micro_batches);
            let mut samples = StepSamples { first, rank, ranks, count };
            engine.ledger().reset_peaks();
            let trained = engine.train_batch(&mut samples)?;
            losses.push(trained.losses);
            norms.push(trained.step.gradient_norm);
        }
        let peaks = MemoryPeaks::of(engine.ledger());
        Ok::<_, BoxError>(Trace { losses, norms, evaluation: evaluate(&engine)?, peaks })
    });
    ranks.map_err(|failure| failure.to_string())
}

/// Asserts that losses, norms, the evaluation and all values have the bits of one stage on all
/// ranks, and that the memory is the forecast's. Models with running statistics are refused by
/// name.
pub(crate) fn pipelines_agree<M, F>(precision: Precision)
where
    M: Trainable,
    F: Network<WithoutData> + AutodiffModule<WithoutData>,
{
    use PipelineSchedule::{FillDrain, OneForwardOneBackward, ZeroBubbleH1};
    for (stages, ranks, zero, micro_batches, schedule, recompute) in [
        (2, 1, 0, 3, OneForwardOneBackward, Recompute::Off),
        (2, 2, 3, 2, OneForwardOneBackward, Recompute::Full),
        (3, 1, 1, 4, FillDrain, Recompute::Selective),
        (3, 2, 2, 1, OneForwardOneBackward, Recompute::Off),
        (2, 2, 1, 3, ZeroBubbleH1, Recompute::Off),
        (3, 1, 3, 4, ZeroBubbleH1, Recompute::Full),
    ] {
        let job = Job { precision, stage: zero, ranks, recompute };
        let one = PipelineJob { job, stages: 1, micro_batches, schedule };
        let pipeline = PipelineJob { stages, ..one };
        let (layout, forecast) = match pipeline.dry_run::<F>() {
            Ok(found) => found,
            Err(ForecastError::Model(_)) if F::CHECKS_VALUES => continue,
            Err(ForecastError::Engine(EngineError::Zero(error))) if F::HAS_STATISTICS => {
                assert!(error.to_string().contains("running statistic"), "{error}");
                continue;
            }
            // Small models have fewer blocks than stages.
            Err(ForecastError::Cut(_)) if stages > 2 => continue,
            Err(error) => panic!("{pipeline:?}: {error}"),
        };
        let trained = train::<M>(pipeline, Some(&layout));
        let trained = trained.unwrap_or_else(|failure| panic!("{pipeline:?}: {failure}"));
        let alone = train::<M>(one, None).unwrap_or_else(|failure| panic!("{one:?}: {failure}"));
        for (rank, ours) in trained.iter().enumerate() {
            let expected = &alone[rank % ranks];
            let what = format!("rank {rank}, {pipeline:?}");
            assert_eq!(ours.losses, expected.losses, "losses, {what}");
            assert_eq!(ours.norms, expected.norms, "norms, {what}");
            ours.evaluation.assert_same(&expected.evaluation, &what);
            let forecast = &forecast[rank / ranks].step;
            assert_eq!(ours.peaks.device, forecast.device, "{what}");
        }
    }
}
