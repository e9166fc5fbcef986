//! Counts the floating-point operations of a pass, module by module.
//!
//! The decorated backend counts matrix products, convolutions and attention. A multiply-add counts
//! as two operations. The counts are model FLOPs (Chowdhery et al. 2022, "PaLM", appendix B):
//! element-wise ops and recomputation in backward are not counted, and attention counts in full,
//! including masked positions.
//!
//! A product with a parameter is attributed to the module that owns the parameter. A product of two
//! activations is attributed to the parent of the module whose parameter was read last. In
//! backward, the first product after a read computes the gradient of that parameter:
//!
//! ```text
//!  forward    read h.0.attn.c_attn.weight    x · W         → h.0.attn.c_attn
//!             attention scores               q · kᵀ        → h.0.attn
//!  backward   read h.0.attn.c_attn.weight    dy · Wᵀ       → h.0.attn.c_attn
//!             no read                        xᵀ · dy       → h.0.attn.c_attn
//! ```
//!
//! Counting is off unless an engine turns it on.

use std::collections::BTreeMap;

use super::{Category, Ledger};

/// The floating-point operations of one module on one rank, without its submodules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleOperations {
    /// The module path; empty for the root.
    pub path: String,
    /// Operations in forward.
    pub forward: u64,
    /// Operations in backward, excluding recomputation.
    pub backward: u64,
}

/// A read of a parameter in a forward pass, and the operations until the next read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterRead {
    /// The module path of the parameter.
    pub path: String,
    /// Operations of forward from this read to the next one.
    pub operations: u64,
    /// Bytes of activations in memory before the read.
    pub activations: usize,
}

/// The counts so far, and the state that determines the module of the next product.
#[derive(Debug)]
pub(crate) struct OperationCounter {
    /// The ledger of the model, for the activations at each read.
    ledger: Ledger,
    /// The path of the parameter that was read last.
    parameter: String,
    /// Whether no product has followed that read.
    fresh: bool,
    /// Whether products count as backward.
    backward: bool,
    /// Operations in forward and backward, by module path.
    counts: BTreeMap<String, [u64; 2]>,
    /// The reads of forward, in the order of execution.
    reads: Vec<ParameterRead>,
}

impl OperationCounter {
    /// Returns a counter without counts, for the model with this ledger.
    pub(crate) fn new(ledger: Ledger) -> Self {
        let (parameter, counts, reads) = Default::default();
        Self { ledger, parameter, fresh: false, backward: false, counts, reads }
    }

    /// Counts the following products as backward.
    pub(crate) fn start_backward(&mut self) {
        self.backward = true;
    }

    /// Counts the following products as forward.
    pub(crate) fn start_forward(&mut self) {
        self.backward = false;
    }

    /// Records that an op reads the parameter at this path.
    pub(crate) fn read(&mut self, parameter: &str) {
        parameter.clone_into(&mut self.parameter);
        self.fresh = true;
        if !self.backward {
            let path = parameter.to_owned();
            let activations = self.ledger.usage(Category::Activations).current;
            self.reads.push(ParameterRead { path, operations: 0, activations });
        }
    }

    /// Returns the reads of forward, in the order of execution.
    pub(crate) fn reads(&self) -> &[ParameterRead] {
        &self.reads
    }

    /// Adds the operations of a product. `owned` is true if one operand is a parameter.
    pub(crate) fn enter(&mut self, operations: u64, owned: bool) {
        let module = parent(&self.parameter);
        // In backward, a read is followed by two products: one with the parameter, and one of a
        // gradient and an activation, which is the parameter's gradient. Both belong to its module.
        let own = owned || (self.backward && self.fresh);
        if !owned {
            self.fresh = false;
        }
        let path = if own { module } else { parent(module) };
        let counts = self.counts.entry(path.to_owned()).or_default();
        counts[usize::from(self.backward)] += operations;
        if !self.backward
            && let Some(read) = self.reads.last_mut()
        {
            read.operations += operations;
        }
    }

    /// Returns the counts in the order of module paths.
    pub(crate) fn into_modules(self) -> Vec<ModuleOperations> {
        let modules = self.counts.into_iter();
        modules
            .map(|(path, [forward, backward])| ModuleOperations { path, forward, backward })
            .collect()
    }
}

/// Returns the path of the enclosing module; empty at the root.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(parent, _)| parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_belong_to_modules() {
        let mut counter = OperationCounter::new(Ledger::new());
        counter.read("h.0.attn.c_attn.bias");
        counter.enter(10, true);
        counter.enter(3, false);
        counter.read("head");
        counter.enter(7, true);
        counter.start_backward();
        counter.read("h.0.attn.c_proj.weight");
        counter.enter(20, true);
        counter.enter(21, false);
        counter.enter(6, false);
        let found = counter.into_modules();
        let modules = |path: &str, forward, backward| {
            let path = path.to_owned();
            ModuleOperations { path, forward, backward }
        };
        assert_eq!(
            found,
            [
                modules("", 7, 0),
                modules("h.0.attn", 3, 6),
                modules("h.0.attn.c_attn", 10, 0),
                modules("h.0.attn.c_proj", 0, 41),
            ]
        );
    }
}
