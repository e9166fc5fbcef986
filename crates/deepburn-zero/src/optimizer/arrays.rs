//! Access to the arrays of the optimizer outside of a step, for checkpoints and exchanges.
//!
//! Main type: [`KeptArray`]. Nothing is copied when a checkpoint reads an array, but only when a
//! step overwrites it.

use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, DType};
use deepburn_nvme::SwapError;
use deepburn_ops::{OptimizerOps, float_bytes};

use super::Optimizer;
use super::moments::SECOND_MOMENT;
use super::rule::LocalStates;
use super::tiered_state::{DeviceState, TieredState, zeros};
use crate::offload::{ParkedCopy, ParkedTensor};

/// Elements of an f32 array, for a checkpoint.
#[derive(Debug)]
pub(crate) enum KeptArray<B: Backend> {
    /// All elements of the array on this rank, flat and with padding. The caller selects the
    /// requested range.
    Device(B::FloatTensorPrimitive),
    /// The requested elements.
    Parked(Arc<ParkedCopy>),
}

impl<B: OptimizerOps> Optimizer<B> {
    /// Returns true if the states of a parameter are offloaded.
    pub(crate) fn is_parked(&self, index: usize) -> bool {
        matches!(self.states[index], Some(TieredState::Parked(_)))
    }

    /// Returns true if the optimizer has a master of the parameter.
    pub(crate) fn has_master(&self, index: usize) -> bool {
        self.working.is_some() && self.states[index].is_some()
    }

