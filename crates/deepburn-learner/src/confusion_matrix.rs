//! Counts of true and predicted classes, which ranks add.

/// A confusion matrix: counts of targets by true and predicted class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfusionMatrix {
    /// The number of targets whose class was predicted.
    num_correct: u64,
    /// One row per true class with the counts of each predicted class. Empty beyond
    /// [`ConfusionMatrix::MOST_CLASSES`].
    rows: Vec<Vec<u64>>,
}

impl ConfusionMatrix {
    /// The largest number of classes with a full matrix. With more classes, only correct
    /// predictions are counted, because a larger matrix is not readable and the ranks would have to
    /// exchange it.
    pub const MOST_CLASSES: usize = 256;

    /// Returns a matrix of zeros for `num_classes` classes.
    pub fn new(num_classes: usize) -> Self {
        let shown = if num_classes > Self::MOST_CLASSES { 0 } else { num_classes };
        Self { num_correct: 0, rows: vec![vec![0; shown]; shown] }
    }

    /// Counts a target of class `class` for which class `answer` was predicted.
    ///
    /// # Panics
    /// Panics if there is a full matrix and one of the classes is out of range.
    pub fn count(&mut self, class: usize, answer: usize) {
        self.num_correct += u64::from(class == answer);
        if !self.rows.is_empty() {
            self.rows[class][answer] += 1;
        }
    }

    /// Returns one row per true class with the counts of each predicted class; `None` with too many
    /// classes.
    pub fn rows(&self) -> Option<&[Vec<u64>]> {
        (!self.rows.is_empty()).then_some(&self.rows)
    }

    /// Returns the number of correct predictions.
    pub fn num_correct(&self) -> u64 {
        self.num_correct
    }

    /// Returns the number of correct predictions, then all counts row by row.
    pub(crate) fn counts(&self) -> impl Iterator<Item = f64> {
        let counts = self.rows.iter().flatten();
        std::iter::once(&self.num_correct).chain(counts).map(|count| *count as f64)
    }

    /// Builds the matrix from [`counts`](Self::counts), which may be summed over ranks.
    pub(crate) fn from_counts(counts: &[f64]) -> Self {
        let counts: Vec<u64> = counts.iter().map(|count| *count as u64).collect();
        let (num_correct, matrix) =
            counts.split_first().map_or((0, &[][..]), |(n, rest)| (*n, rest));
        // The matrix is square. Without one, `chunks` still needs a size, and returns no rows.
        let rows = matrix.chunks(matrix.len().isqrt().max(1)).map(<[u64]>::to_vec).collect();
        Self { num_correct, rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_restored_with_and_without_a_matrix() {
        for classes in
            [1, 2, 7, ConfusionMatrix::MOST_CLASSES, ConfusionMatrix::MOST_CLASSES + 1, 1 << 40]
        {
            let mut confusion = ConfusionMatrix::new(classes);
            confusion.count(0, 0);
            confusion.count(classes - 1, 0);
            let counts: Vec<f64> = confusion.counts().collect();
            assert_eq!(ConfusionMatrix::from_counts(&counts), confusion);
            assert_eq!(confusion.num_correct(), 1 + u64::from(classes == 1));
            assert_eq!(confusion.rows().is_some(), classes <= ConfusionMatrix::MOST_CLASSES);
        }
    }
}
