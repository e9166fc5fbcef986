//! Rows and batches are the same as in TRL 1.16. `trl_packing.json` was made by
//! `make_trl_packing.py`, `trl_batches.json` by runs of `SFTTrainer` on small conversations.

use deepburn_datasets::{
    BatchLoader, Collate, EpochSampler, MicroBatch, Order, Packing, Padding, RowDocuments,
    SampleLayout, SampleRows, Splits, StepShape, open_samples,
};
use serde_json::{Value, json};

use super::{data, encode, source, write_lines};

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|it| it.as_i64().unwrap()).collect()
}

fn integer(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

/// Packs samples of ids and labels.
fn rows(samples: &[Value], layout: SampleLayout) -> SampleRows {
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<Value> =
        samples.iter().map(|it| json!({"ids": it[0], "labels": it[1]})).collect();
    let splits = Splits::all(write_lines(folder.path(), "t.jsonl", &lines));
    let samples = open_samples(&source(&splits), encode).unwrap();
    SampleRows::new(samples.train, layout, "the train split").unwrap()
}

fn packing(strategy: Option<&str>, is_packed: bool) -> Packing {
    match strategy {
        _ if !is_packed => Packing::None,
        None | Some("bfd") => Packing::BestFit,
        Some("bfd_split") => Packing::BestFitSplit,
        Some("wrapped") => Packing::Wrapped,
        Some(other) => panic!("strategy {other}"),
    }
}

//= trl 1.16.0 data_utils.py _pack_bfd
//= trl 1.16.0 data_utils.py _pack_wrapped
#[test]
fn rows_are_packed_as_by_trl() {
    let cases = data("trl_packing.json");
    for case in cases.as_array().unwrap() {
        let lengths = case["lengths"].as_array().unwrap();
        // The labels tell the samples and their tokens apart.
        let sample = |(index, length): (usize, &Value)| {
            let ids = vec![index as i64 % 1000; integer(length)];
            json!([ids, ids])
        };
        let samples: Vec<Value> = lengths.iter().enumerate().map(sample).collect();
        let packing = packing(case["strategy"].as_str(), true);
        let (padding, max_length) =
            (Padding::Right { multiple_of: 1 }, integer(&case["max_length"]));
        let rows = rows(
            &samples,
            SampleLayout { max_length: Some(max_length), packing, padding, pad_id: 0 },
        );
        let expected = case["rows"].as_array().unwrap();
        assert_eq!(rows.len(), expected.len());
        for (index, row) in expected.iter().enumerate() {
            let segments: Vec<Vec<i64>> = row.as_array().unwrap().iter().map(numbers).collect();
            let samples: Vec<usize> = segments.iter().map(|it| it[0] as usize).collect();
            assert_eq!(rows.samples_of(index), samples, "{packing:?} {max_length} row {index}");
            let batch = rows.collate(&[index], 1).unwrap();
            let ids =
                segments.iter().flat_map(|it| vec![it[0] as i32 % 1000; (it[2] - it[1]) as usize]);
            assert!(batch.input_ids.iter().copied().eq(ids));
            let documents: Vec<usize> =
                segments.iter().map(|it| (it[2] - it[1]) as usize).collect();
            let documents = match packing {
                Packing::Wrapped => vec![documents.iter().sum()],
                _ => documents,
            };
            assert_eq!(batch.documents, RowDocuments::Separate(vec![documents]));
        }
    }
}

/// The layout of a run of the trainer.
fn layout_of(run: &Value) -> SampleLayout {
    let options = &run["options"];
    let packing = packing(options["packing_strategy"].as_str(), options["packing"] == true);
    let multiple_of = options["pad_to_multiple_of"].as_u64().unwrap_or(1) as usize;
    let is_free = options["padding_free"] == true
        || matches!(packing, Packing::BestFit | Packing::BestFitSplit);
    let padding =
        if is_free { Padding::Free { multiple_of } } else { Padding::Right { multiple_of } };
    let max_length = run["max_length"].as_u64().map(|length| length as usize);
    SampleLayout { max_length, packing, padding, pad_id: integer(&run["pad"]) as u32 }
}

/// Labels of the trainer, without the first one of each row: it has no token before it, so the loss
/// does not include it.
fn labels(rows: &Value) -> Vec<i64> {
    let rows = rows.as_array().unwrap().iter().map(numbers);
    rows.flat_map(|mut row| {
        row[0] = -100;
        row
    })
    .collect()
}

fn ids(rows: &Value) -> Vec<i64> {
    rows.as_array().unwrap().iter().flat_map(numbers).collect()
}

fn widened(numbers: &[i32]) -> Vec<i64> {
    numbers.iter().map(|it| (*it).into()).collect()
}

/// Compares a batch of the trainer.
fn check_batch(found: &MicroBatch, expected: &Value, name: &str) {
    assert_eq!(widened(&found.input_ids), ids(&expected["input_ids"]), "{name}");
    assert_eq!(widened(&found.labels), labels(&expected["labels"]), "{name}");
    match expected.get("position_ids") {
        Some(positions) => {
            let found: Vec<i64> = found.position_ids().into_iter().map(i64::from).collect();
            assert_eq!(found, ids(positions), "{name}");
        }
        None => {
            let found: Vec<i64> = found.row_lengths().iter().map(|it| *it as i64).collect();
            assert_eq!(found, numbers(&expected["lengths"]), "{name}");
        }
    }
}

#[test]
fn prepared_rows_and_batches_equal_the_trainers() {
    let data = data("trl_batches.json");
    for run in data["runs"].as_array().unwrap() {
        let name = run["name"].as_str().unwrap();
        let samples = data["samples"][run["samples"].as_str().unwrap()].as_array().unwrap();
        let rows = rows(samples, layout_of(run));
        let prepared = run["prepared"].as_array().unwrap();
        assert_eq!(rows.len(), prepared.len(), "{name}");
        for (index, row) in prepared.iter().enumerate() {
            let found = rows.collate(&[index], 1).unwrap();
            // The trainer pads batches, not prepared rows.
            let length = row[0].as_array().unwrap().len();
            assert_eq!(widened(&found.input_ids[..length]), numbers(&row[0]), "{name} {index}");
            let mut expected = numbers(&row[1]);
            let lengths = row[2].as_array().cloned().unwrap_or_else(|| vec![json!(length)]);
            let mut start = 0;
            for document in &lengths {
                expected[start] = -100;
                start += integer(document);
            }
            assert_eq!(widened(&found.labels[..length]), expected, "{name} {index}");
            let lengths = vec![lengths.iter().map(integer).collect()];
            assert_eq!(found.documents, RowDocuments::Separate(lengths), "{name} {index}");
        }
        check_steps(rows, run, name);
    }
}

/// Compares the first micro-batches, which go beyond an epoch in some runs.
fn check_steps(rows: SampleRows, run: &Value, name: &str) {
    let accumulation = integer(&run["accumulation"]);
    let shape = StepShape { num_ranks: 1, accumulation };
    let micro_batch = integer(&run["micro_batch"]);
    let sampler = EpochSampler::new(rows.len(), 0, shape, micro_batch, Order::Sequential).unwrap();
    let mut loader = BatchLoader::drawing(rows, sampler, 2).unwrap();
    let mut expected = run["micro_batches"].as_array().unwrap().iter();
    assert!(expected.len() > 0);
    loop {
        // The trainer leaves out micro-batches without samples.
        let (filled, mut step) = (loader.sampler().step_batches(), Vec::new());
        for index in 0..accumulation {
            let batch = loader.next_batch().unwrap();
            match index < filled {
                true => step.push(batch),
                false => assert_eq!((batch.samples, batch.num_targets()), (0, 0)),
            }
        }
        let targets: usize = step.iter().map(MicroBatch::num_targets).sum();
        for batch in &step {
            let Some(expected) = expected.next() else { return };
            check_batch(batch, expected, name);
            assert_eq!(targets, integer(&expected["num_items_in_batch"]), "{name}");
        }
    }
}
