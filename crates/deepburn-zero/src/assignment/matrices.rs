//! Detects matrices of hidden layers and their memory layout.
//!
//! Main type: [`Matrices`]. Muon is defined on the weight matrix of a linear map. Embeddings and
//! the output layer are matrices too, but Jordan et al. 2024 train them with Adam, which works
//! better. A fused query, key and value projection holds several linear maps, which are
//! orthogonalized separately.

use super::ModelParameter;

/// The linear maps that are stored in one parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrices {
    /// The number of maps, concatenated along the output dimension: 3 in a fused query, key and
    /// value projection.
    pub count: usize,
    /// The memory layout of each map.
    pub layout: MatrixLayout,
}

/// The order of the dimensions of a linear map's weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixLayout {
    /// `[inputs, outputs]`, as in Burn's `Linear` and other parameters with two dimensions.
    InputsFirst,
    /// `[outputs, inputs, ...]`, as in convolutions. The number of inputs is the number of channels
    /// times the kernel size.
    OutputsFirst,
}

/// Names of projections in which query, key and value are concatenated, as in GPT-2 and PyTorch's
/// attention. GPT-NeoX's `query_key_value` interleaves them head by head, so it is not listed.
const FUSED: [&str; 6] = ["c_attn", "qkv", "qkv_proj", "wqkv", "in_proj", "in_proj_weight"];

/// Names of output layers at any depth of the module tree.
const OUTPUT_LAYERS: [&str; 2] = ["lm_head", "score"];

/// Names of output layers that are direct fields of the model. Deeper in the module tree these
/// names refer to a part of a layer.
const OUTPUT_FIELDS: [&str; 2] = ["head", "output"];

impl Matrices {
    /// Returns the matrices of a parameter, or `None` if Adam updates the parameter. A `count` from
    /// a parameter group overrides the detection; 0 selects Adam.
    ///
    /// # Errors
    /// Returns a message with the reason and the remedy if `count` does not fit the shape.
    pub(super) fn of(
        parameter: &ModelParameter<'_>,
        count: Option<usize>,
    ) -> Result<Option<Self>, String> {
        let ModelParameter { path, shape, layer, is_announced } = *parameter;
        let layout = match shape.len() {
            2 => MatrixLayout::InputsFirst,
            // A transposed convolution has its input channels first.
            _ if layer.starts_with("ConvTranspose") => MatrixLayout::InputsFirst,
            _ => MatrixLayout::OutputsFirst,
        };
        let whole = Self { count: 1, layout };
        let (outputs, inputs) = whole.dimensions(shape);
        let is_matrix = shape.len() >= 2 && shape.iter().all(|len| *len > 0);
        match count {
            Some(0) => Ok(None),
            Some(count) if !is_matrix => Err(format!(
                "muon_matrices is {count}, and parameter {path} of shape {shape:?} is not a matrix; add dims [2] to the \
                 group, or give 0"
            )),
            Some(count) if !is_announced && !outputs.is_multiple_of(count) => Err(format!(
                "muon_matrices is {count}, and parameter {path} of shape {shape:?} cannot be divided into {count} equal \
                 matrices; give 0, or a number that divides its {outputs} outputs"
            )),
            Some(count) => Ok(Some(Self { count, layout })),
            None if !is_matrix || is_left_to_adam(parameter) => Ok(None),
            // With fewer keys than queries, the three parts differ in size, and the shape does not
            // say where they begin.
            None if is_fused(path) && outputs == 3 * inputs => Ok(Some(Self { count: 3, layout })),
            None => Ok(Some(whole)),
        }
    }

    /// Returns the numbers of outputs and inputs of each map in a parameter of this shape.
    pub(crate) fn dimensions(self, shape: &[usize]) -> (usize, usize) {
        let (first, rest) =
            (shape.first().copied().unwrap_or(1), shape.iter().skip(1).product::<usize>());
        match self.layout {
            MatrixLayout::InputsFirst => (rest / self.count, first),
            MatrixLayout::OutputsFirst => (first / self.count, rest),
        }
    }
}

/// Returns true unless the parameter is known to be a linear map of a hidden layer.
fn is_left_to_adam(parameter: &ModelParameter<'_>) -> bool {
    let ModelParameter { path, shape, layer, .. } = *parameter;
    let path = path.to_lowercase();
    let names: Vec<&str> = path.split('.').collect();
    let is_embedding = |name: &&str| {
        matches!(*name, "wte" | "wpe")
            || name.contains("embed")
            || name.starts_with("emb")
            || name.ends_with("_emb")
    };
    let is_output = |name: &&str| OUTPUT_LAYERS.contains(name) || name.starts_with("classifier");
    let is_filter = layer.starts_with("Conv");
    // Outside of linear layers, a parameter with a dimension of length 1 is a token or a scale.
    let is_row = !matches!(layer, "Linear" | "") && shape.contains(&1);
    // With three or more dimensions, only convolution filters are known to be linear maps.
    let is_unknown = is_row || shape.len() > 2;
    layer == "Embedding"
        || (is_unknown && !is_filter)
        || names.iter().any(is_embedding)
        || names.iter().any(is_output)
        || names.first().is_some_and(|name| OUTPUT_FIELDS.contains(name))
}

