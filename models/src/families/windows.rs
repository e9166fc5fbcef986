//! Which layers attend to all earlier positions, and which to a window.

use serde_json::Value;

use crate::hf::{ConfigFields, MAX_LAYERS, ModelConfigError, check_size};

/// What a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerType {
    /// All earlier positions.
    Full,
    /// The last positions.
    Sliding,
}

/// Reads the number of layers.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is not an integer in the supported range.
pub(super) fn num_layers(
    fields: &mut ConfigFields,
    default: usize,
) -> Result<usize, ModelConfigError> {
    let layers = fields.count("num_hidden_layers", default)?;
    check_size("num_hidden_layers", layers, MAX_LAYERS)?;
    Ok(layers)
}

/// Reads the type of each layer from `layer_types`, which wins over older fields. If the field is
/// missing or null, `older` returns the type of layer number `n`.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if the list has another length, or an unknown type.
pub(super) fn layer_types(
    fields: &mut ConfigFields,
    layers: usize,
    older: impl Fn(usize) -> LayerType,
) -> Result<Vec<LayerType>, ModelConfigError> {
    let rule = format!("a list of {layers} names, full_attention or sliding_attention");
    let given = fields.take_nullable("layer_types", None, &rule, |value| match value {
        Value::Array(names) if names.len() == layers => {
            let types = names.iter().map(|name| match name.as_str()? {
                "full_attention" => Some(LayerType::Full),
                "sliding_attention" => Some(LayerType::Sliding),
                _ => None,
            });
            types.collect::<Option<Vec<_>>>()
        }
        _ => None,
    })?;
    Ok(given.unwrap_or_else(|| (0..layers).map(older).collect()))
}

/// Reads the window of the sliding layers.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is neither a positive integer nor null.
pub(super) fn window(
    fields: &mut ConfigFields,
    default: Option<usize>,
) -> Result<Option<usize>, ModelConfigError> {
    positive_or_null(fields, "sliding_window", default)
}

/// Checks that sliding layers have a window. `switch` is the field that turns windows off, if the
/// model has it and it does. `transformers` fails without a window.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] for sliding layers without a window.
pub(super) fn check_window(
    types: &[LayerType],
    window: Option<usize>,
    switch: Option<&'static str>,
) -> Result<(), ModelConfigError> {
    if window.is_some() || !types.contains(&LayerType::Sliding) {
        return Ok(());
    }
    let reason = "because the model has layers of type sliding_attention; for a model without windows, write \
                  full_attention for all layers in `layer_types`";
    Err(match switch {
        Some(name) => ModelConfigError::value(name, false, format!("true, {reason}")),
        None => ModelConfigError::value(
            "sliding_window",
            "null",
            format!("a positive integer, {reason}"),
        ),
    })
}

/// Reads a field that is a positive integer or null.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is neither.
pub(super) fn positive_or_null(
    fields: &mut ConfigFields,
    name: &'static str,
    default: Option<usize>,
) -> Result<Option<usize>, ModelConfigError> {
    fields.take_nullable(name, default, "a positive integer or null", |value| {
        value.as_u64().filter(|it| *it > 0).map(|it| it as usize)
    })
}
