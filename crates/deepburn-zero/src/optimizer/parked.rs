//! Updates of parked states, piece by piece with the kernels of the CPU.
//!
//! Main type: `HostUpdate`. All arrays of a parameter have the same layout, so
//! one piece of each holds the same elements. For each piece in turn:
//!
//! ```text
//! read     master | moments | values | gradient      from the pipeline, or host memory itself
//! compute  one call of the element-wise kernel       the gradient is widened to f32
//! publish  the updated master, rounded               into the working copy
//! store    the pieces that have changed              the pipeline writes behind
//! ```
//!
//! Nothing depends on where a piece begins, because updates are element-wise.
//! The bits are therefore the same as for states on the device. Only the pieces
//! in use are in memory; with a file the pipeline reads the next ones and
//! writes the previous ones meanwhile.
//!
//! The arrays have to be visited in the order that `ParkedState::reads` has
//! announced.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType};
use deepburn_kernels::{ElementwiseStep, FloatSlice, OwnedSlice, cast, widen};
use deepburn_nvme::SwapError;
use deepburn_ops::float_into_host;
use half::{bf16, f16};

use super::{Squares, UpdateGradient};
use crate::parked::{ParkedArray, PieceInMemory, PieceLayout, Pipeline};

/// The update of one parameter whose states are parked.
#[derive(Debug)]
pub(super) struct HostUpdate<'a> {
    /// The kernel with the scalars of this step.
    pub(super) step: &'a ElementwiseStep,
    /// The factor of the gradient.
    pub(super) scale: f32,
    /// The arrays that the pass uses: the master, if there is one and the pass
    /// needs it, then moments.
    pub(super) arrays: &'a [Arc<ParkedArray>],
    /// Whether the optimizer has a master of the values.
    pub(super) has_master: bool,
    /// The division of each array into pieces.
    pub(super) layout: PieceLayout,
    /// The transfers of the step.
    pub(super) pipeline: &'a mut Pipeline,
}

