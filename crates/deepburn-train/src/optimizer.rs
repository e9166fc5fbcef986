//! Compares the Learner's optimizer with the plan's.
//!
//! A Learner does not expose its optimizer, but it takes optimizer steps for any caller.
//! [`check_optimizer`] lets it take some steps on a copy of one parameter. Values and gradients are
//! chosen so that different hyper-parameters give different weights. The result is compared with
//! the published formula of the plan's optimizer.
//!
//! ```text
//! probe (copy of the Learner)  values ─► 16 optimizer steps in f32 ─► weights
//! reference (the plan)         values ─► 16 steps in f64           ─► weights
//! allowed difference           2e-4 of each weight's path, plus the rounding of f32
//! ```
//!
//! The probe is a clone, so the Learner's own optimizer keeps its state. Only element-wise
//! optimizers can be compared in this way.

use std::any::type_name;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use burn_train::{Learner, LearningComponentsTypes};
use deepburn::config::{AdamPlan, OptimizerPlan};
use deepburn::kernels::{
    Adagrad, Adam, Lion, Sgd, WeightDecay, adagrad_reference, adam_reference, lion_reference,
    sgd_reference,
};

use crate::refusal::Refusal;

/// The test weights, repeated over the parameter. A parameter with fewer elements is tested several
/// times, with consecutive parts of this table.
const VALUES: [f64; 10] = [1.0, 0.0, -1.0, 0.5, 1.0, 0.0, 0.25, -2.0, 0.125, -1.0];
/// The scales of the gradients, by weight. Each one reveals some hyper-parameters: zero shows
/// weight decay alone, small ones the value of eps, a large one gradient clipping. The last one has
/// an update that is much smaller than the weight and points away from zero, which shows cautious
/// weight decay.
const SCALES: [f64; 10] = [0.0, 1.0, 0.5, 1e-4, 1e-6, 1e-2, 30.0, -1.0, 1e6, 1e-9];
/// The factors of the gradients, by step. They fall, which reveals betas and momentum: a beta_2 of
/// 0.998 instead of 0.999 makes a difference of four times the tolerance, and so does a beta_1 of
/// 0.899 instead of 0.9. They end with zeros, during which second moments decay unless amsgrad
/// holds them.
const FACTORS: [f64; 16] =
    [4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];

/// The relative difference that is allowed in the path of a weight. In f32 arithmetic, 1 - 0.999
/// alone is off by 1 in 80,000; sixteen steps stay below 1 in 10,000.
const TOLERANCE: f64 = 2e-4;

/// The number of scheduler steps that are searched for the largest learning rate.
const MAX_SCHEDULE: usize = 10_000;

/// Returns an error if the Learner's optimizer updates weights differently from the plan's. `steps`
/// is the length of the schedule, whose largest learning rate is used.
///
/// Returns `Ok` without a comparison if the schedule never has a positive learning rate, or if the
/// model has no trainable parameter with elements.
///
/// # Errors
/// Returns [`Refusal::Optimizer`] with the first weight that differs, or
/// [`Refusal::NotElementwise`].
pub(crate) fn check_optimizer<LC: LearningComponentsTypes>(
    learner: &Learner<LC>,
    plan: &OptimizerPlan,
    steps: usize,
) -> Result<(), Refusal> {
    if matches!(
        plan,
        OptimizerPlan::Lamb(_)
            | OptimizerPlan::Muon(_)
            | OptimizerPlan::OneBitAdam(_)
            | OptimizerPlan::OneBitLamb(_)
            | OptimizerPlan::ZeroOneAdam(_)
    ) {
        return Err(Refusal::NotElementwise { plan: describe(plan) });
    }
    let refuse = |difference| Refusal::Optimizer {
        difference,
        plan: describe(plan),
        learner: short_name(type_name::<LC::Optimizer>()),
    };
    let Some(probe) = at_largest_rate(learner, steps) else { return Ok(()) };
    let mut chosen = Smallest::default();
    probe.model().visit(&mut chosen);
    let Some((id, count)) = chosen.found else { return Ok(()) };
    // A small parameter is tested with one part of the table after the other.
    let trials = (0..VALUES.len()).step_by(count);
    match trials.filter_map(|first| difference(probe.clone(), plan, id, count, first)).next() {
        Some(difference) => Err(refuse(difference)),
        None => Ok(()),
    }
}

