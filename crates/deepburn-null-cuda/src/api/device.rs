//! The device, its attributes and context, and the texts of errors.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::{CuResult, give};
use crate::driver::{MAX_SHARED, MAX_THREADS, driver};

/// The handle of the primary context.
const CONTEXT: usize = 1;

/// Returns the value of an attribute: a device of compute capability 9.0 with the limits of an
/// H100. The numbers of the attributes are those in `CUdevice_attribute_enum` of `cuda.h`.
fn attribute(number: c_int) -> Option<c_int> {
    Some(match number {
        // Threads of a block, in all and along each axis.
        1..=3 => MAX_THREADS as c_int,
        4 => 64,
        // Blocks of a grid along each axis.
        5 => c_int::MAX,
        6 | 7 => 65535,
        // Threads of a warp.
        10 => 32,
        // Multiprocessors.
        16 => 132,
        // Major and minor compute capability.
        75 => 9,
        76 => 0,
        // Shared memory of a block, if it asks for more than the default.
        97 => MAX_SHARED as c_int,
        _ => return None,
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> CuResult {
    driver().log(format_args!("init"));
    CuResult::Success
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CuResult {
    // SAFETY: the caller passes a place for the version.
    unsafe { give(version, driver().settings.version as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CuResult {
    // SAFETY: the caller passes a place for the number.
    unsafe { give(count, 1) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> CuResult {
    if ordinal != 0 {
        return CuResult::InvalidDevice;
    }
    // SAFETY: the caller passes a place for the handle.
    unsafe { give(device, ordinal) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) -> CuResult {
    let text = c"deepburn-null-cuda".to_bytes_with_nul();
    if name.is_null() || (length as usize) < text.len() {
        return CuResult::InvalidValue;
    }
    // SAFETY: the caller passes a place for `length` characters, and the text is not longer.
    unsafe { name.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
    CuResult::Success
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) -> CuResult {
    // SAFETY: the caller passes a place for the number.
    unsafe { give(bytes, driver().settings.memory as usize) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    number: c_int,
    _device: c_int,
) -> CuResult {
    match attribute(number) {
        // SAFETY: the caller passes a place for the value.
        Some(found) => unsafe { give(value, found) },
        None => CuResult::InvalidValue,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, _device: c_int) -> CuResult {
    // SAFETY: the caller passes a place for the handle.
    unsafe { give(context, CONTEXT) }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> CuResult {
    CuResult::Success
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> CuResult {
    CuResult::Success
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> CuResult {
    // SAFETY: the caller passes a place for the handle.
    unsafe { give(context, CONTEXT) }
}

/// Returns the name and the description of a result; `None` if this driver never returns it.
fn texts(result: c_uint) -> Option<[&'static CStr; 2]> {
    let found = CuResult::TEXTS.iter().find(|(known, ..)| *known as c_uint == result);
    found.map(|(_, name, description)| [*name, *description])
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(result: c_uint, text: *mut *const c_char) -> CuResult {
    match texts(result) {
        // SAFETY: the caller passes a place for the pointer to the text, which is static.
        Some([name, _]) => unsafe { give(text, name.as_ptr()) },
        None => CuResult::InvalidValue,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(result: c_uint, text: *mut *const c_char) -> CuResult {
    match texts(result) {
        // SAFETY: the caller passes a place for the pointer to the text, which is static.
        Some([_, description]) => unsafe { give(text, description.as_ptr()) },
        None => CuResult::InvalidValue,
    }
}
