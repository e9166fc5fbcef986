//! Two models that train each other: two engines on each rank's thread.

use std::path::Path;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::loss::BinaryCrossEntropyLossConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig,
    LeakyRelu, LeakyReluConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::tensor::activation::{relu, tanh};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, ElementConversion, Int, Tensor};
use burn_flex::Flex;
use deepburn::checkpoint::Checkpoint;
use deepburn::config::Plan;
use deepburn::ops::OptimizerOps;
use deepburn::zero::{Category, Group, Ledger, Training};
use deepburn::{
    BoxError, Engine, EngineError, LoadPlan, MemoryPeaks, Meta, SaveRequest, on_simulated_rank,
    run_ranks,
};

use crate::harness::Precision::{self, Bf16, Fp16, Fp32};
use crate::harness::{Evaluation, Job, Network, SEED, STEPS, Trained};
use crate::samples::Samples;
use crate::weights::{self, Seeded};

const NOISE: usize = 3;

/// Generates images from noise.
#[derive(Module, Debug)]
pub(crate) struct Generator<B: Backend> {
    project: Linear<B>,
    project_norm: BatchNorm<B>,
    up: ConvTranspose2d<B>,
    up_norm: BatchNorm<B>,
    out: ConvTranspose2d<B>,
}

impl<B: Backend> Generator<B> {
    fn new(device: &B::Device) -> Self {
        let up = ConvTranspose2dConfig::new([4, 3], [2, 2]).with_stride([2, 2]).with_bias(false);
        Self {
            project: LinearConfig::new(NOISE, 4 * 3 * 3).init(device),
            project_norm: BatchNormConfig::new(4).init(device),
            up: up.init(device),
            up_norm: BatchNormConfig::new(3).init(device),
            out: ConvTranspose2dConfig::new([3, 1], [3, 3]).with_padding([1, 1]).init(device),
        }
    }

    fn images(&self, noise: Tensor<B, 2>) -> Tensor<B, 4> {
        let count = noise.dims()[0];
        let x = self.project.forward(noise).reshape([count, 4, 3, 3]);
        let x = self.up.forward(relu(self.project_norm.forward(x)));
        tanh(self.out.forward(relu(self.up_norm.forward(x))))
    }

    fn draw(&self, count: usize) -> Tensor<B, 4> {
        let normal = Distribution::Normal(0.0, 1.0);
        self.images(Tensor::random([count, NOISE], normal, &B::Device::default()))
    }
}

/// Distinguishes images of the data from generated images.
#[derive(Module, Debug)]
pub(crate) struct Discriminator<B: Backend> {
    first: Conv2d<B>,
    first_norm: InstanceNorm<B>,
    second: Conv2d<B>,
    second_norm: GroupNorm<B>,
    head: Linear<B>,
    activation: LeakyRelu,
}

impl<B: Backend> Discriminator<B> {
    fn new(device: &B::Device) -> Self {
        let first = Conv2dConfig::new([1, 3], [3, 3]).with_padding(PaddingConfig2d::Same);
        Self {
            first: first.init(device),
            first_norm: InstanceNormConfig::new(3).init(device),
            second: Conv2dConfig::new([3, 4], [2, 2]).with_stride([2, 2]).init(device),
            second_norm: GroupNormConfig::new(2, 4).init(device),
            head: LinearConfig::new(4 * 3 * 3, 1).init(device),
            activation: LeakyReluConfig::new().with_negative_slope(0.2).init(),
        }
    }

    /// Returns the mean loss if `images` are labeled as real, or as generated.
    fn loss(&self, images: Tensor<B, 4>, real: bool) -> Tensor<B, 1> {
        let count = images.dims()[0];
        let x = self.activation.forward(self.first_norm.forward(self.first.forward(images)));
        let x = self.activation.forward(self.second_norm.forward(self.second.forward(x)));
        let logits = self.head.forward(x.flatten::<2>(1, 3));
        let device = &logits.device();
        let answers = Tensor::<B, 2, Int>::full([count, 1], i64::from(real), device);
        let loss = BinaryCrossEntropyLossConfig::new().with_logits(true).init(device);
        loss.forward(logits, answers)
    }
}

