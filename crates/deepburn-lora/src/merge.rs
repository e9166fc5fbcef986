//! Merging of adapters into the weights of a model.
//!
//! ```text
//! LoRA: V = W + s A B              W: [in, out]
//! DoRA: V[:, j] m[j] / |V[:, j]|
//! ```
//!
//! Products and sums are computed in f64 and rounded to f32 once.

/// The adapter of a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    /// `A: [in, r]`.
    pub a: &'a [f32],
    /// `B: [r, out]`.
    pub b: &'a [f32],
    /// `r`.
    pub rank: usize,
    /// `s`.
    pub scale: f64,
    /// `m: [out]`, the norms of the columns.
    pub magnitude: Option<&'a [f32]>,
}

impl Factors<'_> {
    //= peft 0.21.2 tuners/lora/layer.py Linear.merge
    /// Merges the adapter into `weight`, `[in, out]`.
    ///
    /// # Panics
    /// Panics if the sizes do not fit.
    pub fn merge_into(&self, weight: &mut [f32]) {
        let Self { a, b, rank, scale, magnitude } = *self;
        let outputs = b.len() / rank;
        assert_eq!((a.len() / rank) * outputs, weight.len(), "the sizes fit");
        let mut squares = vec![0.0_f64; outputs];
        let mut row = vec![0.0_f64; outputs];
        // A row at a time: the product is never in memory as a whole.
        for (weights, factors) in weight.chunks_exact_mut(outputs).zip(a.chunks_exact(rank)) {
            row.iter_mut().zip(&*weights).for_each(|(sum, weight)| *sum = f64::from(*weight));
            for (factor, b) in factors.iter().zip(b.chunks_exact(outputs)) {
                let factor = f64::from(*factor) * scale;
                row.iter_mut().zip(b).for_each(|(sum, b)| *sum += factor * f64::from(*b));
            }
            for ((weight, sum), squares) in weights.iter_mut().zip(&row).zip(&mut squares) {
                *weight = *sum as f32;
                // From the sum before rounding, as the norms belong to the exact matrix.
                *squares += sum * sum;
            }
        }
        let Some(magnitude) = magnitude else { return };
        let factors: Vec<f64> = magnitude
            .iter()
            .zip(&squares)
            // A column of zeros stays 0, whatever its factor.
            .map(|(magnitude, squares)| match *squares == 0.0 {
                true => 1.0,
                false => f64::from(*magnitude) / squares.sqrt(),
            })
            .collect();
        for weights in weight.chunks_exact_mut(outputs) {
            for (weight, factor) in weights.iter_mut().zip(&factors) {
                *weight = (f64::from(*weight) * factor) as f32;
            }
        }
    }
}

/// Returns the norm of each column of `weight`, `[in, out]`.
#[must_use]
pub fn column_norms(weight: &[f32], outputs: usize) -> Vec<f32> {
    let mut squares = vec![0.0_f64; outputs];
    for row in weight.chunks_exact(outputs.max(1)) {
        let add = |(sum, weight): (&mut f64, &f32)| *sum += f64::from(*weight).powi(2);
        squares.iter_mut().zip(row).for_each(add);
    }
    squares.into_iter().map(|sum| sum.sqrt() as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    //= peft 0.21.2 tuners/lora/layer.py Linear.merge
    #[test]
    fn the_product_is_added() {
        let mut weight = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let factors =
            Factors { a: &[1.0, 2.0], b: &[0.5, 0.0, -1.0], rank: 1, scale: 2.0, magnitude: None };
        factors.merge_into(&mut weight);
        assert_eq!(weight, [2.0, 2.0, 1.0, 6.0, 5.0, 2.0]);
    }

    #[test]
    fn columns_get_their_norms() {
        let mut weight = [3.0, 0.0, 4.0, 2.0];
        assert_eq!(column_norms(&weight, 2), [5.0, 2.0]);
        let factors = Factors {
            a: &[0.0, 0.0],
            b: &[1.0, 1.0],
            rank: 1,
            scale: 1.0,
            magnitude: Some(&[10.0, 1.0]),
        };
        factors.merge_into(&mut weight);
        assert_eq!(weight, [6.0, 0.0, 8.0, 1.0]);
    }
}
