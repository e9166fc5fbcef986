//! Where an op of a pipeline runs.
//!
//! The rule, "owner computes", needs only the holders of the operands and the stage of the op
//! before. Every stage applies it to the same program and therefore knows sender and receiver of
//! every message:
//!
//! ```text
//!  some stage holds all operands     the current stage, or else the nearest one that holds them
//!  no stage holds all, forward       the first stage that all operands can reach going up; a
//!                                    parameter is not moved if one of its later stages can be reached
//!  no stage holds all, backward      the last stage that all operands can reach going down
//! ```

use std::rc::Rc;

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use deepburn_comm::{CommError, Pending};
use deepburn_meta::MetaTensor;
use deepburn_ops::{MatmulOps, SumOps};

use super::Staged;
use super::kinds::Floats;
use super::placed::{PlacedTensor, TensorKind};
use crate::ZeroTensor;
use crate::group::DeviceArray;
use crate::holders::Holders;
use crate::parameter::Parameter;
use crate::pipeline::{self, OperandHolders, Stages};

/// Ops of the decorator see their operands, and run where the pipeline places them.
impl OperandHolders {
    /// Adds an operand.
    #[inline]
    pub(crate) fn see<B: SumOps, K: TensorKind<B>>(&mut self, operand: &PlacedTensor<B, K>) {
        let holders = operand.holders();
        // Only parameters are handles that some stages can read.
        if matches!(operand, PlacedTensor::Everywhere(_)) {
            self.parameters = self.parameters.and(holders);
        }
        self.add(holders);
    }

    /// Returns where the op runs; `None` if every stage runs it, because all of them hold all
    /// operands.
    ///
    /// # Panics
    /// Panics if tensors of a pipeline are used on a thread without it.
    pub(crate) fn site<B: SumOps>(&self) -> Option<Site<B>> {
        (!self.are_everywhere()).then(|| Site::of(self))
    }

    /// Returns true if every stage holds all operands.
    #[inline]
    pub(crate) fn are_everywhere(&self) -> bool {
        self.common == Holders::ALL
    }

    /// Calls `run` with the place of an op whose operands only some stages hold.
    ///
    /// # Panics
    /// Panics if tensors of a pipeline are used on a thread without it.
    // Not inlined, so that the other ops, which every stage runs, are small functions.
    #[inline(never)]
    pub(crate) fn in_pipeline<B: SumOps, T>(&self, run: impl FnOnce(&Site<B>) -> T) -> T {
        run(&Site::of(self))
    }
}

/// The stage that runs an op.
pub(crate) struct Site<B: SumOps> {
    stages: Rc<Stages<B>>,
    stage: usize,
}

impl<B: SumOps> Site<B> {
    /// Returns the place of an op whose operands only some stages hold.
    fn of(operands: &OperandHolders) -> Self {
        let stages = current_stages();
        let stage = stages.place(operands);
        Self { stages, stage }
    }

    /// Returns the site at an earlier stage, if `stage` is one.
    pub(crate) fn not_after(self, stage: usize) -> Self {
        let stage = stage.min(self.stage);
        // The rule for the next op starts from this stage.
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
        // Stages that neither send nor receive take a number too, so that all of them count alike.
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
/// Panics with a [`CommError`] if a message cannot be sent or received.
pub(crate) fn everywhere<B: SumOps, K: TensorKind<B>>(mut tensor: PlacedTensor<B, K>) -> K::Tensor {
    if tensor.holders() == Holders::ALL {
        return tensor.into_value();
    }
    let stages = current_stages::<B>();
    // Any holder has the value, but all stages must choose the same one.
    let from = tensor.holders().first();
    for to in 0..stages.count() {
        if !tensor.holders().contains(to) {
            let tag = stages.next_message();
            tensor = or_panic(tensor.carry(&stages, from, to, tag));
        }
    }
    tensor.into_value()
}

/// A part of a parameter's gradient, seen from a rank.
pub(crate) enum GradientPart<B: SumOps> {
    /// This rank's stage owns the parameter and has the part.
    Here(ZeroTensor<B>),
    /// This rank's stage owns the parameter, and an earlier stage sends the part.
    Coming(Pending<DeviceArray<B>>),
    /// Another stage owns the parameter.
    Elsewhere,
}

/// Brings a part of the gradient of a parameter to the stage that owns it. A part of an earlier
/// stage is not awaited: that stage is some passes behind. `like` returns an array of the size of
/// the part.
///
/// # Panics
/// Panics with a [`CommError`] if a message cannot be sent or received.
pub(crate) fn gradient_at_owner<B: MatmulOps>(
    gradient: FloatTensor<Staged<B>>,
    parameter: &Parameter<B>,
    like: impl FnOnce() -> DeviceArray<B>,
) -> GradientPart<B> {
    let is_staged = parameter.homes() != Holders::ALL;
    let Some(stages) = is_staged.then(pipeline::stages::<B>).flatten() else {
        return gradient.value().map_or(GradientPart::Elsewhere, GradientPart::Here);
    };
    let site = Site { stages, stage: parameter.owner() };
    let holders = gradient.holders();
    // In backward, the owner and the stages after it are not behind this pass, so the part can be
    // awaited.
    if holders.last() >= site.stage {
        let gradient = site.bring(gradient);
        let here = gradient.value().filter(|_| site.is_here());
        return here.map_or(GradientPart::Elsewhere, GradientPart::Here);
    }
    let (stages, from, tag) = (&site.stages, holders.last(), site.stages.next_message());
    if stages.stage() == from {
        or_panic(Floats::send(gradient.into_value(), stages, site.stage, tag));
    } else if site.is_here() {
        let arrays = stages.world().arrays();
        let message = arrays.receive(stages.rank_of(from), tag, vec![like()]);
        return GradientPart::Coming(or_panic(message));
    }
    GradientPart::Elsewhere
}

/// Returns the place of the current model in its pipeline.
///
/// # Panics
/// Panics if tensors of a pipeline are used on a thread without it.
fn current_stages<B: SumOps>() -> Rc<Stages<B>> {
    pipeline::stages().expect("a tensor of a pipeline was used on a thread without its engine")
}

/// Returns the value, or panics with the error.
fn or_panic<T>(result: Result<T, CommError>) -> T {
    result.unwrap_or_else(|error| std::panic::panic_any(error))
}
