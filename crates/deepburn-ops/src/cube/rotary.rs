//! Rotary embeddings on the device: one launch for each direction. The table stays on the device.

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, RotatedColumns};

use super::array::{are_alike, are_supported, buffer, contiguous, shaped_tensor};
use crate::portable;
use crate::rotary::{RotaryOps, RotatedHeads};

/// Rotates the heads of all rows, or rotates them back.
///
/// # Panics
/// Panics if the shapes do not fit.
fn rotated<R: CubeRuntime>(
    x: CubeTensor<R>,
    table: [CubeTensor<R>; 2],
    heads: RotatedHeads,
    back: bool,
) -> CubeTensor<R> {
    let ([rows, columns], cos) = ([x.shape()[0], x.shape()[1]], table[0].shape());
    let pairs = cos[1];
    heads.check([rows, columns], [cos[0], pairs]);
    if heads.heads == 0 || pairs == 0 {
        return x;
    }
    let x = contiguous(x);
    let table = table.map(|table| buffer(&contiguous(table)));
    let columns = RotatedColumns { columns, heads: heads.heads, head_width: heads.width, pairs };
    let result = cube::rotate(&x.client, &buffer(&x), table.each_ref(), columns, back);
    shaped_tensor(result, x.shape(), &x)
}

/// Supports f32, f16 and bf16, with tables of any of these types. Other types use the portable
/// implementation.
impl<R, F, I, BT> RotaryOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn rotate_heads(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        if !are_supported([&x]) || !are_alike([&cos, &sin]) {
            return portable::rotary::rotate::<Self>(x, cos, sin, heads);
        }
        rotated(x, [cos, sin], heads, false)
    }

    fn rotate_heads_back(
        grad: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        if !are_supported([&grad]) || !are_alike([&cos, &sin]) {
            return portable::rotary::rotate_back::<Self>(grad, cos, sin, heads);
        }
        rotated(grad, [cos, sin], heads, true)
    }
}
