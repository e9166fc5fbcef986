//! Products with quantized matrices against the same products with their dequantized elements.

use burn::tensor::{DType, Shape, Tensor};
use burn_backend::ops::{FloatTensorOps, IntTensorOps, ModuleOps};
use burn_backend::{Bytes, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::{BlockFormat, RowEncoding};
use deepburn_ops::{
    CrossEntropyOps, HeadGradients, LinearOps, MatmulOps, QuantizedMatrix, dequantize, quantize,
    quantized_rows,
};
use half::bf16;
use proptest::prelude::*;

use crate::{Array, DTYPES, assert_close, indices, same_on_all_threads, tolerance, values};

const FORMATS: [BlockFormat; 3] =
    [BlockFormat::Nf4 { double: false }, BlockFormat::Nf4 { double: true }, BlockFormat::Int8];

fn primitive<const D: usize>(tensor: Tensor<Flex, D>) -> FlexTensor {
    tensor.into_primitive().tensor()
}

fn input(shape: [usize; 2], seed: u64, dtype: DType) -> FlexTensor {
    primitive(Array::new(shape, seed).tensor(dtype))
}

/// Returns a quantized matrix and its elements.
fn matrix(
    shape: [usize; 2],
    format: BlockFormat,
    dtype: DType,
) -> (QuantizedMatrix<Flex>, FlexTensor) {
    let words = quantize::<Flex>(input(shape, 7, DType::F32), format);
    let matrix = QuantizedMatrix::<Flex>::new(words, format, shape, dtype);
    let whole: FlexTensor = matrix.dequantized();
    assert_eq!((whole.shape(), whole.dtype()), (Shape::from(shape), dtype));
    (matrix, whole)
}

/// The kernels decode the same elements and add in the same order, so there is no tolerance.
fn check_products([rows, inputs, outputs]: [usize; 3]) {
    for (format, dtype) in FORMATS.into_iter().flat_map(|it| DTYPES.map(|dtype| (it, dtype))) {
        let what = format!("{format:?} {dtype:?} [{rows}, {inputs}] [{inputs}, {outputs}]");
        let (weight, whole) = matrix([inputs, outputs], format, dtype);
        let x = input([rows, inputs], 1, dtype);
        let grad = input([rows, outputs], 2, dtype);
        for bias in [None, Some(primitive(Array::new([1, outputs], 3).vector(dtype)))] {
            let found = Flex::quantized_linear(x.clone(), &weight, bias.clone());
            let expected = Flex::fused_linear(x.clone(), whole.clone(), bias);
            assert_eq!(found.dtype(), dtype);
            assert!(values(found) == values(expected), "{what}");
        }
        let found = Flex::quantized_x_gradient(grad.clone(), &weight);
        let expected = Flex::linear_x_gradient(grad.clone(), whole.clone());
        assert!(values(found) == values(expected), "gradient, {what}");
        let transposed = weight.transposed();
        assert_eq!(transposed.shape(), [outputs, inputs]);
        let found = Flex::quantized_matmul(grad.clone(), &transposed);
        let expected = Flex::matmul(grad, Flex::float_transpose(whole));
        assert!(values(found) == values(expected), "product, {what}");
    }
}

#[test]
fn products_equal_those_with_the_elements() {
    // Odd sizes; one row; blocks over several rows; several panels of both orientations; nothing.
    for shape in [
        [3, 5, 7],
        [1, 130, 66],
        [9, 64, 64],
        [70, 33, 257],
        [4, 20_000, 200],
        [4, 200, 20_000],
        [0, 5, 7],
        [3, 0, 7],
        [3, 5, 0],
    ] {
        check_products(shape);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn products_of_any_shape(rows in 1_usize..40, inputs in 1_usize..150, outputs in 1_usize..150) {
        check_products([rows, inputs, outputs]);
    }
}

#[test]
fn operands_of_different_types() {
    let (weight, whole) = matrix([70, 90], FORMATS[0], DType::BF16);
    let x = input([5, 70], 1, DType::F32);
    let found = Flex::quantized_linear(x.clone(), &weight, None);
    assert_eq!(values(found), values(Flex::fused_linear(x, whole, None)));
    let (weight, whole) = matrix([70, 90], FORMATS[0], DType::F64);
    let x = input([5, 70], 1, DType::F64);
    let found = Flex::quantized_linear(x.clone(), &weight, None);
    assert_eq!(values(found), values(Flex::fused_linear(x, whole, None)));
}

#[test]
fn leading_axes_of_a_product_are_rows() {
    let (weight, whole) = matrix([10, 90], FORMATS[2], DType::F32);
    let x = Flex::float_reshape(input([6, 10], 1, DType::F32), Shape::from([2, 3, 10]));
    let found = Flex::quantized_matmul(x.clone(), &weight);
    assert_eq!(found.shape(), Shape::from([2, 3, 90]));
    let whole = Flex::float_reshape(whole, Shape::from([1, 10, 90]));
    assert_eq!(values(found), values(Flex::matmul(x, whole)));
}

#[test]
fn heads_equal_those_with_the_elements() {
    // The last one has several panels and several chunks of logits.
    for [tokens, width, vocab] in [[5, 7, 30], [9, 64, 130], [300, 70, 130_000]] {
        for dtype in [DType::F32, DType::BF16] {
            let (weight, whole) = matrix([vocab, width], FORMATS[1], dtype);
            let hidden = input([tokens, width], 1, dtype);
            let targets: Vec<i64> = (0..tokens).map(|i| (i * 37 % vocab) as i64 - 1).collect();
            let targets = || indices(&targets).into_primitive();
            let wanted = HeadGradients { hidden: true, weight: false };
            let found = Flex::quantized_head_loss(hidden.clone(), &weight, targets(), true);
            let expected = Flex::head_loss(hidden.clone(), whole, targets(), wanted);
            assert!(found.gradients.weight.is_none());
            assert_eq!(values(found.loss.clone()), values(expected.loss), "{dtype:?}");
            let [found_grad, expected] =
                [found.gradients.hidden, expected.gradients.hidden].map(|it| values(it.unwrap()));
            // The same products, added panel by panel: sums of `vocab` products of at most 1.
            // Kernels for 16 bits add up to 4096 of them to an f32 before they start another one.
            // Each addition rounds by at most 2^-24, so that two orders differ by up to 2 * 4096 *
            // 2^-24. For the last size and AVX512-BF16, the sums by panels are off by 2.1e-5 from
            // the sum in f64, and the others by 7.2e-5.
            let bound = if dtype == DType::F32 { 1e-5 } else { 4.9e-4 };
            assert_close(&found_grad, &expected, bound, "gradient of the hidden states");
            let alone = Flex::quantized_head_loss(hidden, &weight, targets(), false);
            assert!(alone.gradients.hidden.is_none());
            assert_eq!(values(alone.loss), values(found.loss));
        }
    }
}

#[test]
fn rows_equal_the_elements() {
    for (format, dtype) in FORMATS.into_iter().flat_map(|it| DTYPES.map(|dtype| (it, dtype))) {
        let (table, whole) = matrix([50, 33], format, dtype);
        let ids = || {
            let ids = indices(&[3, 49, 0, 3, 17, 20]).into_primitive();
            Flex::int_reshape(ids, Shape::from([2, 3]))
        };
        let found = quantized_rows(&table, ids());
        assert_eq!((found.shape(), found.dtype()), (Shape::from([2, 3, 33]), dtype));
        assert_eq!(values(found), values(Flex::embedding(whole, ids())));
    }
}

#[test]
fn elements_are_rounded_once() {
    let array = Array::new([40, 50], 7);
    let words = quantize::<Flex>(primitive(array.tensor(DType::F32)), FORMATS[0]);
    let [single, half] = [DType::F32, DType::BF16]
        .map(|dtype| values(dequantize::<Flex>(words.clone(), FORMATS[0], [2000].into(), dtype)));
    for (single, half) in single.iter().zip(half) {
        assert_eq!(bf16::from_f32(*single as f32).to_f64(), half);
    }
}

#[test]
fn threads_do_not_change_bits() {
    let (weight, _) = matrix([300, 5000], FORMATS[0], DType::BF16);
    let x = input([64, 300], 1, DType::BF16);
    same_on_all_threads(|| values(Flex::quantized_linear(x.clone(), &weight, None)));
}

const ROW_FORMATS: [RowEncoding; 4] =
    [RowEncoding::F16, RowEncoding::Bf16, RowEncoding::Q8_0, RowEncoding::Q4_0];

/// Returns a matrix of `[rows, depth]` with encoded rows, and its elements. `depth` is a multiple
/// of 32.
fn encoded_rows(
    shape: [usize; 2],
    format: RowEncoding,
    dtype: DType,
) -> (QuantizedMatrix<Flex>, FlexTensor) {
    let numel = shape[0] * shape[1];
    let code = |i: usize| (i * 97 % 251) as u8;
    let mut bytes: Vec<u8> = Vec::new();
    match format {
        RowEncoding::F16 | RowEncoding::Bf16 => {
            // Numbers between 2^-4 and 2^-3 in both formats: the exponents are constant.
            let high = if format == RowEncoding::F16 { 0x2c } else { 0x3d };
            (0..numel).for_each(|i| bytes.extend([code(i) & 0x7f, high | code(i) & 0x80]));
        }
        RowEncoding::Q8_0 | RowEncoding::Q4_0 => (0..numel / 32).for_each(|block| {
            // A scale between 2^-8 and 2^-7.
            bytes.extend([code(block), 0x1c]);
            bytes.extend((0..format.num_bytes(32) - 2).map(|i| code(block * 7 + i)));
        }),
    }
    let words = format.words_of(&bytes);
    let len = words.len();
    let words = TensorData::from_bytes(Bytes::from_elems(words), vec![len], DType::F32);
    let matrix = QuantizedMatrix::new(FlexTensor::from_data(words), format, shape, dtype);
    let whole: FlexTensor = matrix.dequantized();
    assert_eq!((whole.shape(), whole.dtype()), (Shape::from(shape), dtype));
    (matrix, whole)
}

/// Several vectors use the kernels of decoded elements, which add in the same order. One vector is
/// multiplied with the blocks.
#[test]
fn encoded_rows_multiply_like_their_elements() {
    for (format, dtype) in ROW_FORMATS.into_iter().flat_map(|it| DTYPES.map(|dtype| (it, dtype))) {
        let (matrix, whole) = encoded_rows([130, 96], format, dtype);
        let weight = matrix.clone().transposed();
        let whole = Flex::float_transpose(whole);
        let bias = || Some(primitive(Array::new([1, 130], 3).vector(dtype)));
        for rows in [0, 1, 5] {
            let x = input([rows, 96], 1, dtype);
            let found = Flex::quantized_linear(x.clone(), &weight, bias());
            let expected = Flex::fused_linear(x, whole.clone(), bias());
            assert_eq!((found.shape(), found.dtype()), (Shape::from([rows, 130]), dtype));
            let (found, expected) = (values(found), values(expected));
            match rows {
                // The elements of the blocks are not rounded to the type of the vector, but the
                // vector to 16 bits: 96 elements of at most 1 with errors of 2^-16, times at
                // most 1.
                1 => {
                    let bound = 2.0 * tolerance(dtype) + 96.0 / 65536.0;
                    assert_close(&found, &expected, bound, &format!("{format:?}"));
                }
                _ => assert!(found == expected, "{format:?} {dtype:?} {rows} rows"),
            }
        }
        // A product with the rows themselves adds along the columns.
        let x = input([1, 130], 2, dtype);
        let found = Flex::quantized_linear(x.clone(), &matrix, None);
        assert!(values(found) == values(Flex::fused_linear(x, Flex::float_transpose(whole), None)));
    }
}

#[test]
fn rows_of_a_table_with_encoded_rows() {
    for (format, dtype) in ROW_FORMATS.into_iter().flat_map(|it| DTYPES.map(|dtype| (it, dtype))) {
        let (table, whole) = encoded_rows([50, 64], format, dtype);
        let ids = || indices(&[3, 49, 0, 3]).into_primitive();
        let ids = || Flex::int_reshape(ids(), Shape::from([1, 4]));
        assert_eq!(values(quantized_rows(&table, ids())), values(Flex::embedding(whole, ids())));
    }
}
