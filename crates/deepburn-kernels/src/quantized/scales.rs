//! The scales of blocks: in f32, or in 8 bits ("double quantization", Dettmers et al. 2023, section
//! 3).
//!
//! ```text
//! f32        | one f32 for each block |
//! 8 bits     | codes, four in a word | one f32 for each 256 codes | mean of all scales, f32 |
//! scale      = value of the code * f32 of its 256 + mean
//! ```
//!
//! The values of the 8-bit codes are the dynamic type of Dettmers (2016, "8-Bit Approximations for
//! Parallelism in Deep Learning"), as in bitsandbytes: a sign, an exponent of base 10 and a
//! fraction, whose lengths vary.

use std::sync::LazyLock;

/// The number of scales that share an f32.
const GROUP: usize = 256;

/// The 256 values of the dynamic type in ascending order.
///
/// With `i` from 0 to 6, there are `2^i` fractions of each sign: the middles of equal parts of 0.1
/// to 1, times `10^(i - 6)`. 0 and 1 are added.
static DYNAMIC: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut values = vec![0.0, 1.0];
    for exponent in 0..7 {
        let parts = 1 << exponent;
        for part in 0..parts {
            let fraction = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
            let value = fraction * 10_f64.powi(exponent - 6);
            values.extend([value as f32, -value as f32]);
        }
    }
    values.sort_by(f32::total_cmp);
    values.try_into().unwrap_or([0.0; 256])
});

/// The scales of all blocks.
#[derive(Debug, Clone, Copy)]
pub(super) enum BlockScales<'a> {
    /// The bits of one f32 for each block.
    Plain(&'a [u32]),
    /// In 8 bits.
    Quantized { codes: &'a [u32], groups: &'a [u32], mean: f32, values: &'a [f32; 256] },
}

impl<'a> BlockScales<'a> {
    /// Returns the number of words of the scales of `blocks` blocks.
    pub(super) fn words(quantized: bool, blocks: usize) -> usize {
        match quantized {
            true => blocks.div_ceil(4) + blocks.div_ceil(GROUP) + 1,
            false => blocks,
        }
    }

    /// Returns the scales of `blocks` blocks that [`store`](Self::store) has written.
    pub(super) fn new(quantized: bool, blocks: usize, words: &'a [u32]) -> Self {
        if !quantized {
            return Self::Plain(words);
        }
        let (codes, rest) = words.split_at(blocks.div_ceil(4));
        let (groups, mean) = rest.split_at(rest.len() - 1);
        Self::Quantized { codes, groups, mean: f32::from_bits(mean[0]), values: &DYNAMIC }
    }

    /// Returns the scale of a block.
    #[inline(always)]
    pub(super) fn at(&self, block: usize) -> f32 {
        match self {
            Self::Plain(scales) => f32::from_bits(scales[block]),
            Self::Quantized { codes, groups, mean, values } => {
                let code = codes[block / 4] >> (8 * (block % 4)) & 255;
                values[code as usize] * f32::from_bits(groups[block / GROUP]) + mean
            }
        }
    }

    /// Writes scales. In 8 bits, the mean is subtracted first. A group with a scale of NaN becomes
    /// NaN, and it does not count for the mean.
    pub(super) fn store(quantized: bool, scales: &[f32], words: &mut [u32]) {
        if !quantized {
            words.iter_mut().zip(scales).for_each(|(word, scale)| *word = scale.to_bits());
            return;
        }
        let (codes, rest) = words.split_at_mut(scales.len().div_ceil(4));
        let finite = scales.iter().filter(|scale| scale.is_finite());
        let (sum, count) =
            finite.fold((0.0, 0_usize), |(sum, count), it| (sum + f64::from(*it), count + 1));
        let mean = (sum / count.max(1) as f64) as f32;
        let (groups, last) = rest.split_at_mut(rest.len() - 1);
        last[0] = mean.to_bits();
        for (group, scales) in scales.chunks(GROUP).enumerate() {
            let centered: Vec<f32> = scales.iter().map(|scale| scale - mean).collect();
            let largest = super::largest(&centered);
            groups[group] = largest.to_bits();
            for (place, value) in centered.iter().enumerate() {
                let relative = if largest > 0.0 { value / largest } else { 0.0 };
                let block = group * GROUP + place;
                codes[block / 4] |= nearest(relative) << (8 * (block % 4));
            }
        }
    }
}

/// Returns the code of the value that is nearest to `x`, the smaller one of two.
fn nearest(x: f32) -> u32 {
    let values = &*DYNAMIC;
    let above = values.partition_point(|value| *value < x).min(values.len() - 1);
    let below = above.saturating_sub(1);
    let is_below = x - values[below] <= values[above] - x;
    if is_below { below as u32 } else { above as u32 }
}
