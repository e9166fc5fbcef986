//! Tests lazy parameters: only rank 0 initializes them, and all ranks start with its values.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::Stage;
use deepburn_zero::{Group, ModelStates, Training, ZeroError};

use crate::model::{STAGES, Trained, policy};

/// Counts the calls of all initializers.
type Drawn = Arc<AtomicUsize>;

fn numbers(count: usize, first: f32) -> Vec<f32> {
    (0..count).map(|number| number as f32 / 8.0 + first).collect()
}

/// Returns a lazy parameter whose values count up from `first`.
fn lazy<B: Backend, const D: usize>(
    drawn: &Drawn,
    shape: [usize; D],
    first: f32,
) -> Param<Tensor<B, D>> {
    let drawn = drawn.clone();
    let init = move |device: &B::Device, trained| {
        drawn.fetch_add(1, Ordering::SeqCst);
        let values = TensorData::new(numbers(shape.iter().product(), first), shape);
        Tensor::from_data(values, device).set_require_grad(trained)
    };
    Param::uninitialized(ParamId::new(), init, B::Device::default(), true, shape.into())
}

/// A module with one parameter for each difficult case of lazy initialization.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    odd: Param<Tensor<B, 2>>,
    tied: Param<Tensor<B, 2>>,
    frozen: Param<Tensor<B, 1>>,
    /// The initializer freezes this parameter, even if a trainable one is requested.
    stubborn: Param<Tensor<B, 1>>,
    /// The initializer returns another shape than the one that the parameter reports.
    turned: Param<Tensor<B, 2>>,
    order: Param<Tensor<B, 1, Int>>,
    empty: Param<Tensor<B, 1>>,
}

impl<B: Backend> Net<B> {
    fn new(drawn: &Drawn) -> Self {
        let odd = lazy(drawn, [3, 5], 0.0);
        let order = |device: &B::Device, _| Tensor::from_ints([2, 0, 1], device);
        let device = B::Device::default();
        Self {
            tied: odd.clone(),
            odd,
            frozen: lazy(drawn, [7], 100.0).set_require_grad(false),
            stubborn: lazy(drawn, [3], 200.0)
                .init_mapper(|it: Tensor<B, 1>| it.set_require_grad(false)),
            turned: lazy(drawn, [2, 5], 300.0)
                .init_mapper(|it: Tensor<B, 2>| it.transpose().detach().require_grad()),
            order: Param::uninitialized(ParamId::new(), order, device, false, [3].into()),
            empty: lazy(drawn, [0], 0.0),
        }
    }
}

fn ranks<T: Send>(
    count: usize,
    body: impl Fn(Group<Flex>) -> Result<T, ZeroError> + Sync,
) -> Vec<T> {
    let ranks =
        run_ranks(count, Duration::from_secs(60), |member| body(Group::<Flex>::new(member)));
    ranks.unwrap_or_else(|failure| panic!("{failure}"))
}

/// The path and shape of each parameter, whether it is trained, and its values.
type Found = Vec<(String, Vec<usize>, bool, Vec<f32>)>;

fn found(states: &ModelStates<Flex>) -> Result<Found, ZeroError> {
    let parameters = states.parameters().iter().enumerate();
    let found = parameters.map(|(index, parameter)| {
        let values = states.parameter_data(index)?.iter::<f32>().collect();
        let (path, shape) = (parameter.path().to_owned(), parameter.shape().to_vec());
        Ok((path, shape, parameter.is_trainable(), values))
    });
    found.collect()
}

fn expected() -> Found {
    let turned = numbers(10, 300.0);
    let turned = (0..5).flat_map(|column| [turned[column], turned[column + 5]]).collect();
    let row = |path: &str, shape: &[usize], trained, values| {
        (path.to_owned(), shape.to_vec(), trained, values)
    };
    vec![
        row("odd", &[3, 5], true, numbers(15, 0.0)),
        row("frozen", &[7], false, numbers(7, 100.0)),
        row("stubborn", &[3], false, numbers(3, 200.0)),
        row("turned", &[5, 2], true, turned),
        row("empty", &[0], true, Vec::new()),
    ]
}

