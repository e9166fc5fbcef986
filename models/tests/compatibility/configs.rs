//! Tests of `config.json` files: exports of this and of earlier versions, and of published models.

use deepburn_models::decoder::{AnyDecoder, DecoderConfig, DecoderParts};
use deepburn_models::encoder::EncoderConfig;
use deepburn_models::families::{
    Gemma2Config, Gemma3Config, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config,
};
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Config};
use deepburn_models::hf::{ModelConfigError, ProblemType, is_sequence_classifier};
use deepburn_models::lora::LoraConfig;
use deepburn_models::{Architecture, FloatType, LanguageModelConfig, SavedConfig};
use serde_json::{Map, Value, json};

fn fields(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// Checks that the exported `config.json` of a configuration is read, for weights of each type.
fn assert_read_back<C: SavedConfig>(config: &C) {
    for float in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
        let (name, document) = config.documents(float).swap_remove(0);
        assert_eq!((name, &document["model_type"]), ("config.json", &json!(C::MODEL_TYPE)));
        let read = C::from_fields(document.clone()).unwrap();
        assert_eq!(read.documents(float).swap_remove(0).1, document);
    }
}

#[test]
fn exports_are_read_back() {
    let classifier = ClassifierConfig {
        body: Gpt2Config::small(),
        num_classes: 3,
        problem_type: ProblemType::MultiLabelClassification,
    };
    assert_read_back(&Gpt2Config::small());
    assert_read_back(&classifier);
    assert_read_back(&EncoderConfig::guide());
    assert!(is_sequence_classifier(&classifier.documents(FloatType::F32)[0].1));
    assert!(!is_sequence_classifier(&Gpt2Config::small().documents(FloatType::F32)[0].1));
}

/// Exports of earlier versions, with the fields that they kept of files of `transformers`.
#[test]
fn exports_of_earlier_versions_are_read() {
    let language_model = fields(json!({
        "_name_or_path": "openai-community/gpt2", "activation_function": "gelu_new",
        "add_cross_attention": false, "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "dtype": "float32", "embd_pdrop": 0.1, "eos_token_id": 50256,
        "gradient_checkpointing": false, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_inner": null, "n_layer": 12,
        "n_positions": 1024, "output_past": true, "reorder_and_upcast_attn": false,
        "resid_pdrop": 0.1, "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true,
        "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "tie_word_embeddings": true, "torch_dtype": "float32", "transformers_version": "4.30.2",
        "use_cache": true, "vocab_size": 50257,
    }));
    let config = Gpt2Config::from_fields(language_model.clone()).unwrap();
    assert_eq!(Map::from(config), language_model);

    let mut classifier = language_model;
    classifier.extend(fields(json!({
        "architectures": ["GPT2ForSequenceClassification"], "id2label": {"0": "bad", "1": "good"},
        "label2id": {"bad": 0, "good": 1}, "num_labels": 2, "pad_token_id": 50256,
    })));
    let config = ClassifierConfig::from_fields(classifier).unwrap();
    assert_eq!((config.num_classes, config.problem_type), (2, ProblemType::default()));

    let encoder = fields(json!({
        "architectures": ["DeepBurnEncoder"], "dropout": 0.2, "dtype": "float32", "embed_dim": 256,
        "hidden_dim": 1024, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "initializer_range": 1.0,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "layer_norm_epsilon": 1e-5, "max_len": 1024,
        "model_type": "deepburn_encoder", "num_classes": 2, "num_heads": 8, "num_layers": 6,
        "vocab_size": 50257,
    }));
    EncoderConfig::from_fields(encoder).unwrap();
}

/// Decoders of today are refused by their `model_type`, and by each field that GPT-2 does not read.
#[test]
fn other_decoders_are_refused() {
    let llama = json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": {"factor": 32.0, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 128256,
    });
    let mut llama = fields(llama);
    let message = Gpt2Config::from_fields(llama.clone()).unwrap_err().to_string();
    assert!(message.starts_with("`model_type` is \"llama\""), "{message}");
    llama.remove("model_type");
    let mut refused = Vec::new();
    while let Err(error) = Gpt2Config::from_fields(llama.clone()) {
        let name = error.unsupported_field().unwrap_or_else(|| panic!("{error}")).to_owned();
        llama.insert(name.clone(), Value::Null);
        refused.push(name);
    }
    refused.sort();
    let expected = [
        "attention_bias",
        "attention_dropout",
        "head_dim",
        "hidden_act",
        "intermediate_size",
        "mlp_bias",
        "num_key_value_heads",
        "pretraining_tp",
        "rms_norm_eps",
        "rope_scaling",
        "rope_theta",
    ];
    assert_eq!(refused, expected);
}

