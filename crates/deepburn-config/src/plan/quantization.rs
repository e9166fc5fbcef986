//! Frozen matrices in 8 or 4 bits.

use serde::Serialize;

/// The storage of frozen matrices in 8 or 4 bits.
///
/// Every frozen parameter with two dimensions is quantized, except for those that are skipped.
/// Trained parameters never are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct QuantizationPlan {
    /// The format.
    pub format: QuantizedFormat,
    /// Module paths of parameters that keep their type.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
}

/// A format of quantized parameters, in blocks of 64 elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QuantizedFormat {
    /// 4-bit NormalFloat with an f32 scale for each block: 4.5 bits per element.
    Nf4,
    /// 4-bit NormalFloat with scales in 8 bits: 4.127 bits per element.
    Nf4Double,
    /// 8-bit integers with an f32 scale for each block: 8.5 bits per element.
    Int8,
}
