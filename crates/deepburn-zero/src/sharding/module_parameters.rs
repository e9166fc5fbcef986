//! The parameters of a module that is not sharded yet, and their paths.
//!
//! Main type: [`ModuleParameter`]. The list is made before a value is created, so that settings,
//! tiers and the size of the file are known first.

use std::collections::HashMap;

use burn_backend::Backend;
use deepburn_ops::OptimizerOps;

use super::BufferTable;
use crate::assignment::ModelParameter;
use crate::decorator::Training;
use crate::module::{Module, ModulePath, ModuleVisitor, Param, ParamId, Tensor, keep_path};

/// The type name of Burn's embedding layer.
const EMBEDDING: &str = "Embedding";

/// A parameter of a module that is not sharded yet.
///
/// A tied parameter is listed once, at its first path.
pub(crate) struct ModuleParameter {
    /// Its first module path.
    pub(crate) path: String,
    /// The shape that the module reports. A lazy initializer may change the order of the
    /// dimensions.
    pub(crate) shape: Vec<usize>,
    /// The type name of the layer that contains the parameter.
    pub(crate) layer: String,
    /// Whether the parameter is not frozen in the module.
    pub(crate) is_trainable: bool,
    /// Whether the value has not been initialized yet.
    is_lazy: bool,
}

impl ModuleParameter {
    /// Returns the properties that determine the optimizer settings.
    pub(crate) fn described(&self) -> ModelParameter<'_> {
        let Self { path, shape, layer, is_lazy, .. } = self;
        ModelParameter { path, shape, layer, is_announced: *is_lazy }
    }
}

/// Returns the parameters of a module in module order, without buffers.
pub(crate) fn parameters_of<B: OptimizerOps, M: Module<Training<B>>>(
    module: &M,
    buffers: &BufferTable<B>,
) -> Vec<ModuleParameter> {
    let (path, seen, found) = Default::default();
    let mut parameters = Parameters { buffers, path, seen, found };
    module.visit(&mut parameters);
    parameters.found
}

/// A visitor that lists the parameters of a module.
struct Parameters<'a, B: Backend> {
    /// The tensors that are not parameters.
    buffers: &'a BufferTable<B>,
    /// The position in the module.
    path: ModulePath,
    /// The index in `found` of each parameter.
    seen: HashMap<ParamId, usize>,
    /// The parameters so far, in module order.
    found: Vec<ModuleParameter>,
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for Parameters<'_, B> {
    keep_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        if self.buffers.contains(param.id) {
            return;
        }
        if let Some(place) = self.seen.get(&param.id) {
            // A tied parameter of an embedding and an output layer counts as an embedding.
            if self.path.layer() == EMBEDDING {
                self.found[*place].layer = EMBEDDING.to_owned();
            }
            return;
        }
        self.seen.insert(param.id, self.found.len());
        self.found.push(ModuleParameter {
            path: self.path.joined(),
            shape: param.lazy_shape().to_vec(),
            layer: self.path.layer().to_owned(),
            is_trainable: requires_grad(param),
            is_lazy: !param.is_initialized(),
        });
    }
}

/// Returns whether a parameter is trained. A lazy parameter is not initialized.
fn requires_grad<B: OptimizerOps, const D: usize>(param: &Param<Tensor<Training<B>, D>>) -> bool {
    if param.is_initialized() {
        return param.val().is_require_grad();
    }
    // Loading a value is the only way in Burn to get the flag without running the closure. The
    // clone is lazy too.
    let (id, value) = (param.id, Tensor::zeros([1; D], &param.lazy_device()));
    param.clone().transform_for_load(value, id).val().is_require_grad()
}
