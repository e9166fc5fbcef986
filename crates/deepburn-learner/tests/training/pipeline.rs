//! Pipelines of models that know nothing of them, compared bit by bit with one stage.

mod checkpoints;
mod meshes;
mod tied;
mod zero_bubble;

use std::ops::Range;
use std::time::{Duration, Instant};

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{
    PipelinePlan, PipelineSchedule, Plan, RawConfig, RunContext, StagePartition, resolve,
};
use deepburn_learner::{Cause, Engine, MicroBatches, initialize, initialize_pipeline};
use deepburn_zero::{Category, Group, Holders, PipelineLayout, Training};
use serde_json::{Value, json};

type Trained = Training<Flex>;
type Trainer = Engine<Flex, Odd<Trained>>;

const VOCABULARY: usize = 11;
const WIDTH: usize = 6;

/// A block with a residual connection.
#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
    dropout: Dropout,
}

impl<B: Backend> Block<B> {
    fn new(dropout: f64, device: &B::Device) -> Self {
        Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, 2 * WIDTH + 1).init(device),
            down: LinearConfig::new(2 * WIDTH + 1, WIDTH).init(device),
            dropout: DropoutConfig::new(dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let hidden = self.up.forward(self.norm.forward(x.clone())).tanh();
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

/// A model whose fields are in another order than its execution, with a tied embedding, a skip
/// connection over all stages, and two heads.
#[derive(Module, Debug)]
struct Odd<B: Backend> {
    scores: Linear<B>,
    last: Block<B>,
    first: Block<B>,
    embedding: Embedding<B>,
    middle: Block<B>,
    frozen: Linear<B>,
}

impl Odd<Trained> {
    fn new(dropout: f64) -> Self {
        let device = &FlexDevice;
        let model = Self {
            scores: LinearConfig::new(WIDTH, 1).init(device),
            last: Block::new(dropout, device),
            first: Block::new(dropout, device),
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            middle: Block::new(dropout, device),
            frozen: LinearConfig::new(WIDTH, WIDTH).init(device),
        };
        let mut model = model.map(&mut Fill(0));
        model.frozen = model.frozen.no_grad();
        model
    }
}

impl<B: Backend> Odd<B> {
    fn loss(&self, seed: usize) -> Tensor<B, 1> {
        let device = &self.embedding.weight.val().device();
        let tokens: Vec<i64> =
            (0..8).map(|i| ((seed * 5 + i * 3 + i * i) % VOCABULARY) as i64).collect();
        let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(tokens, [2, 4]), device);
        let embedded = self.embedding.forward(tokens.clone());
        let hidden = self.middle.forward(self.first.forward(embedded.clone()));
        let hidden = self.frozen.forward(hidden).swap_dims(1, 2).swap_dims(1, 2);
        let hidden = self.last.forward(hidden) + embedded;
        let logits = hidden.clone().matmul(self.embedding.weight.val().transpose().unsqueeze());
        let likely = burn::tensor::activation::log_softmax(logits, 2);
        let picked = likely.gather(2, tokens.unsqueeze_dim::<3>(2)).mean().neg();
        picked + self.scores.forward(hidden).powf_scalar(2.0).mean() * 0.3
    }
}

/// Fills parameters with different numbers.
struct Fill(usize);

impl ModuleMapper<Trained> for Fill {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Trained, D>>,
    ) -> Param<Tensor<Trained, D>> {
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.shape();
        let values: Vec<f32> = (0..shape.num_elements())
            .map(|_| {
                self.0 += 1;
                (self.0 * 37 % 101) as f32 / 101.0 - 0.45
            })
            .collect();
        let tensor = Tensor::from_data(TensorData::new(values, shape), &FlexDevice);
        Param::from_mapped_value(id, tensor.require_grad(), mapper)
    }
}

/// The micro-batches of a step: different ones on each rank of a stage.
struct SeededBatches {
    first: usize,
    ranks: usize,
    rank: usize,
    count: usize,
}

impl<M> MicroBatches<Flex, M> for SeededBatches
where
    M: AutodiffModule<Trained> + Loss,
{
    fn loss(&mut self, model: &M, index: usize) -> Result<Tensor<Trained, 1>, Cause> {
        Ok(model.loss_of((self.first + index) * self.ranks + self.rank))
    }

    fn weight(&self, _index: usize) -> f64 {
        1.0 / self.count as f64
    }
}

