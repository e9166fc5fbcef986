//! Updates offloaded states on the CPU, chunk by chunk.
//!
//! Main type: `HostUpdate`. All arrays of a parameter have the same layout, so chunk `i` has the
//! same elements in each array. Each chunk takes four steps:
//!
//! ```text
//! read     master | moments | values | gradient      through the pipeline, or in host memory
//! compute  one call of the element-wise kernel       the gradient is widened to f32
//! publish  the updated master, rounded               into the working copy
//! store    the changed chunks                        the pipeline writes them in the background
//! ```
//!
//! Updates are element-wise, so the results do not depend on the chunk size and are bitwise
//! identical to updates on the device. Only the chunks in use are in memory; a 16-bit working copy
//! is overwritten without being read. With a file, the pipeline reads the next chunks and writes
//! the previous ones at the same time.
//!
//! The arrays must be read in the order of `ParkedState::reads`.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType};
use deepburn_kernels::{ElementwiseStep, FloatSlice, OwnedSlice, cast, widen};
use deepburn_nvme::SwapError;
use deepburn_ops::float_into_host;
use half::{bf16, f16};

use super::{Squares, UpdateGradient};
use crate::offload::{ChunkInMemory, ChunkLayout, ParkedArray, Pipeline};

/// The update of one parameter whose states are parked.
#[derive(Debug)]
pub(super) struct HostUpdate<'a> {
    /// The kernel with the scalars of this step.
    pub(super) step: &'a ElementwiseStep,
    /// The factor of the gradient.
    pub(super) scale: f32,
    /// The arrays that the pass uses: the master, if there is one and the pass needs it, then the
    /// moments.
    pub(super) arrays: &'a [Arc<ParkedArray>],
    /// Whether the optimizer has a master of the values.
    pub(super) has_master: bool,
    /// The division of each array into chunks.
    pub(super) layout: ChunkLayout,
    /// The pipeline of the step's transfers.
    pub(super) pipeline: &'a mut Pipeline,
}

