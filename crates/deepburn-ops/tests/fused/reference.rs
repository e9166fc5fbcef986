//! Plain implementations of the formulas in f64.

use deepburn_ops::{AttentionMask, GateFunction, RmsNorm, RmsWeight, RotatedHeads, SelfAttention};

use crate::Array;

/// Returns the output and the gradients with respect to x, gamma and beta.
pub(crate) fn layer_norm(
    x: &Array,
    gamma: &Array,
    beta: &Array,
    epsilon: f64,
    dy: &Array,
) -> [Vec<f64>; 4] {
    let [rows, width] = x.shape;
    let mut result = [vec![], vec![], vec![0.0; width], vec![0.0; width]];
    for row in 0..rows {
        let (x, dy) = (x.row(row), dy.row(row));
        let n = width as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        let reciprocal = 1.0 / (variance + epsilon).sqrt();
        let normalized: Vec<f64> = x.iter().map(|x| (x - mean) * reciprocal).collect();
        let scaled: Vec<f64> = dy.iter().zip(&gamma.values).map(|(d, g)| d * g).collect();
        let mean_scaled = scaled.iter().sum::<f64>() / n;
        let along = scaled.iter().zip(&normalized).map(|(s, n)| s * n).sum::<f64>() / n;
        for i in 0..width {
            result[0].push(normalized[i] * gamma.values[i] + beta.values[i]);
            result[1].push(reciprocal * (scaled[i] - mean_scaled - normalized[i] * along));
            result[2][i] += dy[i] * normalized[i];
            result[3][i] += dy[i];
        }
    }
    result
}

/// Returns the output, and the gradients with respect to x and the weight. No quotient is rounded.
pub(crate) fn rms_norm(x: &Array, weight: &Array, norm: RmsNorm, dy: &Array) -> [Vec<f64>; 3] {
    let [rows, width] = x.shape;
    let mut result = [vec![], vec![], vec![0.0; width]];
    let offset = if norm.weight == RmsWeight::PlusOne { 1.0 } else { 0.0 };
    for row in 0..rows {
        let (x, dy) = (x.row(row), dy.row(row));
        let square = x.iter().map(|x| x * x).sum::<f64>() / width as f64 + norm.epsilon;
        let root = square.sqrt();
        let factor = |i: usize| weight.values[i] + offset;
        // The derivative of x_i / root: (delta_ij - x_i x_j / (width square)) / root.
        let sum = (0..width).map(|i| dy[i] * factor(i) * x[i]).sum::<f64>();
        for i in 0..width {
            result[0].push(x[i] / root * factor(i));
            result[1].push((dy[i] * factor(i) - x[i] * sum / (width as f64 * square)) / root);
            result[2][i] += dy[i] * x[i] / root;
        }
    }
    result
}

/// Returns `function(gate) * up`, and the gradients of gate and up.
pub(crate) fn gated(gate: &Array, up: &Array, function: GateFunction, dy: &Array) -> [Vec<f64>; 3] {
    let ones = Array { shape: gate.shape, values: vec![1.0; gate.values.len()] };
    let [value, slope] = match function {
        GateFunction::Silu => silu(gate),
        GateFunction::GeluTanh => gelu(gate, &ones),
    };
    let all = |f: &dyn Fn(usize) -> f64| (0..gate.values.len()).map(f).collect();
    [
        all(&|i| value[i] * up.values[i]),
        all(&|i| dy.values[i] * up.values[i] * slope[i]),
        all(&|i| dy.values[i] * value[i]),
    ]
}

/// Returns `x / (1 + exp(-x))` and its derivative.
fn silu(x: &Array) -> [Vec<f64>; 2] {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let value = x.values.iter().map(|x| x * sigmoid(*x));
    let slope = x.values.iter().map(|&x| sigmoid(x) + x * sigmoid(x) * sigmoid(-x));
    [value.collect(), slope.collect()]
}

/// Rotates the first heads of each row by the angles of its position, as complex numbers.
pub(crate) fn rotate(x: &Array, cos: &Array, sin: &Array, heads: RotatedHeads) -> Vec<f64> {
    let [positions, half] = cos.shape;
    let mut y = x.values.clone();
    for (row, y) in y.chunks_mut(x.shape[1]).enumerate() {
        let (cos, sin) = (cos.row(row % positions), sin.row(row % positions));
        for head in 0..heads.heads {
            for pair in 0..half {
                let [re, im] = [pair, pair + half].map(|i| head * heads.width + i);
                (y[re], y[im]) =
                    (y[re] * cos[pair] - y[im] * sin[pair], y[re] * sin[pair] + y[im] * cos[pair]);
            }
        }
    }
    y
}

