//! The tensors that a model has in a file, with their shapes.

use std::collections::HashSet;

use super::model_keys::REMEDY;
use super::{Architecture, Hyperparameters};
use crate::{GgufError, GgufHeader, TensorInfo};

impl Hyperparameters {
    /// Checks that a file has exactly the tensors of the model. `has_input_biases` is whether
    /// queries, keys and values have biases.
    ///
    /// # Errors
    /// Returns an error that names the first tensor that is missing, that has another shape, or
    /// that the model does not have. Such a tensor would change what the model computes.
    pub(super) fn check_tensors(
        &self,
        header: &GgufHeader,
        has_input_biases: bool,
    ) -> Result<(), GgufError> {
        let outer = self.outer_tensors();
        let layers = (0..self.num_layers()).flat_map(|it| self.layer_tensors(it, has_input_biases));
        let mut known = HashSet::new();
        for (name, shape) in outer.into_iter().chain(layers) {
            let found = header.tensor(&name).map(TensorInfo::shape);
            if found != Some(&shape) {
                let found = found.map_or_else(|| "missing".to_owned(), |it| format!("{it:?}"));
                let problem = format!("is {found}; {} needs {shape:?}", self.architecture);
                return Err(GgufError::tensor(&name, problem));
            }
            known.insert(name);
        }
        // Their shapes are checked where they are read.
        let optional = self.frequency_tensors();
        let is_known = |name: &str| known.contains(name) || optional.contains(&name);
        match header.tensors().iter().find(|tensor| !is_known(tensor.name())) {
            None => Ok(()),
            Some(tensor) => {
                let problem = format!("is not supported for {}; {REMEDY}", self.architecture);
                Err(GgufError::tensor(tensor.name(), problem))
            }
        }
    }

    /// Returns the names of the tensors of divisors that llama.cpp reads.
    fn frequency_tensors(&self) -> &'static [&'static str] {
        match self.architecture {
            Architecture::Llama => {
                &["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"]
            }
            Architecture::Phi3 => &["rope_factors_long.weight", "rope_factors_short.weight"],
            _ => &[],
        }
    }

    /// Returns the names and shapes of the tensors outside of layers, without divisors of
    /// frequencies.
    fn outer_tensors(&self) -> Vec<(String, Vec<u64>)> {
        let is_gpt2 = self.architecture == Architecture::Gpt2;
        let [vocab, length, width] =
            [self.vocab_size, self.context_length, self.width].map(|size| size as u64);
        let all = [
            ("token_embd.weight", vec![vocab, width], true),
            ("position_embd.weight", vec![length, width], is_gpt2),
            ("output_norm.weight", vec![width], true),
            ("output_norm.bias", vec![width], is_gpt2),
            ("output.weight", vec![vocab, width], !self.is_tied),
        ];
        let existing = all.into_iter().filter(|(_, _, exists)| *exists);
        existing.map(|(name, shape, _)| (name.to_owned(), shape)).collect()
    }

    /// Returns the names and shapes of the tensors of a layer.
    fn layer_tensors(&self, layer: usize, has_input_biases: bool) -> Vec<(String, Vec<u64>)> {
        let has_norm_biases = self.architecture == Architecture::Gpt2;
        let mut all = Vec::new();
        let mut push = |name: &str, shape: Vec<u64>, has_bias: bool| {
            if has_bias {
                let rows = shape.first().copied().into_iter().collect();
                all.push((format!("blk.{layer}.{name}.bias"), rows));
            }
            all.push((format!("blk.{layer}.{name}.weight"), shape));
        };
        for (norm, width) in self.norms() {
            push(norm, vec![width], has_norm_biases);
        }
        for (projection, shape) in self.projections() {
            let has_bias = match projection {
                "attn_output" => self.attention.has_output_bias,
                _ if projection.starts_with("attn") => has_input_biases,
                _ => self.feed_forward.has_bias,
            };
            push(projection, shape.to_vec(), has_bias);
        }
        all
    }

    /// Returns the norms of a layer and their widths.
    fn norms(&self) -> Vec<(&'static str, u64)> {
        let (width, head) = (self.width as u64, self.attention.head_width as u64);
        let mut norms = vec![("attn_norm", width), ("ffn_norm", width)];
        if matches!(self.architecture, Architecture::Qwen3 | Architecture::Gemma3) {
            norms.extend([("attn_q_norm", head), ("attn_k_norm", head)]);
        }
        if self.architecture.is_gemma() {
            norms.extend([("post_attention_norm", width), ("post_ffw_norm", width)]);
        }
        norms
    }

    /// Returns the projections of a layer, with rows and row length.
    fn projections(&self) -> Vec<(&'static str, [u64; 2])> {
        let (width, inner) = (self.width as u64, self.feed_forward.width as u64);
        let queries = (self.attention.heads * self.attention.head_width) as u64;
        let keys = (self.attention.key_value_heads * self.attention.head_width) as u64;
        let has_gate = self.architecture != Architecture::Gpt2;
        let mut all = vec![("attn_output", [width, queries]), ("ffn_down", [width, inner])];
        if matches!(self.architecture, Architecture::Gpt2 | Architecture::Phi3) {
            // Phi 3 has the gate and the values in one matrix.
            let rows = if has_gate { 2 * inner } else { inner };
            all.extend([("attn_qkv", [queries + 2 * keys, width]), ("ffn_up", [rows, width])]);
        } else {
            all.extend([("attn_q", [queries, width]), ("attn_k", [keys, width])]);
            all.extend([("attn_v", [keys, width]), ("ffn_gate", [inner, width])]);
            all.push(("ffn_up", [inner, width]));
        }
        all
    }
}
