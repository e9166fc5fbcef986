//! Tests sums and products on wgpu against references in f64, through the backends on which models
//! train.

use burn::tensor::backend::Backend;
use burn::tensor::module::linear;
use burn::tensor::{Tensor, TensorData};
use burn_wgpu::{Wgpu, WgpuDevice};
use deepburn::zero::{Training, Zero};

/// Deterministic numbers in [-1, 1).
fn noise(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((seed * 7919 + i) as f32 * 0.618_034).sin()).collect()
}

/// Sums of views have the order of their elements, and the same bits each time. At most 64
/// additions lie between an element and the sum, each of which rounds by 2^-24.
#[test]
fn sums_follow_the_f64_reference_with_the_same_bits_each_time() {
    for [rows, columns] in [[1, 1], [3, 45], [128, 257], [1000, 1003]] {
        let values = noise(rows * columns, rows);
        let whole = Tensor::<Zero<Wgpu>, 2>::from_data(
            TensorData::new(values.clone(), [rows, columns]),
            &WgpuDevice::default(),
        );
        let left = columns.div_ceil(2);
        let of_left = values.chunks(columns).flat_map(|row| &row[..left]);
        for (tensor, elements) in [
            (whole.clone(), values.iter().collect::<Vec<_>>()),
            (whole.clone().transpose(), values.iter().collect()),
            (whole.slice([0..rows, 0..left]), of_left.collect()),
        ] {
            let expected: f64 = elements.iter().map(|x| f64::from(**x)).sum();
            let magnitudes: f64 = elements.iter().map(|x| f64::from(x.abs())).sum();
            let sums = [(); 3].map(|()| tensor.clone().sum().into_scalar());
            let difference = (f64::from(sums[0]) - expected).abs();
            let tolerance = 64.0 * 2f64.powi(-24) * magnitudes;
            assert!(difference <= tolerance, "{rows} x {columns}: {} for {expected}", sums[0]);
            assert_eq!(sums.map(f32::to_bits), [sums[0].to_bits(); 3], "{rows} x {columns}");
        }
    }
    let empty = Tensor::<Zero<Wgpu>, 2>::zeros([0, 3], &WgpuDevice::default());
    assert_eq!(empty.sum().into_scalar(), 0.0);
}

/// Autodiff records a sum: each element has the gradient of the sum.
#[test]
fn sums_have_gradients() {
    let tensor = Tensor::<Training<Wgpu>, 1>::from_data(
        TensorData::new(noise(100, 3), [100]),
        &WgpuDevice::default(),
    )
    .require_grad();
    let gradients = (tensor.clone().sum() * 3.0).backward();
    let gradient = tensor.grad(&gradients).expect("the sum depends on the tensor");
    assert_eq!(gradient.into_data().to_vec::<f32>().unwrap(), vec![3.0; 100]);
}

/// A product rounds each of its `depth` multiplications and additions by 2^-24 of its result. TF32
/// would round the operands by 2^-11.
#[test]
fn products_of_float32_have_all_bits() {
    for [batch, rows, depth, columns] in
        [[1, 1, 1, 1], [1, 5, 45, 3], [3, 17, 64, 33], [1, 128, 300, 70]]
    {
        let (left, right) = (noise(batch * rows * depth, 1), noise(depth * columns, 2));
        let tensor = |values: &[f32], shape| {
            let data = TensorData::new(values.to_vec(), shape);
            Tensor::<Zero<Wgpu>, 3>::from_data(data, &WgpuDevice::default())
        };
        // One matrix for the whole batch, and an operand that is stored transposed.
        let lhs = tensor(&left, [batch, rows, depth]);
        let rhs = tensor(&right, [1, columns, depth]).transpose();
        let product = lhs.matmul(rhs).into_data().to_vec::<f32>().unwrap();
        for (place, product) in product.into_iter().enumerate() {
            let row = &left[place / columns * depth..][..depth];
            let column = &right[place % columns * depth..][..depth];
            let terms = || row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (expected, magnitudes): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
            let tolerance = 2.0 * depth as f64 * 2f64.powi(-24) * magnitudes;
            let difference = (f64::from(product) - expected).abs();
            assert!(difference <= tolerance, "{rows} x {depth} x {columns}: {product}, {expected}");
        }
    }
}

/// Burn's linear layer and its gradients have the bits of plain Burn on a device without tensor
/// cores.
#[test]
#[cfg_attr(feature = "fusion", ignore = "fusion depends on earlier ops")]
fn linear_layers_are_burns() {
    fn operand<B: Backend, const D: usize>(shape: [usize; D], seed: usize) -> Tensor<B, D> {
        let data = TensorData::new(noise(shape.iter().product(), seed), shape);
        Tensor::from_data(data, &B::Device::default())
    }
    type Trained = Training<Wgpu>;
    let x = operand::<Trained, 3>([2, 5, 7], 1).require_grad();
    let weight = operand::<Trained, 2>([7, 3], 2).require_grad();
    let output = linear(x.clone(), weight.clone(), Some(operand([3], 3)));
    // The gradient of the output is the output.
    let gradients = (output.clone() * output.clone().detach()).sum().backward();
    let x_gradient = x.grad(&gradients).expect("the input is tracked");
    let weight_gradient = weight.grad(&gradients).expect("the weight is tracked");

    let (x, weight) = (operand::<Wgpu, 3>([2, 5, 7], 1), operand::<Wgpu, 2>([7, 3], 2));
    let expected = linear(x.clone(), weight.clone(), Some(operand([3], 3)));
    assert_eq!(output.into_data(), expected.clone().into_data());
    let expected_x = expected.clone().matmul(weight.transpose().unsqueeze());
    assert_eq!(x_gradient.into_data(), expected_x.into_data());
    let expected_weight = x.transpose().matmul(expected).sum_dim(0).reshape([7, 3]);
    assert_eq!(weight_gradient.into_data(), expected_weight.into_data());
}
