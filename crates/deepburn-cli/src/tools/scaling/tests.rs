//! Compares predicted steps with real ones.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn_flex::{Flex, FlexDevice};
use deepburn::comm::run_ranks;
use deepburn::config::{Plan, RawConfig, RunContext, resolve};
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::tune::{MeasuredSteps, Tunable, forecast_of, layout_of, measure_steps};
use deepburn::zero::{Group, Training};
use deepburn::{BoxError, Forecast, Ranks};
use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::gpt2::{Gpt2, Gpt2Config};
use serde_json::{Value, json};

use super::*;
use crate::job::known_model::KnownModel;

/// A job of a small GPT-2.
struct Job {
    config: Gpt2Config,
    section: Value,
    ranks: usize,
    batch: BatchShape,
}

impl Job {
    fn plan(&self) -> Plan {
        let mut json = json!({
            "train_micro_batch_size_per_gpu": self.batch.sequences,
            "optimizer": {"type": "AdamW"},
        });
        json.as_object_mut().unwrap().extend(self.section.as_object().unwrap().clone());
        let facts = RunContext { hidden_size: Some(48), ..RunContext::on_host(self.ranks) };
        resolve(&RawConfig::from_json(&json.to_string()).unwrap(), &facts).unwrap().plan
    }

    /// The predicted cost of a step.
    fn cost(&self, speed: RankSpeed, network: &Network) -> StepCost {
        let model = KnownModel::LanguageModel(AnyDecoder::new(self.config.clone()));
        let stages = model.forecast(&self.plan(), self.batch).unwrap();
        stages[0].cost(speed, network).unwrap()
    }

    /// Trains for `steps` steps. Returns the time of each step of rank 0 in seconds.
    fn train(&self, steps: usize) -> Vec<f64> {
        let plan = self.plan();
        let [rows, length] = [self.batch.sequences, self.batch.length].map(|it| it as usize);
        let ids: Vec<u32> = (0..rows * length).map(|it| (it % 61) as u32).collect();
        let trained = run_ranks(self.ranks, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member.clone());
            let model = Gpt2::<Training<Flex>>::new(&self.config, 3, &FlexDevice)?;
            let mut engine = deepburn::initialize(model, &plan, group)?;
            let mut seconds = Vec::new();
            for _ in 0..steps {
                let started = Instant::now();
                let shape = [rows, length];
                let batch = CausalBatch::new(&self.config, &ids, None, shape, &FlexDevice)?;
                let loss = engine.forward(|model| model.loss(&batch).mean())?;
                engine.backward(loss)?;
                engine.step()?;
                seconds.push(started.elapsed().as_secs_f64());
            }
            Ok::<_, BoxError>(seconds)
        });
        trained.unwrap_or_else(|failure| panic!("{}: {failure}", self.section)).swap_remove(0)
    }
}

/// A job whose model is large enough that matrix products take most of a step.
fn measured_job(stage: u8, ranks: u64) -> Job {
    let zero =
        json!({"stage": stage, "overlap_comm": true, "stage3_prefetch_bucket_size": 5_000_000});
    Job {
        config: Gpt2Config {
            n_embd: 256,
            n_head: 4,
            n_layer: 4,
            vocab_size: 301,
            n_positions: 64,
            resid_pdrop: 0.0,
            embd_pdrop: 0.0,
            attn_pdrop: 0.0,
            ..Gpt2Config::small()
        },
        section: json!({ "zero_optimization": zero }),
        ranks: ranks as usize,
        batch: BatchShape { sequences: 64 / ranks, length: 64 },
    }
}

/// Returns the times of `steps` steps of rank 0 in seconds, after two warm-up steps.
fn step_seconds(job: &Job, steps: usize) -> Vec<f64> {
    job.train(steps + 2)[2..].to_vec()
}

