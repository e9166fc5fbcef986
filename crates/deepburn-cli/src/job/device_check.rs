//! A self-test of a device, before models are built on it.
//!
//! A device that is visible may not compute. CubeCL compiles the kernels of CUDA at run time, with
//! a library and headers that a machine may lack. It then only logs the failure, and results are
//! memory that nothing wrote. The self-test computes a known result: an element-wise kernel, casts
//! and a matrix product, which together need all of CUDA's headers that training needs.

use burn::tensor::backend::Backend as TensorBackend;
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use deepburn::dtype_of;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn_config::{Backend, Precision};
use tracing::warn;

use crate::failure::Failure;
use crate::job::device_panics::{self, Caught};

/// The variable that turns the self-test off: a stand-in for a driver, with which launches are
/// counted, computes nothing.
const SWITCH: &str = "DEEPBURN_SELF_TEST";

/// The number of elements of the array.
const NUMBERS: usize = 1000;

/// The rows and columns of the matrices of the product.
const WIDTH: usize = 16;

/// Refuses a device that does not compute in `precision`, the precision of products.
///
/// # Errors
/// Returns a failure that names the device, what went wrong, and the usual causes.
pub(crate) fn check_device<B: FusedOps + OptimizerOps>(
    backend: Backend,
    device: &B::Device,
    precision: Precision,
) -> Result<(), Failure> {
    if backend.is_host() {
        return Ok(());
    }
    if std::env::var_os(SWITCH).is_some_and(|value| value == "off") {
        warn!("{SWITCH}=off: the device {device:?} is used without a self-test");
        return Ok(());
    }
    let computed =
        device_panics::caught(|| B::in_shared_stream(|| compute::<B>(device, dtype_of(precision))));
    judge(backend, &format!("{device:?}"), computed)
}

/// Returns the array doubled, and the product of two matrices of ones, all computed in `dtype`.
fn compute<B: FusedOps + OptimizerOps>(device: &B::Device, dtype: DType) -> Vec<f32> {
    let numbers = TensorData::new(numbers().collect(), [NUMBERS]);
    let doubled = Tensor::<B, 1>::from_data(numbers, device) * 2.0;
    let ones = || {
        let matrix = Tensor::<B, 2>::ones([WIDTH, WIDTH], device).cast(dtype);
        matrix.into_primitive().tensor()
    };
    let product = TensorPrimitive::Float(B::matmul(ones(), ones()));
    let product = Tensor::<B, 2>::from_primitive(product).reshape([WIDTH * WIDTH]);
    [doubled.cast(dtype), product].into_iter().flat_map(read).collect()
}

/// Returns the elements of a tensor.
fn read<B: TensorBackend>(tensor: Tensor<B, 1>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().iter::<f32>().collect()
}

/// Returns the elements of the array. All of them are exact in 8 bits of mantissa, doubled too.
fn numbers() -> impl Iterator<Item = f32> {
    (0..NUMBERS).map(|i| (i % 200 + 1) as f32)
}

/// Returns what a device that computes returns.
fn expected() -> Vec<f32> {
    numbers().map(|x| 2.0 * x).chain([WIDTH as f32; WIDTH * WIDTH]).collect()
}

/// Compares the results of a device with the expected ones.
fn judge(backend: Backend, device: &str, computed: Caught<Vec<f32>>) -> Result<(), Failure> {
    let Caught { result, panics } = computed;
    let expected = expected();
    let (problem, known_remedy) = match (panics.first(), &result) {
        (None, Some(values)) if *values == expected => return Ok(()),
        (Some(fault), _) => (fault.cause.clone(), fault.remedy),
        (None, None) => ("the self-test ended without a result".to_owned(), None),
        (None, Some(values)) => {
            let wrong = values.iter().zip(&expected).filter(|(value, right)| value != right);
            let first = wrong
                .clone()
                .next()
                .map(|(value, right)| format!("; the first is {value} instead of {right}"));
            let problem = format!(
                "{} of {} results are wrong{}",
                wrong.count() + expected.len().abs_diff(values.len()),
                expected.len(),
                first.unwrap_or_default()
            );
            (problem, None)
        }
    };
    let remedy = known_remedy.unwrap_or(match backend {
        Backend::Cuda => {
            "check that the program finds CUDA's compiler, libnvrtc.so (LD_LIBRARY_PATH), and its headers (CUDA_PATH, \
             the folder with include/cuda_runtime.h)"
        }
        _ => "check the device's driver",
    });
    Err(Failure::run(format!(
        "training.backend: \"{}\": the device {device} failed its self-test: {problem}; {remedy}, or use \"flex\"",
        backend.name()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::device_fault::DeviceFault;

    fn error(backend: Backend, result: Option<Vec<f32>>, panics: &[&str]) -> String {
        let panics = panics.iter().map(|text| DeviceFault::of(text)).collect();
        let failure = judge(backend, "CudaDevice { index: 1 }", Caught { result, panics });
        let failure = failure.expect_err("a device that does not compute is refused");
        assert_eq!(failure.status(), 1);
        failure.to_string()
    }

    #[test]
    fn a_device_that_computes_is_accepted() {
        let computed = Caught { result: Some(expected()), panics: Vec::new() };
        assert!(judge(Backend::Cuda, "CudaDevice { index: 0 }", computed).is_ok());
        let device = burn_flex::FlexDevice;
        let computed = compute::<burn_flex::Flex>(&device, DType::BF16);
        assert_eq!(computed, expected());
    }

    #[test]
    fn unwritten_memory_is_refused_with_its_usual_causes() {
        let message = error(Backend::Cuda, Some(vec![0.0; expected().len()]), &[]);
        for part in [
            "training.backend: \"cuda\": the device CudaDevice { index: 1 }",
            "1256 of 1256 results are wrong; the first is 0 instead of 2",
            "libnvrtc.so",
            "CUDA_PATH",
            "use \"flex\"",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
        let mut one = expected();
        one[7] = 0.5;
        let message = error(Backend::Wgpu, Some(one), &[]);
        assert!(message.contains("1 of 1256 results are wrong; the first is 0.5 instead of 16"));
        assert!(message.contains("driver") && !message.contains("CUDA_PATH"), "{message}");
    }

    /// A panic in the device's thread is refused even if the results happen to be right. The
    /// remedy belongs to its cause.
    #[test]
    fn panics_are_the_cause() {
        let text = "Unable to dynamically load the \"nvrtc\" shared library";
        for result in [None, Some(expected())] {
            let message = error(Backend::Cuda, result.clone(), &[text, "a consequence"]);
            assert!(message.contains("libnvrtc.so, was not found"), "{message}");
            assert!(message.contains("LD_LIBRARY_PATH") && !message.contains("CUDA_PATH"));
            assert!(!message.contains("a consequence"), "{message}");
            let unknown = error(Backend::Cuda, result, &["the device is lost"]);
            assert!(unknown.contains("self-test: the device is lost; check that"), "{unknown}");
        }
        assert!(error(Backend::Cuda, None, &[]).contains("without a result"));
    }
}
