//! Codes and scales against bitsandbytes, the definition of NF4, and properties of all formats.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::tests::noise;

const FORMATS: [BlockFormat; 3] =
    [BlockFormat::Nf4 { double: false }, BlockFormat::Nf4 { double: true }, BlockFormat::Int8];

/// The values of `tests/data/bitsandbytes/make.py`.
fn fixture() -> Vec<f32> {
    let value = |i: u64| {
        let hashed = (i * 2_654_435_761 % (1 << 32)) as f64 / (1_u64 << 32) as f64;
        let size = (i / 64 % 7 + 1) as f64;
        if i / 64 == 5 { 0.0 } else { ((hashed - 0.5) * size / 100.0) as f32 }
    };
    (0..64 * 260).map(value).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Decodes all elements.
fn decoded<E: Element>(format: BlockFormat, numel: usize, words: &[u32]) -> Vec<E> {
    let mut out = vec![E::narrow(7.0); numel];
    QuantizedSlice::new(format, numel, words).decode(0, &mut out);
    out
}

/// Returns the code of NF4's value that is nearest to `x`, the smaller one of two.
fn nearest_nf4(x: f64) -> u32 {
    let distance = |code: &u32| (f64::from(nf4::VALUES[*code as usize]) - x).abs();
    (0..16).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
}

impl BlockFormat {
    /// Computes the same result as [`encode`](Self::encode) one element at a time: each code is the
    /// nearest one, in f64.
    ///
    /// Of two codes at the same distance, the smaller one is taken.
    fn encode_reference(self, values: &[f32]) -> Vec<u32> {
        let mut words = vec![0; self.words(values.len())];
        let mut scales = Vec::new();
        let per_word = QUANTIZED_BLOCK / self.words_per_block();
        for (block, values) in values.chunks(QUANTIZED_BLOCK).enumerate() {
            let largest = largest(values);
            scales.push(if self == Self::Int8 { largest / 127.0 } else { largest });
            for place in 0..QUANTIZED_BLOCK {
                let value = values.get(place).copied().unwrap_or(0.0);
                let divisor = if largest > 0.0 { f64::from(largest) } else { 1.0 };
                let bits = match self {
                    Self::Nf4 { .. } => {
                        nearest_nf4(f64::from(value) / divisor) << (4 * ((place % 8) ^ 1))
                    }
                    Self::Int8 => {
                        let code = (f64::from(value) * (127.0 / divisor)).round_ties_even() as i8;
                        u32::from(code as u8) << (8 * (place % 4))
                    }
                };
                words[block * self.words_per_block() + place / per_word] |= bits;
            }
        }
        let scale_words = self.code_words(values.len());
        BlockScales::store(self.has_quantized_scales(), &scales, &mut words[scale_words..]);
        words
    }
}

impl QuantizedSlice<'_> {
    /// Returns one element in f32, computed from the definition of the format.
    fn get(&self, index: usize) -> f32 {
        let (block, place) = (index / QUANTIZED_BLOCK, index % QUANTIZED_BLOCK);
        let per_word = QUANTIZED_BLOCK / self.format.words_per_block();
        let word = self.codes[block * self.format.words_per_block() + place / per_word];
        let code = match self.format {
            BlockFormat::Nf4 { .. } => nf4::VALUES[(word >> (4 * ((place % 8) ^ 1)) & 15) as usize],
            BlockFormat::Int8 => f32::from((word >> (8 * (place % 4))) as u8 as i8),
        };
        code * self.scales.at(block)
    }
}

#[test]
fn codes_and_scales_equal_bitsandbytes() {
    let (values, blocks) = (fixture(), 260);
    let words = BlockFormat::Nf4 { double: false }.encode(&values);
    let codes: Vec<u8> = words[..8 * blocks].iter().flat_map(|word| word.to_le_bytes()).collect();
    let expected = include_bytes!("../../tests/data/bitsandbytes/codes.bin");
    // Codes of the block of zeros differ: bitsandbytes may take any code, because the scale is 0.
    let others = |codes: &[u8]| [&codes[..160], &codes[192..]].concat();
    assert!(others(&codes) == others(expected));
    let scales: Vec<f32> = words[8 * blocks..].iter().map(|word| f32::from_bits(*word)).collect();
    assert_eq!(scales, floats(include_bytes!("../../tests/data/bitsandbytes/scales.bin")));
}

#[test]
fn quantized_scales_equal_bitsandbytes() {
    let (values, format) = (fixture(), BlockFormat::Nf4 { double: true });
    let words = format.encode(&values);
    let slice = QuantizedSlice::new(format, values.len(), &words);
    let expected = floats(include_bytes!("../../tests/data/bitsandbytes/double.bin"));
    for (block, expected) in expected.iter().enumerate() {
        let found = slice.scales.at(block);
        // The mean is summed in another order: a few units in the last place of the largest scale,
        // 0.035. Block 164 is in the middle between two codes (0.00028141 and 0.00028109 away), and
        // bitsandbytes takes the farther one.
        let bound = if block == 164 { 1.2e-5 } else { 2e-8 };
        assert!((found - expected).abs() < bound, "block {block}: {found} instead of {expected}");
    }
}

