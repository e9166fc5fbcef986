//! The types of files, and which tensor gets which type.

use crate::{GgufError, TensorType};

/// The type of a file: the type of its matrices, or a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileType {
    /// Single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// About 8.5 bits per weight.
    Q8_0,
    /// About 4.5 bits per weight.
    Q4_0,
    /// About 4.8 bits per weight: q4_k, and q6_k for the most sensitive tensors.
    Q4KM,
}

impl FileType {
    /// All types.
    pub const ALL: [Self; 6] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0, Self::Q4KM];

    /// Returns the name, the value of `general.file_type`, and the type of matrices without a rule
    /// of their own.
    const fn row(self) -> (&'static str, u32, TensorType) {
        match self {
            Self::F32 => ("f32", 0, TensorType::F32),
            Self::F16 => ("f16", 1, TensorType::F16),
            Self::Bf16 => ("bf16", 32, TensorType::Bf16),
            Self::Q8_0 => ("q8_0", 7, TensorType::Q8_0),
            Self::Q4_0 => ("q4_0", 2, TensorType::Q4_0),
            Self::Q4KM => ("q4_k_m", 15, TensorType::Q4K),
        }
    }

    /// Returns the name on the command line and in file names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.row().0
    }

    /// Returns the type with a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }

    /// Returns the value of `general.file_type` (`llama_ftype` in
    /// <https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h>).
    #[must_use]
    pub const fn id(self) -> u32 {
        self.row().1
    }
}

/// Chooses the types of the tensors of a model.
///
/// The rules are `llama_tensor_get_type` and `tensor_allows_quantization` of
/// <https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp>, for dense models
/// without an importance matrix. For tensors that are not quantized, they are `prepare_tensors` of
/// `convert_hf_to_gguf.py`.
///
/// | Tensor | q8_0 | q4_0 | q4_k_m |
/// |---|---|---|---|
/// | one dimension, norms, positions | f32 | f32 | f32 |
/// | `output`, or `token_embd` if there is no `output` | q8_0 | q6_k | q6_k |
/// | `attn_v`, `attn_qkv`, `ffn_down` in an eighth of the layers at each end, and in every third layer between | q8_0 | q4_0 | q6_k |
/// | others | q8_0 | q4_0 | q4_k |
///
/// Rows that are not a multiple of 256 get q5_0 instead of q4_k and q8_0 instead of q6_k. Rows that
/// are not a multiple of 32 get f16.
#[derive(Debug, Clone)]
pub struct TypeSelector {
    file_type: FileType,
    num_layers: usize,
    has_output: bool,
    shares_values: bool,
}

impl TypeSelector {
    /// Returns the rules for a model with `num_layers` layers. `has_output` says whether the file
    /// has an `output.weight`, so that the embedding is not used as the output too.
    #[must_use]
    pub fn new(file_type: FileType, num_layers: usize, has_output: bool) -> Self {
        Self { file_type, num_layers, has_output, shares_values: false }
    }

    /// Sets that the model is one of 70B parameters, which llama.cpp recognizes by its
    /// architecture, `llama` or `qwen2`, 80 layers and, for `llama`, fewer heads of values than of
    /// queries. Its `attn_v` gets q5_k instead of q4_k in q4_k_m, because eight heads share each
    /// value.
    #[must_use]
    pub fn with_70b(mut self, is_70b: bool) -> Self {
        self.shares_values = is_70b;
        self
    }

    /// Returns the type of a tensor by its name in the file and its shape, the row length last.
    ///
    /// # Errors
    /// Returns an error that names the tensor if its layer is not below `num_layers`.
    pub fn select(&self, name: &str, shape: &[u64]) -> Result<TensorType, GgufError> {
        // Vectors and norms take little memory, and the model is sensitive to their rounding.
        if shape.len() < 2 || !is_matrix(name) {
            return Ok(TensorType::F32);
        }
        let row_len = shape.last().copied().unwrap_or(1);
        let by_rule = self.by_rule(name, row_len)?;
        Ok(fallback(by_rule, row_len))
    }

    /// Returns the type before rows that do not fit are considered.
    fn by_rule(&self, name: &str, row_len: u64) -> Result<TensorType, GgufError> {
        let (_, _, default) = self.file_type.row();
        if !default.is_quantized() {
            return Ok(default);
        }
        if name == "output.weight" || !self.has_output && name == "token_embd.weight" {
            // The output gets more bits than other matrices, unless all of them have 8.
            let keeps = default == TensorType::Q8_0;
            // llama.cpp checks the block length of the file's type here, and not q6_k's.
            let divides = row_len.is_multiple_of(default.block_len() as u64);
            return Ok(if keeps || !divides { TensorType::Q8_0 } else { TensorType::Q6K });
        }
        let is_value = name.contains("attn_v.weight") || name.contains("attn_qkv.weight");
        if self.file_type != FileType::Q4KM || !(is_value || name.contains("ffn_down")) {
            return Ok(default);
        }
        if self.gets_more_bits(self.layer(name)?) {
            return Ok(TensorType::Q6K);
        }
        Ok(if is_value && self.shares_values { TensorType::Q5K } else { default })
    }

