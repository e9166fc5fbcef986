//! The optimizer of one rank, which updates the elements that the rank owns.
//!
//! States are flat f32 tensors on the parameter's device, or offloaded to host memory or NVMe
//! (`offload_optimizer`). States on the device are updated by one fused kernel of the backend,
//! offloaded states by the CPU. `rule.rs` defines the states of each optimizer and the values that
//! its updates depend on.
//!
//! The arrays of one parameter with AdamW, bf16 and `s` owned elements, including padding:
//!
//! ```text
//!              owned slice, s elements
//! master       [f32 ......... | 0 0]   only if ops compute in 16 bits
//! exp_avg      [f32 ......... | 0 0]   moments, in the order of `moments`
//! exp_avg_sq   [f32 ......... | 0 0]
//! gradient     [any type .... | 0 0]   an operand of the step, freed afterwards
//! working copy [bf16 ........ | 0 0]   the result, which `Publisher` stores
//! ```
//!
//! At stage 0 a rank owns the whole parameter; from stage 1 on it owns its shard. States are
//! allocated when the model is sharded and freed when it is dropped. An update changes them in
//! place, so a step needs no second copy.
//!
//! In fp16 and bf16, ops, gathers and autodiff use the 16-bit working copies of parameters. The f32
//! master of the owned elements is an optimizer state. One pass updates it and rounds it to the new
//! working copy.
//!
//! A step proceeds as follows. `order` sorts the parameters into single updates and rounds.
//! `start_step` computes the scalars and starts to read offloaded states. `StepInProgress` then
//! updates one parameter after the other in exactly that order. The order is the same on all ranks,
//! because the rounds contain collectives.
//!
//! Main type: [`Optimizer`]. `arrays.rs` reads and replaces its arrays between steps. The settings
//! of an update come from `assignment`, offloaded states are arrays of `offload`, and `states` runs
//! the steps and the exchanges of their rounds. The optimizer itself exchanges nothing.

mod arrays;
mod frozen_lamb;
mod moments;
mod newton_schulz;
mod one_bit_adam;
mod parked;
mod rounds;
mod rule;
mod step;
mod tiered_state;
mod zero_one;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use deepburn_config::OptimizerPlan;
use deepburn_kernels::TreeSum;
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, is_without_data};

use crate::assignment::UpdateSettings;
use crate::ledger::Ledger;
use crate::offload::{FileChunk, ParkedArray, ParkedTensor, Parking, Pipeline, PipelinePolicy};
use crate::parameter::Parameter;

use frozen_lamb::LambScalars;
use rounds::{PlannedUpdate, UpdateScope};
use rule::{CompressedOptimizer, UpdateStep};
use tiered_state::{DeviceState, ParkedState, TieredState};

pub(crate) use arrays::KeptArray;
pub use moments::moments;
pub(crate) use moments::state_count;
pub(crate) use newton_schulz::WORKSPACE;
pub(crate) use rounds::{MatrixOwner, StepOrder, UpdateRound};
pub(crate) use step::{StepInProgress, UpdateDirection};

/// The states of all optimizers with local steps.
const LOCAL_STATES: [&rule::LocalStates; 1] = [&zero_one::LOCAL];

/// Returns true if an optimizer takes local steps, after which ranks differ.
pub(crate) fn takes_local_steps(plan: &OptimizerPlan) -> bool {
    rule::compressed(plan).is_some_and(|plan| plan.local_states().is_some())
}

/// Returns the array of this name that differs between ranks after a local step, of any optimizer.
pub(crate) fn local_state(name: &str) -> Option<&'static str> {
    LOCAL_STATES.into_iter().flat_map(|local| local.of_rank).find(|array| *array == name)
}

