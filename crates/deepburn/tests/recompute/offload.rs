//! Activation offload: what leaves the device, what stays, and a disk that fails.

use std::path::{Path, PathBuf};

use deepburn::zero::{Category, Tier, Usage};

use crate::{ACTIVATION, BATCH, Net, POLICIES, Stack, input, train, with_engine};

/// A section that keeps activations of at least `threshold` bytes on NVMe.
pub(crate) fn to_nvme(policy: &str, threshold: usize) -> String {
    to_folder(policy, threshold, Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn to_folder(policy: &str, threshold: usize, folder: &Path) -> String {
    format!(
        r#"{{"policy": "{policy}", "nvme_path": "{}", "offload_threshold": {threshold}}}"#,
        folder.display()
    )
}

/// The peaks of the device and of NVMe in a second step.
fn peaks(section: &str, layers: usize) -> [usize; 2] {
    with_engine(section, layers, |engine| {
        train(engine, 1, |stack| stack.loss(input()))?;
        engine.ledger().reset_peaks();
        train(engine, 1, |stack| stack.loss(input()))?;
        let peak = |tier| -> Usage { engine.ledger().usage_on(tier, Category::Activations) };
        Ok([Tier::Device, Tier::Disk].map(|tier| peak(tier).peak))
    })
}

/// Asserts that the device holds as much for 13 layers as for 7, but for vectors: less than a sixteenth of an
/// activation for each of the 6 layers.
#[track_caller]
fn assert_flat(seven: [usize; 2], thirteen: [usize; 2]) {
    assert!(thirteen[0] < seven[0] + 6 * ACTIVATION / 16, "{seven:?} and {thirteen:?} bytes");
}

/// The device holds as much for a deep stack as for a shallow one, and NVMe the inputs of all blocks but the
/// first.
#[test]
fn the_device_holds_no_more_for_more_blocks() {
    let section = to_nvme("full", 0);
    let [seven, thirteen] = [7, 13].map(|layers| peaks(&section, layers));
    assert_flat(seven, thirteen);
    assert_eq!(thirteen[1] - seven[1], 6 * 2 * ACTIVATION, "NVMe");
    let [kept, none] = peaks(POLICIES[1], 13);
    assert!(thirteen[0] * 2 < kept, "{thirteen:?} with offload, {kept} without");
    assert_eq!(none, 0);
}

/// What selective keeps of a block leaves the device too.
#[test]
fn kept_products_leave_the_device() {
    let section = to_nvme("selective", 0);
    let [seven, thirteen] = [7, 13].map(|layers| peaks(&section, layers));
    assert_flat(seven, thirteen);
    assert!(thirteen[1] - seven[1] > 6 * 2 * ACTIVATION, "{seven:?} and {thirteen:?}");
}

/// Activations that are smaller than the threshold stay.
#[test]
fn small_activations_stay() {
    assert_eq!(peaks(&to_nvme("full", ACTIVATION + 1), 9), peaks(POLICIES[1], 9));
    assert!(peaks(&to_nvme("full", ACTIVATION), 9)[1] > 0);
}

/// Each step writes what it reads, and both as much as the inputs have.
#[test]
fn a_step_moves_what_it_parks() {
    with_engine(&to_nvme("full", 0), 9, |engine| {
        let moved = |engine: &Net| {
            let statistics = engine.states().io_statistics().unwrap();
            [statistics.bytes_written, statistics.bytes_read]
        };
        train(engine, 1, |stack| stack.loss(input()))?;
        let first = moved(engine);
        train(engine, 2, |stack| stack.loss(input()))?;
        let third = moved(engine);
        assert_eq!(third[0] - first[0], third[1] - first[1]);
        // The inputs of all blocks but the first, each of them in two forms, in both steps.
        assert_eq!(third[0] - first[0], 2 * 8 * 2 * ACTIVATION as u64);
        Ok(())
    });
}

/// Two models on a thread have files of their own, and passes of both may be open.
#[test]
fn passes_of_two_models_do_not_meet() {
    let run = |section: &str| {
        with_engine(section, 6, |first| {
            let config = format!(
                r#"{{"train_micro_batch_size_per_gpu": {BATCH}, "activation_checkpointing": {section}}}"#
            );
            let plan = deepburn::plan(&config, 1).unwrap();
            let mut second = deepburn::initialize(Stack::new(5), &plan, first.group().clone())?;
            let mut losses = Vec::new();
            for _ in 0..2 {
                let one = first.forward(|stack| stack.loss(input()))?;
                let two = second.forward(|stack| stack.loss(input() * 2.0))?;
                losses.extend([&one, &two].map(|loss| loss.clone().into_scalar()));
                second.backward(two)?;
                first.backward(one)?;
                first.step()?;
                second.step()?;
            }
            Ok(losses)
        })
    };
    assert_eq!(run(&to_nvme("selective", 0)), run("{}"));
}

/// A disk that fails while backward reads from it is an error of the rank that names the folder.
#[test]
fn a_disk_that_fails_is_named() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cut-activations");
    std::fs::create_dir_all(&folder).unwrap();
    with_engine(&to_folder("full", 0, &folder), 9, |engine| {
        let loss = engine.forward(|stack| stack.loss(input()))?;
        // A write would make the file longer again.
        let parked = 8 * 2 * ACTIVATION as u64;
        while engine.states().io_statistics().unwrap().bytes_written < parked {
            std::thread::yield_now();
        }
        cut_files(&folder);
        let failure = engine.backward(loss).unwrap_err().to_string();
        assert!(failure.contains("cannot read an activation"), "{failure}");
        assert!(failure.contains(folder.to_str().unwrap()), "{failure}");
        // And of no later step.
        assert_eq!(engine.step().unwrap_err().to_string(), failure);
        Ok(())
    });
}

/// Cuts the files of this process in `folder`, which have no names, to nothing.
fn cut_files(folder: &Path) {
    for descriptor in std::fs::read_dir("/proc/self/fd").unwrap() {
        let link: PathBuf = descriptor.unwrap().path();
        if std::fs::read_link(&link).is_ok_and(|target| target.starts_with(folder)) {
            let file = std::fs::OpenOptions::new().write(true).open(&link).unwrap();
            file.set_len(0).unwrap();
        }
    }
}