#[test]
fn rank_0_makes_every_value_and_all_ranks_start_from_it() {
    for (stage, world_size) in STAGES.into_iter().flat_map(|it| [(it, 1), (it, 2), (it, 3)]) {
        let drawn = Drawn::default();
        // Rank threads use clones of one module.
        let net = Net::<Trained>::new(&drawn);
        let results = ranks(world_size, |group| {
            let (net, states) = ModelStates::shard(net.clone(), policy(stage), group)?;
            states.start_saving_pass()?;
            let order: Vec<i64> = net.order.val().into_data().iter().collect();
            Ok((found(&states)?, order, net.stubborn.val().is_require_grad()))
        });
        for result in results {
            let case = format!("stage {stage:?}, {world_size} ranks");
            assert_eq!(result, (expected(), vec![2, 0, 1], false), "{case}");
        }
        // Each of the five parameters is initialized once. The tied twin is also initialized, as in
        // plain Burn.
        assert_eq!(drawn.load(Ordering::SeqCst), 6);
        assert!(!net.odd.is_initialized());
    }
}

#[test]
fn ranks_may_have_used_their_module_before() {
    let drawn = Drawn::default();
    for user in 0..2 {
        let results = ranks(2, |group| {
            let net = Net::<Trained>::new(&drawn);
            if group.rank() == user {
                drop((net.odd.val(), net.turned.val(), net.frozen.val()));
            }
            let (_net, states) = ModelStates::shard(net, policy(Stage::Parameters), group)?;
            states.start_saving_pass()?;
            found(&states)
        });
        assert_eq!(results, [expected(), expected()], "rank {user} has read its values");
    }
}

#[derive(Module, Debug)]
struct Layers<B: Backend> {
    first: Param<Tensor<B, 2>>,
    norm: BatchNorm<B>,
    column_major: Linear<B>,
}

/// The module is copied to find running statistics. The copy must not initialize any parameter.
#[test]
fn running_statistics_are_found_without_values() {
    let drawn = Drawn::default();
    let net = Layers::<Trained> {
        first: lazy(&drawn, [4, 4], 0.0),
        norm: BatchNormConfig::new(4).init(&FlexDevice),
        column_major: LinearConfig::new(4, 6).with_layout(LinearLayout::Col).init(&FlexDevice),
    };
    let results = ranks(3, |group| {
        let (net, states) = ModelStates::shard(net.clone(), policy(Stage::Parameters), group)?;
        states.start_saving_pass()?;
        let buffers: Vec<_> = states.buffers().iter().map(|it| it.path().to_owned()).collect();
        // Loading a record of this layer transposes its weight.
        let record = net.column_major.weight.transform_for_save();
        Ok((buffers, found(&states)?, record.shape().to_vec()))
    });
    for (buffers, values, saved) in &results {
        assert_eq!(*buffers, ["norm.running_mean", "norm.running_var"]);
        assert_eq!(*values, results[0].1);
        assert_eq!((&values[0].3, &saved[..]), (&numbers(16, 0.0), &[6, 4][..]));
        let weight = values.iter().find(|it| it.0 == "column_major.weight");
        assert_eq!(weight.unwrap().1, [4, 6]);
    }
    assert_eq!(drawn.load(Ordering::SeqCst), 1);
}

#[derive(Module, Debug)]
struct Two<B: Backend> {
    first: Param<Tensor<B, 1>>,
    second: Param<Tensor<B, 1>>,
}

#[test]
fn a_value_that_cannot_be_made_ends_all_ranks_with_its_name() {
    let drawn = Drawn::default();
    let new = || Two::<Training<Flex>> {
        first: lazy(&drawn, [3], 0.0),
        second: lazy(&drawn, [3], 0.0).init_mapper(|_: Tensor<_, 1>| panic!("disk unplugged")),
    };
    let failure = run_ranks(3, Duration::from_secs(60), |member| {
        ModelStates::shard(new(), policy(Stage::Parameters), Group::<Flex>::new(member)).map(drop)
    });
    let message = failure.unwrap_err().to_string();
    let named = "parameter second could not be initialized: disk unplugged";
    assert!(message.contains(named) && message.contains("rank 0"), "{message}");
}

/// Returns the error message of two ranks that have these two parameters.
fn difference(first: impl Fn(&Drawn, usize) -> Param<Tensor<Trained, 2>> + Sync) -> String {
    let failure = run_ranks(2, Duration::from_secs(60), |member| {
        let drawn = Drawn::default();
        let net = Layers::<Trained> {
            first: first(&drawn, member.rank()),
            norm: BatchNormConfig::new(4).init(&FlexDevice),
            column_major: LinearConfig::new(4, 6).init(&FlexDevice),
        };
        ModelStates::shard(net, policy(Stage::Parameters), Group::<Flex>::new(member)).map(drop)
    });
    failure.unwrap_err().to_string()
}

