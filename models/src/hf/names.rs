//! The parameters of a model and their names in files.
//!
//! Main types: [`ParameterShape`] and [`Names`]. A model lists its parameters once. This list is used to count
//! parameters, to check and write folders, and to estimate memory. A test of each model compares the list with the
//! parameters of the module.

/// A parameter of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShape {
    /// The path in the Burn module: field names and indices, joined by dots.
    pub path: String,
    /// The shape. Projections have shape `[in, out]`; embeddings and the head have shape `[vocab, width]`.
    pub shape: Vec<usize>,
}

impl ParameterShape {
    /// Returns a parameter with the given module path and shape.
    #[must_use]
    pub fn new(path: impl Into<String>, shape: &[usize]) -> Self {
        Self { path: path.into(), shape: shape.to_vec() }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The mapping between module paths and tensor names in weight files.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Returns the tensor name for a module path.
    pub in_file: fn(&str) -> String,
    /// Returns the module path for a tensor name; `None` if the tensor is not a parameter and is ignored.
    pub path: fn(&str) -> Option<String>,
}

impl Names {
    /// The identity mapping, for models whose tensor names equal the module paths.
    pub const SAME: Self = Self { in_file: str::to_owned, path: |name| Some(name.to_owned()) };
}
