//! Tests optimizers that depend on whole tensors (LAMB and Muon) against references in f64.

use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::{
    AdamPlan, GroupRate, GroupUpdate, LambPlan, MuonPlan, MuonScale, NoDecay, OptimizerOffload,
    OptimizerPlan, ParamGroup, ParamGroups, PathPattern, Stage,
};
use deepburn_zero::{Category, Group, ModelStates, Parameter, Policy, Rates, ZeroError};

use crate::model::{LAMB, MUON, STAGES, Trained, policy};

const STEPS: usize = 200;

/// A module with wide, tall and square matrices, a fused projection, filters, an embedding and an
/// output layer.
#[derive(Module, Debug)]
struct Layers<B: Backend> {
    tokens: Embedding<B>,
    wide: Linear<B>,
    tall: Linear<B>,
    qkv: Linear<B>,
    column: Linear<B>,
    filters: Conv2d<B>,
    output: Linear<B>,
}

impl<B: Backend> Layers<B> {
    fn new() -> Self {
        let device = &B::Device::default();
        Self {
            tokens: EmbeddingConfig::new(6, 4).init(device),
            wide: LinearConfig::new(5, 7).init(device),
            tall: LinearConfig::new(9, 2).with_bias(false).init(device),
            qkv: LinearConfig::new(4, 12).init(device),
            column: LinearConfig::new(3, 5).with_layout(LinearLayout::Col).init(device),
            filters: Conv2dConfig::new([2, 3], [2, 2]).init(device),
            output: LinearConfig::new(7, 3).init(device),
        }
    }

    /// Returns a loss with known gradients: the sum of all parameters times the numbers of `step`.
    fn loss(&self, step: usize) -> Tensor<B, 1> {
        let mut loss = Products { step, place: 0, sum: Tensor::zeros([1], &B::Device::default()) };
        self.visit(&mut loss);
        loss.sum
    }
}

/// Returns whole numbers divided by 64, whose mean over three ranks is exact.
fn gradient(step: usize, place: usize, numel: usize) -> Vec<f32> {
    let mut state = (step * 100 + place) as u64;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as i64 % 81 - 40
    };
    next();
    (0..numel).map(|_| next() as f32 / 64.0).collect()
}

struct Products<B: Backend> {
    step: usize,
    place: usize,
    sum: Tensor<B, 1>,
}

impl<B: Backend> ModuleVisitor<B> for Products<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let value = param.val();
        let shape = value.shape();
        let numbers = gradient(self.step, self.place, shape.num_elements());
        let numbers = Tensor::<B, D>::from_data(TensorData::new(numbers, shape), &value.device());
        self.sum = self.sum.clone() + (value * numbers).sum();
        self.place += 1;
    }
}

/// A parameter before or after training.
#[derive(Debug, Clone, PartialEq)]
struct Weights {
    path: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// Returns the initial and final weights.
fn train(ranks: usize, policy: &Policy) -> [Vec<Weights>; 2] {
    let module = initial();
    let trained = run_ranks(ranks, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let (mut net, mut states) = ModelStates::shard(module.clone(), policy.clone(), group)?;
        let before = weights(&states)?;
        for step in 0..STEPS {
            net = states.start_training_pass(net)?;
            let loss = net.loss(step);
            states.start_backward();
            drop(loss.backward());
            states.finish_pass()?;
            let lr = policy.optimizer.lr() * (1.0 - step as f64 / (2 * STEPS) as f64);
            states.step(Rates { lr, betas: None }, 1.0, None)?;
        }
        Ok::<_, ZeroError>([before, weights(&states)?])
    });
    let mut trained = trained.unwrap_or_else(|failure| panic!("{failure}"));
    let first = trained.swap_remove(0);
    assert!(trained.iter().all(|other| *other == first), "ranks ended with different weights");
    first
}

/// Returns a module with the same initial values in all runs.
fn initial() -> Layers<Trained> {
    struct Fill(usize);
    impl burn::module::ModuleMapper<Trained> for Fill {
        fn map_float<const D: usize>(
            &mut self,
            param: Param<Tensor<Trained, D>>,
        ) -> Param<Tensor<Trained, D>> {
            self.0 += 1;
            let (id, tensor, mapper) = param.consume();
            let numbers = gradient(1000, self.0, tensor.shape().num_elements());
            let data = TensorData::new(numbers, tensor.shape());
            let tensor = Tensor::from_data(data, &FlexDevice).require_grad();
            Param::from_mapped_value(id, tensor, mapper)
        }
    }
    Layers::new().map(&mut Fill(0))
}

