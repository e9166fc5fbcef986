//! Tests of W&B runs, with a reader that shares no code with the writer.

use std::fs::OpenOptions;

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Returns the records of a log, parsed as the format specifies, and the bytes after the last
/// complete one.
fn records(bytes: &[u8]) -> (Vec<Vec<u8>>, usize) {
    assert_eq!(bytes[..7], *b":W&B\xE1\xBE\0");
    let (mut at, mut records, mut complete) = (7, Vec::new(), 7);
    // The parts of a record that has begun, which may be empty.
    let mut parts: Option<Vec<u8>> = None;
    loop {
        let left = 32768 - at % 32768;
        if left < 7 {
            assert!(bytes[at..bytes.len().min(at + left)].iter().all(|byte| *byte == 0));
            at += left;
        }
        let Some(header) = bytes.get(at..at + 7) else { break };
        let length = usize::from(header[4]) + 256 * usize::from(header[5]);
        assert!(at % 32768 + 7 + length <= 32768, "a chunk lies in one block");
        let Some(data) = bytes.get(at + 7..at + 7 + length) else { break };
        let crc = u32::from_le_bytes(header[..4].try_into().unwrap());
        assert_eq!(crc, bitwise_crc(&bytes[at + 6..at + 7 + length]));
        at += 7 + length;
        let kind = header[6];
        assert_eq!(matches!(kind, 1 | 2), parts.is_none(), "kind {kind}");
        parts.get_or_insert_default().extend(data);
        if matches!(kind, 1 | 4) {
            records.extend(parts.take());
            complete = at;
        }
    }
    (records, bytes.len() - complete.min(bytes.len()))
}

/// Computes the CRC-32 of zip bit by bit.
fn bitwise_crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| (crc >> 1) ^ (0xEDB8_8320 * (crc & 1));
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// A field of a message: a number, or bytes.
#[derive(Debug, Clone, PartialEq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Field {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(number) => panic!("{number} is not a message"),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }
}

/// Returns the fields of a protocol buffer.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return value;
            }
        }
        unreachable!("a varint ends")
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            2 => {
                let length = varint(&mut bytes) as usize;
                let content = bytes[..length].to_vec();
                bytes = &bytes[length..];
                Field::Bytes(content)
            }
            wire => panic!("wire type {wire}"),
        };
        fields.push((key >> 3, field));
    }
    fields
}

/// Returns the fields with a number.
fn all(fields: &[(u64, Field)], number: u64) -> Vec<Field> {
    fields.iter().filter(|(it, _)| *it == number).map(|(_, field)| field.clone()).collect()
}

/// Returns the only field with a number.
fn one(fields: &[(u64, Field)], number: u64) -> Option<Field> {
    let found = all(fields, number);
    assert!(found.len() < 2, "{found:?}");
    found.into_iter().next()
}

/// Returns the keys and values of items.
fn items(record: &[u8]) -> Vec<(String, String)> {
    let item = |item: Field| {
        let item = fields(item.bytes());
        let nested: Vec<_> = all(&item, 2).iter().map(Field::text).collect();
        let key = one(&item, 1).map_or(nested.join("."), |key| key.text());
        (key, one(&item, 16).unwrap().text())
    };
    all(&fields(record), 1).into_iter().map(item).collect()
}

/// A log that was read.
#[derive(Debug, Default)]
struct ReadLog {
    run: Vec<(u64, Field)>,
    config: Vec<(String, String)>,
    /// Step, and items without times.
    rows: Vec<(u64, Vec<(String, String)>)>,
    runtimes: Vec<f64>,
    summary: std::collections::BTreeMap<String, String>,
    exit_code: Option<u64>,
}

impl ReadLog {
    fn text(&self, number: u64) -> String {
        one(&self.run, number).map_or(String::new(), |field| field.text())
    }

    fn number(&self, number: u64) -> u64 {
        match one(&self.run, number) {
            Some(Field::Number(number)) => number,
            _ => 0,
        }
    }

    fn steps(&self) -> Vec<u64> {
        self.rows.iter().map(|(step, _)| *step).collect()
    }

