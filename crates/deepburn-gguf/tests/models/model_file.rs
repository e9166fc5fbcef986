//! Files of small models with all tensors, whose values are 0.

use deepburn_gguf::{
    Architecture, FileType, GgufAttention, GgufFeedForward, GgufHeader, GgufRope, Hyperparameters,
    Metadata, RopeScaling, TensorType,
};

/// Returns a model of an architecture with two layers.
pub(crate) fn model(architecture: Architecture) -> Hyperparameters {
    let is_gpt2 = architecture == Architecture::Gpt2;
    let is_gemma = architecture.is_gemma();
    let rope = GgufRope { width: 16, theta: 1e4, scaling: RopeScaling::Default };
    Hyperparameters {
        architecture,
        vocab_size: 99,
        context_length: 128,
        width: 64,
        epsilon: 1e-5,
        is_tied: true,
        logit_soft_cap: (architecture == Architecture::Gemma2).then_some(30.0),
        attention: GgufAttention {
            heads: 4,
            key_value_heads: if is_gpt2 { 4 } else { 2 },
            head_width: 16,
            has_output_bias: is_gpt2,
            query_scalar: 16.0,
            soft_cap: (architecture == Architecture::Gemma2).then_some(50.0),
            windows: vec![None; 2],
        },
        feed_forward: GgufFeedForward {
            width: 96,
            activation: match architecture {
                Architecture::Gpt2 => "gelu_new".to_owned(),
                _ if is_gemma => "gelu_pytorch_tanh".to_owned(),
                _ => "silu".to_owned(),
            },
            has_bias: is_gpt2,
        },
        rope: (!is_gpt2).then_some(rope),
        window_rope: None,
    }
}

/// Returns the parameters of a model in a Hugging Face file.
fn parameters(model: &Hyperparameters) -> Vec<(String, Vec<usize>)> {
    let (width, inner) = (model.width, model.feed_forward.width);
    let queries = model.attention.heads * model.attention.head_width;
    let keys = model.attention.key_value_heads * model.attention.head_width;
    let is_llama = model.architecture == Architecture::Llama;
    let has_input_biases =
        model.architecture == Architecture::Qwen2 || is_llama && model.attention.has_output_bias;
    let mut all = Vec::new();
    let mut push = |name: String, shape: &[usize], bias: Option<usize>| {
        all.push((format!("{name}.weight"), shape.to_vec()));
        all.extend(bias.map(|rows| (format!("{name}.bias"), vec![rows])));
    };
    if model.architecture == Architecture::Gpt2 {
        push("wte".to_owned(), &[model.vocab_size, width], None);
        push("wpe".to_owned(), &[model.context_length, width], None);
        for layer in 0..model.num_layers() {
            let name = |name: &str| format!("h.{layer}.{name}");
            push(name("ln_1"), &[width], Some(width));
            push(name("attn.c_attn"), &[width, 3 * width], Some(3 * width));
            push(name("attn.c_proj"), &[width, width], Some(width));
            push(name("ln_2"), &[width], Some(width));
            push(name("mlp.c_fc"), &[width, inner], Some(inner));
            push(name("mlp.c_proj"), &[inner, width], Some(width));
        }
        push("ln_f".to_owned(), &[width], Some(width));
        return all;
    }
    push("model.embed_tokens".to_owned(), &[model.vocab_size, width], None);
    for layer in 0..model.num_layers() {
        let name = |name: &str| format!("model.layers.{layer}.{name}");
        let mut norms = vec!["input_layernorm", "post_attention_layernorm"];
        if model.architecture.is_gemma() {
            norms.extend(["pre_feedforward_layernorm", "post_feedforward_layernorm"]);
        }
        for norm in norms {
            push(name(norm), &[width], None);
        }
        if matches!(model.architecture, Architecture::Qwen3 | Architecture::Gemma3) {
            push(name("self_attn.q_norm"), &[model.attention.head_width], None);
            push(name("self_attn.k_norm"), &[model.attention.head_width], None);
        }
        let bias = |rows: usize, has: bool| has.then_some(rows);
        let attention = |part: &str| name(&format!("self_attn.{part}_proj"));
        let mlp = |part: &str| name(&format!("mlp.{part}_proj"));
        if model.architecture == Architecture::Phi3 {
            push(attention("qkv"), &[queries + 2 * keys, width], None);
            push(mlp("gate_up"), &[2 * inner, width], None);
        } else {
            for (part, rows) in [("q", queries), ("k", keys), ("v", keys)] {
                push(attention(part), &[rows, width], bias(rows, has_input_biases));
            }
            for part in ["gate", "up"] {
                push(mlp(part), &[inner, width], bias(inner, model.feed_forward.has_bias));
            }
        }
        push(attention("o"), &[width, queries], bias(width, model.attention.has_output_bias));
        push(mlp("down"), &[width, inner], bias(width, model.feed_forward.has_bias));
    }
    push("model.norm".to_owned(), &[width], None);
    if !model.is_tied {
        push("lm_head".to_owned(), &[model.vocab_size, width], None);
    }
    all
}

/// Returns the metadata of a model.
pub(crate) fn metadata(model: &Hyperparameters) -> Metadata {
    let mut metadata = Metadata::new();
    model.push_metadata("a model", FileType::F16, &mut metadata).unwrap();
    metadata
}

/// Returns the file of a model with this metadata. `change` changes the list of tensors, in the
/// shapes of the file.
pub(crate) fn file(
    model: &Hyperparameters,
    metadata: Metadata,
    change: impl FnOnce(&mut Vec<(String, Vec<u64>)>),
) -> Vec<u8> {
    let parameters = parameters(model).into_iter().map(|(name, shape)| {
        let stored = model.stored_tensor(&name).unwrap();
        let shape: Vec<u64> = shape.iter().map(|size| *size as u64).collect();
        (stored.name.clone(), stored.shape(&shape))
    });
    let extra = model.extra_tensors();
    let mut tensors: Vec<_> = parameters.collect();
    change(&mut tensors);
    let mut header = GgufHeader::new(metadata).unwrap();
    for (name, shape) in tensors {
        header.push(name, TensorType::F32, &shape).unwrap();
    }
    for (name, values) in &extra {
        header.push(*name, TensorType::F32, &[values.len() as u64]).unwrap();
    }
    let mut bytes = header.to_bytes();
    let start = bytes.len();
    bytes.resize(start + header.data_len() as usize, 0);
    for (name, values) in extra {
        let at = start + header.tensor(name).unwrap().offset() as usize;
        for (bytes, value) in bytes[at..].chunks_exact_mut(4).zip(values) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}
