use proptest::prelude::*;

use super::*;

fn round_trip(tensor_type: TensorType, values: &[f32]) -> Vec<f32> {
    let (mut bytes, mut decoded) = (Vec::new(), Vec::new());
    tensor_type.encode(values, &mut bytes).unwrap();
    assert_eq!(Some(bytes.len() as u64), tensor_type.size_of(values.len() as u64));
    tensor_type.decode(&bytes, &mut decoded);
    decoded
}

/// The largest error relative to the largest magnitude of a block: half a step, plus the rounding
/// of the scales. Scales must be in the normal range of f16.
fn tolerance(tensor_type: TensorType) -> f32 {
    match tensor_type {
        TensorType::F32 => 0.0,
        // Half a unit in the last place: 2^-11 and 2^-8.
        TensorType::F16 => 0.0005,
        TensorType::Bf16 => 0.004,
        // Half of 2 / 254, half of 2 / 16 (a whole step at the end without a level), and half of 2
        // / 32.
        TensorType::Q8_0 => 0.0045,
        TensorType::Q4_0 => 0.126,
        TensorType::Q5_0 => 0.063,
        // The search may leave out extreme values. Within a block, a scale may be rounded by 1 /
        // 126 of the largest one (by 1 / 256 in q6_k), which all 15 (31, 32) levels multiply.
        TensorType::Q4K => 0.30,
        TensorType::Q5K => 0.30,
        TensorType::Q6K => 0.15,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn decoded_values_are_close(
        scale in -0.5_f32..3.0,
        values in prop::collection::vec(-1_f32..1.0, 512),
    ) {
        let values: Vec<_> = values.iter().map(|value| value * 10_f32.powf(scale)).collect();
        for tensor_type in TensorType::ALL {
            let decoded = round_trip(tensor_type, &values);
            let block = tensor_type.block_len();
            for (values, decoded) in values.chunks(block).zip(decoded.chunks(block)) {
                let largest = values.iter().fold(0.0_f32, |max, value| max.max(value.abs()));
                for (value, decoded) in values.iter().zip(decoded) {
                    let error = (value - decoded).abs();
                    // Below 2^-14, f16 has steps of 2^-24, whatever the value is.
                    let step = if tensor_type == TensorType::F16 { 2_f32.powi(-25) } else { 0.0 };
                    let limit = tolerance(tensor_type) * largest + step;
                    prop_assert!(error <= limit, "{tensor_type}: {value} {decoded}");
                }
            }
        }
    }
}

#[test]
fn blocks_do_not_depend_on_their_neighbors() {
    let values: Vec<f32> =
        (0..3 * TASK_LEN + 512).map(|i| ((i * 37 % 1013) as f32).sin()).collect();
    for tensor_type in TensorType::ALL {
        let (mut whole, mut separate) = (Vec::new(), Vec::new());
        tensor_type.encode(&values, &mut whole).unwrap();
        for block in values.chunks(256) {
            tensor_type.encode(block, &mut separate).unwrap();
        }
        assert!(whole == separate, "{tensor_type}");
    }
}

#[test]
fn zeros_stay_zero() {
    for tensor_type in TensorType::ALL {
        assert!(round_trip(tensor_type, &[0.0; 256]).iter().all(|value| *value == 0.0));
    }
}

#[test]
fn values_that_are_not_finite_are_errors() {
    for tensor_type in TensorType::ALL {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![0.5; 2 * TASK_LEN];
            values[TASK_LEN + 300] = value;
            let mut bytes = vec![7];
            let error = tensor_type.encode(&values, &mut bytes).unwrap_err();
            assert!(
                matches!(error, EncodeError::NotFinite { index, .. } if index == TASK_LEN + 300)
            );
            assert_eq!(bytes, [7]);
        }
    }
}

#[test]
fn values_beyond_16_bits_are_errors() {
    for tensor_type in TensorType::ALL.into_iter().filter(|it| *it != TensorType::F32) {
        let mut values = [1.0; 512];
        values[300] = f32::MAX;
        let error = tensor_type.encode(&values, &mut Vec::new()).unwrap_err();
        let remedy = if tensor_type == TensorType::Bf16 { "; use f32" } else { "; use bf16" };
        assert!(error.to_string().ends_with(remedy), "{error}");
        let EncodeError::Overflow { index, largest, .. } = error else { panic!("{error}") };
        assert_eq!(index, 300 / tensor_type.block_len() * tensor_type.block_len());
        assert_eq!(largest, f32::MAX);
    }
    // 65520 is the first value that f16 rounds to infinity.
    assert!(TensorType::F16.encode(&[65519.0], &mut Vec::new()).is_ok());
    assert!(TensorType::F16.encode(&[65520.0], &mut Vec::new()).is_err());
}

#[test]
fn incomplete_blocks_are_errors() {
    let error = TensorType::Q4K.encode(&[0.0; 255], &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("255") && error.contains("256"), "{error}");
    let mut values = Vec::new();
    TensorType::Q8_0.decode(&[0; 67], &mut values);
    assert_eq!(values.len(), 32);
}
