//! The optimizer on the elements that a rank owns.
//!
//! States are flat f32 tensors on the device of the parameter, or parked in host memory or on NVMe
//! (`offload_optimizer`). On the device Adam is one fused kernel of the backend; the other rules, and all
//! rules on parked states, run on the CPU.

mod parked;
mod pipeline;
mod rule;

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_config::{NvmePlan, OptimizerOffload, OptimizerPlan};
use deepburn_nvme::{IoPolicy, IoStatistics, SwapError, SwapFile};
use deepburn_ops::{AdamArrays, OptimizerOps, float_from_host, float_into_host};

use crate::ledger::{Category, Lease, Ledger};

use parked::{PIECE, ParkedState, Store};
use pipeline::{Pipeline, PipelinePolicy};
use rule::Step;

pub(crate) use parked::ParkedArray;
pub use rule::moments;

/// Optimizer states of one rank, and the rule that updates with them.
#[derive(Debug)]
pub(crate) struct Optimizer<B: Backend> {
    plan: OptimizerPlan,
    /// Type of the parameters that ops use, where that is not the masters'.
    working: Option<FloatDType>,
    /// By parameter index; `None` for a frozen parameter.
    states: Vec<Option<State<B>>>,
    /// Through which parked states are read and written.
    pipeline: Pipeline,
    store: Store,
    /// Steps taken.
    time: u64,
}

/// What the optimizer keeps about one parameter's owned elements, padding included.
#[derive(Debug)]
enum State<B: Backend> {
    /// On the device of the parameter.
    Device(DeviceState<B>),
    /// In host memory or in a file: the master, if there is one, and the moments.
    Parked { state: ParkedState, device: B::Device },
}

#[derive(Debug)]
struct DeviceState<B: Backend> {
    /// The elements in full precision, where parameters are kept in 16 bits.
    master: Option<B::FloatTensorPrimitive>,
    moments: Vec<B::FloatTensorPrimitive>,
    _lease: Lease,
}

/// Elements that the optimizer keeps in full precision, for a checkpoint.
#[derive(Debug)]
pub(crate) enum KeptArray<B: Backend> {
    /// All of an array, flat.
    Device(B::FloatTensorPrimitive),
    /// The elements that were asked for.
    Parked(Arc<ParkedArray>),
}

/// What the optimizer starts from.
#[derive(Debug)]
pub(crate) enum Owned<B: Backend> {
    /// This many elements of a parameter in full precision.
    Elements(usize, B::Device),
    /// Elements in full precision of a parameter that ops use in 16 bits.
    Masters(B::FloatTensorPrimitive),
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
    ///
    /// # Errors
    /// The folder for a file of states cannot be used, or has too little space.
    pub(crate) fn new(
        plan: OptimizerPlan,
        working: Option<FloatDType>,
        offload: &OptimizerOffload,
        owned: Vec<Option<Owned<B>>>,
        ledger: &Ledger,
    ) -> Result<Self, SwapError> {
        let moments = moments(&plan).len();
        let arrays = moments + usize::from(working.is_some());
        let piece = PIECE.min(offload.sub_group_size());
        let store = match offload {
            OptimizerOffload::Nvme(nvme) => {
                let lens = owned.iter().flatten().map(|owned| owned.place().0);
                let bytes = swap_bytes(&plan, working.is_some(), nvme, lens);
                Store::Disk(Arc::new(create_file(nvme, bytes)?))
            }
            OptimizerOffload::Device | OptimizerOffload::Host { .. } => Store::Host,
        };
        let state = |owned: Owned<B>| match offload {
            OptimizerOffload::Device => {
                Ok(State::Device(DeviceState::zeros(owned, moments, ledger)))
            }
            _ => parked(&store, owned, arrays, piece, ledger),
        };
        let states = owned.into_iter().map(|owned| owned.map(state).transpose());
        let states = states.collect::<Result<_, SwapError>>()?;
        let policy = match offload {
            OptimizerOffload::Nvme(nvme) => PipelinePolicy {
                reads_ahead: nvme.pipeline_read,
                writes_behind: nvme.pipeline_write,
            },
            _ => PipelinePolicy { reads_ahead: false, writes_behind: false },
        };
        let pipeline = Pipeline::new(&store, policy);
        Ok(Self { states, working, plan, pipeline, store, time: 0 })
    }

    /// What was read from a file of states and written to it, and for how long steps waited.
    pub(crate) fn io_statistics(&self) -> Option<IoStatistics> {
        match &self.store {
            Store::Host => None,
            Store::Disk(file) => Some(file.statistics()),
        }
    }

    /// Whether the owned elements of a parameter in full precision are kept here.
    pub(crate) fn has_master(&self, index: usize) -> bool {
        self.working.is_some() && self.states[index].is_some()
    }

