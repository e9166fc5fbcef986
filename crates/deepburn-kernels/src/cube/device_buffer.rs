//! Flat arrays in device memory.
//!
//! A [`DeviceBuffer`] is a handle of CubeCL with a length and an element type. Clones share the
//! memory. The macro `with_element` turns the run-time element type into a type parameter of a
//! kernel. Each kernel is therefore compiled once for each combination of types that is used.

use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// The number of units in a cube (threads of a block in CUDA's terms), for all kernels.
pub(crate) const CUBE_DIM: u32 = 256;

/// The largest number of elements of a buffer. Kernels have positions of 32 bits.
const MAX_LEN: usize = u32::MAX as usize;

/// The type of the elements of a [`DeviceBuffer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceDType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl DeviceDType {
    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 => size_of::<f16>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

/// A flat array of fewer than 2^32 elements in the memory of a device.
#[derive(Debug, Clone)]
pub struct DeviceBuffer {
    handle: Handle,
    len: usize,
    dtype: DeviceDType,
}

impl DeviceBuffer {
    /// Creates a buffer of the first `len` elements of a handle's memory. The memory is shared, not
    /// copied.
    ///
    /// # Panics
    /// Panics if the handle's memory is smaller than `len` elements, or if there are 2^32 elements
    /// or more.
    pub fn new(handle: Handle, len: usize, dtype: DeviceDType) -> Self {
        check_len(len, dtype);
        let bytes = handle.size_in_used();
        assert!(
            (len * dtype.size()) as u64 <= bytes,
            "a buffer of {len} elements of {dtype:?} needs more than its memory of {bytes} bytes"
        );
        Self { handle, len, dtype }
    }

    /// Allocates a buffer whose elements are undefined.
    ///
    /// # Panics
    /// Panics if there are 2^32 elements or more.
    pub fn empty<R: Runtime>(client: &ComputeClient<R>, len: usize, dtype: DeviceDType) -> Self {
        check_len(len, dtype);
        // Devices have no arrays of 0 bytes, so an empty buffer has memory for one element.
        Self { handle: client.empty(len.max(1) * dtype.size()), len, dtype }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DeviceDType {
        self.dtype
    }

    /// Returns the handle of the memory.
    pub fn into_handle(self) -> Handle {
        self.handle
    }

    /// Returns the buffer as a kernel argument with at least one element.
    pub(crate) fn arg<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `new` and `empty` ensure that the memory holds `len` elements. No kernel accesses
        // the element of an empty buffer.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.len.max(1)) }
    }

    /// Returns the buffer as a kernel argument of vectors of `vector` elements, by which the length
    /// and the [`offset`](Self::offset) can be divided.
    pub(crate) fn vectors_arg<R: Runtime>(&self, vector: usize) -> ArrayArg<R> {
        // SAFETY: as in `arg`. The vectors have the elements of the buffer.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.len / vector) }
    }

    /// Returns where the buffer starts in its allocation, in bytes. An allocation starts at a
    /// multiple of every vector.
    pub(crate) fn offset(&self) -> u64 {
        self.handle.offset_start.unwrap_or_default()
    }
}

/// Refuses lengths that a kernel would truncate.
///
/// # Panics
/// Panics if there are 2^32 elements or more.
fn check_len(len: usize, dtype: DeviceDType) {
    assert!(
        len <= MAX_LEN,
        "an array of {len} elements of {dtype:?} is too long for the kernels of devices, which have at most {MAX_LEN}; \
         use more ranks at a higher ZeRO stage, so that a rank owns fewer elements of a parameter, or the backend flex"
    );
}

/// Evaluates a launch in which `$element` is the Rust type of a buffer's elements.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $launch:expr) => {
        match $dtype {
            crate::cube::DeviceDType::F32 => {
                type $element = f32;
                $launch
            }
            crate::cube::DeviceDType::F16 => {
                type $element = half::f16;
                $launch
            }
            crate::cube::DeviceDType::Bf16 => {
                type $element = half::bf16;
                $launch
            }
        }
    };
}
pub(crate) use with_element;

/// The largest number of parameters or parts of a launch. A kernel is compiled for each number and
/// grows with it, and a launch of eight small parameters costs little more than a launch of one.
pub const MOST_AT_ONCE: usize = 8;

/// Returns how many parameters or parts, from 1 to [`MOST_AT_ONCE`], a launch may take if each of
/// them has `arrays` arguments and `shared` more are common to all.
pub(crate) fn items_at_once<R: Runtime>(
    client: &ComputeClient<R>,
    arrays: usize,
    shared: usize,
) -> usize {
    // One argument has the scalars.
    let most = (client.properties().hardware.max_bindings as usize).saturating_sub(shared + 1);
    (most / arrays).clamp(1, MOST_AT_ONCE)
}

/// Returns the number of cubes, and their size, for a kernel with one unit per element. The last
/// cube may have units without an element, so every kernel checks its position.
pub(crate) fn cubes<R: Runtime>(client: &ComputeClient<R>, len: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(CUBE_DIM);
    (cubecl::calculate_cube_count_elemwise(client, len, dim), dim)
}
