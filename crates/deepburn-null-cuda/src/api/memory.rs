//! Allocations of device memory and pinned memory, and copies between them.

use std::ffi::{c_uint, c_void};

use super::{CuResult, give};
use crate::driver::{CopyTarget, driver};

/// Allocates device memory.
///
/// # Safety
/// `address` is null or can be written.
unsafe fn allocate(address: *mut u64, bytes: usize) -> CuResult {
    let (found, counts) = {
        let mut device = driver().device();
        (device.allocate(bytes as u64), device.counts)
    };
    let Some(found) = found else {
        driver().log(format_args!("error: no {bytes} bytes beside {}", counts.bytes));
        return CuResult::OutOfMemory;
    };
    driver().log(format_args!("allocate {bytes} bytes; {} in all", counts.bytes));
    // SAFETY: the caller guarantees it.
    unsafe { give(address, found) }
}

/// Releases device memory.
fn release(address: u64) -> CuResult {
    let Some(bytes) = driver().device().release(address) else { return CuResult::InvalidValue };
    driver().log(format_args!("release {bytes} bytes"));
    CuResult::Success
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> CuResult {
    // Of the two functions, only this one is documented to reject 0 bytes.
    if bytes == 0 {
        return CuResult::InvalidValue;
    }
    // SAFETY: the caller passes a place for the address.
    unsafe { allocate(address, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(
    address: *mut u64,
    bytes: usize,
    _stream: *mut c_void,
) -> CuResult {
    // SAFETY: the caller passes a place for the address.
    unsafe { allocate(address, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> CuResult {
    release(address)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: u64, _stream: *mut c_void) -> CuResult {
    release(address)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocHost_v2(address: *mut usize, bytes: usize) -> CuResult {
    if bytes == 0 {
        return CuResult::InvalidValue;
    }
    let Some(found) = driver().pinned().allocate(bytes) else { return CuResult::OutOfMemory };
    driver().log(format_args!("allocate {bytes} bytes pinned"));
    // SAFETY: the caller passes a place for the address.
    unsafe { give(address, found) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: usize) -> CuResult {
    let Some(bytes) = driver().pinned().release(address) else { return CuResult::InvalidValue };
    driver().log(format_args!("release {bytes} bytes pinned"));
    CuResult::Success
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(
    target: u64,
    _source: *const c_void,
    bytes: usize,
    _stream: *mut c_void,
) -> CuResult {
    // Nothing reads device memory, so nothing is stored there.
    driver().copy(CopyTarget::Device, target, [1, bytes as u64, 0])
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    target: *mut u8,
    source: u64,
    bytes: usize,
    _stream: *mut c_void,
) -> CuResult {
    let result = driver().copy(CopyTarget::Host, source, [1, bytes as u64, 0]);
    if result == CuResult::Success && bytes > 0 {
        // SAFETY: the caller passes `bytes` bytes that can be written.
        unsafe { target.write_bytes(0, bytes) };
    }
    result
}

/// The parameters of a copy of a matrix: `CUDA_MEMCPY2D_st` in `cuda.h`, version 13.0.
#[repr(C)]
struct MatrixCopy {
    source: CopiedMatrix,
    target: CopiedMatrix,
    width: usize,
    height: usize,
}

/// The source or the target of a copy. `CUDA_MEMCPY2D_st` has these fields twice, in this order.
#[repr(C)]
struct CopiedMatrix {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: *mut u8,
    device: u64,
    array: *mut c_void,
    pitch: usize,
}

/// `CU_MEMORYTYPE_HOST` of `CUmemorytype_enum` in `cuda.h`.
const HOST: c_uint = 1;

/// `CU_MEMORYTYPE_DEVICE` of `CUmemorytype_enum` in `cuda.h`.
const DEVICE: c_uint = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const MatrixCopy, _stream: *mut c_void) -> CuResult {
    // SAFETY: the caller passes null or the parameters of a copy.
    let Some(copy) = (unsafe { copy.as_ref() }) else { return CuResult::InvalidValue };
    let MatrixCopy { source, target, width, height } = copy;
    if [source.x, source.y, target.x, target.y] != [0; 4] {
        return CuResult::InvalidValue;
    }
    let sizes = |pitch: usize| [*height, *width, pitch].map(|size| size as u64);
    match [source.memory_type, target.memory_type] {
        [HOST, DEVICE] => driver().copy(CopyTarget::Device, target.device, sizes(target.pitch)),
        [DEVICE, HOST] => {
            let result = driver().copy(CopyTarget::Host, source.device, sizes(source.pitch));
            if result == CuResult::Success {
                for row in 0..*height {
                    // SAFETY: the caller passes `height` rows that can be written, `pitch` bytes
                    // apart.
                    unsafe { target.host.add(row * target.pitch).write_bytes(0, *width) };
                }
            }
            result
        }
        _ => CuResult::InvalidValue,
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// The offsets are those in `cuda.h` on a machine of 64 bits.
    #[test]
    fn a_copy_has_the_layout_of_cuda() {
        assert_eq!(offset_of!(CopiedMatrix, host), 24);
        assert_eq!(offset_of!(CopiedMatrix, pitch), 48);
        assert_eq!(offset_of!(MatrixCopy, target), 56);
        assert_eq!(offset_of!(MatrixCopy, height), 120);
        assert_eq!(size_of::<MatrixCopy>(), 128);
    }
}
