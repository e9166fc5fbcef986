//! Counts the floating-point operations of a pass, module by module.
//!
//! Products are counted where the decorated backend sees them: matrix products, convolutions and
//! attention. A multiplication and an addition are two operations. Element-wise ops are left out,
//! as is usual for model FLOPs (Chowdhery et al. 2022, "PaLM", appendix B): attention counts in
//! full, masked positions included, and what backward recomputes does not count.
//!
//! A product with a parameter belongs to the module that owns the parameter. A product of
//! activations alone belongs to the module around the parameter that was read last. In backward,
//! the first product after a read is the gradient of that parameter:
//!
//! ```text
//!  forward    read h.0.attn.c_attn.weight    x · W         → h.0.attn.c_attn
//!             attention scores               q · kᵀ        → h.0.attn
//!  backward   read h.0.attn.c_attn.weight    dy · Wᵀ       → h.0.attn.c_attn
//!             no read                        xᵀ · dy       → h.0.attn.c_attn
//! ```
//!
//! Counting is off unless an engine asks for it.

use std::collections::BTreeMap;

use burn_backend::{Backend, Shape, TensorMetadata};

use crate::ZeroTensor;
use crate::session;

/// The floating-point operations of one module on one rank, without its submodules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleOperations {
    /// The module path; empty for the root.
    pub path: String,
    /// Operations in forward.
    pub forward: u64,
    /// Operations in backward, recomputation excluded.
    pub backward: u64,
}

/// The counts so far, and what is needed to find the module of the next product.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    /// The path of the parameter that was read last.
    parameter: String,
    /// Whether no product has followed that read.
    fresh: bool,
    /// Whether products count as backward.
    backward: bool,
    /// Operations in forward and backward, by module path.
    counts: BTreeMap<String, [u64; 2]>,
}

impl Counter {
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
    }

    /// Adds the operations of a product. `owned` is true if one operand is a parameter.
    fn enter(&mut self, operations: u64, owned: bool) {
        let module = parent(&self.parameter);
        let own = owned || (self.backward && self.fresh);
        if !owned {
            self.fresh = false;
        }
        let path = if own { module } else { parent(module) };
        let counts = self.counts.entry(path.to_owned()).or_default();
        counts[usize::from(self.backward)] += operations;
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

/// Counts a product of `operands`. `count` is called only while counting is on.
pub(crate) fn count<B: Backend>(operands: &[&ZeroTensor<B>], count: impl FnOnce() -> u64) {
    session::with_counter(|counter| {
        let parameter = operands.iter().find_map(|operand| match operand {
            ZeroTensor::Parameter(view) => Some(view.parameter.path()),
            _ => None,
        });
        if let Some(parameter) = parameter {
            counter.read(parameter);
        }
        counter.enter(count(), parameter.is_some());
    });
}

/// Counts products of backward that an op already computes in forward, for the module of
/// `parameter`.
pub(crate) fn count_backward<B: Backend>(
    parameter: &ZeroTensor<B>,
    operations: impl FnOnce() -> u64,
) {
    session::with_counter(Counter::start_backward);
    count(&[parameter], operations);
    session::with_counter(Counter::start_forward);
}

/// Returns the operations of `[.., m, k]` times `[.., k, n]`: `2 m k n` for each matrix of the
/// larger batch.
pub(crate) fn matmul<B: Backend>(lhs: &ZeroTensor<B>, rhs: &ZeroTensor<B>) -> u64 {
    let (lhs, rhs) = (lhs.shape(), rhs.shape());
    let batches = lhs.num_elements() / matrix(&lhs).max(1);
    let others = rhs.num_elements() / matrix(&rhs).max(1);
    let columns = rhs.as_slice().last().copied().unwrap_or(1);
    2 * (batches.max(others) * matrix(&lhs) * columns) as u64
}

/// Returns the number of elements of the last two axes.
fn matrix(shape: &Shape) -> usize {
    shape.as_slice().iter().rev().take(2).product()
}

/// Returns the operations of rows `[.., k]` times a matrix of `numel` elements, one axis of which
/// is `k`: `2 rows numel`.
pub(crate) fn rows_times<B: Backend>(rows: &ZeroTensor<B>, numel: usize) -> u64 {
    let shape = rows.shape();
    let width = shape.as_slice().last().copied().unwrap_or(1).max(1);
    2 * (shape.num_elements() / width * numel) as u64
}

/// Returns the operations of a convolution with `output` output elements: 2 for each output and
/// each weight of its channel. `weight` is `[channels, inputs / groups, kernel ..]`.
pub(crate) fn convolution(output: usize, weight: &Shape) -> u64 {
    let channels = weight.as_slice().first().copied().unwrap_or(1).max(1);
    2 * (output * (weight.num_elements() / channels)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_belong_to_modules() {
        let mut counter = Counter::default();
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

    #[test]
    fn a_convolution_counts_its_kernel_for_each_output() {
        // LeNet's first layer: 6 channels of 5 x 5 over one, 24 x 24 places.
        assert_eq!(convolution(6 * 24 * 24, &Shape::from(vec![6, 1, 5, 5])), 2 * 6 * 24 * 24 * 25);
    }
}
