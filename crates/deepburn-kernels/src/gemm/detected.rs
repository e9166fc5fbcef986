//! The choice of the kernel that multiplies.

use super::Arithmetic;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx::Amx;
use super::portable::Portable;
use crate::Instructions;

#[cfg(target_arch = "x86_64")]
use super::{
    avx2::Avx2,
    avx512::{Avx512, Avx512Bf16},
};

/// The fastest kernel for an arithmetic with the instructions in use.
#[derive(Debug, Clone, Copy)]
pub(super) enum Detected {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(Amx),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    Portable(Portable),
}

impl Detected {
    /// Returns the kernel with the instructions in use.
    pub(super) fn new(arithmetic: Arithmetic) -> Self {
        Self::with(Instructions::in_use(), arithmetic)
    }

    /// Returns the fastest kernel with `instructions`, which this processor supports.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn with(instructions: Instructions, arithmetic: Arithmetic) -> Self {
        let pairs = match arithmetic {
            Arithmetic::F32 => None,
            Arithmetic::Bf16 => Self::of_tiles(instructions)
                .or_else(|| Avx512Bf16::with(instructions).map(Self::Avx512Bf16)),
        };
        pairs
            .or_else(|| Avx512::with(instructions).map(Self::Avx512))
            .or_else(|| Avx2::with(instructions).map(Self::Avx2))
            .unwrap_or(Self::Portable(Portable))
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn of_tiles(instructions: Instructions) -> Option<Self> {
        Amx::with(instructions).map(Self::Amx)
    }

    /// AMX is requested only on Linux.
    #[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
    fn of_tiles(_: Instructions) -> Option<Self> {
        None
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn with(_: Instructions, _: Arithmetic) -> Self {
        Self::Portable(Portable)
    }

    /// Returns the name of the instruction set.
    pub(super) fn name(self) -> &'static str {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::Amx(_) => "AMX-BF16",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(_) => "AVX512-BF16",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "AVX2",
            Self::Portable(_) => "portable",
        }
    }
}