/// Returns true if the parameter or its layer has the name of a fused projection.
fn is_fused(path: &str) -> bool {
    let path = path.to_lowercase();
    let mut names = path.rsplit('.').take(2);
    names.any(|name| FUSED.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str, shape: &[usize], layer: &str) -> Option<Matrices> {
        Matrices::of(&ModelParameter { path, shape, layer, is_announced: false }, None).unwrap()
    }

    fn inputs_first(count: usize) -> Option<Matrices> {
        Some(Matrices { count, layout: MatrixLayout::InputsFirst })
    }

    #[test]
    fn hidden_layers_are_told_from_embeddings_and_heads() {
        for (path, shape, layer) in [
            ("wte.weight", &[50, 8][..], "Embedding"),
            ("tokens.weight", &[50, 8], "Embedding"),
            ("wte.weight", &[50, 8], ""),
            ("model.token_embedding.weight", &[50, 8], ""),
            ("lm_head.weight", &[50, 8], "Head"),
            ("output.weight", &[8, 2], "Linear"),
            ("classifier2.weight", &[8, 2], "Linear"),
            ("h.0.ln_1.weight", &[8], "LayerNorm"),
            ("h.0.mlp.bias", &[8], "Linear"),
            ("empty.weight", &[8, 0], "Linear"),
            ("positions", &[1, 9, 8], "Model"),
            ("class_token", &[1, 8], "Model"),
            ("pos_emb", &[9, 8], "Model"),
            ("emb.weight", &[9, 8], "Model"),
        ] {
            assert_eq!(of(path, shape, layer), None, "{path}");
        }
        assert_eq!(of("h.0.attn.c_attn.weight", &[8, 24], "Linear"), inputs_first(3));
        assert_eq!(of("layers.0.in_proj.weight", &[8, 24], "Linear"), inputs_first(3));
        // Not three concatenated projections of equal size: fewer keys than queries, a part of
        // another layer, interleaved heads.
        assert_eq!(of("h.0.attn.qkv.weight", &[8, 12], "Linear"), inputs_first(1));
        assert_eq!(of("h.0.mixer.in_proj.weight", &[8, 32], "Linear"), inputs_first(1));
        assert_eq!(of("h.0.qkv.lora_b.weight", &[8, 24], "Linear"), inputs_first(1));
        assert_eq!(of("h.0.query_key_value.weight", &[8, 24], "Linear"), inputs_first(1));
        assert_eq!(of("member.weight", &[8, 24], "Linear"), inputs_first(1));
        assert_eq!(of("scorer.weight", &[8, 1], "Linear"), inputs_first(1));
        assert_eq!(of("h.0.attn.output.weight", &[8, 8], "Linear"), inputs_first(1));
        let filters = of("conv.weight", &[16, 3, 5, 5], "Conv2d").unwrap();
        assert_eq!(filters.dimensions(&[16, 3, 5, 5]), (16, 75));
        let transposed = of("up.weight", &[16, 3, 5, 5], "ConvTranspose2d").unwrap();
        assert_eq!(transposed.dimensions(&[16, 3, 5, 5]), (75, 16));
        assert_eq!(inputs_first(3).unwrap().dimensions(&[8, 24]), (8, 8));
    }

    #[test]
    fn a_group_decides_for_its_parameters() {
        let parameter = ModelParameter {
            path: "wte.weight",
            shape: &[50, 8],
            layer: "Embedding",
            is_announced: false,
        };
        assert_eq!(Matrices::of(&parameter, Some(0)), Ok(None));
        assert_eq!(Matrices::of(&parameter, Some(4)), Ok(inputs_first(4)));
        let reason = Matrices::of(&parameter, Some(3)).unwrap_err();
        assert!(reason.contains("shape [50, 8]") && reason.contains("its 8 outputs"), "{reason}");
        // The declared shape of a lazy column-major layer is `[outputs, inputs]`.
        let lazy = ModelParameter { shape: &[9, 4], is_announced: true, ..parameter };
        assert_eq!(Matrices::of(&lazy, Some(3)), Ok(inputs_first(3)));
        let bias = ModelParameter { shape: &[8], ..parameter };
        let reason = Matrices::of(&bias, Some(1)).unwrap_err();
        assert!(reason.contains("is not a matrix; add dims [2]"), "{reason}");
    }
}
