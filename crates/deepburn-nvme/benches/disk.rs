//! Benchmarks sequential reads and writes of a swap file against fio on the same disk, alternating
//! between both.
//!
//! ```sh
//! cargo bench -p deepburn-nvme --bench disk -- --folder /mnt/nvme --rounds 5
//! ```
//!
//! Transfers 1 GiB in pieces of 16 MiB, with one and with two pieces in flight, and prints medians.
//! fio uses direct I/O: with the same block size and queue depth (engine libaio, with small and
//! with huge pages), and with whole pieces sequentially (engine psync). If fio is not installed,
//! only the swap file is measured.
//!
//! | Option | Meaning | Default |
//! |---|---|---|
//! | `--folder` | folder on the disk | Cargo's folder for temporary files |
//! | `--rounds` | measured rounds | 5 |
//! | `--block-size`, `--queue-depth`, `--direct` | the policy of both | `IoPolicy::default` |

use std::collections::VecDeque;
use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use deepburn_nvme::{AlignedBuffer, IoPolicy, PendingIo, Region, SwapError, SwapFile};

/// The number of bytes per measurement.
const TOTAL: usize = 1 << 30;
/// The size of a read or write in bytes.
const PIECE: usize = 16 << 20;

/// A measured method of transferring the data.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// A swap file with this number of pieces in flight.
    Swap(usize),
    /// fio with the block size and queue depth of the policy.
    Libaio,
    /// The same with huge pages, which the buffers of a swap file also use.
    LibaioHuge,
    /// fio with whole pieces.
    Psync,
}

/// All methods, in the order of the table. Ratios are relative to the fourth method.
const WAYS: [Way; 5] = [Way::Swap(1), Way::Swap(2), Way::Libaio, Way::LibaioHuge, Way::Psync];

/// The command line.
struct Options {
    /// The folder of both files.
    folder: PathBuf,
    /// The number of measured rounds.
    rounds: usize,
    /// Block size, queue depth and direct I/O.
    policy: IoPolicy,
}

impl Options {
    /// Reads the command line.
    ///
    /// # Errors
    /// Returns an error for an unknown option or a value that is missing or malformed.
    fn parse() -> Result<Self, Box<dyn Error>> {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let mut options = Self { folder, rounds: 5, policy: IoPolicy::default() };
        let mut arguments = env::args().skip(1).filter(|argument| argument != "--bench");
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name}: value missing"))?;
            match name.as_str() {
                "--folder" => options.folder = value.into(),
                "--rounds" => options.rounds = value.parse()?,
                "--block-size" => options.policy.block_size = value.parse()?,
                "--direct" => options.policy.direct = value.parse()?,
                "--queue-depth" => options.policy.queue_depth = value.parse()?,
                _ => return Err(format!("unknown option {name}").into()),
            }
        }
        Ok(options)
    }
}

/// The file that fio creates, removed when the value is dropped.
struct FioFile(PathBuf);

impl Drop for FioFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Measures all methods in rounds, writing before reading, and prints medians and statistics.
fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let swap = SwapFile::create(&options.folder, TOTAL as u64, &options.policy)?;
    let region = swap.region(TOTAL)?;
    let fio = FioFile(options.folder.join("deepburn-fio"));
    let has_fio = Command::new("fio").arg("--version").output().is_ok();
    println!("{:?}, direct: {}, {:?}", options.folder, swap.is_direct(), options.policy);
    // The rates of all rounds by method, for writing and for reading.
    let mut rates = WAYS.map(|_| [vec![], vec![]]);
    // The first round is not counted, because it writes to blocks that the file system has only
    // reserved.
    for round in 0..=options.rounds {
        for (way, rates) in WAYS.iter().zip(&mut rates) {
            for (is_read, rates) in [false, true].into_iter().zip(rates) {
                let rate = match way {
                    Way::Swap(in_flight) => swap_rate(&swap, &region, is_read, *in_flight)?,
                    _ if !has_fio => continue,
                    way => fio_rate(&fio.0, &options.policy, is_read, *way)?,
                };
                if round > 0 {
                    rates.push(rate);
                }
            }
        }
    }
    report(&rates.map(|rates| rates.map(median)));
    println!("{:?}", swap.statistics());
    Ok(())
}