/// Returns the quantile of the standard normal distribution at `p`, by bisection of its integral.
fn quantile(p: f64) -> f64 {
    // The series of the integral from 0 to x converges for the values here (Abramowitz and Stegun
    // 26.2.11).
    let integral = |x: f64| {
        let mut term = x;
        let mut sum = x;
        for n in 1..200 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
    };
    let (mut low, mut high) = (-5.0, 5.0);
    for _ in 0..200 {
        let middle = (low + high) / 2.0;
        if integral(middle) < p { low = middle } else { high = middle }
    }
    low
}

#[test]
fn the_values_are_quantiles_of_a_normal_distribution() {
    // bitsandbytes' create_normal_map: equally spaced probabilities from `offset` to 1/2, 8 of them
    // above 0 and 7 below.
    let offset = 0.967_708_3;
    let at =
        |count: i32, i: i32| quantile(offset + (0.5 - offset) * f64::from(i) / f64::from(count));
    let mut values: Vec<f64> = (0..8).map(|i| at(8, i)).collect();
    values.extend((0..7).map(|i| -at(7, i)));
    values.push(0.0);
    values.sort_by(f64::total_cmp);
    let largest = values[15];
    for (value, expected) in nf4::VALUES.iter().zip(values) {
        // The published values were computed in f32.
        assert!((f64::from(*value) - expected / largest).abs() < 1e-6, "{value} {expected}");
    }
}

#[test]
fn the_fast_encoder_agrees_with_the_reference() {
    for format in FORMATS {
        for len in [0, 1, 63, 64, 65, 4096, 100_003] {
            let values = noise(len, 5);
            assert!(format.encode(&values) == format.encode_reference(&values), "{format:?} {len}");
        }
    }
}

#[test]
fn a_value_that_is_not_finite_poisons_its_block_alone() {
    for format in [FORMATS[0], FORMATS[2]] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = noise(200, 9);
            values[70] = bad;
            let words = format.encode(&values);
            let found: Vec<f32> = decoded(format, 200, &words);
            assert!((0..200).all(|i| found[i].is_nan() == (64..128).contains(&i)), "{format:?}");
        }
    }
}

#[test]
fn sizes_follow_from_the_format() {
    // 4 bits and 32 / 64 of a scale; 8 bits and the same; 4 bits and 8 / 64 + 32 / (64 * 256).
    assert_eq!(FORMATS[0].words(64 * 1024), 64 * 1024 * 9 / 64);
    assert_eq!(FORMATS[2].words(64 * 1024), 64 * 1024 * 17 / 64);
    assert_eq!(FORMATS[1].words(64 * 1024), 8 * 1024 + 256 + 4 + 1);
    assert_eq!(FORMATS.map(|format| format.words(0)), [0, 1, 0]);
}

proptest! {
    #[test]
    fn ranges_have_the_elements_of_the_whole(
        len in 1_usize..500, from in 0.0..1.0, to in 0.0..1.0, seed in 0_u64..100,
    ) {
        let (from, to) = ((from * len as f64) as usize, (to * len as f64) as usize);
        let (from, to) = (from.min(to), from.max(to));
        for format in FORMATS {
            let words = format.encode(&noise(len, seed));
            let slice = QuantizedSlice::new(format, len, &words);
            let mut single = vec![0.0_f32; to - from];
            let mut half = vec![f16::ZERO; to - from];
            let mut brain = vec![bf16::ZERO; to - from];
            slice.decode(from, &mut single);
            slice.decode(from, &mut half);
            slice.decode(from, &mut brain);
            for (i, index) in (from..to).enumerate() {
                let value = slice.get(index);
                prop_assert_eq!(single[i].to_bits(), value.to_bits());
                prop_assert_eq!(half[i], f16::from_f32(value));
                prop_assert_eq!(brain[i], bf16::from_f32(value));
            }
        }
    }

    #[test]
    fn errors_are_within_half_a_level(len in 1_usize..300, seed in 0_u64..100) {
        let values = noise(len, seed);
        // Half of the widest gap between NF4's values, -1 and -0.696, and half of 1 / 127.
        for (format, bound) in [(FORMATS[0], 0.152), (FORMATS[2], 0.003_94)] {
            let words = format.encode(&values);
            let found: Vec<f32> = decoded(format, len, &words);
            for (values, found) in values.chunks(64).zip(found.chunks(64)) {
                let largest = values.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                for (value, found) in values.iter().zip(found) {
                    prop_assert!((value - found).abs() <= bound * largest);
                }
            }
        }
    }

    #[test]
    fn encoding_what_was_decoded_changes_nothing(len in 1_usize..300, seed in 0_u64..100) {
        for format in [FORMATS[0], FORMATS[2]] {
            let words = format.encode(&noise(len, seed));
            let found: Vec<f32> = decoded(format, len, &words);
            let again: Vec<f32> = decoded(format, len, &format.encode(&found));
            for (found, again) in found.iter().zip(again) {
                // The scale of 8 bits is multiplied by 127 and divided again.
                prop_assert!((found - again).abs() <= 1e-6 * found.abs());
            }
        }
    }
}