fn weights(states: &ModelStates<Flex>) -> Result<Vec<Weights>, ZeroError> {
    let of = |index: usize| {
        let data = states.parameter_data(index)?;
        Ok(Weights {
            path: states.parameters()[index].path().to_owned(),
            shape: states.parameters()[index].shape().to_vec(),
            values: data.iter::<f32>().collect(),
        })
    };
    (0..states.parameters().len()).map(of).collect()
}

/// Returns the largest difference between the weights and `expected`.
fn distance(weights: &[Weights], expected: &[Vec<f64>]) -> f64 {
    let pairs = weights.iter().zip(expected).flat_map(|(w, e)| w.values.iter().zip(e));
    pairs.map(|(found, expected)| (f64::from(*found) - expected).abs()).fold(0.0, f64::max)
}

/// The learning rate schedule of `train`.
fn rate(step: usize, lr: f64) -> f64 {
    lr * (1.0 - step as f64 / (2 * STEPS) as f64)
}

fn gradients(step: usize, place: usize, numel: usize) -> Vec<f64> {
    gradient(step, place, numel).into_iter().map(f64::from).collect()
}

/// Algorithm 2 of You et al. 2020 with DeepSpeed's bias correction.
fn lamb(plan: &LambPlan, start: &[Weights]) -> Vec<Vec<f64>> {
    let [beta1, beta2] = plan.betas;
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let train = |(place, weights): (usize, &Weights)| {
        let mut p: Vec<f64> = weights.values.iter().map(|x| f64::from(*x)).collect();
        let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
        for step in 0..STEPS {
            let g = gradients(step, place, p.len());
            let mut u = Vec::new();
            for i in 0..p.len() {
                m[i] = beta1 * m[i] + (1.0 - beta1) * g[i];
                v[i] = beta2 * v[i] + (1.0 - beta2) * g[i] * g[i];
                u.push(m[i] / (v[i].sqrt() + plan.eps) + plan.weight_decay * p[i]);
            }
            let t = step as i32 + 1;
            let correction = match plan.bias_correction {
                true => (1.0 - beta2.powi(t)).sqrt() / (1.0 - beta1.powi(t)),
                false => 1.0,
            };
            let ratio = match (norm(&p), norm(&u)) {
                (0.0, _) | (_, 0.0) => 1.0,
                (w, u) => (w / u).clamp(plan.trust_ratio[0], plan.trust_ratio[1]),
            };
            let rate = rate(step, plan.lr) * correction * ratio;
            p.iter_mut().zip(&u).for_each(|(p, u)| *p -= rate * u);
        }
        p
    };
    start.iter().enumerate().map(train).collect()
}

/// An f64 matrix in row-major order.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn new(rows: usize, columns: usize, at: impl Fn(usize, usize) -> f64) -> Self {
        let values = (0..rows * columns).map(|i| at(i / columns, i % columns)).collect();
        Self { rows, columns, values }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns + column]
    }

    fn transposed(&self) -> Self {
        Self::new(self.columns, self.rows, |row, column| self.at(column, row))
    }

    fn times(&self, other: &Self) -> Self {
        Self::new(self.rows, other.columns, |row, column| {
            (0..self.columns).map(|k| self.at(row, k) * other.at(k, column)).sum()
        })
    }

    /// Runs the Newton-Schulz iteration of Jordan et al. on a wide or square matrix.
    fn orthogonalized(&self, plan: &MuonPlan) -> Self {
        if self.rows > self.columns {
            return self.transposed().orthogonalized(plan).transposed();
        }
        let [a, b, c] = plan.newton_schulz.coefficients;
        let norm = self.values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut x = Self::new(self.rows, self.columns, |row, column| {
            self.at(row, column) / norm.max(plan.newton_schulz.eps)
        });
        for _ in 0..plan.newton_schulz.steps {
            let gram = x.times(&x.transposed());
            let square = gram.times(&gram);
            let polynomial = Self::new(gram.rows, gram.rows, |row, column| {
                b * gram.at(row, column) + c * square.at(row, column)
            });
            let change = polynomial.times(&x);
            x = Self::new(x.rows, x.columns, |row, column| {
                a * x.at(row, column) + change.at(row, column)
            });
        }
        x
    }
}

/// A linear map in a parameter.
struct Map {
    outputs: usize,
    inputs: usize,
    /// The strides between outputs and between inputs, in elements.
    strides: [usize; 2],
    /// The index of the first element.
    start: usize,
}

