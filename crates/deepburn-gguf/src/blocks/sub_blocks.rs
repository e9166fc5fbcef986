//! Eight sub-blocks side by side, so that the compiler can use vector instructions.
//!
//! A search for a scale adds up floats in a fixed order, which rules out vector instructions within
//! a sub-block. Lane `j` of a [`Lanes`] belongs to sub-block `j` instead. All lanes take the same
//! steps, and each gives the same bits as a loop over its sub-block alone.

/// The number of sub-blocks.
pub(super) const LANES: usize = 8;

/// One value of each sub-block.
pub(super) type Lanes<T> = [T; LANES];

/// Returns the values of `N`-element sub-blocks, which are stored one after the other, by their
/// index in the sub-block.
pub(super) fn transposed<const N: usize>(values: &[f32]) -> [Lanes<f32>; N] {
    let mut columns = [[0.0; LANES]; N];
    // Further values belong to another search.
    for (lane, values) in values.as_chunks::<N>().0.iter().enumerate().take(LANES) {
        for (column, value) in columns.iter_mut().zip(values) {
            column[lane] = *value;
        }
    }
    columns
}

/// Writes the levels of the sub-blocks one after the other. The reverse of [`transposed`].
pub(super) fn untransposed<const N: usize>(columns: &[Lanes<u8>; N], levels: &mut [u8]) {
    for (lane, levels) in levels.as_chunks_mut::<N>().0.iter_mut().enumerate().take(LANES) {
        for (column, level) in columns.iter().zip(levels) {
            *level = column[lane];
        }
    }
}
