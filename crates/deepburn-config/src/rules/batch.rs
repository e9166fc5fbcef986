//! The batch triple: `train_batch_size = micro batch * accumulation steps * data-parallel ranks`.
//!
//! Follows DeepSpeed's order of resolution and its wording, in which `world_size` is the number of
//! data-parallel ranks. A triple that does not satisfy the equation is an error, which lists each
//! single change that would fix it.

use super::*;

/// Names of the three numbers, as DeepSpeed's messages show them.
const SHOWN: [&str; 3] =
    ["Train batch size", "Micro batch size per gpu", "Gradient accumulation steps"];

/// The three numbers in the order of [`SHOWN`], as far as they are known. They are signed, because
/// the error for a number below 1 shows it.
type Triple = [Option<i64>; 3];

/// A problem of a triple.
#[derive(Debug)]
struct Problem {
    /// Index of the number to change.
    number: usize,
    message: String,
    remedy: String,
}

/// Resolves and checks the triple, for a pipeline of this many stages.
pub(crate) fn resolve(pipeline_stages: usize, context: &mut Context<'_>) -> BatchPlan {
    let all = context.run.world_size;
    // A number of ranks that the stages do not divide has been reported.
    let data_parallel_size = (all / pipeline_stages).max(all.min(1));
    let world = i64::try_from(data_parallel_size).unwrap_or(i64::MAX);
    let top = context.top;
    let settings = [
        &top.train_batch_size,
        &top.train_micro_batch_size_per_gpu,
        &top.gradient_accumulation_steps,
    ];
    let given = supply(context);
    let triple = complete(given, world);
    match triple.map(|triple| verify(triple, given, world, pipeline_stages)) {
        None => report_missing(context),
        Some(Err(Problem { number, message, remedy })) => {
            refuse!(context, settings[number] => "{message}"; "{remedy}");
        }
        Some(Ok(())) => {}
    }
    check_job_size(triple, context);
    for (setting, value) in settings.into_iter().zip(triple.into_iter().flatten()) {
        context.answer(setting, value, "the other batch sizes and the world size");
    }
    // An invalid triple has been reported, and the plan is discarded.
    let sizes = triple.unwrap_or_default().map(|value| usize::try_from(value).unwrap_or(0));
    let [train_batch_size, micro_batch_size, gradient_accumulation_steps] = sizes;
    BatchPlan {
        train_batch_size,
        micro_batch_size,
        gradient_accumulation_steps,
        data_parallel_size,
    }
}

/// Warns of a micro-batch size of the job that the DeepSpeed configuration replaces with another.
fn check_job_size(triple: Option<[i64; 3]>, context: &mut Context<'_>) {
    let wanted = context.run.micro_batch_size.and_then(|size| i64::try_from(size).ok());
    let (Some(wanted), Some([_, micro, _])) = (wanted, triple) else { return };
    let key = match context.top.train_micro_batch_size_per_gpu.is_given() {
        true => "train_micro_batch_size_per_gpu",
        false => "train_batch_size",
    };
    warning!(if wanted != micro; context, "training.micro_batch_size" =>
        "{wanted} has no effect: the micro-batch is {micro}, because of {key}";
        "remove it, or set the batch sizes of the DeepSpeed configuration to \"auto\"");
}

/// Reports that neither batch size is known. A key with an invalid value has already been reported,
/// and is not missing.
fn report_missing(context: &mut Context<'_>) {
    let (train, micro) =
        (&context.top.train_batch_size, &context.top.train_micro_batch_size_per_gpu);
    let message = match micro.is_auto() || train.is_auto() {
        true => "\"auto\" needs the micro-batch, which is not known",
        false => "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
    };
    refuse!(if !train.is_given() && !micro.is_given(); context, micro => "{message}";
        "add \"train_micro_batch_size_per_gpu\": 1, or training.micro_batch_size in the job file; check-config and \
         estimate take --micro-batch");
}

