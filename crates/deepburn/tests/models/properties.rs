//! Properties that hold for every model.

use burn::module::AutodiffModule;
use deepburn::checkpoint::Checkpoint;
use deepburn::{EngineError, LoadPlan, MemoryPeaks, SaveRequest};

use crate::harness::{
    Evaluation, Job, Network, Outcome, Precision, Recompute, SEED, STEPS, Trainable, Trained,
    Trainer, WithoutData, evaluate, mean_losses, on_ranks, take_steps, train, train_with_burn,
};
use crate::samples::{EPOCH, Samples};

const STAGES: [u8; 4] = [0, 1, 2, 3];

/// Asserts that losses, the evaluation and all values are bit-identical at every stage, and that
/// the evaluation is bit-identical on every rank.
pub(crate) fn stages_agree<M: Trainable>(precision: Precision) {
    for ranks in 1..=4 {
        let outcomes = STAGES.map(|stage| train::<M>(Job::new(precision, stage, ranks)));
        for (stage, outcome) in outcomes.iter().enumerate() {
            for rank in 0..ranks {
                let what = format!("{precision:?}, {ranks} ranks, stage {stage}, rank {rank}");
                let first = &outcomes[0][rank];
                outcome[rank].evaluation.assert_statistics_in_f32(&what);
                assert_eq!(outcome[rank].losses, first.losses, "losses, {what}");
                outcome[rank].evaluation.assert_same(&first.evaluation, &what);
                let alike = format!("{what}, against rank 0");
                outcome[rank].evaluation.assert_same(&outcome[0].evaluation, &alike);
            }
        }
    }
}

/// Asserts that losses, the evaluation and all values are bit-identical with and without activation
/// checkpointing.
pub(crate) fn recomputation_changes_nothing<M: Trainable>(precision: Precision) {
    for (ranks, stage) in [(1, 0), (1, 3), (2, 2), (3, 3)] {
        let run = |recompute| train::<M>(Job { precision, stage, ranks, recompute });
        let kept = run(Recompute::Off);
        for recompute in
            [Recompute::Full, Recompute::Selective, Recompute::EveryOther, Recompute::Offloaded]
        {
            for (rank, (ours, kept)) in run(recompute).iter().zip(&kept).enumerate() {
                let what = format!(
                    "{precision:?}, {ranks} ranks, stage {stage}, {recompute:?}, rank {rank}"
                );
                assert_eq!(ours.losses, kept.losses, "losses, {what}");
                ours.evaluation.assert_same(&kept.evaluation, &what);
            }
        }
    }
}

/// The largest allowed difference from plain Burn: relative for losses, absolute for weights (which
/// are about 1).
///
/// Both compute in f32, with a relative error of 6e-8 per operation, but add in different orders.
/// 1e-5 allows for a few hundred such errors.
const FP32_TOLERANCE: f32 = 1e-5;

/// The same difference for weights of a model with batch norm.
///
/// The norm cancels a bias before it, so the bias's gradient is a rounding error of about 1e-8.
/// Adam turns it into an update of up to 1e-5: `learning rate * 1e-8 / (1e-8 + epsilon)`.
const TOLERANCE_BEFORE_BATCH_NORM: f32 = 1e-4;

/// Asserts that training in fp32 gives the losses and weights of Burn's own optimizer on one rank.
/// If a batch can be split without changing its loss, several ranks are tested too.
pub(crate) fn fp32_is_plain_burn<M: Trainable>() {
    let plain = train_with_burn::<M>();
    let (several, weight_tolerance) = match <M as Network<Trained>>::COUPLES_SAMPLES {
        true => (1, TOLERANCE_BEFORE_BATCH_NORM),
        false => (4, FP32_TOLERANCE),
    };
    for ranks in 1..=several {
        for stage in [0, 3] {
            let outcome = train::<M>(Job {
                precision: Precision::Fp32,
                stage,
                ranks,
                recompute: Recompute::Off,
            });
            let what = format!("{ranks} ranks, stage {stage}");
            for (step, (ours, theirs)) in
                mean_losses(&outcome).iter().zip(&plain.losses).enumerate()
            {
                assert_near(*ours, *theirs, FP32_TOLERANCE, &format!("step {step}, {what}"));
            }
            let evaluation = &outcome[0].evaluation;
            let evaluated = format!("evaluation, {what}");
            assert_near(evaluation.loss, plain.evaluation.loss, FP32_TOLERANCE, &evaluated);
            assert_weights_near(evaluation, &plain.evaluation, weight_tolerance, &what);
        }
    }
}

#[track_caller]
fn assert_near(left: f32, right: f32, tolerance: f32, what: &str) {
    let error = (left - right).abs() / right.abs();
    assert!(error <= tolerance, "{left} for {right}, off by {error:e}, {what}");
}

#[track_caller]
fn assert_weights_near(ours: &Evaluation, plain: &Evaluation, tolerance: f32, what: &str) {
    for ((path, ours), (_, plain)) in ours.values.iter().zip(&plain.values) {
        // DeepBurn applies weight decay to parameters without a gradient, and plain Burn does not.
        if path.starts_with("unused") {
            continue;
        }
        for (ours, plain) in ours.iter::<f32>().zip(plain.iter::<f32>()) {
            let error = (ours - plain).abs();
            assert!(error <= tolerance, "{path}: {ours} for {plain}, off by {error:e}, {what}");
        }
    }
}

