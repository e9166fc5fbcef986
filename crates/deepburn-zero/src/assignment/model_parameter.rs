//! The properties of a parameter that determine its update settings.

/// The properties of a model parameter that determine its update settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelParameter<'a> {
    /// The module path. For a tied parameter, the path of its first occurrence.
    pub path: &'a str,
    /// The length of each dimension.
    pub shape: &'a [usize],
    /// The type name of the parameter's layer, such as `Embedding`. Empty if it is unknown.
    pub layer: &'a str,
    /// Whether the parameter is lazy and not initialized yet, so that `shape` is the declared
    /// shape. The value may have its dimensions in another order.
    pub is_announced: bool,
}
