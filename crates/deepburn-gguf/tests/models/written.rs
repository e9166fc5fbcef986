//! Hyperparameters, names and layouts of models.

use deepburn_gguf::{Architecture, GgufRope, Hyperparameters, RopeScaling, TensorLayout, Value};

use crate::model_file::{metadata, model};

fn error(model: &Hyperparameters) -> String {
    model.check().unwrap_err().to_string()
}

#[test]
fn each_architecture_has_its_keys() {
    for architecture in Architecture::ALL {
        let metadata = metadata(&model(architecture));
        let number = |key: &str| metadata.get(&format!("{architecture}.{key}"))?.as_u64();
        assert_eq!(metadata.get("general.file_type"), Some(&Value::U32(1)));
        assert_eq!(number("block_count"), Some(2));
        assert_eq!(number("embedding_length"), Some(64));
        let is_gpt2 = architecture == Architecture::Gpt2;
        assert_eq!(number("rope.dimension_count").is_none(), is_gpt2);
        let epsilon = metadata.get("gpt2.attention.layer_norm_epsilon");
        assert_eq!(epsilon.is_some(), is_gpt2);
        // phi3 without the key would be Phi 3, which has a window.
        let window = number("attention.sliding_window");
        assert_eq!(window, (architecture == Architecture::Phi3).then_some(0));
    }
}

#[test]
fn names_and_layouts_follow_the_architecture() {
    let stored = |architecture, name: &str| {
        let stored = model(architecture).stored_tensor(name)?;
        Some((stored.name, stored.layout))
    };
    let (same, plus_one) = (TensorLayout::Same, TensorLayout::PlusOne);
    for (architecture, name, expected, layout) in [
        (
            Architecture::Gpt2,
            "transformer.h.1.attn.c_attn.weight",
            "blk.1.attn_qkv.weight",
            TensorLayout::Transposed,
        ),
        (Architecture::Gpt2, "h.1.attn.c_attn.bias", "blk.1.attn_qkv.bias", same),
        (Architecture::Gpt2, "wpe.weight", "position_embd.weight", same),
        (Architecture::Llama, "model.embed_tokens.weight", "token_embd.weight", same),
        (
            Architecture::Llama,
            "model.layers.0.self_attn.q_proj.weight",
            "blk.0.attn_q.weight",
            TensorLayout::Interleaved { heads: 4 },
        ),
        (
            Architecture::Llama,
            "model.layers.0.self_attn.k_proj.bias",
            "blk.0.attn_k.bias",
            TensorLayout::Interleaved { heads: 2 },
        ),
        (
            Architecture::Llama,
            "model.layers.0.post_attention_layernorm.weight",
            "blk.0.ffn_norm.weight",
            same,
        ),
        (
            Architecture::Qwen2,
            "model.layers.0.self_attn.q_proj.weight",
            "blk.0.attn_q.weight",
            same,
        ),
        (Architecture::Phi3, "model.layers.0.mlp.gate_up_proj.weight", "blk.0.ffn_up.weight", same),
        (
            Architecture::Gemma3,
            "model.layers.0.self_attn.q_norm.weight",
            "blk.0.attn_q_norm.weight",
            plus_one,
        ),
        (
            Architecture::Gemma2,
            "model.layers.1.post_attention_layernorm.weight",
            "blk.1.post_attention_norm.weight",
            plus_one,
        ),
        (Architecture::Gemma2, "model.norm.weight", "output_norm.weight", plus_one),
        (Architecture::Gemma2, "lm_head.weight", "output.weight", same),
    ] {
        assert_eq!(stored(architecture, name), Some((expected.to_owned(), layout)), "{name}");
    }
    for name in [
        "h.2.ln_1.weight",
        "h.0.attn.masked_bias",
        "h.0.attn.bias_k.weight",
        "score.weight",
        "weight",
    ] {
        assert_eq!(stored(Architecture::Gpt2, name), None, "{name}");
    }
}

