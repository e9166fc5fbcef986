//! Trains a small classifier through Burn's `Learner`, sharded over three ranks.
//!
//! ```sh
//! cargo run --release --example classifier
//! cargo run --release --example classifier --features deepburn-train/tui
//! cargo run --release --example classifier -- --resume 4
//! ```
//!
//! The second command shows Burn's dashboard. The third resumes after the fourth epoch of an
//! earlier run, which kept the checkpoints of its last two epochs and of the best one. Ctrl-C ends
//! all ranks after the current micro-batch. All files are written to `target/classifier`.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::optim::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::tensor::activation::relu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_flex::{Flex, FlexDevice};
use burn_train::metric::{AccuracyMetric, LearningRateMetric, LossMetric};
use burn_train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, SupervisedTraining, TrainOutput,
    TrainStep,
};
use deepburn::zero::Training;
use deepburn_train::ShardedStrategy;
use signal_hook::consts::SIGINT;

const EPOCHS: usize = 5;
const BATCH: usize = 32;
const RANKS: usize = 3;
const TRAIN_ITEMS: usize = 6000;
const PLAN: &str = r#"{
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"eps": 1e-5, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 3}
}"#;

/// Classifies points by the spiral arm (of three) that they belong to.
#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    input: Linear<B>,
    hidden: Linear<B>,
    dropout: Dropout,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            input: LinearConfig::new(2, 128).init(device),
            hidden: LinearConfig::new(128, 128).init(device),
            dropout: DropoutConfig::new(0.1).init(),
            output: LinearConfig::new(128, 3).init(device),
        }
    }

    fn classify(&self, batch: Points<B>) -> ClassificationOutput<B> {
        let hidden = relu(self.hidden.forward(relu(self.input.forward(batch.places))));
        let output = self.output.forward(self.dropout.forward(hidden));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.arms.clone());
        ClassificationOutput::new(loss, output, batch.arms)
    }
}

impl<B: AutodiffBackend> TrainStep for Classifier<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Classifier<B> {
    type Input = Points<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Points<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

#[derive(Clone, Debug)]
struct Point {
    place: [f32; 2],
    arm: i32,
}

/// Returns `count` points on three spiral arms, starting at index `first`.
fn spirals(count: usize, first: usize) -> InMemDataset<Point> {
    let point = |i: usize| {
        let arm = i % 3;
        // The fractional parts of multiples of the golden ratio fill the interval evenly.
        let radius = (i as f32 * 0.618_034).fract();
        let jitter = ((i * 7919) % 101) as f32 / 101.0 - 0.5;
        let angle = arm as f32 * 2.094 + radius * 5.0 + jitter * 0.5;
        Point { place: [radius * angle.cos(), radius * angle.sin()], arm: arm as i32 }
    };
    InMemDataset::new((first..first + count).map(point).collect())
}

#[derive(Clone, Debug)]
struct Points<B: Backend> {
    places: Tensor<B, 2>,
    arms: Tensor<B, 1, Int>,
}

#[derive(Clone)]
struct Stack;

impl<B: Backend> Batcher<B, Point, Points<B>> for Stack {
    fn batch(&self, points: Vec<Point>, device: &B::Device) -> Points<B> {
        let places: Vec<f32> = points.iter().flat_map(|point| point.place).collect();
        let arms: Vec<i32> = points.iter().map(|point| point.arm).collect();
        let places = Tensor::<B, 1>::from_floats(places.as_slice(), device);
        Points {
            places: places.reshape([points.len(), 2]),
            arms: Tensor::from_ints(arms.as_slice(), device),
        }
    }
}

/// Returns an interrupter that Ctrl-C triggers. A signal handler must only set a flag, so a thread
/// polls the flag.
fn stopped_by_ctrl_c() -> Result<Interrupter, Box<dyn Error>> {
    let (interrupter, asked) = (Interrupter::new(), Arc::new(AtomicBool::new(false)));
    signal_hook::flag::register(SIGINT, asked.clone())?;
    let stopped = interrupter.clone();
    thread::spawn(move || {
        while !asked.load(Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
        stopped.stop(Some("Ctrl-C"));
    });
    Ok(interrupter)
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new("target/classifier");
    let device = FlexDevice;
    let train = DataLoaderBuilder::new(Stack).batch_size(BATCH).shuffle(7);
    let train = train.build(spirals(TRAIN_ITEMS, 0));
    let valid = DataLoaderBuilder::new(Stack).batch_size(BATCH).build(spirals(900, TRAIN_ITEMS));

    // The scheduler advances by one step for each update, which takes a batch of every rank.
    let steps = EPOCHS * TRAIN_ITEMS.div_ceil(RANKS).div_ceil(BATCH);
    let rate = CosineAnnealingLrSchedulerConfig::new(3e-3, steps).init()?;
    let optimizer = AdamWConfig::new().with_weight_decay(0.01).init();
    let learner = Learner::new(Classifier::<Training<Flex>>::new(&device), optimizer, rate);

    let strategy = ShardedStrategy::new(deepburn::plan(PLAN, RANKS)?);
    let mut training = SupervisedTraining::new(folder, train, valid)
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .metric_train_numeric(LearningRateMetric::new())
        .num_epochs(EPOCHS)
        .summary()
        .with_interrupter(stopped_by_ctrl_c()?)
        // Only this line makes the training sharded.
        .with_training_strategy(strategy.checkpoints(folder.join("checkpoints")).into());
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, epoch] = &arguments[..]
        && flag == "--resume"
    {
        training = training.checkpoint(epoch.parse()?);
    }
    let started = std::time::Instant::now();
    let result = training.launch(learner);
    let elapsed = Duration::from_millis(started.elapsed().as_millis() as u64);
    drop(result.renderer);
    println!("{}\ntrained in {elapsed:?}", result.model);
    Ok(())
}
