//! DeepSpeed's functions that divide weights into consecutive parts (`deepspeed/runtime/utils.py`).
//!
//! Both return the first item of each part, followed by the number of items.

//= deepspeed 0.19.8 runtime/utils.py partition_uniform
/// Divides `items` into `parts` of equal size. The first parts have one item more if there is a
/// remainder, and the last ones are empty if there are fewer items than parts.
///
/// ```
/// assert_eq!(deepburn_pipeline::partition_uniform(7, 3), [0, 3, 5, 7]);
/// ```
pub fn partition_uniform(items: usize, parts: usize) -> Vec<usize> {
    // No parts are one part without items, and not a division by 0.
    let (size, rest) = (items / parts.max(1), items % parts.max(1));
    (0..=parts).map(|part| part * size + part.min(rest)).collect()
}

//= deepspeed 0.19.8 runtime/utils.py partition_balanced
/// Divides weights into `parts` so that the difference between the largest and the smallest part is
/// as small as a greedy choice from front to back makes it. As few items as parts are one part
/// each.
///
/// ```
/// assert_eq!(deepburn_pipeline::partition_balanced(&[9, 1, 1, 1, 9], 3), [0, 1, 4, 5]);
/// ```
pub fn partition_balanced(weights: &[u64], parts: usize) -> Vec<usize> {
    let items = weights.len();
    if items <= parts || parts == 0 {
        return partition_uniform(items, parts);
    }
    let mut before = vec![0u128];
    for weight in weights {
        before.push(before[before.len() - 1] + u128::from(*weight));
    }
    // For each number of items and parts, the cut that DeepSpeed keeps. The best cut of a prefix
    // may not be part of the cut with the smallest difference, so this is not an optimum.
    let mut kept = vec![vec![None::<Spread>; parts + 1]; items + 1];
    kept[0][0] = Some(Spread { largest: 0, smallest: u128::MAX, start: 0 });
    for end in 1..=items {
        for part in 1..=parts.min(end) {
            let mut best: Option<Spread> = None;
            for start in 0..end {
                let Some(prefix) = kept[start][part - 1] else { continue };
                let spread = prefix.and(before[end] - before[start], start);
                // The last of several equal cuts is kept.
                if best.is_none_or(|best| best.difference() >= spread.difference()) {
                    best = Some(spread);
                }
            }
            kept[end][part] = best;
        }
    }
    let mut starts = vec![items];
    for part in (1..=parts).rev() {
        let end = starts[starts.len() - 1];
        starts.push(kept[end][part].map_or(0, |spread| spread.start));
    }
    starts.reverse();
    starts
}

/// The weights of the parts of a cut.
#[derive(Debug, Clone, Copy)]
struct Spread {
    largest: u128,
    smallest: u128,
    /// First item of the last part.
    start: usize,
}

impl Spread {
    /// Adds a part of this weight, which begins at `start`.
    fn and(self, weight: u128, start: usize) -> Self {
        Self { largest: self.largest.max(weight), smallest: self.smallest.min(weight), start }
    }

    fn difference(self) -> u128 {
        self.largest - self.smallest
    }
}