/// The largest allowed relative difference of a 16-bit loss from the fp32 loss.
///
/// bf16 rounds each result by up to 0.4 %. A loss is the result of a dozen layers, in whose sums
/// most of the errors cancel.
const HALF_TOLERANCE: f32 = 0.02;

/// Asserts that the loss of each step in 16 bits equals the fp32 loss, up to rounding.
pub(crate) fn stays_near_fp32<M: Trainable>(precision: Precision) {
    for ranks in 1..=4 {
        let losses = |precision| mean_losses(&train::<M>(Job::new(precision, 2, ranks)));
        let (half, full) = (losses(precision), losses(Precision::Fp32));
        for (step, (half, full)) in half.iter().zip(&full).enumerate() {
            let what = format!("step {step}, {precision:?}, {ranks} ranks");
            assert_near(*half, *full, HALF_TOLERANCE, &what);
        }
        // Both steps use the same samples.
        let (first, last) = (full[0], full[STEPS - EPOCH]);
        assert!(last < first, "nothing was learned: {full:?}");
    }
}

/// Asserts that a new engine resumes exactly from a checkpoint, at the stage that saved it and at
/// other stages.
pub(crate) fn resumes<M: Trainable>(precision: Precision) {
    // The number of ranks, the stage that saves, and the stages that load.
    let resumptions: [(usize, u8, &[u8]); 4] =
        [(1, 0, &[0, 3]), (3, 1, &[1]), (3, 2, &[2, 0]), (3, 3, &[3, 1])];
    for (ranks, saving, loading) in resumptions {
        let root = tempfile::tempdir().expect("a temporary folder");
        let straight = on_ranks::<M, _>(Job::new(precision, saving, ranks), SEED, |engine| {
            take_steps(engine, STEPS / 2)?;
            engine.save_checkpoint(root.path(), SaveRequest::default())?;
            Ok(second_half(engine)?)
        });
        let checkpoint = Checkpoint::open_intact(root.path(), None).expect("a checkpoint");
        for stage in loading.iter().copied() {
            let job = Job::new(precision, stage, ranks);
            let resumed = on_ranks::<M, _>(job, SEED + 10, |engine| {
                // The engine has other states before it loads the checkpoint.
                take_steps(engine, 2)?;
                engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
                Ok(second_half(engine)?)
            });
            assert_same_halves(&straight, &resumed, &format!("saved at stage {saving}, {job:?}"));
        }
    }
}

/// Asserts that a dry run counts the same memory as a training step, in every category.
pub(crate) fn a_forecast_is_the_run<M, F>(precision: Precision)
where
    M: Trainable,
    F: Network<WithoutData> + AutodiffModule<WithoutData>,
{
    for (ranks, stage, recompute) in [
        (1, 0, Recompute::Off),
        (2, 1, Recompute::Selective),
        (3, 2, Recompute::EveryOther),
        (1, 3, Recompute::Full),
        (4, 3, Recompute::Off),
        (2, 3, Recompute::Offloaded),
    ] {
        let job = Job { precision, stage, ranks, recompute };
        let real = on_ranks::<M, _>(job, SEED, |engine| {
            take_steps(engine, 1)?;
            engine.ledger().reset_peaks();
            take_steps(engine, 1)?;
            Ok(MemoryPeaks::of(engine.ledger()))
        });
        let samples = Samples::of_step(1, 0, ranks);
        let plan = job.plan();
        let loss = |model: &F| Ok(model.loss(&samples));
        let forecast = deepburn::forecast(&plan, |device| Ok(F::new(device)), loss);
        if F::CHECKS_VALUES {
            let message = forecast.unwrap_err().to_string();
            assert!(message.contains("panicked without data"), "{message}");
            continue;
        }
        let MemoryPeaks { device, disk, .. } =
            forecast.unwrap_or_else(|error| panic!("{job:?}: {error}")).step;
        assert_eq!(device, real[0].device, "{job:?}");
        // A real run does not offload activations that are not contiguous. In a forecast all of
        // them are.
        assert!(disk.total >= real[0].disk.total, "{job:?}: {disk:?}");
    }
}

/// The results after a checkpoint: of an evaluation, and of further training.
type SecondHalf = (Evaluation, Outcome);

fn second_half<M: Trainable>(engine: &mut Trainer<M>) -> Result<SecondHalf, EngineError> {
    let at_checkpoint = evaluate(engine)?;
    let losses = take_steps(engine, STEPS - STEPS / 2)?;
    Ok((at_checkpoint, Outcome { losses, evaluation: evaluate(engine)? }))
}

#[track_caller]
fn assert_same_halves(straight: &[SecondHalf], resumed: &[SecondHalf], what: &str) {
    for (rank, (straight, resumed)) in straight.iter().zip(resumed).enumerate() {
        let what = format!("{what}, rank {rank}");
        resumed.0.assert_same(&straight.0, &format!("{what}, at the checkpoint"));
        assert_eq!(resumed.1.losses, straight.1.losses, "losses, {what}");
        resumed.1.evaluation.assert_same(&straight.1.evaluation, &format!("{what}, at the end"));
    }
}
