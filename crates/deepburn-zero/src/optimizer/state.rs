//! What the optimizer keeps of one parameter, on its device or parked.

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorData};
use deepburn_kernels::ElementwiseStep;
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, UpdateArrays, float_bytes, float_from_host, float_into_host};

use super::parked::{DirectionValues, HostGradient, HostUpdate, HostValues};
use super::step::Squares;
use super::{Owned, UpdateGradient, UpdateValues};
use crate::ledger::{Category, Lease, Ledger};
use crate::parked::{ParkedArray, ParkedTensor, PieceLayout, PieceRead, WriteBehind};
use crate::tiers::Parking;

/// What the optimizer keeps about one parameter's owned elements, padding included.
#[derive(Debug)]
pub(super) enum State<B: Backend> {
    /// On the device of the parameter.
    Device(DeviceState<B>),
    /// In host memory or in a file.
    Parked(ParkedState<B>),
}

/// Arrays outside of the device.
#[derive(Debug)]
pub(super) struct ParkedState<B: Backend> {
    /// The master, if there is one, and the moments.
    pub(super) arrays: Vec<Arc<ParkedArray>>,
    /// Of each array.
    pub(super) layout: PieceLayout,
    pub(super) device: B::Device,
}

/// Arrays on the device.
#[derive(Debug)]
pub(super) struct DeviceState<B: Backend> {
    /// The elements in full precision, where parameters are kept in 16 bits.
    pub(super) master: Option<B::FloatTensorPrimitive>,
    pub(super) moments: Vec<B::FloatTensorPrimitive>,
    /// Elements of each array.
    pub(super) len: usize,
    pub(super) device: B::Device,
    _lease: Lease,
}