/// The optimizer states of one rank and the settings of their updates.
///
/// `states`, `settings_of` and `lamb_scalars` have one entry per parameter in module order,
/// including frozen parameters. They are indexed by the same parameter index as in the rest of the
/// crate.
#[derive(Debug)]
pub(crate) struct Optimizer<B: Backend> {
    /// The distinct settings of the parameter groups. A step computes its scalars once per entry,
    /// not once per parameter.
    settings: Vec<UpdateSettings>,
    /// The number of applied steps before the first step with these settings, by index in
    /// `settings`. It is 0, except for parameters whose states were new when a checkpoint was
    /// loaded. Bias correction counts the steps after it, as PyTorch counts the steps of each
    /// parameter.
    starts: Vec<u64>,
    /// The type in which ops compute; `None` if it is f32. If it is set, every trainable parameter
    /// has an f32 master.
    working: Option<FloatDType>,
    /// The states by parameter index; `None` for a frozen parameter.
    states: Vec<Option<TieredState<B>>>,
    /// The index in `settings` of each parameter; `None` for a frozen one.
    settings_of: Vec<Option<usize>>,
    /// The scalars of 1-bit LAMB, by parameter index. With other optimizers they keep their initial
    /// values and are not stored.
    lamb_scalars: Vec<LambScalars>,
    /// The pipeline that reads and writes offloaded states. Without offload it is idle.
    pipeline: Pipeline,
    /// The number of optimizer steps that were applied. Skipped steps (overflow) do not count, so
    /// bias correction continues from the last applied one.
    time: u64,
    /// The sum of learning rates since all ranks last had the same parameters; `None` if they have.
    /// Only 0/1 Adam sets it.
    local_rates: Option<f64>,
}

/// The sums of squares of a tensor's values and of its update direction, in this order. Each sum is
/// a tree over element indices. Sums of several ranks can therefore be combined with the same
/// rounding as a sum on one rank.
pub(crate) type Squares = [TreeSum; 2];

/// The offloaded operands of a parameter's update, besides its states.
#[derive(Debug)]
pub(crate) struct ParkedOperands<'a> {
    /// The index of the parameter.
    pub(crate) index: usize,
    /// The parameter's shard, if it is offloaded (`offload_param`).
    pub(crate) values: Option<Arc<ParkedArray>>,
    /// The accumulated gradient, if it is offloaded with the states.
    pub(crate) gradient: Option<ParkedTensor<'a>>,
}

/// The values that an update changes.
#[derive(Debug)]
pub(crate) enum UpdateValues<B: Backend> {
    /// On the device: the current values, if the optimizer has no master.
    Device(Option<B::FloatTensorPrimitive>),
    /// Offloaded, in the type in which ops compute. They are changed in place.
    Parked(Arc<ParkedArray>),
}

/// The gradient of an update, with the same length and padding as the values.
#[derive(Debug)]
pub(crate) enum UpdateGradient<B: Backend> {
    /// A flat tensor.
    Device(B::FloatTensorPrimitive),
    /// An offloaded array of this type, one of the step's operands.
    Parked(Arc<ParkedArray>, DType),
    /// The parameter was not used, so its gradient is zero.
    Zeros,
}

/// The initial values of the optimizer's states.
#[derive(Debug)]
pub(crate) enum Owned<B: Backend> {
    /// The number of owned elements of an f32 parameter, which has no master.
    Elements(usize, B::Device),
    /// The f32 master of a parameter that ops use in 16 bits.
    Masters(B::FloatTensorPrimitive),
}

/// The learning rate and betas of one step, as the schedule sets them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// The learning rate, before it is multiplied by the `lr_factor` of a parameter group.
    pub lr: f64,
    /// The betas of the schedule, if it cycles momentum. They replace the optimizer's betas.
    pub betas: Option<[f64; 2]>,
}

impl<B: OptimizerOps> Optimizer<B> {
    /// Creates an optimizer without parameters. `working` is the type in which ops compute, if it
    /// is not f32.
    pub(crate) fn new(working: Option<FloatDType>, parking: Option<&Parking>) -> Self {
        // Without offload nothing is transferred, so this policy is never applied.
        let idle = PipelinePolicy { reads_ahead: false, writes_behind: false };
        let pipeline = Pipeline::new(parking.map_or(idle, |parking| parking.policy));
        Self {
            states: Vec::new(),
            settings_of: Vec::new(),
            lamb_scalars: Vec::new(),
            settings: Vec::new(),
            starts: Vec::new(),
            working,
            pipeline,
            time: 0,
            local_rates: None,
        }
    }