/// Returns output and gradient.
pub(crate) fn gelu(x: &Array, dy: &Array) -> [Vec<f64>; 2] {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let u = |x: f64| c * (x + 0.044_715 * x.powi(3));
    let y = x.values.iter().map(|x| 0.5 * x * (1.0 + u(*x).tanh())).collect();
    let dx = x.values.iter().zip(&dy.values).map(|(&x, dy)| {
        let t = u(x).tanh();
        let slope = c * (1.0 + 3.0 * 0.044_715 * x * x);
        dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
    });
    [y, dx.collect()]
}

/// Returns the matrix product `left right`, with either operand transposed on request.
pub(crate) fn product(left: &Array, left_t: bool, right: &Array, right_t: bool) -> Array {
    let at = |a: &Array, t: bool, i: usize, j: usize| {
        let (i, j) = if t { (j, i) } else { (i, j) };
        a.values[i * a.shape[1] + j]
    };
    let dims = |a: &Array, t: bool| if t { [a.shape[1], a.shape[0]] } else { a.shape };
    let ([m, k], [_, n]) = (dims(left, left_t), dims(right, right_t));
    let mut values = Vec::new();
    for i in 0..m {
        for j in 0..n {
            values.push((0..k).map(|l| at(left, left_t, i, l) * at(right, right_t, l, j)).sum());
        }
    }
    Array { shape: [m, n], values }
}

/// Returns the summed loss and its gradient with respect to the logits.
pub(crate) fn cross_entropy(logits: &Array, targets: &[i64]) -> (f64, Array) {
    let mut loss = 0.0;
    let mut gradient = Vec::new();
    for (row, target) in targets.iter().enumerate() {
        let row = logits.row(row);
        if *target < 0 {
            gradient.extend(row.iter().map(|_| 0.0));
            continue;
        }
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        loss += sum.ln() + max - row[*target as usize];
        gradient.extend(
            row.iter()
                .enumerate()
                .map(|(i, x)| (x - max).exp() / sum - f64::from(u8::from(i == *target as usize))),
        );
    }
    (loss, Array { shape: logits.shape, values: gradient })
}

/// Returns the output and the gradient with respect to the packed input. Each weight is multiplied
/// by `factor(head, query, key)`.
pub(crate) fn attention(
    projected: &Array,
    &SelfAttention { batch, heads, key_value_heads, scale, soft_cap, ref mask, .. }: &SelfAttention,
    factor: impl Fn(usize, usize, usize) -> f64,
    dy: &Array,
) -> [Vec<f64>; 2] {
    let positions = projected.shape[0] / batch;
    let columns = projected.shape[1];
    let head_width = columns / (heads + 2 * key_value_heads);
    let width = heads * head_width;
    let mut y = vec![0.0; batch * positions * width];
    let mut gradient = vec![0.0; projected.values.len()];
    for head in 0..batch * heads {
        let column = head % heads * head_width;
        let shared = head % heads * key_value_heads / heads;
        let starts = [head % heads, heads + shared, heads + key_value_heads + shared];
        let row_of = |position: usize| head / heads * positions + position;
        let at =
            |position, part: usize, i| row_of(position) * columns + starts[part] * head_width + i;
        let out = |position, i| row_of(position) * width + column + i;
        let input = &projected.values;
        for query in 0..positions {
            let dot = |key| -> f64 {
                (0..head_width).map(|i| input[at(query, 0, i)] * input[at(key, 1, i)]).sum()
            };
            let seen = match mask {
                AttentionMask::Causal => 0..query + 1,
                AttentionMask::Window(window) => (query + 1).saturating_sub(*window)..query + 1,
                AttentionMask::Since(first) => first[row_of(query)]..query + 1,
                AttentionMask::Lengths(lengths) => 0..lengths[head / heads].clamp(1, positions),
            };
            let capped = |score: f64| soft_cap.map_or(score, |cap| cap * (score / cap).tanh());
            let slope = |score: f64| soft_cap.map_or(1.0, |cap| 1.0 - (score / cap).tanh().powi(2));
            let products: Vec<f64> = seen.clone().map(|key| scale * dot(key)).collect();
            let scores: Vec<f64> = products.iter().map(|score| capped(*score)).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
            let mut weights_grad = vec![0.0; seen.len()];
            for (n, key) in seen.clone().enumerate() {
                let factor = factor(head, query, key);
                for i in 0..head_width {
                    let dy = dy.values[out(query, i)];
                    y[out(query, i)] += weights[n] * factor * input[at(key, 2, i)];
                    gradient[at(key, 2, i)] += weights[n] * factor * dy;
                    weights_grad[n] += factor * dy * input[at(key, 2, i)];
                }
            }
            let mean: f64 = weights.iter().zip(&weights_grad).map(|(w, g)| w * g).sum();
            for (n, key) in seen.enumerate() {
                let score_grad = weights[n] * (weights_grad[n] - mean) * slope(products[n]) * scale;
                for i in 0..head_width {
                    gradient[at(query, 0, i)] += score_grad * input[at(key, 1, i)];
                    gradient[at(key, 1, i)] += score_grad * input[at(query, 0, i)];
                }
            }
        }
    }
    [y, gradient]
}