/// Returns the rate of a swap file in MB per second. Buffers are reused: if all of them are in use,
/// the next piece waits for the oldest transfer.
fn swap_rate(
    swap: &SwapFile,
    region: &Region,
    is_read: bool,
    in_flight: usize,
) -> Result<f64, SwapError> {
    let noise = |seed| noise(swap, seed);
    let mut idle = (0..in_flight as u64).map(noise).collect::<Result<Vec<_>, _>>()?;
    let mut pending: VecDeque<PendingIo> = VecDeque::new();
    let started = Instant::now();
    for start in (0..TOTAL).step_by(PIECE) {
        let buffer = match (idle.pop(), pending.pop_front()) {
            (Some(buffer), first) => {
                pending.extend(first);
                buffer
            }
            (None, first) => first.expect("every buffer is idle or pending").wait()?,
        };
        pending.push_back(match is_read {
            true => swap.read_into(region, start, buffer)?,
            false => swap.write(region, start, buffer)?,
        });
    }
    for io in pending {
        io.wait()?;
    }
    Ok(TOTAL as f64 / 1e6 / started.elapsed().as_secs_f64())
}

/// Returns a piece of incompressible data, like the data of fio.
fn noise(swap: &SwapFile, seed: u64) -> Result<AlignedBuffer, SwapError> {
    let mut buffer = swap.pool().unfilled(PIECE)?;
    let mut state = seed + 0x9e37_79b9_7f4a_7c15;
    for word in buffer.as_mut_slice::<u64>() {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state;
    }
    Ok(buffer)
}

/// Returns the rate that fio reports, in MB per second.
///
/// # Errors
/// Returns an error if fio cannot be started or its output has an unexpected format.
fn fio_rate(
    file: &Path,
    policy: &IoPolicy,
    is_read: bool,
    way: Way,
) -> Result<f64, Box<dyn Error>> {
    let (engine, block, depth) = match way {
        Way::Psync => ("psync", PIECE, 1),
        _ => ("libaio", policy.block_size, policy.queue_depth),
    };
    let mut fio = Command::new("fio");
    if way == Way::LibaioHuge {
        fio.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1").args(["--mem=malloc", "--thread"]);
    }
    let output = fio
        .args(["--name=disk", "--direct=1", "--overwrite=1", "--output-format=terse"])
        .arg("--terse-version=3")
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={TOTAL}"))
        .arg(format!("--rw={}", if is_read { "read" } else { "write" }))
        .args([format!("--ioengine={engine}"), format!("--iodepth={depth}")])
        .arg(format!("--bs={block}"))
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().find(|line| line.starts_with("3;")).ok_or(text.clone())?;
    // Fields of terse version 3, in KiB per second.
    let field = if is_read { 6 } else { 47 };
    let rate: f64 = line.split(';').nth(field).ok_or("fio: field missing")?.parse()?;
    Ok(rate * 1024.0 / 1e6)
}

/// Returns the median; NaN if there is no rate.
fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints the table: the rates of each method and their ratios to fio with huge pages.
fn report(medians: &[[f64; 2]; WAYS.len()]) {
    println!("{:12} {:>12} {:>12}   share of fio with huge pages", "", "write MB/s", "read MB/s");
    let fio = medians[3];
    for (way, [write, read]) in WAYS.iter().zip(medians) {
        let (of_write, of_read) = (100.0 * write / fio[0], 100.0 * read / fio[1]);
        let way = format!("{way:?}");
        println!("{way:12} {write:12.0} {read:12.0} {of_write:8.0} % {of_read:8.0} %");
    }
}
