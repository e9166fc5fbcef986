//! The parameters of an encoder: their module paths and shapes.
//!
//! The same list is used to count parameters and to check and write weight files. A test compares it with the
//! parameters of the module.

use super::config::EncoderConfig;
use crate::hf::ParameterShape;

/// Returns the standard deviation of the initial weights of a linear layer with `inputs` input features. PyTorch
/// samples them uniformly between `-1 / sqrt(inputs)` and `1 / sqrt(inputs)`.
pub(crate) fn default_std(inputs: usize) -> f64 {
    1.0 / (3.0 * inputs as f64).sqrt()
}

/// Returns all parameters, in the order in which the module holds them.
///
/// The list depends only on sizes, so it is available before any memory is allocated.
pub(crate) fn parameters(config: &EncoderConfig) -> Vec<ParameterShape> {
    let (width, inner, classes) = (config.embed_dim, config.hidden_dim, config.num_classes);
    let mut list = vec![ParameterShape::new("embedding.weight", &[config.vocab_size, width])];
    for layer in 0..config.num_layers {
        let path = |leaf| format!("layers.{layer}.{leaf}");
        list.extend(affine(&path("in_proj"), &[width, 3 * width]));
        list.extend(affine(&path("out_proj"), &[width, width]));
        list.extend(affine(&path("linear1"), &[width, inner]));
        list.extend(affine(&path("linear2"), &[inner, width]));
        list.extend(affine(&path("norm1"), &[width]));
        list.extend(affine(&path("norm2"), &[width]));
    }
    list.extend(affine("classifier1", &[width, inner]));
    list.extend(affine("classifier2", &[inner, classes]));
    list
}

/// Returns the weight and the bias. The length of the bias equals the last axis of the weight.
fn affine(path: &str, weight: &[usize]) -> [ParameterShape; 2] {
    let bias = &weight[weight.len() - 1..];
    [
        ParameterShape::new(format!("{path}.weight"), weight),
        ParameterShape::new(format!("{path}.bias"), bias),
    ]
}
