//! Selects the parameters of the next prefetch.
//!
//! Main type: [`LookAhead`]. The rule follows DeepSpeed's `fetch_sub_module`
//! (`partitioned_param_coordinator.py`): parameters are added while there are fewer than
//! `stage3_prefetch_bucket_size` elements, so the last one may exceed the bucket.
//!
//! The last parameter must be allowed to exceed the bucket. With `"auto"`, the bucket is smaller
//! than every matrix of GPT-2. If parameters had to fit into the bucket, no matrix would be
//! prefetched and every gather would block its op. With this rule a prefetch gathers one matrix
//! while the preceding op runs. `stage3_max_live_parameters` limits the memory. DeepSpeed may
//! exceed this limit by the last parameter; this rule never exceeds it.

/// The limits of one prefetch, in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LookAhead {
    /// Parameters are added while the prefetch has fewer elements; 0 disables prefetching.
    pub(crate) bucket_size: usize,
    /// The largest total number of elements of a prefetch: the unused part of
    /// `stage3_max_live_parameters`.
    pub(crate) room: usize,
}

impl LookAhead {
    /// Returns true if another prefetch may start while `ahead` elements are being prefetched.
    ///
    /// A prefetch may start while at most half a bucket is pending. Without this limit each read
    /// would start a prefetch of one small parameter, and the fixed cost of the collectives would
    /// dominate.
    pub(crate) fn allows_another(&self, ahead: usize) -> bool {
        ahead <= self.bucket_size / 2
    }

    /// Returns the parameters to prefetch, without duplicates. `absent` yields absent parameters in
    /// the order of their next reads, and `numel` returns the number of elements of a parameter.
    pub(crate) fn batch(
        &self,
        absent: impl Iterator<Item = usize>,
        numel: impl Fn(usize) -> usize,
    ) -> Vec<usize> {
        let mut batch = Vec::new();
        let mut elements = 0_usize;
        for next in absent {
            if elements >= self.bucket_size {
                break;
            }
            if batch.contains(&next) {
                continue;
            }
            // Stop here instead of skipping this parameter: a smaller parameter that is read later
            // must not take its space.
            elements = elements.saturating_add(numel(next));
            if elements > self.room {
                break;
            }
            batch.push(next);
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn batch(numels: &[usize], bucket_size: usize, room: usize) -> Vec<usize> {
        LookAhead { bucket_size, room }.batch(0..numels.len(), |index| numels[index])
    }

    #[test]
    fn the_last_parameter_may_exceed_the_bucket() {
        assert_eq!(batch(&[30, 40, 50], 10, usize::MAX), [0]);
        assert_eq!(batch(&[3, 4, 50, 1], 10, usize::MAX), [0, 1, 2]);
        assert_eq!(batch(&[3, 7, 50], 10, usize::MAX), [0, 1]);
        assert_eq!(batch(&[usize::MAX, 1], usize::MAX, usize::MAX), [0]);
    }

    #[test]
    fn an_empty_bucket_brings_nothing() {
        assert_eq!(batch(&[0, 1, 2], 0, usize::MAX), [0; 0]);
    }

    #[test]
    fn the_room_is_never_exceeded() {
        assert_eq!(batch(&[30, 40], 10, 29), [0; 0]);
        assert_eq!(batch(&[30, 40], 10, 30), [0]);
        assert_eq!(batch(&[3, 40, 2], 10, 20), [0]);
    }

    #[test]
    fn a_parameter_is_fetched_once() {
        let limits = LookAhead { bucket_size: 100, room: 100 };
        assert_eq!(limits.batch([4, 2, 4, 2, 1].into_iter(), |_| 10), [4, 2, 1]);
    }

    #[test]
    fn another_prefetch_starts_at_half_a_bucket() {
        let limits = LookAhead { bucket_size: 11, room: 0 };
        assert!(limits.allows_another(5) && !limits.allows_another(6));
    }

    proptest! {
        #[test]
        fn only_the_last_parameter_exceeds_the_bucket(
            numels in proptest::collection::vec(0usize..50, 0..20),
            bucket_size in 0usize..100,
            room in 0usize..200,
        ) {
            let batch = batch(&numels, bucket_size, room);
            let sum = |batch: &[usize]| batch.iter().map(|index| numels[*index]).sum::<usize>();
            prop_assert!(batch.iter().copied().eq(0..batch.len()), "nearest first: {batch:?}");
            prop_assert!(sum(&batch) <= room);
            if let Some((_, others)) = batch.split_last() {
                prop_assert!(sum(others) < bucket_size);
            }
            // The batch ends only at a limit.
            if let Some(next) = numels.get(batch.len()) {
                prop_assert!(sum(&batch) >= bucket_size || sum(&batch) + next > room);
            }
        }
    }
}
