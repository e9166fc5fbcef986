//! Compares predicted steps with the counters of real ones.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use burn_flex::{Flex, FlexDevice};
use deepburn::BoxError;
use deepburn::comm::{Count, Member, Statistics, run_ranks};
use deepburn::config::{Plan, RawConfig, RunContext, resolve};
use deepburn::zero::cost::{Links, Network, RankSpeed, StepModel};
use deepburn::zero::estimate::{ElementBytes, ParameterSize, estimate};
use deepburn::zero::{Group, Training};
use deepburn_models::Architecture;
use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
use deepburn_models::gpt2::{Gpt2, Gpt2Config};
use serde_json::{Value, json};

use super::*;
use crate::job::activations::activations;

/// Counts by purpose.
fn counts(statistics: &Statistics) -> BTreeMap<String, Count> {
    let mut counts = BTreeMap::<String, Count>::new();
    for (_, purpose, count) in statistics.iter() {
        let sum = counts.entry(purpose.to_owned()).or_default();
        sum.calls += count.calls;
        sum.elements += count.elements;
    }
    counts
}

/// Purposes of collectives in the training loop, which these tests do not use.
const OF_THE_LOOP: [&str; 2] = ["batch totals", "loss"];

/// A cluster with round figures.
const NETWORK: Network = Network::Links(Links {
    bandwidth: 1e9,
    latency: 1e-6,
    ranks_per_machine: 1,
    local_bandwidth: 1e9,
});

const SPEED: RankSpeed = RankSpeed { flops: 1e11, memory_bandwidth: 1e10 };

/// A job of a small GPT-2.
struct Job {
    config: Gpt2Config,
    section: Value,
    ranks: usize,
    batch: BatchShape,
}

/// A GPT-2 of 4 blocks.
fn small() -> Gpt2Config {
    Gpt2Config {
        n_embd: 48,
        n_head: 3,
        n_layer: 4,
        vocab_size: 301,
        n_positions: 40,
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Gpt2Config::small()
    }
}

impl Job {
    fn new(section: Value, ranks: usize) -> Self {
        Self { config: small(), section, ranks, batch: BatchShape { sequences: 2, length: 24 } }
    }

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
        let plan = self.plan();
        let model = &self.config;
        let graph = activations(model, self.batch, &plan.precision);
        let numel = |shape: &[usize]| shape.iter().product::<usize>() as u64;
        let sizes: Vec<_> = model
            .parameters()
            .iter()
            .map(|it| ParameterSize::new(numel(&it.shape), Some(&plan.optimizer)))
            .collect();
        let micro_batches = plan.batch.gradient_accumulation_steps;
        let bytes = ElementBytes::new(&plan.optimizer, &plan.precision, micro_batches);
        let ranks = self.ranks as u64;
        let estimate = estimate(&sizes, &plan.zero, ranks, bytes);
        let step = StepModel::new(&plan, &plan.zero, &sizes, &graph, &estimate).unwrap();
        step.cost(ranks, speed, network)
    }

    /// Returns the predicted collectives of a step and operations of a micro-batch.
    fn predicted(&self) -> (BTreeMap<String, Count>, u64) {
        let counts = self.cost(SPEED, &NETWORK).collectives.into_iter();
        let counts = counts.filter(|(purpose, _)| !OF_THE_LOOP.contains(purpose));
        let flops = activations(&self.config, self.batch, &self.plan().precision).flops();
        (counts.map(|(purpose, count)| (purpose.to_owned(), count)).collect(), flops)
    }

    /// Returns the collectives of rank 0 in the third step, and the operations of its last micro-batch.
    fn measured(&self) -> (BTreeMap<String, Count>, u64) {
        let (mut seen, _) = self.train(3, |member| counts(&member.statistics()));
        let ((mut after, flops), (before, _)) = (seen.pop().unwrap(), seen.pop().unwrap());
        for (purpose, count) in &mut after {
            let earlier = before.get(purpose).copied().unwrap_or_default();
            count.calls -= earlier.calls;
            count.elements -= earlier.elements;
        }
        after.retain(|_, count| count.calls > 0);
        (after, flops)
    }

    /// Trains for `steps` steps. Returns for each step of rank 0: the result of `look` after it, the operations of its
    /// last micro-batch, and its time in seconds.
    fn train<T: Send>(
        &self,
        steps: usize,
        look: impl Fn(&Member) -> T + Sync,
    ) -> (Vec<(T, u64)>, Vec<f64>) {
        let plan = self.plan();
        let [rows, length] = [self.batch.sequences, self.batch.length].map(|it| it as usize);
        let ids: Vec<u32> = (0..rows * length).map(|it| (it % 61) as u32).collect();
        let trained = run_ranks(self.ranks, Duration::from_secs(60), |member| {
            let group = Group::<Flex>::new(member.clone());
            let model = Gpt2::<Training<Flex>>::new(&self.config, 3, &FlexDevice)?;
            let mut engine = deepburn::initialize(model, &plan, group)?;
            let (mut seen, mut seconds) = (Vec::new(), Vec::new());
            for _ in 0..steps {
                let started = Instant::now();
                let mut flops = 0;
                for _ in 0..plan.batch.gradient_accumulation_steps {
                    engine.states().start_counting();
                    let shape = [rows, length];
                    let batch = CausalBatch::new(&self.config, &ids, None, shape, &FlexDevice)?;
                    let loss = engine.forward(|model| model.loss(&batch).mean())?;
                    engine.backward(loss)?;
                    let modules = engine.states().stop_counting();
                    flops = modules.iter().map(|it| it.forward + it.backward).sum();
                    engine.step()?;
                }
                seconds.push(started.elapsed().as_secs_f64());
                seen.push((look(&member), flops));
            }
            Ok::<_, BoxError>((seen, seconds))
        });
        trained.unwrap_or_else(|failure| panic!("{}: {failure}", self.section)).swap_remove(0)
    }

    #[track_caller]
    fn check(&self) {
        let (predicted, measured) = (self.predicted(), self.measured());
        let what = format!("{} on {} ranks", self.section, self.ranks);
        assert!(predicted.0.contains_key("gradients"), "{what}");
        assert_eq!(predicted, measured, "{what}");
    }

    /// Compares only the elements of gradient reductions, not their number, which depends on the order of gradients in
    /// backward.
    #[track_caller]
    fn check_elements(&self) {
        let ((mut predicted, _), (mut measured, _)) = (self.predicted(), self.measured());
        let what = format!("{} on {} ranks", self.section, self.ranks);
        for counts in [&mut predicted, &mut measured] {
            counts.get_mut("gradients").unwrap().calls = 0;
        }
        assert_eq!(predicted, measured, "{what}");
    }
}

