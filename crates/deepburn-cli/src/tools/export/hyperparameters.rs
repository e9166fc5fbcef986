//! Describes a decoder as llama.cpp does.

use deepburn_gguf::{
    Architecture, GgufAttention, GgufFeedForward, GgufRope, Hyperparameters, RopeScaling,
};
use deepburn_models::decoder::{AnyDecoder, NormKind, Rotary, RotaryScaling};

use crate::failure::Failure;

/// Returns the hyperparameters of a model without an adapter.
///
/// # Errors
/// Returns a user's mistake if llama.cpp does not have the architecture or computes the model in
/// another way.
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
    // A GGUF file has one scale for all layers.
    if attentions().any(|it| it.scale != first.attention.scale) {
        return Err(Failure::mistake(
            "`scale_attn_by_inverse_layer_idx` is true; llama.cpp supports false; keep the model as safetensors",
        ));
    }
    let rotary = |has_window: bool| {
        attentions().find(|it| it.window.is_some() == has_window).and_then(|it| it.rotary.as_ref())
    };
    let windowed = rotary(true);
    // If all layers have a window, they share one rotary embedding.
    let full = rotary(false).or(windowed);
    let (NormKind::Layer { epsilon }
    | NormKind::Rms { epsilon }
    | NormKind::RmsPlusOne { epsilon }) = parts.norm.kind;
    let hyperparameters = Hyperparameters {
        architecture,
        vocab_size: parts.vocab_size,
        context_length: parts.max_len,
        width: parts.width,
        epsilon,
        is_tied: parts.head.is_tied,
        logit_soft_cap: parts.head.soft_cap,
        attention: GgufAttention {
            heads: first.attention.heads,
            key_value_heads: first.attention.key_value_heads,
            head_width: first.attention.head_width,
            has_output_bias: first.attention.output.has_bias,
            // Gemma's query_pre_attn_scalar: the scale is 1 / sqrt of it.
            query_scalar: first.attention.scale.powi(-2),
            soft_cap: first.attention.soft_cap,
            windows: attentions().map(|it| it.window).collect(),
        },
        feed_forward: GgufFeedForward {
            width: first.feed_forward.inner,
            activation: first.feed_forward.activation.name().to_owned(),
            has_bias: first.feed_forward.output.has_bias,
        },
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
        RotaryScaling::LongRope {
            short_factor,
            long_factor,
            original_len,
            attention_factor,
            ..
        } => RopeScaling::LongRope { short_factor, long_factor, original_len, attention_factor },
    };
    GgufRope { width: rotary.width, theta: rotary.theta, scaling }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use deepburn_models::hf::{read_fields, read_small_file};
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::job::known_model::KnownModel;
    use crate::models;

    fn decoder(fields: Map<String, Value>) -> AnyDecoder {
        match models::read_saved(fields).unwrap() {
            KnownModel::LanguageModel(model) => model,
            KnownModel::Classifier(_) => panic!("not a language model"),
        }
    }

    /// Checks that the model of a `config.json` is the one of its hyperparameters.
    fn is_described(fields: Map<String, Value>) {
        let padding = fields.get("pad_token_id").cloned();
        let model = decoder(fields);
        let mut again = hyperparameters(&model).unwrap().config_fields();
        again.extend(padding.map(|id| ("pad_token_id".to_owned(), id)));
        assert_eq!(decoder(again).parts(), model.parts());
    }

    #[test]
    fn hyperparameters_describe_the_whole_model() {
        for fields in [
            json!({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "n_inner": 96}),
            json!({"model_type": "mistral", "sliding_window": 5, "num_hidden_layers": 2}),
            json!({"model_type": "phi3", "num_hidden_layers": 2, "sliding_window": 7}),
            // 2 of 6 elements, a share that has no exact f64.
            json!({
                "model_type": "phi3", "hidden_size": 18, "num_attention_heads": 3, "num_hidden_layers": 1,
                "partial_rotary_factor": 1.0 / 3.0,
            }),
            json!({"model_type": "gemma2", "num_hidden_layers": 3}),
            json!({"model_type": "gemma3_text", "num_hidden_layers": 7}),
        ] {
            is_described(fields.as_object().unwrap().clone());
        }
    }

    #[test]
    fn hyperparameters_describe_published_models() {
        let data = std::env::var_os("DEEPBURN_TEST_DATA").map(PathBuf::from);
        let golden = data.and_then(|data| Some(data.parent()?.join("golden/llm/models")));
        let Some(golden) = golden.filter(|golden| golden.is_dir()) else { return };
        for name in [
            "gemma2",
            "gemma3",
            "llama3_tied",
            "llama_linear",
            "llama_untied_sharded",
            "mistral_nemo",
            "mistral_window",
            "phi3_longrope",
            "phi4",
            "qwen2",
            "qwen2_window",
            "qwen2_yarn",
            "qwen3",
            "smollm2",
        ] {
            let file = golden.join(name).join("config.json");
            is_described(read_fields(&read_small_file(&file).unwrap()).unwrap());
        }
    }
}
