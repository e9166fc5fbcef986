//! The fuzz loop, with time and memory limits.
//!
//! Inputs run sequentially on the calling thread. A second thread detects inputs that never end,
//! which the calling thread cannot detect itself.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::current::{current, set_current};
use crate::memory::{MEMORY_LIMIT, peak_of};
use crate::{Mutator, SeedCorpus, SeedFile};

/// The maximum time for an input. Most inputs take less than a millisecond, so the limit leaves a
/// large margin for busy machines.
pub const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Calls `check` for `DEEPBURN_FUZZ_INPUTS` inputs (or `default` if the variable is not set), and
/// prints the number of inputs, the maximum time and the maximum memory use.
///
/// # Panics
/// Panics with the seed if an input panics or exceeds a limit. If an input never ends, or requests
/// more memory than the limit at once, the process ends.
pub fn fuzz(default: u64, mut check: impl FnMut(&mut Mutator)) {
    let inputs = setting("DEEPBURN_FUZZ_INPUTS", default);
    let first = setting("DEEPBURN_FUZZ_SEED", 1);
    let seeds = (0..inputs).map(|input| first.wrapping_add(input));
    let again = |seed: &u64| format!("DEEPBURN_FUZZ_SEED={seed} DEEPBURN_FUZZ_INPUTS=1");
    limited(seeds, again, |seed| check(&mut Mutator::new(seed)));
}

/// Calls `check` for each unmodified file of `corpus`, in the order of file names, with the limits
/// of [`fuzz`].
///
/// # Panics
/// Panics with the file name if `check` panics or exceeds a limit.
pub fn replay<'a>(corpus: &'a SeedCorpus, check: impl FnMut(&'a SeedFile)) {
    limited(corpus.files().iter(), |file| format!("the file {} of the corpus", file.name), check);
}

/// Calls `check` for each input with time and memory limits. `named` returns a description of how
/// to reproduce an input.
fn limited<I>(
    inputs: impl Iterator<Item = I>,
    named: impl Fn(&I) -> String,
    mut check: impl FnMut(I),
) {
    let (mut slowest, mut largest) = (Duration::ZERO, 0);
    let (mut slowest_name, mut largest_name, mut count) = (String::new(), String::new(), 0);
    thread::scope(|scope| {
        // This value is dropped at the end or on a panic, which ends the watchdog thread.
        let (_running, ended) = channel();
        scope.spawn(move || watch(&ended));
        for input in inputs {
            let again = named(&input);
            set_current(&again);
            let started = Instant::now();
            let mut outcome = Ok(());
            let memory = peak_of(|| {
                // The check is not used again after a panic: the assertion below ends the loop,
                // with the seed in its message.
                outcome = catch_unwind(AssertUnwindSafe(|| check(input)));
            });
            let time = started.elapsed();
            assert!(outcome.is_ok(), "an input panics; repeat it with {again}");
            assert!(time <= TIME_LIMIT, "an input takes {time:?}; repeat it with {again}");
            assert!(
                memory <= MEMORY_LIMIT,
                "an input holds {memory} bytes; repeat it with {again}"
            );
            count += 1;
            if time > slowest {
                (slowest, slowest_name) = (time, again.clone());
            }
            if memory > largest {
                (largest, largest_name) = (memory, again);
            }
        }
    });
    println!(
        "{count} inputs; the slowest took {slowest:?} ({slowest_name}), the largest held {} kB ({largest_name})",
        largest / 1000,
    );
}

/// Returns a temporary folder. It is in memory if `/dev/shm` exists, because thousands of inputs
/// write small files.
///
/// # Panics
/// Panics if the folder cannot be created.
pub fn scratch_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    }
    .expect("tests may write temporary files")
}

/// Reads a number from an environment variable; returns `default` if it is not set.
///
/// # Panics
/// Panics if the variable is not a number.
fn setting(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`; it must be a number from 0"))
}

/// Ends the process if one input runs during two consecutive checks, until `ended` is closed.
fn watch(ended: &Receiver<()>) {
    let mut last = None;
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(2 * TIME_LIMIT) {
        let current = current();
        if last.as_ref() == Some(&current) {
            // `eprintln` would be captured by the test harness and lost when the process ends.
            _ = writeln!(std::io::stderr(), "an input does not end: {current}");
            std::process::abort();
        }
        last = Some(current);
    }
}