    fn value(&self, step: u64, key: &str) -> Option<String> {
        let (_, row) = self.rows.iter().find(|(it, _)| *it == step)?;
        row.iter().find(|(it, _)| it == key).map(|(_, value)| value.clone())
    }
}

fn read(folder: &Path) -> ReadLog {
    let id = folder.to_str().unwrap().rsplit_once('-').unwrap().1;
    read_bytes(&fs::read(folder.join(format!("run-{id}.wandb"))).unwrap())
}

fn read_bytes(bytes: &[u8]) -> ReadLog {
    let mut log = ReadLog::default();
    for (index, record) in records(bytes).0.iter().enumerate() {
        let record = fields(record);
        assert_eq!(record[0], (1, Field::Number(index as u64 + 1)));
        assert_eq!(record.len(), 2);
        let (kind, content) = (record[1].0, record[1].1.bytes());
        match kind {
            21 => {
                assert_eq!(index, 0);
                let version = fields(one(&fields(content), 1).unwrap().bytes());
                assert_eq!(one(&version, 1).unwrap().text(), "deepburn-0.1");
                assert_eq!(one(&version, 2).unwrap().text(), "0.70.0");
            }
            17 => {
                assert_eq!(index, 1);
                log.run = fields(content);
                log.config = items(one(&log.run, 4).unwrap().bytes());
            }
            2 => {
                let mut row = items(content);
                let Field::Number(step) = fields(one(&fields(content), 2).unwrap().bytes())[0].1
                else {
                    panic!("a step is a number");
                };
                let own = |row: &[(String, String)], key: &str| {
                    row.iter().find(|(it, _)| it == key).unwrap().1.parse::<f64>().unwrap()
                };
                assert_eq!(own(&row, "_step"), step as f64);
                assert!(own(&row, "_timestamp") > 1.7e9);
                log.runtimes.push(own(&row, "_runtime"));
                row.retain(|(key, _)| !key.starts_with('_'));
                log.rows.push((step, row));
            }
            3 => log.summary.extend(items(content)),
            18 => {
                let exit = fields(content);
                let code = one(&exit, 1).unwrap_or(Field::Number(0));
                log.exit_code = Some(if let Field::Number(code) = code { code } else { panic!() });
            }
            kind => panic!("record {kind}"),
        }
    }
    log
}

fn options() -> WandbOptions {
    WandbOptions {
        project: "deepspeed".to_owned(),
        team: Some("Köln".to_owned()),
        group: Some("grüße 🦀".to_owned()),
        name: "gpt2".to_owned(),
        producer: "deepburn-0.1".to_owned(),
        config: json!({"training": {"seed": 42, "name": "日本語"}, "lr": 0.001, "none": null}),
        ..WandbOptions::default()
    }
}

fn resumed(step: u64) -> WandbOptions {
    WandbOptions { resumed_after: step, continues: true, ..options() }
}

fn step(step: u64) -> StepRow {
    StepRow {
        step,
        loss: 2.5 / step as f64,
        lr: 1e-7,
        grad_norm: (step != 2).then_some(0.75),
        loss_scale: 65536.0,
        tokens_per_second: 2048.0,
        ..StepRow::default()
    }
}

fn evaluation(step: u64) -> EvalRow {
    EvalRow { step, eval_loss: 1.5, eval_accuracy: Some(0.5), ..EvalRow::default() }
}

/// A run of some steps that ends with an exit code, or is killed.
fn run(folder: &Path, options: &WandbOptions, steps: &[u64], exit: Option<i32>) -> PathBuf {
    let mut run = WandbRun::create(folder, options).unwrap();
    for &number in steps {
        run.step(32 * number, &step(number)).unwrap();
    }
    if let Some(code) = exit {
        run.finish(code).unwrap();
    }
    let folder = run.folder().to_owned();
    std::mem::forget(run);
    folder
}