    /// Returns the f32 master of a parameter, if there is one.
    ///
    /// The result is the flat array of the elements that this rank owns, with padding. A parked
    /// master is read into new memory on the device.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(crate) fn master(
        &self,
        index: usize,
    ) -> Result<Option<B::FloatTensorPrimitive>, SwapError> {
        Ok(match &self.states[index] {
            Some(TieredState::Device(state)) => state.master.clone(),
            Some(TieredState::Parked(state)) if self.working.is_some() => {
                let master = ParkedTensor { array: &state.arrays[0], dtype: DType::F32 };
                Some(master.read::<B>(&state.device)?)
            }
            Some(TieredState::Parked(_)) | None => None,
        })
    }

    /// Returns elements `range` of the master of a parameter, if there is one.
    ///
    /// The elements are copied lazily. A device array is shared with the optimizer until a step
    /// replaces it. A parked array is copied when a step is about to overwrite it.
    pub(crate) fn kept_master(&self, index: usize, range: Range<usize>) -> Option<KeptArray<B>> {
        let has_master = self.working.is_some();
        match self.states[index].as_ref()? {
            TieredState::Device(state) => state.master.clone().map(KeptArray::Device),
            TieredState::Parked(state) => {
                has_master.then(|| KeptArray::Parked(state.arrays[0].copy(range, DType::F32)))
            }
        }
    }

    /// Returns the states of a parameter with which ranks leave each other between two averages.
    fn local_states(&self, index: usize) -> Option<&'static LocalStates> {
        self.compressed(index)?.local_states()
    }

    /// Returns the names of the arrays of a parameter that differ between ranks after a local step;
    /// empty for optimizers without such steps and for a frozen parameter.
    pub(crate) fn arrays_of_rank(&self, index: usize) -> &'static [&'static str] {
        self.local_states(index).map_or(&[], |local| &local.of_rank)
    }

    /// Returns elements `range` of the values that all ranks had after the last average, as
    /// [`kept_moment`](Self::kept_moment) does; `None` without local steps.
    pub(crate) fn kept_common(&self, index: usize, range: Range<usize>) -> Option<KeptArray<B>> {
        self.kept_moment(index, self.local_states(index)?.common, range)
    }

    /// Returns the position of an array in the state's list: the moments, then the derived states.
    fn place(&self, index: usize, name: &str) -> Option<usize> {
        let local = self.local_states(index);
        let derived = local.into_iter().flat_map(|local| &local.derived);
        self.moments(index).iter().chain(derived).position(|array| *array == name)
    }

    /// Returns elements `range` of the array `name` of a parameter; `None` for a frozen parameter
    /// and for an unknown name.
    ///
    /// As with [`kept_master`](Self::kept_master), nothing is copied until a step overwrites the
    /// array.
    pub(crate) fn kept_moment(
        &self,
        index: usize,
        name: &str,
        range: Range<usize>,
    ) -> Option<KeptArray<B>> {
        let place = self.place(index, name)?;
        let masters = usize::from(self.working.is_some());
        match self.states[index].as_ref()? {
            TieredState::Device(state) => state.moments.get(place).cloned().map(KeptArray::Device),
            TieredState::Parked(state) => {
                Some(KeptArray::Parked(state.arrays[masters + place].copy(range, DType::F32)))
            }
        }
    }

    /// Replaces the master of a parameter, if it has one, with an array of the same length.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(crate) fn set_master(
        &mut self,
        index: usize,
        values: B::FloatTensorPrimitive,
    ) -> Result<(), SwapError> {
        let has_master = self.working.is_some();
        match &mut self.states[index] {
            Some(TieredState::Device(DeviceState { master: Some(master), .. })) => *master = values,
            Some(TieredState::Parked(state)) if has_master => state.set(0, values)?,
            _ => {}
        }
        Ok(())
    }

    /// Replaces all moments of a trainable parameter with arrays of the same length.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(crate) fn set_moments(
        &mut self,
        index: usize,
        values: Vec<B::FloatTensorPrimitive>,
    ) -> Result<(), SwapError> {
        let masters = usize::from(self.working.is_some());
        match &mut self.states[index] {
            Some(TieredState::Device(state)) => {
                for (moment, values) in state.moments.iter_mut().zip(values) {
                    *moment = values;
                }
            }
            Some(TieredState::Parked(state)) => {
                for (place, values) in values.into_iter().enumerate() {
                    state.set(masters + place, values)?;
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Replaces the array `name` of a parameter on the device with one of the same length.
    pub(crate) fn set_moment(&mut self, index: usize, name: &str, values: B::FloatTensorPrimitive) {
        let place = self.place(index, name);
        if let (Some(place), Some(TieredState::Device(state))) = (place, &mut self.states[index]) {
            state.moments[place] = values;
        }
    }

    /// Sets the common values of a parameter, which are the same on all ranks, and resets the
    /// accumulated updates of this rank to 0. This rank's values are then the common values. Has no
    /// effect without local steps.
    pub(crate) fn set_common(&mut self, index: usize, values: B::FloatTensorPrimitive) {
        let Some(local) = self.local_states(index) else { return };
        if let Some(TieredState::Device(state)) = &self.states[index] {
            // The accumulated updates since the last average are 0.
            let still = zeros::<B>(state.len, &state.device);
            self.set_moment(index, local.moved, still);
            self.set_moment(index, local.common, values);
        }
    }

    /// Returns this rank's values: the common values plus this rank's accumulated updates.
    pub(crate) fn moved_values(&self, index: usize) -> B::FloatTensorPrimitive {
        let array = |name| match self.kept_moment(index, name, 0..0) {
            Some(KeptArray::Device(array)) => array,
            _ => unreachable!("an optimizer with local steps keeps its states on the device"),
        };
        let Some(local) = self.local_states(index) else {
            unreachable!("only an optimizer with local steps moves values")
        };
        B::float_add(array(local.common), array(local.moved))
    }

    /// Returns one bit per element of a parameter: whether it has ever had a gradient, so that its
    /// second moment is not 0.
    ///
    /// Bit `i % 8` of byte `i / 8` is the bit of element `i`. The second moment is copied to host
    /// memory.
    ///
    /// # Panics
    /// Panics if the optimizer has no second moment, or if the second moment is offloaded. Sharding
    /// a model excludes both cases.
    pub(crate) fn live_elements(&self, index: usize) -> Vec<u8> {
        let place = self.moments(index).iter().position(|name| *name == SECOND_MOMENT);
        let (Some(place), Some(TieredState::Device(state))) = (place, &self.states[index]) else {
            unreachable!(
                "an optimizer whose ranks agree on momenta keeps second moments on the device"
            )
        };
        // Bits are computed on the CPU, where the compression uses them.
        let squares = float_bytes::<B>(state.moments[place].clone());
        deepburn_kernels::live_elements(bytemuck::cast_slice(&squares))
    }
}
