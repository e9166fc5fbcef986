//! Precision: `fp16`, `bf16`, `data_types` and `torch_autocast`.
//!
//! At most one of `fp16` and `bf16` is on. `torch_autocast` keeps parameters in fp32, and cannot be
//! combined with an `fp16` or `bf16` of another type. Master weights and optimizer states are
//! always fp32; keys that request 16 bits are errors.

use crate::plan::Precision;
use crate::spec::*;

/// The names that DeepSpeed knows. fp32 and int8 are not autocast types; they are accepted only if
/// the section is disabled.
const AUTOCAST_TYPES: &[&str] = &[
    "bfloat16",
    "bf16",
    "torch.bfloat16",
    "float16",
    "fp16",
    "half",
    "torch.float16",
    "float32",
    "fp32",
    "float",
    "torch.float32",
    "int8",
    "torch.int8",
];

section! {
    /// fp16 training with loss scaling and fp32 master weights.
    pub(crate) struct Fp16<'a>: auto {
        /// Enable fp16 training. Excludes bf16.enabled; "auto" means false.
        enabled: bool = flag(false),
        /// Run operations in autocast data types, as torch_autocast does, on fp16 parameters.
        /// DeepSpeed only casts the inputs of the model.
        auto_cast: bool = flag(false),
        /// Static loss scale. 0 selects dynamic loss scaling.
        loss_scale: f64 = real(NotNegative, 0.0),
        // 2^127 is the largest power that an f32 holds.
        /// Initial dynamic loss scale, as a power of 2. Values above 16 usually skip steps until
        /// the scale has fallen.
        initial_scale_power: i64 = integer_in(0, 127, 16),
        // The ranges of this key and min_loss_scale only matter for a dynamic scale, so a rule
        // checks them.
        /// Number of steps without overflow before the dynamic loss scale doubles.
        loss_scale_window: i64 = integer(1000).unit("steps"),
        /// Number of overflows before the dynamic loss scale is halved; it is restored when the
        /// scale doubles.
        hysteresis: i64 = integer_in(1, i64::MAX, 2).unit("overflows"),
        /// Restore the hysteresis after every step without overflow.
        consecutive_hysteresis: bool = flag(false),
        /// Minimum dynamic loss scale. The run fails if an overflow would lower the scale further.
        min_loss_scale: i64 = integer(1),
        /// Keep master weights and gradients in fp16.
        fp16_master_weights_and_grads = fixed(false, "fp16 master weights"),
    }

    /// bf16 training with fp32 master weights.
    pub(crate) struct Bf16<'a>: auto {
        /// Enable bf16 training. Excludes fp16.enabled; "auto" means false.
        enabled: bool = flag(false),
        /// Accumulate each gradient as soon as it is computed.
        immediate_grad_update = flag(false).inert("gradients are always accumulated as soon as they are final"),
        /// Skip steps with non-finite gradients. If false, such a gradient ends the run.
        check_grad_overflow: bool = flag(true),
        /// Keep master weights and gradients in bf16.
        bf16_master_weights_and_grads = fixed(false, "bf16 master weights"),
        /// Keep optimizer states in bf16.
        bf16_optimizer_states = fixed(false, "bf16 optimizer states"),
    }

    /// Data types of accumulated gradients, parameters and buffers.
    pub(crate) struct DataTypes<'a> {
        /// Data type of gradient accumulation: "fp32", "fp16" or "bf16". 16 bits save 2 bytes per
        /// element and lose small gradients. Unset: fp32, unlike DeepSpeed, which uses the model's
        /// data type.
        grad_accum_dtype: Option<Precision> = opt_choice(),
        /// Data type of the parameters.
        param_dtype = opt_choice::<Precision>()
            .unavailable("a separate parameter data type", NotOneOf(&["fp32"]),
                "remove it and set fp16.enabled or bf16.enabled"),
        /// Data type of the buffers.
        buffer_dtype = opt_choice::<Precision>()
            .unavailable("16-bit buffers", NotOneOf(&["fp32"]), "remove it or set it to \"fp32\""),
        /// Modules to keep in fp32.
        keep_in_fp32_modules = free().or(Literal::Text("auto"))
            .unavailable("fp32 modules in a 16-bit model", Differs, "remove it"),
    }

    /// Mixed precision as in torch.autocast: parameters stay in fp32, matrix products and
    /// convolutions run in 16 bits, and norms, softmax, exponentials, sums and losses in fp32.
    pub(crate) struct TorchAutocast<'a> {
        /// Enable autocast.
        enabled: bool = flag(false),
        /// Data type of matrix products and convolutions: "bfloat16" or "float16". Unset: bfloat16,
        /// with a warning. DeepSpeed leaves the choice to PyTorch, which uses bfloat16 on CPUs and
        /// float16 on CUDA.
        dtype: Option<&'a str> = opt_one_of(AUTOCAST_TYPES),
        /// Module classes whose gradients and parameters DeepSpeed communicates in dtype.
        lower_precision_safe_modules = text_list()
            .inert(
                "gradients of all modules travel in communication_data_type (fp32 by default under autocast), \
                 and parameters are gathered in fp32",
            ),
    }
}
