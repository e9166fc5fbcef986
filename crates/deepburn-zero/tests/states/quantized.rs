//! Training beside frozen matrices in 8 or 4 bits, against the same training with their dequantized
//! elements.

use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, module::embedding};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{
    GatherPlan, Precision, PrecisionPlan, QuantizationPlan, QuantizedFormat, RecomputePolicy,
};
use deepburn_kernels::BlockFormat;
use deepburn_ops::{
    CrossEntropyOps, LinearOps, dequantize, linear, linear_cross_entropy, quantize,
};
use deepburn_zero::{
    Category, Group, ModelStates, Pass, Policy, Rates, StepOutcome, Training, ZeroError,
};

use crate::model::{STAGES, policy};

type Trained = Training<Flex>;

const VOCAB: usize = 70;
const WIDTH: usize = 33;

/// A language model with a frozen tied embedding, two frozen layers and trained factors of low
/// rank.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    table: Param<Tensor<B, 2>>,
    up: Param<Tensor<B, 2>>,
    a: Param<Tensor<B, 2>>,
    b: Param<Tensor<B, 2>>,
    down: Linear<B>,
    scale: Param<Tensor<B, 1>>,
}

fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next()).collect()
}

impl Net<Trained> {
    /// Returns the model. Its frozen matrices, except for the skipped one, have the values that are
    /// left after a quantization in `dequantized`.
    fn new(dequantized: Option<(BlockFormat, DType)>) -> Self {
        let matrix = |shape: [usize; 2], seed: u64, frozen: bool| {
            let data = TensorData::new(values(shape[0] * shape[1], seed), shape);
            let tensor = Tensor::<Flex, 2>::from_data(data, &FlexDevice);
            let tensor = match dequantized.filter(|_| frozen) {
                Some((format, dtype)) => {
                    let words = quantize::<Flex>(tensor.into_primitive().tensor(), format);
                    let elements = dequantize::<Flex>(words, format, shape.into(), dtype);
                    Tensor::from_primitive(burn::tensor::TensorPrimitive::Float(elements))
                }
                None => tensor,
            };
            let data = tensor.cast(DType::F32).into_data();
            let tensor = Tensor::<Trained, 2>::from_data(data, &FlexDevice);
            Param::from_tensor(tensor).set_require_grad(!frozen)
        };
        let mut down = LinearConfig::new(2 * WIDTH, WIDTH).with_bias(false).init(&FlexDevice);
        down.weight = matrix([2 * WIDTH, WIDTH], 5, true);
        Self {
            table: matrix([VOCAB, WIDTH], 1, true),
            up: matrix([WIDTH, 2 * WIDTH], 2, true),
            a: matrix([WIDTH, 3], 3, false),
            b: matrix([3, 2 * WIDTH], 4, false),
            down,
            scale: Param::from_tensor(Tensor::ones([WIDTH], &FlexDevice)).set_require_grad(false),
        }
    }
}

