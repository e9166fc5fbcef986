//! Makes sure that the gradients that `TrainStep::step` returns are those that the engine took.
//!
//! The engine takes gradients while `backward` runs and leaves markers behind. What else a step
//! returns never reached the engine: gradients of a second backward pass, or made by hand. Gradients
//! that a step leaves out did reach it. Both would train on other gradients than the model asked for.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use deepburn::ops::OptimizerOps;
use deepburn::zero::{Training, Zero, ZeroTensor};
use deepburn::{Engine, OutsideError};

/// Compares the gradients that a step returned with those that the engine took during it.
///
/// # Errors
/// When a gradient was returned that the engine did not take, or one that it took was not returned.
pub(crate) fn check_gradients<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    engine: &Engine<B, M>,
    returned: &GradientsParams,
) -> Result<(), OutsideError> {
    let mut gradients = Returned { gradients: returned, taken: 0, others: 0 };
    engine.module().visit(&mut gradients);
    let Returned { taken, others, .. } = gradients;
    if others > 0 {
        return Err(format!(
            "`TrainStep::step` returned gradients of {others} parameters that the sharded backward \
             pass did not make: call `backward` once and pass its gradients to `TrainOutput::new` \
             unchanged"
        )
        .into());
    }
    // Parameters that occur twice in a module are visited twice.
    if taken < engine.gradients_taken() {
        return Err(format!(
            "`TrainStep::step` returned {taken} gradients and its backward pass made {}: return all \
             of them with `TrainOutput::new`, and freeze parameters that are not to be trained",
            engine.gradients_taken()
        )
        .into());
    }
    Ok(())
}

/// Sorts the returned gradients.
struct Returned<'a> {
    gradients: &'a GradientsParams,
    /// Markers of gradients that the engine took.
    taken: usize,
    others: usize,
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for Returned<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        type Inner<B> = <Training<B> as AutodiffBackend>::InnerBackend;
        let gradient: Option<Tensor<Inner<B>, D>> = self.gradients.get(param.id);
        let gradient: Option<Tensor<Zero<B>, D>> = gradient;
        match gradient.map(|gradient| gradient.into_primitive().tensor()) {
            Some(ZeroTensor::Reduced(_)) => self.taken += 1,
            Some(_) => self.others += 1,
            None => {}
        }
    }
}