/// Both engines of a rank.
struct Gan<B: OptimizerOps = Flex> {
    generator: Engine<B, Generator<Training<B>>>,
    discriminator: Engine<B, Discriminator<Training<B>>>,
    /// Whether the generator learns from a frozen copy of the discriminator.
    frozen_judge: bool,
    /// Whether the discriminator draws random numbers that it does not use.
    noisy_discriminator: bool,
}

/// The losses of discriminator and generator in one step.
type Losses = [f32; 2];

impl<B: OptimizerOps> Gan<B> {
    /// Shards two models over a group.
    fn new(
        [generator, discriminator]: [u64; 2],
        plan: &Plan,
        group: Group<B>,
    ) -> Result<Self, EngineError> {
        let device = &Default::default();
        let generator = Generator::new(device).map(&mut Seeded::new(generator));
        let discriminator = Discriminator::new(device).map(&mut Seeded::new(discriminator));
        let mut gan = Self {
            generator: deepburn::initialize(generator, plan, group.clone())?,
            discriminator: deepburn::initialize(discriminator, plan, group)?,
            frozen_judge: true,
            noisy_discriminator: false,
        };
        gan.generator.seed(3);
        gan.discriminator.seed(4);
        Ok(gan)
    }

    fn take_step(&mut self) -> Result<Losses, EngineError> {
        let Self { generator, discriminator, frozen_judge, noisy_discriminator } = self;
        let (rank, world_size) = (generator.rank(), generator.group().world_size());
        let samples = Samples::of_step(generator.global_steps(), rank, world_size);
        let count = samples.len();

        let made = generator.forward(|generator| generator.draw(count))?.detach();
        let loss = discriminator.forward(|discriminator| {
            if *noisy_discriminator {
                let _ = samples.floats::<Training<B>, 1>(&[]).random_like(Distribution::Default);
            }
            let real = discriminator.loss(samples.floats(&[1, 6, 6]), true);
            real + discriminator.loss(made, false)
        })?;
        let discriminator_loss = loss.clone().into_scalar().elem();
        discriminator.backward(loss)?;
        discriminator.step()?;

        // Only the generator's engine takes gradients in this pass. A frozen judge has none anyway.
        let frozen = frozen_judge.then(|| discriminator.module().clone().no_grad());
        let judge = frozen.as_ref().unwrap_or(discriminator.module());
        let loss = generator.forward(|generator| judge.loss(generator.draw(count), true))?;
        let generator_loss = loss.clone().into_scalar().elem();
        generator.backward(loss)?;
        generator.step()?;
        Ok([discriminator_loss, generator_loss])
    }

    fn take_steps(&mut self, count: usize) -> Result<Vec<Losses>, EngineError> {
        (0..count).map(|_| self.take_step()).collect()
    }

    /// Returns the memory of both engines in the second step.
    fn peaks(&mut self) -> Result<[MemoryPeaks; 2], EngineError> {
        self.take_step()?;
        let ledgers = [self.generator.ledger().clone(), self.discriminator.ledger().clone()];
        ledgers.iter().for_each(Ledger::reset_peaks);
        self.take_step()?;
        Ok(ledgers.map(|ledger| MemoryPeaks::of(&ledger)))
    }
}

impl Gan {
    /// Returns a loss on fixed noise, and all values of both models.
    fn evaluate(&self) -> Result<Evaluation, EngineError> {
        let noise = |samples: &Samples| samples.floats(&[NOISE]);
        let (images, mut values) = self.generator.evaluate(|generator| {
            (generator.images(noise(&Samples::held_out())), weights::values(generator))
        })?;
        let (loss, judge) = self.discriminator.evaluate(|discriminator| {
            (discriminator.loss(images, true).into_scalar(), weights::values(discriminator))
        })?;
        values.extend(judge);
        Ok(Evaluation { loss, values })
    }

