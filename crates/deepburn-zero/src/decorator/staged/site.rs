//! Where an op of a pipeline runs.
//!
//! The rule, "owner computes", needs only the holders of the operands and the stage of the op before.
//! Every stage applies it to the same program and therefore knows sender and receiver of every
//! message:
//!
//! ```text
//!  some stage holds all operands     the current stage, or else the nearest one that holds them
//!  no stage holds all, forward       the first stage that all operands can reach going up
//!  no stage holds all, backward      the last stage that all operands can reach going down
//! ```

use std::rc::Rc;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use deepburn_comm::CommError;
use deepburn_meta::MetaTensor;
use deepburn_ops::MatmulOps;

use super::Staged;
use super::placed::{PlacedTensor, TensorKind};
use crate::ZeroTensor;
use crate::pipeline::{self, Holders, Stages};

/// The holders of an op's operands, collected one after the other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OperandHolders {
    /// The stages that hold all operands.
    pub(crate) common: Holders,
    /// The latest of the first holders of the operands.
    pub(crate) latest_first: usize,
    /// The earliest of the last holders of the operands.
    pub(crate) earliest_last: usize,
}

impl Default for OperandHolders {
    fn default() -> Self {
        Self { common: Holders::ALL, latest_first: 0, earliest_last: usize::MAX }
    }
}

impl OperandHolders {
    /// Adds an operand.
    pub(crate) fn see<B: Backend, K: TensorKind<B>>(&mut self, operand: &PlacedTensor<B, K>) {
        self.add(operand.holders());
    }

    /// Adds the holders of an operand. OperandHolders that every stage holds do not count.
    pub(crate) fn add(&mut self, holders: Holders) {
        if holders == Holders::ALL {
            return;
        }
        self.common = self.common.and(holders);
        self.latest_first = self.latest_first.max(holders.first());
        self.earliest_last = self.earliest_last.min(holders.last());
    }

    /// Returns where the op runs; `None` if every stage runs it, because all of them hold all
    /// operands.
    ///
    /// # Panics
    ///
    /// Panics if tensors of a pipeline are used on a thread without it.
    pub(crate) fn site<B: Backend>(&self) -> Option<Site<B>> {
        if self.common == Holders::ALL {
            return None;
        }
        let stages = current_stages();
        let stage = stages.place(self);
        Some(Site { stages, stage })
    }
}

/// The stage that runs an op.
pub(crate) struct Site<B: Backend> {
    stages: Rc<Stages<B>>,
    stage: usize,
}

impl<B: Backend> Site<B> {
    /// Returns the site at an earlier stage, if `stage` is one.
    pub(crate) fn not_after(self, stage: usize) -> Self {
        let stage = stage.min(self.stage);
        self.stages.move_to(stage);
        Self { stage, ..self }
    }

    /// Returns true on the stage that runs the op.
    pub(crate) fn is_here(&self) -> bool {
        self.stages.stage() == self.stage
    }

    /// Moves an operand to the stage of the op, unless it holds it already.
    ///
    /// # Panics
    ///
    /// Panics with a [`CommError`] if a message cannot be sent or received, because ops cannot
    /// return errors.
    pub(crate) fn bring<K: TensorKind<B>>(
        &self,
        operand: PlacedTensor<B, K>,
    ) -> PlacedTensor<B, K> {
        if operand.holders().contains(self.stage) {
            return operand;
        }
        let from = self.stages.sender(operand.holders(), self.stage);
        let tag = self.stages.next_message();
        or_panic(operand.carry(&self.stages, from, self.stage, tag))
    }

    /// Places a result of the op on this stage.
    pub(crate) fn hold<K: TensorKind<B>>(&self, result: K::Tensor) -> PlacedTensor<B, K> {
        PlacedTensor::held(result, Holders::one(self.stage), self.stages.device().clone())
    }

    /// Returns a result of the op on another stage.
    pub(crate) fn absent<K: TensorKind<B>>(&self, result: &MetaTensor) -> PlacedTensor<B, K> {
        let (shape, dtype) = (result.shape(), result.dtype());
        PlacedTensor::absent(shape, dtype, Holders::one(self.stage), self.stages.device().clone())
    }
}

/// Gives every stage the value of a tensor, which the program reads.
///
/// # Panics
///
/// Panics with a [`CommError`] if a message cannot be sent or received.
pub(crate) fn everywhere<B: Backend, K: TensorKind<B>>(
    mut tensor: PlacedTensor<B, K>,
) -> K::Tensor {
    if tensor.holders() == Holders::ALL {
        return tensor.into_value();
    }
    let stages = current_stages::<B>();
    let from = tensor.holders().first();
    for to in 0..stages.count() {
        if !tensor.holders().contains(to) {
            let tag = stages.next_message();
            tensor = or_panic(tensor.carry(&stages, from, to, tag));
        }
    }
    tensor.into_value()
}

/// Returns the gradient of a parameter on its first home, and `None` on other stages.
///
/// # Panics
///
/// Panics with a [`CommError`] if a message cannot be sent or received, or if the gradient is
/// computed before its home: a later stage has ended its backward pass by then.
pub(crate) fn gradient_at_home<B: MatmulOps>(
    gradient: FloatTensor<Staged<B>>,
    path: &str,
    homes: Holders,
) -> Option<ZeroTensor<B>> {
    let stages = (homes != Holders::ALL).then(pipeline::stages::<B>).flatten();
    let Some(stages) = stages else { return gradient.value() };
    let site = Site { stages, stage: homes.first() };
    let holders = gradient.holders();
    if holders.last() < site.stage {
        std::panic::panic_any(site.stages.world().failed(format!(
            "parameter {path} is on pipeline stage {}, and an earlier stage {holders} computes its \
             gradient; assign it to stage {}",
            site.stage,
            holders.first()
        )));
    }
    let gradient = site.bring(gradient);
    if site.is_here() { gradient.value() } else { None }
}

/// Returns the place of the current model in its pipeline.
///
/// # Panics
///
/// Panics if tensors of a pipeline are used on a thread without it.
fn current_stages<B: Backend>() -> Rc<Stages<B>> {
    pipeline::stages().expect("a tensor of a pipeline was used on a thread without its engine")
}

/// Returns the value, or panics with the error.
fn or_panic<T>(result: Result<T, CommError>) -> T {
    result.unwrap_or_else(|error| std::panic::panic_any(error))
}
