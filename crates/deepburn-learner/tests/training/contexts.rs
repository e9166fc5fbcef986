//! Several models on one thread: each has its own random stream, ledger and gradients.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Plan, RawConfig, RunContext, resolve};
use deepburn_learner::{Engine, EngineError, initialize};
use deepburn_zero::{Category, Group, Training};

type Trained = Training<Flex>;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    up: Linear<B>,
    drop: Dropout,
    down: Linear<B>,
}

impl<B: Backend> Net<B> {
    /// Creates a net that maps rows of 3 to rows of 3. The weights are small and depend only on
    /// their position.
    fn new() -> Self {
        let linear = |from, to| {
            let mut layer =
                LinearConfig::new(from, to).with_bias(false).init::<B>(&B::Device::default());
            let count = (from * to) as i64;
            let weight = Tensor::<B, 1, burn::tensor::Int>::arange(0..count, &Default::default());
            let weight = (weight.float() * 37.0).remainder_scalar(101.0) / 101.0 - 0.5;
            layer.weight = layer.weight.map(|_| weight.reshape([from, to]).require_grad());
            layer
        };
        Self { up: linear(3, 7), drop: DropoutConfig::new(0.5).init(), down: linear(7, 3) }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.down.forward(self.drop.forward(self.up.forward(x).tanh()))
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        (self.forward(x) - 0.5).square().mean()
    }
}

fn batch<B: Backend>() -> Tensor<B, 2> {
    Tensor::<B, 2>::from_floats(
        [[0.1, 0.7, -0.3], [0.9, 0.2, 0.4], [-0.5, 0.3, 0.8], [0.6, -0.2, 0.1]],
        &B::Device::default(),
    )
}

fn plan(stage: u8, world_size: usize) -> Plan {
    let text = format!(
        r#"{{"train_micro_batch_size_per_gpu": 4,
            "optimizer": {{"type": "AdamW", "params": {{"lr": 0.05}}}},
            "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 0}}}}"#
    );
    let written = RawConfig::from_json(&text).unwrap();
    resolve(&written, &RunContext::on_host(world_size)).unwrap().plan
}

type NetEngine = Engine<Flex, Net<Trained>>;

fn on_ranks<R: Send>(
    stage: u8,
    world_size: usize,
    body: impl Fn(&dyn Fn() -> Result<NetEngine, EngineError>) -> Result<R, EngineError> + Sync,
) -> Vec<R> {
    let plan = plan(stage, world_size);
    let results = run_ranks(world_size, Duration::from_secs(60), |member| {
        body(&|| initialize(Net::new(), &plan, Group::new(member.clone())))
    });
    results.unwrap_or_else(|failure| panic!("{failure}"))
}

fn step(engine: &mut NetEngine) -> Result<f32, EngineError> {
    let loss = engine.forward(|net| net.loss(batch()))?;
    let value = loss.clone().into_scalar();
    engine.backward(loss)?;
    engine.step()?;
    Ok(value)
}

#[test]
fn a_second_model_does_not_disturb_the_first() {
    for (stage, world_size) in [(0, 1), (0, 3), (2, 2), (3, 1), (3, 3)] {
        let alone = on_ranks(stage, world_size, |engine| {
            let mut engine = engine()?;
            engine.seed(7);
            (0..4).map(|_| step(&mut engine)).collect::<Result<Vec<f32>, _>>()
        });
        let beside = on_ranks(stage, world_size, |engine| {
            let mut first = engine()?;
            first.seed(7);
            let mut losses: Vec<f32> = vec![step(&mut first)?];
            let mut second = engine()?;
            losses.push(step(&mut first)?);
            step(&mut second)?;
            losses.push(step(&mut first)?);
            second.evaluate(|net| net.loss(batch()).into_scalar())?;
            drop(second);
            losses.push(step(&mut first)?);
            Ok::<Vec<f32>, EngineError>(losses)
        });
        assert_eq!(alone, beside, "stage {stage}, {world_size} ranks");
    }
}

#[test]
fn models_have_different_dropout_masks() {
    on_ranks(0, 1, |engine| {
        let (mut first, mut second) = (engine()?, engine()?);
        let losses = [step(&mut first)?, step(&mut second)?];
        assert_ne!(losses[0], losses[1], "both have the same weights and the same batch");
        Ok(())
    });
}

#[test]
fn the_stream_of_a_second_model_resumes_in_a_program_that_has_it_alone() {
    let losses = |engine: &mut NetEngine| -> Result<Vec<f32>, EngineError> {
        (0..2).map(|_| engine.forward(|net| net.loss(batch()).into_scalar())).collect()
    };
    on_ranks(0, 2, |engine| {
        let _first = engine()?;
        let mut second = engine()?;
        losses(&mut second)?;
        let state = second.states().random_state();
        let mut third = engine()?;
        third.states().set_random_state(state);
        assert_eq!(losses(&mut second)?, losses(&mut third)?);
        Ok(())
    });
}

#[test]
fn activations_count_for_the_model_that_runs() {
    on_ranks(0, 1, |engine| {
        let (mut first, mut second) = (engine()?, engine()?);
        let peak = |engine: &NetEngine| engine.ledger().usage(Category::Activations).peak;
        step(&mut first)?;
        let (one, other) = (peak(&first), peak(&second));
        assert!(one > 0);
        assert_eq!(other, 0);
        step(&mut second)?;
        assert_eq!(peak(&first), one);
        assert!(peak(&second) > 0);
        Ok(())
    });
}