#[test]
fn shapes_that_differ_between_ranks_are_an_error() {
    let message = difference(|drawn, rank| {
        // The number of elements is the same, so a collective would not detect the difference.
        Param::initialized(ParamId::new(), lazy(drawn, [[2, 3], [3, 2]][rank], 0.0).val())
    });
    assert!(message.contains("first has shape [3, 2] here and [2, 3] on rank 0"), "{message}");
}

#[test]
fn lazy_shapes_that_differ_between_ranks_are_an_error() {
    let message = difference(|drawn, rank| lazy(drawn, [[2, 3], [3, 2]][rank], 0.0));
    assert!(message.contains("first has shape [3, 2] here and [2, 3] on rank 0"), "{message}");
}

#[test]
fn a_lazy_shape_is_compared_with_a_value_of_rank_0() {
    let message = difference(|drawn, rank| {
        let param = lazy(drawn, [[2, 3], [3, 3]][rank], 0.0);
        if rank == 0 {
            drop(param.val());
        }
        param
    });
    assert!(message.contains("first has shape [3, 3] here and [2, 3] on rank 0"), "{message}");
}

#[test]
fn a_parameter_frozen_on_one_rank_only_is_an_error() {
    let message = difference(|drawn, rank| {
        let value = lazy::<Trained, 2>(drawn, [2, 3], 0.0).val();
        Param::initialized(ParamId::new(), value).set_require_grad(rank == 0)
    });
    assert!(message.contains("first is frozen here and trained on rank 0"), "{message}");
}

/// A module with a list of layers and an optional head.
#[derive(Module, Debug)]
struct Deep<B: Backend> {
    layers: Vec<Linear<B>>,
    head: Option<Linear<B>>,
}

/// Returns the error message of three ranks with these numbers of layers, all of the same shape.
fn depth_difference(depths: [usize; 3], has_head: bool) -> String {
    let failure = run_ranks(3, Duration::from_secs(60), |member| {
        let layer = || LinearConfig::new(4, 4).init::<Trained>(&FlexDevice);
        let layers = (0..depths[member.rank()]).map(|_| layer()).collect();
        let net = Deep { layers, head: has_head.then(layer) };
        ModelStates::shard(net, policy(Stage::Parameters), Group::<Flex>::new(member)).map(drop)
    });
    failure.unwrap_err().to_string()
}

#[derive(Module, Debug)]
struct Normalized<B: Backend> {
    layer: Linear<B>,
    norms: Vec<BatchNorm<B>>,
}

#[test]
fn a_norm_on_one_rank_only_is_an_error() {
    let (one, none) = ("parameter norms.0.", "no further parameter");
    for (norms, has, where_first_has) in [([0, 1], one, none), ([1, 0], none, one)] {
        let failure = run_ranks(2, Duration::from_secs(60), |member| {
            let norm = |_| BatchNormConfig::new(4).init::<Trained>(&FlexDevice);
            let norms = (0..norms[member.rank()]).map(norm).collect();
            let layer = LinearConfig::new(4, 4).init(&FlexDevice);
            let net = Normalized { layer, norms };
            ModelStates::shard(net, policy(Stage::Parameters), Group::<Flex>::new(member)).map(drop)
        });
        let message = failure.unwrap_err().to_string();
        let (other, first) =
            message.split_once(" where rank 0 has ").expect("both ranks are named");
        assert!(other.contains("rank 1 has") && other.contains(has), "{message}");
        assert!(first.contains(where_first_has), "{message}");
    }
}

#[test]
fn depths_that_differ_between_ranks_are_an_error() {
    let same = "build the same module on all ranks";
    for (depths, has_head, expected) in [
        (
            [2, 2, 3],
            true,
            "rank 2 has parameter layers.2.weight where rank 0 has parameter head.weight",
        ),
        (
            [2, 1, 2],
            true,
            "rank 1 has parameter head.weight where rank 0 has parameter layers.1.weight",
        ),
        (
            [2, 3, 2],
            false,
            "rank 1 has parameter layers.2.weight where rank 0 has no further parameter",
        ),
        (
            [2, 2, 1],
            false,
            "rank 2 has no further parameter where rank 0 has parameter layers.1.weight",
        ),
    ] {
        let message = depth_difference(depths, has_head);
        assert!(message.contains(expected) && message.contains(same), "{message}");
    }
}
