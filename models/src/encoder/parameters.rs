//! The weight map of an encoder: module paths, shapes and initial values.
//!
//! Every parameter is stored under its module path. A test compares the map with the parameters of
//! the module.

use deepburn_weights::{Composition, InitialValues, Origin, Weight, WeightMap};

use super::config::EncoderConfig;

/// Returns the standard deviation of the initial weights of a linear layer with `inputs` input
/// features. PyTorch samples them uniformly between `-1 / sqrt(inputs)` and `1 / sqrt(inputs)`.
fn default_std(inputs: usize) -> f64 {
    // A uniform distribution over [-b, b] has the standard deviation b / sqrt(3).
    1.0 / (3.0 * inputs as f64).sqrt()
}

/// Returns the map of all parameters, in the order in which the module holds them.
///
/// It depends only on sizes, so it is available before any memory is allocated.
pub(crate) fn weight_map(config: &EncoderConfig) -> WeightMap {
    let (width, inner, classes) = (config.embed_dim, config.hidden_dim, config.num_classes);
    // Xavier initialization (Glorot and Bengio 2010). PyTorch initializes the three projections as
    // one matrix with `3 * width` outputs, so fan-in is `width` and fan-out is `3 * width`.
    let in_std = (2.0 / (4 * width) as f64).sqrt();
    let normal = InitialValues::Normal { std: config.initializer_range };
    let mut weights = vec![fresh("embedding.weight".into(), &[config.vocab_size, width], normal)];
    for layer in 0..config.num_layers {
        let path = |leaf| format!("layers.{layer}.{leaf}");
        weights.extend(affine(&path("in_proj"), [width, 3 * width], in_std));
        weights.extend(affine(&path("out_proj"), [width, width], default_std(width)));
        weights.extend(affine(&path("linear1"), [width, inner], default_std(width)));
        weights.extend(affine(&path("linear2"), [inner, width], default_std(inner)));
        weights.extend(norm(&path("norm1"), width));
        weights.extend(norm(&path("norm2"), width));
    }
    weights.extend(affine("classifier1", [width, inner], default_std(width)));
    weights.extend(affine("classifier2", [inner, classes], default_std(inner)));
    WeightMap::new(weights).expect("each parameter has a tensor of its own")
}

/// Returns the weight `[in, out]` of a linear layer, with this standard deviation, and its bias.
fn affine(path: &str, shape: [usize; 2], std: f64) -> [Weight; 2] {
    let bias = &shape[1..];
    [
        fresh(format!("{path}.weight"), &shape, InitialValues::Normal { std }),
        fresh(format!("{path}.bias"), bias, InitialValues::Zeros),
    ]
}

/// Returns the weight and the bias of a layer normalization.
fn norm(path: &str, width: usize) -> [Weight; 2] {
    [
        fresh(format!("{path}.weight"), &[width], InitialValues::Ones),
        fresh(format!("{path}.bias"), &[width], InitialValues::Zeros),
    ]
}

/// Returns a parameter that is stored under its module path.
fn fresh(path: String, shape: &[usize], values: InitialValues) -> Weight {
    let composition = Composition::whole(&path, shape);
    Weight::new(path, composition).with_origin(Origin::Fresh(values))
}
