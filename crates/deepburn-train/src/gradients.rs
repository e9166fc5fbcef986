//! Checks that `TrainStep::step` returns the gradients that the engine reduced.
//!
//! The engine reduces gradients while `backward` runs and leaves markers in their place. Gradients
//! from a second backward pass, or computed by the program, never reach the engine. Gradients that
//! a step does not return have reached it nevertheless. In both cases training would use other
//! gradients than the model intends.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use deepburn::ops::OptimizerOps;
use deepburn::zero::{PlacedTensor, Training, Zero, ZeroTensor};
use deepburn::{BoxError, Engine};

/// Compares the gradients that a step returned with those that the engine reduced during it.
///
/// # Errors
/// Returns an error if the step returned a gradient that the engine did not reduce, or did not
/// return one that it reduced.
pub(crate) fn check_gradients<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    engine: &Engine<B, M>,
    returned: &GradientsParams,
) -> Result<(), BoxError> {
    let mut gradients = Returned { gradients: returned, taken: 0, others: 0 };
    engine.module().visit(&mut gradients);
    let Returned { taken, others, .. } = gradients;
    if others > 0 {
        return Err(format!(
            "`TrainStep::step` returned gradients ({others}) of parameters that the sharded backward \
             pass did not make: call `backward` once and pass its gradients to `TrainOutput::new` \
             unchanged"
        )
        .into());
    }
    // A parameter that occurs twice in the module is visited twice, so `taken` may be larger.
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

/// Counts the returned gradients by kind.
struct Returned<'a> {
    /// The gradients that the step returned.
    gradients: &'a GradientsParams,
    /// The number of markers of reduced gradients.
    taken: usize,
    /// The number of gradients that the engine did not reduce.
    others: usize,
}

impl<B: OptimizerOps> ModuleVisitor<Training<B>> for Returned<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Training<B>, D>>) {
        type Inner<B> = <Training<B> as AutodiffBackend>::InnerBackend;
        let gradient: Option<Tensor<Inner<B>, D>> = self.gradients.get(param.id);
        let gradient: Option<Tensor<Zero<B>, D>> = gradient;
        match gradient.map(|gradient| gradient.into_primitive().tensor()) {
            Some(PlacedTensor::Everywhere(ZeroTensor::Reduced(_))) => self.taken += 1,
            Some(_) => self.others += 1,
            None => {}
        }
    }
}
