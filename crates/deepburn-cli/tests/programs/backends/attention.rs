//! Compares self-attention on wgpu and on flex, through the ops on which models train.

use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use burn_flex::Flex;
use burn_wgpu::Wgpu;
use deepburn::ops::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, SelfAttention,
};

/// Deterministic numbers in [-1, 1).
fn noise(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((seed * 7919 + i) as f32 * 0.618_034).sin()).collect()
}

/// Returns output and gradient.
fn run<B: AttentionOps>(
    attention: &SelfAttention,
    dropout: Option<AttentionDropout>,
    rows: usize,
    width: usize,
) -> [Vec<f32>; 2] {
    let matrix = |heads: usize, seed| {
        let shape = [rows, heads * width];
        let data = TensorData::new(noise(shape[0] * shape[1], seed), shape);
        let tensor = Tensor::<B, 2>::from_data(data, &B::Device::default());
        tensor.into_primitive().tensor()
    };
    let projected = matrix(attention.heads + 2 * attention.key_value_heads, 1);
    let grad = matrix(attention.heads, 2);
    let AttentionOutput { output, log_sums } =
        B::attention_forward(projected.clone(), attention, dropout);
    let saved = AttentionSaved { projected, output: output.clone(), log_sums, dropout };
    let gradient = B::attention_backward(grad, saved, attention);
    [output, gradient].map(|matrix| {
        let matrix = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(matrix));
        matrix.into_data().to_vec().expect("an f32 matrix")
    })
}

/// Flex and the kernels sum in f32 in different orders. Sums have at most 100 terms of magnitude 1,
/// each with roundings of 2^-24, and exponentials of a device are right to some 1e-6. A weight that
/// only one of them dropped would change an output by about 1e-2.
#[test]
fn attention_agrees_with_flex_and_drops_the_same_weights() {
    let (batch, positions) = (2, 100);
    let firsts = (0..batch * positions).map(|row| row % positions / 30 * 30).collect();
    for mask in [
        AttentionMask::Causal,
        AttentionMask::Window(20),
        AttentionMask::Since(firsts),
        AttentionMask::Lengths([90, 0].into()),
    ] {
        for (key_value_heads, width, dropout, soft_cap) in [
            (4, 16, None, None),
            (2, 16, Some(AttentionDropout { seed: u64::MAX / 3, probability: 0.1 }), None),
            (1, 5, Some(AttentionDropout { seed: 7, probability: 0.5 }), Some(2.0)),
            // Wider than the kernels, so that the provided implementation runs.
            (1, 300, Some(AttentionDropout { seed: 7, probability: 0.5 }), None),
        ] {
            let attention = SelfAttention {
                batch,
                heads: 4,
                key_value_heads,
                scale: 0.4,
                soft_cap,
                upcast: false,
                mask: mask.clone(),
            };
            let found = run::<Wgpu>(&attention, dropout, batch * positions, width);
            let expected = run::<Flex>(&attention, dropout, batch * positions, width);
            for (found, expected) in found.iter().zip(&expected) {
                let size = expected.iter().fold(1.0_f32, |size, x| size.max(x.abs()));
                for (i, (x, y)) in found.iter().zip(expected).enumerate() {
                    let error = (x - y).abs();
                    assert!(error <= 2e-5 * size, "{i}: {x} instead of {y} for {attention:?}");
                }
            }
        }
    }
}
