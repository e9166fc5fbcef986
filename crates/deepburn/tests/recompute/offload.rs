//! Activation offload: offloaded activations, activations that stay on the device, and disk
//! failures.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use burn::tensor::Tensor;
use burn_flex::FlexDevice;
use deepburn::config::{ActivationOffload, Plan};
use deepburn::zero::{Category, Tier, Usage};

use crate::{
    ACTIVATION, BATCH, Net, POLICIES, Stack, Trained, WIDTH, input, train, with_engine, with_plan,
};

/// Returns a section that offloads activations of at least `threshold` bytes to NVMe.
pub(crate) fn to_nvme(policy: &str, threshold: usize) -> String {
    to_folder(policy, threshold, Path::new(env!("CARGO_TARGET_TMPDIR")))
}

fn to_folder(policy: &str, threshold: usize, folder: &Path) -> String {
    format!(
        r#"{{"policy": "{policy}", "nvme_path": "{}", "offload_threshold": {threshold}}}"#,
        folder.display()
    )
}

/// Returns the activation peaks on the device and on NVMe in the second step.
fn peaks(section: &str, layers: usize) -> [usize; 2] {
    with_engine(section, layers, |engine| {
        train(engine, 1, |stack| stack.loss(input()))?;
        engine.ledger().reset_peaks();
        train(engine, 1, |stack| stack.loss(input()))?;
        let peak = |tier| -> Usage { engine.ledger().usage_on(tier, Category::Activations) };
        Ok([Tier::Device, Tier::Disk].map(|tier| peak(tier).peak))
    })
}

/// Asserts that the device memory for 13 layers is the same as for 7 layers, except for vectors:
/// less than a sixteenth of an activation for each of the 6 layers.
#[track_caller]
fn assert_flat(seven: [usize; 2], thirteen: [usize; 2]) {
    assert!(thirteen[0] < seven[0] + 6 * ACTIVATION / 16, "{seven:?} and {thirteen:?} bytes");
}

/// The device memory does not grow with the number of blocks. NVMe stores the inputs of all blocks
/// except for the first.
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

/// Activations that `selective` keeps are offloaded too.
#[test]
fn kept_products_leave_the_device() {
    let section = to_nvme("selective", 0);
    let [seven, thirteen] = [7, 13].map(|layers| peaks(&section, layers));
    assert_flat(seven, thirteen);
    assert!(thirteen[1] - seven[1] > 6 * 2 * ACTIVATION, "{seven:?} and {thirteen:?}");
}

/// Activations that are smaller than the threshold stay on the device.
#[test]
fn small_activations_stay() {
    assert_eq!(peaks(&to_nvme("full", ACTIVATION + 1), 9), peaks(POLICIES[1], 9));
    assert!(peaks(&to_nvme("full", ACTIVATION), 9)[1] > 0);
}

/// Each step writes and reads the same number of bytes: the size of the inputs.
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
        // In both steps, two activations for each block except for the first: the input, and the
        // normalized input.
        assert_eq!(third[0] - first[0], 2 * 8 * 2 * ACTIVATION as u64);
        Ok(())
    });
}

/// Transposed views stay on the device, because kernels may add their elements in another order
/// than the elements of a contiguous copy.
#[test]
fn transposed_activations_stay() {
    let mixing = |stack: &Stack<Trained>| {
        let mut x = Tensor::cat(vec![input(), input() * 0.7], 0);
        for block in &stack.blocks {
            let gate = x.clone().mean_dim(1) * 2.0 + 1.3;
            x = (block.forward(x) * gate).tanh().swap_dims(0, 1);
        }
        stack.head(x)
    };
    let run = |section: &str| with_engine(section, 7, |engine| train(engine, 6, mixing));
    let kept = run("{}");
    assert_eq!(run(&to_nvme("full", 0)), kept);
    assert_eq!(run(&to_nvme("selective", 0)), kept);
}

/// Broadcast views stay on the device, because a copy would be larger than the original.
#[test]
fn expanded_activations_stay() {
    let gated = |stack: &Stack<Trained>| {
        let mut x = input();
        for block in &stack.blocks {
            x = block.forward(x).slice([0..1, 0..WIDTH]).expand([BATCH, WIDTH]);
        }
        stack.head(x)
    };
    let run = |section: &str| {
        with_engine(section, 9, |engine| {
            let losses = train(engine, 2, gated)?;
            Ok((losses, engine.ledger().usage(Category::Activations).peak))
        })
    };
    let (kept, (offloaded, peak)) = (run(POLICIES[1]), run(&to_nvme("full", 0)));
    assert_eq!(offloaded, kept.0);
    assert!(peak <= kept.1, "{peak} bytes, {} without offload", kept.1);
}