trait Loss {
    fn loss_of(&self, seed: usize) -> Tensor<Trained, 1>;
}

impl Loss for Odd<Trained> {
    fn loss_of(&self, seed: usize) -> Tensor<Trained, 1> {
        self.loss(seed)
    }
}

/// A pipeline, or one stage.
#[derive(Debug, Clone, Copy)]
struct Shape {
    stages: usize,
    ranks: usize,
    micro_batches: usize,
}

/// The results of a training run.
#[derive(Debug, PartialEq)]
struct Trace {
    losses: Vec<Vec<f64>>,
    norms: Vec<Option<f64>>,
    parameters: Vec<(String, Vec<u8>)>,
}

fn plan(shape: Shape, settings: &Value) -> Plan {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": shape.micro_batches,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
    });
    for (key, value) in settings.as_object().unwrap() {
        config[key] = value.clone();
    }
    let context = RunContext::on_host(shape.ranks);
    let mut plan = resolve(&RawConfig::from_value(&config).unwrap(), &context).unwrap().plan;
    plan.mesh.pipeline_stages = shape.stages;
    plan
}

/// Returns the plan with this schedule, if it has stages.
fn with_schedule(plan: Plan, schedule: PipelineSchedule) -> Plan {
    let partition = StagePartition::Best;
    let pipeline = (plan.mesh.pipeline_stages > 1).then_some(PipelinePlan { schedule, partition });
    Plan { pipeline, ..plan }
}

/// The fields of [`Odd`] in the order of its execution.
const ORDER: [&str; 6] = ["embedding", "first", "middle", "frozen", "last", "scores"];

/// Divides the fields of [`Odd`] evenly.
fn layout(stages: usize) -> PipelineLayout {
    layout_by(stages, |place| (place * stages / ORDER.len()).min(stages - 1))
}

/// Gives each field of [`Odd`] the stage of its place in [`ORDER`].
fn layout_by(stages: usize, stage_of: impl Fn(usize) -> usize) -> PipelineLayout {
    let stage = |field: &str| stage_of(ORDER.iter().position(|name| *name == field).unwrap());
    let model = Odd::new(0.0);
    let mut paths = Paths::default();
    model.visit(&mut paths);
    PipelineLayout::new(
        stages,
        paths.found.into_iter().map(|path| {
            let own = stage(path.split('.').next().unwrap());
            // The embedding is also the output layer.
            let homes = match path.starts_with("embedding") {
                true => Holders::of([own, stage("last")]),
                false => Holders::one(own),
            };
            (path, homes)
        }),
    )
}

#[derive(Default)]
struct Paths {
    at: Vec<String>,
    found: Vec<String>,
}

impl ModuleVisitor<Trained> for Paths {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.at.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.at.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<Trained, D>>) {
        self.found.push(self.at.join("."));
    }
}

/// Runs `body` with an engine on each rank, in a pipeline with 1F1B.
fn with_engine<R: Send>(
    shape: Shape,
    settings: &Value,
    dropout: f64,
    body: impl Fn(&mut Trainer) -> Result<R, Cause> + Sync,
) -> Vec<R> {
    with_engine_of(plan(shape, settings), shape, dropout, body)
}

/// Runs `body` with an engine on each rank.
fn with_engine_of<R: Send>(
    plan: Plan,
    shape: Shape,
    dropout: f64,
    body: impl Fn(&mut Trainer) -> Result<R, Cause> + Sync,
) -> Vec<R> {
    let ranks = run_ranks(shape.stages * shape.ranks, Duration::from_secs(60), |member| {
        let (model, group) = (Odd::new(dropout), Group::new(member));
        let mut engine = match shape.stages {
            1 => initialize(model, &plan, group),
            stages => initialize_pipeline(model, &plan, layout(stages), group),
        }
        .map_err(Cause::from)?;
        engine.seed(7);
        body(&mut engine)
    });
    ranks.unwrap_or_else(|failure| panic!("{shape:?}: {failure}"))
}

fn train(shape: Shape, settings: &Value, dropout: f64) -> Trace {
    train_as(PipelineSchedule::OneForwardOneBackward, shape, settings, dropout)
}

/// Trains with a schedule.
fn train_as(schedule: PipelineSchedule, shape: Shape, settings: &Value, dropout: f64) -> Trace {
    let plan = with_schedule(plan(shape, settings), schedule);
    let mut traces =
        with_engine_of(plan, shape, dropout, |engine| trace(engine, shape.micro_batches, 0..3));
    let last = traces.split_off((shape.stages - 1) * shape.ranks).swap_remove(0);
    if shape.stages > 1 {
        assert_eq!(traces[0], last, "stages disagree: {shape:?}");
    }
    last
}

