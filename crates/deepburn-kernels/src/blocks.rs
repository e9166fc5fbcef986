//! How a long slice is cut for the cores: into blocks of one fixed size.
//!
//! The size never depends on the number of threads, so neither does any result.

/// Elements of one block: four `f32` arrays of this length (Adam's) fill half of a 512 KiB
/// second-level cache.
pub(crate) const BLOCK: usize = 16 * 1024;

/// Slices shorter than this stay on the calling thread: waking others costs more than it saves.
pub(crate) const PARALLEL_FROM: usize = 4 * BLOCK;

/// Panics unless every state is as long as the parameter.
pub(crate) fn check_lengths(kernel: &str, param: usize, others: &[(&str, usize)]) {
    for (name, len) in others {
        assert!(
            *len == param,
            "{kernel}: `{name}` has {len} elements and `param` has {param}; a share's slices have one length"
        );
    }
}

/// Panics unless `t` counts from 1: bias corrections divide by `1 - beta^t`.
pub(crate) fn check_time(kernel: &str, t: u64) {
    assert!(t >= 1, "{kernel}: optimizer time is {t}; the first step has time 1");
}
