//! A hook for the final gradient of a parameter, made of custom ops of burn-autodiff.
//!
//! Backward runs the steps of the graph by their depth, the deepest first. The hook of a parameter
//! is an op between the parameter and its first use. On its own it would be the shallowest op of
//! the graph and run last. A chain of empty ops, the clock, gives it the depth of the parameter's
//! first use, so that it runs right after the last gradient was added.

use std::cell::RefCell;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::tensor::FloatTensor;
use burn_group::GroupBackend;

use crate::probe::products;

type Tracked = FloatTensor<Autodiff<GroupBackend>>;

/// The number of ops from one linear layer to the next. A trace of the model would have it.
const OPS_PER_PARAMETER: usize = 4;

/// A final gradient.
#[derive(Debug, Clone, Copy)]
pub struct Reported {
    /// The number of the parameter, in module order.
    pub parameter: usize,
    /// The number of products until then.
    pub products: usize,
}

thread_local! {
    static REPORTED: RefCell<Vec<Reported>> = const { RefCell::new(Vec::new()) };
}

/// Returns the gradients so far, in the order in which they became final.
pub fn reported() -> Vec<Reported> {
    REPORTED.with_borrow(Clone::clone)
}

/// Gives each parameter of a module a hook, for one pass.
pub fn mark<M: Module>(module: M, device: &Device) -> M {
    let clock = tracked(Tensor::<1>::zeros([1], device).require_grad());
    module.map(&mut HookMapper { clock, next: 0 })
}

fn tracked<const D: usize>(tensor: Tensor<D>) -> Tracked {
    let Ok(tracked) = tensor.try_into_primitive::<Autodiff<GroupBackend>>() else {
        panic!("a tensor of the model is not on the group")
    };
    tracked
}

struct HookMapper {
    clock: Tracked,
    next: usize,
}

impl ModuleMapper for HookMapper {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        // Each parameter gets a later time than the one before it. Modules are visited in the order
        // in which this model uses them, so its last parameter is the deepest and its gradient is
        // taken first.
        self.clock = (0..OPS_PER_PARAMETER).fold(self.clock.clone(), |clock, _| tick(clock));
        // The hook replaces the parameter in the module, so every use of the parameter goes through
        // it.
        let hooked = hooked(tracked(tensor), &self.clock, self.next);
        self.next += 1;
        let tensor = Tensor::from_primitive::<Autodiff<GroupBackend>>(hooked);
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// An empty op, which is one step deeper than its operand.
#[derive(Debug)]
struct Tick;

impl Backward<GroupBackend, 1> for Tick {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {}
}

fn tick(clock: Tracked) -> Tracked {
    let (value, node) = clock.into_parts();
    // The value is passed on without a copy; only the depth of the node matters.
    match Tick.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((), value),
        OpsKind::UnTracked(prepared) => prepared.finish(value),
    }
}

/// Takes the gradient of the parameter with the number `State`. The leaf gets none, so that it is
/// freed.
#[derive(Debug)]
struct TakeGradient;

impl Backward<GroupBackend, 2> for TakeGradient {
    type State = usize;

    fn backward(self, ops: Ops<usize, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        // A real hook would start the reduction of this gradient here. The gradient is complete:
        // all steps that add to it are deeper than the hook, so they have run.
        drop(gradients.consume::<GroupBackend>(&ops.node));
        let reported = Reported { parameter: ops.state, products: products() };
        REPORTED.with_borrow_mut(|all| all.push(reported));
    }
}

fn hooked(leaf: Tracked, clock: &Tracked, parameter: usize) -> Tracked {
    let (value, node) = leaf.into_parts();
    // The clock is the second parent, which gives the hook its depth. It has no gradient.
    let hook = TakeGradient.prepare::<NoCheckpointing>([node, clock.node()]);
    match hook.compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(parameter, value),
        OpsKind::UnTracked(prepared) => prepared.finish(value),
    }
}