    /// Adds the states of the next parameter, which are initially zero. `owned` is `None` for a
    /// frozen parameter. Without `parking` the states are on the device. This is called for each
    /// parameter while the model is sharded, so offloaded masters are never all in memory at once.
    ///
    /// # Errors
    /// Returns an error if the file of this rank has too little space or the disk fails.
    pub(crate) fn adopt(
        &mut self,
        owned: Option<Owned<B>>,
        settings: Option<UpdateSettings>,
        parking: Option<&Parking>,
        ledger: &Ledger,
    ) -> Result<(), SwapError> {
        // A frozen parameter also gets an entry in each list, so that the lists keep the same
        // indices.
        let moments = settings.as_ref().map_or(0, |it| state_count(&it.optimizer));
        let settings = settings.map(|settings| self.index_of(settings, 0));
        self.settings_of.push(settings);
        self.lamb_scalars.push(LambScalars::default());
        // The master is the first of the parked arrays. On the device it is not one of the moments.
        let arrays = moments + usize::from(self.working.is_some());
        self.states.push(match (owned, parking) {
            (None, _) => None,
            (Some(owned), None) => {
                Some(TieredState::Device(DeviceState::zeros(owned, moments, ledger)))
            }
            (Some(owned), Some(parking)) => {
                Some(TieredState::Parked(ParkedState::zeros(parking, owned, arrays, ledger)?))
            }
        });
        Ok(())
    }

    /// Returns the index of `settings` with this start, which are added if they are new.
    fn index_of(&mut self, settings: UpdateSettings, start: u64) -> usize {
        // There are a handful of settings, so a linear search is enough.
        let mut known = self.settings.iter().zip(&self.starts);
        known.position(|(known, since)| (known, *since) == (&settings, start)).unwrap_or_else(
            || {
                self.settings.push(settings);
                self.starts.push(start);
                self.settings.len() - 1
            },
        )
    }

    /// Returns the number of applied steps before the first step of a parameter with its current
    /// states; 0 for a frozen one.
    pub(crate) fn start(&self, index: usize) -> u64 {
        self.settings_of[index].map_or(0, |settings| self.starts[settings])
    }

    /// Sets the number of applied steps before the first step of a parameter with its current
    /// states. Has no effect on a frozen parameter.
    ///
    /// Optimizers whose ranks exchange momenta must keep a start of 0, because all of their
    /// parameters are frozen in the same step.
    pub(crate) fn set_start(&mut self, index: usize, start: u64) {
        if let Some(settings) = self.settings(index).cloned() {
            self.settings_of[index] = Some(self.index_of(settings, start));
        }
    }

    /// Returns the type in which ops compute, if it is not f32.
    pub(crate) fn working(&self) -> Option<FloatDType> {
        self.working
    }

