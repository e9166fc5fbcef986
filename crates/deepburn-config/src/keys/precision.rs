//! Precision: `fp16`, `bf16`, `data_types` and the type in which gradients travel.
//!
//! Sections are checked in full also where they are switched off: a file that is wrong is told so
//! whatever it asks for.

use crate::key::{Asks, Key, Literal};

use crate::keys::autocast;
use crate::kind::{Integers, Kind, Reals};
use crate::plan::{
    DynamicScalePlan, LossScalePlan, OverflowPlan, Precision, PrecisionPlan, ScaleGrowth,
};
use crate::resolve::Context;
use crate::section::Section;

/// fp16 itself overflows at 2^16: a scale above it can only be on its way down.
const USABLE_SCALE_POWER: i64 = 16;

pub(crate) const FP16: &[Key] = &[
    Key::flag("enabled", false, "Train in fp16.").auto(),
    Key::flag(
        "auto_cast",
        false,
        "Run ops in the types of torch.autocast, as torch_autocast does, on fp16 parameters. \
            DeepSpeed only casts the inputs of the model to fp16.",
    )
    .auto(),
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
    Key::flag("immediate_grad_update", false, "Accumulate each gradient as soon as it is final.")
        .inert("gradients are always accumulated as soon as they are final"),
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

/// Float types by name; `bfp16` is how some releases of DeepSpeed spell bfloat16.
const TYPES: Kind = Kind::Choice(&["fp32", "fp16", "bf16", "bfp16"]);
const FP32: Asks = Asks::NotOneOf(&["fp32"]);
const WRITE_FP32: &str = "remove it or set it to \"fp32\"";

pub(crate) const COMMUNICATION: Key = Key::optional(
    "communication_data_type",
    TYPES,
    "Type in which gradients travel; by default that of the model.",
);

pub(crate) const DATA_TYPES: &[Key] = &[
    Key::optional(
        "grad_accum_dtype",
        TYPES,
        "Type in which the gradients of micro-batches add up; fp32 by default, where DeepSpeed \
            takes the model's type and loses small gradients.",
    ),
    Key::optional("param_dtype", TYPES, "Type of the parameters.").unavailable(
        "a type of parameters apart from fp16 and bf16",
        FP32,
        "remove it and set fp16.enabled or bf16.enabled",
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
    .unavailable("modules that stay in fp32", Asks::Differs, "remove it"),
];

/// Resolves all of them.
pub(crate) fn resolve(top: &Section<'_>, context: &mut Context<'_>) -> PrecisionPlan {
    let (fp16, bf16) = (top.section("fp16"), top.section("bf16"));
    for section in [&fp16, &bf16] {
        if section.is_auto("enabled") {
            let path = section.path_of("enabled");
            let why = "nothing but this file says in which type to train";
            let message =
                format!("\"auto\" is resolved to false: {why}; write true to train in it");
            context.findings.push(section.note("enabled", message));
            context.autos.answer(&path, false, why);
        }
    }
    if fp16.flag("enabled") && bf16.flag("enabled") {
        context.findings.push(bf16.error(
            "enabled",
            "bfloat16 and fp16 modes cannot be simultaneously enabled",
            "set one of fp16.enabled and bf16.enabled to false",
        ));
    }
    match fp16.real("loss_scale") {
        0.0 => check_dynamic_scale(&fp16, context),
        fixed if fixed > f64::from(f32::MAX) => context.findings.push(fp16.error(
            "loss_scale",
            format!(
                "{fixed:e} is larger than an f32 can hold ({:e}), and so is every loss",
                f32::MAX
            ),
            "write 0 for a dynamic scale",
        )),
        // Its inverse, which unscales gradients, would be infinite.
        fixed if fixed > 0.0 && fixed < f64::from(f32::MIN_POSITIVE) => {
            context.findings.push(fp16.error(
                "loss_scale",
                format!(
                    "{fixed:e} is smaller than a normal f32 ({:e}), and gradients cannot be divided \
                     by it",
                    f32::MIN_POSITIVE
                ),
                "write 0 for a dynamic scale",
            ));
        }
        fixed if fp16.flag("enabled") && fixed > 2_f64.powi(USABLE_SCALE_POWER as i32) => {
            context.findings.push(fp16.warning(
                "loss_scale",
                format!(
                    "{fixed:e} never changes, and is beyond 2^{USABLE_SCALE_POWER}, where most \
                     gradients overflow: steps may be skipped for ever"
                ),
                "write 0 for a dynamic scale",
            ));
        }
        _ => {}
    }
    let compute = match (fp16.flag("enabled"), bf16.flag("enabled")) {
        (true, _) => Precision::Fp16,
        (false, true) => Precision::Bf16,
        (false, false) => Precision::Fp32,
    };
    let autocast = autocast::resolve(top, compute, context);
    let scaled = compute == Precision::Fp16 || autocast == Some(Precision::Fp16);
    // Autocast in bf16 has fp32 parameters and gradients: what is not finite ends the run as in fp32.
    let skips = scaled || compute == Precision::Bf16 && bf16.flag("check_grad_overflow");
    let data_types = top.section("data_types");
    let communication = named(top.optional_choice(COMMUNICATION.name)).unwrap_or(compute);
    let accumulation =
        named(data_types.optional_choice("grad_accum_dtype")).unwrap_or(Precision::Fp32);
    for (section, key, gradients) in
        [(top, COMMUNICATION.name, communication), (&data_types, "grad_accum_dtype", accumulation)]
    {
        if !scaled && gradients == Precision::Fp16 {
            context.findings.push(section.warning(
                key,
                format!(
                    "fp16 holds fewer magnitudes than {}, and nothing scales the loss: gradients \
                     below 6e-8 are lost, and those beyond 65504 overflow",
                    compute.name()
                ),
                "write \"fp32\" or leave the key out",
            ));
        }
    }
    PrecisionPlan {
        compute,
        autocast,
        communication,
        accumulation,
        loss_scale: match (scaled, compute) {
            (false, _) => LossScalePlan::Static { scale: 1.0 },
            (true, Precision::Fp16) => loss_scale(&fp16),
            (true, _) => LossScalePlan::Dynamic(autocast::GRAD_SCALER),
        },
        overflow: if skips { OverflowPlan::Skip } else { OverflowPlan::End },
    }
}

fn named(name: Option<&str>) -> Option<Precision> {
    Some(match name? {
        "fp16" => Precision::Fp16,
        "bf16" | "bfp16" => Precision::Bf16,
        _ => Precision::Fp32,
    })
}

fn loss_scale(fp16: &Section<'_>) -> LossScalePlan {
    let scale = fp16.real("loss_scale");
    if scale != 0.0 {
        return LossScalePlan::Static { scale };
    }
    // Numbers below their range were reported; they are not used.
    let at_least_one = |name| fp16.integer(name).max(1) as u64;
    LossScalePlan::Dynamic(DynamicScalePlan {
        initial_scale: 2_f64.powi(fp16.integer("initial_scale_power") as i32),
        window: at_least_one("loss_scale_window"),
        hysteresis: at_least_one("hysteresis"),
        consecutive_hysteresis: fp16.flag("consecutive_hysteresis"),
        min_scale: at_least_one("min_loss_scale") as f64,
        growth: ScaleGrowth::AfterWindow,
    })
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
    let minimum = fp16.integer("min_loss_scale");
    if fp16.flag("enabled") && minimum as f64 >= 2_f64.powi(power as i32) {
        context.findings.push(fp16.warning(
            "min_loss_scale",
            format!(
                "{minimum} is not below the scale at the start, 2^{power}: the run ends once an \
                 overflow should lower it"
            ),
            "write 1",
        ));
    } else if fp16.flag("enabled") && power > USABLE_SCALE_POWER {
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
    (power - USABLE_SCALE_POWER).saturating_add(hysteresis - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_agree_with_the_loss_scaler() {
        // DeepSpeed's scaler with power 32 and hysteresis 2: after 17 overflows it is at 2^16.
        assert_eq!(predicted_skips(32, 2), 17);
        assert_eq!(predicted_skips(17, 1), 1);
        assert_eq!(predicted_skips(40, i64::MAX), i64::MAX);
    }
}
