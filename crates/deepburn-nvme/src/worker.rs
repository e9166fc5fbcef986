//! The threads that read and write.
//!
//! Each request to the disk is a blocking system call on a thread of its own, so the number of
//! workers is the queue depth. This needs no io_uring or libaio, which containers often forbid.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use crate::queue::{Finished, IoQueue};
use crate::raw_file::RawFile;

/// Starts a worker, which runs blocks of `queue` until it is closed and empty.
///
/// `index` is a part of the thread's name. The worker holds the file open until it ends.
///
/// # Errors
///
/// Returns the system's error if it cannot start a thread.
pub(crate) fn start_worker(
    index: usize,
    queue: Arc<IoQueue>,
    file: Arc<dyn RawFile>,
    folder: Arc<Path>,
) -> io::Result<JoinHandle<()>> {
    Builder::new().name(format!("swap-{index}")).spawn(move || {
        let mut finished = None;
        while let Some(mut block) = queue.next(finished.take()) {
            let started = Instant::now();
            let outcome = block.run(&*file, &folder);
            finished = Some(Finished { block, outcome, busy: started.elapsed() });
        }
    })
}
