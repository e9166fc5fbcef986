//! Division of the Learner's data among ranks.

use std::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::tensor::backend::Backend;

/// Returns the data of each rank, divided by [`equal_ranges`] for training and by [`exact_ranges`]
/// for validation.
pub(crate) fn slices<B: Backend, I>(
    loader: &Arc<dyn DataLoader<B, I>>,
    devices: &[B::Device],
    ranges: fn(usize, usize) -> Vec<Range<usize>>,
) -> Vec<Arc<dyn DataLoader<B, I>>> {
    // A slice shuffles with its own seed. A single rank uses the whole loader, so that it shuffles
    // like Burn on one device.
    if let [device] = devices {
        return vec![loader.to_device(device)];
    }
    let sliced = ranges(loader.num_items(), devices.len()).into_iter().zip(devices);
    sliced.map(|(range, device)| loader.slice(range.start, range.end).to_device(device)).collect()
}

/// Returns ranges of equal length that cover `items`, so that all ranks run the same number of
/// micro-batches. If the items do not divide evenly, the last ranges are moved back as far as
/// needed, and overlap their neighbors.
pub(crate) fn equal_ranges(items: usize, ranks: usize) -> Vec<Range<usize>> {
    let length = items.div_ceil(ranks);
    let start = |rank: usize| (rank * length).min(items - length);
    (0..ranks).map(|rank| start(rank)..start(rank) + length).collect()
}

/// Returns ranges that cover `items` without overlap; the first ones are longer by one if needed,
/// and the last ones may be empty.
pub(crate) fn exact_ranges(items: usize, ranks: usize) -> Vec<Range<usize>> {
    let (length, longer) = (items / ranks, items % ranks);
    let start = |rank: usize| rank * length + rank.min(longer);
    (0..ranks).map(|rank| start(rank)..start(rank + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_ranges_have_one_length_and_miss_nothing() {
        for items in 0..40 {
            for ranks in 1..9 {
                let ranges = equal_ranges(items, ranks);
                assert!(ranges.iter().all(|range| range.len() == ranges[0].len()));
                let mut times = vec![0; items];
                ranges.iter().flat_map(Clone::clone).for_each(|item| times[item] += 1);
                assert!(times.iter().all(|times| *times >= 1), "{items} items, {ranks} ranks");
                let repeated = times.iter().sum::<usize>() - items;
                assert!(repeated < ranks, "{items} items, {ranks} ranks");
            }
        }
    }

    #[test]
    fn validation_ranges_have_every_item_once() {
        for items in 0..40 {
            for ranks in 1..9 {
                let all: Vec<usize> = exact_ranges(items, ranks).into_iter().flatten().collect();
                assert_eq!(all, (0..items).collect::<Vec<_>>());
            }
        }
    }
}