    /// Returns whether a layer is more sensitive (`use_more_bits`): the first and last eighth, and
    /// every third layer between.
    fn gets_more_bits(&self, layer: usize) -> bool {
        let eighth = self.num_layers / 8;
        layer < eighth || layer >= 7 * self.num_layers / 8 || (layer - eighth) % 3 == 2
    }

    /// Returns the layer of `blk.N.…`.
    fn layer(&self, name: &str) -> Result<usize, GgufError> {
        let number = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = number.and_then(|(number, _)| number.parse().ok());
        layer.filter(|layer| *layer < self.num_layers).ok_or_else(|| {
            let problem = format!("must be `blk.N.…` with a layer N below {}", self.num_layers);
            GgufError::tensor(name, problem)
        })
    }
}

/// Returns whether a tensor of several dimensions is a matrix of weights, not a norm or a table of
/// positions.
fn is_matrix(name: &str) -> bool {
    name.ends_with("weight") && !name.contains("_norm.weight") && name != "position_embd.weight"
}

/// Returns the type itself, or the type that llama.cpp uses if rows are not whole blocks
/// (`tensor_type_fallback`).
fn fallback(tensor_type: TensorType, row_len: u64) -> TensorType {
    let fits = |it: &TensorType| row_len.is_multiple_of(it.block_len() as u64);
    let smaller = match tensor_type {
        TensorType::Q4K => TensorType::Q5_0,
        TensorType::Q6K => TensorType::Q8_0,
        other => other,
    };
    // Floats have blocks of one element, so they fit any row.
    [tensor_type, smaller].into_iter().find(fits).unwrap_or(TensorType::F16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(file_type: FileType, has_output: bool, name: &str, shape: &[u64]) -> TensorType {
        TypeSelector::new(file_type, 32, has_output).select(name, shape).unwrap()
    }

    #[test]
    fn names_read_back() {
        for file_type in FileType::ALL {
            assert_eq!(FileType::from_name(file_type.name()), Some(file_type));
        }
        assert_eq!(FileType::from_name("q4_k_s"), None);
    }

    #[test]
    fn norms_biases_and_positions_stay_f32() {
        for file_type in FileType::ALL {
            for (name, shape) in [
                ("blk.0.attn_norm.weight", &[256][..]),
                ("blk.0.attn_q.bias", &[256]),
                ("blk.0.some_norm.weight", &[256, 256]),
                ("position_embd.weight", &[1024, 256]),
            ] {
                assert_eq!(select(file_type, true, name, shape), TensorType::F32);
            }
        }
    }

    #[test]
    fn the_output_gets_six_bits() {
        let output = |file_type, has_output, name| select(file_type, has_output, name, &[99, 256]);
        for file_type in [FileType::Q4_0, FileType::Q4KM] {
            assert_eq!(output(file_type, true, "output.weight"), TensorType::Q6K);
            assert_eq!(output(file_type, false, "token_embd.weight"), TensorType::Q6K);
            let embedding = output(file_type, true, "token_embd.weight");
            assert_eq!(embedding, file_type.row().2);
        }
        assert_eq!(output(FileType::Q8_0, false, "token_embd.weight"), TensorType::Q8_0);
        assert_eq!(output(FileType::F16, false, "token_embd.weight"), TensorType::F16);
    }

    #[test]
    fn the_mixture_gives_some_layers_more_bits() {
        // As `use_more_bits` of llama.cpp selects them: an eighth at both ends, and every third
        // between.
        let expected = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31];
        for name in ["attn_v", "ffn_down", "attn_qkv"] {
            let is_q6_k = |layer: &usize| {
                let name = format!("blk.{layer}.{name}.weight");
                select(FileType::Q4KM, true, &name, &[256, 256]) == TensorType::Q6K
            };
            assert_eq!((0..32).filter(is_q6_k).collect::<Vec<_>>(), expected, "{name}");
        }
        let value = |is_70b| {
            let rules = TypeSelector::new(FileType::Q4KM, 80, true).with_70b(is_70b);
            rules.select("blk.10.attn_v.weight", &[1024, 8192]).unwrap()
        };
        assert_eq!((value(false), value(true)), (TensorType::Q4K, TensorType::Q5K));
        assert_eq!(select(FileType::Q4KM, true, "blk.0.attn_k.weight", &[1, 256]), TensorType::Q4K);
    }

    #[test]
    fn rows_that_do_not_fit_fall_back() {
        let select = |file_type, name, row_len| select(file_type, true, name, &[8, row_len]);
        assert_eq!(select(FileType::Q4KM, "blk.9.attn_q.weight", 288), TensorType::Q5_0);
        assert_eq!(select(FileType::Q4KM, "blk.0.ffn_down.weight", 288), TensorType::Q8_0);
        assert_eq!(select(FileType::Q4KM, "blk.9.attn_q.weight", 100), TensorType::F16);
        assert_eq!(select(FileType::Q4_0, "output.weight", 288), TensorType::Q8_0);
        assert_eq!(select(FileType::Q8_0, "blk.9.attn_q.weight", 100), TensorType::F16);
        assert_eq!(select(FileType::Q4KM, "output.weight", 100), TensorType::F16);
    }

    #[test]
    fn layers_are_checked() {
        let rules = TypeSelector::new(FileType::Q4KM, 4, true);
        for name in ["blk.4.attn_v.weight", "blk.x.ffn_down.weight", "ffn_down.weight"] {
            let error = rules.select(name, &[256, 256]).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
