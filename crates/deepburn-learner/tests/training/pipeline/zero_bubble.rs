//! Gradients of weights that a schedule defers, compared bit by bit with one stage.

use std::sync::{Arc, Mutex};

use burn::nn::LinearConfig;
use deepburn_ops::linear;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::with_default;
use tracing::{Event, Metadata, Subscriber};

use super::PipelineSchedule::{OneForwardOneBackward, ZeroBubbleH1};
use super::checkpoints::merged;
use super::*;

/// Asserts that pipelines with deferred gradients train like one stage.
fn assert_same(shape: Shape, stages: &[usize], settings: &Value) {
    let expected = train(Shape { stages: 1, ..shape }, settings, 0.2);
    for &stages in stages {
        let found = train_as(ZeroBubbleH1, Shape { stages, ..shape }, settings, 0.2);
        assert_eq!(found, expected, "{stages} stages, {shape:?}, {settings}");
    }
}

#[test]
fn deferred_gradients_do_not_change_bits() {
    for (micro_batches, ranks, stage) in
        [(1, 1, 0), (2, 1, 1), (8, 1, 0), (3, 2, 0), (4, 2, 1), (2, 2, 2), (4, 1, 3), (5, 2, 3)]
    {
        let shape = Shape { stages: 1, ranks, micro_batches };
        assert_same(shape, &[2, 3, 4], &zero(stage));
    }
}

#[test]
fn deferred_gradients_do_not_change_bits_with_other_settings() {
    let shape = Shape { stages: 1, ranks: 2, micro_batches: 4 };
    let host = json!({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}});
    for settings in [
        merged(zero(1), &json!({"bf16": {"enabled": true}})),
        // The first steps overflow and are skipped.
        merged(zero(3), &json!({"fp16": {"enabled": true, "initial_scale_power": 30}})),
        merged(zero(0), &json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}})),
        merged(zero(2), &json!({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}})),
        host,
    ] {
        assert_same(shape, &[2, 3], &settings);
    }
    let four = Shape { ranks: 4, ..shape };
    let mut replicas = zero(2);
    replicas["zero_optimization"]["mics_shard_size"] = json!(2);
    let mut secondary = zero(3);
    secondary["zero_optimization"]["zero_hpz_partition_size"] = json!(2);
    for settings in [replicas, secondary] {
        assert_same(four, &[2], &settings);
    }
}

/// The peaks of activations on three stages.
#[test]
fn a_stage_holds_the_operands_of_its_deferred_gradients() {
    let plain = activation_peaks(3, 8, OneForwardOneBackward);
    let (few, many) = (activation_peaks(3, 3, ZeroBubbleH1), activation_peaks(3, 8, ZeroBubbleH1));
    // The first stage defers nothing.
    assert_eq!(many[0], plain[0]);
    for stage in 1..3 {
        // The others hold operands, of at most as many micro-batches as there are stages before.
        assert!(many[stage] > plain[stage], "stage {stage}: {many:?} and {plain:?} bytes");
        assert!((0..=4 * 5).contains(&(many[stage] - few[stage])), "{few:?} and {many:?} bytes");
        // All activations of a micro-batch take more than the operands.
        let one = plain[stage] / (3 - stage);
        assert!(many[stage] <= plain[stage] + (stage + 1) * one, "{many:?} and {plain:?} bytes");
    }
}

/// Stages after the first compute weight gradients at the end of each backward pass. With
/// recomputation they would hold the activations of all their blocks until then.
#[test]
fn operands_that_were_recomputed_are_not_held_until_the_pass_has_ended() {
    let recompute = merged(zero(0), &json!({"activation_checkpointing": {"policy": "full"}}));
    let plan = plan(Shape { stages: 2, ranks: 1, micro_batches: 4 }, &recompute);
    let peak = |cut| activation_peaks_of(&plan, || layout_by(2, |place| (place >= cut).into()))[1];
    // Three blocks and one block on the second stage.
    let (three, one) = (peak(1), peak(4));
    // The inputs and gradients of the layers of two blocks, for the 8 tokens of the pass.
    let operands = 2 * size_of::<f32>() * 8 * 2 * (WIDTH + (2 * WIDTH + 1));
    assert!(three < one + operands / 2, "{three} and {one} bytes, operands of {operands} bytes");
}

/// Records the names of the spans of a thread.
#[derive(Clone, Default)]
struct SpanNames(Arc<Mutex<Vec<&'static str>>>);

impl Subscriber for SpanNames {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.0.lock().unwrap().push(span.metadata().name());
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}
    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}
    fn event(&self, _event: &Event<'_>) {}
    fn enter(&self, _span: &Id) {}
    fn exit(&self, _span: &Id) {}
}