#[test]
fn models_that_llama_cpp_computes_in_another_way_are_errors() {
    let change = |architecture, change: fn(&mut Hyperparameters)| {
        let mut model = model(architecture);
        change(&mut model);
        error(&model)
    };
    let scaled = |architecture, scaling: RopeScaling| {
        let mut model = model(architecture);
        model.rope = Some(GgufRope { width: 16, theta: 1e4, scaling });
        error(&model)
    };
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_len: 32,
        beta_fast: 16.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: 1.0,
    };
    for (text, expected) in [
        (
            change(Architecture::Gpt2, |it| it.feed_forward.activation = "gelu".to_owned()),
            "`hidden_act`",
        ),
        (change(Architecture::Qwen3, |it| it.attention.has_output_bias = true), "`attention_bias`"),
        (
            change(Architecture::Gemma2, |it| it.attention.soft_cap = None),
            "`attn_logit_softcapping`",
        ),
        (
            change(Architecture::Gemma3, |it| it.attention.soft_cap = Some(50.0)),
            "`attn_logit_softcapping`",
        ),
        (
            change(Architecture::Gemma2, |it| it.attention.query_scalar = 0.0),
            "`query_pre_attn_scalar`",
        ),
        (
            change(Architecture::Qwen3, |it| it.attention.query_scalar = 24.0),
            "`query_pre_attn_scalar`",
        ),
        (change(Architecture::Gemma2, |it| it.is_tied = false), "`tie_word_embeddings`"),
        (change(Architecture::Qwen2, |it| it.attention.head_width = 32), "`head_dim`"),
        (change(Architecture::Qwen2, |it| it.rope = None), "`rope_parameters`"),
        (scaled(Architecture::Llama, RopeScaling::Dynamic), "dynamic"),
        (scaled(Architecture::Llama, yarn), "yarn"),
        (scaled(Architecture::Gemma3, RopeScaling::Dynamic), "default or linear"),
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn divisors_of_llama_3_follow_its_formula() {
    let mut model = model(Architecture::Llama);
    model.rope = Some(GgufRope {
        width: 16,
        theta: 500_000.0,
        scaling: RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_len: 8192,
        },
    });
    let extra = model.extra_tensors();
    let [(name, divisors)] = extra.as_slice() else { panic!("{extra:?}") };
    assert_eq!((*name, divisors.len()), ("rope_freqs.weight", 8));
    // Short wavelengths are kept, long ones divided; the wavelength of pair 4 is 4443, between
    // both.
    assert_eq!(divisors[..4], [1.0; 4]);
    let smooth: f64 = (8192.0 / (std::f64::consts::TAU * 500_000_f64.sqrt()) - 1.0) / 3.0;
    assert!((f64::from(divisors[4]) - 1.0 / ((1.0 - smooth) / 8.0 + smooth)).abs() < 1e-6);
    assert_eq!(divisors[5..], [8.0; 3]);
}

#[test]
fn windows_of_gemma_have_a_pattern_if_they_are_unusual() {
    let mut model = model(Architecture::Gemma2);
    model.attention.windows = vec![Some(32), None];
    assert!(metadata(&model).get("gemma2.attention.sliding_window_pattern").is_none());
    model.attention.windows = vec![None, Some(32)];
    let pattern = metadata(&model).get("gemma2.attention.sliding_window_pattern").cloned();
    assert_eq!(pattern, Some(Value::from(vec![false, true])));
    assert!(model.notes().is_empty());
    // Others have a pattern in any case, because llama.cpp gives them no windows.
    model.architecture = Architecture::Llama;
    (model.attention.soft_cap, model.logit_soft_cap) = (None, None);
    model.feed_forward.activation = "silu".to_owned();
    assert!(model.notes()[0].contains("32 tokens"));
    let pattern = metadata(&model).get("llama.attention.sliding_window_pattern").cloned();
    assert_eq!(pattern, Some(Value::from(vec![false, true])));
    model.attention.windows = vec![Some(32); 2];
    assert_eq!(metadata(&model).get("llama.attention.sliding_window"), Some(&Value::U32(32)));
    let pattern = metadata(&model).get("llama.attention.sliding_window_pattern").cloned();
    assert_eq!(pattern, Some(Value::from(vec![true; 2])));
}

#[test]
fn tensors_are_converted_whole() {
    let model = model(Architecture::Llama);
    let stored = model.stored_tensor("layers.0.self_attn.k_proj.weight").unwrap();
    let mut values: Vec<f32> = (0..32 * 64).map(|i| (i / 64) as f32).collect();
    stored.convert(&mut values, &[32, 64]).unwrap();
    assert_eq!(stored.shape(&[32, 64]), [32, 64]);
    let rows: Vec<_> = values.chunks(64).map(|row| row[0]).collect();
    assert_eq!(rows[..6], [0.0, 8.0, 1.0, 9.0, 2.0, 10.0]);
    let text = stored.convert(&mut values, &[31, 64]).unwrap_err().to_string();
    assert!(text.contains("blk.0.attn_k.weight"), "{text}");
}

#[test]
fn queries_of_gemma_make_up_for_another_scale() {
    for (architecture, name, others, expected) in [
        (Architecture::Gemma2, "self_attn.q_proj", "self_attn.k_proj", 1.0),
        // 1 is added to the weights of norms first.
        (Architecture::Gemma3, "self_attn.q_norm", "self_attn.q_proj", 1.5),
    ] {
        let mut model = model(architecture);
        model.attention.query_scalar = 64.0;
        model.check().unwrap();
        let converted = |path: &str, shape: &[u64]| {
            let stored = model.stored_tensor(&format!("layers.1.{path}.weight")).unwrap();
            let mut values = vec![2.0; shape.iter().product::<u64>() as usize];
            stored.convert(&mut values, shape).unwrap();
            values
        };
        // The root of 16 / 64.
        assert_eq!(converted(name, &[32]), [expected; 32]);
        assert_eq!(converted(others, &[32]), [2.0; 32]);
    }
}
