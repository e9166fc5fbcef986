//! Updates on parked states, piece by piece with the kernels of the CPU.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType, FloatDType};
use deepburn_kernels::{ElementwiseStep, FloatSlice, OwnedSlice, cast, widen};
use deepburn_nvme::SwapError;
use deepburn_ops::float_into_host;
use half::{bf16, f16};

use super::UpdateGradient;
use super::step::Squares;
use crate::parked::{ParkedArray, PieceInMemory, PieceLayout, Pipeline};

/// The update of one parameter whose states are parked.
#[derive(Debug)]
pub(super) struct HostUpdate<'a> {
    pub(super) step: &'a ElementwiseStep,
    /// Factor of the gradient.
    pub(super) scale: f32,
    /// The master, if there is one, and the moments, as far as the pass needs them.
    pub(super) arrays: &'a [Arc<ParkedArray>],
    /// Whether the optimizer keeps the values.
    pub(super) has_master: bool,
    /// Of each array.
    pub(super) layout: PieceLayout,
    pub(super) pipeline: &'a mut Pipeline,
}

/// The values that an update changes.
#[derive(Debug)]
pub(super) enum HostValues<'a> {
    /// The values of a parameter without a master.
    Own(&'a mut [f32]),
    /// The values of a parameter without a master, outside of the device.
    Parked(&'a ParkedArray),
    /// Receives the updated master.
    OfMaster(&'a mut [f32]),
    /// Receives the updated master in this type, outside of the device.
    RoundedMaster(&'a ParkedArray, FloatDType),
}

/// The values that a direction depends on.
#[derive(Debug)]
pub(super) enum DirectionValues<'a> {
    /// It depends on none.
    Unread,
    /// The master is the first array.
    Master,
    /// The values of a parameter without a master.
    Memory(&'a mut [f32]),
    /// The same, outside of the device.
    Parked(&'a ParkedArray),
}

/// The gradient of an update.
#[derive(Debug)]
pub(super) enum HostGradient {
    Memory(Vec<f32>),
    Parked(Arc<ParkedArray>, DType),
    /// The parameter was not used.
    Zeros,
}

impl HostUpdate<'_> {
    /// Updates all pieces.
    ///
    /// # Errors
    /// The disk fails.
    pub(super) fn run(
        &mut self,
        mut values: HostValues<'_>,
        gradient: &HostGradient,
    ) -> Result<(), SwapError> {
        let values_array = match &values {
            HostValues::Parked(array) | HostValues::RoundedMaster(array, _) => Some(*array),
            HostValues::Own(_) | HostValues::OfMaster(_) => None,
        };
        for array in self.arrays.iter().map(|array| &**array).chain(values_array) {
            let kept = array.keep_copies();
            self.pipeline.note(kept)?;
        }
        for piece in self.layout.pieces() {
            self.update(&piece, &mut values, gradient)?;
        }
        Ok(())
    }

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

    /// Updates the moments of all pieces and writes `direction`, as long as the arrays. Adds the squares of the values
    /// and of the direction to `squares`.
    ///
    /// # Errors
    /// The disk fails.
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
                unread.resize(range.len(), 0.0);
                (&mut unread[..], &mut states[..])
            }
        };
        self.compute(param, &gradient, states);
        if let (Some([of_values, of_direction]), Some(made)) = (squares, states.last()) {
            of_values.push(param);
            of_direction.push(made);
        }
        // Values have not changed.
        let masters = usize::from(matches!(values, DirectionValues::Master));
        pieces.drain(masters..).try_for_each(|piece| piece.store(self.pipeline))
    }

    fn compute(&self, param: &mut [f32], gradient: &[f32], states: &mut [&mut [f32]]) {
        let slice = OwnedSlice { param, states, working: None };
        self.step.update(self.scale, FloatSlice::F32(gradient), slice);
    }

    /// Copies a piece of the updated master to where ops find it.
    fn publish(
        &mut self,
        range: &Range<usize>,
        master: &[f32],
        values: &mut HostValues<'_>,
    ) -> Result<(), SwapError> {
        match values {
            HostValues::OfMaster(copy) => copy[range.clone()].copy_from_slice(master),
            HostValues::RoundedMaster(array, dtype) => {
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
    /// The gradient of an update, which leaves the device for it.
    pub(super) fn of<B: Backend>(gradient: UpdateGradient<B>) -> Self {
        match gradient {
            UpdateGradient::Device(tensor) => Self::Memory(float_into_host::<B>(tensor)),
            UpdateGradient::Parked(array, dtype) => Self::Parked(array, dtype),
            UpdateGradient::Zeros => Self::Zeros,
        }
    }

    /// The elements of a piece, in f32.
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
