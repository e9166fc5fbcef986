//! The optimizer on the elements that a rank owns.
//!
//! States are flat f32 tensors on the device of the parameter, or parked in host memory or on NVMe
//! (`offload_optimizer`). On the device a step is one fused kernel of the backend; on parked states it runs on
//! the CPU.

mod parked;
mod rule;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata};
use deepburn_config::{OptimizerPlan, UpdateSettings};
use deepburn_kernels::ElementwiseStep;
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, UpdateArrays, float_bytes, float_from_host, float_into_host};

use crate::ledger::{Category, Lease, Ledger};
use crate::parked::{
    ParkedArray, ParkedCopy, ParkedTensor, PieceLayout, PieceRead, Pipeline, PipelinePolicy,
    WriteBehind,
};
use crate::tiers::Parking;

use parked::{HostGradient, HostUpdate, HostValues};
pub use rule::moments;

/// Optimizer states of one rank, and the rule that updates with them.
#[derive(Debug)]
pub(crate) struct Optimizer<B: Backend> {
    plan: OptimizerPlan,
    /// What parameters are updated with, each of them once.
    settings: Vec<UpdateSettings>,
    /// Type of the parameters that ops use, where that is not the masters'.
    working: Option<FloatDType>,
    /// By parameter index; `None` for a frozen parameter.
    states: Vec<Option<State<B>>>,
    /// The index in `settings` of each parameter that has a state.
    settings_of: Vec<Option<usize>>,
    /// Through which parked states are read and written.
    pipeline: Pipeline,
    /// Steps taken.
    time: u64,
}

/// What the optimizer keeps about one parameter's owned elements, padding included.
#[derive(Debug)]
enum State<B: Backend> {
    /// On the device of the parameter.
    Device(DeviceState<B>),
    /// In host memory or in a file.
    Parked(ParkedState<B>),
}

#[derive(Debug)]
struct ParkedState<B: Backend> {
    /// The master, if there is one, and the moments.
    arrays: Vec<Arc<ParkedArray>>,
    /// Of each array.
    layout: PieceLayout,
    device: B::Device,
}

#[derive(Debug)]
struct DeviceState<B: Backend> {
    /// The elements in full precision, where parameters are kept in 16 bits.
    master: Option<B::FloatTensorPrimitive>,
    moments: Vec<B::FloatTensorPrimitive>,
    /// Elements of each array.
    len: usize,
    device: B::Device,
    _lease: Lease,
}

/// Elements that the optimizer keeps in full precision, for a checkpoint.
#[derive(Debug)]
pub(crate) enum KeptArray<B: Backend> {
    /// All of an array, flat.
    Device(B::FloatTensorPrimitive),
    /// The elements that were asked for.
    Parked(Arc<ParkedCopy>),
}

/// What a step finds of a parameter outside of the device, besides its states.
#[derive(Debug)]
pub(crate) struct ParkedOperands<'a> {
    pub(crate) index: usize,
    pub(crate) values: Option<Arc<ParkedArray>>,
    pub(crate) gradient: Option<ParkedTensor<'a>>,
}

/// The values that an update changes.
#[derive(Debug)]
pub(crate) enum UpdateValues<B: Backend> {
    /// On the device: the present values, where the optimizer has no master of them.
    Device(Option<B::FloatTensorPrimitive>),
    /// Outside of it, in the type that ops use. They are changed where they are.
    Parked(Arc<ParkedArray>),
}

