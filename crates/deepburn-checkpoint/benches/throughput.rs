//! The throughput of checkpoints of GPT-2 124M: writing, verifying and reading, compared with
//! `dd conv=fsync` of the same bytes.
//!
//! ```text
//! cargo bench -p deepburn-checkpoint [-- FOLDER]
//! ```
//!
//! The benchmark runs with one and with two ranks, which are threads here. Rounds alternate between
//! `dd` and the crate, so load on the machine affects both; the median over the rounds is printed
//! together with the values of all rounds.
//!
//! - *save*: all ranks write at the same time, and the checkpoint is published. The time includes
//!   hashing and waiting for the disk.
//! - *verify*: every byte is read and hashed. The files were just written and are usually in the
//!   page cache, so the time is mostly spent hashing.
//! - *verify and load*: the same, and then every tensor is read.
//!
//! The values are not random. On a file system that compresses, both `dd` (zeros) and the save are
//! faster than with trained weights.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;
use std::{env, fs, thread};

use deepburn_checkpoint::{
    Checkpoint, ElementType, EntryKind, Layout, ParamEntry, RankWriter, Run, Save, StateKind,
    StoredState, Tag,
};
use serde_json::json;

/// The number of rounds of each measurement. It is odd, so that the median is one of the values.
const ROUNDS: usize = 5;

/// A result, or the error that ends the bench.
type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let folder = env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let parent = folder.map_or_else(env::temp_dir, PathBuf::from);
    let root = parent.join(format!("deepburn-checkpoint-bench-{}", std::process::id()));
    fs::create_dir(&root)?;
    let measured = [1, 2].into_iter().try_for_each(|ranks| measure(&root, ranks));
    fs::remove_dir_all(&root)?;
    measured
}

/// Measures `world_size` ranks and prints seconds and GB/s of each measurement.
fn measure(root: &Path, world_size: usize) -> Outcome<()> {
    let layout = Arc::new(Layout::new(gpt2(), world_size)?);
    let bytes: usize = (0..layout.entries().len()).map(|entry| layout.numel(entry) * 12).sum();
    println!("{world_size} ranks, {:.2} GB", bytes as f64 / 1e9);
    let values: Vec<f32> = (0..50257 * 768_u32).map(|i| i as f32 * 1e-9).collect();
    let mut seconds = vec![vec![]; 4];
    for _ in 0..ROUNDS {
        let checkpoints = root.join("checkpoints");
        let timed = [
            time(|| dd(&root.join("dd"), bytes))?,
            time(|| save(&checkpoints, &layout, &values))?,
            time(|| Ok(Checkpoint::open(&checkpoints, None)?.verify()?))?,
            time(|| load(&checkpoints))?,
        ];
        timed.iter().zip(&mut seconds).for_each(|(timed, all)| all.push(*timed));
        fs::remove_file(root.join("dd"))?;
        fs::remove_dir_all(checkpoints)?;
    }
    for (name, all) in ["dd", "save", "verify", "verify and load"].into_iter().zip(&mut seconds) {
        all.sort_by(f64::total_cmp);
        let median = all[ROUNDS / 2];
        println!("{name:>16}: {median:.2} s, {:.2} GB/s, {all:.2?}", bytes as f64 / median / 1e9);
    }
    Ok(())
}

/// Returns the wall-clock seconds of `work`.
fn time(work: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Writes `bytes` zeros to a file and flushes them, as a lower bound for the time of a save.
fn dd(path: &Path, bytes: usize) -> Outcome<()> {
    let status = Command::new("dd")
        .args(["if=/dev/zero", "bs=1M", "conv=fsync", "status=none", "iflag=count_bytes"])
        .arg(format!("of={}", path.display()))
        .arg(format!("count={bytes}"))
        .status()?;
    if status.success() { Ok(()) } else { Err("dd failed".into()) }
}

/// Writes a checkpoint with one thread per rank. The values of all tensors are prefixes of
/// `values`.
fn save(root: &Path, layout: &Arc<Layout>, values: &[f32]) -> Outcome<()> {
    let save = Save::begin(root, Tag::of_step(1), layout.clone())?;
    let write = |rank| -> Outcome<_> {
        let mut writer = RankWriter::create(save.ticket(), layout.clone(), rank)?;
        while let Some(segment) = writer.next_segment().cloned() {
            let entry = &layout.entries()[segment.entry];
            let kind = &entry.states[segment.state].kind;
            writer.write(&entry.path, kind, &values[segment.range])?;
        }
        Ok(writer.finish(json!({ "position": 0 }))?)
    };
    let records = thread::scope(|scope| {
        let write = &write;
        let ranks: Vec<_> =
            (0..layout.world_size()).map(|rank| scope.spawn(move || write(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<_, _>>()
    })?;
    let run = Run {
        step: 1,
        stage: 3,
        working: ElementType::F32,
        job: "throughput".into(),
        metric: None,
        state: json!({}),
    };
    save.commit(records, run)?;
    Ok(())
}

/// Verifies a checkpoint and reads every tensor, one at a time, into one buffer.
fn load(root: &Path) -> Outcome<()> {
    let checkpoint = Checkpoint::open(root, None)?;
    checkpoint.verify()?;
    let layout = checkpoint.layout();
    let mut values = vec![0_f32; 50257 * 768];
    for (index, entry) in layout.entries().iter().enumerate() {
        for stored in &entry.states {
            let values = &mut values[..layout.numel(index)];
            checkpoint.read_into(&entry.path, &stored.kind, 0, values)?;
        }
    }
    Ok(())
}

/// Returns the parameters of GPT-2 124M with masters and Adam's two moments, all in f32: 12 bytes
/// an element.
fn gpt2() -> Vec<ParamEntry> {
    let mut shapes = vec![("wte.weight".to_owned(), vec![50257, 768])];
    shapes.push(("wpe.weight".into(), vec![1024, 768]));
    for layer in 0..12 {
        for (name, shape) in [
            ("ln_1.weight", vec![768]),
            ("ln_1.bias", vec![768]),
            ("attn.c_attn.weight", vec![768, 2304]),
            ("attn.c_attn.bias", vec![2304]),
            ("attn.c_proj.weight", vec![768, 768]),
            ("attn.c_proj.bias", vec![768]),
            ("ln_2.weight", vec![768]),
            ("ln_2.bias", vec![768]),
            ("mlp.c_fc.weight", vec![768, 3072]),
            ("mlp.c_fc.bias", vec![3072]),
            ("mlp.c_proj.weight", vec![3072, 768]),
            ("mlp.c_proj.bias", vec![768]),
        ] {
            shapes.push((format!("h.{layer}.{name}"), shape));
        }
    }
    shapes.extend(["weight", "bias"].map(|name| (format!("ln_f.{name}"), vec![768])));
    let states: Vec<_> =
        [StateKind::Weights, StateKind::moment("exp_avg"), StateKind::moment("exp_avg_sq")]
            .map(|kind| StoredState { kind, element: ElementType::F32 })
            .into();
    let entry = |(path, shape)| ParamEntry {
        path,
        shape,
        kind: EntryKind::Parameter,
        trainable: true,
        aliases: vec![],
        states: states.clone(),
        base: None,
        pipeline_stage: 0,
    };
    shapes.into_iter().map(entry).collect()
}
