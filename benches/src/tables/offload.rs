//! Measures offload of optimizer states and parameters to host memory and NVMe.
//!
//! GPT-2 124M is trained at stage 3 on one rank in f32, and each row offloads more of its states.
//! The last row has optimizer states and parameters on NVMe, with low limits on gathered
//! parameters, as in DeepSpeed's row. The columns are the time of a step, the peak memory, and the
//! categories of rank 0's ledger.
//!
//! Measurement errors: the disk of cargo's target folder is used with direct I/O. Its speed
//! determines the times. If the disk becomes slower when its cache is full, later rounds are
//! slower. With the CPU backend, offload to `cpu` does not move anything, because device memory is
//! host memory. The row then measures the bookkeeping.

use std::path::Path;

use super::*;

pub(super) const BENCH: Bench = Bench {
    name: "offload",
    title: "Offload",
    about: "Stage 3 on one rank, with offload of optimizer states, and of parameters as well. On the CPU, offload to \
        `cpu` does not move anything, because device memory is host memory. NVMe is the disk of cargo's target folder.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 4;
/// Number of first steps that are not counted, in which states are created and first written.
const UNCOUNTED: usize = 1;
/// The row that is compared with DeepSpeed's row.
const ALL_ON_NVME: &str = "optimizer states and parameters on NVMe";
/// The peer's row, which is measured with `deepspeed_zero.py --stage 3 --nvme`.
const DEEPSPEED: &str = "DeepSpeed, optimizer states and parameters on NVMe";
/// The header that DeepSpeed needs to compile its NVMe operators on first use.
const LIBAIO: &str = "/usr/include/libaio.h";

/// Measures each section, and DeepSpeed if its packages and the header of libaio are installed.
///
/// # Errors
/// Returns an error if the tokens cannot be written. Failed runs are recorded in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload = gpt2(suite, (2, 128), (2, 32));
    let tokens = suite.tokens(&workload)?;
    let sections = sections(suite.scratch());
    let nvme = suite.scratch().display().to_string();
    let mut variants = Variants::new(suite);
    for (name, zero) in &sections {
        let job = BenchJob::new(&workload, &tokens, STEPS);
        variants.train(*name, job.set("deepspeed.zero_optimization", zero.clone()), UNCOUNTED);
    }
    // Checked here, because DeepSpeed fails only when it compiles the operators in its first run.
    if Path::new(LIBAIO).exists() {
        let run = PeerRun::new(Script::DEEPSPEED, &workload, STEPS);
        let run = run.with(&["--stage", "3", "--nvme", &nvme]);
        variants.train_peer(DEEPSPEED, PeerRun { ranks: Some(1), ..run }, UNCOUNTED);
    } else {
        variants.lacks(DEEPSPEED, &format!("{LIBAIO} is not installed"));
    }
    let columns =
        [Quantity::Step, Quantity::Peak, Quantity::Optimizer, Quantity::Parameters, Quantity::Disk];
    let mut table = variants.measure(results, &workload.title(1), 2, &columns);
    let nothing = sections[0].0;
    for (name, _) in &sections[1..] {
        table.compare(Quantity::Step, name, nothing, None);
        table.compare(Quantity::Peak, name, nothing, None);
    }
    table.compare(Quantity::Step, ALL_ON_NVME, DEEPSPEED, None);
    table.compare(Quantity::Peak, ALL_ON_NVME, DEEPSPEED, None);
    table.plot = Some(Plot::Bars(Quantity::Peak));
    results.tables.push(table);
    Ok(())
}

/// Returns the names of rows with their `zero_optimization` sections. The first one has no offload,
/// and the others are compared with it.
fn sections(nvme: &Path) -> [(&'static str, Value); 4] {
    let disk = json!({ "device": "nvme", "nvme_path": nvme });
    let parameters = json!({ "device": "nvme", "nvme_path": nvme, "max_in_cpu": 0 });
    [
        ("no offload", json!({ "stage": 3 })),
        (
            "optimizer states in host memory",
            json!({ "stage": 3, "offload_optimizer": { "device": "cpu" } }),
        ),
        ("optimizer states on NVMe", json!({ "stage": 3, "offload_optimizer": disk.clone() })),
        (
            ALL_ON_NVME,
            json!({
                "stage": 3, "offload_optimizer": disk, "offload_param": parameters,
                // Low limits, so that gathered parameters do not hide what offload saves.
                "stage3_max_live_parameters": 2e7, "stage3_prefetch_bucket_size": 1e7,
            }),
        ),
    ]
}
