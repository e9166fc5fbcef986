//! Rotary embeddings with ops that every backend supports.

use burn::tensor::Tensor;
use burn_backend::Backend;

use super::{cast, in_f32, primitive, tensor};
use crate::rotary::RotatedHeads;

/// Implements [`RotaryOps::rotate_heads`](crate::RotaryOps::rotate_heads): computed in at least f32
/// and rounded once.
pub fn rotate<B: Backend>(
    x: B::FloatTensorPrimitive,
    cos: B::FloatTensorPrimitive,
    sin: B::FloatTensorPrimitive,
    heads: RotatedHeads,
) -> B::FloatTensorPrimitive {
    primitive(rotated::<B>(tensor(x), [cos, sin].map(tensor), heads))
}

/// Implements [`RotaryOps::rotate_heads_back`](crate::RotaryOps::rotate_heads_back): the rotation
/// by the negative angles.
pub fn rotate_back<B: Backend>(
    grad: B::FloatTensorPrimitive,
    cos: B::FloatTensorPrimitive,
    sin: B::FloatTensorPrimitive,
    heads: RotatedHeads,
) -> B::FloatTensorPrimitive {
    let sin = tensor::<B, 2>(sin).neg();
    primitive(rotated::<B>(tensor(grad), [tensor(cos), sin], heads))
}

fn rotated<B: Backend>(
    x: Tensor<B, 2>,
    table: [Tensor<B, 2>; 2],
    RotatedHeads { heads, width }: RotatedHeads,
) -> Tensor<B, 2> {
    let ([rows, columns], [positions, half]) = (x.dims(), table[0].dims());
    RotatedHeads { heads, width }.check([rows, columns], [positions, half]);
    if rows == 0 || heads == 0 || half == 0 {
        return x;
    }
    let dtype = x.dtype();
    let [cos, sin] = table.map(|table| in_f32(cast(table, dtype)).reshape([1, positions, 1, half]));
    let by_head = x.clone().narrow(1, 0, heads * width);
    let by_head = in_f32(by_head.reshape([rows / positions, positions, heads, width]));
    let [first, second] = [0, half].map(|start| by_head.clone().narrow(3, start, half));
    // Pairs are one half of the rotated elements apart, as in `transformers`, and not adjacent as
    // in the paper.
    let mut parts = vec![
        first.clone() * cos.clone() - second.clone() * sin.clone(),
        second * cos + first * sin,
    ];
    if 2 * half < width {
        parts.push(by_head.narrow(3, 2 * half, width - 2 * half));
    }
    let rotated = cast(Tensor::cat(parts, 3).reshape([rows, heads * width]), dtype);
    if heads * width == columns {
        return rotated;
    }
    Tensor::cat(vec![rotated, x.narrow(1, heads * width, columns - heads * width)], 1)
}
