//! Hyperparameters that are read from a file.

use std::io::Cursor;

use deepburn_gguf::{
    Architecture, GgufReader, GgufRope, Hyperparameters, Metadata, RopeScaling, Value,
};
use serde_json::json;

use crate::model_file::{file, metadata, model};

fn read(bytes: Vec<u8>) -> Result<Hyperparameters, String> {
    let mut reader = GgufReader::new(Cursor::new(bytes)).unwrap();
    Hyperparameters::read(&mut reader).map_err(|error| error.to_string())
}

/// Returns metadata with another value of a key; `None` removes it.
fn with(metadata: &Metadata, key: &str, value: Option<Value>) -> Metadata {
    let mut changed = Metadata::new();
    for (own, value) in metadata.iter().filter(|(own, _)| *own != key) {
        changed.push(own, value.clone()).unwrap();
    }
    if let Some(value) = value {
        changed.push(key, value).unwrap();
    }
    changed
}

fn scaled(architecture: Architecture, scaling: RopeScaling) -> Hyperparameters {
    let rope = GgufRope { width: 16, theta: 5e5, scaling };
    Hyperparameters { rope: Some(rope), ..model(architecture) }
}

fn long_rope(attention_factor: f64) -> RopeScaling {
    RopeScaling::LongRope {
        short_factor: vec![1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        long_factor: vec![2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5],
        original_len: 32,
        attention_factor,
    }
}

/// A model that was written is read as it was.
#[test]
fn models_are_read_as_they_were_written() {
    use Architecture::{Gemma2, Gemma3, Llama, Phi3, Qwen2, Qwen3};

    let mut biased = Hyperparameters { is_tied: false, ..model(Llama) };
    (biased.attention.has_output_bias, biased.feed_forward.has_bias) = (true, true);
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_len: 8192,
    };
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_len: 32,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: 0.1 * 4_f64.ln() + 1.0,
    };
    let windows = |architecture, windows: &[Option<usize>]| {
        let mut model = model(architecture);
        model.attention.windows = windows.to_vec();
        model
    };
    let of_windows = GgufRope { width: 16, theta: 1e4, scaling: RopeScaling::Default };
    let mut gemma3 = Hyperparameters {
        window_rope: Some(of_windows),
        logit_soft_cap: Some(3.0),
        epsilon: 1e-6,
        ..scaled(Gemma3, RopeScaling::Linear { factor: 2.5 })
    };
    gemma3.attention.windows = (0..7).map(|layer| (layer != 5).then_some(6)).collect();
    let half = GgufRope { width: 8, theta: 1e4, scaling: RopeScaling::Default };
    let growth = (1.0 + 4_f64.ln() / 32_f64.ln()).sqrt();
    let mut models: Vec<_> = Architecture::ALL.map(model).into();
    models.extend([
        biased,
        gemma3,
        scaled(Llama, llama3),
        scaled(Qwen3, yarn),
        scaled(Llama, RopeScaling::Linear { factor: 2.5 }),
        scaled(Phi3, long_rope(growth)),
        scaled(Llama, long_rope(1.25)),
        Hyperparameters { rope: Some(half), ..model(Phi3) },
        windows(Llama, &[Some(5); 2]),
        windows(Phi3, &[Some(5); 2]),
        windows(Qwen2, &[None, Some(6)]),
        windows(Gemma2, &[Some(5), None]),
        windows(Gemma2, &[None, Some(5)]),
        Hyperparameters { is_tied: false, ..model(Qwen2) },
    ]);
    for written in models {
        // Gemma 2 has a window if the file does not say otherwise.
        let has_windows = written.attention.windows.iter().any(Option::is_some);
        let mut metadata = metadata(&written);
        if written.architecture == Gemma2 && !has_windows {
            metadata.push("gemma2.attention.sliding_window", 0_u32).unwrap();
        }
        assert_eq!(read(file(&written, metadata, |_| {})), Ok(written));
    }
}

