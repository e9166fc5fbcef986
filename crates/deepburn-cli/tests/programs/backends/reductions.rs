//! Tests sums on wgpu against references in f64, through the backends on which models train.

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
