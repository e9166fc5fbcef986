//! Packed rows lose and double no token, and statistics count what happened.

use std::collections::BTreeMap;

use deepburn_datasets::{
    BudgetSampler, Collate, DataShard, EvaluationBatches, IGNORE_INDEX, Packing, Padding,
    RowDocuments, SampleLayout, SampleRows, Samples, Splits, TokenBudget, open_samples,
};
use proptest::prelude::*;
use serde_json::json;

use super::{encode, layout, source, write_lines};

/// Samples of these lengths. Token `t` of sample `s` has id `(31 s + t) mod 997`; every third token
/// is not trained.
fn samples(lengths: &[usize]) -> Samples {
    let folder = tempfile::tempdir().unwrap();
    let row = |(sample, length): (usize, &usize)| {
        let ids: Vec<i64> = (0..*length).map(|at| ((31 * sample + at) % 997) as i64).collect();
        let label = |(at, id): (usize, &i64)| if at % 3 == 2 { -100 } else { *id };
        let labels: Vec<i64> = ids.iter().enumerate().map(label).collect();
        json!({"ids": ids, "labels": labels})
    };
    let rows: Vec<_> = lengths.iter().enumerate().map(row).collect();
    let splits = Splits::all(write_lines(folder.path(), "t.jsonl", &rows));
    open_samples(&source(&splits), encode).unwrap().train
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_token_is_lost_or_doubled(
        lengths in prop::collection::vec(0usize..25, 1..60),
        max_length in 2usize..30,
        packing in prop_oneof![
            Just(Packing::None), Just(Packing::BestFit), Just(Packing::BestFitSplit), Just(Packing::Wrapped)
        ],
        is_free: bool,
        multiple_of in 1usize..9,
    ) {
        let samples = samples(&lengths);
        let padding =
            if is_free { Padding::Free { multiple_of } } else { Padding::Right { multiple_of } };
        let layout = SampleLayout { max_length: Some(max_length), packing, padding, pad_id: 998 };
        let Ok(rows) = SampleRows::new(samples.clone(), layout, "t") else {
            prop_assert!(lengths.iter().all(|length| *length < 2));
            return Ok(());
        };
        let again = SampleRows::new(samples.clone(), layout, "t").unwrap();
        prop_assert_eq!(rows.fingerprint().unwrap(), again.fingerprint().unwrap());
        // How often each pair of id and label occurs, except for first labels.
        let mut found: BTreeMap<i32, usize> = BTreeMap::new();
        let mut targets = 0;
        let indices: Vec<usize> = (0..rows.len()).collect();
        for batch in indices.chunks(3) {
            let batch = rows.collate(batch, 4).unwrap();
            let [num_rows, length] = batch.shape;
            prop_assert!(length.is_multiple_of(multiple_of));
            prop_assert_eq!((batch.input_ids.len(), batch.labels.len()), (num_rows * length, num_rows * length));
            targets += batch.num_targets();
            let RowDocuments::Separate(documents) = &batch.documents else { panic!("a stream") };
            prop_assert_eq!(documents.len(), num_rows);
            let positions = batch.position_ids();
            for (row, documents) in documents.iter().enumerate() {
                prop_assert!(is_free || documents.iter().sum::<usize>() <= max_length);
                let mut at = row * length;
                for document in documents {
                    prop_assert_eq!(batch.labels[at], IGNORE_INDEX);
                    prop_assert!(positions[at..at + document].iter().copied().eq(0..*document as u32));
                    for at in at..at + document {
                        prop_assert!([IGNORE_INDEX, batch.input_ids[at]].contains(&batch.labels[at]));
                        *found.entry(batch.input_ids[at]).or_default() += 1;
                    }
                    at += document;
                }
                prop_assert!(batch.input_ids[at..(row + 1) * length].iter().all(|id| *id == 998));
                prop_assert!(batch.labels[at..(row + 1) * length].iter().all(|it| *it == IGNORE_INDEX));
            }
        }
        let is_cut = matches!(packing, Packing::None | Packing::BestFit);
        let mut expected: BTreeMap<i32, usize> = BTreeMap::new();
        for index in 0..samples.len() {
            let ids = samples.get(index).unwrap().ids;
            let kept = if is_cut { ids.len().min(max_length) } else { ids.len() };
            // The first token is never predicted, so a sample of one token is left out.
            if packing == Packing::None && kept < 2 {
                continue;
            }
            ids[..kept].iter().for_each(|id| *expected.entry(*id as i32).or_default() += 1);
        }
        prop_assert_eq!(found, expected);
        let statistics = rows.statistics();
        prop_assert_eq!(statistics.trained_tokens, targets as u64);
        prop_assert_eq!(statistics.tokens, rows.lengths().iter().sum::<usize>() as u64);
        let over = lengths.iter().filter(|length| **length > max_length).count();
        prop_assert_eq!(statistics.truncated, if is_cut { over } else { 0 });
    }
}

