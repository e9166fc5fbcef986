//! The loop over inputs, with limits of time and memory.
//!
//! Inputs run one after the other on the calling thread. A second thread
//! watches for inputs that do not end, which no limit in the first one could
//! stop.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::Mutator;
use crate::memory::{LimitGuard, MEMORY_LIMIT, peak_of};
use crate::seed::{current_seed, set_current_seed};

/// The longest time for an input. Most inputs take less than a millisecond; the
/// rest is a margin for a busy machine.
pub const TIME_LIMIT: Duration = Duration::from_secs(10);

/// Calls `check` for `DEEPBURN_FUZZ_INPUTS` inputs, by default `default`, and
/// prints their number, the longest time and the largest memory.
///
/// # Panics
///
/// Panics with the seed if an input panics or exceeds a limit. An input that
/// never ends, or that requests more memory than the limit at once, ends the
/// process.
pub fn fuzz(default: u64, mut check: impl FnMut(&mut Mutator)) {
    let inputs = setting("DEEPBURN_FUZZ_INPUTS", default);
    let first = setting("DEEPBURN_FUZZ_SEED", 1);
    let (mut slowest, mut largest) = ((Duration::ZERO, first), (0, first));
    thread::scope(|scope| {
        // Dropped at the end or by a panic, which ends the watchdog.
        let (_running, ended) = channel();
        scope.spawn(move || watch(&ended));
        let _limit = LimitGuard::new();
        for seed in (0..inputs).map(|input| first.wrapping_add(input)) {
            set_current_seed(seed);
            let started = Instant::now();
            let mut outcome = Ok(());
            let memory = peak_of(|| {
                outcome = catch_unwind(AssertUnwindSafe(|| check(&mut Mutator::new(seed))));
            });
            let time = started.elapsed();
            let again = format!("repeat it with DEEPBURN_FUZZ_SEED={seed} DEEPBURN_FUZZ_INPUTS=1");
            assert!(outcome.is_ok(), "an input panics; {again}");
            assert!(time <= TIME_LIMIT, "an input takes {time:?}; {again}");
            assert!(memory <= MEMORY_LIMIT, "an input holds {memory} bytes; {again}");
            slowest = slowest.max((time, seed));
            largest = largest.max((memory, seed));
        }
    });
    println!(
        "{inputs} inputs; the slowest took {:?} (seed {}), the largest held {} kB (seed {})",
        slowest.0,
        slowest.1,
        largest.0 / 1000,
        largest.1
    );
}

/// Returns a temporary folder, in memory if the system has `/dev/shm`:
/// thousands of inputs write small files.
///
/// # Panics
///
/// Panics if the folder cannot be created.
pub fn scratch_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    }
    .expect("tests may write temporary files")
}

/// Reads a number from an environment variable; returns `default` if it is not
/// set.
///
/// # Panics
///
/// Panics if the variable is not a number.
fn setting(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`; it must be a number from 0"))
}

/// Ends the process if one input runs during two consecutive checks, until
/// `ended` is closed.
fn watch(ended: &Receiver<()>) {
    let mut last = None;
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(2 * TIME_LIMIT) {
        let seed = current_seed();
        if last.replace(seed) == Some(seed) {
            // `eprintln` would be captured by the test harness and lost when
            // the process ends.
            _ = writeln!(std::io::stderr(), "an input does not end; DEEPBURN_FUZZ_SEED={seed}");
            std::process::abort();
        }
    }
}
