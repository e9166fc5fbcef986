//! A model with explicit casts computes the same as on the plain backend: autocast adds no casts.
//!
//! The references are computed in the test, because recorded bits would differ between machines.
//! The weights that a rank uses in a step are copied into the same model
//! - on Burn's own backend, where the evaluation loss must be the same;
//! - on the training backend of a thread without an engine, where the training loss and, for one
//!   rank, the gradients must be the same. (Autodiff decomposes norms, so this loss differs from
//!   the evaluation loss.)

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    PositionalEncoding, PositionalEncodingConfig,
};
use burn::optim::GradientsParams;
use burn::tensor::activation::gelu;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::Flex;
use deepburn::BoxError;

use crate::harness::Precision::{Bf16, Fp16};
use crate::harness::{
    Inner, Job, Network, Precision, SEED, STEPS, Trained, Trainer, on_ranks, seeded,
};
use crate::samples::Samples;
use crate::weights::{Replaced, Value, values};

const VOCABULARY: usize = 11;
const LENGTH: usize = 4;
const WIDTH: usize = 6;

/// A transformer that casts its inputs and position encodings to the type of its weights, and
/// computes its loss in f32.
#[derive(Module, Debug)]
pub(crate) struct CastByHand<B: Backend> {
    tokens: Embedding<B>,
    positions: PositionalEncoding<B>,
    extra: Linear<B>,
    norm: LayerNorm<B>,
    attention: MultiHeadAttention<B>,
    up: Linear<B>,
    down: Linear<B>,
    head: Linear<B>,
}

impl<B: Backend> Network<B> for CastByHand<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: PositionalEncodingConfig::new(WIDTH)
                .with_max_sequence_size(LENGTH)
                .init(device),
            extra: LinearConfig::new(3, WIDTH).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            attention: MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0).init(device),
            up: LinearConfig::new(WIDTH, 7).init(device),
            down: LinearConfig::new(7, WIDTH).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn loss(&self, samples: &Samples) -> Tensor<B, 1> {
        let dtype = self.tokens.weight.val().dtype();
        let text = samples.integers::<B, 2>(VOCABULARY as u64, &[LENGTH]);
        let extra = samples.floats::<B, 3>(&[LENGTH, 3]).cast(dtype);
        let zeros = Tensor::<B, 3>::zeros([samples.len(), LENGTH, WIDTH], &text.device());
        let positions = self.positions.forward(zeros).cast(dtype);
        let x = self.tokens.forward(text.clone()) + positions + self.extra.forward(extra);
        let mixed = self.attention.forward(MhaInput::self_attn(self.norm.forward(x.clone())));
        let x = x + mixed.context;
        let x = x.clone() + self.down.forward(gelu(self.up.forward(x)));
        let logits = self.head.forward(x).cast(DType::F32).flatten::<2>(0, 1);
        let targets = text.flatten::<1>(0, 1);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets)
    }
}

crate::test_model!(cast_by_hand, CastByHand);

/// The inputs and results of an engine's step.
struct Taken {
    /// The weights of the forward pass.
    weights: Vec<Value>,
    evaluated: f32,
    loss: f32,
    loss_scale: f64,
    /// The gradients of the scaled loss, in module order.
    gradients: Vec<TensorData>,
}

fn take_step(engine: &mut Trainer<CastByHand<Trained>>) -> Result<Taken, BoxError> {
    let (rank, world_size) = (engine.rank(), engine.group().world_size());
    let samples = Samples::of_step(engine.global_steps(), rank, world_size);
    let (weights, evaluated) =
        engine.evaluate(|model| (values(model), model.loss(&samples).into_scalar()))?;
    let loss = engine.forward(|model| model.loss(&samples))?;
    let value = loss.clone().into_scalar();
    let loss_scale = engine.loss_scale();
    engine.backward(loss)?;
    let gradient = |path: &str| engine.states().gradient_data(path);
    let gradients = engine.parameters().iter().map(|parameter| gradient(parameter.path()));
    let gradients: Vec<Option<TensorData>> = gradients.collect::<Result<_, _>>()?;
    engine.step()?;
    let gradients = gradients.into_iter().flatten().collect();
    Ok(Taken { weights, evaluated, loss: value, loss_scale, gradients })
}

