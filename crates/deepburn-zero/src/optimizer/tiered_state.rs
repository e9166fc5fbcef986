//! What the optimizer keeps of one parameter, on its device or parked.
//!
//! Main type: `TieredState`. All arrays of a parameter are f32, flat and equally long: the elements that
//! the rank owns, and zeros up to the shard length. The order of the arrays is fixed:
//!
//! ```text
//! device   master: Option<tensor>   moments: [moment 0, moment 1, ..]
//! parked   arrays: [master?, moment 0, moment 1, ..]
//! ```
//!
//! so the moments of a parked state begin at index 1 if there is a master. Zeros stay zeros,
//! because every update of an element depends on that element's gradient, value and moments alone.
//!
//! A state on the device is updated by one fused kernel per parameter. The kernel takes the tensors
//! out of the state and updates them in place, unless a checkpoint that is being written still
//! shares them: then it makes new ones. A parked state is updated piece by piece on the CPU
//! (`parked.rs`).

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorData};
use deepburn_kernels::ElementwiseStep;
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, UpdateArrays, float_bytes, float_from_host, float_into_host};

use super::parked::{DirectionValues, HostGradient, HostUpdate, HostValues};
use super::{Owned, Squares, UpdateGradient, UpdateValues};
use crate::ledger::{Category, Lease, Ledger};
use crate::parked::{ParkedArray, ParkedTensor, PieceLayout, PieceRead, WriteBehind};
use crate::parking::Parking;

/// What the optimizer keeps of one parameter's owned elements, padding included.
#[derive(Debug)]
pub(super) enum TieredState<B: Backend> {
    /// On the device of the parameter.
    Device(DeviceState<B>),
    /// In host memory beside a device, or in the rank's file on NVMe.
    Parked(ParkedState<B>),
}

/// The arrays of a parameter outside of the device. Each array holds its own ledger entry.
#[derive(Debug)]
pub(super) struct ParkedState<B: Backend> {
    /// The master, if there is one, and the moments. A checkpoint may hold a snapshot of an array
    /// while a step overwrites it.
    pub(super) arrays: Vec<Arc<ParkedArray>>,
    /// The division into pieces, the same for each array.
    pub(super) layout: PieceLayout,
    /// The device of the parameter, to which results go.
    pub(super) device: B::Device,
}

/// The arrays of a parameter on its device.
#[derive(Debug)]
pub(super) struct DeviceState<B: Backend> {
    /// The owned elements in full precision, if parameters are kept in 16 bits. `None` otherwise:
    /// then the parameter itself has the values.
    pub(super) master: Option<B::FloatTensorPrimitive>,
    /// The moments, in the order of `rule::state_arrays`.
    pub(super) moments: Vec<B::FloatTensorPrimitive>,
    /// The number of elements of each array, padding included.
    pub(super) len: usize,
    /// The device of the arrays.
    pub(super) device: B::Device,
    /// The bytes of all arrays in the ledger, until the state is dropped.
    _lease: Lease,
}

impl<B: OptimizerOps> ParkedState<B> {
    /// Allocates `count` arrays of zeros and writes the master into the first one, if `owned` has
    /// it.
    ///
    /// # Errors
    ///
    /// Returns an error if the file of this rank is full or the disk fails.
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

    /// Replaces the values of one array and waits until they are written.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    pub(super) fn set(
        &self,
        array: usize,
        values: B::FloatTensorPrimitive,
    ) -> Result<(), SwapError> {
        let values = float_bytes::<B>(values);
        self.arrays[array].write(&values, DType::F32, &mut WriteBehind::default())
    }

    /// Updates `values`, or the master and its copy in the type `working`. Returns the tensor that
    /// is to be stored on the device; `None` if the values are parked.
    ///
    /// There are four cases, by where the values are and whether a master exists:
    ///
    /// - Parked, no master: the pieces of the values are updated in place.
    /// - Parked, with a master: each updated piece of the master is rounded into the parked copy,
    ///   which is not read.
    /// - On the device, no master: the values are copied to host memory, updated, and copied back.
    /// - On the device, with a master: the updated master is collected in host memory and uploaded,
    ///   rounded to `working` on the device.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails. The arrays are then partly updated.
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

    /// Updates the moments and returns the direction, as long as the arrays, on the device. If
    /// `squares` is set, the direction also depends on the values, and the squares of both are
    /// added to it.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
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
            // Directions without norms (Muon) do not depend on the values, so these are not read.
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

    /// Lists what a pass over `arrays` reads of the file for one piece, in the order of the pass:
    /// states, parked values, parked gradient. Arrays in host memory need no reads and are omitted.
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

/// The values of an update, on the device of their state.
pub(super) struct ReadValues<B: Backend> {
    /// The values; `None` if the state has a master of them.
    pub(super) values: Option<B::FloatTensorPrimitive>,
    /// The array from which they were read and into which the result is to be written; `None` if
    /// they were on the device.
    pub(super) parked: Option<Arc<ParkedArray>>,
}

impl<B: OptimizerOps> DeviceState<B> {
    /// Allocates `moments` arrays of zeros and takes the master, if `owned` has it. The ledger
    /// counts all of them as optimizer states.
    pub(super) fn zeros(owned: Owned<B>, moments: usize, ledger: &Ledger) -> Self {
        let (len, device) = owned.place();
        // Each array has memory of its own, so that steps update it in place.
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

    /// Reads parked values to the device. With a partial offload (`ratio`) the states of a
    /// parameter may be on the device while its shard is parked. With a master the values are not
    /// needed and not read.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    pub(super) fn read(&self, values: UpdateValues<B>) -> Result<ReadValues<B>, SwapError> {
        let array = match values {
            UpdateValues::Device(values) => return Ok(ReadValues { values, parked: None }),
            UpdateValues::Parked(array) => array,
        };
        let shard = ParkedTensor { array: &array, dtype: DType::F32 };
        let values = self.master.is_none().then(|| shard.read::<B>(&self.device)).transpose()?;
        Ok(ReadValues { values, parked: Some(array) })
    }

    /// Runs one fused pass over the master, or over `values` if there is none, and the moments that
    /// `step` uses. Returns what is to be stored: the new values, rounded to `working` if it is
    /// set.
    ///
    /// # Panics
    ///
    /// Panics if there is neither a master nor values, which would be an error of the caller.
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
        // Moments that the step does not use stay out of the kernel. They are the last ones of the
        // list.
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

    /// Stores the current values, which are the same on all ranks, as the last array (0/1 Adam's
    /// `common`): the master, or `values` if there is none. The tensor is shared, not copied; the
    /// next update makes the copy.
    pub(super) fn keep_common(&mut self, values: Option<&B::FloatTensorPrimitive>) {
        if let (Some(values), Some(common)) =
            (self.master.as_ref().or(values), self.moments.last_mut())
        {
            *common = values.clone();
        }
    }

    /// Updates the moments and returns the direction, which `step` writes into one more array after
    /// them. The values, `values` or the master, are an operand only and do not change. If
    /// `squares` is set, the squares of values and direction are added to it, in host memory and in
    /// f64.
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
        // The step's last state is the direction. 1-bit LAMB's steps before the freeze also leave
        // out its third moment.
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

/// Uploads `values` as a flat f32 tensor.
pub(super) fn tensor<B: Backend>(values: Vec<f32>, device: &B::Device) -> B::FloatTensorPrimitive {
    let shape = Shape::from(vec![values.len()]);
    float_from_host::<B>(TensorData::new(values, shape), device)
}
