//! The optimizer on the elements that a rank owns.
//!
//! States are flat f32 tensors on the device of the parameter. Adam is one fused kernel of the
//! backend; the other rules go through host memory, which on a CPU backend costs no copy.

use burn_backend::{Backend, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_config::{AdamPlan, OptimizerPlan};
use deepburn_kernels as kernels;
use deepburn_ops::{AdamArrays, OptimizerOps, float_from_host, float_into_host};

use crate::ledger::{Category, Lease, Ledger};

/// Optimizer states of one rank, and the rule that updates with them.
#[derive(Debug)]
pub(crate) struct Optimizer<B: Backend> {
    plan: OptimizerPlan,
    /// Type of the parameters that ops use, where that is not the masters'.
    working: Option<FloatDType>,
    /// By parameter index; `None` for a frozen parameter.
    states: Vec<Option<State<B>>>,
    /// Steps taken.
    time: u64,
}

/// What the optimizer keeps about one parameter's owned elements, padding included.
#[derive(Debug)]
struct State<B: Backend> {
    /// The elements in full precision, where parameters are kept in 16 bits.
    master: Option<B::FloatTensorPrimitive>,
    moments: Vec<B::FloatTensorPrimitive>,
    _lease: Lease,
}

/// What the optimizer starts from.
#[derive(Debug)]
pub(crate) enum Owned<B: Backend> {
    /// This many elements of a parameter in full precision.
    Elements(usize, B::Device),
    /// Elements in full precision of a parameter that ops use in 16 bits.
    Masters(B::FloatTensorPrimitive),
}

/// The scalars of one step.
enum Step {
    Adam(kernels::AdamStep),
    /// And whether it uses its momentum, which a schedule may bring down to 0.
    Sgd(kernels::SgdStep, bool),
    Lion(kernels::LionStep),
    Adagrad(kernels::AdagradStep),
}

/// How fast to learn: what the schedule says about one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Learning rate.
    pub lr: f64,
    /// Instead of the optimizer's own betas, where a schedule cycles momentum.
    pub betas: Option<[f64; 2]>,
}

impl<B: OptimizerOps> Optimizer<B> {
    /// Zero states for what this rank owns, by parameter index.
    pub(crate) fn new(
        plan: OptimizerPlan,
        working: Option<FloatDType>,
        owned: Vec<Option<Owned<B>>>,
        ledger: &Ledger,
    ) -> Self {
        let moments = moments(&plan).len();
        let state = |owned: Owned<B>| {
            let (len, device) = match &owned {
                Owned::Elements(len, device) => (*len, device.clone()),
                Owned::Masters(masters) => {
                    (masters.shape().num_elements(), B::float_device(masters))
                }
            };
            let zeros = |_| {
                // Of its own memory from the start, so that steps update it in place.
                let data = TensorData::new(vec![0.0_f32; len], Shape::from(vec![len]));
                float_from_host::<B>(data, &device)
            };
            let master = match owned {
                Owned::Elements(..) => None,
                Owned::Masters(masters) => Some(masters),
            };
            let arrays = moments + usize::from(master.is_some());
            State {
                master,
                moments: (0..moments).map(zeros).collect(),
                _lease: ledger.hold(Category::Optimizer, arrays * len * size_of::<f32>()),
            }
        };
        let states = owned.into_iter().map(|owned| owned.map(state)).collect();
        Self { states, working, plan, time: 0 }
    }

    /// The owned elements of a parameter in full precision, where they are kept here.
    pub(crate) fn master(&self, index: usize) -> Option<&B::FloatTensorPrimitive> {
        self.states[index].as_ref()?.master.as_ref()
    }

    /// Names of the arrays that the rule keeps of each parameter, those of PyTorch's optimizers.
    pub(crate) fn moments(&self) -> &'static [&'static str] {
        moments(&self.plan)
    }

    /// The moment called `name` of a parameter; `None` for a frozen one and for a name that the rule
    /// has not.
    pub(crate) fn moment(&self, index: usize, name: &str) -> Option<&B::FloatTensorPrimitive> {
        let place = self.moments().iter().position(|moment| *moment == name)?;
        self.states[index].as_ref()?.moments.get(place)
    }

    /// Steps taken.
    pub(crate) fn time(&self) -> u64 {
        self.time
    }

    /// Says how many steps were taken.
    pub(crate) fn set_time(&mut self, time: u64) {
        self.time = time;
    }

    /// Replaces the masters of a parameter that has some by an array of the same length.
    pub(crate) fn set_master(&mut self, index: usize, values: B::FloatTensorPrimitive) {
        if let Some(State { master: Some(master), .. }) = &mut self.states[index] {
            *master = values;
        }
    }

    /// Replaces all moments of a trainable parameter by arrays of the same length.
    pub(crate) fn set_moments(&mut self, index: usize, values: Vec<B::FloatTensorPrimitive>) {
        if let Some(State { moments, .. }) = &mut self.states[index] {
            *moments = values;
        }
    }

    /// Starts a step. The gradient of each update is multiplied by `scale`.
    pub(crate) fn start_step(&mut self, rates: Rates, scale: f32) -> StepInProgress<'_, B> {
        self.time += 1;
        let step = scalars(&self.plan, rates, self.time);
        StepInProgress { optimizer: self, step, scale }
    }
}

