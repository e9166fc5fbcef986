//! Modules, their functions, and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::{CuResult, give};
use crate::driver::driver;

/// The bytes of `CUtensorMap` in `cuda.h`.
const TENSOR_MAP: usize = 128;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut u64, image: *const c_char) -> CuResult {
    if image.is_null() {
        return CuResult::InvalidValue;
    }
    // SAFETY: CubeCL passes the PTX of NVRTC, which ends with a zero.
    let text = unsafe { CStr::from_ptr(image) };
    match driver().load(text) {
        // SAFETY: the caller passes a place for the handle.
        Ok(number) => unsafe { give(module, number) },
        Err(result) => result,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(_module: *mut c_void) -> CuResult {
    CuResult::Success
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut usize,
    _module: *mut c_void,
    name: *const c_char,
) -> CuResult {
    if name.is_null() {
        return CuResult::InvalidValue;
    }
    // SAFETY: the caller passes a text that ends with a zero.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: the caller passes a place for the handle.
    unsafe { give(function, driver().function(name.to_string_lossy().into_owned())) }
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(_function: usize, _attribute: c_uint, _value: c_int) -> CuResult {
    CuResult::Success
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    _stream: *mut c_void,
    _parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CuResult {
    driver().launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut [u8; TENSOR_MAP],
    _data_type: c_uint,
    _rank: c_uint,
    _address: *mut c_void,
    _dimensions: *const u64,
    _strides: *const u64,
    _box_dimensions: *const c_uint,
    _element_strides: *const c_uint,
    _interleave: c_uint,
    _swizzle: c_uint,
    _promotion: c_uint,
    _fill: c_uint,
) -> CuResult {
    // SAFETY: the caller passes a place for the map.
    unsafe { give(map, [0; TENSOR_MAP]) }
}
