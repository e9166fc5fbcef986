//! Precision: `fp16`, `bf16`, `data_types` and the data type of communicated gradients.

use super::*;

/// fp16 overflows at 2^16, so a larger scale can only decrease.
const USABLE_SCALE_POWER: i64 = 16;

/// Resolves all sections about precision.
///
/// The type of the parameters is resolved first, then autocast, which must not be combined with
/// another 16-bit type. Both determine whether the loss is scaled and how an overflow is handled.
/// fp16 overflows in normal operation and skips the step, while a non-finite gradient in fp32 is an
/// error of the model or the data.
pub(crate) fn resolve(context: &mut Context<'_>) -> PrecisionPlan {
    let top = context.top;
    let (fp16, bf16) = (&top.fp16.value, &top.bf16.value);
    for enabled in [&fp16.enabled, &bf16.enabled] {
        let why = "nothing but this file says in which type to train";
        note!(if enabled.is_auto();
            context, enabled => "\"auto\" is resolved to false: {why}; write true to train in it");
        context.answer(enabled, false, why);
    }
    refuse!(if fp16.enabled.value && bf16.enabled.value;
        context, &bf16.enabled => "bfloat16 and fp16 modes cannot be simultaneously enabled";
        "set one of fp16.enabled and bf16.enabled to false");
    check_scale(fp16, context);
    let compute = match (fp16.enabled.value, bf16.enabled.value) {
        (true, _) => Precision::Fp16,
        (false, true) => Precision::Bf16,
        (false, false) => Precision::Fp32,
    };
    let autocast = autocast::resolve(compute, context);
    let scaled = compute == Precision::Fp16 || autocast == Some(Precision::Fp16);
    //= deepspeed 0.19.8 runtime/precision_config.py DeepSpeedBF16Config check_grad_overflow
    // Autocast in bf16 has fp32 parameters and gradients: a non-finite value ends the run, as in
    // fp32.
    let skips = scaled || compute == Precision::Bf16 && bf16.check_grad_overflow.value;
    let dtypes = [&top.communication_data_type, &top.data_types.value.grad_accum_dtype];
    // As in DeepSpeed, gradients have the type of the parameters if nothing else is asked for.
    let communication = dtypes[0].value.unwrap_or(compute);
    // Unlike in DeepSpeed, not the model's type by default: a long sum in 16 bits loses small
    // gradients.
    let accumulation = dtypes[1].value.unwrap_or(Precision::Fp32);
    for (key, gradients) in dtypes.into_iter().zip([communication, accumulation]) {
        warning!(if !scaled && gradients == Precision::Fp16; context, key =>
            "fp16 holds fewer magnitudes than {}, and nothing scales the loss: gradients below 6e-8 are lost, and \
             those beyond 65504 overflow", compute.name();
            "write \"fp32\" or leave the key out");
    }
    let loss_scale = match (scaled, compute) {
        (false, _) => LossScalePlan::Static { scale: 1.0 },
        (true, Precision::Fp16) => loss_scale(fp16),
        (true, _) => LossScalePlan::Dynamic(autocast::GRAD_SCALER),
    };
    let overflow = if skips { OverflowPlan::Skip } else { OverflowPlan::End };
    PrecisionPlan { compute, autocast, communication, accumulation, loss_scale, overflow }
}

//= deepspeed 0.19.8 runtime/precision_config.py DeepSpeedFP16Config
/// Returns the loss scale of fp16 parameters: static, or DeepSpeed's dynamic loss scale.
fn loss_scale(fp16: &Fp16<'_>) -> LossScalePlan {
    let scale = fp16.loss_scale.value;
    if scale != 0.0 {
        return LossScalePlan::Static { scale };
    }
    // Numbers below their range have already been reported, and are not used.
    let at_least_one = |number: i64| number.max(1) as u64;
    LossScalePlan::Dynamic(DynamicScalePlan {
        initial_scale: 2_f64.powi(fp16.initial_scale_power.value as i32),
        window: at_least_one(fp16.loss_scale_window.value),
        hysteresis: at_least_one(fp16.hysteresis.value),
        consecutive_hysteresis: fp16.consecutive_hysteresis.value,
        min_scale: at_least_one(fp16.min_loss_scale.value) as f64,
        growth: ScaleGrowth::AfterWindow,
    })
}

/// Checks the static or dynamic loss scale.
fn check_scale(fp16: &Fp16<'_>, context: &mut Context<'_>) {
    let scale = &fp16.loss_scale;
    let (min, max) = (f32::MIN_POSITIVE, f32::MAX);
    let is_fixed = fp16.enabled.value && scale.value > 0.0;
    let of_dynamic: [&ConfigEntry<'_>; 5] = [
        &fp16.initial_scale_power,
        &fp16.loss_scale_window,
        &fp16.hysteresis,
        &fp16.consecutive_hysteresis,
        &fp16.min_loss_scale,
    ];
    for key in of_dynamic.into_iter().filter(|key| is_fixed && key.is_given()) {
        note!(context, key => "has no effect: loss_scale {} never changes", scale.value);
    }
    match scale.value {
        0.0 => check_dynamic_scale(fp16, context),
        fixed if fixed > f64::from(max) => refuse!(context, scale =>
            "{fixed:e} is larger than an f32 can hold ({max:e}), and so is every loss"; "write 0 for a dynamic scale"),
        // Its inverse, which unscales gradients, would be infinite.
        fixed if fixed > 0.0 && fixed < f64::from(min) => refuse!(context, scale =>
            "{fixed:e} is smaller than a normal f32 ({min:e}), and gradients cannot be divided by it";
            "write 0 for a dynamic scale"),
        fixed if fp16.enabled.value && fixed > 2_f64.powi(USABLE_SCALE_POWER as i32) => {
            warning!(context, scale =>
                "{fixed:e} never changes, and is beyond 2^{USABLE_SCALE_POWER}, where most gradients overflow: steps \
                 may be skipped for ever";
                "write 0 for a dynamic scale");
        }
        _ => {}
    }
}

/// Checks the dynamic loss scale. A scale that never grows or never stops shrinking is an error
/// even if it is disabled.
fn check_dynamic_scale(fp16: &Fp16<'_>, context: &mut Context<'_>) {
    for setting in [&fp16.loss_scale_window, &fp16.min_loss_scale] {
        let value = setting.value;
        refuse!(if value <= 0; context, setting =>
            "{value} is out of range; with a dynamic loss scale (loss_scale 0) it must be above 0";
            "give such a value, or leave the key out for {}", setting.key.shown_default());
    }
    let (power, minimum) = (fp16.initial_scale_power.value, fp16.min_loss_scale.value);
    if fp16.enabled.value && minimum as f64 >= 2_f64.powi(power as i32) {
        warning!(context, &fp16.min_loss_scale =>
            "{minimum} is not below the scale at the start, 2^{power}: the run ends once an overflow should lower it";
            "write 1");
    } else if fp16.enabled.value && power > USABLE_SCALE_POWER {
        let skipped = predicted_skips(power, fp16.hysteresis.value);
        warning!(context, &fp16.initial_scale_power =>
            "{power} starts at a scale of 2^{power}: about {} will be skipped until it is down at \
             2^{USABLE_SCALE_POWER}", counted(skipped as usize, "update");
            "write {USABLE_SCALE_POWER}");
    }
}

/// Returns the number of updates that overflow until fp16 can represent the scale: one for each
/// halving, plus the hysteresis before the first.
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