/// Returns the numbers of the file, and the job's micro-batch size if the file does not set it.
fn supply(context: &Context<'_>) -> Triple {
    let key = &context.top.train_micro_batch_size_per_gpu;
    let train = context.top.train_batch_size.value;
    let mut micro = key.value;
    // Without `"auto"`, the job's size only fills a gap: a global batch size alone determines the
    // micro-batch, as in DeepSpeed.
    if !key.is_given() && (key.is_auto() || train.is_none()) {
        let size = context.run.micro_batch_size;
        micro = size.map(|size| i64::try_from(size).unwrap_or(i64::MAX));
    }
    [train, micro, context.top.gradient_accumulation_steps.value]
}

//= deepspeed 0.19.8 runtime/config.py _set_batch_related_parameters
/// Completes a triple in DeepSpeed's order of resolution; `None` when neither batch size is known.
///
/// Given numbers are kept even if they contradict each other, because [`verify`] then shows the
/// user's numbers. Divisions round down as in DeepSpeed. If there is a remainder, the triple fails
/// the check afterwards.
fn complete(given: Triple, world: i64) -> Option<[i64; 3]> {
    // A division by zero gives 0, which `verify` reports. An overflow saturates, so that the triple
    // fails the check.
    let over = |a: i64, b: i64| a.checked_div_euclid(b).unwrap_or(0);
    let times = |a: i64, b: i64| a.saturating_mul(b);
    Some(match given {
        [Some(train), Some(micro), Some(steps)] => [train, micro, steps],
        [Some(train), Some(micro), None] => [train, micro, over(over(train, micro), world)],
        [Some(train), None, Some(steps)] => [train, over(over(train, world), steps), steps],
        [None, Some(micro), Some(steps)] => [times(times(micro, steps), world), micro, steps],
        [Some(train), None, None] => [train, over(train, world), 1],
        [None, Some(micro), None] => [times(micro, world), micro, 1],
        [None, None, _] => return None,
    })
}

//= deepspeed 0.19.8 runtime/config.py _batch_assertion
/// Checks a complete triple. `given` determines which number below 1 is reported, because a derived
/// number follows from given ones.
fn verify(
    triple: [i64; 3],
    given: Triple,
    world: i64,
    pipeline_stages: usize,
) -> Result<(), Problem> {
    let [train, micro, steps] = triple;
    let too_small = |number: &usize| triple[*number] <= 0;
    // Given numbers are reported before derived ones.
    if let Some(number) = (0..3).filter(too_small).min_by_key(|number| given[*number].is_none()) {
        let message = format!("{}: {} has to be greater than 0", SHOWN[number], triple[number]);
        let names =
            ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
        let remedy = match given[number] {
            Some(_) => "give 1 or more".to_owned(),
            None => format!(
                "raise train_batch_size, which is too small for {}, or give {}",
                counted(world as usize, "rank"),
                names[number]
            ),
        };
        return Err(Problem { number, message, remedy });
    }
    // Saturates far above the range of i64, so that it never equals `train` then.
    let product = (i128::from(micro) * i128::from(steps)).saturating_mul(i128::from(world));
    if i128::from(train) != product {
        let message = format!(
            "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * \
             gradient_acc_step * world_size {train} != {micro} * {steps} * {world}"
        );
        let remedy = mend(triple, world, product, pipeline_stages);
        return Err(Problem { number: 0, message, remedy });
    }
    Ok(())
}

