//! The optimizer states of one parameter, on its device or offloaded.
//!
//! Main type: `TieredState`. All arrays of a parameter are flat f32 arrays of the same length: the
//! elements that the rank owns, and zeros up to the shard length. The order of the arrays is fixed:
//!
//! ```text
//! device   master: Option<tensor>   moments: [moment 0, moment 1, ..]
//! parked   arrays: [master?, moment 0, moment 1, ..]
//! ```
//!
//! The moments of a parked state therefore begin at index 1 if there is a master. The padding stays
//! zero, because the update of an element depends only on its own gradient, value and moments.
//!
//! A state on the device is updated by one fused kernel per parameter. The kernel takes the tensors
//! out of the state and updates them in place. If a checkpoint that is being written still shares
//! them, the kernel allocates new tensors instead. A parked state is updated chunk by chunk on the
//! CPU (`parked.rs`).

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType, Shape, TensorData};
use deepburn_kernels::ElementwiseStep;
use deepburn_nvme::SwapError;
use deepburn_ops::{
    OptimizerOps, ParameterUpdate, UpdateArrays, float_bytes, float_from_host, float_into_host,
    is_without_data,
};

use super::parked::{DirectionValues, HostGradient, HostUpdate, HostValues};
use super::{Owned, Squares, UpdateGradient, UpdateValues};
use crate::ledger::{Category, Lease, Ledger};
use crate::offload::{ChunkLayout, FileChunk, ParkedArray, ParkedTensor, Parking, WriteBehind};

/// The optimizer states of a parameter's owned elements, including padding.
#[derive(Debug)]
pub(super) enum TieredState<B: Backend> {
    /// On the device of the parameter.
    Device(DeviceState<B>),
    /// Offloaded to host memory or to the rank's file on NVMe.
    Parked(ParkedState<B>),
}

/// The offloaded arrays of a parameter. Each array holds its own ledger entry.
#[derive(Debug)]
pub(super) struct ParkedState<B: Backend> {
    /// The master, if there is one, and the moments. A checkpoint may hold a snapshot of an array
    /// while a step overwrites it.
    pub(super) arrays: Vec<Arc<ParkedArray>>,
    /// The division into chunks, which is the same for each array.
    pub(super) layout: ChunkLayout,
    /// The device of the parameter, which receives the results.
    pub(super) device: B::Device,
}

/// The arrays of a parameter on its device.
#[derive(Debug)]
pub(super) struct DeviceState<B: Backend> {
    /// The f32 master of the owned elements; `None` if the parameter itself is f32.
    pub(super) master: Option<B::FloatTensorPrimitive>,
    /// The moments, followed by the derived states of an optimizer with local steps.
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
    /// Returns an error if the disk fails.
    pub(super) fn set(
        &self,
        array: usize,
        values: B::FloatTensorPrimitive,
    ) -> Result<(), SwapError> {
        self.arrays[array].write_tensor::<B>(values, &mut WriteBehind::default())
    }