/// llama.cpp's converter leaves keys out that have a default, and does not write some sizes at all.
#[test]
fn missing_keys_have_the_defaults_of_llama_cpp() {
    for architecture in Architecture::ALL {
        let mut written = model(architecture);
        written.attention.windows = vec![Some(4096), None];
        let mut all = metadata(&written);
        for key in [
            "vocab_size",
            "attention.key_length",
            "attention.value_length",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "rope.dimension_count",
            "rope.freq_base",
        ] {
            all = with(&all, &format!("{architecture}.{key}"), None);
        }
        if architecture != Architecture::Gemma2 {
            written.attention.windows = vec![None; 2];
        }
        assert_eq!(read(file(&written, all, |_| {})), Ok(written));
    }
    // llama.cpp does not read the key for Qwen, and configurations have windows that are not used.
    let written = model(Architecture::Qwen2);
    let all = with(&metadata(&written), "qwen2.attention.sliding_window", Some(Value::U32(8)));
    assert_eq!(read(file(&written, all, |_| {})), Ok(written));
    // A list with a value for each layer.
    let written = model(Architecture::Llama);
    let list = Value::from(vec![4_u32; 2]);
    let all = with(&metadata(&written), "llama.attention.head_count", Some(list));
    assert_eq!(read(file(&written, all, |_| {})), Ok(written));
}

#[test]
fn divisors_that_no_formula_gives_are_used_for_all_lengths() {
    let written = scaled(Architecture::Llama, long_rope(1.0));
    let RopeScaling::LongRope { long_factor, .. } = written.rope.clone().unwrap().scaling else {
        unreachable!()
    };
    let mut all = with(&metadata(&written), "llama.rope.scaling.type", None);
    all = with(&all, "llama.rope.scaling.original_context_length", None);
    let bytes = file(&model(Architecture::Llama), all, |tensors| {
        tensors.push(("rope_freqs.weight".to_owned(), vec![8]));
    });
    // The tensor is the last one.
    let start = bytes.len() - 32;
    let mut changed = bytes;
    for (bytes, value) in changed[start..].chunks_exact_mut(4).zip(&long_factor) {
        bytes.copy_from_slice(&(*value as f32).to_le_bytes());
    }
    let scaling = read(changed).unwrap().rope.unwrap().scaling;
    let expected = RopeScaling::LongRope {
        short_factor: long_factor.clone(),
        long_factor,
        original_len: 128,
        attention_factor: 1.0,
    };
    assert_eq!(scaling, expected);
}

