//! Documents in one sequence are trained as if each were a sequence of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_flex::Flex;
use deepburn_models::SavedConfig;
use deepburn_models::causal_lm::{CausalBatch, IGNORED_LABEL, LanguageModel};
use deepburn_models::decoder::{Decoder, DecoderConfig};
use deepburn_models::families::{
    Gemma2Config, Gemma3Config, LlamaConfig, MistralConfig, Phi3Config, Qwen3Config,
};
use deepburn_models::gpt2::Gpt2Config;
use deepburn_zero::Training;
use serde_json::{Value, json};

type B = Training<Flex>;

const VOCAB: usize = 37;
/// The lengths of the documents of each sequence. One is longer than the windows below, and one is
/// a single token.
const DOCUMENTS: [&[usize]; 2] = [&[13, 1, 5], &[4, 15]];
/// Of an element of a gradient, relative to the largest element of the parameter. The sums over
/// positions have another order; the largest difference that was seen is 4e-7.
const GRADIENT: f64 = 1e-6;
/// Of the sum of the losses, relative.
const LOSS: f64 = 1e-6;

/// The gradients of all parameters, by path.
struct ParameterGradients<'a> {
    of: &'a <B as AutodiffBackend>::Gradients,
    path: Vec<String>,
    found: BTreeMap<String, Vec<f64>>,
}

impl ModuleVisitor<B> for ParameterGradients<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = param.val().grad(self.of).unwrap();
        let values: Vec<f32> = gradient.into_data().to_vec().unwrap();
        self.found.insert(self.path.join("."), values.into_iter().map(f64::from).collect());
    }
}

/// Returns the summed loss of a batch, and the gradients.
fn train(model: &Decoder<B>, batch: &CausalBatch<B>) -> (f64, BTreeMap<String, Vec<f64>>) {
    let loss = model.loss(batch).sum;
    let value = f64::from(loss.clone().into_scalar());
    let of = loss.backward();
    let mut gradients = ParameterGradients { of: &of, path: Vec::new(), found: BTreeMap::new() };
    model.visit(&mut gradients);
    (value, gradients.found)
}

/// Returns a token at each position. The first label of each document is ignored, and some others.
fn tokens(length: usize, first: usize) -> (Vec<u32>, Vec<i64>) {
    let ids: Vec<u32> =
        (first..first + length).map(|it| ((it * it * 7 + it) % VOCAB) as u32).collect();
    let label = |(at, id): (usize, &u32)| if at % 4 == 0 { IGNORED_LABEL } else { i64::from(*id) };
    let labels = ids.iter().enumerate().map(label).collect();
    (ids, labels)
}

fn check<C: DecoderConfig>(fields: Value) {
    let config = C::from_fields(fields.as_object().unwrap().clone()).unwrap();
    let device = Default::default();
    let model: Decoder<B> = Decoder::new(&config, 5, &device).unwrap();
    let (mut ids, mut labels, mut starts) = (Vec::new(), Vec::new(), Vec::new());
    let mut alone: (f64, BTreeMap<String, Vec<f64>>) = Default::default();
    for sequence in DOCUMENTS {
        let mut start = 0;
        for length in sequence {
            let (own_ids, own_labels) = tokens(*length, ids.len());
            let batch =
                CausalBatch::new(&config, &own_ids, Some(&own_labels), [1, *length], &device);
            let (loss, gradients) = train(&model, &batch.unwrap());
            alone.0 += loss;
            for (path, values) in gradients {
                let sum = alone.1.entry(path).or_insert_with(|| vec![0.0; values.len()]);
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            ids.extend(own_ids);
            labels.extend(own_labels);
            starts.extend(vec![start; *length]);
            start += length;
        }
    }
    let (rows, starts) = (DOCUMENTS.len(), Arc::from(starts));
    let shape = [rows, ids.len() / rows];
    let batch =
        CausalBatch::of_documents(&config, &ids, Some(&labels), starts, shape, &device).unwrap();
    let (loss, gradients) = train(&model, &batch);
    assert!((loss - alone.0).abs() < LOSS * loss, "{}: {loss} and {}", C::NAME, alone.0);
    assert_eq!(gradients.len(), alone.1.len());
    for (path, values) in &gradients {
        let expected = &alone.1[path];
        let largest = expected.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
        let difference = values.iter().zip(expected).map(|(own, other)| (own - other).abs());
        let difference = difference.fold(0.0, f64::max);
        assert!(difference <= GRADIENT * largest, "{} {path}: {difference} of {largest}", C::NAME);
    }
}

/// Returns the fields of a model of the families like Llama.
fn like_llama(own: Value) -> Value {
    let mut fields = json!({
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 15,
        "initializer_range": 0.2, "tie_word_embeddings": true,
    });
    fields.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    fields
}

#[test]
fn documents_are_trained_as_if_alone() {
    // Learned positions start over too. All models are shorter than a sequence, but not than a
    // document.
    check::<Gpt2Config>(json!({
        "vocab_size": VOCAB, "n_positions": 15, "n_embd": 24, "n_layer": 2, "n_head": 3,
        "initializer_range": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 0, "eos_token_id": 0,
    }));
    check::<LlamaConfig>(like_llama(json!({})));
    check::<MistralConfig>(like_llama(json!({"sliding_window": 7})));
    check::<Qwen3Config>(like_llama(json!({"head_dim": 8})));
    let capped = json!({
        "sliding_window": 6, "head_dim": 4, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    });
    check::<Gemma2Config>(like_llama(capped));
    let local = json!({
        "sliding_window": 6, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window_pattern": 2,
    });
    check::<Gemma3Config>(like_llama(local));
    let scaling =
        json!({"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0]});
    let own = json!({"rope_scaling": scaling, "original_max_position_embeddings": 15});
    check::<Phi3Config>(like_llama(own));
}