impl Map {
    fn place(&self, output: usize, input: usize) -> usize {
        self.start + output * self.strides[0] + input * self.strides[1]
    }
}

/// Returns the linear maps in a parameter of [`Layers`]. They are listed by hand, independently of
/// the library.
fn maps(path: &str) -> Vec<Map> {
    let inputs_first =
        |outputs, inputs, stride, start| Map { outputs, inputs, strides: [1, stride], start };
    match path {
        "wide.weight" => vec![inputs_first(7, 5, 7, 0)],
        "tall.weight" => vec![inputs_first(2, 9, 2, 0)],
        "column.weight" => vec![inputs_first(5, 3, 5, 0)],
        "qkv.weight" => (0..3).map(|part| inputs_first(4, 4, 12, 4 * part)).collect(),
        // The filters have two input channels of 2 x 2 elements.
        "filters.weight" => vec![Map { outputs: 3, inputs: 8, strides: [8, 1], start: 0 }],
        _ => Vec::new(),
    }
}

fn muon(plan: &MuonPlan, start: &[Weights]) -> Vec<Vec<f64>> {
    let train = |(place, weights): (usize, &Weights)| {
        let p: Vec<f64> = weights.values.iter().map(|x| f64::from(*x)).collect();
        let gradients = |step| gradients(step, place, weights.values.len());
        match maps(&weights.path) {
            maps if maps.is_empty() => {
                let decay = if weights.shape.len() == 1 { 0.0 } else { plan.adam.weight_decay };
                adamw(&AdamPlan { weight_decay: decay, ..plan.adam }, p, gradients)
            }
            maps => momentum(plan, p, &maps, gradients),
        }
    };
    start.iter().enumerate().map(train).collect()
}

fn momentum(
    plan: &MuonPlan,
    mut p: Vec<f64>,
    maps: &[Map],
    gradients: impl Fn(usize) -> Vec<f64>,
) -> Vec<f64> {
    let (beta, mut momentum) = (plan.momentum, vec![0.0; p.len()]);
    for step in 0..STEPS {
        let g = gradients(step);
        let lr = rate(step, plan.lr);
        let mut along = vec![0.0; p.len()];
        for i in 0..p.len() {
            momentum[i] = beta * momentum[i] + (1.0 - beta) * g[i];
            along[i] = beta * momentum[i] + (1.0 - beta) * g[i];
            p[i] -= lr * plan.weight_decay * p[i];
        }
        for map in maps {
            let Map { outputs, inputs, .. } = *map;
            let along =
                Matrix::new(outputs, inputs, |output, input| along[map.place(output, input)]);
            let turned = along.orthogonalized(plan);
            let scale = match plan.scale {
                MuonScale::Original => (outputs as f64 / inputs as f64).max(1.0).sqrt(),
                MuonScale::MatchRmsAdamw => 0.2 * (outputs.max(inputs) as f64).sqrt(),
            };
            for output in 0..outputs {
                for input in 0..inputs {
                    p[map.place(output, input)] -= lr * scale * turned.at(output, input);
                }
            }
        }
    }
    p
}

fn adamw(plan: &AdamPlan, mut p: Vec<f64>, gradients: impl Fn(usize) -> Vec<f64>) -> Vec<f64> {
    let [beta1, beta2] = plan.betas;
    let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
    for step in 0..STEPS {
        let (g, t) = (gradients(step), step as i32 + 1);
        let lr = rate(step, plan.lr);
        for i in 0..p.len() {
            p[i] *= 1.0 - lr * plan.weight_decay;
            m[i] = beta1 * m[i] + (1.0 - beta1) * g[i];
            v[i] = beta2 * v[i] + (1.0 - beta2) * g[i] * g[i];
            let root = (v[i] / (1.0 - beta2.powi(t))).sqrt() + plan.eps;
            p[i] -= lr * m[i] / (1.0 - beta1.powi(t)) / root;
        }
    }
    p
}

fn plan(optimizer: OptimizerPlan, stage: Stage) -> Policy {
    let param_groups = ParamGroups { groups: Vec::new(), no_decay: NoDecay::BiasesAndNorms };
    Policy { optimizer, param_groups, ..policy(stage) }
}

