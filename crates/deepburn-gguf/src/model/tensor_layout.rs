//! How the values of a tensor differ from the Hugging Face file.

/// The layout of a tensor, compared with the Hugging Face file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorLayout {
    /// The same values.
    Same,
    /// Rows and columns are exchanged: `Conv1D` of GPT-2, which stores `[in, out]`.
    Transposed,
    /// The rows of each head are interleaved.
    ///
    /// `transformers` rotates element `i` of the first half of a head with element `i` of the second half. llama.cpp
    /// rotates elements `2 i` and `2 i + 1` in the architecture `llama` (`LlamaModel.permute` of its converter).
    Interleaved {
        /// The number of heads.
        heads: usize,
    },
    /// 1 is added: norms of Gemma.
    PlusOne,
}

impl TensorLayout {
    /// Returns the shape in the file.
    pub(super) fn shape(self, shape: &[u64]) -> Vec<u64> {
        let mut shape = shape.to_vec();
        if self == Self::Transposed {
            shape.reverse();
        }
        shape
    }

    /// Converts a whole tensor, `values` in row-major order with `rows` rows. Returns `None`, and changes nothing, if
    /// the values are not whole rows, or the rows not whole heads with even widths.
    pub(super) fn apply(self, values: &mut Vec<f32>, rows: usize) -> Option<()> {
        let row_len = values.len().checked_div(rows)?;
        if row_len == 0 || values.len() != rows * row_len {
            return None;
        }
        match self {
            Self::Same => {}
            Self::PlusOne => values.iter_mut().for_each(|value| *value += 1.0),
            Self::Transposed => {
                let mut transposed = Vec::with_capacity(values.len());
                for column in 0..row_len {
                    transposed.extend(values.iter().skip(column).step_by(row_len));
                }
                *values = transposed;
            }
            Self::Interleaved { heads } => {
                if heads == 0 || !rows.is_multiple_of(2 * heads) {
                    return None;
                }
                values
                    .chunks_exact_mut(rows / heads * row_len)
                    .for_each(|head| interleave(head, row_len));
            }
        }
        Some(())
    }
}

/// Interleaves the rows of the first and of the second half of a head.
fn interleave(head: &mut [f32], row_len: usize) {
    let before = head.to_vec();
    let (first, second) = before.split_at(before.len() / 2);
    let pairs = first.chunks_exact(row_len).zip(second.chunks_exact(row_len));
    for (pair, (first, second)) in head.chunks_exact_mut(2 * row_len).zip(pairs) {
        let (left, right) = pair.split_at_mut(row_len);
        left.copy_from_slice(first);
        right.copy_from_slice(second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_moved() {
        let numbers = || (0..24).map(|i| i as f32).collect::<Vec<_>>();
        let apply = |layout: TensorLayout, rows| {
            let mut values = numbers();
            layout.apply(&mut values, rows).unwrap();
            values
        };
        assert_eq!(apply(TensorLayout::Same, 4), numbers());
        assert_eq!(apply(TensorLayout::PlusOne, 24)[..3], [1.0, 2.0, 3.0]);
        let transposed = apply(TensorLayout::Transposed, 4);
        assert_eq!(transposed[..6], [0.0, 6.0, 12.0, 18.0, 1.0, 7.0]);
        assert_eq!(TensorLayout::Transposed.shape(&[4, 6]), [6, 4]);
        // Two heads of four rows with three elements: rows 0, 2, 1, 3 and 4, 6, 5, 7.
        let rows: Vec<_> = apply(TensorLayout::Interleaved { heads: 2 }, 8)
            .chunks(3)
            .map(|row| row[0] / 3.0)
            .collect();
        assert_eq!(rows, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }

    #[test]
    fn rows_that_do_not_fit_change_nothing() {
        let mut values = vec![0.0; 12];
        for (layout, rows) in [
            (TensorLayout::Same, 5),
            (TensorLayout::PlusOne, 0),
            (TensorLayout::PlusOne, 24),
            (TensorLayout::Interleaved { heads: 2 }, 6),
            (TensorLayout::Interleaved { heads: 0 }, 6),
        ] {
            assert_eq!(layout.apply(&mut values, rows), None);
        }
        assert_eq!(values, [0.0; 12]);
    }
}