/// Takes all steps with a parameter of `count` elements, whose values start at index `first` of
/// [`VALUES`], and describes the first difference between the Learner's result and the plan's.
///
/// The gradient of weight `i` in step `t` is `FACTORS[t] * SCALES[i]`.
fn difference<LC: LearningComponentsTypes>(
    mut probe: Learner<LC>,
    plan: &OptimizerPlan,
    id: ParamId,
    count: usize,
    first: usize,
) -> Option<String> {
    let from = |table: &[f64]| -> Vec<f64> {
        (first..first + count).map(|place| table[place % table.len()]).collect()
    };
    let (start, scales) = (from(&VALUES), from(&SCALES));
    let model = probe.model();
    // The other parameters have no gradient, so the optimizer does not change them.
    probe.load_model(model.map(&mut Assign { id, values: &start }).into_record());

    let rate = probe.lr_current();
    let mut expected = ReferenceWeights::new(plan, rate, start.clone());
    for factor in FACTORS {
        let gradient: Vec<f64> = scales.iter().map(|scale| factor * scale).collect();
        let mut gradients = Gradient { id, values: &gradient, gradients: GradientsParams::new() };
        probe.model().visit(&mut gradients);
        probe.optimizer_step(gradients.gradients);
        expected.step(&gradient);
    }
    let mut reader = ParameterReader { id, values: Vec::new() };
    probe.model().visit(&mut reader);
    let at = expected.differs(&reader.values)?;
    Some(format!(
        "At learning rate {}, {} steps take a weight from {} to {} with the plan's and to {} with the \
         Learner's.",
        rate as f32,
        FACTORS.len(),
        start[at],
        expected.values[at] as f32,
        reader.values[at] as f32
    ))
}

/// Returns a copy of the Learner at the largest learning rate of its schedule; `None` if that is 0.
///
/// The search ends after [`MAX_SCHEDULE`] steps. A larger learning rate makes differences between
/// optimizers larger, relative to rounding.
fn at_largest_rate<LC: LearningComponentsTypes>(
    learner: &Learner<LC>,
    steps: usize,
) -> Option<Learner<LC>> {
    let mut schedule = learner.clone();
    let (mut largest, mut at) = (0.0, 0);
    for step in 1..=steps.clamp(1, MAX_SCHEDULE) {
        schedule.lr_step();
        if schedule.lr_current() > largest {
            (largest, at) = (schedule.lr_current(), step);
        }
    }
    let mut probe = learner.clone();
    (0..at).for_each(|_| probe.lr_step());
    (at > 0).then_some(probe)
}

/// Weights that the plan's optimizer updates, in f64.
struct ReferenceWeights<'a> {
    /// The optimizer of the plan.
    plan: &'a OptimizerPlan,
    /// The learning rate of every step.
    rate: f64,
    /// The number of steps.
    time: u64,
    /// The weights.
    values: Vec<f64>,
    /// Up to two state arrays, initially zero.
    states: [Vec<f64>; 2],
    /// The length of each weight's path: the sum of its absolute changes.
    ways: Vec<f64>,
    /// The largest magnitude of each weight, which bounds its rounding errors.
    peaks: Vec<f64>,
}

impl<'a> ReferenceWeights<'a> {
    /// Starts with these weights and states of zero.
    fn new(plan: &'a OptimizerPlan, rate: f64, values: Vec<f64>) -> Self {
        let zeros = vec![0.0; values.len()];
        let peaks = values.iter().map(|value| value.abs()).collect();
        let states = [zeros.clone(), zeros.clone()];
        Self { plan, rate, time: 0, values, states, ways: zeros, peaks }
    }

    /// Takes one step with the published formula of the optimizer.
    fn step(&mut self, gradient: &[f64]) {
        let before = self.values.clone();
        self.time += 1;
        let (lr, values, [first, second]) = (self.rate, &mut self.values, &mut self.states);
        match *self.plan {
            OptimizerPlan::AdamW(adam) => {
                let rule = rule(adam, lr, WeightDecay::Decoupled(adam.weight_decay));
                adam_reference(&rule, self.time, values, gradient, first, second);
            }
            OptimizerPlan::Adam(adam) => {
                let rule = rule(adam, lr, WeightDecay::L2(adam.weight_decay));
                adam_reference(&rule, self.time, values, gradient, first, second);
            }
            OptimizerPlan::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
                let rule = Sgd { lr, momentum, dampening, weight_decay, nesterov };
                sgd_reference(&rule, self.time, values, gradient, first);
            }
            OptimizerPlan::Lion { betas: [beta1, beta2], weight_decay, .. } => {
                lion_reference(&Lion { lr, beta1, beta2, weight_decay }, values, gradient, first);
            }
            OptimizerPlan::Adagrad { eps, weight_decay, .. } => {
                adagrad_reference(&Adagrad { lr, eps, weight_decay }, values, gradient, first);
            }
            OptimizerPlan::Lamb(_)
            | OptimizerPlan::Muon(_)
            | OptimizerPlan::OneBitAdam(_)
            | OptimizerPlan::OneBitLamb(_)
            | OptimizerPlan::ZeroOneAdam(_) => {
                unreachable!("the plan was refused before")
            }
        }
        for (i, before) in before.iter().enumerate() {
            self.ways[i] += (self.values[i] - before).abs();
            self.peaks[i] = self.peaks[i].max(self.values[i].abs());
        }
    }

    /// Returns the index of the first weight that differs from `other` by more than the tolerance.
    ///
    /// The tolerance is relative to the path of a weight, not to the weight, so that a small update
    /// of a large weight still counts.
    fn differs(&self, other: &[f64]) -> Option<usize> {
        // Each step rounds a weight to f32 once.
        let rounding = FACTORS.len() as f64 * f64::from(f32::EPSILON);
        (0..self.values.len()).find(|&i| {
            let allowed = TOLERANCE * self.ways[i] + rounding * self.peaks[i];
            let difference = (self.values[i] - other[i]).abs();
            difference.is_nan() || difference > allowed
        })
    }
}