/// Checks that the weights after 200 steps are bitwise identical for every number of ranks and
/// stage, and returns them.
fn same_everywhere(optimizer: &OptimizerPlan) -> [Vec<Weights>; 2] {
    let alone = train(1, &plan(optimizer.clone(), Stage::Disabled));
    for ranks in 1..=4 {
        for stage in STAGES {
            let trained = train(ranks, &plan(optimizer.clone(), stage));
            assert_eq!(trained, alone, "{ranks} ranks at stage {stage:?}");
        }
    }
    let mut parked = plan(optimizer.clone(), Stage::Gradients);
    parked.zero.optimizer_states = OptimizerOffload::Host { sub_group_size: 5, ratio: 1.0 };
    assert_eq!(train(3, &parked), alone, "states in host memory");
    alone
}

/// A module with a lazy layer. Its value has the dimensions in another order than the module
/// reports.
#[derive(Module, Debug)]
struct Lazy<B: Backend> {
    column: Linear<B>,
    hidden: Linear<B>,
}

#[test]
fn a_lazy_column_major_layer_is_known_by_its_value() {
    let module = || {
        let column = LinearConfig::new(4, 12).with_bias(false).with_layout(LinearLayout::Col);
        // Burn's column-major layer is not an autodiff leaf before it is loaded, and gets no
        // gradient.
        let hidden = LinearConfig::new(4, 4).with_bias(false);
        Lazy::<Trained> { column: column.init(&FlexDevice), hidden: hidden.init(&FlexDevice) }
    };
    let sharded = |count: usize| {
        let update = GroupUpdate::Trained {
            rate: GroupRate::Factor(1.0),
            weight_decay: None,
            betas: None,
            muon_matrices: Some(count),
        };
        let column = PathPattern::new("column").unwrap();
        let groups = vec![ParamGroup { params: vec![column], dims: vec![2], update }];
        let mut policy = plan(OptimizerPlan::Muon(MUON), Stage::Parameters);
        policy.param_groups.groups = groups;
        run_ranks(2, Duration::from_secs(60), |member| {
            let (net, mut states) =
                ModelStates::shard(module(), policy.clone(), Group::<Flex>::new(member))?;
            let net = states.start_training_pass(net)?;
            let loss = net.column.weight.val().sum() + net.hidden.weight.val().sum();
            states.start_backward();
            drop(loss.backward());
            states.finish_pass()?;
            states.step(Rates { lr: 0.1, betas: None }, 1.0, None)?;
            Ok::<_, ZeroError>(())
        })
    };
    // The value has 12 outputs, although the module reports 4.
    sharded(3).unwrap_or_else(|failure| panic!("{failure}"));
    let message = sharded(5).unwrap_err().to_string();
    assert!(message.contains("divides its 12 outputs"), "{message}");
}

/// A module whose output layer comes before the embedding to which it is tied.
#[derive(Module, Debug)]
struct Tied<B: Backend> {
    decoder: Linear<B>,
    tokens: Embedding<B>,
    hidden: Linear<B>,
}

#[test]
fn an_embedding_stays_one_where_a_layer_is_tied_to_it() {
    let tokens: Embedding<Trained> = EmbeddingConfig::new(6, 4).init(&FlexDevice);
    let decoder = Linear { weight: tokens.weight.clone(), bias: None };
    let hidden = LinearConfig::new(4, 4).with_bias(false).init(&FlexDevice);
    let policy = plan(OptimizerPlan::Muon(MUON), Stage::Disabled);
    let kept = run_ranks(1, Duration::from_secs(60), |member| {
        let module =
            Tied { decoder: decoder.clone(), tokens: tokens.clone(), hidden: hidden.clone() };
        let (_, states) = ModelStates::shard(module, policy.clone(), Group::<Flex>::new(member))?;
        let kept = |p: &Arc<Parameter<Flex>>| (p.path().to_owned(), states.moments(p.index()));
        Ok::<_, ZeroError>(states.parameters().iter().map(kept).collect::<Vec<_>>())
    });
    let kept = kept.unwrap_or_else(|failure| panic!("{failure}")).swap_remove(0);
    let adam: &[&str] = &["exp_avg", "exp_avg_sq"];
    let expected =
        [("decoder.weight".to_owned(), adam), ("hidden.weight".to_owned(), &["momentum_buffer"])];
    assert_eq!(kept, expected);
}