/// The values that an update changes. Without a master they are the kernel's
/// parameter. With one, they only receive the result.
#[derive(Debug)]
pub(super) enum HostValues<'a> {
    /// The values of a parameter without a master, in host memory.
    Own(&'a mut [f32]),
    /// The values of a parameter without a master, as a parked f32 array that
    /// is updated in place.
    Parked(&'a ParkedArray),
    /// Receives the updated master in f32, for the device.
    OfMaster(&'a mut [f32]),
    /// Receives the updated master, rounded to this 16-bit type, as a parked
    /// array.
    RoundedMaster(&'a ParkedArray, FloatDType),
}

/// The values that a direction depends on. They are read and never changed.
#[derive(Debug)]
pub(super) enum DirectionValues<'a> {
    /// The direction does not depend on them.
    Unread,
    /// They are the master, which is the first array.
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
    /// Updates all pieces.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails. The pipeline remembers it, because
    /// the states are then partly updated.
    pub(super) fn run(
        &mut self,
        mut values: HostValues<'_>,
        gradient: &HostGradient,
    ) -> Result<(), SwapError> {
        let values_array = match &values {
            HostValues::Parked(array) | HostValues::RoundedMaster(array, _) => Some(*array),
            HostValues::Own(_) | HostValues::OfMaster(_) => None,
        };
        // A save may still have to write the current elements. It gets a copy
        // before they are overwritten.
        for array in self.arrays.iter().map(|array| &**array).chain(values_array) {
            let kept = array.keep_copies();
            self.pipeline.note(kept)?;
        }
        for piece in self.layout.pieces() {
            self.update(&piece, &mut values, gradient)?;
        }
        Ok(())
    }

    /// Updates one piece of all arrays and hands the changed pieces back for
    /// writing.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    fn update(
        &mut self,
        range: &Range<usize>,
        values: &mut HostValues<'_>,
        gradient: &HostGradient,
    ) -> Result<(), SwapError> {
        let arrays = self.arrays.iter();
        let mut pieces = arrays
            .map(|array| array.piece(range, DType::F32, self.pipeline))
            .collect::<Result<Vec<_>, SwapError>>()?;
        let mut own = match values {
            HostValues::Parked(array) => Some(array.piece(range, DType::F32, self.pipeline)?),
            _ => None,
        };
        let gradient = gradient.piece(range, self.pipeline)?;
        let mut states: Vec<_> = pieces.iter_mut().map(PieceInMemory::floats).collect();
        // Without a master the values are the kernel's parameter. With one, the
        // first state is.
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
        pieces.into_iter().chain(own).try_for_each(|piece| piece.store(self.pipeline))
    }

    /// Updates the moments of all pieces and writes `direction`, which is as
    /// long as the arrays. Adds the squares of the values and of the direction
    /// to `squares`.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    pub(super) fn direct(
        &mut self,
        mut values: DirectionValues<'_>,
        gradient: &HostGradient,
        direction: &mut [f32],
        mut squares: Option<&mut Squares>,
    ) -> Result<(), SwapError> {
        for array in self.arrays {
            let kept = array.keep_copies();
            self.pipeline.note(kept)?;
        }
        for range in self.layout.pieces() {
            let direction = &mut direction[range.clone()];
            self.direct_piece(&range, &mut values, gradient, direction, squares.as_deref_mut())?;
        }
        Ok(())
    }

    /// Makes the direction of one piece and stores the changed moments. The
    /// slice of `direction` is the last state of the kernel, which writes it
    /// there.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    fn direct_piece(
        &mut self,
        range: &Range<usize>,
        values: &mut DirectionValues<'_>,
        gradient: &HostGradient,
        direction: &mut [f32],
        squares: Option<&mut Squares>,
    ) -> Result<(), SwapError> {
        let arrays = self.arrays.iter();
        let mut pieces = arrays
            .map(|array| array.piece(range, DType::F32, self.pipeline))
            .collect::<Result<Vec<_>, SwapError>>()?;
        let mut own = match values {
            DirectionValues::Parked(array) => {
                Some(array.piece(range, DType::F32, self.pipeline)?)
            }
            _ => None,
        };
        let gradient = gradient.piece(range, self.pipeline)?;
        let mut states: Vec<_> = pieces.iter_mut().map(PieceInMemory::floats).collect();
        states.push(direction);
        let mut unread = Vec::new();
        let (param, states) = match (&mut *values, &mut own, states.split_first_mut()) {
            (DirectionValues::Master, _, Some((master, states))) => (&mut **master, states),
            (DirectionValues::Memory(values), ..) => (&mut values[range.clone()], &mut states[..]),
            (_, Some(own), _) => (own.floats(), &mut states[..]),
            (_, None, _) => {
                // The kernel needs a parameter slice of the right length,
                // although it does not use the values.
                unread.resize(range.len(), 0.0);
                (&mut unread[..], &mut states[..])
            }
        };
        self.compute(param, &gradient, states);
        if let (Some([of_values, of_direction]), Some(made)) = (squares, states.last()) {
            of_values.push(param);
            of_direction.push(made);
        }
        // The values have not changed, so the master is not written back.
        let masters = usize::from(matches!(values, DirectionValues::Master));
        pieces.drain(masters..).try_for_each(|piece| piece.store(self.pipeline))
    }

    /// Runs the kernel on one piece: `param` and `states` in place, with a
    /// gradient in f32.
    fn compute(&self, param: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]) {
        let slice = OwnedSlice { param, states, working: None };
        self.step.update(self.scale, FloatSlice::F32(gradient), slice);
    }

    /// Copies a piece of the updated master to the place where ops read it,
    /// rounded if that is a 16-bit array.
    ///
    /// # Errors
    ///
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
                // Every element is overwritten, so the old copy is not read
                // from the disk.
                let unfilled = array.unfilled_piece(range, (*dtype).into());
                let mut piece = self.pipeline.note(unfilled)?;
                let bytes = piece.bytes();
                match dtype {
                    FloatDType::F16 => {
                        cast(master, bytemuck::cast_slice_mut::<_, f16>(bytes).into());
                    }
                    FloatDType::BF16 => {
                        cast(master, bytemuck::cast_slice_mut::<_, bf16>(bytes).into());
                    }
                    other => unreachable!("ops use 16 bits where there are masters, not {other:?}"),
                }
                piece.store(self.pipeline)?;
            }
            HostValues::Own(_) | HostValues::Parked(_) => {
                unreachable!("values without a master are updated themselves")
            }
        }
        Ok(())
    }
}

impl HostGradient {
    /// Takes the gradient of an update. A gradient on the device is copied to
    /// host memory, in f32.
    pub(super) fn of<B: Backend>(gradient: UpdateGradient<B>) -> Self {
        match gradient {
            UpdateGradient::Device(tensor) => Self::Memory(float_into_host::<B>(tensor)),
            UpdateGradient::Parked(array, dtype) => Self::Parked(array, dtype),
            UpdateGradient::Zeros => Self::Zeros,
        }
    }

    /// Returns the elements of one piece in f32. Only a parked gradient or a
    /// zero one takes new memory.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    fn piece(
        &self,
        range: &Range<usize>,
        pipeline: &mut Pipeline,
    ) -> Result<Cow<'_, [f32]>, SwapError> {
        let (array, dtype) = match self {
            Self::Memory(gradient) => return Ok(Cow::Borrowed(&gradient[range.clone()])),
            Self::Zeros => return Ok(Cow::Owned(vec![0.0; range.len()])),
            Self::Parked(array, dtype) => (array, *dtype),
        };
        let mut piece = array.piece(range, dtype, pipeline)?;
        let bytes = &*piece.bytes();
        let mut wide = vec![0.0; range.len()];
        match dtype {
            DType::F16 => widen(FloatSlice::F16(bytemuck::cast_slice(bytes)), &mut wide),
            DType::BF16 => widen(FloatSlice::Bf16(bytemuck::cast_slice(bytes)), &mut wide),
            _ => wide.copy_from_slice(bytemuck::cast_slice(bytes)),
        }
        Ok(Cow::Owned(wide))
    }
}