/// Trains the steps of this range.
fn trace(engine: &mut Trainer, count: usize, steps: Range<usize>) -> Result<Trace, Cause> {
    let group = engine.states().data_group();
    let (rank, ranks) = (group.rank(), group.world_size());
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in steps {
        let mut batches = SeededBatches { first: step * count, ranks, rank, count };
        let trained = engine.train_batch(&mut batches)?;
        losses.push(trained.losses);
        norms.push(trained.step.gradient_norm);
    }
    let paths: Vec<_> = engine.parameters().iter().map(|it| it.path().to_owned()).collect();
    let read = |(index, path): (usize, &String)| {
        let data =
            engine.states().parameter_data(index).map_err(deepburn_learner::EngineError::from);
        Ok::<_, Cause>((path.clone(), data?.as_bytes().to_vec()))
    };
    let parameters = paths.iter().enumerate().map(read).collect::<Result<_, _>>()?;
    Ok(Trace { losses, norms, parameters })
}

fn zero(stage: usize) -> Value {
    json!({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20}})
}

/// Trains a step with a schedule, and returns the peak of activations on each stage.
fn activation_peaks(stages: usize, micro_batches: usize, schedule: PipelineSchedule) -> Vec<usize> {
    let plan = plan(Shape { stages, ranks: 1, micro_batches }, &zero(0));
    activation_peaks_of(&with_schedule(plan, schedule), || layout(stages))
}

/// Trains a step of a plan, and returns the peak of activations on each stage of a layout.
fn activation_peaks_of(plan: &Plan, layout: impl Fn() -> PipelineLayout + Sync) -> Vec<usize> {
    let micro_batches = plan.batch.gradient_accumulation_steps;
    let peaks = run_ranks(plan.mesh.world_size(), Duration::from_secs(60), |member| {
        let group = Group::new(member);
        let engine = initialize_pipeline(Odd::new(0.0), plan, layout(), group);
        let mut engine = engine.map_err(Cause::from)?;
        engine.ledger().reset_peaks();
        let mut batches = SeededBatches { first: 0, ranks: 1, rank: 0, count: micro_batches };
        engine.train_batch(&mut batches)?;
        Ok::<_, Cause>(engine.ledger().usage(Category::Activations).peak)
    });
    peaks.unwrap()
}

#[test]
fn a_stage_keeps_the_activations_of_its_open_passes() {
    use PipelineSchedule::{FillDrain, OneForwardOneBackward};
    let (few, many) = (
        activation_peaks(3, 3, OneForwardOneBackward),
        activation_peaks(3, 8, OneForwardOneBackward),
    );
    // Stage 0 has three open passes, stage 1 two and stage 2 one, however many there are. The last
    // stage also keeps the value of each loss, in 4 bytes.
    for (few, many) in few.iter().zip(&many) {
        assert!((0..=4 * 5).contains(&(many - few)), "{few} and {many} bytes");
    }
    let all = activation_peaks(3, 8, FillDrain);
    for (stage, (few, all)) in many.iter().zip(&all).enumerate() {
        let open = 3 - stage;
        assert!(open * all > 5 * few, "stage {stage}: {few} and {all} bytes");
    }
}

#[test]
fn a_stage_that_fails_ends_all_of_them() {
    struct Failing(SeededBatches);
    impl MicroBatches<Flex, Odd<Trained>> for Failing {
        fn loss(
            &mut self,
            model: &Odd<Trained>,
            index: usize,
        ) -> Result<Tensor<Trained, 1>, Cause> {
            if self.0.rank == 1 && index == 2 {
                return Err(Cause::Outside("a bad batch".into()));
            }
            Ok(model.loss(index))
        }

        fn weight(&self, _index: usize) -> f64 {
            0.25
        }
    }
    for schedule in [PipelineSchedule::OneForwardOneBackward, PipelineSchedule::ZeroBubbleH1] {
        let plan = plan(Shape { stages: 3, ranks: 1, micro_batches: 4 }, &zero(0));
        let plan = with_schedule(plan, schedule);
        let started = Instant::now();
        let failure = run_ranks(3, Duration::from_secs(60), |member| {
            let rank = member.rank();
            let engine = initialize_pipeline(Odd::new(0.0), &plan, layout(3), Group::new(member));
            let mut engine = engine.map_err(Cause::from)?;
            let batches = SeededBatches { first: 0, ranks: 1, rank, count: 4 };
            engine.train_batch(&mut Failing(batches)).map(drop)
        });
        let message = failure.unwrap_err().to_string();
        assert!(message.contains("rank 1") && message.contains("a bad batch"), "{message}");
        // Far below the time-out of 60 s, and long enough for a loaded machine. It takes a few
        // milliseconds.
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }
}

