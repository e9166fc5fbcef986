//! `torch_autocast`: fp32 parameters, and ops in the types of torch.autocast's lists.
//!
//! Differences from DeepSpeed:
//! - All gradients are communicated in one type, whichever module they belong to.
//! - With `fp16.enabled`, the `fp16` section sets the loss scale. DeepSpeed's ZeRO optimizers
//!   divide gradients by both scales.
//! - An overflow halves the scale at every stage. DeepSpeed's stages 1 to 3 keep the scale and skip
//!   every later step.

use super::*;

//= torch 2.9.0 amp/grad_scaler.py GradScaler
/// `torch.amp.GradScaler` with PyTorch's defaults, which DeepSpeed uses under `torch_autocast`. It
/// has no minimum: the scale decreases until its inverse exceeds f32, and then the run ends.
pub(super) const GRAD_SCALER: DynamicScalePlan = DynamicScalePlan {
    initial_scale: 65536.0,
    window: 2000,
    hysteresis: 1,
    consecutive_hysteresis: false,
    min_scale: f32::MIN_POSITIVE as f64,
    growth: ScaleGrowth::AtWindow,
};

/// Resolves the type of `torch_autocast` or of `fp16.auto_cast`.
pub(super) fn resolve(compute: Precision, context: &mut Context<'_>) -> Option<Precision> {
    let top = context.top;
    let (section, auto_cast) = (&top.torch_autocast.value, &top.fp16.value.auto_cast);
    if !section.enabled.value {
        // `auto_cast` applies to fp16 parameters only, and asks for nothing without them.
        return (auto_cast.value && compute == Precision::Fp16).then_some(Precision::Fp16);
    }
    let dtype = dtype(section, context)?;
    let (own, other) = (dtype.name(), compute.name());
    refuse!(if compute != Precision::Fp32 && compute != dtype; context, &section.dtype =>
        "autocast in {own} on {other} parameters mixes two 16-bit types, and the loss would be scaled for one of \
         them only";
        "set {other}.enabled to false, which keeps parameters in fp32");
    Some(dtype)
}

/// Returns the type that the section names; bfloat16 if it names none.
fn dtype(section: &TorchAutocast<'_>, context: &mut Context<'_>) -> Option<Precision> {
    let dtype = &section.dtype;
    match dtype.value {
        Some("bfloat16" | "bf16" | "torch.bfloat16") => Some(Precision::Bf16),
        Some("float16" | "fp16" | "half" | "torch.float16") => Some(Precision::Fp16),
        Some(other) => {
            refuse!(context, dtype => "autocast has no type \"{other}\": it is bfloat16 or float16";
                "write \"bfloat16\", or set torch_autocast.enabled to false to train in fp32");
            None
        }
        // An invalid value has already been reported.
        None if dtype.is_given() => None,
        None => {
            warning!(context, dtype =>
                "is not given and taken as \"bfloat16\"; DeepSpeed leaves it to PyTorch, which takes bfloat16 on CPUs \
                 and float16 without a loss scale on CUDA";
                "write \"bfloat16\" or \"float16\"");
            Some(Precision::Bf16)
        }
    }
}
