//! In which queue of a device a rank's work goes.

use burn_backend::Backend;

/// How the ranks of a process share a device.
pub trait StreamOps: Backend {
    /// Runs what one rank does, what prepares it, or what a thread of its own does for it.
    ///
    /// Ranks of a process read each other's tensors. On a device that queues work thread by thread, a
    /// tensor could be read before it is written, or its memory used again before it is read;
    /// such a device runs the work of all ranks in one queue, in the order in which it was started.
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        run()
    }
}
