//! The parameters of an encoder: their module paths and shapes.

use super::config::EncoderConfig;
use crate::gpt2::ParameterShape;

/// Deviation of the initial weights of an affine map from `inputs` values, which torch draws
/// uniformly between `-1 / sqrt(inputs)` and `1 / sqrt(inputs)`.
pub(crate) fn default_std(inputs: usize) -> f64 {
    1.0 / (3.0 * inputs as f64).sqrt()
}

impl EncoderConfig {
    /// All parameters, in the order in which the module holds them.
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterShape> {
        let (width, inner, classes) = (self.embed_dim, self.hidden_dim, self.num_classes);
        let mut list = vec![parameter("embedding.weight", &[self.vocab_size, width])];
        for layer in 0..self.num_layers {
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

    /// Values of all parameters.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.parameters().iter().map(|it| it.shape.iter().product::<usize>()).sum()
    }
}

/// Weight and bias, which is as long as the weight's last axis.
fn affine(path: &str, weight: &[usize]) -> [ParameterShape; 2] {
    let bias = &weight[weight.len() - 1..];
    [parameter(&format!("{path}.weight"), weight), parameter(&format!("{path}.bias"), bias)]
}

fn parameter(path: &str, shape: &[usize]) -> ParameterShape {
    ParameterShape { path: path.to_owned(), shape: shape.to_vec() }
}