/// Offload to host memory gives the same bits, and the host tier of the ledger counts the bytes.
#[test]
fn activations_go_to_host_memory() {
    for policy in ["full", "selective"] {
        let config = format!(
            r#"{{"train_micro_batch_size_per_gpu": {BATCH}, "zero_optimization": {{"stage": 3}},
                "optimizer": {{"type": "AdamW", "params": {{"lr": 0.001}}}},
                "activation_checkpointing": {{"policy": "{policy}"}}}}"#
        );
        let mut plan = deepburn::plan(&config, 1).unwrap();
        let run = |plan: &Plan| {
            with_plan(plan, 9, |engine| {
                let first = train(engine, 1, |stack| stack.loss(input()))?;
                // In the first pass, it is not yet known which activations later blocks read.
                engine.ledger().reset_peaks();
                let losses = (first, train(engine, 2, |stack| stack.loss(input()))?);
                let usage = |tier| engine.ledger().usage_on(tier, Category::Activations);
                Ok((losses, [Tier::Device, Tier::Host].map(usage)))
            })
        };
        let (kept, [on_device, _]) = run(&plan);
        plan.backward.activations.offload = ActivationOffload::Host { threshold: 0 };
        let (offloaded, [device, host]) = run(&plan);
        assert_eq!(offloaded, kept, "{policy}");
        assert!(device.peak < on_device.peak, "{policy}: {device:?}, {on_device:?} without");
        assert!(host.peak >= 8 * 2 * ACTIVATION && host.current == 0, "{policy}: {host:?}");
    }
}

/// If batches grow from step to step, the file reuses the space of smaller activations.
#[test]
fn growing_batches_use_the_file_again() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("growing-batches");
    std::fs::create_dir_all(&folder).unwrap();
    with_engine(&to_folder("full", 0, &folder), 9, |engine| {
        for rows in (16..1_000).step_by(48) {
            train(engine, 1, |stack| {
                let x = Tensor::arange(0..rows, &FlexDevice).float().reshape([rows as usize, 1]);
                stack.loss(x.expand([rows as usize, WIDTH]) * 1e-3)
            })?;
        }
        let parked = engine.ledger().usage_on(Tier::Disk, Category::Activations).peak as u64;
        let bytes: u64 = open_files(&folder).map(|file| file.metadata().unwrap().len()).sum();
        // The file grows in units of 16 MiB.
        assert!(bytes < 2 * parked + (16 << 20), "{bytes} bytes for {parked}");
        Ok(())
    });
}

/// Two models on a thread use separate files, and passes of both may be open at the same time.
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

/// If the disk fails while backward reads activations, the error names the folder.
#[test]
fn a_disk_that_fails_is_named() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cut-activations");
    std::fs::create_dir_all(&folder).unwrap();
    with_engine(&to_folder("full", 0, &folder), 9, |engine| {
        let loss = engine.forward(|stack| stack.loss(input()))?;
        // A later write would extend the file again.
        let parked = 8 * 2 * ACTIVATION as u64;
        while engine.states().io_statistics().unwrap().bytes_written < parked {
            std::thread::yield_now();
        }
        cut_files(&folder);
        let failure = engine.backward(loss).unwrap_err().to_string();
        assert!(failure.contains("cannot read an activation"), "{failure}");
        assert!(failure.contains(folder.to_str().unwrap()), "{failure}");
        // Later steps return the same error.
        assert_eq!(engine.step().unwrap_err().to_string(), failure);
        Ok(())
    });
}

/// Truncates the files that this process has open in `folder`.
fn cut_files(folder: &Path) {
    open_files(folder).for_each(|file| file.set_len(0).unwrap());
}

/// Returns the unnamed files that this process has open in `folder`.
fn open_files(folder: &Path) -> impl Iterator<Item = File> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let is_inside = move |link: &PathBuf| {
        std::fs::read_link(link).is_ok_and(|target| target.starts_with(folder))
    };
    links.filter(is_inside).map(|link| OpenOptions::new().write(true).open(link).unwrap())
}
