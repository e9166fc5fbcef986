//! The keys of Accelerate's YAML (`accelerate config`).
//!
//! The section `deepspeed_config` is translated to a DeepSpeed configuration. Most other keys
//! describe how Accelerate starts processes: they are accepted with a note, because DeepBurn starts
//! the ranks itself.

use crate::spec::*;

/// The reason why keys about starting processes have no effect.
const LAUNCH: &str = "DeepBurn starts the ranks itself";
/// The reason why keys about TPUs have no effect.
const TPU: &str = "TPUs are not supported";
/// The device of an offload. The doc of each key names the key of DeepSpeed.
const DEVICE: Spec<&str> = one_of(&["none", "cpu", "nvme"], "none");

section! {
    /// Top level of an Accelerate configuration.
    pub(crate) struct Accelerate<'a> {
        deepspeed_config: DeepSpeedConfig<'a> = section(),
        /// Type of distributed training; must be DEEPSPEED.
        distributed_type: &'a str = text("DEEPSPEED"),
        /// Training precision: no, fp16 or bf16. Enables the fp16 or bf16 section if the DeepSpeed
        /// configuration leaves it open.
        mixed_precision: () = free().or(Literal::Text("no")),
        /// Number of ranks over all machines. training.ranks of a job file takes precedence.
        num_processes: Option<usize> = opt_count_in(1, 64).unit("ranks"),
        /// Number of machines.
        num_machines = positive(1).unit("machines")
            .unavailable("more than one machine", Differs, "set it to 1"),
        /// Environment of the run, such as LOCAL_MACHINE.
        compute_environment = free().inert(LAUNCH),
        /// Check that collectives match across ranks.
        debug = free().inert("collectives are always checked across ranks"),
        /// Use bfloat16 on TPUs.
        downcast_bf16 = free().inert(TPU),
        /// Bind ranks to CPU cores.
        enable_cpu_affinity = free().inert(LAUNCH),
        /// GPUs to use. In DeepBurn, training.devices selects the devices.
        gpu_ids = free().inert(LAUNCH),
        /// Rank of this machine.
        machine_rank = free().inert(LAUNCH),
        /// IP address of the first machine.
        main_process_ip = free().inert(LAUNCH),
        /// Port of the first machine.
        main_process_port = free().inert(LAUNCH),
        /// Python function to run.
        main_training_function = free().inert("DeepBurn does not run Python code"),
        /// Rendezvous backend of torchrun.
        rdzv_backend = free().inert(LAUNCH),
        /// Declare that all machines share a local network.
        same_network = free().inert(LAUNCH),
        /// Environment variables of TPU workers.
        tpu_env = free().inert(TPU),
        /// Name of the TPU.
        tpu_name = free().inert(TPU),
        /// Zone of the TPU.
        tpu_zone = free().inert(TPU),
        /// Use a TPU cluster.
        tpu_use_cluster = free().inert(TPU),
        /// Run commands on TPU workers with sudo.
        tpu_use_sudo = free().inert(TPU),
        /// Commands to run on TPU workers.
        commands = free().inert(TPU),
        /// File of commands to run on TPU workers.
        command_file = free().inert(TPU),
        /// Train on the CPU.
        use_cpu = free().inert("training.backend selects the device"),
        /// Options of Intel's extension for PyTorch.
        ipex_config = free().inert("DeepBurn does not use PyTorch"),
        /// Options of mpirun.
        mpirun_config = free().inert(LAUNCH),
        /// Compiler backend of torch.compile.
        dynamo_backend = free().or(Literal::Text("no"))
            .unavailable("compilation", NotOneOf(&["no"]), "write 'NO'"),
        /// Options of torch.compile.
        dynamo_config = free().unavailable("compilation", NotEmpty, "remove it"),
        /// Options of fp8 training.
        fp8_config = free().unavailable("fp8 training", NotEmpty, "remove it"),
        /// Options of PyTorch's FSDP.
        fsdp_config = free().unavailable("FSDP", NotEmpty, "remove it"),
        /// Options of Megatron-LM.
        megatron_lm_config = free().unavailable("Megatron-LM", NotEmpty, "remove it"),
        /// Options of other kinds of parallelism.
        parallelism_config = free().unavailable("parallelism other than ZeRO", NotEmpty, "remove it"),
    }

    /// Options of Accelerate's DeepSpeed plugin, translated to a DeepSpeed configuration.
    pub(crate) struct DeepSpeedConfig<'a> {
        /// Path of a DeepSpeed configuration file. Excludes the keys of this section that set the
        /// same options.
        deepspeed_config_file: Option<&'a str> = opt_text(),
        /// ZeRO stage: sets zero_optimization.stage.
        zero_stage: usize = count_in(0, 3, 2),
        /// Micro-batches per optimizer step. Unset: "auto".
        gradient_accumulation_steps: Option<usize> = opt_positive().auto(),
        /// Maximum global L2 norm of the gradients. Unset: "auto".
        gradient_clipping: Option<f64> = opt_real(NotNegative).auto(),
        /// Device of offloaded optimizer states: sets zero_optimization.offload_optimizer.device.
        offload_optimizer_device: &'a str = DEVICE,
        /// Device of offloaded parameters: sets zero_optimization.offload_param.device.
        offload_param_device: &'a str = DEVICE,
        /// NVMe folder of optimizer states: sets zero_optimization.offload_optimizer.nvme_path.
        offload_optimizer_nvme_path: Option<&'a str> = opt_text(),
        /// NVMe folder of parameters: sets zero_optimization.offload_param.nvme_path.
        offload_param_nvme_path: Option<&'a str> = opt_text(),
        /// Shard parameters while the model is built.
        zero3_init_flag = opt_flag()
            .inert("parameters are always sharded right after the model is built"),
        /// Allow a 16-bit model to be gathered for saving: sets
        /// zero_optimization.stage3_gather_16bit_weights_on_model_save.
        zero3_save_16bit_model: bool = flag(false),
        /// Hostfile of DeepSpeed's launcher.
        deepspeed_hostfile = free().inert(LAUNCH),
        /// Hosts and devices to exclude.
        deepspeed_exclusion_filter = free().inert(LAUNCH),
        /// Hosts and devices to include.
        deepspeed_inclusion_filter = free().inert(LAUNCH),
        /// Launcher for several machines, such as pdsh.
        deepspeed_multinode_launcher = free().inert(LAUNCH),
        /// Class names of mixture-of-experts layers, which ZeRO-3 gathers as a whole.
        deepspeed_moe_layer_cls_names = free().inert("each operation gathers the parameters that it needs"),
    }
}
