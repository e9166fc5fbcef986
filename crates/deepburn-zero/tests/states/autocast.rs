//! Tests the element types of ops: results under autocast are compared with types recorded from
//! PyTorch, and gradients must have the types of their operands.
//!
//! `data/autocast_types.json` is the output of `data/autocast_types.py`, which describes how it was
//! created.

use std::collections::BTreeMap;
use std::time::Duration;

use burn::module::Module;
use burn::nn::interpolate::{Interpolate2dConfig, InterpolateMode};
use burn::nn::{GroupNormConfig, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::module::{
    adaptive_avg_pool1d, adaptive_avg_pool2d, attention, avg_pool1d, avg_pool2d, conv_transpose1d,
    conv_transpose2d, conv_transpose3d, conv1d, conv2d, conv3d, embedding, linear, max_pool1d,
    max_pool2d,
};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn::tensor::{DType, Int, Tensor, activation};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{Precision, PrecisionPlan, Stage};
use deepburn_zero::{Group, ModelStates, Pass, Policy, Training};

use crate::model;

pub(crate) type Trained = Training<Flex>;
type T1 = Tensor<Trained, 1>;
type T2 = Tensor<Trained, 2>;

fn x<const D: usize>(shape: [usize; D], dtype: DType) -> Tensor<Trained, D> {
    Tensor::<Trained, D>::full(shape, 0.5, &FlexDevice).cast(dtype)
}

fn indices<const D: usize>(shape: [usize; D]) -> Tensor<Trained, D, Int> {
    Tensor::zeros(shape, &FlexDevice)
}

#[derive(Module, Debug)]
pub(crate) struct Net<B: Backend> {
    layer: Linear<B>,
}

/// Runs `body` on one rank inside a call of a model with these precisions.
pub(crate) fn inside<R: Send>(
    precision: PrecisionPlan,
    body: impl Fn(&Net<Trained>) -> R + Sync,
) -> R {
    let policy = Policy { precision, ..model::policy(Stage::Disabled) };
    let results = run_ranks(1, Duration::from_secs(60), |member| {
        let net = Net { layer: LinearConfig::new(6, 6).init(&FlexDevice) };
        let (net, states) = ModelStates::shard(net, policy.clone(), Group::new(member))?;
        let _context = states.enter(Some(Pass::Train));
        Ok::<_, deepburn_zero::ZeroError>(body(&net))
    });
    results.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0)
}

pub(crate) const AUTOCAST: PrecisionPlan =
    PrecisionPlan { autocast: Some(Precision::Bf16), ..PrecisionPlan::FP32 };
const BF16: PrecisionPlan = PrecisionPlan { compute: Precision::Bf16, ..PrecisionPlan::FP32 };

