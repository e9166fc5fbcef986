//! Updates on parked states, piece by piece with the kernels of the CPU.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::DType;
use deepburn_kernels::{Gradient, widen};
use deepburn_nvme::SwapError;

use super::rule::Step;
use crate::parked::{Layout, ParkedArray, ParkedTensor, PieceInMemory, Pipeline};

/// The update of one parameter whose states are parked.
#[derive(Debug)]
pub(super) struct HostUpdate<'a> {
    pub(super) step: &'a Step,
    /// Factor of the gradient.
    pub(super) scale: f32,
    /// The master, if there is one, and the moments.
    pub(super) arrays: &'a [Arc<ParkedArray>],
    /// Of each array.
    pub(super) layout: Layout,
    pub(super) pipeline: &'a mut Pipeline,
}

/// The values that an update changes.
#[derive(Debug)]
pub(super) enum HostValues<'a> {
    /// Those of a parameter without a master.
    Own(&'a mut [f32]),
    /// Receives the updated master.
    OfMaster(&'a mut [f32]),
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
        for array in self.arrays {
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
        let gradient = gradient.piece(range, self.pipeline)?;
        let mut states: Vec<_> = pieces.iter_mut().map(PieceInMemory::floats).collect();
        match values {
            HostValues::Own(values) => {
                let values = &mut values[range.clone()];
                self.step.update(self.scale, values, &gradient, &mut states);
            }
            HostValues::OfMaster(copy) => {
                let Some((master, moments)) = states.split_first_mut() else {
                    unreachable!("the master is the first array")
                };
                self.step.update(self.scale, master, &gradient, moments);
                copy[range.clone()].copy_from_slice(master);
            }
        }
        drop(states);
        pieces.into_iter().try_for_each(|piece| piece.store(self.pipeline))
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