/// The values that an update changes. Without a master, the kernel updates the values directly.
/// With a master, they only receive the result.
#[derive(Debug)]
pub(super) enum HostValues<'a> {
    /// The values of a parameter without a master, in host memory.
    Own(&'a mut [f32]),
    /// The values of a parameter without a master, as a parked f32 array that is updated in place.
    Parked(&'a ParkedArray),
    /// Receives the updated master in f32, for the device.
    OfMaster(&'a mut [f32]),
    /// Receives the updated master, rounded to this 16-bit type, as a parked array.
    RoundedMaster(&'a ParkedArray, FloatDType),
}

/// The values that a direction depends on. They are only read.
#[derive(Debug)]
pub(super) enum DirectionValues<'a> {
    /// The direction does not depend on the values.
    Unread,
    /// The master, which is the first array.
    Master,
    /// The values of a parameter without a master, copied to host memory.
    Memory(&'a mut [f32]),
    /// The values of a parameter without a master, as a parked f32 array.
    Parked(&'a ParkedArray),
}

/// The gradient of an update, outside of the device.
#[derive(Debug)]
pub(super) enum HostGradient {
    /// A copy of the device's gradient, in f32.
    Memory(Vec<f32>),
    /// An accumulated gradient that was parked, in this type.
    Parked(Arc<ParkedArray>, DType),
    /// The parameter was not used in the step.
    Zeros,
}

impl HostUpdate<'_> {
    /// Updates all chunks.
    ///
    /// # Errors
    /// Returns an error if the disk fails. The states are then partly updated, and the pipeline
    /// returns the error for every later step.
    pub(super) fn run(
        &mut self,
        mut values: HostValues<'_>,
        gradient: &HostGradient,
    ) -> Result<(), SwapError> {
        // Values in memory are temporary, so no checkpoint has a copy of them.
        let values_array = match &values {
            HostValues::Parked(array) | HostValues::RoundedMaster(array, _) => Some(*array),
            HostValues::Own(_) | HostValues::OfMaster(_) => None,
        };
        self.keep_copies(values_array)?;
        for chunk in self.layout.chunks() {
            self.update(&chunk, &mut values, gradient)?;
        }
        Ok(())
    }

    /// Copies the elements of all arrays, and of `values`, that a checkpoint which is being saved
    /// still needs, before they are overwritten.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    fn keep_copies(&mut self, values: Option<&ParkedArray>) -> Result<(), SwapError> {
        for array in self.arrays.iter().map(|array| &**array).chain(values) {
            let kept = array.keep_copies();
            self.pipeline.note(kept)?;
        }
        Ok(())
    }

    /// Updates one chunk of all arrays and stores the changed chunks.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    fn update(
        &mut self,
        range: &Range<usize>,
        values: &mut HostValues<'_>,
        gradient: &HostGradient,
    ) -> Result<(), SwapError> {
        let arrays = self.arrays.iter();
        let mut chunks = arrays
            .map(|array| array.chunk(range, DType::F32, self.pipeline))
            .collect::<Result<Vec<_>, SwapError>>()?;
        let mut own = match values {
            HostValues::Parked(array) => Some(array.chunk(range, DType::F32, self.pipeline)?),
            _ => None,
        };
        let gradient = gradient.chunk(range, self.pipeline)?;
        let mut states: Vec<_> = chunks.iter_mut().map(ChunkInMemory::floats).collect();
        // The kernel updates the values, or the first state if it is a master.
        let own_values = match (&mut *values, &mut own) {
            (HostValues::Own(values), _) => Some(&mut values[range.clone()]),
            (_, Some(own)) => Some(own.floats()),
            (_, None) => None,
        };
        match (own_values, states.split_first_mut()) {
            (Some(values), _) => self.compute(values, &gradient, &mut states),
            (None, Some((master, moments))) => {
                self.compute(master, &gradient, moments);
                self.publish(range, master, values)?;
            }
            (None, None) => unreachable!("the master is the first array"),
        }
        drop(states);
        chunks.into_iter().chain(own).try_for_each(|chunk| chunk.store(self.pipeline))
    }

    /// Updates the moments of all chunks and writes the direction into `direction`, which has the
    /// length of the arrays. Adds the squares of the values and of the direction to `squares`.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(super) fn direct(
        &mut self,
        mut values: DirectionValues<'_>,
        gradient: &HostGradient,
        direction: &mut [f32],
        mut squares: Option<&mut Squares>,
    ) -> Result<(), SwapError> {
        // The values are only read, so copies of them stay valid.
        self.keep_copies(None)?;
        for range in self.layout.chunks() {
            let direction = &mut direction[range.clone()];
            self.direct_chunk(&range, &mut values, gradient, direction, squares.as_deref_mut())?;
        }
        Ok(())
    }

    /// Computes the direction of one chunk and stores the changed moments. The kernel writes the
    /// direction into its last state, which is `direction`.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    fn direct_chunk(
        &mut self,
        range: &Range<usize>,
        values: &mut DirectionValues<'_>,
        gradient: &HostGradient,
        direction: &mut [f32],
        squares: Option<&mut Squares>,
    ) -> Result<(), SwapError> {
        let arrays = self.arrays.iter();
        let mut chunks = arrays
            .map(|array| array.chunk(range, DType::F32, self.pipeline))
            .collect::<Result<Vec<_>, SwapError>>()?;
        let mut own = match values {
            DirectionValues::Parked(array) => {
                Some(array.chunk(range, DType::F32, self.pipeline)?)
            }
            _ => None,
        };
        let gradient = gradient.chunk(range, self.pipeline)?;
        let mut states: Vec<_> = chunks.iter_mut().map(ChunkInMemory::floats).collect();
        states.push(direction);
        let mut unread = Vec::new();
        let (param, states) = match (&mut *values, &mut own, states.split_first_mut()) {
            (DirectionValues::Master, _, Some((master, states))) => (&mut **master, states),
            (DirectionValues::Memory(values), ..) => (&mut values[range.clone()], &mut states[..]),
            (_, Some(own), _) => (own.floats(), &mut states[..]),
            (_, None, _) => {
                // The kernel needs a parameter slice of the right length, although it does not use
                // the values.
                unread.resize(range.len(), 0.0);
                (&mut unread[..], &mut states[..])
            }
        };
        self.compute(param, &gradient, states);
        if let (Some([of_values, of_direction]), Some(made)) = (squares, states.last()) {
            of_values.push(param);
            of_direction.push(made);
        }
        // The values are unchanged, so the master is not written back.
        let masters = usize::from(matches!(values, DirectionValues::Master));
        chunks.drain(masters..).try_for_each(|chunk| chunk.store(self.pipeline))
    }

    /// Runs the kernel on one chunk with an f32 gradient. `param` and `states` are updated in
    /// place.
    fn compute(&self, param: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]) {
        let slice = OwnedSlice { param, states, working: None };
        self.step.update(self.scale, FloatSlice::F32(gradient), slice);
    }

    /// Copies a chunk of the updated master into the working copy, rounded to its type if it is a
    /// 16-bit array.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    fn publish(
        &mut self,
        range: &Range<usize>,
        master: &[f32],
        values: &mut HostValues<'_>,
    ) -> Result<(), SwapError> {
        match values {
            HostValues::OfMaster(copy) => copy[range.clone()].copy_from_slice(master),
            HostValues::RoundedMaster(array, dtype) => {
                // Every element is overwritten, so the old working copy is not read from the disk.
                let unfilled = array.unfilled_chunk(range, (*dtype).into());
                let mut chunk = self.pipeline.note(unfilled)?;
                let bytes = chunk.bytes();
                match dtype {
                    FloatDType::F16 => {
                        cast(master, bytemuck::cast_slice_mut::<_, f16>(bytes).into());
                    }
                    FloatDType::BF16 => {
                        cast(master, bytemuck::cast_slice_mut::<_, bf16>(bytes).into());
                    }
                    other => unreachable!("ops use 16 bits where there are masters, not {other:?}"),
                }
                chunk.store(self.pipeline)?;
            }
            HostValues::Own(_) | HostValues::Parked(_) => {
                unreachable!("values without a master are updated themselves")
            }
        }
        Ok(())
    }
}