/// The message is the adapter's, and does not blame the syntax of the config.
#[test]
fn overrides_that_do_not_fit_an_adapter_are_refused() {
    let config = fields(json!({
        "vocab_size": 40, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "tie_word_embeddings": true,
    }));
    let decoder = AnyDecoder::new(LlamaConfig::from_fields(config).unwrap());
    let lora = fields(json!({"trainable_token_indices": [39]}));
    let decoder = decoder.with_adapter(LoraConfig::of_job(&lora).unwrap()).unwrap();
    let error = decoder.with_overrides(&fields(json!({"vocab_size": 39}))).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("token 39 has no row"), "{message}");
    assert!(!message.contains("JSON"), "{message}");
}

/// With an original length of 0 or 1, sines and cosines would not be finite.
#[test]
fn an_original_length_without_a_logarithm_is_refused() {
    let scaling = json!({
        "type": "longrope", "short_factor": vec![1.0; 48], "long_factor": vec![2.0; 48],
    });
    let phi3 = |original_len: usize| {
        Phi3Config::from_fields(fields(json!({
            "rope_scaling": scaling, "original_max_position_embeddings": original_len,
        })))
    };
    assert!(phi3(4096).is_ok());
    for len in [0, 1] {
        let message = phi3(len).unwrap_err().to_string();
        let expected = format!("`original_max_position_embeddings` is {len}");
        assert!(message.contains(&expected), "{message}");
    }
}

/// Reads the fields of a small model of a family, and returns its parts.
fn parts(family: &str, own: &Value) -> Result<DecoderParts, ModelConfigError> {
    let mut all = fields(json!({
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 32,
    }));
    all.extend(fields(own.clone()));
    match family {
        "llama" => LlamaConfig::from_fields(all).map(|it| it.parts()),
        "qwen2" => Qwen2Config::from_fields(all).map(|it| it.parts()),
        "qwen3" => Qwen3Config::from_fields(all).map(|it| it.parts()),
        "mistral" => MistralConfig::from_fields(all).map(|it| it.parts()),
        "phi3" => Phi3Config::from_fields(all).map(|it| it.parts()),
        "gemma2" => Gemma2Config::from_fields(all).map(|it| it.parts()),
        "gemma3_text" => Gemma3Config::from_fields(all).map(|it| it.parts()),
        other => panic!("unknown family {other}"),
    }
}

