//! Tests prefetching at stage 3: the numbers of parameters and messages, and the memory of gathered
//! parameters.

use burn_flex::Flex;
use deepburn_comm::{Count, Operation};
use deepburn_config::{GatherPlan, Stage};
use deepburn_zero::{Category, ModelStates, Policy};

use crate::communication::{last_step, observe, statistics};
use crate::model::policy;

/// The sizes of the parameters in the order in which forward reads them: embedding, norm, four
/// attention projections, two projections of the inner layer, and the frozen layer. The head reads
/// the embedding again.
const READS: [u64; 17] = [78, 6, 6, 36, 6, 36, 6, 36, 6, 36, 6, 42, 7, 42, 6, 36, 6];

fn with(change: impl Fn(&mut GatherPlan)) -> Policy {
    let mut policy = policy(Stage::Parameters);
    change(&mut policy.zero.parameters);
    policy
}

/// Returns the all-gathers of the last of three steps: gathers for which an op waits, and
/// prefetches.
fn gathers(world_size: usize, policy: &Policy) -> [Count; 2] {
    let seen = statistics(world_size, policy, 3);
    ["gather", "prefetch"].map(|wanted| {
        last_step(&seen, |op, purpose| op == Operation::AllGather && purpose == wanted)
    })
}

/// Returns the expected all-gathers if all gathered parameters are kept: one gather of the first
/// parameter, and prefetches of these numbers of parameters.
fn expected(prefetches: &[usize]) -> [Count; 2] {
    assert_eq!(1 + prefetches.iter().sum::<usize>(), READS.len());
    let elements = READS[1..].iter().sum();
    [Count { calls: 1, elements: READS[0] }, Count { calls: prefetches.len() as u64, elements }]
}

#[test]
fn a_bucket_smaller_than_each_matrix_brings_one_at_a_time() {
    for ranks in [1, 2, 3] {
        for (size, prefetches) in [
            // One parameter is prefetched at a time, regardless of its size.
            (1, &[1; 16][..]),
            (6, &[1; 16]),
            // Vectors are added until there are 20 elements, and the matrix that follows exceeds
            // the bucket.
            (20, &[3, 2, 2, 2, 2, 2, 2, 1]),
            // Two vectors and a matrix fill the bucket exactly.
            (48, &[3, 3, 3, 3, 2, 2]),
            (1_000, &[16]),
        ] {
            let found = gathers(ranks, &with(|plan| plan.prefetch_bucket_size = size));
            assert_eq!(found, expected(prefetches), "bucket of {size} on {ranks} ranks");
        }
    }
}

#[test]
fn an_empty_bucket_turns_prefetching_off() {
    for ranks in [2, 3] {
        let [gathered, prefetched] = gathers(ranks, &with(|plan| plan.prefetch_bucket_size = 0));
        let elements = READS.iter().sum();
        assert_eq!(gathered, Count { calls: READS.len() as u64, elements });
        assert_eq!(prefetched, Count::default());
    }
}

/// Without reuse, backward gathers all parameters again. Only the first reads of forward and of
/// backward were not prefetched.
#[test]
fn a_small_bucket_hides_as_many_gathers_as_a_large_one() {
    let gathered = [1, 20, 1_000].map(|size| {
        let policy = with(|plan| {
            plan.prefetch_bucket_size = size;
            plan.max_reuse_distance = 0;
        });
        gathers(2, &policy)[0]
    });
    assert_eq!(gathered, [gathered[2]; 3]);
    assert_eq!(gathered[0].calls, 2);
}

#[test]
fn prefetching_stays_within_the_live_limit() {
    for limit in [40, 60, 90, 100, 150] {
        let policy = with(|plan| {
            plan.prefetch_bucket_size = 20;
            plan.max_live_parameters = limit;
            plan.max_reuse_distance = 0;
        });
        let peak = |states: &ModelStates<Flex>| states.ledger().usage(Category::Gathered).peak;
        let peaks = observe(2, &policy, 3, |_, states| peak(states));
        // An op gathers the largest parameter even if it exceeds the limit.
        let most = limit.max(READS[0] as usize) * size_of::<f32>();
        assert!(peaks[3] <= most, "{} bytes, limit {limit}", peaks[3]);
        assert!(gathers(2, &policy)[1].calls > 0, "limit {limit}");
    }
}
