//! The parameters of a model and their names in files.
//!
//! Main types: [`ParameterShape`] and [`Names`]. A model lists its parameters once. Counting, checking a folder,
//! writing one and estimating memory all read that list, and a test of each model compares it with the module itself.

/// A parameter of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShape {
    /// Path of field names and indices in the Burn module, joined by dots.
    pub path: String,
    /// Lengths of its axes. Projections are `[in, out]`, embeddings and the head `[vocab, width]`.
    pub shape: Vec<usize>,
}

impl ParameterShape {
    /// Returns the parameter at a module path.
    #[must_use]
    pub fn new(path: impl Into<String>, shape: &[usize]) -> Self {
        Self { path: path.into(), shape: shape.to_vec() }
    }

    /// Returns the number of values.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How the parameters of a model are named in its weight files.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// The name in a file of the parameter at a module path.
    pub in_file: fn(&str) -> String,
    /// The module path of a name in a file. `None` for a tensor that is not a parameter and is ignored.
    pub path: fn(&str) -> Option<String>,
}

impl Names {
    /// Names of a model whose parameters have their module paths as names.
    pub const SAME: Self = Self { in_file: str::to_owned, path: |name| Some(name.to_owned()) };
}
