//! Benchmarks reduce-scatter and all-gather of 64 MiB between processes against MPI's own
//! collectives.
//!
//! ```sh
//! cargo bench -p deepburn-mpi --features mpi --bench collectives
//! ```
//!
//! Starts `mpirun` for 2 and for 4 ranks, alternating between the engine and MPI's collectives, and
//! prints the median of each over all rounds and their ratio. The engine uses flex tensors, as in
//! training, and allocates memory for every result. MPI reuses its buffers, so their pages are
//! already mapped.
//!
//! The program runs in three roles, selected by its first argument:
//!
//! ```text
//! (none)    starts mpirun for each round, prints the table
//! engine    a rank that times the engine
//! mpi       a rank that times MPI_Reduce_scatter_block and MPI_Allgather
//! ```

use std::ffi::c_void;
use std::process::Command;
use std::time::{Duration, Instant};

use burn_backend::{DType, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_comm::{CollectiveTag, ProcessGroup, ReduceOp, run_rank};
use deepburn_mpi::{MpiGroup, Process, Settings};
use deepburn_zero::DeviceArray;
use mpi_sys as ffi;

/// The number of f32 elements of the complete array: 64 MiB.
const NUMEL: usize = 16 << 20;
/// The number of timed collectives of a kind per round, after two that are not timed.
const REPEATS: usize = 10;
/// The number of jobs per implementation and number of ranks.
const ROUNDS: usize = 5;

/// Selects the role.
fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("engine") => engine(),
        Some("mpi") => mpi(),
        _ => compare(),
    }
}

/// Runs all jobs and prints the medians in milliseconds. The implementations alternate, so a
/// disturbance of the machine affects both.
fn compare() {
    println!("median ms of {} collectives of 64 MiB a rank, engine beside MPI", REPEATS * ROUNDS);
    for ranks in [2, 4] {
        let mut times = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
        for _ in 0..ROUNDS {
            for (side, name) in ["engine", "mpi"].into_iter().enumerate() {
                for (kind, measured) in round(ranks, name).into_iter().enumerate() {
                    times[kind][side].extend(measured);
                }
            }
        }
        for (kind, [own, theirs]) in ["reduce-scatter", "all-gather"].into_iter().zip(times) {
            let (own, theirs) = (median(own), median(theirs));
            println!("{ranks} ranks, {kind:14}: {own:7.2} {theirs:7.2}  ratio {:.2}", own / theirs);
        }
    }
}

/// Runs a job and returns the milliseconds of its reduce-scatters and all-gathers, as rank 0
/// measured them.
///
/// # Panics
/// Panics if `mpirun` cannot be started or the job fails.
fn round(ranks: usize, name: &str) -> [Vec<f64>; 2] {
    let program = std::env::current_exe().expect("a running program has a path");
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]);
    command.args(["-np", &ranks.to_string()]).arg(program).arg(name);
    let output = command.output().expect("mpirun can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} on {ranks} ranks: {errors}");
    let line = |kind: &str| -> Vec<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(kind));
        line.unwrap_or_else(|| panic!("no {kind} in {text}"))
            .split_whitespace()
            .map(|number| number.parse().expect("rank 0 prints numbers"))
            .collect()
    };
    [line("reduce-scatter"), line("all-gather")]
}

