//! The instructions that kernels use.
//!
//! Main type: [`Instructions`]. Every kernel with variants for several instruction sets asks
//! [`Instructions::in_use`], so that all of them choose alike. The choice is made once per process,
//! because the last bits of matrix products depend on it.
//!
//! The environment variable `DEEPBURN_INSTRUCTIONS` names the widest level that kernels may use.
//! With it, hosts with different processors use the same instructions, and a machine shows how fast
//! older ones are.

use std::sync::{Once, OnceLock};
use std::{env, error, fmt};

/// The environment variable with the widest level that kernels may use.
const VARIABLE: &str = "DEEPBURN_INSTRUCTIONS";

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

    /// Returns the level that the kernels of this process use: the processor's widest level, or the
    /// one that `DEEPBURN_INSTRUCTIONS` names.
    ///
    /// The variable is read once per process. Kernels cannot fail, so a value that
    /// [`check`](Self::check) refuses does not limit them, with a warning. Programs call it before
    /// they train.
    #[inline]
    pub fn in_use() -> Self {
        match Self::choice() {
            Ok(level) => *level,
            Err(error) => Self::without_limit(error),
        }
    }

    /// Returns the processor's widest level, and warns once of a variable that was not checked.
    #[cold]
    fn without_limit(error: &InstructionsError) -> Self {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| tracing::warn!("{error}; it has no effect"));
        Self::of_processor()
    }

    /// Checks `DEEPBURN_INSTRUCTIONS` and returns the level that kernels use.
    ///
    /// # Errors
    /// Returns an error if the variable names an unknown level, or one that the processor lacks.
    pub fn check() -> Result<Self, InstructionsError> {
        Self::choice().clone()
    }

    /// Returns the choice of this process.
    #[inline]
    fn choice() -> &'static Result<Self, InstructionsError> {
        static CHOICE: OnceLock<Result<Instructions, InstructionsError>> = OnceLock::new();
        CHOICE.get_or_init(|| {
            let value = env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned());
            Self::of_processor().limited_by(value.as_deref())
        })
    }

    /// Returns the level that is used if this is the widest one of the processor and
    /// `DEEPBURN_INSTRUCTIONS` has `value`. An empty value is the same as none.
    fn limited_by(self, value: Option<&str>) -> Result<Self, InstructionsError> {
        let Some(name) = value.map(str::trim).filter(|name| !name.is_empty()) else {
            return Ok(self);
        };
        match Self::ALL.into_iter().find(|level| level.name() == name) {
            None => Err(InstructionsError::Unknown { value: name.to_owned() }),
            Some(level) if level > self => {
                Err(InstructionsError::Unsupported { asked: level, widest: self })
            }
            Some(level) => Ok(level),
        }
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

    /// Returns the name, which is also the value of `DEEPBURN_INSTRUCTIONS`.
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

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The reason why `DEEPBURN_INSTRUCTIONS` cannot be honored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstructionsError {
    /// No level has this name.
    Unknown {
        /// The value of the variable.
        value: String,
    },
    /// The processor lacks the level.
    Unsupported {
        /// The level that the variable names.
        asked: Instructions,
        /// The widest level of the processor.
        widest: Instructions,
    },
}

impl fmt::Display for InstructionsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { value } => {
                let [first @ .., last] = Instructions::ALL.map(Instructions::name);
                write!(
                    f,
                    "{VARIABLE} is `{value}`; allowed are {} and {last}: unset it to use all \
                     instructions of the processor",
                    first.join(", ")
                )
            }
            Self::Unsupported { asked, widest } => write!(
                f,
                "{VARIABLE} is {asked}, which this processor lacks; set it to {widest} or a \
                 narrower level, or unset it"
            ),
        }
    }
}

impl error::Error for InstructionsError {}

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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_level_limits_the_processor() {
        let widest = Instructions::Avx512Bf16;
        for value in [None, Some(""), Some(" "), Some("avx512_bf16")] {
            assert_eq!(widest.limited_by(value), Ok(widest), "{value:?}");
        }
        assert_eq!(widest.limited_by(Some(" avx2 ")), Ok(Instructions::Avx2));
        assert_eq!(widest.limited_by(Some("portable")), Ok(Instructions::Portable));
    }

    #[test]
    fn other_values_are_refused_with_a_remedy() {
        let error = |value| Instructions::Avx2.limited_by(Some(value)).unwrap_err().to_string();
        assert_eq!(
            error("avx"),
            "DEEPBURN_INSTRUCTIONS is `avx`; allowed are portable, avx2, avx512, avx512_vnni, \
             avx512_bf16 and amx: unset it to use all instructions of the processor"
        );
        assert_eq!(
            error("amx"),
            "DEEPBURN_INSTRUCTIONS is amx, which this processor lacks; set it to avx2 or a \
             narrower level, or unset it"
        );
        assert!(error("AVX2").contains("`AVX2`"));
    }

    /// Runs tests that compare kernels with references again at every narrower level. They then
    /// choose as on a processor that has only these instructions.
    #[test]
    fn kernels_are_right_at_every_level() {
        let narrower = Instructions::ALL.into_iter().filter(|it| *it < Instructions::in_use());
        let runs = narrower.map(|level| {
            let mut tests = Command::new(env::current_exe().unwrap());
            tests.env(VARIABLE, level.name()).args([
                "the_instruction_set_changes_no_bit",
                "any_strides_agree_with_f64",
                "quantized",
                "working",
            ]);
            (level, tests.output().unwrap())
        });
        for (level, output) in runs {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{level}:\n{text}");
            assert!(!text.contains(" 0 passed"), "{level}:\n{text}");
        }
    }
}
