//! The device queue in which a rank's work runs.

use burn_backend::Backend;

/// Defines how the ranks of a process share a device.
pub trait StreamOps: Backend {
    /// Calls `run` on the stream that all ranks of the process share. `run` is the work of a rank,
    /// its preparation, or the work of one of the rank's helper threads.
    ///
    /// Ranks of a process read each other's tensors. On a device with one queue per thread, a
    /// tensor could be read before it is written, or its memory reused before it is read. Such a
    /// device runs the work of all ranks in one queue, in the order in which it was submitted.
    fn in_shared_stream<T>(run: impl FnOnce() -> T) -> T {
        run()
    }
}