/// The gradient of an update: as long as the values, padded alike.
#[derive(Debug)]
pub(crate) enum UpdateGradient<B: Backend> {
    /// A flat tensor.
    Device(B::FloatTensorPrimitive),
    /// An array of this type outside of the device, which was among the operands of the step.
    Parked(Arc<ParkedArray>, DType),
    /// The parameter was not used.
    Zeros,
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
    /// The rule of `plan`, without parameters. `working` is the type in which ops use them, where it is not
    /// f32.
    pub(crate) fn new(
        plan: OptimizerPlan,
        working: Option<FloatDType>,
        parking: Option<&Parking>,
    ) -> Self {
        let idle = PipelinePolicy { reads_ahead: false, writes_behind: false };
        let pipeline = Pipeline::new(parking.map_or(idle, |parking| parking.policy));
        Self {
            states: Vec::new(),
            settings_of: Vec::new(),
            settings: Vec::new(),
            working,
            plan,
            pipeline,
            time: 0,
        }
    }

    /// Takes what this rank owns of the next parameter, `None` for a frozen one, with zero states; on the
    /// device without `parking`. Called while the model is sharded, so that parked masters are never all in
    /// memory. It is updated with `settings`, which a frozen one has not.
    ///
    /// # Errors
    /// The file of this rank has too little space, or the disk fails.
    pub(crate) fn adopt(
        &mut self,
        owned: Option<Owned<B>>,
        settings: Option<UpdateSettings>,
        parking: Option<&Parking>,
        ledger: &Ledger,
    ) -> Result<(), SwapError> {
        let settings = settings.map(|settings| self.index_of(settings));
        self.settings_of.push(settings);
        let moments = moments(&self.plan).len();
        let arrays = moments + usize::from(self.working.is_some());
        self.states.push(match (owned, parking) {
            (None, _) => None,
            (Some(owned), None) => Some(State::Device(DeviceState::zeros(owned, moments, ledger))),
            (Some(owned), Some(parking)) => {
                Some(State::Parked(ParkedState::zeros(parking, owned, arrays, ledger)?))
            }
        });
        Ok(())
    }

    /// The index of `settings`, which are added where they are new.
    fn index_of(&mut self, settings: UpdateSettings) -> usize {
        self.settings.iter().position(|known| *known == settings).unwrap_or_else(|| {
            self.settings.push(settings);
            self.settings.len() - 1
        })
    }

    /// Type of the parameters that ops use, where it is not f32.
    pub(crate) fn working(&self) -> Option<FloatDType> {
        self.working
    }

