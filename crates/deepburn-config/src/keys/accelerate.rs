//! The keys of Accelerate's YAML (`accelerate config`).
//!
//! The section `deepspeed_config` is translated to a DeepSpeed configuration. Most other keys
//! describe how Accelerate starts processes: they are accepted and noted, because the program that
//! trains starts its ranks itself.

use crate::spec::*;

/// Why keys about starting processes change nothing.
const LAUNCH: &str = "the ranks are started by the program itself";
/// Why keys about TPUs change nothing.
const TPU: &str = "there is no TPU";
/// Where to offload to; its doc names the key of DeepSpeed.
const DEVICE: Spec<&str> = one_of(&["none", "cpu", "nvme"], "none");

section! {
    /// The top level of an Accelerate file.
    pub(crate) struct Accelerate<'a> {
        deepspeed_config: DeepSpeedConfig<'a> = section(),
        /// How training is distributed; must be DEEPSPEED.
        distributed_type: &'a str = text("DEEPSPEED"),
        /// no, fp16, bf16 or fp8.
        mixed_precision: () = free().or(Literal::Text("no")),
        /// Ranks over all machines.
        num_processes: Option<usize> = opt_count_in(1, 64).unit("ranks"),
        /// Machines.
        num_machines = positive(1).unit("machines")
            .unavailable("more than one machine", Differs, "set it to 1"),
        /// Where it runs.
        compute_environment = free().inert(LAUNCH),
        /// Check collectives.
        debug = free().inert("collectives are always checked against each other"),
        /// bfloat16 on TPU.
        downcast_bf16 = free().inert(TPU),
        /// Bind ranks to cores.
        enable_cpu_affinity = free().inert(LAUNCH),
        /// Devices used.
        gpu_ids = free().inert(LAUNCH),
        /// Rank of this machine.
        machine_rank = free().inert(LAUNCH),
        /// Address of the first machine.
        main_process_ip = free().inert(LAUNCH),
        /// Port of the first machine.
        main_process_port = free().inert(LAUNCH),
        /// Python function that trains.
        main_training_function = free().inert("there is no Python"),
        /// How ranks find each other.
        rdzv_backend = free().inert(LAUNCH),
        /// Whether machines share a network.
        same_network = free().inert(LAUNCH),
        /// Environment of the TPU.
        tpu_env = free().inert(TPU),
        /// Name of the TPU.
        tpu_name = free().inert(TPU),
        /// Zone of the TPU.
        tpu_zone = free().inert(TPU),
        /// A cluster of TPUs.
        tpu_use_cluster = free().inert(TPU),
        /// Rights on the TPU.
        tpu_use_sudo = free().inert(TPU),
        /// Commands on the TPU.
        commands = free().inert(TPU),
        /// File of commands on the TPU.
        command_file = free().inert(TPU),
        /// Train on the CPU.
        use_cpu = free().inert("training.backend chooses the device"),
        /// Intel's extension.
        ipex_config = free().inert("there is no PyTorch"),
        /// MPI.
        mpirun_config = free().inert(LAUNCH),
        /// Compiler of the model.
        dynamo_backend = free().or(Literal::Text("no"))
            .unavailable("compilation", NotOneOf(&["no"]), "write 'NO'"),
        /// Compilation of the model.
        dynamo_config = free().unavailable("compilation", NotEmpty, "remove it"),
        /// fp8 training.
        fp8_config = free().unavailable("fp8 training", NotEmpty, "remove it"),
        /// PyTorch's FSDP.
        fsdp_config = free().unavailable("FSDP", NotEmpty, "remove it"),
        /// Megatron-LM.
        megatron_lm_config = free().unavailable("Megatron-LM", NotEmpty, "remove it"),
        /// Other parallelism.
        parallelism_config = free().unavailable("parallelism beside ZeRO", NotEmpty, "remove it"),
    }

    /// What becomes the DeepSpeed configuration.
    pub(crate) struct DeepSpeedConfig<'a> {
        /// DeepSpeed JSON that takes the place of the other keys.
        deepspeed_config_file: Option<&'a str> = opt_text(),
        /// zero_optimization.stage.
        zero_stage: usize = count_in(0, 3, 2),
        /// The same in DeepSpeed; by default "auto".
        gradient_accumulation_steps: Option<usize> = opt_positive().auto(),
        /// The same in DeepSpeed; by default "auto".
        gradient_clipping: Option<f64> = opt_real(NotNegative).auto(),
        /// zero_optimization.offload_optimizer.device.
        offload_optimizer_device: &'a str = DEVICE,
        /// zero_optimization.offload_param.device.
        offload_param_device: &'a str = DEVICE,
        /// zero_optimization.offload_optimizer.nvme_path.
        offload_optimizer_nvme_path: Option<&'a str> = opt_text(),
        /// zero_optimization.offload_param.nvme_path.
        offload_param_nvme_path: Option<&'a str> = opt_text(),
        /// Shard parameters while the model is built.
        zero3_init_flag = opt_flag()
            .inert("parameters are always scattered right after the model is built"),
        /// zero_optimization.stage3_gather_16bit_weights_on_model_save.
        zero3_save_16bit_model: bool = flag(false),
        /// Machines.
        deepspeed_hostfile = free().inert(LAUNCH),
        /// Machines left out.
        deepspeed_exclusion_filter = free().inert(LAUNCH),
        /// Machines used.
        deepspeed_inclusion_filter = free().inert(LAUNCH),
        /// Launcher.
        deepspeed_multinode_launcher = free().inert(LAUNCH),
        /// Expert layers.
        deepspeed_moe_layer_cls_names = free().inert("layers are never hooked"),
    }
}
