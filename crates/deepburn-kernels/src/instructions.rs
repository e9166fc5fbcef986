//! The instructions that kernels use.
//!
//! Main type: [`Instructions`]. Every kernel with variants for several instruction sets asks
//! [`Instructions::in_use`], so that all of them choose alike. The choice is made once per process,
//! because the last bits of matrix products depend on it.

use std::sync::OnceLock;

/// A level of x86-64 instruction sets. Each level includes the narrower ones, in the order of the
/// variants. Other processors have the narrowest level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Instructions {
    /// The instructions that every processor of the target has: SSE2 on x86-64, NEON on 64-bit Arm.
    Portable,
    /// AVX2 with fused multiply-add and conversions of fp16.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with VNNI, for dot products of integers.
    Avx512Vnni,
    /// AVX-512 with dot products of pairs of bf16 numbers.
    Avx512Bf16,
    /// AMX with products of bf16 tiles.
    Amx,
}

impl Instructions {
    /// All levels, the narrowest first.
    pub const ALL: [Self; 6] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16, Self::Amx];

    /// Returns the level that the kernels of this process use.
    pub fn in_use() -> Self {
        static IN_USE: OnceLock<Instructions> = OnceLock::new();
        *IN_USE.get_or_init(Self::of_processor)
    }

    /// Returns the widest level of this processor. AMX also needs Linux, which has to save its
    /// registers.
    pub fn of_processor() -> Self {
        // A level that is missing ends the search, because kernels of a level use all narrower
        // ones.
        let wider = Self::ALL.into_iter().take_while(|level| level.is_on_processor());
        wider.last().unwrap_or(Self::Portable)
    }

    /// Returns whether the processor has what this level adds to the narrower ones.
    #[cfg(target_arch = "x86_64")]
    fn is_on_processor(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            Self::Avx512Vnni => is_x86_feature_detected!("avx512vnni"),
            Self::Avx512Bf16 => is_x86_feature_detected!("avx512bf16"),
            Self::Amx => has_amx(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_on_processor(self) -> bool {
        self == Self::Portable
    }

    /// Returns the name, which is that of the compiler's or Linux's flags for the set.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512_vnni",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx",
        }
    }
}

/// Returns true if the processor supports AMX-BF16 and the operating system saves the tile
/// registers. AMX is used only on Linux.
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

    /// Bits of CPUID leaf 7, subleaf 0, EDX.
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    /// Bit of CPUID leaf 1, ECX.
    const OSXSAVE: u32 = 1 << 27;
    /// Bits of XCR0: tile configuration and tile data.
    const XTILE: u64 = 1 << 17 | 1 << 18;

    if cfg!(not(target_os = "linux")) {
        return false;
    }
    // These functions are safe in newer versions of Rust than the oldest that is supported.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has CPUID; leaf 7 is read only where leaf 0 reports it.
    let (basic, extended) = unsafe {
        if __cpuid(0).eax < 7 {
            return false;
        }
        (__cpuid(1).ecx, __cpuid_count(7, 0).edx)
    };
    if basic & OSXSAVE == 0 || extended & AMX_BF16 == 0 || extended & AMX_TILE == 0 {
        return false;
    }
    // SAFETY: the OSXSAVE bit is set, so XGETBV exists and is enabled.
    let xcr0 = unsafe { _xgetbv(0) };
    xcr0 & XTILE == XTILE
}
