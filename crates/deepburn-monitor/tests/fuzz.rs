//! Fuzzes the log of an earlier W&B run, which a resumed run reads and shortens. The log is left
//! with its beginning, and the resumed run is written.

use std::fs;
use std::path::{Path, PathBuf};

use deepburn_fuzz::{Mutator, fuzz, scratch_folder};
use deepburn_monitor::metrics::StepRow;
use deepburn_monitor::{WandbOptions, WandbRun};
use serde_json::json;

/// The bytes of a file before its first record.
const HEADER: usize = 7;

fn options(resumed_after: u64) -> WandbOptions {
    WandbOptions {
        project: "deepspeed".to_owned(),
        config: json!({"seed": 42}),
        resumed_after,
        continues: resumed_after > 0,
        ..WandbOptions::default()
    }
}

fn write(folder: &Path, options: &WandbOptions, steps: &[u64]) -> PathBuf {
    let mut run = WandbRun::create(folder, options).unwrap();
    for &step in steps {
        run.step(step, &StepRow { step, loss: 0.5, ..StepRow::default() }).unwrap();
    }
    run.finish(0).unwrap();
    let log = fs::read_dir(run.folder()).unwrap().next().unwrap();
    log.unwrap().path()
}

/// Returns the content of each record of a file whose records are whole chunks.
fn contents(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut contents = Vec::new();
    bytes = &bytes[HEADER..];
    while let [_, _, _, _, low, high, 1, rest @ ..] = bytes {
        let (content, rest) = rest.split_at(usize::from(u16::from_le_bytes([*low, *high])));
        contents.push(content.to_vec());
        bytes = rest;
    }
    contents
}

/// Returns a chunk with the right checksum.
fn chunk(kind: u8, content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u16).to_le_bytes();
    let crc = crc32fast::hash(&[&[kind], content].concat()).to_le_bytes();
    [&crc[..], &length, &[kind], content].concat()
}

/// Mutates a file: its bytes, or the content of a record, whose checksum stays right.
fn mutated(sound: &[u8], mutator: &mut Mutator) -> Vec<u8> {
    let tokens = [
        &b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f"[..],
        b"\x12\xff\xff\xff\xff\x0f",
        b"NaN",
        b"1e999",
    ];
    if mutator.below(4) == 0 {
        let mut bytes = sound.to_vec();
        mutator.mutate(&mut bytes, &tokens);
        return bytes;
    }
    let mut contents = contents(sound);
    let index = mutator.below(contents.len());
    mutator.mutate(&mut contents[index], &tokens);
    let mut bytes = sound[..HEADER].to_vec();
    for content in contents {
        let kind = if mutator.below(20) == 0 { mutator.below(6) as u8 } else { 1 };
        bytes.extend(chunk(kind, &content[..content.len().min(30_000)]));
    }
    bytes
}

#[test]
fn logs_of_earlier_runs_are_shortened_or_left() {
    let folder = scratch_folder();
    let sound = fs::read(write(folder.path(), &options(0), &[1, 2, 3])).unwrap();
    assert!(contents(&sound).len() > 8);
    fuzz(2000, |mutator| {
        let folder = scratch_folder();
        let log = folder.path().join("offline-run-20261126_120000-abcd1234/run-abcd1234.wandb");
        fs::create_dir(log.parent().unwrap()).unwrap();
        let bytes = mutated(&sound, mutator);
        fs::write(&log, &bytes).unwrap();
        write(folder.path(), &options(2), &[3, 4]);
        let left = fs::read(&log).unwrap();
        assert!(bytes.starts_with(&left));
    });
}
