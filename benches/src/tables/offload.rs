//! Offload of optimizer states and parameters to host memory and NVMe.
//!
//! GPT-2 124M trains at stage 3 on one rank in f32, with more and more of its states out of memory. The
//! last row has optimizer states and parameters on NVMe with small limits on gathered parameters, and
//! DeepSpeed does the same in the peer's row. Columns show what it costs (seconds of a step) and saves
//! (peak memory, and the categories of rank 0's ledger).
//!
//! Errors: the disk is the one of cargo's target folder, with direct I/O; its speed decides the times, and
//! disks that slow down when their cache is full make later rounds slower. On a CPU, `cpu` offload moves
//! nothing, because device memory is host memory: the row shows what the bookkeeping costs.

use std::path::Path;

use serde_json::{Value, json};

use super::Bench;
use crate::Outcome;
use crate::job::{Job, Precision, Workload};
use crate::peers::PeerRun;
use crate::quantity::Quantity;
use crate::results::{Plot, Results};
use crate::rounds::{Variant, measure};
use crate::suite::Suite;

pub(super) const BENCH: Bench = Bench {
    name: "offload",
    title: "Offload",
    about: "Stage 3 on one rank, with optimizer states, and then parameters too, out of memory. On the CPU, `cpu` \
        moves nothing: device memory is host memory. NVMe is the disk of cargo's target folder.",
    run,
};

/// Optimizer steps of a run.
const STEPS: usize = 4;
/// Steps at the start that do not count: states are created and written for the first time.
const UNCOUNTED: usize = 1;
/// The row that is compared with DeepSpeed's.
const ALL_ON_NVME: &str = "optimizer states and parameters on NVMe";
/// The peer's row, of `deepspeed_zero.py --stage 3 --nvme`.
const DEEPSPEED: &str = "DeepSpeed, optimizer states and parameters on NVMe";
/// DeepSpeed's NVMe operators are compiled on first use, against this header.
const LIBAIO: &str = "/usr/include/libaio.h";

/// Measures each section, and DeepSpeed if its packages and libaio's header are installed.
///
/// # Errors
/// When the tokens cannot be written. Runs that fail are noted in `results`.
fn run(suite: &Suite, results: &mut Results) -> Outcome<()> {
    let workload =
        suite.pick(Workload::gpt2_small(2, 128), Workload::gpt2("GPT-2 2M", 128, 2, 2, 32));
    let tokens = suite.tokens(&workload)?;
    let sections = sections(suite.scratch());
    let nvme = suite.scratch().display().to_string();
    let mut variants: Vec<_> = sections
        .iter()
        .map(|(name, zero)| {
            let job = Job::new(&workload, &tokens, STEPS)
                .set("deepspeed.zero_optimization", zero.clone());
            Variant::new(*name, move || suite.observe(&job, UNCOUNTED))
        })
        .collect();
    let libaio =
        if Path::new(LIBAIO).exists() { Ok(()) } else { Err(format!("{LIBAIO} is not installed")) };
    match libaio.and_then(|()| suite.peers_with(&["torch", "transformers", "deepspeed"])) {
        Err(lacks) => results.missing.push(format!("{DEEPSPEED}: {lacks}")),
        Ok(peers) => variants.push(Variant::peer(DEEPSPEED, || {
            let (script, ranks, precision) = ("deepspeed_zero", Some(1), Precision::Fp32);
            let options = ["--stage", "3", "--nvme", &nvme];
            let run = PeerRun {
                script,
                ranks,
                workload: &workload,
                precision,
                steps: STEPS,
                options: &options,
            };
            peers.train(&run, UNCOUNTED)
        })),
    }
    let columns =
        [Quantity::Step, Quantity::Peak, Quantity::Optimizer, Quantity::Parameters, Quantity::Disk];
    let mut table = measure(results, &workload.title(1), suite.rounds(2), &columns, &variants);
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

/// Returns the names of rows with their `zero_optimization` sections. The first has no offload, and the
/// others are compared with it.
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
                "stage3_max_live_parameters": 2e7, "stage3_prefetch_bucket_size": 1e7,
            }),
        ),
    ]
}
