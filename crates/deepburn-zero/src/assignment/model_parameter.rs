//! A parameter, as the assignment of updates sees it.

/// A parameter of a model, as far as its update depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelParameter<'a> {
    /// Module path; the first one of a tied parameter.
    pub path: &'a str,
    /// Lengths of its dimensions.
    pub shape: &'a [usize],
    /// Name of the type of the layer that holds it, `Embedding` for example; empty where it is not
    /// known.
    pub layer: &'a str,
    /// Whether its value is still to be made, and may have its dimensions in another order.
    pub is_announced: bool,
}