    fn save(&self, root: &Path) -> Result<(), BoxError> {
        self.generator.save_checkpoint(&root.join("generator"), SaveRequest::default())?;
        self.discriminator.save_checkpoint(&root.join("discriminator"), SaveRequest::default())?;
        Ok(())
    }

    fn load(&mut self, root: &Path) -> Result<(), BoxError> {
        let checkpoint = |name: &str| Checkpoint::open_intact(&root.join(name), None);
        self.generator.load_checkpoint(&checkpoint("generator")?, LoadPlan::ALL)?;
        self.discriminator.load_checkpoint(&checkpoint("discriminator")?, LoadPlan::ALL)?;
        Ok(())
    }
}

fn on_ranks<R: Send>(
    job: Job,
    seed: u64,
    body: impl Fn(&mut Gan) -> Result<R, BoxError> + Sync,
) -> Vec<R> {
    let plan = job.plan();
    let ranks = run_ranks(job.ranks, |group| {
        let seed = seed + group.rank() as u64;
        body(&mut Gan::new([seed, seed + 50], &plan, group)?)
    });
    ranks.unwrap_or_else(|failure| panic!("{job:?}: {failure}"))
}

struct Outcome {
    losses: Vec<Losses>,
    evaluation: Evaluation,
}

#[track_caller]
fn assert_same(left: &[Outcome], right: &[Outcome], what: &str) {
    for (rank, (left, right)) in left.iter().zip(right).enumerate() {
        assert_eq!(left.losses, right.losses, "{what}, rank {rank}");
        left.evaluation.assert_same(&right.evaluation, &format!("{what}, rank {rank}"));
    }
}

fn train(job: Job, vary: impl Fn(&mut Gan) + Sync) -> Vec<Outcome> {
    on_ranks(job, SEED, |gan| {
        vary(gan);
        let losses = gan.take_steps(STEPS)?;
        Ok(Outcome { losses, evaluation: gan.evaluate()? })
    })
}

fn stages_agree(precision: Precision) {
    for ranks in 1..=4 {
        let job = |stage| Job::new(precision, stage, ranks);
        let reference = train(job(0), |_| ());
        for stage in 1..=3 {
            assert_same(&train(job(stage), |_| ()), &reference, &format!("{:?}", job(stage)));
        }
        for (rank, outcome) in reference.iter().enumerate() {
            let what = format!("{precision:?}, rank {rank} of {ranks} against rank 0");
            outcome.evaluation.assert_same(&reference[0].evaluation, &what);
        }
    }
}

#[test]
fn stages_agree_in_fp32() {
    stages_agree(Fp32);
}

#[test]
fn stages_agree_in_bf16() {
    stages_agree(Bf16);
}

#[test]
fn stages_agree_in_fp16() {
    stages_agree(Fp16);
}

/// Asserts that 16-bit losses are within 2 % of the fp32 losses with the same noise.
fn stays_near_fp32(precision: Precision) {
    for ranks in [1, 3] {
        let run = |precision| train(Job::new(precision, 2, ranks), |_| ());
        for (half, full) in run(precision).iter().zip(&run(Fp32)) {
            for (step, (half, full)) in half.losses.iter().zip(&full.losses).enumerate() {
                for (half, full) in half.iter().zip(full) {
                    let error = (half - full).abs() / full;
                    assert!(error <= 0.02, "{half} for {full}, step {step}, {precision:?}");
                }
            }
        }
    }
}

#[test]
fn bf16_stays_near_fp32() {
    stays_near_fp32(Bf16);
}

#[test]
fn fp16_stays_near_fp32() {
    stays_near_fp32(Fp16);
}