#[test]
fn a_reader_of_its_own_reads_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let wandb = folder.path().join("output/wandb");
    let mut run = WandbRun::create(&wandb, &options()).unwrap();
    run.step(32, &step(1)).unwrap();
    run.step(64, &step(2)).unwrap();
    run.evaluation(&evaluation(2)).unwrap();
    let odd = StepRow {
        loss: f64::NAN,
        grad_norm: Some(f64::INFINITY),
        lr: f64::NEG_INFINITY,
        ..step(3)
    };
    run.step(96, &odd).unwrap();
    run.test(&EvalRow { eval_f1: Some(0.25), ..evaluation(3) }).unwrap();
    run.finish(3).unwrap();
    run.finish(0).unwrap();

    assert_eq!(run.upload_folder(), run.folder());
    let name = run.folder().file_name().unwrap().to_str().unwrap().to_owned();
    let (time, id) = name.strip_prefix("offline-run-").unwrap().split_at(15);
    let id = id.strip_prefix('-').unwrap();
    assert!(chrono::NaiveDateTime::parse_from_str(time, "%Y%m%d_%H%M%S").is_ok(), "{time}");
    assert!(id.len() == 8 && id.bytes().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit()));
    let log = read(run.folder());
    let texts = [1, 2, 3, 6, 8].map(|number| log.text(number));
    assert_eq!(texts, [id, "Köln", "deepspeed", "grüße 🦀", "gpt2"]);
    assert!(!log.text(13).is_empty() && log.number(14) == 0 && log.number(24) == 0);
    let text = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let training = r#"{"seed":42,"name":"日本語"}"#;
    assert_eq!(log.config, [text("training", training), text("lr", "0.001"), text("none", "null")]);

    assert_eq!(log.steps(), [1, 2, 3]);
    let first = [
        text("train/loss", "2.5"),
        text("train/learning_rate", "1e-7"),
        text("train/tokens_per_second", "2048.0"),
        text("train/samples", "32"),
        text("train/grad_norm", "0.75"),
    ];
    assert_eq!(log.rows[0].1, first);
    assert_eq!(log.value(2, "train/grad_norm"), None);
    assert_eq!(log.value(2, "eval/loss").unwrap(), "1.5");
    assert_eq!(log.value(2, "eval/accuracy").unwrap(), "0.5");
    assert_eq!(log.value(2, "eval/f1"), None);
    let odd = ["train/loss", "train/grad_norm", "train/learning_rate"];
    assert_eq!(odd.map(|key| log.value(3, key).unwrap()), ["NaN", "Infinity", "-Infinity"]);
    assert_eq!(log.summary["train/loss"], "NaN");
    assert_eq!(log.summary["eval/loss"], "1.5");
    assert_eq!(log.summary["test/f1"], "0.25");
    assert_eq!(log.summary["_step"], "3");
    assert_eq!(log.summary["_wandb.runtime"], "0");
    assert_eq!(log.exit_code, Some(3));
}

#[test]
fn the_loss_scale_and_rewards_are_written_if_there_are_any() {
    let folder = tempfile::tempdir().unwrap();
    let options = WandbOptions { loss_scale: true, ..options() };
    let mut run = WandbRun::create(folder.path(), &options).unwrap();
    let row = StepRow { rewards_chosen: Some(0.5), rewards_margins: Some(1.5), ..step(1) };
    run.step(1, &row).unwrap();
    run.evaluation(&EvalRow { rewards_accuracies: Some(0.75), ..evaluation(1) }).unwrap();
    run.finish(0).unwrap();
    let log = read(run.folder());
    let value = |key| log.value(1, key).unwrap();
    assert_eq!(value("train/loss_scale"), "65536.0");
    assert_eq!(value("train/rewards/chosen"), "0.5");
    assert_eq!(value("train/rewards/margins"), "1.5");
    assert_eq!(value("eval/rewards/accuracies"), "0.75");
    assert_eq!(log.value(1, "train/rewards/rejected"), None);
}

#[test]
fn every_step_but_the_last_is_in_the_file_of_a_killed_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = WandbRun::create(folder.path(), &options()).unwrap();
    for number in 1..=3 {
        run.step(number, &step(number)).unwrap();
        assert_eq!(read(run.folder()).steps(), (1..number).collect::<Vec<_>>());
    }
    assert_eq!(read(run.folder()).exit_code, None);
    assert_eq!(read(run.folder()).summary["_step"], "2");
    // A run that fails is dropped.
    let path = run.folder().to_owned();
    drop(run);
    let log = read(&path);
    assert_eq!((log.steps(), log.exit_code), (vec![1, 2, 3], Some(1)));
}