/// Returns the hyper-parameters of the reference kernel.
fn rule(plan: AdamPlan, lr: f64, weight_decay: WeightDecay) -> Adam {
    let AdamPlan { betas: [beta1, beta2], eps, bias_correction, .. } = plan;
    Adam { lr, beta1, beta2, eps, weight_decay, bias_correction }
}

/// Describes the plan's optimizer in Burn's terms.
fn describe(plan: &OptimizerPlan) -> String {
    let adam = |name, plan: &AdamPlan| {
        let AdamPlan { betas: [beta1, beta2], eps, weight_decay, bias_correction, .. } = plan;
        let uncorrected = if *bias_correction { "" } else { ", without bias correction" };
        format!(
            "{name} with beta_1 {beta1}, beta_2 {beta2}, epsilon {eps:e} and weight decay \
             {weight_decay}{uncorrected}"
        )
    };
    match plan {
        OptimizerPlan::AdamW(plan) => adam("AdamW", plan),
        OptimizerPlan::Adam(plan) => adam("Adam", plan),
        OptimizerPlan::Sgd { momentum, dampening, weight_decay, nesterov, .. } => format!(
            "SGD with momentum {momentum}, dampening {dampening}, weight decay {weight_decay} and \
             nesterov {nesterov}"
        ),
        OptimizerPlan::Lion { betas, weight_decay, .. } => {
            format!(
                "Lion with betas {betas:?} and weight decay {weight_decay}, which Burn does not have"
            )
        }
        OptimizerPlan::Adagrad { eps, weight_decay, .. } => {
            format!("Adagrad with epsilon {eps:e} and weight decay {weight_decay}")
        }
        OptimizerPlan::Lamb(_) => "LAMB".to_owned(),
        OptimizerPlan::Muon(_) => "Muon".to_owned(),
        OptimizerPlan::OneBitAdam(_) => "1-bit Adam".to_owned(),
        OptimizerPlan::OneBitLamb(_) => "1-bit LAMB".to_owned(),
        OptimizerPlan::ZeroOneAdam(_) => "0/1 Adam".to_owned(),
    }
}

/// Returns the last path segments of the first two types, such as `OptimizerAdaptor<AdamW>`.
fn short_name(name: &str) -> String {
    let last = |path: &str| path.rsplit("::").next().unwrap_or(path).to_owned();
    match name.split_once('<') {
        Some((outer, inner)) => {
            let inner = inner.split([',', '<', '>']).next().unwrap_or(inner);
            format!("{}<{}>", last(outer), last(inner))
        }
        None => last(name),
    }
}

/// A visitor that finds the smallest trainable parameter with enough elements for all values, or
/// else the largest one.
#[derive(Default)]
struct Smallest {
    /// The parameter and its number of elements.
    found: Option<(ParamId, usize)>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Smallest {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        let count = tensor.shape().num_elements();
        let better = match self.found {
            None => count > 0,
            Some((_, best)) if best < VALUES.len() => count > best,
            Some((_, best)) => count >= VALUES.len() && count < best,
        };
        if tensor.is_require_grad() && better {
            self.found = Some((param.id, count));
        }
    }
}

/// A mapper that replaces the values of one parameter.
struct Assign<'a> {
    /// The parameter.
    id: ParamId,
    /// Its new values, in row-major order.
    values: &'a [f64],
}

impl<B: AutodiffBackend> ModuleMapper<B> for Assign<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        if id != self.id {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        let tensor = filled(self.values, tensor.dims(), &tensor.device()).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// A visitor that creates the gradient of one parameter.
struct Gradient<'a> {
    /// The parameter.
    id: ParamId,
    /// The values of its gradient.
    values: &'a [f64],
    /// Receives the gradient.
    gradients: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradient<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if param.id == self.id {
            let tensor = param.val();
            let gradient =
                filled::<B::InnerBackend, D>(self.values, tensor.dims(), &tensor.device());
            self.gradients.register(self.id, gradient);
        }
    }
}

/// A visitor that reads one parameter.
struct ParameterReader {
    /// The parameter.
    id: ParamId,
    /// Receives its values.
    values: Vec<f64>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for ParameterReader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if param.id == self.id {
            self.values = param.val().into_data().iter::<f64>().collect();
        }
    }
}

/// Returns a tensor with the given values in f32.
fn filled<B: Backend, const D: usize>(
    values: &[f64],
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D> {
    let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}