    /// Updates `values`, or the master and its copy in the type `working`. Returns the tensor to
    /// store on the device; `None` if the values are parked.
    ///
    /// There are four cases, depending on the location of the values and on whether there is a
    /// master:
    ///
    /// - Parked, no master: the chunks of the values are updated in place.
    /// - Parked, with a master: each updated chunk of the master is rounded into the parked copy,
    ///   which is not read.
    /// - On the device, no master: the values are copied to host memory, updated, and copied back.
    /// - On the device, with a master: the updated master is collected in host memory and uploaded,
    ///   rounded to `working` on the device.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The arrays are then partly updated.
    pub(super) fn update(
        &self,
        update: &mut HostUpdate<'_>,
        values: UpdateValues<B>,
        gradient: UpdateGradient<B>,
        working: Option<FloatDType>,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        if is_without_data::<B>() {
            report_transfers(update, Some(&values), &gradient, working);
            let dtype = working.unwrap_or(FloatDType::F32);
            // The result has the same place as in a run with data, so that the caller takes the
            // same path.
            let on_device = matches!(values, UpdateValues::Device(_));
            return Ok(on_device.then(|| B::float_empty(self.shape(), &self.device, dtype)));
        }
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

    /// Updates the moments and returns the direction on the device. It has the length of the
    /// arrays. If `squares` is set, the direction also depends on the values, and the squares of
    /// values and direction are added to `squares`.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(super) fn direct(
        &self,
        update: &mut HostUpdate<'_>,
        values: &UpdateValues<B>,
        gradient: UpdateGradient<B>,
        squares: Option<&mut Squares>,
    ) -> Result<B::FloatTensorPrimitive, SwapError> {
        if is_without_data::<B>() {
            report_transfers(update, None, &gradient, None);
            return Ok(B::float_empty(self.shape(), &self.device, FloatDType::F32));
        }
        let gradient = HostGradient::of(gradient);
        let mut copy;
        let values = match values {
            // Directions without norms (Muon) do not depend on the values.
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

    /// Returns the shape of each array.
    fn shape(&self) -> Shape {
        Shape::from(vec![self.layout.len])
    }

    /// Returns the file reads of a pass over `arrays` for one chunk, in the order of the pass:
    /// states, parked values, parked gradient. Arrays in host memory are omitted, because they need
    /// no reads.
    pub(super) fn reads(
        &self,
        chunk: &Range<usize>,
        arrays: Range<usize>,
        values: Option<&ParkedArray>,
        gradient: Option<&ParkedTensor<'_>>,
    ) -> impl Iterator<Item = FileChunk> {
        let states = self.arrays[arrays].iter();
        let states = states.filter_map(|array| array.file_chunk(chunk, DType::F32));
        let values = values.and_then(|values| values.file_chunk(chunk, DType::F32));
        let gradient = gradient.and_then(|sum| sum.array.file_chunk(chunk, sum.dtype));
        states.chain(values).chain(gradient)
    }
}

/// The values of an update on the device.
pub(super) struct ReadValues<B: Backend> {
    /// The values; `None` if the state has a master of them.
    pub(super) values: Option<B::FloatTensorPrimitive>,
    /// The parked array from which the values were read and into which the result must be written;
    /// `None` if the values were on the device.
    pub(super) parked: Option<Arc<ParkedArray>>,
}

impl<B: OptimizerOps> DeviceState<B> {
    /// Allocates `moments` arrays of zeros and takes the master from `owned`, if there is one. The
    /// ledger counts all arrays as optimizer states.
    pub(super) fn zeros(owned: Owned<B>, moments: usize, ledger: &Ledger) -> Self {
        let (len, device) = owned.place();
        // Each array has its own memory, so that steps can update it in place.
        let zeros = |_| zeros::<B>(len, &device);
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

    /// Reads parked values to the device. With a partial offload (`ratio`), the states of a
    /// parameter may be on the device while its shard is parked. With a master, the values are not
    /// needed and not read.
    ///
    /// # Errors
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

    /// Runs one fused pass over the moments that `step` uses and over the master, or over `values`
    /// if there is no master. Returns the new values to store, rounded to `working` if it is set.
    ///
    /// # Panics
    /// Panics if there is neither a master nor values.
    pub(super) fn update(
        &mut self,
        step: &ElementwiseStep,
        scale: f32,
        values: Option<B::FloatTensorPrimitive>,
        gradient: B::FloatTensorPrimitive,
        working: Option<FloatDType>,
    ) -> B::FloatTensorPrimitive {
        let keeps_master = self.master.is_some();
        let ParameterUpdate { arrays, gradient } = self.start_update(step, values, gradient);
        let result = B::update(step, scale, arrays, gradient, working);
        self.end_update(result, keeps_master)
    }

    /// Takes what an update changes. [`end_update`](Self::end_update) returns it to the state.
    ///
    /// # Panics
    /// Panics if there is neither a master nor values.
    pub(super) fn start_update(
        &mut self,
        step: &ElementwiseStep,
        values: Option<B::FloatTensorPrimitive>,
        gradient: B::FloatTensorPrimitive,
    ) -> ParameterUpdate<B> {
        let Some(master) = self.master.take().or(values) else {
            unreachable!("a parameter has its values in one of two places")
        };
        // The moments that the step does not use are at the end of the list. They are not passed to
        // the kernel.
        let states = self.moments.drain(..step.states()).collect();
        ParameterUpdate { arrays: UpdateArrays { master, states }, gradient }
    }

    /// Takes the result of an update and returns the new values to store. `keeps_master` tells
    /// whether the state had a master before.
    pub(super) fn end_update(
        &mut self,
        (arrays, copy): (UpdateArrays<B>, Option<B::FloatTensorPrimitive>),
        keeps_master: bool,
    ) -> B::FloatTensorPrimitive {
        let UpdateArrays { master, states } = arrays;
        self.moments.splice(..0, states);
        if keeps_master {
            self.master = Some(master.clone());
        }
        // Without a 16-bit type, the updated values themselves are stored.
        copy.unwrap_or(master)
    }

    /// Stores the current values, which are the same on all ranks, in the last array (0/1 Adam's
    /// `common`). They are the master, or `values` if there is no master. The tensor is shared; the
    /// next update copies it.
    pub(super) fn keep_common(&mut self, values: Option<&B::FloatTensorPrimitive>) {
        if let (Some(values), Some(common)) =
            (self.master.as_ref().or(values), self.moments.last_mut())
        {
            *common = values.clone();
        }
    }

    /// Updates the moments and returns the direction, which `step` writes into an additional last
    /// state. The master, or `values` if there is no master, is an operand and does not change. If
    /// `squares` is set, the squares of values and direction are added to it in f64 on the host.
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
        // The last state of the step is the direction. Before the freeze, 1-bit LAMB does not use
        // its third moment.
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

/// Reports what the update of a state without data would transfer: the arrays and the `values` are
/// read and written, the rounded copy of a master is only written, and the gradient only read.
fn report_transfers<B: Backend>(
    update: &HostUpdate<'_>,
    values: Option<&UpdateValues<B>>,
    gradient: &UpdateGradient<B>,
    working: Option<FloatDType>,
) {
    update.arrays.iter().for_each(|array| array.report_transfers(2, DType::F32));
    if let Some(UpdateValues::Parked(values)) = values {
        match working {
            Some(dtype) => values.report_transfers(1, dtype.into()),
            None => values.report_transfers(2, DType::F32),
        }
    }
    if let UpdateGradient::Parked(gradient, dtype) = gradient {
        gradient.report_transfers(1, *dtype);
    }
}

/// Returns `len` zeros in f32, which no other tensor refers to.
pub(super) fn zeros<B: Backend>(len: usize, device: &B::Device) -> B::FloatTensorPrimitive {
    match is_without_data::<B>() {
        true => B::float_empty(Shape::from(vec![len]), device, FloatDType::F32),
        false => tensor::<B>(vec![0.0; len], device),
    }
}

/// Uploads `values` as a flat f32 tensor.
pub(super) fn tensor<B: Backend>(values: Vec<f32>, device: &B::Device) -> B::FloatTensorPrimitive {
    let shape = Shape::from(vec![values.len()]);
    float_from_host::<B>(TensorData::new(values, shape), device)
}
