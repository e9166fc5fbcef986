//! The length of sequences by optimizer step: curriculum learning (Li et al. 2022).
//!
//! The length increases in stages or along a root function, never decreases, and always stays
//! within the plan's bounds.

use deepburn_config::{CurriculumPlan, CurriculumSchedule};

/// Returns the length of sequences in optimizer step `step`, in tokens. Steps count from 1, as in
/// DeepSpeed; skipped steps do not count.
///
/// For a root schedule it is `min + (max - min) * (step / total_steps)^(1 / root_degree)`, rounded
/// down to a multiple of `difficulty_step`, but at least `min_difficulty` rounded up to such a
/// multiple:
///
/// ```
/// use deepburn_config::{CurriculumPlan, CurriculumSchedule};
/// use deepburn_learner::schedule::sequence_length;
///
/// let plan = CurriculumPlan {
///     min_difficulty: 8,
///     max_difficulty: 64,
///     schedule: CurriculumSchedule::Root {
///         total_steps: 100,
///         difficulty_step: 8,
///         root_degree: 2.0,
///     },
/// };
/// // A root rises fast at first: after a quarter of the steps it is halfway up.
/// assert_eq!([1, 25, 100].map(|step| sequence_length(&plan, step)), [8, 32, 64]);
/// ```
pub fn sequence_length(plan: &CurriculumPlan, step: usize) -> usize {
    let &CurriculumPlan { min_difficulty, max_difficulty, ref schedule } = plan;
    match schedule {
        //= deepspeed 0.19.8 runtime/data_pipeline/curriculum_scheduler.py fixed_discrete
        CurriculumSchedule::Discrete { stages, last } => {
            let current = stages.iter().find(|stage| step <= stage.last_step);
            current.map_or(*last, |stage| stage.difficulty)
        }
        //= deepspeed 0.19.8 runtime/data_pipeline/curriculum_scheduler.py fixed_root
        &CurriculumSchedule::Root { total_steps, difficulty_step, root_degree } => {
            let risen = (step as f64 / total_steps as f64).powf(root_degree.recip());
            let range = max_difficulty - min_difficulty;
            // The cast saturates at `usize::MAX`.
            let exact = (risen * range as f64 + min_difficulty as f64).floor() as usize;
            let lowest = min_difficulty.div_ceil(difficulty_step);
            let steps = (exact / difficulty_step).max(lowest);
            steps.saturating_mul(difficulty_step).min(max_difficulty)
        }
    }
}

#[cfg(test)]
mod tests {
    use deepburn_config::CurriculumStage;
    use proptest::prelude::*;

    use super::*;

    fn root(bounds: [usize; 2], total_steps: usize, step: usize, degree: f64) -> CurriculumPlan {
        let [min_difficulty, max_difficulty] = bounds;
        let schedule =
            CurriculumSchedule::Root { total_steps, difficulty_step: step, root_degree: degree };
        CurriculumPlan { min_difficulty, max_difficulty, schedule }
    }

    fn discrete(stages: &[(usize, usize)], last: usize) -> CurriculumPlan {
        let stage = |&(difficulty, last_step)| CurriculumStage { difficulty, last_step };
        let stages = stages.iter().map(stage).collect();
        let schedule = CurriculumSchedule::Discrete { stages, last };
        CurriculumPlan { min_difficulty: 1, max_difficulty: last, schedule }
    }

    fn lengths<const N: usize>(plan: &CurriculumPlan, steps: [usize; N]) -> [usize; N] {
        steps.map(|step| sequence_length(plan, step))
    }

    const FIRST: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

