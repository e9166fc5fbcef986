//! Precision: `fp16`, `bf16` and `data_types`.
//!
//! Training is in fp32 in this version, so these sections are only ever accepted switched off. They
//! are checked in full all the same: a file that is wrong is told so whatever it asks for.

use crate::key::{Asks, Key, Literal};

use crate::kind::{Integers, Kind, Reals};
use crate::resolve::Context;
use crate::section::Section;

/// fp16 itself overflows at 2^16: a scale above it can only be on its way down.
const USABLE_SCALE_POWER: i64 = 16;

pub(crate) const FP16: &[Key] = &[
    Key::flag("enabled", false, "Train in fp16.").auto(),
    Key::flag("auto_cast", false, "Cast the inputs of the model to fp16.").auto(),
    Key::real("loss_scale", Reals::NotNegative, 0.0, "Fixed loss scale; 0 for a dynamic one.")
        .auto(),
    Key::new(
        "initial_scale_power",
        Kind::Integer(Integers { min: 0, max: 127 }),
        Literal::Integer(16),
        "The dynamic scale starts at two to this power.",
    )
    .auto(),
    Key::new(
        "loss_scale_window",
        Kind::Integer(Integers::ANY),
        Literal::Integer(1000),
        "Good steps before the scale doubles.",
    )
    .unit("steps")
    .auto(),
    Key::positive("hysteresis", 2, "Overflows before the scale halves.").unit("overflows").auto(),
    Key::flag("consecutive_hysteresis", false, "Refill the hysteresis after every good step."),
    Key::new(
        "min_loss_scale",
        Kind::Integer(Integers::ANY),
        Literal::Integer(1),
        "The dynamic scale never goes below.",
    )
    .auto(),
    Key::flag("fp16_master_weights_and_grads", false, "Keep master weights and gradients in fp16.")
        .unavailable("fp16 master weights", Asks::Differs, "set it to false"),
];

pub(crate) const BF16: &[Key] = &[
    Key::flag("enabled", false, "Train in bfloat16.").auto(),
    Key::flag("immediate_grad_update", false, "Accumulate each gradient as soon as it is final."),
    Key::flag("check_grad_overflow", true, "Skip a step whose gradients are not finite."),
    Key::flag(
        "bf16_master_weights_and_grads",
        false,
        "Keep master weights and gradients in bfloat16.",
    )
    .unavailable("bf16 master weights", Asks::Differs, "set it to false"),
    Key::flag("bf16_optimizer_states", false, "Keep the moments in bfloat16.").unavailable(
        "bf16 optimizer states",
        Asks::Differs,
        "set it to false",
    ),
];

const TYPES: Kind = Kind::Choice(&["fp32", "fp16", "bf16", "bfp16"]);
const FP32: Asks = Asks::NotOneOf(&["fp32"]);
const WRITE_FP32: &str = "remove it or set it to \"fp32\"";

pub(crate) const DATA_TYPES: &[Key] = &[
    Key::optional("grad_accum_dtype", TYPES, "Type in which gradients are accumulated; fp32 here.")
        .unavailable("accumulation in 16 bits", FP32, WRITE_FP32),
    Key::optional("param_dtype", TYPES, "Type of the parameters.").unavailable(
        "16-bit parameters",
        FP32,
        WRITE_FP32,
    ),
    Key::optional("buffer_dtype", TYPES, "Type of the buffers.").unavailable(
        "16-bit buffers",
        FP32,
        WRITE_FP32,
    ),
    Key::new(
        "keep_in_fp32_modules",
        Kind::Free,
        Literal::Text("auto"),
        "Modules that stay in fp32.",
    )
    .inert("everything stays in fp32"),
];

/// Checks both sections and resolves their `enabled: "auto"`.
pub(crate) fn check(top: &Section<'_>, context: &mut Context<'_>) {
    let (fp16, bf16) = (top.section("fp16"), top.section("bf16"));
    for section in [&fp16, &bf16] {
        if section.is_auto("enabled") {
            let path = section.path_of("enabled");
            context.findings.push(
                section.note("enabled", "\"auto\" is resolved to false: training is in fp32"),
            );
            context.autos.answer(&path, false, "training is in fp32 in this version");
        }
    }
    if fp16.flag("enabled") && bf16.flag("enabled") {
        context.findings.push(bf16.error(
            "enabled",
            "bfloat16 and fp16 modes cannot be simultaneously enabled",
            "set one of fp16.enabled and bf16.enabled to false",
        ));
    }
    if fp16.real("loss_scale") == 0.0 {
        check_dynamic_scale(&fp16, context);
    }
}

/// A scale that never grows or never stops shrinking is a mistake even where it is switched off.
fn check_dynamic_scale(fp16: &Section<'_>, context: &mut Context<'_>) {
    for name in ["loss_scale_window", "min_loss_scale"] {
        let value = fp16.integer(name);
        if value <= 0 {
            let message = format!(
                "{value} is out of range: a dynamic loss scale (loss_scale 0) needs more than 0"
            );
            let remedy = format!("write {} or leave the key out", fp16.key(name).default);
            context.findings.push(fp16.error(name, message, remedy));
        }
    }
    let power = fp16.integer("initial_scale_power");
    if fp16.flag("enabled") && power > USABLE_SCALE_POWER {
        let skipped = predicted_skips(power, fp16.integer("hysteresis"));
        context.findings.push(fp16.warning(
            "initial_scale_power",
            format!(
                "{power} starts at a scale of 2^{power}: about {skipped} updates will be \
                skipped until it is down at 2^{USABLE_SCALE_POWER}"
            ),
            format!("write {USABLE_SCALE_POWER}"),
        ));
    }
}

/// Updates that overflow before the scale is one that fp16 can hold: one for each halving, and the
/// hysteresis before the first.
fn predicted_skips(power: i64, hysteresis: i64) -> i64 {
    (power - USABLE_SCALE_POWER) + (hysteresis - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_agree_with_the_loss_scaler() {
        // DeepSpeed's scaler with power 32 and hysteresis 2: after 17 overflows it is at 2^16.
        assert_eq!(predicted_skips(32, 2), 17);
        assert_eq!(predicted_skips(17, 1), 1);
    }
}
