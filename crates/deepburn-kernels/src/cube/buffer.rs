//! Flat arrays in the memory of a device.

use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// Units of one cube (threads of a block).
pub(crate) const CUBE_DIM: u32 = 256;

/// Type of the elements of a [`Buffer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl ElementType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::F16 => size_of::<f16>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }
}

/// A flat array in the memory of a device.
#[derive(Debug, Clone)]
pub struct Buffer {
    handle: Handle,
    len: usize,
    dtype: ElementType,
}

impl Buffer {
    /// The first `len` elements behind a handle.
    ///
    /// # Panics
    /// When the handle's memory is smaller.
    pub fn new(handle: Handle, len: usize, dtype: ElementType) -> Self {
        let bytes = handle.size_in_used();
        assert!(
            (len * dtype.size()) as u64 <= bytes,
            "a buffer of {len} elements of {dtype:?} needs more than its memory of {bytes} bytes"
        );
        Self { handle, len, dtype }
    }

    /// A new buffer; its elements are undefined.
    pub fn empty<R: Runtime>(client: &ComputeClient<R>, len: usize, dtype: ElementType) -> Self {
        // Devices have no arrays of no bytes.
        Self { handle: client.empty(len.max(1) * dtype.size()), len, dtype }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Type of the elements.
    pub fn dtype(&self) -> ElementType {
        self.dtype
    }

    /// The memory.
    pub fn into_handle(self) -> Handle {
        self.handle
    }

    /// As the argument of a kernel.
    pub(crate) fn arg<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `new` and `empty` made sure that the memory holds `len` elements.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.len.max(1)) }
    }
}

/// Evaluates a launch with `$element` being the Rust type of a buffer's elements.
macro_rules! with_element {
    ($dtype:expr, $element:ident => $launch:expr) => {
        match $dtype {
            crate::cube::ElementType::F32 => {
                type $element = f32;
                $launch
            }
            crate::cube::ElementType::F16 => {
                type $element = half::f16;
                $launch
            }
            crate::cube::ElementType::Bf16 => {
                type $element = half::bf16;
                $launch
            }
        }
    };
}
pub(crate) use with_element;

/// Cubes for one unit an element.
pub(crate) fn cubes<R: Runtime>(client: &ComputeClient<R>, len: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(CUBE_DIM);
    (cubecl::calculate_cube_count_elemwise(client, len, dim), dim)
}
