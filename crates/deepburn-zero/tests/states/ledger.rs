//! Tests that the ledger counts float, int and bool tensors and casts as activations until they are
//! dropped, and that gathered parameters are freed with their engine.

use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, Tolerance};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::Stage;
use deepburn_ops::{GateFunction, gated, gated_joint, gelu_tanh, linear};
use deepburn_zero::{Category, Group, ModelStates, Pass, Training, ZeroError};

use crate::model;

type Trained = Training<Flex>;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    layer: Linear<B>,
}

/// Runs `body` on one rank. Its argument is a function that returns the current bytes of
/// activations.
fn with_ledger(body: impl Fn(&dyn Fn() -> usize) + Sync) {
    let ranks = run_ranks(1, Duration::from_secs(60), |member| {
        let net = Net::<Trained> { layer: LinearConfig::new(2, 2).init(&FlexDevice) };
        let (_net, states) =
            ModelStates::shard(net, model::policy(Stage::Disabled), Group::<Flex>::new(member))?;
        let _context = states.enter(Some(Pass::Train));
        let ledger = states.ledger();
        body(&|| ledger.usage(Category::Activations).current);
        assert_eq!(ledger.usage(Category::Activations).current, 0, "all tensors are gone");
        Ok::<_, ZeroError>(())
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn ints_and_bools_count() {
    with_ledger(|held| {
        let ints = Tensor::<Trained, 1, Int>::arange(0..100, &FlexDevice);
        let size = ints.dtype().size();
        assert_eq!(held(), 100 * size);
        let bools = ints.clone().greater_elem(50);
        assert_eq!(held(), 100 * size + 100 * bools.dtype().size());
        drop(ints);
        assert_eq!(held(), 100 * bools.dtype().size());
    });
}

#[test]
fn a_view_counts_once_and_keeps_its_data() {
    with_ledger(|held| {
        let ints = Tensor::<Trained, 1, Int>::arange(0..100, &FlexDevice);
        let bytes = held();
        let view = ints.reshape([10, 10]).swap_dims(0, 1).slice([0..2, 0..3]);
        assert_eq!(held(), bytes);
        drop(view);
        assert_eq!(held(), 0);
        let floats = Tensor::<Trained, 1>::zeros([100], &FlexDevice);
        let view = floats.reshape([10, 10]).slice([0..2, 0..3]);
        assert_eq!(held(), 400);
        drop(view);
    });
}

#[test]
fn a_cast_is_data_of_its_own() {
    with_ledger(|held| {
        let floats = Tensor::<Trained, 1>::zeros([100], &FlexDevice);
        let halves = floats.clone().cast(DType::BF16);
        assert_eq!(held(), 400 + 200);
        let same = floats.clone().cast(DType::F32);
        assert_eq!(held(), 400 + 200, "a cast to the same type is the same data");
        drop((floats, same));
        assert_eq!(held(), 200);
        drop(halves);
    });
}

/// A linear layer computes the output of an activation function again in backward, also if two
/// layers read it. Its gradients show that it gets the same values.
#[test]
fn the_output_of_an_activation_function_is_not_kept() {
    const ROWS: usize = 64;
    const WIDTH: usize = 6;
    type Matrix = Tensor<Trained, 2>;
    type Function = fn(Matrix) -> Matrix;
    let functions: [(usize, Function); 3] = [
        (WIDTH, gelu_tanh),
        (2 * WIDTH, |joint| gated_joint(joint, GateFunction::Silu)),
        // Both operands share memory.
        (WIDTH, |gate| gated(gate.clone(), gate, GateFunction::GeluTanh)),
    ];
    let values = |shape: [usize; 2]| {
        let value = |i: usize| (i as f32 * 0.7).sin();
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(value).collect();
        Matrix::from_data(TensorData::new(values, shape), &FlexDevice)
    };
    with_ledger(|held| {
        for (columns, function) in functions {
            let x = values([ROWS, 3]);
            let up = values([3, columns]).require_grad();
            let [down, other] = [1, 2].map(|out| values([WIDTH, out]).require_grad());
            let before = held();
            let hidden = function(linear(x.clone(), up.clone(), None));
            let inner = hidden.clone().inner();
            let outputs =
                [&down, &other].map(|weight| linear(hidden.clone(), weight.clone(), None));
            let sum = outputs.map(Tensor::sum).into_iter().reduce(|sum, next| sum + next).unwrap();
            drop(hidden);
            let expected = inner.clone().sum_dim(0).transpose();
            let all = (ROWS * columns + ROWS * WIDTH) * size_of::<f32>();
            let small = (expected.shape().num_elements() + 3) * size_of::<f32>();
            assert!((all..=all + small).contains(&(held() - before)), "{columns}");
            drop(inner);
            assert!(held() - before < all, "only the input of the function is kept");
            let gradients = sum.backward();
            for weight in [&down, &other] {
                let gradient = weight.grad(&gradients).unwrap();
                let columns = gradient.dims()[1];
                gradient.into_data().assert_approx_eq::<f32>(
                    &expected.clone().repeat_dim(1, columns).into_data(),
                    Tolerance::absolute(1e-4),
                );
            }
            drop(gradients);
            drop((expected, sum));
            assert_eq!(held(), before);
        }
    });
}

/// Returns the bytes of gathered parameters after a pass that keeps both parameters of a layer, and
/// after the engine is dropped.
fn gathered_bytes(ranks: usize) -> Vec<[usize; 2]> {
    let ranks = run_ranks(ranks, Duration::from_secs(60), |member| {
        let net = Net::<Trained> { layer: LinearConfig::new(2, 2).init(&FlexDevice) };
        let policy = model::policy(Stage::Parameters);
        let (mut net, states) = ModelStates::shard(net, policy, Group::<Flex>::new(member))?;
        let ledger = states.ledger().clone();
        let gathered = || ledger.usage(Category::Gathered).current;
        // The first pass records that each parameter is read twice. The second pass reads it once.
        for reads in [2, 1] {
            net = states.start_training_pass(net)?;
            let _context = states.enter(Some(Pass::Train));
            let mut activation = Tensor::<Trained, 2>::zeros([1, 2], &FlexDevice);
            for _ in 0..reads {
                activation = net.layer.forward(activation);
            }
        }
        let kept = gathered();
        drop(states);
        let left = gathered();
        drop(net);
        Ok::<_, ZeroError>([kept, left])
    });
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

#[test]
fn gathered_parameters_go_with_the_engine() {
    assert_eq!(gathered_bytes(2), [[(2 * 2 + 2) * size_of::<f32>(), 0]; 2]);
}

#[test]
fn a_single_rank_counts_each_parameter_once() {
    assert_eq!(gathered_bytes(1), [[0, 0]]);
}
