//! Finds the running statistics of a module and makes them independent of the module's clones.
//!
//! A module visitor cannot distinguish a running statistic from a frozen parameter. The difference
//! is that all clones of a module share a running statistic, while each clone has its own
//! parameters. The search therefore makes a temporary copy of the module, clones the copy, and
//! toggles the `require_grad` flag of all floats in the clone. A float whose flag also changed in
//! the copy is shared. This works for every type that stores its state like Burn's `RunningState`,
//! not only for batch norm.
//!
//! ```text
//!                     copy      clone of copy     toggle the clone      copy afterwards
//!  weight             grad      grad              no grad               grad     own
//!  frozen weight      no grad   no grad           grad                  no grad  own
//!  running_mean       no grad   ── shared ──      grad                  grad     shared
//! ```
//!
//! Rank threads that shard clones of one module would share its statistics. Burn has only one
//! operation that creates independent statistics: the conversion to the inner backend and back
//! (`valid`, `from_inner`). This conversion drops the mappers of parameters, so the original
//! parameters are restored afterwards.
//!
//! Both the search and the conversion would initialize lazy parameters. They therefore use a module
//! in which lazy parameters are replaced.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;

use deepburn_ops::OptimizerOps;

use crate::decorator::Training;
use crate::error::ZeroError;
use crate::module::{
    AutodiffModule, Bool, Int, ModuleMapper, ModulePath, ModuleVisitor, Param, ParamId, Tensor,
    keep_path,
};
use crate::sharding::initial::{initialize_constants, without_lazy_values};

/// Returns the module with independent running statistics, and the ids of these statistics. A
/// module without running statistics is returned unchanged.
///
/// # Errors
/// Returns an error if two layers share a running statistic.
pub(super) fn take_apart<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    module: M,
) -> Result<(M, HashSet<ParamId>), ZeroError> {
    // Running statistics are always initialized.
    let statistics = match initialize_constants(&module) {
        true => find::<B, M>(&module)?,
        false => HashSet::new(),
    };
    if statistics.is_empty() {
        return Ok((module, statistics));
    }
    let mut originals = Originals::<B> {
        statistics,
        path: ModulePath::default(),
        params: HashMap::new(),
        backend: PhantomData,
    };
    module.visit(&mut originals);
    // Only this conversion makes statistics that no clone shares.
    let apart = M::from_inner(without_lazy_values(&module).valid());
    drop(module);
    let apart = apart.map(&mut originals);
    Ok((apart, originals.statistics))
}

/// Returns the ids of the floats that clones of a module share.
fn find<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    module: &M,
) -> Result<HashSet<ParamId>, ZeroError> {
    let copy = M::from_inner(without_lazy_values(module).valid());
    let flags = |module: &M| {
        let mut flags = GradientFlags { path: ModulePath::default(), found: Vec::new() };
        module.visit(&mut flags);
        flags.found
    };
    // The flags are toggled in a clone of the copy. Afterwards only the floats that both share have
    // changed in the copy.
    let before = flags(&copy);
    drop(copy.clone().map(&mut Toggle));
    let mut paths = HashMap::<ParamId, String>::new();
    for (old, new) in before.into_iter().zip(flags(&copy)) {
        // A shared float that requires a gradient is a tied parameter.
        if old.required || !new.required {
            continue;
        }
        if let Some(first) = paths.get(&new.id) {
            return Err(ZeroError::SharedStatistic { path: first.clone(), other: new.path });
        }
        paths.insert(new.id, new.path);
    }
    Ok(paths.into_keys().collect())
}

/// A float of a module with its `require_grad` flag.
struct GradientFlag {
    path: String,
    id: ParamId,
    /// Whether it requires a gradient.
    required: bool,
}

/// A visitor that lists all floats.
struct GradientFlags {
    /// The names of the modules around the current position.
    path: ModulePath,
    /// All floats in module order.
    found: Vec<GradientFlag>,
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for GradientFlags {
    keep_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        let (path, id) = (self.path.joined(), param.id);
        self.found.push(GradientFlag { path, id, required: param.val().is_require_grad() });
    }
}

/// A mapper that toggles the `require_grad` flag of every float.
struct Toggle;

impl<B: OptimizerOps> ModuleMapper<Training<B>> for Toggle {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Param<Tensor<Training<B>, D>> {
        let (id, tensor, mapper) = param.consume();
        let required = tensor.is_require_grad();
        Param::from_mapped_value(id, tensor.set_require_grad(!required), mapper)
    }
}

/// Collects parameters and puts them into another module of the same structure.
struct Originals<B: OptimizerOps> {
    /// The ids of running statistics, which are not restored.
    statistics: HashSet<ParamId>,
    path: ModulePath,
    /// `Param`s of any rank and kind, by module path.
    params: HashMap<String, Box<dyn Any>>,
    backend: PhantomData<B>,
}

impl<B: OptimizerOps> Originals<B> {
    /// Stores the parameter at the current path.
    fn keep<P: Clone + 'static>(&mut self, param: &P) {
        self.params.insert(self.path.joined(), Box::new(param.clone()));
    }

    /// Returns the stored parameter of the current path, or `param` if there is none.
    fn restore<P: 'static>(&mut self, param: P) -> P {
        let original = self.params.remove(&self.path.joined());
        match original.and_then(|original| original.downcast().ok()) {
            Some(original) => *original,
            None => param,
        }
    }
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for Originals<B> {
    keep_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        if !self.statistics.contains(&param.id) {
            self.keep(param);
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Int>>) {
        self.keep(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D, Bool>>) {
        self.keep(param);
    }
}

impl<B: OptimizerOps> ModuleMapper<Training<B>> for Originals<B> {
    keep_path!();

    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D>>,
    ) -> Param<Tensor<Training<B>, D>> {
        if self.statistics.contains(&param.id) { param } else { self.restore(param) }
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D, Int>>,
    ) -> Param<Tensor<Training<B>, D, Int>> {
        self.restore(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<Training<B>, D, Bool>>,
    ) -> Param<Tensor<Training<B>, D, Bool>> {
        self.restore(param)
    }
}
