//! Detection of the instructions with which rows are multiplied.

/// The instructions with which rows are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instructions {
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX2 with fused multiply-add and conversions of f16.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Those that the compiler chooses.
    Portable,
}

impl Instructions {
    /// Returns the best ones of this processor.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            match (has_avx2, has_avx512) {
                (true, true) => return Self::Avx512Vnni,
                (true, false) => return Self::Avx2,
                (false, _) => {}
            }
        }
        Self::Portable
    }
}