impl HostGradient {
    /// Converts the gradient of an update. A gradient on the device is copied to host memory in
    /// f32.
    pub(super) fn of<B: Backend>(gradient: UpdateGradient<B>) -> Self {
        match gradient {
            UpdateGradient::Device(tensor) => Self::Memory(float_into_host::<B>(tensor)),
            UpdateGradient::Parked(array, dtype) => Self::Parked(array, dtype),
            UpdateGradient::Zeros => Self::Zeros,
        }
    }

    /// Returns the elements of one chunk in f32. Parked and zero gradients need new memory; other
    /// gradients are borrowed.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    fn chunk(
        &self,
        range: &Range<usize>,
        pipeline: &mut Pipeline,
    ) -> Result<Cow<'_, [f32]>, SwapError> {
        let (array, dtype) = match self {
            Self::Memory(gradient) => return Ok(Cow::Borrowed(&gradient[range.clone()])),
            Self::Zeros => return Ok(Cow::Owned(vec![0.0; range.len()])),
            Self::Parked(array, dtype) => (array, *dtype),
        };
        let mut chunk = array.chunk(range, dtype, pipeline)?;
        let bytes = &*chunk.bytes();
        let mut wide = vec![0.0; range.len()];
        match dtype {
            DType::F16 => widen(FloatSlice::F16(bytemuck::cast_slice(bytes)), &mut wide),
            DType::BF16 => widen(FloatSlice::Bf16(bytemuck::cast_slice(bytes)), &mut wide),
            _ => wide.copy_from_slice(bytemuck::cast_slice(bytes)),
        }
        Ok(Cow::Owned(wide))
    }
}
