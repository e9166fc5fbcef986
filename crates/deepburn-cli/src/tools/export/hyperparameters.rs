//! Describes a decoder as llama.cpp does.

use deepburn_gguf::{Architecture, GgufRope, Hyperparameters, RopeScaling};
use deepburn_models::decoder::{AnyDecoder, NormKind, Rotary, RotaryScaling};

use crate::failure::Failure;

/// Returns the hyperparameters of a model without an adapter.
///
/// # Errors
/// Returns a user's mistake if llama.cpp does not have the architecture or computes the model in another way.
pub(super) fn hyperparameters(config: &AnyDecoder) -> Result<Hyperparameters, Failure> {
    let model_type = config.model_type();
    let Some(architecture) = Architecture::from_model_type(model_type) else {
        let all = Architecture::ALL.map(Architecture::name).join(", ");
        return Err(Failure::mistake(format!(
            "`model_type` is {model_type}; llama.cpp's architectures {all} are supported; keep the model as safetensors"
        )));
    };
    let parts = config.parts();
    let Some(first) = parts.layers.first() else {
        unreachable!("the number of layers was checked when the configuration was read")
    };
    let attentions = || parts.layers.iter().map(|layer| &layer.attention);
    if attentions().any(|it| it.scale != first.attention.scale) {
        return Err(Failure::mistake(
            "`scale_attn_by_inverse_layer_idx` is true; llama.cpp supports false; keep the model as safetensors",
        ));
    }
    let rotary = |has_window: bool| {
        attentions().find(|it| it.window.is_some() == has_window).and_then(|it| it.rotary.as_ref())
    };
    let windowed = rotary(true);
    let full = rotary(false).or(windowed);
    let (NormKind::Layer { epsilon }
    | NormKind::Rms { epsilon }
    | NormKind::RmsPlusOne { epsilon }) = parts.norm.kind;
    let hyperparameters = Hyperparameters {
        architecture,
        vocab_size: parts.vocab_size,
        context_length: parts.max_len,
        width: parts.width,
        feed_forward: first.feed_forward.inner,
        heads: first.attention.heads,
        key_value_heads: first.attention.key_value_heads,
        head_width: first.attention.head_width,
        epsilon,
        activation: first.feed_forward.activation.name().to_owned(),
        is_tied: parts.head.is_tied,
        has_output_bias: first.attention.output.has_bias,
        has_feed_forward_bias: first.feed_forward.output.has_bias,
        query_scalar: first.attention.scale.powi(-2),
        attention_soft_cap: first.attention.soft_cap,
        logit_soft_cap: parts.head.soft_cap,
        windows: attentions().map(|it| it.window).collect(),
        rope: full.map(rope),
        window_rope: windowed.filter(|it| Some(*it) != full).map(rope),
    };
    hyperparameters.check().map_err(Failure::mistake)?;
    Ok(hyperparameters)
}

fn rope(rotary: &Rotary) -> GgufRope {
    let scaling = match rotary.scaling.clone() {
        RotaryScaling::Default => RopeScaling::Default,
        RotaryScaling::Linear { factor } => RopeScaling::Linear { factor },
        RotaryScaling::Dynamic { .. } => RopeScaling::Dynamic,
        RotaryScaling::Yarn {
            factor,
            original_len,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        } => RopeScaling::Yarn {
            factor,
            original_len,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        },
        RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len }
        }
        RotaryScaling::LongRope { short_factor, long_factor, original_len, attention_factor } => {
            RopeScaling::LongRope { short_factor, long_factor, original_len, attention_factor }
        }
    };
    GgufRope { width: rotary.width, theta: rotary.theta, scaling }
}
