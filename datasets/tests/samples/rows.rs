//! Rows that cannot become samples: an error with their place, or skipped and counted.

use super::*;

#[test]
fn the_first_invalid_row_is_an_error_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.jsonl");
    let splits = Splits::all(&path);
    for (row, expected) in [
        (r#"{"ids": [1], "labels": "x"}"#, "field `labels` is not an array"),
        (r#"{"ids": [1]}"#, "field `labels` is not an array"),
        (r#"{"ids": [1, 2], "labels": [1]}"#, "has 2 tokens, but 1 marks"),
        (r#"{"ids": [1000], "labels": [1]}"#, "has id 1000 at token 0"),
        (r#"{"ids": "\udc00", "labels": [1]}"#, "field `ids`: lone"),
        (r#"{"ids": [NaN], "labels": [1]}"#, "field `ids` has the number NaN"),
        (r#"{"ids": [1], "labels": [1]"#, "not valid JSON"),
        ("[1]", "found an array, not an object"),
    ] {
        let sound = "{\"ids\": [1, 2], \"labels\": [1, 2]}\n";
        fs::write(&path, format!("{sound}\n{row}\n{sound}")).unwrap();
        let message = open_samples(&source(&splits), encode).unwrap_err().to_string();
        assert!(message.contains("t.jsonl` line 3: ") && message.contains(expected), "{message}");
        // The errors of `encode`, which are about fields, have their own remedy.
        let is_of_encoder = expected.starts_with("field `labels` is");
        assert!(!message.contains('\n'), "{message}");
        assert_eq!(message.contains("; correct or remove the row"), !is_of_encoder, "{message}");

        let skipped = SampleSource { invalid: InvalidRows::Skip, ..source(&splits) };
        let samples = open_samples(&skipped, encode).unwrap().train;
        assert_eq!((samples.len(), samples.num_invalid(), samples.place(1).number), (2, 1, 4));
        let (place, reason) = samples.invalid_rows().next().unwrap();
        assert!(place.number == 3 && reason.contains(expected), "{place}: {reason}");
    }
}

#[test]
fn files_without_a_sample_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.jsonl");
    let splits = Splits::all(&path);
    fs::write(&path, "").unwrap();
    let message = open_samples(&source(&splits), encode).unwrap_err().to_string();
    assert!(message.contains("t.jsonl is empty"), "{message}");
    fs::write(&path, "{}\n\n[]\n").unwrap();
    let skipped = SampleSource { invalid: InvalidRows::Skip, ..source(&splits) };
    let message = open_samples(&skipped, encode).unwrap_err().to_string();
    let first =
        format!("all of its 2 rows are invalid; the first one is `{}` line 1: ", path.display());
    assert!(message.contains(&first), "{message}");
    let missing = Splits::all(folder.path().join("missing"));
    assert!(matches!(open_samples(&source(&missing), encode), Err(DataError::Unreadable { .. })));
}

/// Rows keep their order for any number of threads, and their file.
#[test]
fn folders_are_read_in_order_and_split_between_samples() {
    let folder = tempfile::tempdir().unwrap();
    let row =
        |id: usize| serde_json::json!({"ids": vec![id; 1 + id % 7], "labels": vec![1; 1 + id % 7]});
    let rows = |ids: std::ops::Range<usize>| ids.map(row).collect::<Vec<_>>();
    write_lines(folder.path(), "a.jsonl", &rows(0..400));
    write_lines(folder.path(), "c.ndjson", &rows(400..1000));
    fs::write(folder.path().join("b.jsonl"), "").unwrap();
    fs::write(folder.path().join("d.jsonl"), "").unwrap();
    fs::write(folder.path().join("README.md"), "about").unwrap();
    let fractions = Fractions { train: 0.5, eval: 0.25, test: 0.0 };
    let splits = Splits::Shares { files: vec![folder.path().to_owned()], fractions };
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let samples = pool.install(|| open_samples(&source(&splits), encode)).unwrap();
        let eval = samples.eval.unwrap();
        assert_eq!((samples.train.len(), eval.len(), samples.test.is_none()), (500, 250, true));
        for index in 0..500 {
            assert_eq!(samples.train.get(index).unwrap().ids, vec![index as u32; 1 + index % 7]);
        }
        assert_eq!(eval.get(3).unwrap().ids[0], 503);
        let place = eval.place(3);
        assert_eq!(
            (place.file.file_name().unwrap().to_str(), place.number),
            (Some("c.ndjson"), 104)
        );
    }
}

/// `nested.parquet` was written by pyarrow, and `nested.json` has the rows that it reads back.
#[test]
fn nested_columns_of_parquet_are_json() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/nested.parquet");
    let splits = Splits::all(&path);
    let fields = ["messages", "tools", "options", "large", "count"].map(str::to_owned);
    let wanted = SampleSource { fields: Some(&fields), ..source(&splits) };
    let rows = std::sync::Mutex::new(Vec::new());
    let keep = |row: DataRow| {
        rows.lock().unwrap().push((row.place.number, Value::Object(row.fields)));
        Ok::<_, String>(Sample::all_trained(vec![1]))
    };
    open_samples(&wanted, keep).unwrap();
    let mut rows = rows.into_inner().unwrap();
    rows.sort_by_key(|row| row.0);
    let rows: Vec<Value> = rows.into_iter().map(|row| row.1).collect();
    let mut expected = data("nested.json");
    for row in expected.as_array_mut().unwrap() {
        // Errors name the columns that are not read, which are null.
        row["day"] = Value::Null;
    }
    assert_eq!(Value::Array(rows), expected);

    // A date is not JSON; it only matters where it is read.
    let message = open_samples(&source(&splits), encode).unwrap_err().to_string();
    assert!(message.contains("row 1: field `day` has a date"), "{message}");
    let other = ["prompt".to_owned()];
    let wanted = SampleSource { fields: Some(&other), ..source(&splits) };
    let message = open_samples(&wanted, encode).unwrap_err().to_string();
    assert!(message.contains("has none of the columns [`prompt`], only [`messages`"), "{message}");
}