impl<B: OptimizerOps> ParkedState<B> {
    /// `count` arrays: the master, if there is one, and zeros.
    pub(super) fn zeros(
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
    pub(super) fn set(
        &self,
        array: usize,
        values: B::FloatTensorPrimitive,
    ) -> Result<(), SwapError> {
        let values = float_bytes::<B>(values);
        self.arrays[array].write(&values, DType::F32, &mut WriteBehind::default())
    }

    /// Updates `values`, or the master and its copy in the type `working`. Returns what is to be stored on the
    /// device.
    pub(super) fn update(
        &self,
        update: &mut HostUpdate<'_>,
        values: UpdateValues<B>,
        gradient: UpdateGradient<B>,
        working: Option<FloatDType>,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        let gradient = HostGradient::of(gradient);
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

    /// Updates the moments and returns the direction. It depends on `values` where the squares of both are wanted,
    /// which are added to `squares`.
    pub(super) fn direct(
        &self,
        update: &mut HostUpdate<'_>,
        values: &UpdateValues<B>,
        gradient: UpdateGradient<B>,
        squares: Option<&mut Squares>,
    ) -> Result<B::FloatTensorPrimitive, SwapError> {
        let gradient = HostGradient::of(gradient);
        let mut copy;
        let values = match values {
            _ if squares.is_none() => DirectionValues::Unread,
            UpdateValues::Parked(array) if !update.has_master => DirectionValues::Parked(array),
            UpdateValues::Device(Some(tensor)) => {
                copy = float_into_host::<B>(tensor.clone());
                DirectionValues::Memory(&mut copy)
            }
            UpdateValues::Parked(_) | UpdateValues::Device(None) => DirectionValues::Master,
        };
        let mut direction = vec![0.0; self.layout.len];
        update.direct(values, &gradient, &mut direction, squares)?;
        Ok(tensor::<B>(direction, &self.device))
    }

    /// What a pass over some of the arrays, and over values and a gradient that are parked, reads of a file, in its
    /// order.
    pub(super) fn reads(
        &self,
        piece: &Range<usize>,
        arrays: Range<usize>,
        values: Option<&ParkedArray>,
        gradient: Option<&ParkedTensor<'_>>,
    ) -> impl Iterator<Item = PieceRead> {
        let states = self.arrays[arrays].iter();
        let states = states.filter_map(|array| array.piece_read(piece, DType::F32));
        let values = values.and_then(|values| values.piece_read(piece, DType::F32));
        let gradient = gradient.and_then(|sum| sum.array.piece_read(piece, sum.dtype));
        states.chain(values).chain(gradient)
    }
}

/// Values of an update on the device of their state.
pub(super) struct ReadValues<B: Backend> {
    /// None where the state has a master of them.
    pub(super) values: Option<B::FloatTensorPrimitive>,
    /// Where they came from and are to be stored, unless they were on the device.
    pub(super) parked: Option<Arc<ParkedArray>>,
}

impl<B: OptimizerOps> DeviceState<B> {
    pub(super) fn zeros(owned: Owned<B>, moments: usize, ledger: &Ledger) -> Self {
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

    /// Reads parked values: with a part of the states on the device, shards may be elsewhere.
    pub(super) fn read(&self, values: UpdateValues<B>) -> Result<ReadValues<B>, SwapError> {
        let array = match values {
            UpdateValues::Device(values) => return Ok(ReadValues { values, parked: None }),
            UpdateValues::Parked(array) => array,
        };
        let shard = ParkedTensor { array: &array, dtype: DType::F32 };
        let values = self.master.is_none().then(|| shard.read::<B>(&self.device)).transpose()?;
        Ok(ReadValues { values, parked: Some(array) })
    }

    /// One pass over the master, or over `values` where there is none, and the moments that `step` uses. Returns
    /// what is to be stored; with `working` in that type.
    pub(super) fn update(
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
        let used = step.states();
        let states = self.moments.drain(..used).collect();
        let arrays = UpdateArrays { master, states };
        let (UpdateArrays { master, states }, copy) =
            B::update(step, scale, arrays, gradient, working);
        self.moments.splice(..0, states);
        if keeps_master {
            self.master = Some(master.clone());
        }
        copy.unwrap_or(master)
    }

    /// Stores the present values, which are the same on all ranks, as the last array: the master, or `values` where
    /// there is none.
    pub(super) fn keep_common(&mut self, values: Option<&B::FloatTensorPrimitive>) {
        if let (Some(values), Some(common)) =
            (self.master.as_ref().or(values), self.moments.last_mut())
        {
            *common = values.clone();
        }
    }

    /// Updates the moments and returns the direction, which `step` writes into the array after them. `values` stay as
    /// they are, and belong to a parameter without a master.
    pub(super) fn direct(
        &mut self,
        step: &ElementwiseStep,
        scale: f32,
        values: &mut Option<B::FloatTensorPrimitive>,
        gradient: B::FloatTensorPrimitive,
        squares: Option<&mut Squares>,
    ) -> B::FloatTensorPrimitive {
        let keeps_master = self.master.is_some();
        let Some(master) = self.master.take().or_else(|| values.take()) else {
            unreachable!("a parameter has its values in one of two places")
        };
        // The array after those that the step reads; 1-bit LAMB's steps before the freeze leave one moment alone.
        let read = step.states() - 1;
        let mut states: Vec<_> = self.moments.drain(..read).collect();
        let shape = Shape::from(vec![self.len]);
        states.push(B::float_zeros(shape, &self.device, FloatDType::F32));
        let arrays = UpdateArrays { master, states };
        let (UpdateArrays { master, mut states }, _) =
            B::update(step, scale, arrays, gradient, None);
        let Some(direction) = states.pop() else { unreachable!("it was pushed before") };
        self.moments.splice(..0, states);
        if let Some([of_values, of_direction]) = squares {
            of_values.push(bytemuck::cast_slice(&float_bytes::<B>(master.clone())));
            of_direction.push(bytemuck::cast_slice(&float_bytes::<B>(direction.clone())));
        }
        *(if keeps_master { &mut self.master } else { values }) = Some(master);
        direction
    }
}

/// A flat tensor of `values`.
pub(super) fn tensor<B: Backend>(values: Vec<f32>, device: &B::Device) -> B::FloatTensorPrimitive {
    let shape = Shape::from(vec![values.len()]);
    float_from_host::<B>(TensorData::new(values, shape), device)
}