/// Returns the model on `B` with the given weights.
fn with_weights<B: Backend>(weights: &[Value]) -> CastByHand<B> {
    seeded::<B, CastByHand<B>>(SEED).map(&mut Replaced(weights.iter()))
}

/// Returns the loss of plain autodiff and the gradients of the scaled loss, as f32, in module
/// order.
fn by_plain_autodiff(taken: &Taken, samples: &Samples) -> (f32, Vec<TensorData>) {
    let model = with_weights::<Trained>(&taken.weights);
    let loss = model.loss(samples);
    let value = loss.clone().into_scalar();
    let gradients = loss.mul_scalar(taken.loss_scale).backward();
    let gradients = GradientsParams::from_grads(gradients, &model);
    let mut reader = Gradients { gradients, read: vec![] };
    model.visit(&mut reader);
    (value, reader.read)
}

struct Gradients {
    gradients: GradientsParams,
    read: Vec<TensorData>,
}

impl ModuleVisitor<Trained> for Gradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Trained, D>>) {
        let gradient = self.gradients.get::<Inner, D>(param.id);
        let gradient = gradient.expect("every parameter is used");
        self.read.push(gradient.into_data().convert::<f32>());
    }
}

/// The largest allowed difference of an embedding's gradient, relative to its largest element.
///
/// If a token occurs several times, its rows are added in f32 and rounded once, while the plain
/// backend rounds each sum to 16 bits. A batch contains a token about six times, and bf16 rounds by
/// up to 0.4 %.
const ROWS_TOLERANCE: f32 = 0.02;

#[track_caller]
fn assert_gradients(taken: &Taken, plain: &[TensorData], what: &str) {
    assert_eq!(taken.gradients.len(), plain.len(), "{what}");
    for (((path, _), taken), plain) in taken.weights.iter().zip(&taken.gradients).zip(plain) {
        let taken = taken.clone().convert::<f32>();
        if path == "tokens.weight" {
            let largest = plain.iter::<f32>().fold(0.0, |largest, g| g.abs().max(largest));
            let mut pairs = taken.iter::<f32>().zip(plain.iter::<f32>());
            let near =
                pairs.all(|(taken, plain)| (taken - plain).abs() <= ROWS_TOLERANCE * largest);
            assert!(near, "gradient of {path}, {what}: {taken} is not {plain}");
        } else {
            assert!(taken == *plain, "gradient of {path}, {what}: {taken} is not {plain}");
        }
    }
}

fn computes_as_the_bare_backend(precision: Precision) {
    for (stage, ranks) in [(0, 1), (3, 1), (0, 3), (3, 3)] {
        let taken =
            on_ranks::<CastByHand<Trained>, _>(Job::new(precision, stage, ranks), SEED, |engine| {
                (0..STEPS).map(|_| take_step(engine)).collect::<Result<Vec<_>, _>>()
            });
        for (rank, steps) in taken.iter().enumerate() {
            for (step, taken) in steps.iter().enumerate() {
                let what = format!("step {step}, {precision:?}, stage {stage}, rank {rank}");
                let samples = Samples::of_step(step as u64, rank, ranks);
                let bare = with_weights::<Flex>(&taken.weights).loss(&samples).into_scalar();
                assert_eq!(taken.evaluated, bare, "evaluation, {what}");
                let (loss, gradients) = by_plain_autodiff(taken, &samples);
                assert_eq!(taken.loss, loss, "loss, {what}");
                if ranks == 1 {
                    assert_gradients(taken, &gradients, &what);
                }
            }
        }
    }
}

#[test]
fn a_bf16_model_that_casts_computes_as_on_the_bare_backend() {
    computes_as_the_bare_backend(Bf16);
}

#[test]
fn an_fp16_model_that_casts_computes_as_on_the_bare_backend() {
    computes_as_the_bare_backend(Fp16);
}
