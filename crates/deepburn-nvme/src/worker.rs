//! The worker threads that read and write blocks.
//!
//! Each disk request is a blocking system call on its own thread, so the number of workers equals
//! the queue depth. Unlike io_uring and libaio, this also works in containers that forbid those
//! system calls.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use crate::queue::{Finished, IoQueue};
use crate::raw_file::RawFile;

/// Starts a worker that runs blocks of `queue` until the queue is closed and empty.
///
/// `index` is part of the thread's name. The worker keeps the file open until it ends.
///
/// # Errors
/// Returns the system's error if it cannot start a thread.
pub(crate) fn start_worker(
    index: usize,
    queue: Arc<IoQueue>,
    file: Arc<dyn RawFile>,
    folder: Arc<Path>,
) -> io::Result<JoinHandle<()>> {
    Builder::new().name(format!("swap-{index}")).spawn(move || {
        let mut finished = None;
        // Handing a block back and taking the next one needs the lock of the queue once.
        while let Some(mut block) = queue.next(finished.take()) {
            let started = Instant::now();
            let outcome = block.run(&*file, &folder);
            finished = Some(Finished { block, outcome, busy: started.elapsed() });
        }
    })
}