/// The passes of two stages with two micro-batches, in the order in which they run.
#[test]
fn later_stages_hand_on_their_gradient_before_they_compute_weight_gradients() {
    let passes = |settings: &Value| {
        let settings = merged(zero(0), settings);
        let plan = plan(Shape { stages: 2, ranks: 1, micro_batches: 2 }, &settings);
        let stages = run_ranks(2, Duration::from_secs(60), |member| {
            let engine = initialize_pipeline(Odd::new(0.0), &plan, layout(2), Group::new(member));
            let mut engine = engine.map_err(Cause::from)?;
            let mut batches = SeededBatches { first: 0, ranks: 1, rank: 0, count: 2 };
            let names = SpanNames::default();
            with_default(names.clone(), || engine.train_batch(&mut batches))?;
            let mut names = std::mem::take(&mut *names.0.lock().unwrap());
            names.retain(|name| ["forward", "backward", "weight gradients"].contains(name));
            Ok::<_, Cause>(names)
        });
        stages.unwrap()
    };
    let of_first = ["forward", "forward", "backward", "backward"];
    let (split, whole) = (["forward", "backward", "weight gradients"], ["forward", "backward"]);
    assert_eq!(passes(&json!({})), [of_first.to_vec(), [split, split].concat()]);
    for checkpointing in [json!({"policy": "full"}), json!({"every_nth_block": 2})] {
        let found = passes(&json!({"activation_checkpointing": checkpointing}));
        assert_eq!(found, [of_first.to_vec(), [whole, whole].concat()], "{checkpointing}");
    }
}

/// Layers whose weights reach their op in other ways than in [`Odd`].
#[derive(Module, Debug)]
struct Ways<B: Backend> {
    first: Linear<B>,
    transposed: Linear<B>,
    frozen: Linear<B>,
    sometimes: Linear<B>,
    bias: Linear<B>,
}

impl Ways<Trained> {
    fn new() -> Self {
        let device = &FlexDevice;
        let square = |seed| LinearConfig::new(WIDTH, WIDTH).init(device).map(&mut Fill(seed));
        let (mut frozen, mut bias) = (square(4), square(9));
        frozen.bias = frozen.bias.map(|bias| bias.no_grad());
        bias.weight = bias.weight.no_grad();
        let (first, transposed, sometimes) = (square(1), square(2), square(5));
        Self { first, transposed, frozen, sometimes, bias }
    }

    fn layout() -> PipelineLayout {
        let stages =
            [("first", 0), ("transposed", 1), ("frozen", 1), ("sometimes", 1), ("bias", 1)];
        let mut paths = Paths::default();
        Self::new().visit(&mut paths);
        let home = |path: String| {
            let (_, stage) = stages.iter().find(|(field, _)| path.starts_with(field)).unwrap();
            (path, Holders::one(*stage))
        };
        PipelineLayout::new(2, paths.found.into_iter().map(home))
    }
}

/// Applies the fused layer.
fn fused(layer: &Linear<Trained>, x: Tensor<Trained, 2>) -> Tensor<Trained, 2> {
    linear(x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()))
}

impl Loss for Ways<Trained> {
    fn loss_of(&self, seed: usize) -> Tensor<Trained, 1> {
        let values: Vec<f32> = (0..5 * WIDTH).map(|i| ((i * 7 + seed) % 13) as f32 / 9.0).collect();
        let x = Tensor::from_data(TensorData::new(values, [5, WIDTH]), &FlexDevice);
        let hidden = fused(&self.first, x).tanh();
        let weight = self.transposed.weight.val().transpose();
        let hidden = linear(hidden, weight, None).tanh();
        let mut hidden = fused(&self.bias, fused(&self.frozen, hidden).tanh());
        // Autodiff adds the gradients of a weight that is used twice, which computes them.
        for _ in 0..1 + seed % 2 {
            hidden = self.sometimes.forward(hidden).tanh();
        }
        hidden.powf_scalar(2.0).mean()
    }
}

/// What the first rank knows of a run.
#[derive(Debug, PartialEq)]
struct TrainedWays {
    losses: Vec<Vec<f64>>,
    norms: Vec<Option<f64>>,
    /// The bytes of each parameter.
    values: Vec<Vec<u8>>,
}

/// Trains [`Ways`].
fn train_ways(stages: usize, settings: &Value) -> TrainedWays {
    let shape = Shape { stages, ranks: 1, micro_batches: 4 };
    let plan = with_schedule(plan(shape, settings), ZeroBubbleH1);
    let mut ranks = run_ranks(stages, Duration::from_secs(60), |member| {
        let group = Group::new(member);
        let mut engine = match stages {
            1 => initialize(Ways::new(), &plan, group),
            _ => initialize_pipeline(Ways::new(), &plan, Ways::layout(), group),
        }
        .map_err(Cause::from)?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..3 {
            let mut batches = SeededBatches { first: 4 * step, ranks: 1, rank: 0, count: 4 };
            let trained = engine.train_batch(&mut batches)?;
            losses.push(trained.losses);
            norms.push(trained.step.gradient_norm);
        }
        // Nothing is left of the operands.
        assert_eq!(engine.ledger().usage(Category::Activations).current, 0);
        let read = |index| {
            let data = engine.states().parameter_data(index);
            data.map(|data| data.as_bytes().to_vec()).map_err(deepburn_learner::EngineError::from)
        };
        let values = (0..engine.parameters().len()).map(read).collect::<Result<_, _>>()?;
        Ok::<_, Cause>(TrainedWays { losses, norms, values })
    })
    .unwrap_or_else(|failure| panic!("{stages} stages: {failure}"));
    ranks.swap_remove(0)
}

#[test]
fn weights_that_are_views_frozen_or_used_twice_have_the_same_bits() {
    for settings in [
        json!({"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}),
        merged(zero(3), &json!({})),
    ] {
        assert_eq!(train_ways(2, &settings), train_ways(1, &settings), "{settings}");
    }
}
