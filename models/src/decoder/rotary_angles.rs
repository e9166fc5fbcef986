//! Sines and cosines of rotated positions, which are kept from one pass to the next.
//!
//! Training passes have the same positions in every micro-batch. Without this, the host would
//! compute up to a million sines and cosines for each of them while a device waits.

use std::sync::{Arc, Mutex, PoisonError};

/// The number of tables that are kept: models with several rotations have two.
const MOST: usize = 4;

/// The tables that were used last, the latest one at the end. All ranks of a process share them.
static KEPT: Mutex<Vec<Arc<AngleTable>>> = Mutex::new(Vec::new());

/// The cosines and sines of positions from 0 on, each a row with an element for each frequency.
#[derive(Debug)]
struct AngleTable {
    frequencies: Vec<f32>,
    /// The factor of cosines and sines.
    factor: f64,
    /// The number of positions.
    len: usize,
    /// The cosines and the sines.
    rows: [Vec<f32>; 2],
}

impl AngleTable {
    /// Returns the table of at least `len` positions.
    fn of(frequencies: &[f32], factor: f64, len: usize) -> Arc<Self> {
        // A panic leaves the list as it was before or after a change.
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |it: &Arc<Self>| it.factor == factor && it.frequencies == frequencies;
        let found = kept.iter().position(is_same).map(|place| kept.remove(place));
        let table = found.filter(|found| found.len >= len).unwrap_or_else(|| {
            let rows = computed(frequencies, factor, 0..len);
            Arc::new(Self { frequencies: frequencies.to_vec(), factor, len, rows })
        });
        if kept.len() == MOST {
            kept.remove(0);
        }
        kept.push(table.clone());
        table
    }
}

/// Returns the cosines and the sines of positions, each an array with a row for each position.
///
/// The angle is `position * frequency`, rounded to f32. `length` is the largest position + 1. A
/// pass over fewer positions than that, as in generation, does not use the kept tables.
pub(super) fn cosines_and_sines(
    frequencies: &[f32],
    factor: f64,
    positions: &[usize],
    length: usize,
) -> [Vec<f32>; 2] {
    if positions.len() < length {
        return computed(frequencies, factor, positions.iter().copied());
    }
    let (table, width) = (AngleTable::of(frequencies, factor, length), frequencies.len());
    table.rows.each_ref().map(|rows| {
        let row = |position: &usize| &rows[position * width..(position + 1) * width];
        positions.iter().flat_map(row).copied().collect()
    })
}

/// Computes the cosines and the sines of positions.
fn computed(
    frequencies: &[f32],
    factor: f64,
    positions: impl Iterator<Item = usize> + Clone,
) -> [Vec<f32>; 2] {
    [f64::cos, f64::sin].map(|function| {
        let angles = positions.clone().flat_map(|position| {
            frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency))
        });
        angles.map(|angle| (function(angle) * factor) as f32).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kept tables that are too short, of other rotations, and of more rotations than are kept.
    #[test]
    fn kept_tables_have_the_bits_of_computed_ones() {
        let rotations: Vec<(Vec<f32>, f64)> =
            (0..6).map(|i| (vec![1.0, 0.3 / (i + 1) as f32], 1.0 + f64::from(i) / 8.0)).collect();
        for (pass, length) in [5_usize, 9, 3, 9, 200].into_iter().enumerate() {
            for (frequencies, factor) in &rotations[pass % 2..] {
                let positions: Vec<usize> = (0..length).chain([1, length - 1]).collect();
                let found = cosines_and_sines(frequencies, *factor, &positions, length);
                let expected = computed(frequencies, *factor, positions.iter().copied());
                assert_eq!(found, expected, "{length} positions, {frequencies:?}");
            }
        }
        assert!(KEPT.lock().unwrap().len() <= MOST);
    }

    #[test]
    fn a_position_of_a_generation_is_computed_alone() {
        let [cos, sin] = cosines_and_sines(&[0.5], 2.0, &[7], 8);
        assert_eq!(cos, [(f64::from(3.5_f32).cos() * 2.0) as f32]);
        assert_eq!(sin, [(f64::from(3.5_f32).sin() * 2.0) as f32]);
        assert!(cosines_and_sines(&[0.5], 1.0, &[], 0).iter().all(Vec::is_empty));
    }
}
