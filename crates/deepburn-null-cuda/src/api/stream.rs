//! Streams and events. All work completes at once, so a wait returns immediately.

use std::ffi::{c_uint, c_void};
use std::sync::atomic::Ordering::Relaxed;

use super::{CuResult, give};
use crate::driver::driver;

/// The handle of all events.
const EVENT: usize = 1;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut u64, _flags: c_uint) -> CuResult {
    let number = driver().tallies.streams.fetch_add(1, Relaxed) + 1;
    driver().log(format_args!("stream {number}"));
    // SAFETY: the caller passes a place for the handle.
    unsafe { give(stream, number) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(_stream: *mut c_void) -> CuResult {
    CuResult::Success
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(_stream: *mut c_void) -> CuResult {
    driver().tallies.waits_for_streams.fetch_add(1, Relaxed);
    driver().log(format_args!("wait for a stream"));
    CuResult::Success
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(
    _stream: *mut c_void,
    _event: *mut c_void,
    _flags: c_uint,
) -> CuResult {
    driver().tallies.stream_waits.fetch_add(1, Relaxed);
    driver().log(format_args!("a stream waits for an event"));
    CuResult::Success
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> CuResult {
    // SAFETY: the caller passes a place for the handle.
    unsafe { give(event, EVENT) }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(_event: *mut c_void, _stream: *mut c_void) -> CuResult {
    driver().tallies.events.fetch_add(1, Relaxed);
    driver().log(format_args!("event"));
    CuResult::Success
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(_event: *mut c_void) -> CuResult {
    driver().tallies.waits_for_events.fetch_add(1, Relaxed);
    driver().log(format_args!("wait for an event"));
    CuResult::Success
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(_event: *mut c_void) -> CuResult {
    CuResult::Success
}