/// Batches of which the third has no loss while `fails`.
struct ThirdFails {
    batches: SeededBatches,
    fails: bool,
}

impl MicroBatches<Flex, Odd<Trained>> for ThirdFails {
    fn loss(&mut self, model: &Odd<Trained>, index: usize) -> Result<Tensor<Trained, 1>, Cause> {
        if self.fails && index == 2 {
            return Err(Cause::Outside("a bad batch".into()));
        }
        self.batches.loss(model, index)
    }

    fn weight(&self, index: usize) -> f64 {
        MicroBatches::<Flex, Odd<Trained>>::weight(&self.batches, index)
    }
}

/// Trains a step of four micro-batches that fails, and another one. Returns both errors of a rank,
/// and its losses after `zero_grad`.
fn failed_steps(stages: usize) -> Vec<([String; 2], Option<Vec<f64>>)> {
    let shape = Shape { stages, ranks: 1, micro_batches: 4 };
    with_engine(shape, &zero(0), 0.0, |engine| {
        let batches = SeededBatches { first: 0, ranks: 1, rank: 0, count: 4 };
        let mut batches = ThirdFails { batches, fails: true };
        let mut errors = Vec::new();
        for fails in [true, false] {
            batches.fails = fails;
            errors.push(engine.train_batch(&mut batches).map(drop).unwrap_err().to_string());
        }
        engine.zero_grad();
        let losses = engine.train_batch(&mut batches).ok().map(|trained| trained.losses);
        Ok(([errors.remove(0), errors.remove(0)], losses))
    })
}

#[test]
fn a_step_is_not_added_to_the_gradients_of_a_failed_one() {
    let (errors, losses) = failed_steps(1).swap_remove(0);
    assert!(errors[0].contains("a bad batch"), "{}", errors[0]);
    assert!(
        errors[1].contains("train_batch was called with gradients of an incomplete step"),
        "{}",
        errors[1]
    );
    let shape = Shape { stages: 1, ranks: 1, micro_batches: 4 };
    assert_eq!(losses, Some(train(shape, &zero(0), 0.0).losses.swap_remove(0)));
}

#[test]
fn a_pipeline_ends_with_its_first_failed_pass() {
    // The first stage meets the bad batch first, and the other one waits for it.
    let (errors, losses) = failed_steps(2).swap_remove(0);
    assert!(errors[0].contains("a bad batch"), "{}", errors[0]);
    assert!(errors[1].contains("start again from a checkpoint. It failed with:"), "{}", errors[1]);
    assert!(errors[1].contains("a bad batch"), "{}", errors[1]);
    assert_eq!(losses, None);
}

#[test]
fn a_layout_of_another_plan_is_refused() {
    let plan = plan(Shape { stages: 2, ranks: 1, micro_batches: 1 }, &zero(0));
    let failure = run_ranks(2, Duration::from_secs(60), |member| {
        let engine = initialize_pipeline(Odd::new(0.0), &plan, layout(3), Group::new(member));
        engine.map(drop)
    });
    let message = failure.unwrap_err().to_string();
    assert!(
        message.contains("the plan has 2 pipeline stages and the layout of the model 3"),
        "{message}"
    );
}

#[test]
fn stages_do_not_change_bits() {
    for (micro_batches, ranks, stage) in
        [(1, 1, 0), (4, 1, 0), (3, 2, 0), (4, 2, 1), (2, 2, 2), (4, 1, 3), (5, 2, 3)]
    {
        let shape = Shape { stages: 1, ranks, micro_batches };
        let expected = train(shape, &zero(stage), 0.2);
        // With 6 stages, the embedding is alone on the first one.
        for stages in [2, 3, 4, 6] {
            let found = train(Shape { stages, ..shape }, &zero(stage), 0.2);
            assert_eq!(found, expected, "{stages} stages, {shape:?}, ZeRO {stage}");
        }
    }
}
