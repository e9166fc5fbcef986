//! A parameter's path and shape.
//!
//! Main type: [`ParameterShape`]. The list of a model's parameters follows from its
//! [`WeightMap`](deepburn_weights::WeightMap). It is used to count parameters and to estimate
//! memory. A test of each model compares the list with the parameters of the module.

use deepburn_weights::{Origin, Weight};

/// A parameter of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShape {
    /// The path in the Burn module: field names and indices, joined by dots.
    pub path: String,
    /// The shape. Projections have shape `[in, out]`; embeddings and the head have shape
    /// `[vocab, width]`.
    pub shape: Vec<usize>,
    /// Whether it is never trained, because the model has an adapter.
    pub is_frozen: bool,
}

impl ParameterShape {
    /// Returns a parameter with the given module path and shape.
    #[must_use]
    pub fn new(path: impl Into<String>, shape: &[usize]) -> Self {
        Self { path: path.into(), shape: shape.to_vec(), is_frozen: false }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl From<&Weight> for ParameterShape {
    fn from(weight: &Weight) -> Self {
        let is_frozen = *weight.origin() == Origin::Frozen;
        Self { path: weight.path().to_owned(), shape: weight.shape(), is_frozen }
    }
}