/// Lists the single changes that make the triple consistent.
fn mend(
    [train, micro, steps]: [i64; 3],
    world: i64,
    product: i128,
    pipeline_stages: usize,
) -> String {
    let mut fixes = vec![format!("train_batch_size {product}")];
    // A user sets the ranks of all stages, and `world` only counts one stage.
    for (name, one, other, factor) in [
        ("gradient_accumulation_steps", micro, world, 1),
        ("train_micro_batch_size_per_gpu", steps, world, 1),
        ("a world size of", micro, steps, pipeline_stages as i128),
    ] {
        let (train, rest) = (i128::from(train), i128::from(one) * i128::from(other));
        // A world size of 0, which is reported elsewhere, must not be a divisor.
        if rest != 0 && train % rest == 0 && train / rest > 0 {
            fixes.push(format!("{name} {}", (train / rest).saturating_mul(factor)));
        }
    }
    format!("set one of: {}", fixes.join(", "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Row = ([Option<i64>; 3], i64, Result<[i64; 3], &'static str>);

    /// Results of DeepSpeed's rules: train, micro, steps, world.
    const DEEPSPEED: [Row; 17] = [
        ([Some(32), Some(4), Some(8)], 1, Ok([32, 4, 8])),
        ([Some(32), Some(4), Some(8)], 8, Err("32 != 4 * 8 * 8")),
        ([Some(32), Some(4), Some(8)], 2, Err("32 != 4 * 8 * 2")),
        ([Some(4), Some(1), Some(4)], 1, Ok([4, 1, 4])),
        ([Some(4), Some(1), Some(4)], 2, Err("4 != 1 * 4 * 2")),
        ([Some(32), Some(16), None], 2, Ok([32, 16, 1])),
        ([Some(32), Some(8), None], 2, Ok([32, 8, 2])),
        (
            [Some(33), Some(17), None],
            2,
            Err("Gradient accumulation steps: 0 has to be greater than 0"),
        ),
        (
            [Some(32), Some(18), None],
            2,
            Err("Gradient accumulation steps: 0 has to be greater than 0"),
        ),
        ([Some(32), None, Some(4)], 2, Ok([32, 4, 4])),
        ([None, Some(4), Some(8)], 2, Ok([64, 4, 8])),
        ([Some(64), None, None], 1, Ok([64, 64, 1])),
        ([Some(64), None, None], 3, Err("64 != 21 * 1 * 3")),
        ([None, Some(4), None], 8, Ok([32, 4, 1])),
        ([None, None, Some(4)], 2, Err("neither")),
        (
            [Some(4), Some(8), None],
            1,
            Err("Gradient accumulation steps: 0 has to be greater than 0"),
        ),
        ([Some(0), Some(4), Some(8)], 1, Err("Train batch size: 0 has to be greater than 0")),
    ];

    fn run(given: Triple, world: i64) -> Result<[i64; 3], String> {
        let triple = complete(given, world).ok_or("neither")?;
        verify(triple, given, world, 1).map_err(|problem| problem.message)?;
        Ok(triple)
    }

    //= deepspeed 0.19.8 runtime/config.py _set_batch_related_parameters
    //= deepspeed 0.19.8 runtime/config.py _batch_assertion
    #[test]
    fn triples_resolve_as_in_deepspeed() {
        for (given, world, expected) in DEEPSPEED {
            match (run(given, world), expected) {
                (Ok(triple), Ok(expected)) => assert_eq!(triple, expected, "{given:?}"),
                (Err(message), Err(part)) => {
                    assert!(message.contains(part), "{given:?}: {message}")
                }
                (got, _) => panic!("{given:?}: {got:?}, expected {expected:?}"),
            }
        }
    }

    #[test]
    fn a_mismatch_names_every_single_change_that_mends_it() {
        let given = [Some(32), Some(4), Some(8)];
        for (stages, world_size) in [(1, 1), (3, 3)] {
            let remedy = verify([32, 4, 8], given, 2, stages).unwrap_err().remedy;
            let expected = format!(
                "set one of: train_batch_size 64, gradient_accumulation_steps 4, \
                 train_micro_batch_size_per_gpu 2, a world size of {world_size}"
            );
            assert_eq!(remedy, expected);
        }
    }

    proptest! {
        #[test]
        fn what_is_accepted_multiplies(
            train in proptest::option::of(any::<i64>()),
            micro in proptest::option::of(-4i64..1 << 40),
            steps in proptest::option::of(-4i64..1 << 40),
            world in 1i64..64,
        ) {
            if let Ok([train, micro, steps]) = run([train, micro, steps], world) {
                prop_assert!(micro > 0 && steps > 0);
                prop_assert_eq!(micro.checked_mul(steps).and_then(|n| n.checked_mul(world)), Some(train));
            }
        }

        #[test]
        fn two_of_three_are_enough(micro in 1i64..1000, steps in 1i64..1000, world in 1i64..64) {
            let train = micro * steps * world;
            for given in [
                [Some(train), Some(micro), None],
                [Some(train), None, Some(steps)],
                [None, Some(micro), Some(steps)],
            ] {
                prop_assert_eq!(run(given, world), Ok([train, micro, steps]));
            }
        }
    }
}