/// A field that `transformers` does not read in a family, or with which it fails, is not read here.
#[test]
fn fields_that_transformers_does_not_read_in_a_family_are_refused() {
    let whole = "1: `transformers` rotates whole heads of this family";
    let half = json!({"partial_rotary_factor": 0.5});
    let mut table = Vec::new();
    for family in ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"] {
        table.push((
            family,
            half.clone(),
            format!("`partial_rotary_factor` is 0.5, but it must be {whole}"),
        ));
    }
    let of_length = |name: &str| {
        json!({"rope_scaling": {
            "rope_type": name, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        }})
    };
    for name in ["linear", "dynamic", "llama3"] {
        let expected = format!(
            "`rope_scaling.rope_type` is \"{name}\", but it must be one of default, longrope"
        );
        table.push(("phi3", of_length(name), expected));
    }
    let sliding = json!(["full_attention", "sliding_attention"]);
    let long =
        json!({"rope_type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8]});
    let with = |value: &Value, name: &str, own: Value| {
        let mut value = value.clone();
        value[name] = own;
        value
    };
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "truncate": false});
    for (family, own, expected) in [
        (
            "llama",
            json!({"rope_parameters": half}),
            "`rope_parameters.partial_rotary_factor` is 0.5",
        ),
        (
            "llama",
            json!({"rope_parameters": with(&yarn, "truncate", Value::Null)}),
            "`rope_parameters.truncate` is null, but it must be true or false",
        ),
        (
            "llama",
            json!({"rope_parameters": with(&yarn, "original_max_position_embeddings", json!(16.5))}),
            "`rope_parameters.original_max_position_embeddings` is 16.5, but it must be a positive integer",
        ),
        (
            "phi3",
            json!({"rope_scaling": with(&long, "original_max_position_embeddings", json!(16))}),
            "`rope_scaling.original_max_position_embeddings` is 16, but it must be 4096",
        ),
        (
            "gemma3_text",
            json!({"rope_parameters": {"full_attention": yarn}}),
            "`rope_parameters.full_attention.truncate` is false, but it must be true",
        ),
        (
            "gemma3_text",
            json!({"rope_parameters": {"rope_type": "linear"}}),
            "`rope_parameters.rope_type` is \"linear\", but it must be in the objects",
        ),
        (
            "gemma3_text",
            json!({"rope_scaling": {"type": "linear", "factor": 8.0}}),
            "`rope_scaling.type` is \"linear\", but it must be named `rope_type`",
        ),
        (
            "gemma3_text",
            json!({"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}),
            "`rope_scaling.rope_type` is null, but it must be the name of a type",
        ),
        (
            "gemma3_text",
            json!({"rope_scaling": long, "original_max_position_embeddings": 16}),
            "`original_max_position_embeddings` is 16, but the model does not read this field",
        ),
        (
            "gemma3_text",
            json!({"attn_logit_softcapping": 3.0}),
            "`attn_logit_softcapping` = 3.0 is not supported: `transformers` does not limit",
        ),
        (
            "gemma3_text",
            json!({"_sliding_window_pattern": 3}),
            "`_sliding_window_pattern` is 3, but it must be 6, as `sliding_window_pattern`",
        ),
        (
            "gemma3_text",
            json!({"_sliding_window_pattern": 3, "sliding_window_pattern": 2}),
            "`_sliding_window_pattern` is 3, but it must be 2",
        ),
        (
            "gemma2",
            json!({"hidden_act": "gelu"}),
            "`hidden_act` is \"gelu\", but it must be \"gelu_pytorch_tanh\"",
        ),
        (
            "gemma2",
            json!({"sliding_window": null}),
            "`sliding_window` is null, but it must be a positive integer",
        ),
        ("gemma3_text", json!({"sliding_window": null}), "`sliding_window` is null"),
        (
            "qwen2",
            json!({"layer_types": sliding}),
            "`use_sliding_window` is false, but it must be true",
        ),
        (
            "qwen3",
            json!({"layer_types": sliding, "use_sliding_window": true, "sliding_window": null}),
            "`sliding_window` is null",
        ),
    ] {
        table.push((family, own, expected.to_owned()));
    }
    for (family, own, expected) in table {
        let message = parts(family, &own).expect_err(&own.to_string()).to_string();
        assert!(message.starts_with(&expected), "{family}: {message}");
    }
}

//= transformers 5.23.0 modeling_rope_utils.py _compute_yarn_parameters
//= transformers 5.23.0 models/gemma3/configuration_gemma3.py convert_rope_params_to_dict
//= transformers 5.23.0 models/gemma3/configuration_gemma3.py sliding_window_pattern
//= transformers 5.23.0 models/gemma3/modeling_gemma3.py Gemma3Attention
//= transformers 5.23.0 models/phi3/configuration_phi3.py original_max_position_embeddings
//= transformers 5.23.0 models/phi3/configuration_phi3.py validate_rope
//= transformers 5.23.0 models/phi3/modeling_phi3.py compute_default_rope_parameters
/// Both fields of a row describe the same model.
#[test]
fn fields_without_an_effect_are_accepted() {
    let yarn = |own: Value| {
        let mut scaling =
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
        scaling.as_object_mut().unwrap().extend(fields(own));
        json!({ "rope_scaling": scaling })
    };
    let long =
        json!({"type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8]});
    let full = json!(["full_attention", "full_attention"]);
    for (family, own, equal) in [
        (
            "llama",
            yarn(json!({"beta_fast": 0, "beta_slow": 0.0})),
            yarn(json!({"beta_fast": 32, "beta_slow": 1})),
        ),
        ("llama", json!({"partial_rotary_factor": 1.0}), json!({})),
        (
            "phi3",
            json!({"partial_rotary_factor": null}),
            json!({"rope_parameters": {"partial_rotary_factor": 1}}),
        ),
        (
            "phi3",
            json!({ "rope_scaling": long }),
            json!({"rope_scaling": long, "original_max_position_embeddings": 4096}),
        ),
        (
            "gemma3_text",
            json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
            json!({"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}}),
        ),
        ("gemma3_text", json!({"attn_logit_softcapping": null}), json!({})),
        ("gemma3_text", json!({"_sliding_window_pattern": 6}), json!({})),
        (
            "gemma3_text",
            json!({"layer_types": full, "_sliding_window_pattern": 3}),
            json!({"sliding_window_pattern": 1}),
        ),
        ("gemma2", json!({"hidden_act": "gelu_pytorch_tanh"}), json!({})),
        (
            "gemma2",
            json!({"layer_types": full, "sliding_window": null}),
            json!({ "layer_types": full }),
        ),
        ("qwen2", json!({"layer_types": full, "use_sliding_window": false}), json!({})),
    ] {
        assert_eq!(parts(family, &own).unwrap(), parts(family, &equal).unwrap(), "{family}: {own}");
    }
}
