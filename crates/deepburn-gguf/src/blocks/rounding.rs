//! Conversions of floats to integers, with the results of llama.cpp's C code on x86-64.

/// Returns the nearest integer, ties to even, for magnitudes up to 4,194,303.
///
/// Adding 1.5 · 2^23 leaves no bits for a fraction, so that the sum's low mantissa bits are the
/// rounded integer (`nearest_int` of llama.cpp). Larger values and NaN give the same meaningless
/// integer as there, which callers clamp.
pub(super) fn nearest_int(value: f32) -> i32 {
    let bits = (value + 12_582_912.0).to_bits() as i32;
    (bits & 0x007f_ffff) - 0x0040_0000
}

/// Converts to 8 bits, towards zero.
///
/// Values outside of i32 and NaN become 0. C does not define them; x86-64 converts them to the i32
/// whose low bits are zero. They occur in blocks of denormals, where the reciprocal of the scale is
/// infinite. Their scale is stored as 0, so that the byte does not matter to the values.
pub(super) fn to_i8(value: f32) -> i8 {
    let in_range = (-2_147_483_648.0..2_147_483_648.0).contains(&value);
    if in_range { value as i32 as i8 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_round_to_even() {
        let rounded = [0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -7.6, 4_194_303.0].map(nearest_int);
        assert_eq!(rounded, [0, 2, 2, 0, -2, 0, -8, 4_194_303]);
    }

    #[test]
    fn values_out_of_range_become_zero() {
        let converted = [1.9, -1.9, 127.0, f32::INFINITY, f32::NAN, -3e9].map(to_i8);
        assert_eq!(converted, [1, -1, 127, 0, 0, 0]);
    }
}
