//! Checkpoints of a Learner's training, and resuming from them.

use std::collections::BTreeSet;
use std::path::Path;

use burn_train::checkpoint::KeepLastNCheckpoints;
use deepburn_train::ShardedStrategy;

use crate::classifier::{Weights, classifier, plan};
use crate::recorder::{failure, run, training};

/// The number of batches in an epoch over three ranks.
const BATCHES: usize = 15;

fn epochs_in(folder: &Path) -> BTreeSet<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| name.starts_with("epoch-")).collect()
}

#[test]
fn an_interrupted_run_that_is_resumed_ends_in_the_same_bits() {
    for stage in [0, 2, 3] {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let strategy = |folder: &Path| ShardedStrategy::new(plan(stage, 2, 3)).checkpoints(folder);
        let training = |folder: &Path| training(folder).num_epochs(4).grads_accumulation(2);
        let (undisturbed, weights) = run(training(one.path()), strategy(one.path()), None);

        // The run stops in the middle of the third epoch.
        let stop = 2 * BATCHES + 7;
        let (first, at_the_stop) = run(training(other.path()), strategy(other.path()), Some(stop));
        assert!((stop..4 * BATCHES).contains(&first.train_losses.len()));
        assert!(first.train_losses[..] == undisturbed.train_losses[..first.train_losses.len()]);
        assert!(at_the_stop != weights);

        let resumed = training(other.path()).checkpoint(2);
        let (rest, resumed_weights) = run(resumed, strategy(other.path()), None);
        assert_eq!(rest.train_losses, undisturbed.train_losses[2 * BATCHES..], "stage {stage}");
        assert_eq!(rest.valid_losses, undisturbed.valid_losses[2 * 7..], "stage {stage}");
        assert!(resumed_weights == weights, "stage {stage}");
    }
}

#[test]
fn a_run_resumes_on_another_number_of_ranks_and_stage() {
    let folder = tempfile::tempdir().unwrap();
    let start =
        |stage, ranks| ShardedStrategy::new(plan(stage, 1, ranks)).checkpoints(folder.path());
    let (_, weights) = run(training(folder.path()).num_epochs(2), start(3, 3), None);
    for (stage, ranks) in [(0, 1), (2, 2), (3, 1)] {
        // All epochs are complete, so the weights of the checkpoint are returned unchanged.
        let training = || training(folder.path()).checkpoint(2);
        let (seen, loaded) = run(training().num_epochs(2), start(stage, ranks), None);
        assert!(seen.train_losses.is_empty());
        assert!(loaded == weights, "stage {stage}, {ranks} ranks");
        let (seen, trained) = run(training().num_epochs(3), start(stage, ranks), None);
        assert!(!seen.train_losses.is_empty() && seen.train_losses.iter().all(|l| l.is_finite()));
        assert!(trained != weights);
    }
}

#[test]
fn an_epoch_that_is_trained_again_replaces_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        ShardedStrategy::new(plan(3, 1, 3))
            .checkpoints(folder.path())
            .keep(KeepLastNCheckpoints::new(5))
    };
    let (_, weights) = run(training(folder.path()).num_epochs(3), start(), None);
    let resumed = training(folder.path()).num_epochs(3).checkpoint(1);
    let (_, again) = run(resumed, start(), None);
    assert!(again == weights);
    let expected = ["epoch-1", "epoch-2", "epoch-3"].map(str::to_owned);
    assert_eq!(epochs_in(folder.path()), BTreeSet::from(expected));
}

#[test]
fn old_checkpoints_are_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = ShardedStrategy::new(plan(2, 1, 2))
        .checkpoints(folder.path().join("deep"))
        .keep(KeepLastNCheckpoints::new(2));
    run(training(folder.path()).num_epochs(4), strategy, None);
    let expected = ["epoch-3", "epoch-4"].map(str::to_owned);
    assert_eq!(epochs_in(&folder.path().join("deep")), BTreeSet::from(expected));
}

#[test]
fn a_missing_checkpoint_ends_the_run_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = ShardedStrategy::new(plan(3, 1, 2)).checkpoints(folder.path());
    let message = failure(|| {
        run(training(folder.path()).num_epochs(8).checkpoint(7), strategy, None);
    });
    assert!(message.contains("epoch-7"), "{message}");
}

#[test]
fn training_continues_without_a_checkpoint_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    // A file has the path of the checkpoint folder.
    let occupied = folder.path().join("occupied");
    std::fs::write(&occupied, "").unwrap();
    let strategy = ShardedStrategy::new(plan(3, 1, 2)).checkpoints(&occupied);
    let (seen, weights) = run(training(folder.path()).num_epochs(4), strategy, None);
    // Each rank has seven batches in each epoch.
    assert_eq!(seen.train_losses.len(), 4 * 14);
    assert!(weights != Weights::of(&classifier()));
}
