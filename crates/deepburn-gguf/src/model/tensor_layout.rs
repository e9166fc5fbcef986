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
    /// `transformers` rotates element `i` of the first half of a head with element `i` of the
    /// second half. llama.cpp rotates elements `2 i` and `2 i + 1` in the architecture `llama`
    /// (`LlamaModel.permute` of its converter).
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

    /// Converts a whole tensor, `values` in row-major order with `rows` rows. Returns `None`, and
    /// changes nothing, if the values are not whole rows, or the rows not whole heads with even
    /// widths.
    pub(super) fn apply(self, values: &mut Vec<f32>, rows: usize) -> Option<()> {
        // Without rows, there is no row length.
        let row_len = values.len().checked_div(rows)?;
        if row_len == 0 || values.len() != rows * row_len {
            return None;
        }
        match self {
            Self::Same => {}
            Self::PlusOne => values.iter_mut().for_each(|value| *value += 1.0),
            Self::Transposed => *values = transposed(values, row_len),
            Self::Interleaved { .. } => self.move_rows(values, rows, |_| 2)?,
        }
        Some(())
    }

    /// Converts a whole tensor of a GGUF file back. `rows` is the number of rows in the Hugging
    /// Face file. Returns `None`, and changes nothing, in the cases of [`apply`](Self::apply).
    pub(super) fn undo(self, values: &mut Vec<f32>, rows: usize) -> Option<()> {
        match self {
            Self::Same => {}
            Self::PlusOne => values.iter_mut().for_each(|value| *value -= 1.0),
            Self::Transposed if rows == 0 || !values.len().is_multiple_of(rows) => return None,
            Self::Transposed => *values = transposed(values, rows),
            Self::Interleaved { .. } => self.undo_rows(values, rows)?,
        }
        Some(())
    }

    /// Moves the `rows` rows of a tensor of a GGUF file back to the order of the Hugging Face file.
    /// `elements` may be encoded. Other layouts do not move rows. Returns `None`, and changes
    /// nothing, if the rows are not whole heads with even widths.
    pub(super) fn undo_rows<T: Copy>(self, elements: &mut [T], rows: usize) -> Option<()> {
        self.move_rows(elements, rows, |head_rows| head_rows / 2)
    }

    /// Transposes the matrix of rows that each head is. `height` returns its height for a number of
    /// rows.
    fn move_rows<T: Copy>(
        self,
        elements: &mut [T],
        rows: usize,
        height: impl Fn(usize) -> usize,
    ) -> Option<()> {
        let Self::Interleaved { heads } = self else { return Some(()) };
        let row_len = elements.len().checked_div(rows).filter(|it| *it > 0)?;
        if row_len * rows != elements.len() || heads == 0 || !rows.is_multiple_of(2 * heads) {
            return None;
        }
        let head_rows = rows / heads;
        let height = height(head_rows);
        for head in elements.chunks_exact_mut(head_rows * row_len) {
            // Rows move in both directions, so one head is copied.
            let before = head.to_vec();
            for (to, row) in head.chunks_exact_mut(row_len).enumerate() {
                let from = to % height * (head_rows / height) + to / height;
                row.copy_from_slice(&before[from * row_len..][..row_len]);
            }
        }
        Some(())
    }
}

/// Returns the elements of a matrix with rows of `row_len` elements, column by column.
fn transposed(values: &[f32], row_len: usize) -> Vec<f32> {
    let mut transposed = Vec::with_capacity(values.len());
    for column in 0..row_len {
        transposed.extend(values.iter().skip(column).step_by(row_len));
    }
    transposed
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
    fn what_was_moved_is_moved_back() {
        let numbers = || (0..24).map(|i| i as f32).collect::<Vec<_>>();
        for (layout, rows) in [
            (TensorLayout::Same, 4),
            (TensorLayout::PlusOne, 24),
            (TensorLayout::Transposed, 4),
            (TensorLayout::Interleaved { heads: 2 }, 8),
        ] {
            let mut values = numbers();
            layout.apply(&mut values, rows).unwrap();
            layout.undo(&mut values, rows).unwrap();
            assert_eq!(values, numbers(), "{layout:?}");
        }
        let layout = TensorLayout::Interleaved { heads: 1 };
        let mut bytes = *b"aabbccdd";
        layout.undo_rows(&mut bytes, 4).unwrap();
        assert_eq!(&bytes, b"aaccbbdd");
        assert_eq!(layout.undo_rows(&mut bytes, 3), None);
        assert_eq!(layout.undo_rows(&mut [0_u8; 0], 4), None);
        assert_eq!(TensorLayout::Transposed.undo(&mut numbers(), 5), None);
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
