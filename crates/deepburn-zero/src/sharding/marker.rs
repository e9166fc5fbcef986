//! Marks the parameters of a module for a backward pass.
//!
//! Autodiff reports the gradient of a marked leaf when it is final (`submit_gradient_sync`). Every
//! training forward pass gets new leaves. Each rank has its own: a leaf that rank threads share
//! would connect their graphs, and with them the locks of the graphs.

use std::any::Any;
use std::collections::HashMap;

use burn_backend::distributed::DistributedParamId;
use deepburn_ops::OptimizerOps;

use crate::decorator::Training;
use crate::module::{ModuleMapper, Param, ParamId, Tensor};

/// Gives each trainable parameter a new leaf and marks it, so that autodiff reports its gradient.
///
/// The leaf must be new, because autodiff registers a leaf again when it is marked. If the leaf
/// already had a graph, autodiff would lose some of its gradients.
pub(crate) struct Marker<'a, F: Fn(usize) -> DistributedParamId> {
    /// The index of each sharded parameter.
    indices: &'a HashMap<ParamId, usize>,
    /// Registers the gradient of a parameter index for this pass, and returns its id for autodiff.
    mark: F,
    /// The leaves of this pass; tied parameters share one.
    leaves: HashMap<ParamId, Box<dyn Any>>,
}

impl<'a, F: Fn(usize) -> DistributedParamId> Marker<'a, F> {
    /// Creates a marker for one pass.
    pub(crate) fn new(indices: &'a HashMap<ParamId, usize>, mark: F) -> Self {
        Self { indices, mark, leaves: HashMap::new() }
    }
}

impl<B: OptimizerOps, F: Fn(usize) -> DistributedParamId> ModuleMapper<Training<B>>
    for Marker<'_, F>
{
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Param<Tensor<Training<B>, D>> {
        let (id, tensor, mapper) = param.consume();
        // Buffers, and parameters that are frozen in the module, keep their tensors.
        let Some(index) = self.indices.get(&id).filter(|_| tensor.is_require_grad()) else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let twin = self.leaves.get(&id).and_then(|leaf| leaf.downcast_ref::<Tensor<_, D>>());
        let leaf = match twin {
            Some(twin) => Tensor::clone(twin),
            None => {
                let leaf = Tensor::from_inner(tensor.inner()).require_grad();
                let leaf: Tensor<Training<B>, D> = leaf.set_distributed((self.mark)(*index));
                self.leaves.insert(id, Box::new(leaf.clone()));
                leaf
            }
        };
        Param::from_mapped_value(id, leaf, mapper)
    }
}