    /// The owned elements of a parameter in full precision, where they are kept here.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn master(
        &self,
        index: usize,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        Ok(match &self.states[index] {
            Some(State::Device(state)) => state.master.clone(),
            Some(State::Parked { state, device }) if self.working.is_some() => {
                Some(tensor::<B>(state.array(0)?, device))
            }
            Some(State::Parked { .. }) | None => None,
        })
    }

    /// Elements `range` of the master of a parameter, where it is kept here.
    pub(crate) fn kept_master(&self, index: usize, range: Range<usize>) -> Option<KeptArray<B>> {
        let has_master = self.working.is_some();
        match self.states[index].as_ref()? {
            State::Device(state) => state.master.clone().map(KeptArray::Device),
            State::Parked { state, .. } => {
                has_master.then(|| KeptArray::Parked(state.copy(0, range)))
            }
        }
    }

    /// Names of the arrays that the rule keeps of each parameter, those of PyTorch's optimizers.
    pub(crate) fn moments(&self) -> &'static [&'static str] {
        moments(&self.plan)
    }

    /// Elements `range` of the moment called `name` of a parameter; `None` for a frozen one and for a name
    /// that the rule has not.
    pub(crate) fn kept_moment(
        &self,
        index: usize,
        name: &str,
        range: Range<usize>,
    ) -> Option<KeptArray<B>> {
        let place = self.moments().iter().position(|moment| *moment == name)?;
        let masters = usize::from(self.working.is_some());
        match self.states[index].as_ref()? {
            State::Device(state) => state.moments.get(place).cloned().map(KeptArray::Device),
            State::Parked { state, .. } => {
                Some(KeptArray::Parked(state.copy(masters + place, range)))
            }
        }
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
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn set_master(
        &mut self,
        index: usize,
        values: B::FloatTensorPrimitive,
    ) -> Result<(), SwapError> {
        let has_master = self.working.is_some();
        match &mut self.states[index] {
            Some(State::Device(DeviceState { master: Some(master), .. })) => *master = values,
            Some(State::Parked { state, .. }) if has_master => {
                state.set(0, &float_into_host::<B>(values))?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Replaces all moments of a trainable parameter by arrays of the same length.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn set_moments(
        &mut self,
        index: usize,
        values: Vec<B::FloatTensorPrimitive>,
    ) -> Result<(), SwapError> {
        let masters = usize::from(self.working.is_some());
        match &mut self.states[index] {
            Some(State::Device(state)) => state.moments = values,
            Some(State::Parked { state, .. }) => {
                for (place, values) in values.into_iter().enumerate() {
                    state.set(masters + place, &float_into_host::<B>(values))?;
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Starts a step. The gradient of each update is multiplied by `scale`.
    ///
    /// # Errors
    /// The disk has failed in an earlier step.
    pub(crate) fn start_step(
        &mut self,
        rates: Rates,
        scale: f32,
    ) -> Result<StepInProgress<'_, B>, SwapError> {
        let parked = self.states.iter().flatten().filter_map(|state| match state {
            State::Parked { state, .. } => Some(state),
            State::Device(_) => None,
        });
        self.pipeline.start(parked.flat_map(ParkedState::regions).cloned().collect())?;
        self.time += 1;
        let step = rule::scalars(&self.plan, rates, self.time);
        Ok(StepInProgress { optimizer: self, step, scale })
    }
}

impl<B: OptimizerOps> DeviceState<B> {
    fn zeros(owned: Owned<B>, moments: usize, ledger: &Ledger) -> Self {
        let (len, device) = owned.place();
        // Of its own memory from the start, so that steps update it in place.
        let zeros = |_| tensor::<B>(vec![0.0; len], &device);
        let master = match owned {
            Owned::Elements(..) => None,
            Owned::Masters(masters) => Some(masters),
        };
        let arrays = moments + usize::from(master.is_some());
        Self {
            master,
            moments: (0..moments).map(zeros).collect(),
            _lease: ledger.hold(Category::Optimizer, arrays * len * size_of::<f32>()),
        }
    }
}

/// Bytes of the file in which a rank keeps its optimizer states: `lens` are the elements that it updates of
/// each trainable parameter, and `masters` says whether it keeps them in full precision beside a 16-bit copy.
pub fn swap_bytes(
    plan: &OptimizerPlan,
    masters: bool,
    nvme: &NvmePlan,
    lens: impl Iterator<Item = usize>,
) -> u64 {
    let arrays = moments(plan).len() + usize::from(masters);
    let piece = PIECE.min(nvme.sub_group_size);
    lens.map(|len| parked::file_bytes(arrays, len, piece)).sum()
}

/// A file for the states of this rank.
fn create_file(nvme: &NvmePlan, bytes: u64) -> Result<SwapFile, SwapError> {
    let NvmePlan { block_size, queue_depth, .. } = *nvme;
    let policy = IoPolicy { block_size, queue_depth, ..IoPolicy::default() };
    SwapFile::create(&nvme.folder, bytes, &policy)
}

/// `arrays` arrays outside of the device: the master, if there is one, and zeros.
fn parked<B: OptimizerOps>(
    store: &Store,
    owned: Owned<B>,
    arrays: usize,
    piece: usize,
    ledger: &Ledger,
) -> Result<State<B>, SwapError> {
    let (len, device) = owned.place();
    let mut state = ParkedState::zeros(store, arrays, len, piece, ledger)?;
    if let Owned::Masters(masters) = owned {
        state.set(0, &float_into_host::<B>(masters))?;
    }
    Ok(State::Parked { state, device })
}

impl<B: OptimizerOps> Owned<B> {
    /// How many elements, and where.
    fn place(&self) -> (usize, B::Device) {
        match self {
            Self::Elements(len, device) => (*len, device.clone()),
            Self::Masters(masters) => (masters.shape().num_elements(), B::float_device(masters)),
        }
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
        self.optimizer.has_master(index)
    }

    /// Updates the owned elements of a parameter with their gradient, both flat and padded alike,
    /// and returns what is to be stored: the new values, in the type that ops use. `values` are
    /// the present ones of a parameter that has no master. Trainable parameters come in the order of their
    /// indices.
    ///
    /// # Errors
    /// The disk fails. The step must not be used.
    pub(crate) fn update(
        &mut self,
        index: usize,
        values: Option<B::FloatTensorPrimitive>,
        gradient: B::FloatTensorPrimitive,
    ) -> Result<B::FloatTensorPrimitive, SwapError> {
        let Optimizer { states, working, pipeline, .. } = &mut *self.optimizer;
        let Some(state) = &mut states[index] else {
            unreachable!("only trainable parameters are updated, and each has a state")
        };
        match state {
            State::Device(state) => {
                Ok(state.update(&self.step, self.scale, values, gradient, *working))
            }
            State::Parked { state, device } => {
                let values = values.map(float_into_host::<B>);
                let gradient = float_into_host::<B>(gradient);
                let Self { step, scale, .. } = self;
                let updated = update_parked(state, pipeline, (step, *scale), values, &gradient)?;
                let updated = tensor::<B>(updated, device);
                Ok(match working {
                    Some(dtype) => B::cast(updated, *dtype),
                    None => updated,
                })
            }
        }
    }
}

/// Updates parked states, and returns the new values in full precision: `values`, or the master, which is
/// the first array, without them.
fn update_parked(
    state: &mut ParkedState,
    pipeline: &mut Pipeline,
    (step, scale): (&Step, f32),
    values: Option<Vec<f32>>,
    gradient: &[f32],
) -> Result<Vec<f32>, SwapError> {
    match values {
        Some(mut values) => {
            state.update(pipeline, |range, moments| {
                step.update(scale, &mut values[range.clone()], &gradient[range], moments);
            })?;
            Ok(values)
        }
        None => {
            let mut copy = vec![0.0; gradient.len()];
            state.update(pipeline, |range, arrays| {
                let Some((master, moments)) = arrays.split_first_mut() else {
                    unreachable!("the master is the first array")
                };
                step.update(scale, master, &gradient[range.clone()], moments);
                copy[range].copy_from_slice(master);
            })?;
            Ok(copy)
        }
    }
}

impl<B: OptimizerOps> DeviceState<B> {
    /// One update of the master, or of `values` where there is none, and of the moments. Returns what is to
    /// be stored; with `working` in that type.
    fn update(
        &mut self,
        step: &Step,
        scale: f32,
        values: Option<B::FloatTensorPrimitive>,
        gradient: B::FloatTensorPrimitive,
        working: Option<FloatDType>,
    ) -> B::FloatTensorPrimitive {
        let keeps_master = self.master.is_some();
        let Some(master) = self.master.take().or(values) else {
            unreachable!("a parameter has its values in one of two places")
        };
        let (master, copy) = apply::<B>(step, scale, master, gradient, &mut self.moments, working);
        if keeps_master {
            self.master = Some(master.clone());
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
    let mut hosted: Vec<_> = moments.drain(..).map(float_into_host::<B>).collect();
    let mut slices: Vec<_> = hosted.iter_mut().map(Vec::as_mut_slice).collect();
    step.update(scale, &mut values, &gradient, &mut slices);
    moments.extend(hosted.into_iter().map(|values| tensor::<B>(values, &device)));
    let master = tensor::<B>(values, &device);
    let copy = working.map(|dtype| B::cast(master.clone(), dtype));
    (master, copy)
}

/// A flat tensor of `values`.
fn tensor<B: Backend>(values: Vec<f32>, device: &B::Device) -> B::FloatTensorPrimitive {
    let shape = Shape::from(vec![values.len()]);
    float_from_host::<B>(TensorData::new(values, shape), device)
}
