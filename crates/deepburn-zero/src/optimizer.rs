//! The optimizer on the elements that a rank owns.
//!
//! States live in host memory beside the update kernels of `deepburn-kernels`, which go over
//! parameter, gradient and states in one pass.

use deepburn_config::{AdamPlan, OptimizerPlan};
use deepburn_kernels as kernels;

use crate::ledger::{Category, Lease, Ledger};

/// Optimizer states of one rank, and the rule that updates with them.
#[derive(Debug)]
pub(crate) struct Optimizer {
    plan: OptimizerPlan,
    /// By parameter index; `None` for a frozen parameter.
    states: Vec<Option<State>>,
    /// Steps taken.
    time: u64,
}

/// States of one parameter's owned elements; an array that the rule does not need is empty.
#[derive(Debug)]
struct State {
    first: Vec<f32>,
    second: Vec<f32>,
    _lease: Lease,
}

/// The scalars of one step.
enum Step {
    Adam(kernels::AdamStep),
    Sgd(kernels::SgdStep, bool),
    Lion(kernels::LionStep),
    Adagrad(kernels::AdagradStep),
}

impl Optimizer {
    /// Zero states for the given numbers of owned elements, by parameter index.
    pub(crate) fn new(plan: OptimizerPlan, owned: &[Option<usize>], ledger: &Ledger) -> Self {
        let (first, second) = arrays(&plan);
        let states = owned.iter().map(|len| {
            len.map(|len| {
                let elements = (usize::from(first) + usize::from(second)) * len;
                State {
                    first: vec![0.0; if first { len } else { 0 }],
                    second: vec![0.0; if second { len } else { 0 }],
                    _lease: ledger.hold(Category::Optimizer, elements * size_of::<f32>()),
                }
            })
        });
        Self { states: states.collect(), plan, time: 0 }
    }

    /// Starts a step and gives the update of one parameter: `(index, parameter, gradient)`, the
    /// owned elements of each. The gradient is multiplied by `scale`.
    pub(crate) fn start_step(
        &mut self,
        lr: f64,
        betas: Option<[f64; 2]>,
        scale: f32,
    ) -> impl FnMut(usize, &mut [f32], &[f32]) + '_ {
        self.time += 1;
        let step = scalars(&self.plan, lr, betas, self.time);
        let states = &mut self.states;
        move |index, parameter, gradient| {
            if let Some(state) = &mut states[index] {
                update(&step, scale, parameter, gradient, state);
            }
        }
    }
}

fn update(step: &Step, scale: f32, parameter: &mut [f32], gradient: &[f32], state: &mut State) {
    let State { first, second, .. } = state;
    match step {
        Step::Adam(step) => kernels::adam(step, scale, parameter, gradient, first, second),
        Step::Sgd(step, momentum) => {
            kernels::sgd(step, scale, parameter, gradient, momentum.then_some(&mut first[..]));
        }
        Step::Lion(step) => kernels::lion(step, scale, parameter, gradient, first),
        Step::Adagrad(step) => kernels::adagrad(step, scale, parameter, gradient, first),
    }
}

/// Which state arrays a rule needs.
fn arrays(plan: &OptimizerPlan) -> (bool, bool) {
    match plan {
        OptimizerPlan::AdamW(_) | OptimizerPlan::Adam(_) => (true, true),
        OptimizerPlan::Sgd { momentum, .. } => (*momentum != 0.0, false),
        OptimizerPlan::Lion { .. } | OptimizerPlan::Adagrad { .. } => (true, false),
    }
}

fn scalars(plan: &OptimizerPlan, lr: f64, betas: Option<[f64; 2]>, time: u64) -> Step {
    let adam = |plan: &AdamPlan, weight_decay| {
        let [beta1, beta2] = betas.unwrap_or(plan.betas);
        let rule = kernels::Adam {
            lr,
            beta1,
            beta2,
            eps: plan.eps,
            weight_decay,
            bias_correction: plan.bias_correction,
        };
        Step::Adam(kernels::AdamStep::new(&rule, time))
    };
    match *plan {
        OptimizerPlan::AdamW(ref plan) => {
            adam(plan, kernels::WeightDecay::Decoupled(plan.weight_decay))
        }
        OptimizerPlan::Adam(ref plan) => adam(plan, kernels::WeightDecay::L2(plan.weight_decay)),
        OptimizerPlan::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
            let cycled = betas.map(|[beta1, _]| beta1).filter(|_| momentum != 0.0);
            let momentum = cycled.unwrap_or(momentum);
            let rule = kernels::Sgd { lr, momentum, dampening, weight_decay, nesterov };
            Step::Sgd(kernels::SgdStep::new(&rule, time), rule.keeps_momentum())
        }
        OptimizerPlan::Lion { betas: own, weight_decay, .. } => {
            let [beta1, beta2] = betas.unwrap_or(own);
            let rule = kernels::Lion { lr, beta1, beta2, weight_decay };
            Step::Lion(kernels::LionStep::new(&rule))
        }
        OptimizerPlan::Adagrad { eps, weight_decay, .. } => {
            let rule = kernels::Adagrad { lr, eps, weight_decay };
            Step::Adagrad(kernels::AdagradStep::new(&rule))
        }
    }
}