impl<B: LinearOps + CrossEntropyOps> Net<B> {
    fn loss(&self, ids: &[i64], fused: bool) -> Tensor<B, 1> {
        let device = &B::Device::default();
        let tensor = |ids: &[i64]| {
            Tensor::<B, 1, Int>::from_data(TensorData::new(ids.to_vec(), [ids.len()]), device)
        };
        let (from, to) = (tensor(&ids[..ids.len() - 1]), tensor(&ids[1..]));
        let rows = embedding(self.table.val(), from.unsqueeze::<2>()).squeeze_dim::<2>(0);
        let x = rows * self.scale.val().unsqueeze();
        let changed = linear(linear(x.clone(), self.a.val(), None), self.b.val(), None);
        let h = (linear(x.clone(), self.up.val(), None) + changed).tanh();
        let y = self.down.forward(h) + x;
        match fused {
            true => linear_cross_entropy(y, self.table.val(), to) / ids.len() as f64,
            false => {
                let logits = y.matmul(self.table.val().transpose()).cast(DType::F32);
                let picked = burn::tensor::activation::log_softmax(logits, 1);
                picked.gather(1, to.unsqueeze_dim(1)).mean().neg()
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Outcome {
    losses: Vec<f32>,
    weights: Vec<Vec<f32>>,
    norms: Vec<f64>,
    /// Bytes of parameters between two passes.
    parameters: usize,
}

fn train(
    ranks: usize,
    policy: &Policy,
    twin: Option<(BlockFormat, DType)>,
    fused: bool,
) -> Outcome {
    let ranks = run_ranks(ranks, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let rank = group.rank();
        let (mut net, mut states) = ModelStates::shard(Net::new(twin), policy.clone(), group)?;
        let mut outcome = Outcome {
            losses: vec![],
            weights: vec![],
            norms: vec![],
            parameters: states.ledger().usage(Category::Parameters).current,
        };
        for step in 0..3 {
            net = states.start_training_pass(net)?;
            let _context = states.enter(Some(Pass::Train));
            let ids: Vec<i64> =
                (0..9).map(|i| ((i * 7 + rank * 3 + step * 5) % VOCAB) as i64).collect();
            let loss = net.loss(&ids, fused);
            outcome.losses.push(loss.clone().into_scalar());
            states.start_backward();
            drop(loss.backward());
            states.finish_pass()?;
            match states.step(Rates { lr: 1e-2, betas: None }, 1.0, None)? {
                StepOutcome::Applied { gradient_norm } => outcome.norms.push(gradient_norm),
                StepOutcome::Overflow { parameter } => panic!("{parameter} overflows"),
            }
        }
        for index in 0..states.parameters().len() {
            let data = states.parameter_data(index)?;
            outcome.weights.push(data.iter::<f32>().collect());
        }
        Ok::<_, ZeroError>(outcome)
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}

const FORMATS: [(QuantizedFormat, BlockFormat); 3] = [
    (QuantizedFormat::Nf4, BlockFormat::Nf4 { double: false }),
    (QuantizedFormat::Nf4Double, BlockFormat::Nf4 { double: true }),
    (QuantizedFormat::Int8, BlockFormat::Int8),
];

fn quantized(policy: Policy, format: QuantizedFormat, skipped: &[&str]) -> Policy {
    let skipped = skipped.iter().map(|path| (*path).to_owned()).collect();
    Policy { quantization: Some(QuantizationPlan { format, skipped }), ..policy }
}

fn in_type(policy: Policy, compute: Precision) -> Policy {
    let precision = PrecisionPlan { compute, communication: compute, ..PrecisionPlan::FP32 };
    Policy { precision, ..policy }
}

#[test]
fn training_equals_that_with_the_dequantized_elements() {
    for (format, blocks) in FORMATS {
        for (compute, dtype) in [(Precision::Fp32, DType::F32), (Precision::Bf16, DType::BF16)] {
            for ranks in [1, 2, 3] {
                let mut first = None;
                for stage in STAGES {
                    let plain = in_type(policy(stage), compute);
                    let what = format!("{format:?} {compute:?} {stage:?} {ranks} ranks");
                    let found = train(ranks, &quantized(plain.clone(), format, &[]), None, false);
                    let twin = train(ranks, &plain, Some((blocks, dtype)), false);
                    assert_eq!(found.losses, twin.losses, "{what}");
                    assert_eq!(found.norms, twin.norms, "{what}");
                    assert_eq!(found.weights, twin.weights, "{what}");
                    assert!(found.parameters < twin.parameters, "{what}");
                    let same = Outcome { parameters: 0, ..found };
                    assert_eq!(*first.get_or_insert(same.clone()), same, "{what}");
                }
            }
        }
    }
}

/// A frozen base in 4 bits beside trained factors, in shard groups and with secondary shards.
#[test]
fn meshes_give_the_same_bits_at_every_stage() {
    for compute in [Precision::Fp32, Precision::Bf16] {
        let run = |policy: Policy| {
            let policy = in_type(policy, compute);
            let found = train(4, &quantized(policy, QuantizedFormat::Nf4Double, &[]), None, false);
            Outcome { parameters: 0, ..found }
        };
        let grouped = |stage| run(Policy { shard_size: Some(2), ..policy(stage) });
        let first = grouped(STAGES[0]);
        for stage in &STAGES[1..] {
            assert_eq!(grouped(*stage), first, "{compute:?} {stage:?}");
        }
        let mut secondary = policy(STAGES[3]);
        secondary.zero.parameters.secondary_partition_size = Some(2);
        assert_eq!(run(secondary), run(policy(STAGES[3])), "{compute:?}");
    }
}

/// The gradient of a fused head is added in another order, panel by panel.
#[test]
fn a_fused_head_is_close_and_the_same_at_every_stage() {
    for ranks in [1, 3] {
        let mut first = None;
        for stage in STAGES {
            let (format, blocks) = FORMATS[0];
            let found = train(ranks, &quantized(policy(stage), format, &[]), None, true);
            let twin = train(ranks, &policy(stage), Some((blocks, DType::F32)), true);
            for (found, twin) in found.losses.iter().zip(&twin.losses) {
                // Three steps of f32 sums of 70 products.
                assert!((found - twin).abs() < 1e-5, "{found} {twin}");
            }
            let same = Outcome { parameters: 0, ..found };
            assert_eq!(*first.get_or_insert(same.clone()), same);
        }
    }
}

#[test]
fn recomputation_and_limits_of_gathering_change_nothing() {
    let (format, _) = FORMATS[1];
    let stage = deepburn_config::Stage::Parameters;
    let plain = quantized(policy(stage), format, &[]);
    let expected = train(2, &plain, None, true);
    for recompute in [RecomputePolicy::Full, RecomputePolicy::Selective] {
        let mut changed = plain.clone();
        changed.activations.recompute = recompute;
        assert_eq!(train(2, &changed, None, true), expected, "{recompute:?}");
    }
    for (limit, threshold) in [(0, 0), (300, 100_000)] {
        let mut changed = plain.clone();
        changed.zero.parameters = GatherPlan {
            prefetch_bucket_size: limit,
            max_live_parameters: limit,
            max_reuse_distance: limit,
            persistence_threshold: threshold,
            ..changed.zero.parameters
        };
        let found = train(2, &changed, None, true);
        assert_eq!(found.weights, expected.weights);
        assert_eq!(found.losses, expected.losses);
    }
}

#[test]
fn the_ledger_counts_blocks() {
    let trained = WIDTH * 3 + 3 * 2 * WIDTH + WIDTH;
    let matrices = [VOCAB * WIDTH, WIDTH * 2 * WIDTH, 2 * WIDTH * WIDTH];
    for (format, blocks) in FORMATS {
        for (skipped, kept) in [(vec![], 0), (vec!["up"], 1)] {
            let words = |numel: usize| blocks.words(numel);
            let whole = train(1, &quantized(policy(STAGES[0]), format, &skipped), None, true);
            let stored: Vec<usize> = matrices
                .iter()
                .enumerate()
                .map(|(index, numel)| if index == 1 && kept == 1 { *numel } else { words(*numel) })
                .collect();
            let expected: usize = stored.iter().sum();
            assert_eq!(whole.parameters, 4 * (trained + expected), "{format:?} {skipped:?}");
            let sharded = train(3, &quantized(policy(STAGES[3]), format, &skipped), None, true);
            let shards: usize = stored.iter().map(|len| len.div_ceil(3)).sum();
            let own: usize =
                [WIDTH * 3, 3 * 2 * WIDTH, WIDTH].iter().map(|it| it.div_ceil(3)).sum();
            assert_eq!(sharded.parameters, 4 * (own + shards), "{format:?} {skipped:?}");
        }
    }
}

#[test]
fn trained_matrices_and_vectors_are_not_quantized() {
    let ranks = run_ranks(1, Duration::from_secs(60), |member| {
        let policy = quantized(policy(STAGES[3]), QuantizedFormat::Nf4, &["table"]);
        let (_net, states) =
            ModelStates::shard(Net::new(None), policy, Group::<Flex>::new(member))?;
        let quantized = states.parameters().iter().filter(|it| it.is_quantized());
        Ok::<_, ZeroError>(quantized.map(|it| it.path().to_owned()).collect::<Vec<_>>())
    });
    assert_eq!(ranks.unwrap_or_else(|failure| panic!("{failure}")), [["up", "down.weight"]]);
}