/// A configuration of a stage.
fn zero(stage: u8, section: Value) -> Value {
    let mut zero = json!({"stage": stage, "overlap_comm": true});
    zero.as_object_mut().unwrap().extend(section.as_object().unwrap().clone());
    json!({"zero_optimization": zero})
}

/// Returns `section` with additional keys.
fn with(mut section: Value, keys: Value) -> Value {
    section.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    section
}

#[test]
fn collectives_match_the_engine_at_every_stage() {
    for stage in 0..4 {
        for ranks in 1..=4 {
            Job::new(zero(stage, json!({})), ranks).check();
        }
    }
}

#[test]
fn collectives_match_the_engine_for_all_buckets_and_micro_batches() {
    for stage in 0..4 {
        for size in [2, 3000, 20_000, 500_000_000] {
            let buckets = json!({"reduce_bucket_size": size, "allgather_bucket_size": size});
            let accumulation = json!({"gradient_accumulation_steps": 3});
            Job::new(with(zero(stage, buckets), accumulation), 2).check();
        }
        let all_reduced = json!({"reduce_scatter": false, "overlap_comm": false});
        Job::new(zero(stage, all_reduced), 3).check();
    }
}

#[test]
fn gathers_match_the_engine() {
    for prefetch in [0, 5000, 20_000, 1_000_000] {
        for [live, reuse, threshold] in [
            [1_000_000_000, 1_000_000_000, 0],
            [30_000, 1_000_000_000, 200],
            [1_000_000_000, 0, 200],
            [30_000, 20_000, 10_000],
            [0, 0, 0],
        ] {
            let gathering = json!({
                "stage3_prefetch_bucket_size": prefetch,
                "stage3_max_live_parameters": live,
                "stage3_max_reuse_distance": reuse,
                "stage3_param_persistence_threshold": threshold,
            });
            Job::new(zero(3, gathering), 2).check();
        }
    }
}

#[test]
fn gathers_of_recomputation_match_the_engine() {
    for policy in
        [json!({"policy": "full"}), json!({"policy": "selective"}), json!({"every_nth_block": 2})]
    {
        for reuse in [0, 1_000_000_000] {
            let gathering = json!({
                "stage3_prefetch_bucket_size": 10_000,
                "stage3_max_reuse_distance": reuse,
                "stage3_param_persistence_threshold": 0,
            });
            let policy = json!({"activation_checkpointing": policy});
            Job::new(with(zero(3, gathering), policy), 2).check();
        }
    }
}

#[test]
fn element_types_and_untied_heads_match_the_engine() {
    let bf16 = json!({"bf16": {"enabled": true}});
    let autocast = json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}});
    for stage in 0..4 {
        for is_tied in [true, false] {
            let mut job = Job::new(with(zero(stage, json!({})), bf16.clone()), 2);
            job.config.tie_word_embeddings = is_tied;
            job.check();
            // The gradients of cast parameters are computed together at the end of backward. Autodiff determines their
            // order.
            job.section = with(zero(stage, json!({})), autocast.clone());
            job.check_elements();
        }
    }
}

/// A job whose model is large enough that matrix products take most of a step.
fn measured_job(stage: u8, ranks: u64) -> Job {
    let config = Gpt2Config { n_embd: 256, n_head: 4, n_positions: 64, ..small() };
    let gathering = json!({"stage3_prefetch_bucket_size": 5_000_000});
    let batch = BatchShape { sequences: 64 / ranks, length: 64 };
    Job { config, batch, ..Job::new(zero(stage, gathering), ranks as usize) }
}

/// Returns the times of `steps` steps of rank 0 in seconds, after two warm-up steps.
fn step_seconds(job: &Job, steps: usize) -> Vec<f64> {
    let times = job.train(steps + 2, |_| ()).1;
    times[2..].to_vec()
}

/// Prints measured and predicted step times of the same total work on 1 to 64 rank threads. Run it with
/// `cargo test --release --workspace --lib -- --ignored --nocapture predicted_steps`.
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
                let cost = job.cost(speed.rank_speed(ranks), speed.network());
                predicted.entry(ranks).or_default().push(cost.seconds);
            }
        }
        for (ranks, times) in measured {
            let [measured, predicted] = [times, predicted[&ranks].clone()].map(median);
            println!("{ranks:>4} {measured:.3} {predicted:.3} {:.2}", predicted / measured);
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
