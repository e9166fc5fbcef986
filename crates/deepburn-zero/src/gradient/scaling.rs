//! The element types of gradients, and the factors before and after their sum over the ranks.
//!
//! The mean over W ranks is a sum and a division by W. In exact arithmetic, the order does not
//! matter. In 16 bits it does. If the sum comes first, it may overflow although the mean would not.
//! If the division comes first, small gradients become smaller and may underflow to 0 in fp16. The
//! plan therefore determines which part of the division comes before the sum (DeepSpeed's
//! `prescale_gradients` and `gradient_predivide_factor`), and [`Scaling`] holds both factors. The
//! loss scale is handled separately: it stays in the gradients until the optimizer step, which
//! divides by it in f32.

use burn_backend::FloatDType;
use deepburn_comm::ReduceOp;
use deepburn_config::{GradientReduction, ReductionPlan};

/// Element types of gradients after backward.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Types {
    /// The type that ranks exchange.
    pub(crate) communication: FloatDType,
    /// The type of the sum over micro-batches.
    pub(crate) accumulation: FloatDType,
}

impl Types {
    /// Returns true if the type of the sum represents every value of the communication type.
    pub(super) fn widens(self) -> bool {
        self.communication == self.accumulation || self.accumulation == FloatDType::F32
    }
}

/// The factors before and after the sum over the ranks. The product of both factors and of the
/// collective's own factor is `1 / W` for a mean over W ranks, and 1 for a sum. With hybrid
/// sharding, the collective in the shard group and that over the replicas have the same operation,
/// and a mean of means is the mean over all data-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scaling {
    /// The factor of each rank's gradient before the sum, at most 1.
    pub(super) before: f64,
    /// The operation of the collective: a sum, or a mean that divides in f32 before it is rounded.
    pub(super) op: ReduceOp,
    /// The factor of the sum, applied in the accumulation type.
    pub(super) after: f64,
}

impl Scaling {
    /// Returns the factor of a gradient that is not reduced. With 1-bit optimizers, each rank uses
    /// its own gradient, and ranks average in the optimizer step. If the plan asks for a sum over
    /// ranks, the factor is the number of ranks, so that the average becomes a sum.
    pub(super) fn of_one_rank(plan: &ReductionPlan, world_size: usize) -> f64 {
        match plan.op {
            GradientReduction::Sum => world_size as f64,
            GradientReduction::Mean => 1.0,
        }
    }

    /// Returns the factors of one of DeepSpeed's three ways to average: division after the sum,
    /// before the sum, or partly before it.
    ///
    /// [Note: Overflow in fp16] If fp16 gradients are divided by the number of ranks before their
    /// sum, the sum overflows only if one of them does. DeepSpeed's stages 0 and 1, however, sum
    /// the micro-batches of a step in fp16 and skip the step if that sum overflows. To skip the
    /// same steps at every stage, a part of the division is done after the sum: the number of
    /// micro-batches, but at most the number of ranks.
    pub(super) fn new(
        plan: &ReductionPlan,
        world_size: usize,
        micro_batches: usize,
        communication: FloatDType,
    ) -> Self {
        // The part of the division that follows the sum in fp16 (see the note).
        let later = world_size.min(micro_batches) as f64;
        let world_size = world_size as f64;
        let factor = plan.predivide_factor;
        let sum = Self { before: 1.0, op: ReduceOp::Sum, after: 1.0 };
        match plan.op {
            //= deepspeed 0.19.8 runtime/zero/stage_1_and_2.py gradient_reduction_w_predivide
            GradientReduction::Sum => sum,
            // `prescale_gradients`: the whole division precedes the sum.
            GradientReduction::Mean if plan.prescale => Self { before: 1.0 / world_size, ..sum },
            // `gradient_predivide_factor`: a part of the division precedes the sum.
            GradientReduction::Mean if factor != 1.0 => {
                Self { before: 1.0 / factor, after: factor / world_size, ..sum }
            }
            GradientReduction::Mean if communication == FloatDType::F16 => {
                Self { before: later / world_size, after: 1.0 / later, ..sum }
            }
            // The collective adds and divides in f32 before it rounds, so no factor is needed.
            GradientReduction::Mean => Self { op: ReduceOp::Mean, ..sum },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(prescale: bool, predivide_factor: f64, op: GradientReduction) -> ReductionPlan {
        ReductionPlan { op, prescale, predivide_factor }
    }

    //= deepspeed 0.19.8 runtime/zero/stage_1_and_2.py gradient_reduction_w_predivide
    #[test]
    fn all_ways_to_average_divide_by_the_world_size() {
        for communication in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
            for (prescale, factor) in [(false, 1.0), (true, 1.0), (false, 2.0), (false, 4.0)] {
                let plan = plan(prescale, factor, GradientReduction::Mean);
                for micro_batches in [1, 2, 4, 16] {
                    let scaling = Scaling::new(&plan, 4, micro_batches, communication);
                    let mean = if scaling.op == ReduceOp::Mean { 0.25 } else { 1.0 };
                    assert_eq!(scaling.before * mean * scaling.after, 0.25);
                    assert!(scaling.before <= 1.0, "no gradient may grow before the sum");
                }
            }
            let sum = Scaling::new(&plan(true, 2.0, GradientReduction::Sum), 4, 2, communication);
            assert_eq!(sum, Scaling { before: 1.0, op: ReduceOp::Sum, after: 1.0 });
        }
    }
}
