//! Asks `nvidia-smi` about the GPU and the memory that is in use.
//!
//! Measurement errors: memory is sampled every 100 ms, and a shorter peak may be missed. It
//! includes everything that is in use on the GPU: other processes, the context of CUDA, and memory
//! that an allocator keeps for later.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;

use crate::Outcome;
use crate::machine::{Gpu, output_of};

/// Bytes of the unit of `nvidia-smi`.
const MIB: u64 = 1 << 20;

/// Returns a command that prints these fields of the first GPU, separated by commas.
fn nvidia_smi(fields: &str) -> Command {
    let mut command = Command::new("nvidia-smi");
    command.args(["--id=0", &format!("--query-gpu={fields}"), "--format=csv,noheader,nounits"]);
    command
}

/// Returns the first GPU of the machine.
///
/// # Errors
/// Returns an error if `nvidia-smi` fails.
pub(super) fn query() -> Outcome<Gpu> {
    let line = output_of(&mut nvidia_smi("name,driver_version,memory.total"))?;
    let fields: Vec<_> = line.split(", ").collect();
    let [name, driver, memory] = fields[..] else {
        return Err(format!("nvidia-smi printed `{line}`").into());
    };
    let memory_bytes = memory.parse::<u64>()? * MIB;
    Ok(Gpu { name: name.into(), driver: driver.into(), memory_bytes })
}

/// Runs a function and returns its result, with the peak of the memory in use meanwhile in bytes;
/// `None` without `nvidia-smi`.
pub(super) fn with_peak_memory<T>(run: impl FnOnce() -> T) -> (T, Option<f64>) {
    let mut command = nvidia_smi("memory.used");
    command.arg("--loop-ms=100").stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else { return (run(), None) };
    let output = child.stdout.take();
    let samples = thread::spawn(move || {
        let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
        lines.map_while(Result::ok).filter_map(|line| line.trim().parse::<u64>().ok()).max()
    });
    let result = run();
    // It samples until it is killed. The end of its output ends the thread.
    let _ = child.kill();
    let _ = child.wait();
    let peak = samples.join().ok().flatten();
    (result, peak.map(|mib| (mib * MIB) as f64))
}

/// Returns the name of a GPU as part of a file name: `NVIDIA H200` is `nvidia-h200`.
pub(super) fn file_name(card: &str) -> String {
    let words = card.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_have_letters_and_digits() {
        assert_eq!(file_name("NVIDIA RTX(TM) 6000 "), "nvidia-rtx-tm-6000");
    }
}
