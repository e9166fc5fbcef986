//! Pairs of completions.

use deepburn_datasets::{
    Collate, DataError, IGNORE_INDEX, PairBatch, PairRows, RowDocuments, Samples, Splits,
    open_samples, pair_sample,
};
use proptest::prelude::*;
use serde_json::json;
use tempfile::tempdir;

use crate::{source, write_lines};

const PAD: i32 = 99;

/// Returns samples of pairs of a prompt, a better and a worse completion.
fn samples(pairs: &[[Vec<u32>; 3]]) -> Samples {
    let folder = tempdir().unwrap();
    let rows: Vec<_> = pairs.iter().map(|pair| json!({ "parts": pair })).collect();
    let file = write_lines(folder.path(), "pairs.jsonl", &rows);
    let encode = |row: deepburn_datasets::DataRow| {
        let parts: [Vec<u32>; 3] = serde_json::from_value(row.fields["parts"].clone()).unwrap();
        pair_sample(&parts[0], &parts[1], &parts[2])
    };
    open_samples(&source(&Splits::all(file)), encode).unwrap().train
}

/// Returns the ids and the labels of each sequence, without padding.
fn sequences(batch: &PairBatch) -> Vec<(Vec<i32>, Vec<i32>)> {
    let length = batch.sequences.shape[1];
    let lengths = batch.sequences.row_lengths();
    let part = |all: &[i32], row: usize| all[row * length..row * length + lengths[row]].to_vec();
    let row = |row| (part(&batch.sequences.input_ids, row), part(&batch.sequences.labels, row));
    (0..lengths.len()).map(row).collect()
}

#[test]
fn better_completions_come_first_and_missing_pairs_are_padding() {
    let pairs = [[vec![1, 2], vec![3], vec![4, 5]], [vec![6], vec![7, 8, 9], vec![10]]];
    let rows = PairRows::new(samples(&pairs), 100, PAD as u32, "the train split").unwrap();
    let batch = rows.collate(&[1, 0], 3).unwrap();
    assert_eq!(batch.pairs, [1, 0]);
    assert_eq!(batch.sequences.shape, [6, 4]);
    let i = IGNORE_INDEX;
    #[rustfmt::skip]
    assert_eq!(batch.sequences.input_ids, [
        6, 7, 8, 9,    1, 2, 3, PAD,    PAD, PAD, PAD, PAD,
        6, 10, PAD, PAD,    1, 2, 4, 5,    PAD, PAD, PAD, PAD,
    ]);
    #[rustfmt::skip]
    assert_eq!(batch.sequences.labels, [
        i, 7, 8, 9,    i, i, 3, i,    i, i, i, i,
        i, 10, i, i,    i, i, 4, 5,    i, i, i, i,
    ]);
    let RowDocuments::Separate(documents) = &batch.sequences.documents else { panic!() };
    assert_eq!(documents, &[vec![4], vec![3], vec![], vec![2], vec![4], vec![]]);
    // No pair at all.
    let empty = rows.collate(&[], 2).unwrap();
    assert_eq!((empty.sequences.shape, empty.sequences.num_tokens()), ([4, 1], 0));
}

#[test]
fn long_pairs_are_truncated_or_left_out() {
    let pairs = [[vec![1, 2], vec![3, 4], vec![5]], [vec![6, 7, 8], vec![9], vec![10]]];
    let rows = PairRows::new(samples(&pairs), 3, 0, "the train split").unwrap();
    assert_eq!((rows.len(), rows.statistics().truncated), (1, 1));
    assert_eq!(rows.statistics().dropped, [1]);
    assert_eq!((rows.statistics().tokens, rows.statistics().trained_tokens), (6, 2));
    let found = sequences(&rows.collate(&[0], 1).unwrap());
    assert_eq!(found[0].0, [1, 2, 3]);
    assert_eq!(found[1].0, [1, 2, 5]);
    let error = PairRows::new(samples(&pairs), 2, 0, "the train split").unwrap_err();
    assert!(matches!(error, DataError::Untrained { samples: 2, length: 2, .. }), "{error}");
}

#[test]
fn pairs_without_a_prompt_or_a_completion_are_refused() {
    for (parts, name) in [
        ([vec![], vec![1], vec![2]], "`prompt`"),
        ([vec![1], vec![], vec![2]], "`chosen`"),
        ([vec![1], vec![2], vec![]], "`rejected`"),
    ] {
        let error = pair_sample(&parts[0], &parts[1], &parts[2]).unwrap_err();
        assert!(error.contains(name), "{error}");
    }
}

proptest! {
    #[test]
    fn every_pair_is_found_again(
        pairs in prop::collection::vec(
            prop::array::uniform3(prop::collection::vec(0_u32..50, 1..6)), 1..8),
        limit in 2_usize..12,
    ) {
        let Ok(rows) = PairRows::new(samples(&pairs), limit, PAD as u32, "the train split") else {
            prop_assert!(pairs.iter().all(|[prompt, ..]| prompt.len() >= limit));
            return Ok(());
        };
        let all: Vec<usize> = (0..rows.len()).collect();
        let found = sequences(&rows.collate(&all, rows.len()).unwrap());
        let kept: Vec<_> = pairs.iter().filter(|[prompt, ..]| prompt.len() < limit).collect();
        prop_assert_eq!(kept.len(), rows.len());
        for (index, [prompt, chosen, rejected]) in kept.into_iter().enumerate() {
            for (row, completion) in [(index, chosen), (rows.len() + index, rejected)] {
                let whole: Vec<i32> =
                    prompt.iter().chain(completion).map(|id| *id as i32).take(limit).collect();
                let mut labels = whole.clone();
                labels[..prompt.len()].fill(IGNORE_INDEX);
                prop_assert_eq!(&found[row], &(whole, labels));
            }
        }
    }
}