/// Asserts that a variation does not change the results of training.
fn nothing_changes_when(vary: impl Fn(&mut Gan) + Sync) {
    for (precision, stage, ranks) in [(Fp32, 0, 1), (Fp32, 1, 3), (Fp32, 3, 3), (Bf16, 3, 2)] {
        let job = Job::new(precision, stage, ranks);
        assert_same(&train(job, &vary), &train(job, |_| ()), &format!("{job:?}"));
    }
}

#[test]
fn gradients_of_a_model_in_the_pass_of_another_are_dropped() {
    nothing_changes_when(|gan| gan.frozen_judge = false);
}

#[test]
fn what_one_model_draws_leaves_the_stream_of_another_alone() {
    nothing_changes_when(|gan| gan.noisy_discriminator = true);
}

/// Asserts that both engines resume exactly, including their random streams.
fn resumes(precision: Precision) {
    for (stage, ranks) in [(0, 1), (3, 3)] {
        let job = Job::new(precision, stage, ranks);
        let root = tempfile::tempdir().expect("a temporary folder");
        let rest = |gan: &mut Gan| -> Result<_, BoxError> {
            let at_checkpoint = gan.evaluate()?;
            let losses = gan.take_steps(STEPS / 2)?;
            Ok((at_checkpoint, Outcome { losses, evaluation: gan.evaluate()? }))
        };
        let straight = on_ranks(job, SEED, |gan| {
            gan.take_steps(STEPS / 2)?;
            gan.save(root.path())?;
            rest(gan)
        });
        let resumed = on_ranks(job, SEED + 10, |gan| {
            gan.take_steps(1)?;
            gan.load(root.path())?;
            rest(gan)
        });
        let (at_checkpoint, resumed): (Vec<_>, Vec<_>) = resumed.into_iter().unzip();
        let (at_save, straight): (Vec<_>, Vec<_>) = straight.into_iter().unzip();
        for (left, right) in at_checkpoint.iter().zip(&at_save) {
            left.assert_same(right, &format!("{job:?}, at the checkpoint"));
        }
        assert_same(&resumed, &straight, &format!("{job:?}"));
    }
}

#[test]
fn resumes_in_fp32() {
    resumes(Fp32);
}

#[test]
fn resumes_in_bf16() {
    resumes(Bf16);
}

#[test]
fn resumes_in_fp16() {
    resumes(Fp16);
}

/// Two engines on a thread, in a training loop of the program's own.
#[test]
fn a_forecast_is_the_run() {
    for (precision, stage, ranks) in [(Fp32, 0, 1), (Fp32, 2, 3), (Bf16, 3, 2), (Fp32, 3, 4)] {
        let job = Job::new(precision, stage, ranks);
        let real = on_ranks(job, SEED, |gan| Ok(gan.peaks()?));
        let forecast = on_simulated_rank(0, ranks, |group| {
            let mut gan = Gan::<Meta>::new([SEED; 2], &job.plan(), Group::new(group))?;
            Ok(gan.peaks()?)
        });
        let forecast = forecast.unwrap_or_else(|error| panic!("{job:?}: {error}"));
        // Autodiff frees the graph of images that are only detached in a later backward pass of any
        // thread of the process, so the peak of activations is not the same in every run.
        let kept = |peaks: &MemoryPeaks| {
            let categories = Category::ALL.iter().filter(|it| **it != Category::Activations);
            categories.map(|category| peaks.device.of(*category)).collect::<Vec<_>>()
        };
        assert_eq!(forecast.each_ref().map(kept), real[0].each_ref().map(kept), "{job:?}");
    }
}

/// Trains the generator alone: images of fixed noise approach target images.
impl<B: Backend> Network<B> for Generator<B> {
    const COUPLES_SAMPLES: bool = true;

    fn new(device: &B::Device) -> Self {
        Generator::new(device)
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let images = self.images(samples.floats(&[NOISE]));
        (images - samples.floats(&[1, 6, 6])).abs().mean()
    }
}

#[test]
fn a_generator_alone_is_plain_burn() {
    crate::properties::fp32_is_plain_burn::<Generator<Trained>>();
}
