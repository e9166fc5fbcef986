//! Sums and means of all elements.

use burn::tensor::{Tensor, TensorData};
use burn_flex::{Flex, FlexTensor};
use deepburn_ops::SumOps;

use crate::{Array, same_on_all_threads, values};

/// Rows and columns of a tensor whose sum burn-flex divides among threads. The last part of 64 Ki
/// elements is not full.
const LARGE: [usize; 2] = [2053, 2049];

fn primitive(tensor: Tensor<Flex, 2>) -> FlexTensor {
    tensor.into_primitive().tensor()
}

fn tensor(shape: [usize; 2]) -> Tensor<Flex, 2> {
    let values: Vec<f32> = Array::new(shape, 1).values.iter().map(|x| *x as f32 + 0.5).collect();
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

/// A large tensor, its transpose, and a large part of it that is not contiguous.
fn large() -> [Tensor<Flex, 2>; 3] {
    let whole = tensor(LARGE);
    let wider = tensor([LARGE[0], LARGE[1] + 3]);
    [whole.clone(), whole.transpose(), wider.slice([0..LARGE[0], 1..LARGE[1] + 1])]
}

#[test]
fn sums_of_large_tensors_do_not_depend_on_threads() {
    let tensors = large();
    same_on_all_threads(|| {
        let sums = tensors.iter().map(|tensor| Flex::sum(primitive(tensor.clone())));
        let means = tensors.iter().map(|tensor| Flex::mean(primitive(tensor.clone())));
        sums.chain(means).flat_map(values).collect()
    });
}

/// A part of 64 Ki elements has 64 or more partial sums, to each of which at most 1024 elements are
/// added one by one. 65 parts follow. An addition rounds by 2^-24 of its result, which is at most
/// the sum of magnitudes.
#[test]
fn sums_of_large_tensors_follow_the_f64_reference() {
    const ADDITIONS: f64 = 1200.0;
    for tensor in large() {
        let elements: Vec<f64> = tensor.to_data().iter::<f64>().collect();
        let expected: f64 = elements.iter().sum();
        let magnitudes: f64 = elements.iter().map(|x| x.abs()).sum();
        let tolerance = ADDITIONS * 2f64.powi(-24) * magnitudes;
        let sum = values(Flex::sum(primitive(tensor.clone())));
        assert!((sum[0] - expected).abs() <= tolerance, "{sum:?} for {expected}");
        let mean = values(Flex::mean(primitive(tensor)));
        let count = elements.len() as f64;
        assert!((mean[0] - expected / count).abs() <= tolerance / count, "{mean:?}");
        assert_eq!((sum.len(), mean.len()), (1, 1));
    }
}

/// Smaller tensors and other types have the bits of burn-flex.
#[test]
fn other_sums_are_burns() {
    use burn::tensor::DType;
    for shape in [[0, 3], [1, 1], [37, 45], [1024, 4095]] {
        for dtype in [DType::F32, DType::F16, DType::F64] {
            let tensor = tensor(shape).cast(dtype);
            let sum = values(Flex::sum(primitive(tensor.clone())));
            assert_eq!(sum, values(primitive(tensor.clone().sum().unsqueeze())), "{shape:?}");
            if shape[0] > 0 {
                let mean = values(Flex::mean(primitive(tensor.clone())));
                assert_eq!(mean, values(primitive(tensor.mean().unsqueeze())), "{shape:?}");
            }
        }
    }
}