#[test]
fn unsupported_models_are_errors_that_name_the_key() {
    let llama = model(Architecture::Llama);
    for (key, value, expected) in [
        ("general.architecture", Some(Value::from("mamba")), "is `mamba`; supported are gpt2, "),
        ("general.architecture", None, "is missing"),
        ("general.type", Some(Value::from("adapter")), "is `adapter`"),
        ("split.count", Some(Value::U16(2)), "llama-gguf-split --merge"),
        ("llama.expert_count", Some(Value::U32(8)), "is 8; only 0 is supported"),
        ("llama.attention.causal", Some(Value::Bool(false)), "is false"),
        ("llama.pooling_type", Some(Value::U32(3)), "is 3"),
        ("llama.block_count", Some(Value::U32(0)), "is 0"),
        ("llama.block_count", Some(Value::U32(1 << 24)), "is 16777216"),
        ("llama.block_count", Some(Value::U32(3)), "`blk.2.attn_norm.weight`: is missing"),
        ("llama.attention.head_count", Some(Value::U32(0)), "is 0"),
        ("llama.attention.head_count", Some(Value::from(vec![4_u32, 2])), "layers with 4 and 2"),
        ("llama.attention.head_count", Some(Value::from(Vec::<u32>::new())), "list of 0 values"),
        ("llama.attention.head_count_kv", Some(Value::U32(3)), "is 3; must divide 4"),
        ("llama.attention.value_length", Some(Value::U32(32)), "is 32; must be 16"),
        ("llama.attention.layer_norm_rms_epsilon", Some(Value::F32(f32::NAN)), "is NaN"),
        ("llama.attention.layer_norm_rms_epsilon", Some(Value::F32(0.0)), "is 0; must be above"),
        ("llama.attention.layer_norm_rms_epsilon", None, "is missing"),
        ("llama.attention.key_length", Some(Value::I32(-1)), "is -1"),
        ("llama.feed_forward_length", Some(Value::U64(u64::MAX)), "is 18446744073709551615"),
        ("llama.embedding_length", Some(Value::from("64")), "is `64`"),
        ("llama.rope.dimension_count", Some(Value::U32(8)), "is 8; must be"),
        ("llama.rope.scaling.type", Some(Value::from("ntk")), "is `ntk`; supported are none"),
        ("llama.rope.scaling.type", Some(Value::from("longrope")), "without tensors"),
        ("llama.rope.scaling.attn_factor", Some(Value::F32(1.5)), "rope.scaling.attn_factor"),
        (
            "llama.attention.sliding_window_pattern",
            Some(Value::from(vec![true])),
            "is a list of 1 values; must have a value for each of 2 layers",
        ),
    ] {
        let mut all = with(&metadata(&llama), key, value);
        if key.ends_with("pattern") {
            all.push("llama.attention.sliding_window", 5_u32).unwrap();
        }
        let error = read(file(&llama, all, |_| {})).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let gpt2 = model(Architecture::Gpt2);
    let all = with(&metadata(&gpt2), "gpt2.attention.head_count_kv", Some(Value::U32(2)));
    assert!(read(file(&gpt2, all, |_| {})).unwrap_err().contains("must be 4"));
    let gemma2 = model(Architecture::Gemma2);
    let all = with(&metadata(&gemma2), "gemma2.rope.freq_base_swa", Some(Value::F32(2e4)));
    assert!(read(file(&gemma2, all, |_| {})).unwrap_err().contains("is 20000; must be 10000"));
}

#[test]
fn files_have_exactly_the_tensors_of_the_model() {
    let llama = model(Architecture::Llama);
    let error = |change: fn(&mut Vec<(String, Vec<u64>)>)| {
        read(file(&llama, metadata(&llama), change)).unwrap_err()
    };
    for (found, expected) in [
        (
            error(|all| all.push(("blk.0.ffn_gate_inp.weight".to_owned(), vec![8, 64]))),
            "`blk.0.ffn_gate_inp.weight`: is not supported for llama",
        ),
        // Attention has all biases or none.
        (
            error(|all| all.push(("blk.0.attn_q.bias".to_owned(), vec![64]))),
            "`blk.0.attn_output.bias`: is missing; llama needs [64]",
        ),
        (
            error(|all| all.push(("rope_freqs.weight".to_owned(), vec![7]))),
            "`rope_freqs.weight`: is [7]; must be [8]",
        ),
        (
            error(|all| all.push(("rope_freqs.weight".to_owned(), vec![8]))),
            "`rope_freqs.weight`: has a divisor that is not above 0",
        ),
        (
            error(|all| all.push(("rope_factors_long.weight".to_owned(), vec![8]))),
            "`rope_factors_long.weight`: has a divisor",
        ),
        (
            error(|all| all.retain(|(name, _)| name != "token_embd.weight")),
            "`token_embd.weight`: is missing",
        ),
        (
            error(|all| all[0].1 = vec![99, 32]),
            "`token_embd.weight`: is [99, 32]; llama needs [99, 64]",
        ),
    ] {
        assert!(found.contains(expected), "{expected}: {found}");
    }
}

#[test]
fn fields_of_the_configuration_follow_the_architecture() {
    let fields = |model: Hyperparameters| serde_json::Value::Object(model.config_fields());
    let llama = fields(model(Architecture::Llama));
    assert_eq!(
        llama,
        json!({
            "architectures": ["LlamaForCausalLM"], "attention_bias": false, "head_dim": 16,
            "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
            "max_position_embeddings": 128, "mlp_bias": false, "model_type": "llama",
            "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
            "tie_word_embeddings": true, "vocab_size": 99,
        })
    );
    let mut mistral = model(Architecture::Llama);
    mistral.attention.windows = vec![Some(5); 2];
    let mistral = fields(mistral);
    assert_eq!(
        (&mistral["model_type"], &mistral["sliding_window"]),
        (&json!("mistral"), &json!(5))
    );
    assert_eq!(mistral.get("attention_bias"), None);
    let mut qwen = model(Architecture::Qwen2);
    qwen.attention.windows = vec![None, Some(6)];
    let qwen = fields(qwen);
    assert_eq!(qwen["layer_types"], json!(["full_attention", "sliding_attention"]));
    assert_eq!(qwen["use_sliding_window"], json!(true));
    let rope = GgufRope { width: 12, theta: 1e4, scaling: long_rope(1.5) };
    let phi = fields(Hyperparameters { rope: Some(rope), ..model(Architecture::Phi3) });
    assert_eq!(phi["rope_parameters"]["partial_rotary_factor"], json!(0.75));
    assert_eq!(phi["rope_parameters"]["original_max_position_embeddings"], json!(32));
    let gemma = fields(model(Architecture::Gemma3));
    assert_eq!(gemma["rope_parameters"]["sliding_attention"]["rope_type"], json!("default"));
    assert_eq!(gemma["final_logit_softcapping"], json!(null));
}
