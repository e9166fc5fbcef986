//! Sinusoidal positions (Vaswani et al. 2017, section 3.5).

use burn::tensor::{Tensor, TensorData, backend::Backend};

/// Returns the positions `[length, width]`: at position `p`, column `2 i` is the sine of
/// `p / 10000^(2 i / width)` and column `2 i + 1` its cosine.
///
/// They are computed in f64 on the host and rounded to f32 once, so they are the same on all
/// devices.
pub(crate) fn sinusoids<B: Backend>(
    length: usize,
    width: usize,
    device: &B::Device,
) -> Tensor<B, 2> {
    let value = |position: usize, column: usize| {
        let exponent = (column / 2 * 2) as f64 / width as f64;
        let angle = position as f64 / 10_000_f64.powf(exponent);
        if column.is_multiple_of(2) { angle.sin() as f32 } else { angle.cos() as f32 }
    };
    let values: Vec<f32> =
        (0..length).flat_map(|row| (0..width).map(move |column| value(row, column))).collect();
    Tensor::from_data(TensorData::new(values, [length, width]), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;

    #[test]
    fn columns_are_sines_and_cosines_of_falling_frequency() {
        let found = sinusoids::<Flex>(3, 4, &Default::default()).into_data();
        let found: Vec<f32> = found.to_vec().unwrap();
        let angles = [0.0_f32, 1.0, 2.0].map(|p| [p, p / 100.0]);
        let expected =
            angles.iter().flat_map(|[fast, slow]| [fast.sin(), fast.cos(), slow.sin(), slow.cos()]);
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{found} {expected}");
        }
    }
}