/// A generator is trained through a discriminator. This must not change the discriminator's
/// gradients, and must use its current parameters, although they were gathered for an earlier pass.
#[test]
fn a_backward_pass_updates_its_own_model_alone() {
    let run = |stage, world_size, trains_generator: bool| {
        on_ranks(stage, world_size, |engine| {
            let (mut generator, mut discriminator) = (engine()?, engine()?);
            generator.seed(1);
            discriminator.seed(2);
            let mut losses = Vec::new();
            for _ in 0..3 {
                let loss = discriminator.forward(|net| net.loss(batch()))?;
                discriminator.backward(loss)?;
                if trains_generator {
                    let before = gradients(&discriminator)?;
                    let judge = discriminator.module().clone();
                    let loss = generator.forward(|net| judge.loss(net.forward(batch())))?;
                    losses.push(loss.clone().into_scalar());
                    generator.backward(loss)?;
                    generator.step()?;
                    assert_eq!(gradients(&discriminator)?, before);
                }
                discriminator.step()?;
            }
            let weights = |engine: &NetEngine| -> Result<Vec<Vec<f32>>, EngineError> {
                let indices = 0..engine.parameters().len();
                let data = indices.map(|index| engine.states().parameter_data(index));
                Ok(data
                    .map(|data| data.map(|data| data.to_vec().unwrap()))
                    .collect::<Result<_, _>>()?)
            };
            Ok((losses, weights(&generator)?, weights(&discriminator)?))
        })
    };
    for world_size in [1, 3] {
        let expected = run(0, world_size, true);
        assert!(expected[0].0.windows(2).all(|pair| pair[0] != pair[1]));
        for stage in [1, 2, 3] {
            assert_eq!(run(stage, world_size, true), expected, "stage {stage}");
        }
        assert!(run(0, world_size, false)[0].1 != expected[0].1, "the generator learns");
    }
}

/// Returns the accumulated gradients of all parameters.
fn gradients(engine: &NetEngine) -> Result<Vec<Option<Vec<f32>>>, EngineError> {
    let paths = engine.parameters().iter().map(|parameter| parameter.path().to_owned());
    let data = paths.map(|path| engine.states().gradient_data(&path));
    let values = data.map(|data| Ok(data?.map(|data| data.to_vec::<f32>().unwrap())));
    values.collect()
}

#[test]
fn random_ops_between_calls_have_their_own_stream() {
    let draw = || Tensor::<Trained, 1>::random([4], Distribution::Default, &FlexDevice).into_data();
    on_ranks(0, 2, |engine| {
        let mut first = engine()?;
        let second = engine()?;
        first.seed(3);
        let positions = || [&first, &second].map(|engine| engine.states().random_state().position);
        let before = positions();
        let state = first.states().random_state();
        let drawn = [draw(), draw()];
        assert_ne!(drawn[0], drawn[1]);
        assert_eq!(positions(), before);
        first.states().set_random_state(state);
        assert_eq!([draw(), draw()], drawn);
        Ok(())
    });
}

/// The usual order of a GAN: the discriminator is trained on images of a generator that has not run
/// a pass of its own yet. Autodiff once lost gradients of leaves that were read before they were
/// marked.
#[test]
fn a_model_that_was_read_before_its_first_pass_keeps_its_gradients() {
    let run = |stage, world_size, reads_first: bool| {
        on_ranks(stage, world_size, |engine| {
            let (mut generator, mut discriminator) = (engine()?, engine()?);
            generator.seed(1);
            let images = reads_first.then(|| generator.module().forward(batch()).detach());
            let loss = discriminator.forward(|net| match images {
                Some(images) => net.loss(images),
                None => net.loss(batch()),
            })?;
            discriminator.backward(loss)?;
            drop(generator.module().forward(batch()));
            generator.seed(1);
            let loss = generator.forward(|net| net.loss(batch()))?;
            generator.backward(loss)?;
            gradients(&generator)
        })
    };
    for (stage, world_size) in [(0, 1), (0, 3), (3, 2)] {
        let expected = run(stage, world_size, false);
        assert!(expected[0].iter().all(Option::is_some));
        for _ in 0..6 {
            assert_eq!(run(stage, world_size, true), expected, "stage {stage}");
        }
    }
}

#[test]
fn a_step_before_an_open_backward_is_an_error() {
    on_ranks(3, 2, |engine| {
        let (mut generator, mut discriminator) = (engine()?, engine()?);
        let order = |result: Result<_, EngineError>| match result {
            Err(EngineError::Order { call: "step", when }) => when,
            other => panic!("{other:?}"),
        };
        let loss = discriminator.forward(|net| net.loss(batch()))?;
        discriminator.backward(loss)?;
        let judge = discriminator.module().clone();
        let loss = generator.forward(|net| judge.loss(net.forward(batch())))?;
        assert!(order(generator.step()).contains("between forward and backward"));
        assert!(order(discriminator.step()).contains("another engine"));
        generator.backward(loss)?;
        discriminator.step()?;
        generator.step()?;
        // A forward pass that is dropped does not block later steps.
        drop(generator.forward(|net| judge.loss(net.forward(batch())))?);
        generator.zero_grad();
        step(&mut discriminator)?;
        Ok(())
    });
}