    /// Returns the PyTorch names of a parameter's optimizer arrays; empty for a frozen one.
    pub(crate) fn moments(&self, index: usize) -> &'static [&'static str] {
        self.settings(index).map_or(&[], |settings| moments(&settings.optimizer))
    }

    /// Returns the definition of a parameter's optimizer, if it has compressed exchanges.
    fn compressed(&self, index: usize) -> Option<&dyn CompressedOptimizer> {
        self.settings(index).and_then(|settings| rule::compressed(&settings.optimizer))
    }

    /// Returns the definitions of all optimizers with compressed exchanges.
    fn all_compressed(&self) -> impl Iterator<Item = &dyn CompressedOptimizer> {
        self.settings.iter().filter_map(|settings| rule::compressed(&settings.optimizer))
    }

    /// Returns the optimizer of a parameter; `None` for a frozen one.
    pub(crate) fn rule(&self, index: usize) -> Option<&OptimizerPlan> {
        self.settings(index).map(|settings| &settings.optimizer)
    }

    /// Returns the settings of a parameter; `None` for a frozen one.
    fn settings(&self, index: usize) -> Option<&UpdateSettings> {
        self.settings_of[index].map(|settings| &self.settings[settings])
    }

    /// Returns the order in which a step on `ranks` ranks updates `parameters` at the learning rate
    /// `lr`.
    ///
    /// `lr` only affects 0/1 Adam, which skips its exchanges as long as the sum of learning rates
    /// is 0.
    pub(crate) fn order(
        &self,
        parameters: &[Arc<Parameter<B>>],
        ranks: usize,
        lr: f64,
    ) -> StepOrder {
        let local_rates = self.local_rates_with(lr);
        let update = |parameter: &Arc<Parameter<B>>| {
            let (index, numel) = (parameter.index(), parameter.numel());
            let scope = self.scope(index, parameter.shape(), local_rates)?;
            Some(PlannedUpdate { index, numel, scope })
        };
        // A pipeline stage updates the parameters that it owns.
        let owned = parameters.iter().filter(|parameter| parameter.is_updated_here());
        let updates: Vec<_> = owned.filter_map(update).collect();
        StepOrder::new(&updates, ranks)
    }

    /// Returns the scope of a parameter's update; `None` for a frozen one.
    fn scope(&self, index: usize, shape: &[usize], local_rates: f64) -> Option<UpdateScope> {
        Some(rule::scope(self.settings(index)?, shape, self.time + 1, local_rates))
    }

    /// Returns the sum of learning rates since all ranks last had the same parameters, including
    /// `lr` of the next step.
    fn local_rates_with(&self, lr: f64) -> f64 {
        self.local_rates.unwrap_or(0.0) + lr
    }

    /// Returns the sum of learning rates since all ranks last had the same parameters; `None` if
    /// they have.
    pub(crate) fn local_rates(&self) -> Option<f64> {
        self.local_rates
    }

    /// Sets the sum of learning rates since all ranks last had the same parameters.
    pub(crate) fn set_local_rates(&mut self, rates: Option<f64>) {
        self.local_rates = rates;
    }

    /// Returns true if the optimizer has local steps, in which each rank updates its parameters
    /// without an exchange (0/1 Adam).
    pub(crate) fn takes_local_steps(&self) -> bool {
        self.all_compressed().any(|it| it.local_states().is_some())
    }

    /// Returns true if the next step is local.
    pub(crate) fn steps_locally(&self) -> bool {
        self.all_compressed().any(|it| it.is_local(self.time + 1))
    }

    /// Returns the name of the quantity that step `time` compresses; `None` without compression.
    pub(crate) fn compressed_quantity(&self, time: u64) -> Option<&'static str> {
        self.all_compressed().next().map(|it| it.compressed_quantity(time))
    }

    /// Returns true if the next step uses the compression errors of earlier steps.
    pub(crate) fn keeps_errors(&self) -> bool {
        self.all_compressed().any(|it| it.keeps_errors(self.time + 1))
    }

    /// Returns true if the last step was the last one that changed second moments.
    pub(crate) fn has_just_frozen(&self) -> bool {
        self.all_compressed().any(|it| it.freeze_step() == self.time)
    }

    /// Returns whether compression errors are reset after the last step.
    pub(crate) fn forgets_errors(&self) -> bool {
        self.all_compressed().any(|it| it.forgets_errors(self.time))
    }

    /// Returns true if the optimizer has steps in which ranks exchange momenta instead of
    /// gradients.
    pub(crate) fn exchanges_momentum(&self) -> bool {
        self.settings.iter().any(|settings| settings.optimizer.exchanges_momentum())
    }

    /// Returns true if the next step uses the mean of all ranks' gradients. Otherwise each rank
    /// uses its own gradient, and ranks either average momenta in the step or exchange nothing.
    pub(crate) fn takes_mean_gradients(&self) -> bool {
        !self.all_compressed().any(|it| it.takes_own_gradients(self.time + 1))
    }

    /// Returns the number of applied steps.
    pub(crate) fn time(&self) -> u64 {
        self.time
    }

    /// Sets the number of applied steps, all of which changed the states of every trained
    /// parameter.
    pub(crate) fn set_time(&mut self, time: u64) {
        self.time = time;
        // States that were loaded before may have a start after `time`. No parameter uses these
        // settings any more, but a step would compute their scalars with a negative step number.
        let known = std::mem::take(&mut self.settings);
        self.starts.clear();
        for index in 0..self.settings_of.len() {
            if let Some(settings) = self.settings_of[index] {
                self.settings_of[index] = Some(self.index_of(known[settings].clone(), 0));
            }
        }
    }

    /// Starts an optimizer step that updates the parameters in the sequence of `order` and
    /// multiplies each gradient by `scale`. `operands` has the offloaded parameter shards and
    /// gradients of all trainable parameters.
    ///
    /// The step counter increases now, even if the step fails later. A step that fails half-way
    /// leaves the model partly updated, and every later step returns the same error.
    ///
    /// # Errors
    /// Returns an error if a disk read or write failed in an earlier step.
    pub(crate) fn start_step(
        &mut self,
        rates: Rates,
        scale: f32,
        operands: &[ParkedOperands<'_>],
        order: &StepOrder,
    ) -> Result<StepInProgress<'_, B>, SwapError> {
        let time = self.time + 1;
        let local_rates = self.local_rates_with(rates.lr);
        let step = |(settings, start): (&UpdateSettings, &u64)| {
            // Bias correction counts the steps that a parameter has taken with its current states.
            rule::step(settings, rates, time - start, local_rates)
        };
        let steps: Vec<_> = self.settings.iter().zip(&self.starts).map(step).collect();
        // The scalars are computed first, because they determine which moments a pass uses and
        // therefore reads.
        let (reads, largest) = self.reads(&steps, operands, order);
        self.pipeline.start(reads, largest)?;
        // The step counts from here on, so `StepInProgress` sees its own number in `time`.
        self.time = time;
        let is_apart = self.all_compressed().any(|it| it.leaves_ranks_apart(time, local_rates));
        self.local_rates = is_apart.then_some(local_rates);
        Ok(StepInProgress { optimizer: self, steps, scale })
    }

    /// Returns the file reads of a step in order, and the largest number of bytes that the update
    /// of one chunk reads.
    ///
    /// The reads must have exactly the order in which the updates request them, because the
    /// pipeline serves them first in, first out. This function therefore mirrors
    /// `StepInProgress::pass` and `StepInProgress::direct`, parameter by parameter and chunk by
    /// chunk. The number of bytes limits the pipeline's memory, separately for reads ahead and for
    /// pending writes.
    fn reads(
        &self,
        steps: &[UpdateStep],
        operands: &[ParkedOperands<'_>],
        order: &StepOrder,
    ) -> (VecDeque<FileChunk>, usize) {
        let (mut reads, mut largest) = (VecDeque::new(), 0);
        let masters = usize::from(self.working.is_some());
        let mut pass =
            |index: usize, arrays: Range<usize>, has_values: bool, has_gradient: bool| {
                let operands = operands.iter().find(|operands| operands.index == index);
                let (Some(TieredState::Parked(state)), Some(operands)) =
                    (&self.states[index], operands)
                else {
                    return;
                };
                if is_without_data::<B>() {
                    return;
                }
                // The 16-bit copy of a master is overwritten and never read.
                let values = operands.values.as_deref().filter(|_| has_values && masters == 0);
                let gradient = operands.gradient.as_ref().filter(|_| has_gradient);
                for chunk in state.layout.chunks() {
                    let first = reads.len();
                    reads.extend(state.reads(&chunk, arrays.clone(), values, gradient));
                    largest = largest.max(reads.range(first..).map(FileChunk::bytes).sum());
                }
            };
        for index in &order.elements {
            pass(*index, 0..masters + self.states_used(steps, *index), true, true);
        }
        for round in &order.rounds {
            let needs_values = matches!(round, UpdateRound::Norms(_));
            for index in round.indices() {
                // Only norms depend on the values. For other directions the master is not read.
                let first = if needs_values { 0 } else { masters };
                let arrays = first..masters + self.moments(index).len();
                pass(index, arrays, needs_values, true);
            }
            // The second pass applies the direction, which is in memory.
            round.indices().into_iter().for_each(|index| pass(index, 0..masters, true, false));
        }
        (reads, largest)
    }

    /// Returns the number of moments that the step of a parameter uses. A schedule that sets the
    /// momentum to 0 reduces it.
    fn states_used(&self, steps: &[UpdateStep], index: usize) -> usize {
        match self.settings_of[index].map(|settings| &steps[settings]) {
            Some(UpdateStep::Elements(step)) => step.states(),
            _ => self.moments(index).len(),
        }
    }
}