#[test]
fn dropped_and_truncated_samples_are_counted_with_their_rows() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = |prompt: usize, trained: usize| {
        let labels = [vec![-100; prompt], vec![5; trained]].concat();
        json!({"ids": vec![5; prompt + trained], "labels": labels})
    };
    let rows = [prompt(2, 3), prompt(9, 1), prompt(4, 9), prompt(3, 0)];
    let splits = Splits::all(write_lines(folder.path(), "t.jsonl", &rows));
    let samples = open_samples(&source(&splits), encode).unwrap().train;
    let rows = SampleRows::new(samples.clone(), layout(Some(6)), "t").unwrap();
    let found = rows.statistics();
    assert_eq!((found.samples, found.truncated, found.rows), (4, 2, 2));
    assert_eq!((found.tokens, found.trained_tokens), (11, 5));
    assert_eq!((found.sample_lengths.longest(), found.row_lengths.longest()), (13, 6));
    let places: Vec<_> = found.dropped.iter().map(|it| samples.place(*it).number).collect();
    assert_eq!(places, [2, 4]);
    assert!(samples.place(1).to_string().ends_with("t.jsonl` line 2"));
    let packed = SampleLayout { packing: Packing::BestFit, ..layout(Some(6)) };
    let packed = SampleRows::new(samples.clone(), packed, "t").unwrap();
    assert_eq!((packed.statistics().dropped.len(), packed.statistics().untrained), (0, 2));
    // Nothing can be learned from prompts alone.
    let message =
        SampleRows::new(samples, layout(Some(2)), "the train split").unwrap_err().to_string();
    assert!(
        message.contains("none of 4 samples has a token that counts in the loss, 4 of them after"),
        "{message}"
    );
}

#[test]
fn layouts_that_contradict_themselves_are_refused() {
    let samples = samples(&[4, 5]);
    let of = |layout| SampleRows::new(samples.clone(), layout, "t").unwrap_err().to_string();
    assert!(of(layout(Some(1))).contains("data.sequence_length = 1"));
    let packed = SampleLayout { packing: Packing::Wrapped, ..layout(None) };
    assert!(of(packed).contains("packing (Wrapped) fills rows"));
    let zero = SampleLayout { padding: Padding::Free { multiple_of: 0 }, ..layout(None) };
    assert!(of(zero).contains("multiple of the padded length = 0"));
}

#[test]
fn a_curriculum_truncates_documents() {
    let packed = SampleLayout { packing: Packing::BestFit, ..layout(Some(9)) };
    let rows = SampleRows::new(samples(&[4, 5, 2]), packed, "t").unwrap();
    let mut batch = rows.collate(&[0, 1], 3).unwrap();
    assert_eq!((batch.num_tokens(), batch.shape), (11, [3, 9]));
    batch.truncate(6);
    assert_eq!(batch.documents, RowDocuments::Separate(vec![vec![5, 1], vec![2], vec![]]));
    assert_eq!((batch.row_lengths(), batch.shape), (vec![6, 2, 0], [3, 6]));
    assert_eq!(batch.position_ids(), [0, 1, 2, 3, 4, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    batch.truncate(5);
    assert_eq!(batch.row_lengths(), [5, 2, 0]);
}

/// Evaluation and dynamic batching work on samples as on other data.
#[test]
fn rows_are_evaluated_in_order_and_batched_by_budget() {
    let rows = SampleRows::new(samples(&[4, 5, 6, 7, 8]), layout(None), "t").unwrap();
    let mut targets = 0;
    for rank in 0..3 {
        let shard = DataShard { rank, num_ranks: 3 };
        let batches: Vec<_> =
            EvaluationBatches::new(&rows, shard, 1).unwrap().map(Result::unwrap).collect();
        assert_eq!(batches.len(), 2);
        assert_eq!(batches[0].input_ids[0], 31 * rank as i32);
        assert_eq!(batches[1].samples, usize::from(rank < 2));
        targets += batches.iter().map(|batch| batch.num_targets()).sum::<usize>();
    }
    assert_eq!(targets as u64, rows.statistics().trained_tokens);
    let mut sampler =
        BudgetSampler::new(rows.lengths(), TokenBudget::new(12), DataShard::WHOLE, 1).unwrap();
    assert_eq!(sampler.next_batch(), [0, 1]);
}
