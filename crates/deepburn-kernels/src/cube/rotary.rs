//! Rotary position embeddings, in one launch.
//!
//! ```text
//! a row    | head 0        | head 1        | ... | columns that are not rotated |
//! a head   | x_0 .. x_h-1 | y_0 .. y_h-1 | elements that are not rotated |
//! result     x cos - y sin   y cos + x sin
//! ```
//!
//! A unit computes one element: a rotated one, of which it also reads the other coordinate, or a
//! copy.

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, cubes, with_element};

/// Which elements of a row are rotated.
#[derive(Debug, Clone, Copy)]
pub struct RotatedColumns {
    /// The number of columns of a row.
    pub columns: usize,
    /// The number of heads, which are the first columns.
    pub heads: usize,
    /// The number of columns of a head.
    pub head_width: usize,
    /// The number of pairs of a head that are rotated.
    pub pairs: usize,
}

/// Rotates the heads of each row of `x`. `cos` and `sin` have `pairs` elements for each position,
/// and row `i` has the angles of position `i % positions`. They are rounded to the type of `x`
/// first. With `back`, the angles are negative.
///
/// Computed in f32 and rounded once. Allocates the result and queues one kernel; an empty buffer
/// needs no launch.
///
/// # Panics
/// Panics if `cos` and `sin` differ in length or type, if they have no positions, or if the heads
/// do not fit in a row or the pairs in a head.
pub fn rotate<R: Runtime>(
    client: &ComputeClient<R>,
    x: &DeviceBuffer,
    [cos, sin]: [&DeviceBuffer; 2],
    rotated: RotatedColumns,
    back: bool,
) -> DeviceBuffer {
    let RotatedColumns { columns, heads, head_width, pairs } = rotated;
    assert!(
        cos.len() == sin.len() && cos.dtype() == sin.dtype(),
        "cosines and sines differ in length or type"
    );
    assert!(
        heads * head_width <= columns && 2 * pairs <= head_width,
        "{rotated:?}: the heads do not fit in a row, or the pairs in a head"
    );
    let result = DeviceBuffer::empty(client, x.len(), x.dtype());
    if x.is_empty() {
        return result;
    }
    assert!(cos.len() >= pairs && pairs > 0, "{rotated:?}: a table without positions");
    let (count, dim) = cubes(client, x.len());
    // SAFETY: every unit checks that its element exists. The other coordinate of an element is in
    // the same head, and positions are below the number of those in the table.
    unsafe {
        with_element!(x.dtype(), X => with_element!(cos.dtype(), T => {
            rotate_kernel::launch_unchecked::<X, T, R>(
                client,
                count,
                dim,
                x.arg(),
                cos.arg(),
                sin.arg(),
                result.arg(),
                HeadsLaunch::new(columns, heads * head_width, head_width, pairs),
                back,
            );
        }));
    }
    result
}

/// The rotated elements of a row, as an argument of the kernel.
#[derive(CubeType, CubeLaunch)]
struct Heads {
    /// The number of columns of a row.
    columns: usize,
    /// The number of columns of all heads.
    width: usize,
    /// The number of columns of a head.
    head_width: usize,
    /// The number of pairs of a head.
    pairs: usize,
}

/// Computes one element per unit.
#[cube(launch_unchecked)]
fn rotate_kernel<X: Float, T: Float>(
    x: &Array<X>,
    cos: &Array<T>,
    sin: &Array<T>,
    result: &mut Array<X>,
    heads: &Heads,
    #[comptime] back: bool,
) {
    let i = ABSOLUTE_POS;
    if i < x.len() {
        let column = i % heads.columns;
        let place = column % heads.head_width;
        if column < heads.width && place < 2 * heads.pairs {
            let positions = cos.len() / heads.pairs;
            let angle = i / heads.columns % positions * heads.pairs + place % heads.pairs;
            let cos = rounded::<X, T>(cos[angle]);
            let mut sin = rounded::<X, T>(sin[angle]);
            if comptime![back] {
                sin = -sin;
            }
            let own = f32::cast_from(x[i]);
            if place < heads.pairs {
                let other = f32::cast_from(x[i + heads.pairs]);
                result[i] = X::cast_from(own * cos - other * sin);
            } else {
                let other = f32::cast_from(x[i - heads.pairs]);
                result[i] = X::cast_from(own * cos + other * sin);
            }
        } else {
            result[i] = x[i];
        }
    }
}

/// Returns an element of a table, rounded to the type of the rotated elements.
#[cube]
fn rounded<X: Float, T: Float>(element: T) -> f32 {
    f32::cast_from(X::cast_from(f32::cast_from(element)))
}
