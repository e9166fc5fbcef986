//! The instructions of the CPU kernels, in words.

use deepburn::kernels::Instructions;
use deepburn::kernels::gemm::Arithmetic;

/// Returns the level of instructions that kernels use, and the instruction sets of matrix products.
///
/// ```text
/// avx512_bf16; products use AVX-512 in fp32 and AVX512-BF16 in bf16
/// avx2 (DEEPBURN_INSTRUCTIONS; the processor has avx512_bf16); products use AVX2 in fp32 and AVX2 in bf16
/// ```
///
/// The sets are named too, because a processor may have AMX that does not work.
pub(crate) fn instructions_in_words() -> String {
    let (level, widest) = (Instructions::in_use(), Instructions::of_processor());
    let limit = match level < widest {
        true => format!(" (DEEPBURN_INSTRUCTIONS; the processor has {widest})"),
        false => String::new(),
    };
    let [fp32, bf16] = [Arithmetic::F32, Arithmetic::Bf16].map(Arithmetic::instruction_set);
    format!("{level}{limit}; products use {fp32} in fp32 and {bf16} in bf16")
}
