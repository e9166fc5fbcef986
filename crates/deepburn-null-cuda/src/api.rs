//! The functions of NVIDIA's driver API that CubeCL calls through cudarc.
//!
//! Their names and parameters are NVIDIA's, as the CUDA Driver API documents them. Suffixes such as
//! `_v2` are part of the exported names. Handles of contexts, modules, streams and events are
//! numbers in the place of pointers, which programs only pass back.
//!
//! ```text
//! device.rs    the device, its attributes and context, texts of errors
//! memory.rs    allocations and copies
//! module.rs    modules, functions, launches
//! stream.rs    streams and events
//! ```

mod device;
mod memory;
mod module;
mod stream;

use std::ffi::CStr;

/// The result of a call: `CUresult` in `cuda.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CuResult {
    Success = 0,
    InvalidValue = 1,
    OutOfMemory = 2,
    InvalidDevice = 101,
    InvalidPtx = 218,
    UnsupportedPtxVersion = 222,
    InvalidHandle = 400,
}

impl CuResult {
    /// The name and the description of each result, which are NVIDIA's.
    const TEXTS: [(Self, &CStr, &CStr); 7] = [
        (Self::Success, c"CUDA_SUCCESS", c"no error"),
        (Self::InvalidValue, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        (Self::OutOfMemory, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        (Self::InvalidDevice, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        (Self::InvalidPtx, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
        (
            Self::UnsupportedPtxVersion,
            c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            c"the provided PTX was compiled with an unsupported toolchain.",
        ),
        (Self::InvalidHandle, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    ];
}

/// Writes the result of a function to its output parameter.
///
/// # Safety
/// `place` is null or can be written.
unsafe fn give<T>(place: *mut T, value: T) -> CuResult {
    if place.is_null() {
        return CuResult::InvalidValue;
    }
    // SAFETY: the caller guarantees that the place can be written, and it is not null.
    unsafe { place.write(value) };
    CuResult::Success
}