impl<B: OptimizerOps> Owned<B> {
    /// Returns the number of elements and their device.
    fn place(&self) -> (usize, B::Device) {
        match self {
            Self::Elements(len, device) => (*len, device.clone()),
            Self::Masters(masters) => (masters.shape().num_elements(), B::float_device(masters)),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::{Flex, FlexDevice};
    use deepburn_config::AdamPlan;

    use super::*;

    #[test]
    fn states_of_an_earlier_step_leave_no_later_start() {
        let (lr, betas) = (1e-3, [0.9, 0.999]);
        let adam = AdamPlan { lr, betas, eps: 1e-8, weight_decay: 0.0, bias_correction: true };
        let optimizer = OptimizerPlan::AdamW(adam);
        let settings = UpdateSettings { optimizer, lr_factor: 1.0, matrices: None };
        let mut optimizer = Optimizer::<Flex>::new(None, None);
        let owned = Some(Owned::Elements(2, FlexDevice));
        optimizer.adopt(owned, Some(settings), None, &Ledger::new()).unwrap();
        optimizer.set_time(100);
        optimizer.set_start(0, 100);
        assert_eq!(optimizer.start(0), 100);
        optimizer.set_time(50);
        assert_eq!((optimizer.start(0), &optimizer.starts[..]), (0, &[0][..]));
        let rates = Rates { lr, betas: None };
        assert!(optimizer.start_step(rates, 1.0, &[], &StepOrder::default()).is_ok());
    }
}