#[test]
fn a_file_is_readable_up_to_any_byte() {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"long": "x".repeat(70_000)});
    let options = WandbOptions { config, ..options() };
    let path = run(folder.path(), &options, &[1, 2, 3], Some(0));
    let id = path.to_str().unwrap().rsplit_once('-').unwrap().1;
    let bytes = fs::read(path.join(format!("run-{id}.wandb"))).unwrap();
    for length in (7..bytes.len()).step_by(11) {
        let own = transaction_log::StoredRecords::new(&bytes[..length]);
        let (records, rest) = records(&bytes[..length]);
        let ends: Vec<_> = own.map(|stored| (stored.start, stored.end)).collect();
        assert_eq!(ends.len(), records.len());
        let end = ends.last().map_or(7, |(_, end)| *end);
        assert_eq!(length as u64 - end, rest as u64);
    }
}

/// `/dev/full` is a disk that is always full.
#[test]
#[cfg(target_os = "linux")]
fn rows_wait_for_room_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = WandbRun::create(folder.path(), &options()).unwrap();
    run.step(1, &step(1)).unwrap();
    let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
    let file = run.log.file.swap(full);
    for number in [2, 3] {
        let error = run.step(number, &step(number)).unwrap_err();
        assert!(error.is_disk_full() && error.to_string().contains("offline-run-"), "{error}");
    }
    run.log.file.swap(file);
    run.step(4, &step(4)).unwrap();
    run.finish(0).unwrap();
    assert_eq!(read(run.folder()).steps(), [1, 2, 3, 4]);
}

#[test]
fn a_resumed_run_continues_the_newest_run() {
    let folder = tempfile::tempdir().unwrap();
    let other = run(folder.path(), &options(), &[1, 2], Some(0));
    // Another second, so that the names tell which one is newer.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let first = run(folder.path(), &options(), &[1, 2, 3, 4, 5], None);
    let untouched = read(&other).steps();

    let mut second = WandbRun::create(folder.path(), &resumed(3)).unwrap();
    assert!(!second.repeats_uploaded_steps());
    assert_eq!(second.upload_folder(), folder.path());
    // The evaluation after the step is repeated.
    second.evaluation(&evaluation(3)).unwrap();
    second.step(128, &step(4)).unwrap();
    second.finish(0).unwrap();
    assert_eq!(read(&other).steps(), untouched);
    assert_eq!(read(&first).steps(), [1, 2]);
    assert_eq!(read(&first).exit_code, None);
    let log = read(second.folder());
    assert_ne!(second.folder(), first);
    assert_eq!((log.text(1), log.number(14), log.number(24)), (read(&first).text(1), 3, 1));
    assert_eq!(log.steps(), [3, 4]);
    let both = ["train/loss", "eval/loss"].map(|key| log.value(3, key).unwrap());
    assert_eq!(both, ["0.8333333333333334", "1.5"]);
    assert!(log.runtimes[1] >= log.runtimes[0]);

    // A third part goes back to a step of the first one.
    let third = run(folder.path(), &resumed(1), &[2, 3], Some(0));
    assert_eq!(read(&first).steps(), [] as [u64; 0]);
    assert_eq!(read(second.folder()).steps(), [] as [u64; 0]);
    assert_eq!(read(&third).steps(), [1, 2, 3]);
}

#[test]
fn rows_that_are_uploaded_stay() {
    let folder = tempfile::tempdir().unwrap();
    let first = run(folder.path(), &options(), &[1, 2, 3], Some(0));
    let id = read(&first).text(1);
    fs::write(first.join(format!("run-{id}.wandb.synced")), "").unwrap();
    let continued = run(folder.path(), &resumed(4), &[5], Some(0));
    assert_eq!((read(&continued).number(14), read(&continued).number(24)), (5, 1));
    // The evaluation after an uploaded step may be repeated.
    let same = WandbRun::create(folder.path(), &resumed(3)).unwrap();
    assert!(!same.repeats_uploaded_steps());
    assert_eq!((read(same.folder()).number(14), read(same.folder()).number(24)), (4, 0));
    let again = WandbRun::create(folder.path(), &resumed(2)).unwrap();
    assert!(again.repeats_uploaded_steps());
    let log = read(again.folder());
    assert_eq!((log.text(1), log.number(14), log.number(24)), (id, 3, 0));
    assert_eq!(read(&first).steps(), [1, 2, 3]);
    assert_eq!(read(&continued).steps(), [] as [u64; 0]);
}

