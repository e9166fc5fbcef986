//! Persistent parameters: small parameters that stay gathered at stage 3
//! (`stage3_param_persistence_threshold`).

use deepburn_config::GatherPlan;

//= deepspeed 0.19.8 runtime/zero/parameter_offload.py mark_persistent_parameters
/// Returns the indices of the parameters of which every rank keeps a complete copy in addition to
/// its shard.
///
/// The rule is the same as in DeepSpeed's `mark_persistent_parameters` (`parameter_offload.py`).
/// Parameters are visited in module order, including frozen ones. A parameter of at most
/// `persistence_threshold` elements is persistent unless the total would exceed
/// `model_persistence_threshold` elements. A parameter that does not fit is skipped, and a later,
/// smaller parameter may still fit.
///
/// On one rank, a shard on the device is already the complete parameter, so the caller omits it.
/// DeepSpeed marks it, but shares the memory of both copies.
pub(crate) fn persistent_parameters(
    numels: impl Iterator<Item = u64>,
    plan: &GatherPlan,
) -> Vec<usize> {
    let mut total = 0_u64;
    let persists = |(index, numel): (usize, u64)| {
        let with_it = total.saturating_add(numel);
        let fits = with_it <= plan.model_persistence_threshold as u64;
        (fits && numel <= plan.persistence_threshold as u64).then(|| {
            total = with_it;
            index
        })
    };
    numels.enumerate().filter_map(persists).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn persistent(numels: &[u64], threshold: usize, limit: usize) -> Vec<usize> {
        let plan = GatherPlan {
            prefetch_bucket_size: 0,
            persistence_threshold: threshold,
            model_persistence_threshold: limit,
            max_live_parameters: 0,
            max_reuse_distance: 0,
            secondary_partition_size: None,
            gather_16bit_weights_on_model_save: false,
        };
        persistent_parameters(numels.iter().copied(), &plan)
    }

    //= deepspeed 0.19.8 runtime/zero/parameter_offload.py mark_persistent_parameters
    #[test]
    fn one_that_does_not_fit_is_passed_over() {
        assert_eq!(persistent(&[10, 8, 2], 10, 13), [0, 2]);
        assert_eq!(persistent(&[10, 8, 2], 9, usize::MAX), [1, 2]);
        assert_eq!(persistent(&[10, 3, 1], 10, 13), [0, 1]);
        assert_eq!(persistent(&[4, 4], 0, usize::MAX), [0; 0]);
        assert_eq!(persistent(&[4, 0], 0, usize::MAX), [1]);
    }
}
