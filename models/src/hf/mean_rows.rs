//! New rows of an embedding or an output layer, for a vocabulary that is larger than the file's.
//!
//! `transformers` (`resize_token_embeddings` with `mean_resizing`) draws the rows of new tokens
//! from a normal distribution around the mean of the existing rows, with a covariance of 1e-9 times
//! theirs. Here they are the mean itself, so that they need no seed. A new token then has an
//! average probability, where a random row could have a high one (Hewitt, "Initializing New Word
//! Embeddings for Pretrained Language Models", 2021).

/// Appends `new_rows` rows to a row-major matrix of `width` columns. Each is the mean of the
/// existing rows, computed in f64 and rounded once.
pub(crate) fn append_mean_rows(values: &mut Vec<f32>, width: usize, new_rows: usize) {
    if new_rows == 0 || width == 0 || values.is_empty() {
        return;
    }
    let mut sums = vec![0.0_f64; width];
    for row in values.chunks_exact(width) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += f64::from(*value);
        }
    }
    let rows = (values.len() / width) as f64;
    let mean: Vec<f32> = sums.into_iter().map(|sum| (sum / rows) as f32).collect();
    for _ in 0..new_rows {
        values.extend_from_slice(&mean);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_rows_are_the_mean_of_the_others() {
        // In f32, the sum of the first column would lose the 1 next to 2^24.
        let mut values = vec![16_777_216.0, 0.1, 1.0, 0.2, -16_777_216.0, 0.6];
        append_mean_rows(&mut values, 2, 2);
        let mean = ((f64::from(0.1_f32) + f64::from(0.2_f32) + f64::from(0.6_f32)) / 3.0) as f32;
        assert_eq!(values[6..], [1.0 / 3.0, mean, 1.0 / 3.0, mean]);
        let whole = values.clone();
        append_mean_rows(&mut values, 2, 0);
        assert_eq!(values, whole);
    }
}