#[test]
fn a_run_without_an_earlier_one_is_new() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("offline-run-x")).unwrap();
    fs::create_dir_all(folder.path().join("offline-run-20261126_120000-noLog")).unwrap();
    let log = read(&run(folder.path(), &resumed(7), &[8], Some(0)));
    assert_eq!((log.number(14), log.number(24)), (8, 0));
    let fresh = read(&run(folder.path(), &options(), &[1], Some(0)));
    assert_ne!(fresh.text(1), log.text(1));
}

#[test]
fn the_rest_of_a_damaged_log_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let first = run(folder.path(), &options(), &[1, 2, 3], None);
    let log = first.join(format!("run-{}.wandb", read(&first).text(1)));
    let whole = fs::read(&log).unwrap();
    fs::write(&log, &whole[..whole.len() - 5]).unwrap();
    let second = run(folder.path(), &resumed(9), &[10], Some(0));
    let (records, rest) = records(&fs::read(&log).unwrap());
    // Without the summary of the second row, which was incomplete.
    assert_eq!((records.len(), rest), (5, 0));
    assert_eq!(read(&second).steps(), [10]);
    // A file without any record is left alone.
    fs::write(&log, "no log").unwrap();
    run(folder.path(), &resumed(9), &[10], Some(0));
    assert_eq!(fs::read(&log).unwrap(), b"no log");
}

#[test]
fn errors_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let taken = folder.path().join("wandb");
    fs::write(&taken, "").unwrap();
    let message = WandbRun::create(&taken, &options()).unwrap_err().to_string();
    assert!(message.contains("wandb"), "{message}");
}

proptest! {
    /// Records of all lengths, around the ends of blocks too.
    #[test]
    fn records_of_any_length_are_read_back(
        lengths in prop::collection::vec(
            prop_oneof![0..40_usize, 32_600..32_800_usize, 65_300..65_600_usize], 1..12),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = TransactionLog::create(&path).unwrap();
        let record = |length: usize| RecordKind::Header(HeaderRecord {
            version_info: Some(VersionInfo { producer: "é".repeat(length), min_consumer: String::new() }),
        });
        for &length in &lengths {
            log.append(vec![record(length)]).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        let (contents, rest) = records(&bytes);
        prop_assert_eq!(rest, 0);
        let stored: Vec<_> = transaction_log::StoredRecords::new(&bytes).collect();
        prop_assert_eq!((contents.len(), stored.len()), (lengths.len(), lengths.len()));
        for ((content, stored), length) in contents.iter().zip(stored).zip(lengths) {
            let header = fields(one(&fields(content), 21).unwrap().bytes());
            let version = fields(one(&header, 1).map_or(Vec::new(), |it| it.bytes().to_vec()).as_slice());
            let text = one(&version, 1).map_or(String::new(), |it| it.text());
            prop_assert_eq!(text.len(), 2 * length);
            prop_assert_eq!(stored.record.kind.unwrap(), record(length));
        }
    }

    /// Damaged bytes end the records before them, without a panic.
    #[test]
    fn damage_ends_the_records(at in 0..3000_usize, byte in any::<u8>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = run(folder.path(), &options(), &[1, 2, 3], Some(0));
        let id = path.to_str().unwrap().rsplit_once('-').unwrap().1;
        let mut bytes = fs::read(path.join(format!("run-{id}.wandb"))).unwrap();
        let whole = transaction_log::StoredRecords::new(&bytes).count();
        let at = at % bytes.len();
        let is_changed = bytes[at] != byte;
        bytes[at] = byte;
        let left = transaction_log::StoredRecords::new(&bytes).count();
        prop_assert!(left < whole || !is_changed, "{left} of {whole}");
    }
}