/// A step that updates one parameter after the other.
pub(crate) struct StepInProgress<'a, B: Backend> {
    optimizer: &'a mut Optimizer<B>,
    step: Step,
    scale: f32,
}

impl<B: OptimizerOps> StepInProgress<'_, B> {
    /// Whether the optimizer keeps the values of the parameter at `index` itself.
    pub(crate) fn has_master(&self, index: usize) -> bool {
        self.optimizer.master(index).is_some()
    }

    /// Updates the owned elements of a parameter with their gradient, both flat and padded alike,
    /// and returns what is to be stored: the new values, in the type that ops use. `values` are
    /// the present ones of a parameter that has no master.
    pub(crate) fn update(
        &mut self,
        index: usize,
        values: Option<B::FloatTensorPrimitive>,
        gradient: B::FloatTensorPrimitive,
    ) -> B::FloatTensorPrimitive {
        let Optimizer { states, working, .. } = &mut *self.optimizer;
        let Some(state) = &mut states[index] else {
            unreachable!("only trainable parameters are updated, and each has a state")
        };
        let Some(master) = state.master.take().or(values) else {
            unreachable!("a parameter has its values in one of two places")
        };
        let keeps_master = working.is_some();
        let (master, copy) =
            apply::<B>(&self.step, self.scale, master, gradient, &mut state.moments, *working);
        if keeps_master {
            state.master = Some(master.clone());
        }
        copy.unwrap_or(master)
    }
}

/// One update of `master` and the moments; with `working` also the copy in that type.
fn apply<B: OptimizerOps>(
    step: &Step,
    scale: f32,
    master: B::FloatTensorPrimitive,
    gradient: B::FloatTensorPrimitive,
    moments: &mut Vec<B::FloatTensorPrimitive>,
    working: Option<FloatDType>,
) -> (B::FloatTensorPrimitive, Option<B::FloatTensorPrimitive>) {
    if let Step::Adam(step) = step
        && let (Some(second), Some(first)) = (moments.pop(), moments.pop())
    {
        let arrays = AdamArrays { master, first, second };
        let (arrays, copy) = B::adam(step, scale, arrays, gradient, working);
        *moments = vec![arrays.first, arrays.second];
        return (arrays.master, copy);
    }
    let device = B::float_device(&master);
    let mut values = float_into_host::<B>(master);
    let gradient = float_into_host::<B>(gradient);
    let mut moment = moments.pop().map(float_into_host::<B>);
    match (step, &mut moment) {
        (Step::Sgd(step, uses_momentum), moment) => {
            let momentum = moment.as_deref_mut().filter(|_| *uses_momentum);
            kernels::sgd(step, scale, &mut values, &gradient, momentum);
        }
        (Step::Lion(step), Some(moment)) => {
            kernels::lion(step, scale, &mut values, &gradient, moment);
        }
        (Step::Adagrad(step), Some(moment)) => {
            kernels::adagrad(step, scale, &mut values, &gradient, moment);
        }
        _ => unreachable!("states are made for the rule that uses them"),
    }
    let tensor = |values: Vec<f32>| {
        let shape = Shape::from(vec![values.len()]);
        float_from_host::<B>(TensorData::new(values, shape), &device)
    };
    moments.extend(moment.map(tensor));
    let master = tensor(values);
    let copy = working.map(|dtype| B::cast(master.clone(), dtype));
    (master, copy)
}

/// Names of the arrays that a rule keeps of each parameter, those of PyTorch's optimizers.
pub fn moments(plan: &OptimizerPlan) -> &'static [&'static str] {
    match plan {
        OptimizerPlan::AdamW(_) | OptimizerPlan::Adam(_) => &["exp_avg", "exp_avg_sq"],
        OptimizerPlan::Sgd { momentum: 0.0, .. } => &[],
        OptimizerPlan::Sgd { .. } => &["momentum_buffer"],
        OptimizerPlan::Lion { .. } => &["exp_avg"],
        OptimizerPlan::Adagrad { .. } => &["sum"],
    }
}

fn scalars(plan: &OptimizerPlan, Rates { lr, betas }: Rates, time: u64) -> Step {
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