/// An op: its name in the fixture, and a function that returns the type of its result for operands
/// of one type.
type Op = (&'static str, fn(DType) -> DType);

/// Defines one op per line; `$x` is an operand of shape `[4, 6]`.
macro_rules! ops {
    ($($name:literal: |$x:ident| $result:expr;)*) => {
        [$( ($name, |dtype| { let $x = |shape| x::<2>(shape, dtype); _ = &$x; $result.dtype() }), )*]
    };
}

const S: [usize; 2] = [4, 6];

fn elementwise() -> Vec<Op> {
    let ops: [Op; 51] = ops! {
        "matmul": |x| x(S).matmul(x([6, 4]));
        "add": |x| x(S) + x(S);
        "sub": |x| x(S) - x(S);
        "mul": |x| x(S) * x(S);
        "div": |x| x(S) / x(S);
        "cat": |x| Tensor::cat(vec![x(S), x(S)], 0);
        "where": |x| x(S).mask_where(x(S).greater_elem(0.1), x(S));
        "max_pair": |x| x(S).max_pair(x(S));
        "add_scalar": |x| x(S) + 1.0;
        "mul_scalar": |x| x(S) * 2.0;
        "pow_scalar": |x| x(S).powf_scalar(3.0);
        "pow_square": |x| x(S).square();
        "pow": |x| x(S).powf(x(S));
        "atan2": |x| x(S).atan2(x(S));
        "remainder_scalar": |x| x(S).remainder_scalar(0.3);
        "exp": |x| x(S).exp();
        "log": |x| x(S).log();
        "log1p": |x| x(S).log1p();
        "sqrt": |x| x(S).sqrt();
        "rsqrt": |x| x(S).sqrt().recip();
        "reciprocal": |x| x(S).recip();
        "tanh": |x| x(S).tanh();
        "sigmoid": |x| activation::sigmoid(x(S));
        "softplus": |x| activation::softplus(x(S), 1.0);
        "relu": |x| activation::relu(x(S));
        "leaky_relu": |x| activation::leaky_relu(x(S), 0.01);
        "gelu": |x| activation::gelu(x(S));
        "silu": |x| activation::silu(x(S));
        "erf": |x| x(S).erf();
        "sin": |x| x(S).sin();
        "cos": |x| x(S).cos();
        "tan": |x| x(S).tan();
        "sinh": |x| x(S).sinh();
        "cosh": |x| x(S).cosh();
        "asin": |x| x(S).asin();
        "acos": |x| x(S).acos();
        "atan": |x| x(S).atan();
        "asinh": |x| x(S).asinh();
        "acosh": |x| x(S).add_scalar(1.0).acosh();
        "atanh": |x| x(S).atanh();
        "abs": |x| x(S).abs();
        "neg": |x| x(S).neg();
        "sign": |x| x(S).sign();
        "round": |x| x(S).round();
        "floor": |x| x(S).floor();
        "ceil": |x| x(S).ceil();
        "clamp": |x| x(S).clamp(0.1, 0.2);
        "transpose": |x| x(S).transpose();
        "softmax": |x| activation::softmax(x(S), 1);
        "log_softmax": |x| activation::log_softmax(x(S), 1);
        "logsumexp": |x| x(S).exp().sum_dim(1).log();
    };
    ops.to_vec()
}

fn reductions() -> Vec<Op> {
    let ops: [Op; 19] = ops! {
        "sum": |x| x(S).sum();
        "sum_dim": |x| x(S).sum_dim(1);
        "prod": |x| x(S).prod();
        "prod_dim": |x| x(S).prod_dim(1);
        "cumsum": |x| x(S).cumsum(1);
        "cumprod": |x| x(S).cumprod(1);
        "cummax": |x| x(S).cummax(1);
        "max": |x| x(S).max();
        "max_dim": |x| x(S).max_dim(1);
        "min_dim": |x| x(S).min_dim(1);
        "norm": |x| x(S).square().sum().sqrt();
        "sort": |x| x(S).sort(1);
        "topk": |x| x(S).topk_with_indices(2, 1).0;
        "gather": |x| x(S).gather(1, indices([4, 2]));
        "index_select": |x| x(S).select(1, indices([2]));
        "mse_loss": |x| (x(S) - x(S)).square().mean();
        "l1_loss": |x| (x(S) - x(S)).abs().mean();
        "cross_entropy": |x| activation::log_softmax(x(S), 1).gather(1, indices([4, 1])).mean();
        "embedding": |x| embedding(x(S), indices([2, 3]));
    };
    ops.to_vec()
}

fn layers() -> Vec<Op> {
    vec![
        ("linear", |t| linear(x::<2>(S, t), x::<2>([6, 3], t), Some(x::<1>([3], t))).dtype()),
        ("matmul_batched", |t| x::<3>([2, 4, 6], t).matmul(x::<3>([2, 6, 4], t)).dtype()),
        ("conv1d", |t| {
            let options = ConvOptions::new([1], [0], [1], 1);
            conv1d(x::<3>([1, 2, 8], t), x::<3>([3, 2, 3], t), Some(x::<1>([3], t)), options)
                .dtype()
        }),
        ("conv2d", |t| {
            let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
            conv2d(x::<4>([1, 2, 8, 8], t), x::<4>([3, 2, 3, 3], t), None, options).dtype()
        }),
        ("conv3d", |t| {
            let options = ConvOptions::new([1; 3], [0; 3], [1; 3], 1);
            conv3d(x::<5>([1, 2, 4, 4, 4], t), x::<5>([3, 2, 3, 3, 3], t), None, options).dtype()
        }),
        ("conv_transpose1d", |t| {
            let options = ConvTransposeOptions::new([1], [0], [0], [1], 1);
            conv_transpose1d(x::<3>([1, 2, 8], t), x::<3>([2, 3, 3], t), None, options).dtype()
        }),
        ("conv_transpose2d", |t| {
            let options = ConvTransposeOptions::new([1; 2], [0; 2], [0; 2], [1; 2], 1);
            conv_transpose2d(x::<4>([1, 2, 4, 4], t), x::<4>([2, 3, 3, 3], t), None, options)
                .dtype()
        }),
        ("conv_transpose3d", |t| {
            let options = ConvTransposeOptions::new([1; 3], [0; 3], [0; 3], [1; 3], 1);
            let weight = x::<5>([2, 3, 3, 3, 3], t);
            conv_transpose3d(x::<5>([1, 2, 4, 4, 4], t), weight, None, options).dtype()
        }),
        ("scaled_dot_product_attention", |t| {
            let heads = || x::<4>([1, 2, 4, 6], t);
            attention(heads(), heads(), heads(), None, None, Default::default()).dtype()
        }),
        ("layer_norm", |t| {
            LayerNormConfig::new(6).init::<Trained>(&FlexDevice).forward(x::<2>(S, t)).dtype()
        }),
        ("group_norm", |t| {
            let norm = GroupNormConfig::new(2, 6).init::<Trained>(&FlexDevice);
            norm.forward(x::<3>([4, 6, 5], t)).dtype()
        }),
        ("max_pool1d", |t| max_pool1d(x::<3>([1, 2, 8], t), 2, 2, 0, 1, false).dtype()),
        ("max_pool2d", |t| {
            max_pool2d(x::<4>([1, 2, 8, 8], t), [2; 2], [2; 2], [0; 2], [1; 2], false).dtype()
        }),
        ("avg_pool1d", |t| avg_pool1d(x::<3>([1, 2, 8], t), 2, 2, 0, true, false).dtype()),
        ("avg_pool2d", |t| {
            avg_pool2d(x::<4>([1, 2, 8, 8], t), [2; 2], [2; 2], [0; 2], true, false).dtype()
        }),
        ("adaptive_avg_pool1d", |t| adaptive_avg_pool1d(x::<3>([1, 2, 8], t), 2).dtype()),
        ("adaptive_avg_pool2d", |t| adaptive_avg_pool2d(x::<4>([1, 2, 8, 8], t), [2, 2]).dtype()),
        ("interpolate_nearest", |t| {
            let resize = Interpolate2dConfig::new()
                .with_output_size(Some([4, 4]))
                .with_mode(InterpolateMode::Nearest)
                .init();
            resize.forward(x::<4>([1, 2, 8, 8], t)).dtype()
        }),
    ]
}

/// An op on operands of two types. The first operand has the type of the key.
type MixedOp = (&'static str, fn(DType, DType) -> DType);

fn mixed() -> Vec<MixedOp> {
    vec![
        ("mixed_matmul", |a, b| x::<2>(S, a).matmul(x::<2>([6, 4], b)).dtype()),
        ("mixed_linear", |a, b| linear(x::<2>(S, a), x::<2>([6, 3], b), None).dtype()),
        ("mixed_conv2d", |a, b| {
            let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
            conv2d(x::<4>([1, 2, 8, 8], a), x::<4>([3, 2, 3, 3], b), None, options).dtype()
        }),
        ("mixed_add", |a, b| (x::<2>(S, a) + x::<2>(S, b)).dtype()),
        ("mixed_sub", |a, b| (x::<2>(S, a) - x::<2>(S, b)).dtype()),
        ("mixed_mul", |a, b| (x::<2>(S, a) * x::<2>(S, b)).dtype()),
        ("mixed_div", |a, b| (x::<2>(S, a) / x::<2>(S, b)).dtype()),
        ("mixed_where", |a, b| {
            x::<2>(S, a).mask_where(x::<2>(S, a).greater_elem(0.1), x::<2>(S, b)).dtype()
        }),
        ("mixed_cat", |a, b| Tensor::cat(vec![x::<2>(S, a), x::<2>(S, b)], 0).dtype()),
        ("mixed_stack", |a, b| Tensor::stack::<3>(vec![x::<2>(S, a), x::<2>(S, b)], 0).dtype()),
        ("mixed_max_pair", |a, b| x::<2>(S, a).max_pair(x::<2>(S, b)).dtype()),
        ("mixed_pow", |a, b| x::<2>(S, a).powf(x::<2>(S, b)).dtype()),
        ("mixed_atan2", |a, b| x::<2>(S, a).atan2(x::<2>(S, b)).dtype()),
    ]
}

type Fixture = BTreeMap<String, BTreeMap<String, String>>;

fn fixture() -> Fixture {
    let text = include_str!("../data/autocast_types.json");
    let all: serde_json::Value = serde_json::from_str(text).unwrap();
    serde_json::from_value(all["cuda"].clone()).unwrap()
}

const TYPES: [(&str, DType); 2] = [("bf16", DType::BF16), ("f32", DType::F32)];

//= torch 2.9.0 amp/autocast_mode.py autocast
/// Compares each op with the fixture, with operands of one type and of two types.
#[test]
fn types_under_autocast_match_pytorch() {
    let fixture = fixture();
    let expected = |name: &str, key: &str| fixture[name][key].clone();
    let differing = inside(AUTOCAST, |_| {
        let mut differing = Vec::new();
        let mut compare = |name: &str, key: &str, found: DType| {
            if found.name() != expected(name, key) {
                differing.push(format!("{name} of {key}: {}", found.name()));
            }
        };
        for (name, op) in elementwise().into_iter().chain(reductions()).chain(layers()) {
            TYPES.iter().for_each(|(key, dtype)| compare(name, key, op(*dtype)));
        }
        for (name, op) in mixed() {
            let [(low, bf16), (high, f32)] = TYPES;
            compare(name, low, op(bf16, f32));
            compare(name, high, op(f32, bf16));
        }
        differing
    });
    assert_eq!(differing, Vec::<String>::new());
}

/// Tests intentional differences from PyTorch. Burn computes normalizations from means and the
/// binary cross-entropy from a log-sigmoid. These parts run in f32 here, and inside the op in
/// PyTorch.
#[test]
fn parts_of_norms_and_losses_are_in_f32() {
    let fixture = fixture();
    inside(AUTOCAST, |_| {
        for (name, found) in [
            ("mean", x::<2>(S, DType::BF16).mean().dtype()),
            ("mean_dim", x::<2>(S, DType::BF16).mean_dim(1).dtype()),
            ("log_sigmoid", activation::log_sigmoid(x::<2>(S, DType::BF16)).dtype()),
        ] {
            assert_eq!((fixture[name]["bf16"].as_str(), found), ("bf16", DType::F32));
        }
    });
}

#[test]
fn autocast_ends_with_the_call() {
    inside(BF16, |_| {
        assert_eq!(x::<2>(S, DType::BF16).exp().dtype(), DType::BF16);
        assert_eq!(x::<2>(S, DType::F32).matmul(x([6, 4], DType::F32)).dtype(), DType::F32);
    });
}

#[test]
fn an_f32_input_takes_the_type_of_a_16_bit_layer() {
    inside(BF16, |net| {
        assert_eq!(net.layer.weight.val().dtype(), DType::BF16);
        assert_eq!(net.layer.forward(x::<2>(S, DType::F32)).dtype(), DType::BF16);
        // A product of activations has no parameter that determines its type.
        let product = x::<2>(S, DType::F32).matmul(x::<2>([6, 4], DType::BF16));
        assert_eq!(product.dtype(), DType::F32);
        // A sum with a parameter does not follow the parameter either.
        let weight = net.layer.weight.val();
        assert_eq!((weight.transpose() + x::<2>([6, 6], DType::F32)).dtype(), DType::F32);
    });
}

#[test]
fn gradients_have_the_types_of_their_operands() {
    let types = |input: T2, weight: T2, bias: T1, loss: fn(T2, T2, T1) -> T1| {
        let [input, weight] = [input, weight].map(Tensor::require_grad);
        let bias = bias.require_grad();
        let loss = loss(input.clone(), weight.clone(), bias.clone());
        let grads = loss.cast(DType::F32).backward();
        [
            input.grad(&grads).unwrap().dtype(),
            weight.grad(&grads).unwrap().dtype(),
            bias.grad(&grads).unwrap().dtype(),
        ]
    };
    for precision in [BF16, AUTOCAST] {
        inside(precision, |_| {
            for input in [DType::F32, DType::BF16] {
                for weight in [DType::F32, DType::BF16] {
                    let found = types(
                        x([4, 6], input),
                        x([6, 3], weight),
                        x([3], DType::F32),
                        |input, weight, bias| {
                            let y = activation::gelu(input.clone()).matmul(weight);
                            (activation::softmax(y, 1) * bias.unsqueeze()).sum() + input.mean()
                        },
                    );
                    assert_eq!(found, [input, weight, DType::F32]);
                }
            }
        });
    }
}
