//! The 6-bit scales and minima of q4_k and q5_k.
//!
//! ```text
//! bytes 0 to 3    scales 0 to 3 in the low 6 bits,   the high 2 bits of scales 4 to 7 above
//! bytes 4 to 7    minima 0 to 3 in the low 6 bits,   the high 2 bits of minima 4 to 7 above
//! bytes 8 to 11   the low 4 bits of scales 4 to 7,   the low 4 bits of minima 4 to 7 above
//! ```

use super::sub_blocks::Lanes;

/// The size of eight scales and eight minima in bytes.
pub(super) const SIZE: usize = 12;

/// Packs scales and minima, which are below 64.
pub(super) fn pack(scales: Lanes<u8>, minima: Lanes<u8>) -> [u8; SIZE] {
    let mut bytes = [0; SIZE];
    for j in 0..4 {
        let (scale, minimum) = (scales[j + 4], minima[j + 4]);
        bytes[j] = scales[j] | scale >> 4 << 6;
        bytes[j + 4] = minima[j] | minimum >> 4 << 6;
        bytes[j + 8] = scale & 15 | (minimum & 15) << 4;
    }
    bytes
}

/// Returns the scales and the minima (`get_scale_min_k4` of llama.cpp). `bytes` has [`SIZE`] bytes.
pub(super) fn unpack(bytes: &[u8]) -> (Lanes<u8>, Lanes<u8>) {
    let (mut scales, mut minima) = ([0; 8], [0; 8]);
    for j in 0..4 {
        scales[j] = bytes[j] & 63;
        minima[j] = bytes[j + 4] & 63;
        scales[j + 4] = bytes[j + 8] & 15 | bytes[j] >> 6 << 4;
        minima[j + 4] = bytes[j + 8] >> 4 | bytes[j + 4] >> 6 << 4;
    }
    (scales, minima)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_reads_back() {
        let scales = [0, 63, 17, 40, 63, 32, 5, 16];
        let minima = [1, 62, 33, 0, 15, 48, 63, 31];
        assert_eq!(unpack(&pack(scales, minima)), (scales, minima));
    }
}
