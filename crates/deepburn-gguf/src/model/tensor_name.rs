//! The names of tensors.

use super::{Architecture, Hyperparameters, TensorLayout};
use crate::GgufError;

/// The name and the layout of a parameter in a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTensor {
    /// The name.
    pub name: String,
    /// The layout.
    pub layout: TensorLayout,
    /// The factor of all values, after the layout has been changed.
    pub factor: f64,
}

impl GgufTensor {
    /// Returns the shape in the file of a tensor with `shape` in the Hugging Face file.
    #[must_use]
    pub fn shape(&self, shape: &[u64]) -> Vec<u64> {
        self.layout.shape(shape)
    }

    /// Converts the values of a whole tensor, in row-major order, with `shape` in the Hugging Face
    /// file.
    ///
    /// A transposition needs a second tensor in memory, an interleaving a head.
    ///
    /// # Errors
    /// Returns an error that names the tensor if the values do not have the shape, or if the rows
    /// are not whole heads with even widths. The values are then unchanged.
    pub fn convert(&self, values: &mut Vec<f32>, shape: &[u64]) -> Result<(), GgufError> {
        // Shapes come from files, so their product may overflow.
        let numel = shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
        let rows = shape.first().and_then(|rows| usize::try_from(*rows).ok());
        let is_whole = numel == Some(values.len() as u64);
        let converted = rows.filter(|_| is_whole).and_then(|rows| self.layout.apply(values, rows));
        converted.ok_or_else(|| {
            self.misfit(values.len(), &format!("shape {shape:?} (pass the whole tensor)"))
        })?;
        if self.factor != 1.0 {
            // In f64, so that the product is rounded once.
            let scale = |value: &mut f32| *value = (f64::from(*value) * self.factor) as f32;
            values.iter_mut().for_each(scale);
        }
        Ok(())
    }

    /// Converts the values of a whole tensor of a GGUF file back to the layout of the Hugging Face
    /// file, in which it has `shape`.
    ///
    /// # Errors
    /// Returns an error that names the tensor if the values do not have the shape, or if the rows
    /// are not whole heads with even widths.
    pub fn restore(&self, values: &mut Vec<f32>, shape: &[u64]) -> Result<(), GgufError> {
        let rows = shape.first().and_then(|rows| usize::try_from(*rows).ok()).unwrap_or(0);
        let restored = self.layout.undo(values, rows);
        restored.ok_or_else(|| self.misfit(values.len(), &format!("shape {shape:?}")))?;
        if self.factor != 1.0 {
            let scale = |value: &mut f32| *value = (f64::from(*value) / self.factor) as f32;
            values.iter_mut().for_each(scale);
        }
        Ok(())
    }

    /// Moves the encoded rows of a whole tensor of a GGUF file back to the order of the Hugging
    /// Face file.
    ///
    /// # Errors
    /// Returns an error that names the tensor if `bytes` are not `rows` rows, or if these are not
    /// whole heads with even widths.
    pub fn restore_rows(&self, bytes: &mut [u8], rows: usize) -> Result<(), GgufError> {
        let restored = self.layout.undo_rows(bytes, rows);
        restored.ok_or_else(|| self.misfit(bytes.len(), &format!("{rows} rows")))
    }

    /// Returns the error about a tensor that does not fit its layout.
    fn misfit(&self, count: usize, shape: &str) -> GgufError {
        let problem =
            format!("{count} elements with {shape} cannot be converted ({:?})", self.layout);
        GgufError::tensor(&self.name, problem)
    }
}

/// Names outside of layers: in the Hugging Face file, without its prefix, and in the GGUF file.
const OUTER: [(&str, &str); 6] = [
    ("embed_tokens", "token_embd"),
    ("norm", "output_norm"),
    ("lm_head", "output"),
    ("wte", "token_embd"),
    ("wpe", "position_embd"),
    ("ln_f", "output_norm"),
];

/// Names in layers that all architectures share.
const INNER: [(&str, &str); 18] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
];

impl Hyperparameters {
    /// Returns the name and the layout of a parameter by its name in the Hugging Face file, with or
    /// without the prefix `model.` or `transformer.`. Returns `None` for a tensor that a GGUF file
    /// does not have.
    #[must_use]
    pub fn stored_tensor(&self, name: &str) -> Option<GgufTensor> {
        let name =
            name.strip_prefix("model.").or(name.strip_prefix("transformer.")).unwrap_or(name);
        let (path, kind) = name.rsplit_once('.')?;
        // Buffers, such as the causal mask of GPT-2, are not parameters.
        if kind != "weight" && kind != "bias" {
            return None;
        }
        let stored = match path.strip_prefix("layers.").or(path.strip_prefix("h.")) {
            Some(rest) => {
                let (layer, path) = rest.split_once('.')?;
                let layer: usize = layer.parse().ok().filter(|it| *it < self.num_layers())?;
                format!("blk.{layer}.{}", self.inner_name(path)?)
            }
            None => find(&OUTER, path)?.to_owned(),
        };
        // Gemma 3 has a norm of queries, which its projection does not pass.
        let makes_queries = match self.architecture {
            Architecture::Gemma3 => path.ends_with("self_attn.q_norm"),
            _ => path.ends_with("self_attn.q_proj"),
        };
        Some(GgufTensor {
            name: format!("{stored}.{kind}"),
            layout: self.layout(path, kind),
            factor: if makes_queries { self.query_factor() } else { 1.0 },
        })
    }

    /// Returns the name in a layer.
    fn inner_name(&self, path: &str) -> Option<&'static str> {
        let is_gemma = self.architecture.is_gemma();
        match path {
            // Llama's second norm is before the feed-forward network, in spite of its name.
            "post_attention_layernorm" if !is_gemma => Some("ffn_norm"),
            "post_attention_layernorm" => Some("post_attention_norm"),
            "pre_feedforward_layernorm" if is_gemma => Some("ffn_norm"),
            "post_feedforward_layernorm" if is_gemma => Some("post_ffw_norm"),
            _ => find(&INNER, path),
        }
    }

    /// Returns the layout of a parameter.
    fn layout(&self, path: &str, kind: &str) -> TensorLayout {
        let is = |end: &str| path.ends_with(end);
        if self.architecture == Architecture::Gpt2 {
            let is_conv1d = is("c_attn") || is("c_proj") || is("c_fc");
            return match is_conv1d && kind == "weight" {
                true => TensorLayout::Transposed,
                false => TensorLayout::Same,
            };
        }
        if self.architecture.is_gemma() && is("norm") {
            return TensorLayout::PlusOne;
        }
        match (is("q_proj"), is("k_proj")) {
            (false, false) => TensorLayout::Same,
            (_, is_key) => self.heads_layout(is_key),
        }
    }
}

/// Returns the second name of a pair.
fn find(pairs: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    pairs.iter().find(|(first, _)| *first == name).map(|(_, second)| *second)
}