/// Prints measured and predicted step times of the same total work on 1 to 64 rank threads. Run it
/// with `cargo test --release --workspace --lib -- --ignored --nocapture predicted_steps`.
#[test]
#[ignore = "measures time"]
fn predicted_steps_beside_measured_ones() {
    let arguments =
        ScalingArguments { network: Some(NetworkKind::Threads), ..ScalingArguments::default() };
    for stage in [0, 3] {
        println!("stage {stage}: ranks, measured s, predicted s, predicted over measured");
        let [mut measured, mut predicted] = [BTreeMap::<u64, Vec<f64>>::new(), BTreeMap::new()];
        for _ in 0..3 {
            for ranks in [1, 2, 4, 8, 16, 32, 64] {
                let job = measured_job(stage, ranks);
                measured.entry(ranks).or_default().extend(step_seconds(&job, 3));
                let precision = Precision::Fp32;
                let workload =
                    RankWorkload { batch: job.batch, width: 256, precision, micro_batches: 1 };
                let speed = arguments.speed(&workload, ranks).unwrap().unwrap();
                let cost = job.cost(speed.rank_speed(ranks), &speed.network);
                predicted.entry(ranks).or_default().push(cost.seconds);
            }
        }
        for (ranks, times) in measured {
            let [measured, predicted] = [times, predicted[&ranks].clone()].map(median);
            println!("{ranks:>4} {measured:.3} {predicted:.3} {:.2}", predicted / measured);
        }
    }
}

/// A language model that is trained on sequences of its own tokens.
struct Example<'a>(&'a Job);

impl<B: FusedOps + OptimizerOps> Tunable<B> for Example<'_> {
    type Model = Gpt2<Training<B>>;

    fn model(&self, device: &B::Device) -> Result<Self::Model, BoxError> {
        Ok(Gpt2::new(&self.0.config, 3, device)?)
    }

    fn loss(
        &self,
        model: &Self::Model,
        samples: usize,
        device: &B::Device,
    ) -> Result<Tensor<Training<B>, 1>, BoxError> {
        let shape = [samples, self.0.batch.length as usize];
        let ids: Vec<u32> = (0..shape[0] * shape[1]).map(|it| (it % 61) as u32).collect();
        let batch = CausalBatch::new(&self.0.config, &ids, None, shape, device)?;
        Ok(model.loss(&batch).mean())
    }
}

/// Prints measured and predicted step times of one and two pipeline stages on two rank threads. Run
/// it with `cargo test --release --workspace --lib -- --ignored --nocapture predicted_pipelines`.
#[test]
#[ignore = "measures time"]
fn predicted_pipelines_beside_measured_ones() {
    const RANKS: u64 = 2;
    let arguments =
        ScalingArguments { network: Some(NetworkKind::Threads), ..ScalingArguments::default() };
    println!("stages, micro-batches: measured s, predicted s, predicted over measured, idle");
    for micro_batches in [2, 4, 8] {
        for stages in [1, 2] {
            let mut job = measured_job(0, 8);
            job.ranks = RANKS as usize;
            job.section["gradient_accumulation_steps"] = json!(micro_batches);
            job.section["pipeline"] = json!({ "stages": stages });
            let (plan, model) = (job.plan(), Example(&job));
            let [mut measured, mut predicted, mut idle] = [(); 3].map(|()| Vec::new());
            for _ in 0..3 {
                let layout = layout_of(&model, &plan).unwrap();
                let steps = MeasuredSteps { warmup: 2, measured: 3 };
                let ranks = Ranks::threads();
                let steps = measure_steps::<Flex, _>(
                    &model,
                    &plan,
                    layout.as_ref(),
                    &ranks,
                    &[FlexDevice],
                    steps,
                );
                measured.extend(steps.unwrap().seconds);
                let workload = RankWorkload {
                    batch: job.batch,
                    width: 256,
                    precision: Precision::Fp32,
                    micro_batches,
                };
                let speed = arguments.speed(&workload, RANKS).unwrap().unwrap();
                let cost = Forecast::pipeline_cost(
                    &forecast_of(&model, &plan).unwrap(),
                    speed.rank_speed(RANKS),
                    &speed.network,
                    speed.cores(),
                );
                let cost = cost.unwrap();
                predicted.push(cost.seconds);
                idle.push(cost.idle_share());
            }
            let [measured, predicted, idle] = [measured, predicted, idle].map(median);
            let ratio = predicted / measured;
            println!(
                "{stages:>4} {micro_batches:>4} {measured:.3} {predicted:.3} {ratio:.2} {idle:.3}"
            );
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
