//! Updates on parked states, piece by piece with the kernels of the CPU.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{DType, FloatDType};
use deepburn_kernels::{ElementwiseStep, Gradient, OwnedSlice, cast, widen};
use deepburn_nvme::SwapError;
use half::{bf16, f16};

use crate::parked::{ParkedArray, ParkedTensor, PieceInMemory, PieceLayout, Pipeline};

/// The update of one parameter whose states are parked.
#[derive(Debug)]
pub(super) struct HostUpdate<'a> {
    pub(super) step: &'a ElementwiseStep,
    /// Factor of the gradient.
    pub(super) scale: f32,
    /// The master, if there is one, and the moments.
    pub(super) arrays: &'a [Arc<ParkedArray>],
    /// Of each array.
    pub(super) layout: PieceLayout,
    pub(super) pipeline: &'a mut Pipeline,
}

/// The values that an update changes.
#[derive(Debug)]
pub(super) enum HostValues<'a> {
    /// Those of a parameter without a master.
    Own(&'a mut [f32]),
    /// Those of a parameter without a master, outside of the device.
    Parked(&'a ParkedArray),
    /// Receives the updated master.
    OfMaster(&'a mut [f32]),
    /// Receives the updated master in this type, outside of the device.
    RoundedMaster(&'a ParkedArray, FloatDType),
}

/// The gradient of an update.
#[derive(Debug)]
pub(super) enum HostGradient<'a> {
    Memory(&'a [f32]),
    Parked(ParkedTensor<'a>),
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
        gradient: &HostGradient<'_>,
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
        gradient: &HostGradient<'_>,
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
            (Some(param), _) => {
                let slice = OwnedSlice { param, states: &mut states, working: None };
                self.step.update(self.scale, Gradient::F32(&gradient), slice);
            }
            (None, Some((master, moments))) => {
                let slice = OwnedSlice { param: master, states: moments, working: None };
                self.step.update(self.scale, Gradient::F32(&gradient), slice);
                self.publish(range, master, values)?;
            }
            (None, None) => unreachable!("the master is the first array"),
        }
        drop(states);
        pieces.into_iter().chain(own).try_for_each(|piece| piece.store(self.pipeline))
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

impl HostGradient<'_> {
    /// The elements of a piece, in f32.
    fn piece(
        &self,
        range: &Range<usize>,
        pipeline: &mut Pipeline,
    ) -> Result<Cow<'_, [f32]>, SwapError> {
        let sum = match self {
            Self::Memory(gradient) => return Ok(Cow::Borrowed(&gradient[range.clone()])),
            Self::Zeros => return Ok(Cow::Owned(vec![0.0; range.len()])),
            Self::Parked(sum) => sum,
        };
        let mut piece = sum.array.piece(range, sum.dtype, pipeline)?;
        let bytes = &*piece.bytes();
        let mut wide = vec![0.0; range.len()];
        match sum.dtype {
            DType::F16 => widen(Gradient::F16(bytemuck::cast_slice(bytes)), &mut wide),
            DType::BF16 => widen(Gradient::Bf16(bytemuck::cast_slice(bytes)), &mut wide),
            _ => wide.copy_from_slice(bytemuck::cast_slice(bytes)),
        }
        Ok(Cow::Owned(wide))
    }
}
