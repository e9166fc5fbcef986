//! Precision: `fp16`, `bf16`, `data_types` and `torch_autocast`.
//!
//! At most one of `fp16` and `bf16` is on. `torch_autocast` keeps parameters in fp32 and may stand
//! beside neither of another type. Master weights and optimizer states are always fp32: keys that
//! ask for 16 bits are refused.

use crate::plan::Precision;
use crate::spec::*;

/// The names that DeepSpeed knows. fp32 and int8 are not types of autocast: they are accepted where
/// the section is switched off.
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
    /// Half precision with loss scaling and fp32 masters.
    pub(crate) struct Fp16<'a> {
        /// Train in fp16.
        enabled: bool = flag(false).auto(),
        /// Run ops in the types of torch.autocast, as torch_autocast does, on fp16 parameters.
        /// DeepSpeed only casts the inputs of the model to fp16.
        auto_cast: bool = flag(false).auto(),
        /// Fixed loss scale; 0 for a dynamic one.
        loss_scale: f64 = real(NotNegative, 0.0).auto(),
        /// The dynamic scale starts at two to this power.
        initial_scale_power: i64 = integer_in(0, 127, 16).auto(),
        /// Good steps before the scale doubles.
        loss_scale_window: i64 = integer(1000).unit("steps").auto(),
        /// Overflows before the scale halves.
        hysteresis: i64 = integer_in(1, i64::MAX, 2).unit("overflows").auto(),
        /// Refill the hysteresis after every good step.
        consecutive_hysteresis: bool = flag(false),
        /// The dynamic scale never goes below.
        min_loss_scale: i64 = integer(1).auto(),
        /// Keep master weights and gradients in fp16.
        fp16_master_weights_and_grads = flag(false)
            .unavailable("fp16 master weights", Differs, "set it to false"),
    }

    /// bfloat16 training with fp32 master weights.
    pub(crate) struct Bf16<'a> {
        /// Train in bfloat16.
        enabled: bool = flag(false).auto(),
        /// Accumulate each gradient as soon as it is final.
        immediate_grad_update = flag(false).inert("gradients are always accumulated as soon as they are final"),
        /// Skip a step whose gradients are not finite.
        check_grad_overflow: bool = flag(true),
        /// Keep master weights and gradients in bfloat16.
        bf16_master_weights_and_grads = flag(false)
            .unavailable("bf16 master weights", Differs, "set it to false"),
        /// Keep the moments in bfloat16.
        bf16_optimizer_states = flag(false).unavailable("bf16 optimizer states", Differs, "set it to false"),
    }

    /// Types of what is kept besides the weights.
    pub(crate) struct DataTypes<'a> {
        /// Type in which the gradients of micro-batches add up; fp32 by default, where DeepSpeed
        /// takes the model's type and loses small gradients.
        grad_accum_dtype: Option<Precision> = opt_choice(),
        /// Type of the parameters.
        param_dtype = opt_choice::<Precision>()
            .unavailable(
                "a type of parameters apart from fp16 and bf16", NotOneOf(&["fp32"]),
                "remove it and set fp16.enabled or bf16.enabled",
            ),
        /// Type of the buffers.
        buffer_dtype = opt_choice::<Precision>()
            .unavailable("16-bit buffers", NotOneOf(&["fp32"]), "remove it or set it to \"fp32\""),
        /// Modules that stay in fp32.
        keep_in_fp32_modules = free().or(Literal::Text("auto"))
            .unavailable("modules that stay in fp32", Differs, "remove it"),
    }

    /// torch.autocast: fp32 parameters, matrix products and convolutions in 16 bits, and norms,
    /// softmax, exponentials, sums and losses in fp32.
    pub(crate) struct TorchAutocast<'a> {
        /// Run ops in the types of torch.autocast.
        enabled: bool = flag(false),
        /// Type of matrix products and convolutions, bfloat16 or float16. bfloat16 when it is not
        /// given; DeepSpeed leaves it to PyTorch, which takes bfloat16 on CPUs and float16 without
        /// a loss scale on CUDA.
        dtype: Option<&'a str> = opt_one_of(AUTOCAST_TYPES),
        /// Classes of modules whose gradients and gathered parameters DeepSpeed sends in dtype.
        lower_precision_safe_modules: () = list()
            .inert(
                "gradients of all modules travel in communication_data_type (fp32 by default under autocast), \
                 and parameters are gathered in fp32",
            ),
    }
}