/// Returns the median, or the upper of the two middle values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Times `work` between two barriers, in milliseconds, and returns the times without the first two.
/// The second barrier is included, so the slowest rank determines the time.
fn timed(mut barrier: impl FnMut(), mut work: impl FnMut()) -> Vec<f64> {
    let mut times = Vec::new();
    for _ in 0..REPEATS + 2 {
        barrier();
        let started = Instant::now();
        work();
        barrier();
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    times.split_off(2)
}

/// Prints the times of rank 0 as one line, which `round` reads.
fn print(kind: &str, rank: usize, times: &[f64]) {
    if rank == 0 {
        let times: Vec<_> = times.iter().map(|time| format!("{time:.3}")).collect();
        println!("{kind} {}", times.join(" "));
    }
}

/// Returns a flex tensor of `numel` equal elements.
fn array(numel: usize) -> DeviceArray<Flex> {
    DeviceArray::Dense(FlexTensor::from_data(TensorData::new(vec![0.5_f32; numel], vec![numel])))
}

/// Times the engine's collectives as one rank of a job.
///
/// # Panics
/// Panics if a rank fails.
fn engine() {
    let process = Process::connect().expect("started by mpirun");
    let settings = Settings { timeout: Duration::from_secs(600), ..Settings::default() };
    let group = process.group(settings, |work| work());
    let ended = run_rank(&group, || -> Result<(), deepburn_comm::CommError> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let barrier = || {
            let tag = CollectiveTag::new("barrier", 0);
            ProcessGroup::<DeviceArray<Flex>>::barrier(&group, tag).expect("all ranks are there");
        };
        let whole = array(NUMEL);
        print(
            "reduce-scatter",
            rank,
            &timed(barrier, || {
                let arrays = vec![whole.clone()];
                finish(&group, |group| {
                    group.reduce_scatter(CollectiveTag::new("a", 0), arrays, ReduceOp::Sum)
                });
            }),
        );
        let chunk = array(NUMEL.div_ceil(world_size));
        print(
            "all-gather",
            rank,
            &timed(barrier, || {
                let chunks = vec![chunk.clone()];
                finish(&group, |group| {
                    group.all_gather(CollectiveTag::new("b", 0), chunks, vec![NUMEL])
                });
            }),
        );
        Ok(())
    });
    ended.expect("no rank fails");
}

/// Starts a collective, waits for it and checks the type of its result.
fn finish(
    group: &MpiGroup,
    start: impl FnOnce(
        &dyn ProcessGroup<DeviceArray<Flex>>,
    )
        -> Result<deepburn_comm::Pending<DeviceArray<Flex>>, deepburn_comm::CommError>,
) {
    let result = start(group).and_then(deepburn_comm::Pending::wait).expect("no rank fails");
    let DeviceArray::Dense(tensor) = &result[0] else { panic!("a dense result") };
    assert_eq!(tensor.dtype(), DType::F32);
    assert!(tensor.shape().num_elements() > 0);
}

/// Times MPI's collectives as one rank of a job, with buffers that are allocated once.
fn mpi() {
    let (mut rank, mut size) = (0, 0);
    // SAFETY: initialized once, on this thread, which makes all calls; the pointers are valid.
    unsafe {
        // The return codes are not checked: MPI's default handler ends the job on an error.
        ffi::MPI_Init(std::ptr::null_mut(), std::ptr::null_mut());
        ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank);
        ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut size);
    }
    let chunk = NUMEL / size as usize;
    let whole = vec![0.5_f32; NUMEL];
    let mut part = vec![0.0_f32; chunk];
    let mut gathered = vec![0.0_f32; NUMEL];
    // SAFETY: as above.
    let barrier = || unsafe {
        ffi::MPI_Barrier(ffi::RSMPI_COMM_WORLD);
    };
    // SAFETY: the buffers are as long as the counts say.
    let reduce = timed(barrier, || unsafe {
        ffi::MPI_Reduce_scatter_block(
            whole.as_ptr().cast::<c_void>(),
            part.as_mut_ptr().cast::<c_void>(),
            chunk as i32,
            ffi::RSMPI_FLOAT,
            ffi::RSMPI_SUM,
            ffi::RSMPI_COMM_WORLD,
        );
    });
    print("reduce-scatter", rank as usize, &reduce);
    // SAFETY: as above.
    let gather = timed(barrier, || unsafe {
        ffi::MPI_Allgather(
            part.as_ptr().cast::<c_void>(),
            chunk as i32,
            ffi::RSMPI_FLOAT,
            gathered.as_mut_ptr().cast::<c_void>(),
            chunk as i32,
            ffi::RSMPI_FLOAT,
            ffi::RSMPI_COMM_WORLD,
        );
    });
    print("all-gather", rank as usize, &gather);
    // SAFETY: nothing is under way.
    unsafe {
        ffi::MPI_Finalize();
    }
}
