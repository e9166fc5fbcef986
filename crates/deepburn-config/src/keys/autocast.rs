//! `torch_autocast`: fp32 parameters, and ops in the types of torch.autocast's lists.
//!
//! Differences from DeepSpeed:
//! - All gradients are communicated in one type, whichever module they belong to.
//! - With `fp16.enabled`, the `fp16` section sets the loss scale. DeepSpeed's ZeRO optimizers divide
//!   gradients by both scales.
//! - An overflow halves the scale at every stage. DeepSpeed's stages 1 to 3 keep the scale and skip
//!   every later step.

use crate::key::Key;
use crate::kind::Kind;
use crate::node::{Node, Value};
use crate::plan::{DynamicScalePlan, Precision, ScaleGrowth};
use crate::resolve::Context;
use crate::section::Section;

/// The names that DeepSpeed knows. fp32 and int8 are no types of autocast: they are accepted where
/// the section is switched off.
const AUTOCAST_TYPES: Kind = Kind::Choice(&[
    "bfloat16",
    "bf16",
    "torch.bfloat16",
    "float16",
    "fp16",
    "half",
    "torch.float16",
    "float32",
    "fp32",
    "float",
    "torch.float32",
    "int8",
    "torch.int8",
]);

pub(crate) const TORCH_AUTOCAST: Key = Key::section(
    "torch_autocast",
    &[
        Key::flag("enabled", false, "Run ops in the types of torch.autocast."),
        Key::optional(
            "dtype",
            AUTOCAST_TYPES,
            "Type of matrix products and convolutions, bfloat16 or float16. bfloat16 when it is not \
                given; DeepSpeed leaves it to PyTorch, which takes bfloat16 on CPUs and float16 \
                without a loss scale on CUDA.",
        ),
        Key::optional(
            "lower_precision_safe_modules",
            Kind::List,
            "Classes of modules whose gradients and gathered parameters DeepSpeed sends in dtype.",
        )
        .inert(
            "gradients of all modules travel in communication_data_type (fp32 by default under \
             autocast), and parameters are gathered in fp32",
        ),
    ],
    "torch.autocast: fp32 parameters, matrix products and convolutions in 16 bits, and norms, \
        softmax, exponentials, sums and losses in fp32.",
);

/// `torch.amp.GradScaler` with PyTorch's defaults, which DeepSpeed uses under `torch_autocast`. It
/// has no minimum: the scale falls until its inverse leaves f32, and the run ends there.
pub(super) const GRAD_SCALER: DynamicScalePlan = DynamicScalePlan {
    initial_scale: 65536.0,
    window: 2000,
    hysteresis: 1,
    consecutive_hysteresis: false,
    min_scale: f32::MIN_POSITIVE as f64,
    growth: ScaleGrowth::AtWindow,
};

/// The type of `torch_autocast`, or of `fp16.auto_cast`.
pub(super) fn resolve(
    top: &Section<'_>,
    compute: Precision,
    context: &mut Context<'_>,
) -> Option<Precision> {
    let (section, fp16) = (top.section(TORCH_AUTOCAST.name), top.section("fp16"));
    check_module_names(&section, context);
    let auto_cast = fp16.flag("auto_cast");
    if auto_cast && compute != Precision::Fp16 {
        let message = "changes nothing: fp16.enabled is false";
        context.findings.push(fp16.note("auto_cast", message));
    }
    if !section.flag("enabled") {
        return (auto_cast && compute == Precision::Fp16).then_some(Precision::Fp16);
    }
    let dtype = match section.optional_choice("dtype") {
        Some("bfloat16" | "bf16" | "torch.bfloat16") => Precision::Bf16,
        Some("float16" | "fp16" | "half" | "torch.float16") => Precision::Fp16,
        None if section.given("dtype").is_none() => {
            context.findings.push(section.warning(
                "dtype",
                "is not given and taken as \"bfloat16\"; DeepSpeed leaves it to PyTorch, which takes \
                 bfloat16 on CPUs and float16 without a loss scale on CUDA",
                "write \"bfloat16\" or \"float16\"",
            ));
            Precision::Bf16
        }
        Some(other) => {
            context.findings.push(section.error(
                "dtype",
                format!("autocast has no type \"{other}\": it is bfloat16 or float16"),
                "write \"bfloat16\", or set torch_autocast.enabled to false to train in fp32",
            ));
            return None;
        }
        // Not of its kind, which was reported.
        None => return None,
    };
    if compute != Precision::Fp32 && compute != dtype {
        context.findings.push(section.error(
            "dtype",
            format!(
                "autocast in {} on {} parameters mixes two 16-bit types, and the loss would be \
                 scaled for one of them only",
                dtype.name(),
                compute.name()
            ),
            format!("set {}.enabled to false, which keeps parameters in fp32", compute.name()),
        ));
    }
    Some(dtype)
}

/// The list changes nothing, but DeepSpeed refuses one that does not hold names.
fn check_module_names(section: &Section<'_>, context: &mut Context<'_>) {
    const NAME: &str = "lower_precision_safe_modules";
    let Some(Value::List(names)) = section.given(NAME).map(|node| &node.value) else { return };
    if let Some(name) = names.iter().find(|name| Node::as_text(name).is_none()) {
        context.findings.push(section.error(
            NAME,
            format!("{name} is not a module class"),
            "write names such as \"torch.nn.modules.linear.Linear\"",
        ));
    }
}