    /// Whether the states of a parameter are parked.
    pub(crate) fn is_parked(&self, index: usize) -> bool {
        matches!(self.states[index], Some(State::Parked(_)))
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
            Some(State::Parked(state)) if self.working.is_some() => {
                let master = ParkedTensor { array: &state.arrays[0], dtype: DType::F32 };
                Some(master.read::<B>(&state.device)?)
            }
            Some(State::Parked(_)) | None => None,
        })
    }

    /// Elements `range` of the master of a parameter, where it is kept here.
    pub(crate) fn kept_master(&self, index: usize, range: Range<usize>) -> Option<KeptArray<B>> {
        let has_master = self.working.is_some();
        match self.states[index].as_ref()? {
            State::Device(state) => state.master.clone().map(KeptArray::Device),
            State::Parked(state) => {
                has_master.then(|| KeptArray::Parked(state.arrays[0].copy(range, DType::F32)))
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
            State::Parked(state) => {
                Some(KeptArray::Parked(state.arrays[masters + place].copy(range, DType::F32)))
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
            Some(State::Parked(state)) if has_master => state.set(0, values)?,
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
            Some(State::Parked(state)) => {
                for (place, values) in values.into_iter().enumerate() {
                    state.set(masters + place, values)?;
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Starts a step. The gradient of each update is multiplied by `scale`. `operands` are those of all
    /// trainable parameters, in the order of their indices.
    ///
    /// # Errors
    /// The disk has failed in an earlier step.
    pub(crate) fn start_step<'a>(
        &mut self,
        rates: Rates,
        scale: f32,
        operands: impl Iterator<Item = ParkedOperands<'a>>,
    ) -> Result<StepInProgress<'_, B>, SwapError> {
        let (mut reads, mut largest) = (VecDeque::new(), 0);
        for operands in operands {
            let Some(State::Parked(state)) = &self.states[operands.index] else { continue };
            for piece in state.layout.pieces() {
                let first = reads.len();
                reads.extend(state.reads(&piece, &operands, self.working.is_some()));
                let bytes = reads.range(first..).map(PieceRead::bytes).sum();
                largest = largest.max(bytes);
            }
        }
        self.pipeline.start(reads, largest)?;
        self.time += 1;
        let step = |UpdateSettings { optimizer, lr_factor }: &UpdateSettings| {
            let rates = Rates { lr: lr_factor * rates.lr, ..rates };
            rule::scalars(optimizer, rates, self.time)
        };
        let steps = self.settings.iter().map(step).collect();
        Ok(StepInProgress { optimizer: self, steps, scale })
    }
}

impl<B: OptimizerOps> ParkedState<B> {
    /// `count` arrays: the master, if there is one, and zeros.
    fn zeros(
        parking: &Parking,
        owned: Owned<B>,
        count: usize,
        ledger: &Ledger,
    ) -> Result<Self, SwapError> {
        let (len, device) = owned.place();
        let layout = parking.layout(len, size_of::<f32>());
        let zeros = |_| ParkedArray::zeros(&parking.store, layout, ledger, Category::Optimizer);
        let arrays = (0..count).map(zeros).collect::<Result<_, SwapError>>()?;
        let state = Self { arrays, layout, device };
        if let Owned::Masters(masters) = owned {
            state.set(0, masters)?;
        }
        Ok(state)
    }

    /// Replaces the values of one array.
    fn set(&self, array: usize, values: B::FloatTensorPrimitive) -> Result<(), SwapError> {
        let values = float_bytes::<B>(values);
        self.arrays[array].write(&values, DType::F32, &mut WriteBehind::default())
    }

    /// Updates `values`, or the master and its copy in the type `working`. Returns what is to be stored on the
    /// device.
    fn update(
        &self,
        update: &mut HostUpdate<'_>,
        values: UpdateValues<B>,
        gradient: UpdateGradient<B>,
        working: Option<FloatDType>,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let in_memory;
        let gradient = match &gradient {
            UpdateGradient::Parked(array, dtype) => {
                HostGradient::Parked(ParkedTensor { array, dtype: *dtype })
            }
            UpdateGradient::Device(tensor) => {
                in_memory = float_into_host::<B>(tensor.clone());
                HostGradient::Memory(&in_memory)
            }
            UpdateGradient::Zeros => HostGradient::Zeros,
        };
        let updated = match (values, working) {
            (UpdateValues::Parked(values), None) => {
                update.run(HostValues::Parked(&values), &gradient)?;
                return Ok(None);
            }
            (UpdateValues::Parked(values), Some(dtype)) => {
                update.run(HostValues::RoundedMaster(&values, dtype), &gradient)?;
                return Ok(None);
            }
            (UpdateValues::Device(Some(values)), _) => {
                let mut values = float_into_host::<B>(values);
                update.run(HostValues::Own(&mut values), &gradient)?;
                values
            }
            (UpdateValues::Device(None), _) => {
                let mut copy = vec![0.0; self.layout.len];
                update.run(HostValues::OfMaster(&mut copy), &gradient)?;
                copy
            }
        };
        let updated = tensor::<B>(updated, &self.device);
        Ok(Some(match working {
            Some(dtype) => B::cast(updated, dtype),
            None => updated,
        }))
    }

    /// What an update reads of a file, in its order.
    fn reads(
        &self,
        piece: &Range<usize>,
        operands: &ParkedOperands<'_>,
        has_master: bool,
    ) -> impl Iterator<Item = PieceRead> {
        let states = self.arrays.iter().filter_map(|array| array.piece_read(piece, DType::F32));
        // The copy of a master is overwritten unread.
        let values = operands.values.as_ref().filter(|_| !has_master);
        let values = values.and_then(|values| values.piece_read(piece, DType::F32));
        let gradient = operands.gradient.as_ref();
        let gradient = gradient.and_then(|sum| sum.array.piece_read(piece, sum.dtype));
        states.chain(values).chain(gradient)
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
            len,
            device: device.clone(),
            _lease: ledger.hold(Category::Optimizer, arrays * len * size_of::<f32>()),
        }
    }
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
    /// For each of the settings.
    steps: Vec<ElementwiseStep>,
    scale: f32,
}

impl<B: OptimizerOps> StepInProgress<'_, B> {
    /// Whether the optimizer keeps the values of the parameter at `index` itself.
    pub(crate) fn has_master(&self, index: usize) -> bool {
        self.optimizer.has_master(index)
    }

    /// Updates the owned elements of a parameter with their gradient, both flat and padded alike,
    /// and returns what is to be stored: the new values, in the type that ops use; `None` if they are
    /// parked. Trainable parameters come in the order of their indices.
    ///
    /// # Errors
    /// The disk fails. The step must not be used.
    pub(crate) fn update(
        &mut self,
        index: usize,
        values: UpdateValues<B>,
        gradient: UpdateGradient<B>,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let Optimizer { states, settings_of, working, pipeline, .. } = &mut *self.optimizer;
        let (Some(state), Some(settings)) = (&mut states[index], settings_of[index]) else {
            unreachable!("only trainable parameters are updated, and each has a state")
        };
        let step = &self.steps[settings];
        match state {
            State::Device(state) => {
                // With a part of the states on the device, shards may be elsewhere.
                let (values, parked) = match values {
                    UpdateValues::Device(values) => (values, None),
                    UpdateValues::Parked(array) => (state.read_values(&array)?, Some(array)),
                };
                let gradient = match gradient {
                    UpdateGradient::Device(gradient) => gradient,
                    UpdateGradient::Zeros => tensor::<B>(vec![0.0; state.len], &state.device),
                    UpdateGradient::Parked(..) => {
                        unreachable!("gradients are parked where states are")
                    }
                };
                let updated = state.update(step, self.scale, values, gradient, *working);
                let Some(array) = parked else { return Ok(Some(updated)) };
                let dtype = updated.dtype();
                array.write(&float_bytes::<B>(updated), dtype, &mut WriteBehind::default())?;
                Ok(None)
            }
            State::Parked(state) => {
                let mut update = HostUpdate {
                    step,
                    scale: self.scale,
                    arrays: &state.arrays,
                    layout: state.layout,
                    pipeline,
                };
                state.update(&mut update, values, gradient, *working)
            }
        }
    }
}

impl<B: OptimizerOps> DeviceState<B> {
    /// The values of a parked shard, where there is no master of them.
    fn read_values(
        &self,
        shard: &ParkedArray,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let values = ParkedTensor { array: shard, dtype: DType::F32 };
        self.master.is_none().then(|| values.read::<B>(&self.device)).transpose()
    }

    /// One update of the master, or of `values` where there is none, and of the moments. Returns what is to
    /// be stored; with `working` in that type.
    fn update(
        &mut self,
        step: &ElementwiseStep,
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
    step: &ElementwiseStep,
    scale: f32,
    master: B::FloatTensorPrimitive,
    gradient: B::FloatTensorPrimitive,
    moments: &mut Vec<B::FloatTensorPrimitive>,
    working: Option<FloatDType>,
) -> (B::FloatTensorPrimitive, Option<B::FloatTensorPrimitive>) {
    let arrays = UpdateArrays { master, states: std::mem::take(moments) };
    let (arrays, copy) = B::update(step, scale, arrays, gradient, working);
    *moments = arrays.states;
    (arrays.master, copy)
}

/// A flat tensor of `values`.
fn tensor<B: Backend>(values: Vec<f32>, device: &B::Device) -> B::FloatTensorPrimitive {
    let shape = Shape::from(vec![values.len()]);
    float_from_host::<B>(TensorData::new(values, shape), device)
}
