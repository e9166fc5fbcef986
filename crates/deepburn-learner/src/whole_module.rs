//! The complete trained module, with plain tensors that are independent of the engine.

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{ModelStates, Training};

use crate::engine::guard;
use crate::{Engine, EngineError};

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Returns the complete module on rank 0, and `None` on other ranks. All ranks call this
    /// together.
    ///
    /// Parameters have the values of their f32 masters. The tensors do not refer to the engine, so
    /// the module can be moved to any thread and be trained, saved or evaluated like any Burn
    /// module. Rank 0 holds the whole model in memory at every stage.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    pub fn whole_module(&self) -> Result<Option<M>, EngineError> {
        self.check_group()?;
        self.note(self.gather_module())
    }

    /// Gathers one parameter after the other. Ranks other than 0 drop each parameter immediately.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    fn gather_module(&self) -> Result<Option<M>, EngineError> {
        self.agree_buffers()?;
        let keeps = self.rank() == 0;
        let mut values = Vec::new();
        for index in 0..self.parameters().len() {
            let data = self.states.master_data(index)?;
            values.push(keeps.then_some(data));
        }
        if !keeps {
            return Ok(None);
        }
        // The copy is made from the module without autodiff, because a plain clone would share
        // running statistics with the engine's module.
        let mut plain = Plain { states: &self.states, values };
        Ok(Some(guard(|| M::from_inner(self.module().valid()).map(&mut plain))?))
    }
}

/// A module mapper that replaces each tensor with one that holds its own values.
struct Plain<'a, B: OptimizerOps> {
    /// Maps Burn's ids to parameter indices.
    states: &'a ModelStates<B>,
    /// The values by parameter index; `None` for tensors that are not parameters.
    values: Vec<Option<TensorData>>,
}

impl<B: OptimizerOps> ModuleMapper<Training<B>> for Plain<'_, B> {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Param<Tensor<Training<B>, D>> {
        let (id, tensor, mapper) = param.consume();
        let (device, trains) = (tensor.device(), tensor.is_require_grad());
        // Buffers are not parameters. Their values are read from the module, and are the same on
        // all ranks.
        let index = self.states.parameter_index(id);
        let data = match index.and_then(|index| self.values[index].clone()) {
            Some(data) => data,
            None => tensor.inner().into_data(),
        };
        let tensor = Tensor::from_data(data, &device).set_require_grad(trains);
        Param::from_mapped_value(id, tensor, mapper)
    }
}