    #[test]
    fn stages_and_lines_of_deepspeeds_tests() {
        let plan = discrete(&[(1, 2), (2, 4), (3, 6), (4, 8)], 5);
        assert_eq!(lengths(&plan, FIRST), [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
        let plan = root([2, 10], 8, 2, 1.0);
        assert_eq!(lengths(&plan, FIRST), [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]);
    }

    //= deepspeed 0.19.8 runtime/data_pipeline/curriculum_scheduler.py fixed_root
    /// The results of DeepSpeed 0.19.8 for randomly chosen schedules:
    /// ```python
    /// s = CurriculumScheduler({"min_difficulty": lo, "max_difficulty": hi,
    ///     "schedule_type": "fixed_root", "schedule_config": {
    ///         "total_curriculum_step": T, "difficulty_step": step, "root_degree": r}})
    /// [s.update_difficulty(t) for t in range(1, 90)]  # at the steps below
    /// ```
    #[test]
    fn roots_of_deepspeed() {
        let steps = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89];
        for ([min, max, total, step], degree, expected) in [
            ([7, 155, 8, 1], 2.0, [59, 81, 97, 124, 155, 155, 155, 155, 155, 155]),
            ([7, 248, 30, 3], 2.5, [66, 87, 102, 123, 147, 177, 213, 248, 248, 248]),
            ([7, 142, 46, 1], 3.0, [44, 54, 61, 71, 82, 95, 110, 129, 142, 142]),
            ([1, 176, 17, 10], 2.0, [40, 60, 70, 90, 120, 150, 176, 176, 176, 176]),
            ([1, 88, 3, 10], 2.0, [50, 70, 80, 88, 88, 88, 88, 88, 88, 88]),
            ([64, 230, 12, 16], 2.0, [96, 128, 144, 160, 192, 224, 230, 230, 230, 230]),
            ([1, 301, 1, 8], 1.0, [296, 301, 301, 301, 301, 301, 301, 301, 301, 301]),
            ([64, 306, 28, 1], 1.0, [72, 81, 89, 107, 133, 176, 245, 306, 306, 306]),
            ([7, 403, 34, 8], 3.0, [128, 160, 176, 216, 248, 288, 344, 400, 403, 403]),
            ([2, 90, 7, 3], 1.0, [12, 27, 39, 63, 90, 90, 90, 90, 90, 90]),
            ([1, 358, 16, 16], 2.5, [112, 144, 176, 224, 256, 320, 358, 358, 358, 358]),
            ([64, 279, 48, 3], 2.5, [108, 123, 132, 150, 168, 189, 216, 249, 279, 279]),
        ] {
            let plan = root([min, max], total, step, degree);
            assert_eq!(lengths(&plan, steps), expected, "{plan:?}");
        }
    }

    //= deepspeed 0.19.8 runtime/data_pipeline/curriculum_scheduler.py fixed_discrete
    /// The results of DeepSpeed 0.19.8 for `fixed_discrete` schedules.
    #[test]
    fn stages_of_deepspeed() {
        let steps = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89];
        let expected = [25, 25, 25, 25, 38, 38, 38, 38, 203, 203];
        assert_eq!(lengths(&discrete(&[(25, 7), (38, 35), (78, 53)], 203), steps), expected);
        let expected = [30, 30, 30, 110, 260, 260, 260, 299, 299, 299];
        assert_eq!(lengths(&discrete(&[(30, 3), (110, 6), (260, 28)], 299), steps), expected);
        let expected = [36, 36, 36, 47, 47, 124, 124, 124, 283, 283];
        let plan = discrete(&[(36, 4), (47, 8), (124, 37), (218, 53)], 283);
        assert_eq!(lengths(&plan, steps), expected);
        let expected = [32, 32, 32, 32, 32, 32, 32, 296, 299, 299];
        assert_eq!(lengths(&discrete(&[(32, 26), (296, 38)], 299), steps), expected);
    }

    //= deepspeed 0.19.8 runtime/data_pipeline/curriculum_scheduler.py fixed_root
    #[test]
    fn a_start_below_the_step_is_rounded_up() {
        assert_eq!(lengths(&root([8, 64], 100, 16, 1.0), [0, 1, 50]), [16, 16, 32]);
        assert_eq!(sequence_length(&root([8, 12], 100, 16, 1.0), 1), 12);
    }

    proptest! {
        #[test]
        fn lengths_rise_within_their_bounds(
            min in 1usize..2000,
            range in 0usize..5000,
            total in 1usize..10_000,
            step in 1usize..300,
            degree in 0.1f64..10.0,
            at in 0usize..20_000,
        ) {
            let plan = root([min, min + range], total, step, degree);
            let (now, next) = (sequence_length(&plan, at), sequence_length(&plan, at + 1));
            prop_assert!(now <= next && min <= now && next <= min + range);
            prop_assert!(now % step == 0 || now == min + range);
            prop_assert!(sequence_length(&plan, usize::MAX) <= min + range);
        }

        #[test]
        fn stages_change_after_their_last_step(
            lengths in proptest::collection::vec((1usize..50, 1usize..20), 1..10),
            last in 1usize..50,
        ) {
            let mut end = 0;
            let stages: Vec<_> = lengths.iter().map(|&(difficulty, steps)| {
                end += steps;
                (difficulty, end)
            }).collect();
            let plan = discrete(&stages, last);
            let expected = lengths.iter().flat_map(|&(difficulty, steps)| std::iter::repeat_n(difficulty, steps));
            for (step, difficulty) in (1..).zip(expected) {
                prop_assert_eq!(sequence_length(&plan, step), difficulty);
            }
            prop_assert_eq!(sequence_length(&plan, end + 1), last);
        }
    }
}