#[test]
fn muon_needs_a_matrix_that_is_trained() {
    let policy = plan(OptimizerPlan::Muon(MUON), Stage::Gradients);
    let failed = run_ranks(2, Duration::from_secs(60), |member| {
        let mut module = initial();
        for layer in [&mut module.wide, &mut module.tall, &mut module.qkv, &mut module.column] {
            *layer = layer.clone().no_grad();
        }
        module.filters = module.filters.no_grad();
        ModelStates::shard(module, policy.clone(), Group::<Flex>::new(member)).map(|_| ())
    });
    let message = failed.unwrap_err().to_string();
    assert!(message.contains("Muon updates matrices of hidden layers"), "{message}");
}

/// Directions and whole matrices are counted in the ledger: a round of LAMB has at least its
/// largest direction, and a round of Muon a whole matrix and its workspace.
#[test]
fn directions_are_counted() {
    for optimizer in [OptimizerPlan::Lamb(LAMB), OptimizerPlan::Muon(MUON)] {
        for (ranks, stage) in [(1, Stage::Disabled), (2, Stage::Gradients), (3, Stage::Parameters)]
        {
            let policy = plan(optimizer.clone(), stage);
            let module = initial();
            let held = run_ranks(ranks, Duration::from_secs(60), |member| {
                let group = Group::<Flex>::new(member);
                let (net, mut states) = ModelStates::shard(module.clone(), policy.clone(), group)?;
                let net = states.start_training_pass(net)?;
                let loss = net.loss(0);
                states.start_backward();
                drop(loss.backward());
                states.finish_pass()?;
                states.ledger().reset_peaks();
                states.step(Rates { lr: 0.1, betas: None }, 1.0, None)?;
                let usage = states.ledger().usage(Category::Buckets);
                let numel = |p: &Arc<Parameter<Flex>>| {
                    let is_direction = match &policy.optimizer {
                        OptimizerPlan::Muon(_) => !maps(p.path()).is_empty(),
                        _ => true,
                    };
                    if is_direction { p.numel() } else { 0 }
                };
                let numels: Vec<_> = states.parameters().iter().map(numel).collect();
                Ok::<_, ZeroError>((usage, numels))
            });
            for (usage, numels) in held.unwrap_or_else(|failure| panic!("{failure}")) {
                let what = format!("{ranks} ranks at stage {stage:?}: {usage:?}");
                assert_eq!(usage.current, 0, "{what}");
                let largest = numels.iter().copied().max().unwrap();
                let all: usize = numels.iter().sum();
                let (least, most) = match &policy.optimizer {
                    // Every rank has a whole matrix of a round, and the workspace of the one that
                    // it owns.
                    OptimizerPlan::Muon(_) => (largest, (ranks + 1 + 7) * largest + all),
                    _ if stage == Stage::Disabled => (largest, all),
                    _ => (largest.div_ceil(ranks), all),
                };
                assert!((4 * least..=4 * most).contains(&usage.peak), "{what}, {least} to {most}");
            }
        }
    }
}

#[test]
fn lamb_follows_a_reference_in_f64_on_any_number_of_ranks() {
    let corrected = LAMB;
    let uncorrected = LambPlan { bias_correction: false, weight_decay: 0.0, ..LAMB };
    for rule in [corrected, uncorrected] {
        let mut optimizer = plan(OptimizerPlan::Lamb(rule), Stage::Disabled);
        optimizer.param_groups = ParamGroups::default();
        let [start, end] = train(1, &optimizer);
        let found = distance(&end, &lamb(&rule, &start));
        // The error comes from 200 steps of at most 1e-2 times the norm with a relative error of
        // about 1e-7, and from 200 roundings of numbers of about 1, which mostly cancel. The
        // observed error is 5e-7.
        assert!(found < 5e-6, "{found:e}");
    }
    same_everywhere(&OptimizerPlan::Lamb(LAMB));
}

//= torch 2.9.0 optim/_muon.py _zeropower_via_newtonschulz
#[test]
fn muon_follows_a_reference_in_f64_on_any_number_of_ranks() {
    for scale in [MuonScale::Original, MuonScale::MatchRmsAdamw] {
        let rule = MuonPlan { scale, ..MUON };
        let [start, end] = train(1, &plan(OptimizerPlan::Muon(rule), Stage::Disabled));
        let found = distance(&end, &muon(&rule, &start));
        // The iteration multiplies small singular values and their rounding errors of 6e-8 by up to
        // 3.4445^5, about
        // 500. The errors of 200 steps of 1e-2 mostly cancel. The observed error is 8e-7.
        assert!(found < 5e-6, "{scale:?}: {found:e}");
    }
    same_everywhere(&OptimizerPlan::Muon(MUON));
}
