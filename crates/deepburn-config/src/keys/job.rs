//! The keys of a job file: `model`, `data`, `training`, `deepspeed`.
//!
//! Names match Hugging Face's `TrainingArguments` where both have the same meaning. A key of
//! `TrainingArguments` that DeepSpeed has in its own file is an error that names the key to use
//! instead.

use crate::job_plan::{
    Architecture, AssistantOnlyLoss, Backend, CheckpointScope, Float32MatmulPrecision, Join,
    ModelMetric, PackingStrategy, PreferenceLoss,
};
use crate::keys::{DeepSpeed, SCHEMA};
use crate::plan::{LrSchedulerType, NoDecay, PipelineSchedule, RampShape};
use crate::spec::*;
use crate::step_count::StepCount;

/// Minimum vocabulary size of a byte-level tokenizer: 256 bytes and the end of text.
const SMALLEST_VOCABULARY: i64 = 257;

shared! {
    // This is only a command-line option, because a job file describes the job and not a single
    // run.
    /// Checkpoint to resume from. Set it on the command line with --resume.
    ON_THE_COMMAND_LINE: () = free().refused(
        "is a command-line option, not a key of the job file", "give --resume or --resume TAG on the command line",
    );
}

/// The remedy for Hugging Face's name of the micro-batch size.
const MICRO_BATCH: &str =
    "write training.micro_batch_size or deepspeed.train_micro_batch_size_per_gpu";

/// A key of Hugging Face's `TrainingArguments` that is set in the DeepSpeed configuration.
const fn belongs(remedy: &'static str) -> Spec<()> {
    free()
        .refused("is not a key of the job file", remedy)
        .doc("Key of transformers' TrainingArguments. Set it in the deepspeed section.")
}

/// What the keys of models, data sets and tokenizers contain.
const PLACE: &str = "a path or a repository on the Hub";
/// What the keys of special tokens contain.
const TOKEN: &str = "the text of a token, not its id";

section! {
    /// A job file.
    pub(crate) struct JobFile<'a> {
        model: Model<'a> = section(),
        data: Data<'a> = section(),
        training: Training<'a> = section(),
        /// DeepSpeed configuration: a section, the path of a file, or the name of a Lightning
        /// strategy such as deepspeed_stage_2_offload. A relative path is searched beside the job
        /// file, in the current folder and in configs/.
        deepspeed = Spec::<()>::of(Kind::SectionOrPath(DeepSpeed::KEYS)),
        schema as "$schema" = SCHEMA,
    }

    /// Model to train.
    pub(crate) struct Model<'a> {
        /// Model architecture: a `model_type` of `transformers` (a language model; with
        /// classification data, gpt2 is a classifier), or "encoder" (transformer encoder for text
        /// classification; formerly "imdb_encoder"). Unset: the model_type of the pretrained
        /// checkpoint, or, without one, gpt2.
        architecture: Option<Architecture> = opt_choice(),
        /// Pretrained checkpoint in Hugging Face format: a folder, relative to the current folder
        /// or the job file, or a Hub repository (owner/name or owner/name@revision). Unset: random
        /// weights, initialized with training.seed. Not supported with encoder.
        pretrained: Option<&'a str> = opt_text_of(PLACE),
        /// Fields of a Hugging Face config.json; they override the checkpoint's fields. A larger
        /// vocab_size adds rows to pretrained embeddings, the mean of the existing rows. gpt2:
        /// vocab_size, n_positions, n_embd, n_layer, n_head, n_inner, activation_function,
        /// resid_pdrop, embd_pdrop, attn_pdrop, layer_norm_epsilon, initializer_range,
        /// tie_word_embeddings and others. encoder: vocab_size, embed_dim, num_heads, num_layers,
        /// hidden_dim, max_len, dropout, layer_norm_epsilon. Classifiers: also id2label, and
        /// problem_type: "single_label_classification" (default), "multi_label_classification" or
        /// "regression". A field of the checkpoint that the model does not read and that may change
        /// its outputs is an error; null removes it.
        config: () = free(),
        /// LoRA: train adapters of low rank instead of the weights of model.pretrained, which stay
        /// frozen. Fields of PEFT's LoraConfig: r (8), lora_alpha (8), target_modules (a list of
        /// names, a regular expression or "all-linear"; by default PEFT's names for the model),
        /// exclude_modules, layers_to_transform, layers_pattern, lora_dropout (0), bias ("none",
        /// "lora_only" or "all"), use_rslora, use_dora, lora_bias, rank_pattern, alpha_pattern,
        /// modules_to_save, ensure_weight_tying, trainable_token_indices and init_lora_weights
        /// (true, false or "gaussian"). The trained adapter is saved in output_dir/adapter, as PEFT
        /// saves it. Language models only.
        lora: () = free(),
        /// Folder of an adapter of PEFT that is trained further, in place of lora: a path relative
        /// to the current folder or the job file.
        adapter: Option<&'a str> = opt_text_of("a folder"),
        quantization_config: QuantizationConfig<'a> = section(),
    }

    /// Quantization of the frozen base model of an adapter (QLoRA), with the names of transformers'
    /// BitsAndBytesConfig. Every frozen matrix is stored in blocks of 64 elements and dequantized a
    /// panel at a time in products; unlike in bitsandbytes, embeddings and output layers are
    /// quantized too. Only with model.lora or model.adapter, and backend flex.
    pub(crate) struct QuantizationConfig<'a> {
        /// Method: "bitsandbytes" names the fields of this section.
        quant_method = one_of(&["bitsandbytes"], "bitsandbytes").inert("it only names these fields"),
        /// Store frozen matrices in 4 bits.
        load_in_4bit: bool = flag(false),
        /// Store frozen matrices in 8-bit integers. This is not LLM.int8(): activations are not
        /// quantized.
        load_in_8bit: bool = flag(false),
        /// 4-bit data type. "fp4", the default of transformers, is not supported.
        bnb_4bit_quant_type: &'a str = one_of(&["nf4", "fp4"], "nf4"),
        /// Data type of products. Must be the type of training: "bfloat16" with bf16.enabled,
        /// "float16" with fp16.enabled, else "float32". Unset: the type of training.
        bnb_4bit_compute_dtype: Option<&'a str> = opt_one_of(&["float32", "bfloat16", "float16"]),
        /// Store the scales of 4-bit blocks in 8 bits too.
        bnb_4bit_use_double_quant: bool = flag(false),
        /// Data type of the tensor that stores 4-bit codes.
        bnb_4bit_quant_storage = opt_text().inert("codes are stored in bytes, which no output contains"),
        /// Modules that are not quantized: complete names, their beginnings up to a dot, or their
        /// ends. ["lm_head", "embed_tokens"] selects what bitsandbytes would quantize.
        llm_int8_skip_modules: Vec<&'a str> = texts(),
        /// Threshold of outliers in activations.
        llm_int8_threshold = real(NotNegative, 6.0).inert("activations are not quantized, so there are no outliers"),
        /// Keep offloaded modules in float32.
        llm_int8_enable_fp32_cpu_offload = flag(false).inert("modules are not placed on devices one by one"),
        /// Keep 16-bit main weights.
        llm_int8_has_fp16_weight = fixed(false, "16-bit main weights of a quantized base"),
        // `BitsAndBytesConfig.to_dict` writes them beside load_in_4bit and load_in_8bit.
        /// Copy of load_in_4bit.
        saved_4bit as "_load_in_4bit" = flag(false).inert("load_in_4bit selects the format"),
        /// Copy of load_in_8bit.
        saved_8bit as "_load_in_8bit" = flag(false).inert("load_in_8bit selects the format"),
    }

    /// Data set, splits and tokenizer.
    pub(crate) struct Data<'a> {
        /// Type of data: "text" (text files and tables), "chat" (conversations, prompts with
        /// completions and other samples that are learned one by one), "preference" (prompts with a
        /// better and a worse completion, for DPO), "tokens" (raw token files), "synthetic"
        /// (embedded synthetic text) or "classification" (labeled texts).
        kind: &'a str =
            one_of(&["text", "chat", "preference", "tokens", "synthetic", "classification"], "text"),
        /// Column or field that contains the text.
        text_field: &'a str = text("text"),
        /// Column or field that contains the label: an integer from 0, or a class name. With
        /// model.config.problem_type "multi_label_classification" a list of them, and with
        /// "regression" a number or a list of numbers. Only for classification.
        label_field: &'a str = text("label"),
        /// Data set: a file or folder, relative to the current folder or the job file, or a Hub
        /// repository (owner/name or owner/name@revision). Unset: the files in splits, or embedded
        /// synthetic data.
        path: Option<&'a str> = opt_text_of(PLACE),
        /// Configuration name, for data sets with several configurations.
        name: Option<&'a str> = opt_text(),
        /// Separator between documents: "end_of_text" (the end-of-text token, see eos_token),
        /// "blank_line" or "nothing". Published WikiText perplexities use "blank_line".
        join: Join = choice("end_of_text"),
        /// Column or field that contains the messages of a conversation. Unset: "messages" or
        /// "conversations", whichever a row has. Only for chat.
        messages_field: Option<&'a str> = opt_text(),
        /// Chat template: a file, or the template itself. Unset: the template of the tokenizer.
        /// Only for chat and preference.
        chat_template: Option<&'a str> = opt_text_of("a file or a template"),
        /// Compute the loss on the answers of the assistant only. true, as in TRL: for rows with
        /// messages, and chat templates that mark answers with {% generation %} or that TRL knows.
        /// "turns": also for other templates, in whose text the answers are found, and for rows of
        /// ShareGPT and Alpaca. Only for chat.
        assistant_only_loss: AssistantOnlyLoss = answers(),
        /// Compute the loss on completions only, and not on their prompts; true by default for rows
        /// with a prompt and a completion. Only for chat.
        completion_only_loss: Option<bool> = opt_flag(),
        /// Pack several samples into sequences of sequence_length tokens. Only for chat; text is
        /// always packed.
        packing: bool = flag(false),
        /// Packing of samples: "bfd" (best fit decreasing: samples are whole, or truncated to
        /// sequence_length, and do not see each other), "bfd_split" (the same, but longer samples
        /// are divided instead of truncated) or "wrapped" (samples are joined and cut, and see each
        /// other).
        packing_strategy: PackingStrategy = choice("bfd"),
        /// Join the samples of a micro-batch into one sequence instead of padding them. They do not
        /// see each other. Only for chat; packing with "bfd" or "bfd_split" always does it.
        padding_free: bool = flag(false),
        /// Token that pads the shorter samples of a micro-batch. Unset: the token that the files of
        /// the tokenizer name, else the end-of-text token. The model does not see it. Only for chat
        /// and preference.
        pad_token: Option<&'a str> = opt_text_of(TOKEN),
        /// Leave out rows that are not valid, or that the chat template refuses, instead of ending
        /// with an error. They are counted, and the first one is named. Only for chat and
        /// preference.
        skip_invalid_rows: bool = flag(false),
        /// Cache tokenized text for later runs, in deepburn/tokens of the user's cache folder
        /// (XDG_CACHE_HOME).
        token_cache: bool = flag(true),
        splits: Splits<'a> = section(),
        /// Tokenizer: a folder, a tokenizer.json or a Hub repository. Unset: the tokenizer of the
        /// pretrained model, or, without a pretrained model, a byte-level BPE trained on the train
        /// split. The ids of a pretrained model's own tokenizer have to keep their tokens.
        tokenizer: Option<&'a str> = opt_text_of(PLACE),
        /// Token that ends a text, "</s>" for example. It must be one token of the tokenizer.
        /// Unset: the token that the files of the tokenizer or of the pretrained model name.
        eos_token: Option<&'a str> = opt_text_of(TOKEN),
        /// Train pretrained weights on another vocabulary than their own: the vocabulary of
        /// tokenizer, or of a byte-level BPE trained on the train split. The pretrained embeddings
        /// then stand for other tokens.
        new_vocabulary: bool = flag(false),
        /// Maximum vocabulary size, if a tokenizer is trained.
        vocab_size: usize = count_in(SMALLEST_VOCABULARY, 1 << 24, 512).unit("tokens"),
        /// Sequence length of a sample. Classification, chat and preference truncate longer
        /// samples. Unset for chat and preference: 1024, the max_length of TRL.
        sequence_length: usize = positive(128)
            .or_else("1024 for chat and preference")
            .alias("max_length")
            .unit("tokens"),
        /// Shuffle the samples in every epoch. All ranks draw the same number of samples, so each
        /// epoch skips the remainder of samples divided by ranks; the skipped samples differ
        /// between epochs. Without shuffling, ranks with one sample less repeat one. In chat and
        /// preference, an epoch has every sample once.
        shuffle: bool = flag(true),
        /// Leave out the last step if training.epochs ends before its global batch is full. Batches
        /// may take samples of two epochs, so only the end of training is affected. Unset:
        /// dataloader_drop_last of the deepspeed section.
        drop_last: Option<bool> = opt_flag(),
    }

    /// Train, validation and test splits. Unset: all data is used for training.
    pub(crate) struct Splits<'a> {
        /// Train split: a percentage of data.path ("90%"), the name of a split of that data set,
        /// or, without data.path, a file or folder.
        train: Option<&'a str> = opt_split(),
        /// Validation split for evaluations during training, in the same form. For classification,
        /// it may also be a percentage held out from a train split that is a name or a path.
        eval: Option<&'a str> = opt_split(),
        /// Test split for the evaluation after training, in the same form.
        test: Option<&'a str> = opt_split(),
    }

    /// Length of training, ranks, output, evaluation and checkpoints.
    pub(crate) struct Training<'a> {
        /// Number of passes over the train split, such as 3 or 0.5. Defaults to 1 if max_steps is
        /// unset too.
        epochs: Option<f64> = opt_real(Positive).alias("num_train_epochs").unit("epochs"),
        /// Maximum number of optimizer steps. If epochs is set too, training ends at whichever
        /// comes first. -1 means unset, as in transformers.
        max_steps: Option<usize> = opt_positive().unit("steps"),
        // The default is transformers'.
        /// Random seed of weight initialization, sample order and dropout.
        seed: usize = count(42),
        /// Number of ranks: threads of one process, or one process each under mpirun or srun.
        /// Unset: num_processes of an Accelerate file, the launcher's number of processes, or 1.
        ranks: Option<usize> = opt_count_in(1, 1024).unit("ranks"),
        /// Number of pipeline stages, which must divide the number of ranks. Each stage computes
        /// its blocks of the model. Unset: pipeline.stages of the deepspeed section.
        pipeline_stages: Option<usize> = opt_count_in(1, 63).unit("stages"),
        /// Pipeline schedule: "1f1b" (a backward pass as soon as possible), "gpipe" (all forward
        /// passes first, which needs more activation memory) or "zb-h1" (as "1f1b", but gradients
        /// of weights are computed while a stage would wait, which needs more memory on all stages
        /// but the first). Results do not differ.
        pipeline_schedule: PipelineSchedule = choice("1f1b"),
        /// Burn backend: "flex" (CPU, pure Rust), "wgpu", "cuda" or "tch" (LibTorch on the CPU).
        /// All except flex require a build with the Cargo feature of the same name.
        backend: Backend = choice("flex"),
        /// Precision of products of float32 matrices on NVIDIA GPUs, with the names of PyTorch's
        /// torch.set_float32_matmul_precision: "highest" (all bits of float32), or "high" and
        /// "medium" (TF32: faster on tensor cores, with 10 bits of mantissa). Convolutions always
        /// use TF32. Only for backend cuda.
        float32_matmul_precision: Float32MatmulPrecision = choice("highest"),
        /// Indices of the devices to use on each host, among the visible ones. Ranks are assigned
        /// by local rank; if there are more ranks than devices, they share devices. "auto"
        /// (default): all visible devices.
        devices: () = free().auto(),
        /// Output folder, created if missing.
        output_dir: &'a str = text("output"),
        // 30 minutes are the default of `torch.distributed` for all backends except NCCL.
        /// Timeout of collectives. If a rank waits longer for the others, the run fails and names
        /// the missing ranks.
        collective_timeout: usize = positive(1800).unit("s"),
        /// When to evaluate: "no", "steps" (every eval_steps) or "epoch" (in the step that takes
        /// the last sample of an epoch). The last step is evaluated too. Unset: "steps" if
        /// eval_steps is set, else "no".
        eval_strategy: Option<&'a str> =
            opt_one_of(&["no", "steps", "epoch"]).outdated("evaluation_strategy"),
        /// Optimizer steps between evaluations, as a number or, below 1, as a ratio of all steps
        /// (rounded up). Unset: see eval_strategy.
        eval_steps: Option<StepCount> = opt_steps(1).unit("steps"),
        /// Maximum number of samples in an evaluation during training, from the start of the split.
        /// Unset: all samples.
        eval_max_samples: Option<usize> = opt_positive().unit("samples"),
        /// Number of samples per rank in a batch of an evaluation or of the test. Unset: the
        /// micro-batch size. Not supported with dynamic batching, whose token budget sets it.
        per_device_eval_batch_size: Option<usize> = opt_positive().unit("samples"),
        /// Prompts that the language model continues after each evaluation, with its most likely
        /// tokens. The texts are in output_dir/generated.jsonl and in the report. With data of kind
        /// "chat" or "preference", a prompt is a message of the user if there is a chat template.
        sample_prompts: Vec<&'a str> = texts(),
        /// Number of samples of the eval split whose prompts are continued in the same way, from
        /// the start of the split. Only with data of kind "chat" or "preference".
        sample_rows: usize = count(0).unit("samples"),
        /// Maximum number of tokens of a text for sample_prompts and sample_rows.
        sample_max_new_tokens: usize = positive(64).unit("tokens"),
        /// Keep a checkpoint of the best evaluation so far, and load it when training ends for the
        /// saved model and the final test. Requires evaluations (eval_strategy).
        load_best_model_at_end: bool = flag(false),
        /// Metric for comparing models: "loss" (lower is better) or, for classifiers, "accuracy"
        /// (higher is better). With several labels for each text also "f1" (higher is better); for
        /// regression "mae" (lower is better) instead.
        metric_for_best_model: ModelMetric = choice("loss"),
        /// Number of consecutive evaluations without improvement after which training stops. Unset:
        /// no early stopping. Requires evaluations (eval_strategy).
        early_stopping_patience: Option<usize> = opt_positive().unit("evaluations"),
        /// Minimum change of metric_for_best_model that counts as an improvement for
        /// early_stopping_patience.
        early_stopping_threshold: f64 = real(NotNegative, 0.0),
        batch_size_schedule: BatchSizeSchedule<'a> = section(),
        /// Optimizer steps between log lines, as a number or, below 1, as a ratio of all steps.
        /// Unset: steps_per_print of the deepspeed section.
        logging_steps: Option<StepCount> = opt_steps(1).unit("steps"),
        /// Programs to write metrics for, as in transformers: a name or a list of "wandb",
        /// "tensorboard" and "none". The first two enable the section of the same name in the
        /// deepspeed section. Unset: those that the deepspeed section enables.
        report_to: Vec<&'a str> = texts(),
        /// When to save checkpoints: "no", "steps" (every save_steps) or "epoch" (in the step that
        /// takes the last sample of an epoch). The last step is saved too. Unset: "steps" if
        /// save_steps is set, else "no". "best" is not supported: see load_best_model_at_end.
        save_strategy: Option<&'a str> = opt_one_of(&["no", "steps", "epoch", "best"]),
        /// Optimizer steps between checkpoints in output_dir/checkpoints, as a number or, below 1,
        /// as a ratio of all steps (rounded up). Unset: see save_strategy. Without checkpoints, a
        /// run saves only on interruption, and for load_best_model_at_end.
        save_steps: Option<StepCount> = opt_steps(1).unit("steps"),
        /// Save checkpoints in the background while training continues. Needs up to as much
        /// additional memory as the data that is saved.
        async_save: bool = flag(false),
        /// Number of newest checkpoints to keep; older ones are deleted. Unset: keep all.
        save_total_limit: Option<usize> = opt_positive().unit("checkpoints"),
        /// Number of best checkpoints by metric_for_best_model to keep in addition to the newest
        /// ones. Requires save_total_limit, and save_steps as a multiple of eval_steps or both
        /// strategies "epoch". Unset: none.
        save_best_limit: Option<usize> = opt_positive().unit("checkpoints"),
        /// Save the model with the adapter merged into its weights too, in output_dir/model. Only
        /// with model.lora or model.adapter.
        save_merged: bool = flag(false),
        /// Parameters in checkpoints: "all", or "trained" (the default with model.lora and
        /// model.adapter), which omits frozen parameters that still have the values of
        /// model.pretrained. Resuming and exporting such a checkpoint need the same pretrained
        /// model; its values are verified with hashes in the checkpoint.
        checkpoint_scope: CheckpointScope = choice("all")
            .or_else("\"trained\" with model.lora and model.adapter"),
        resume = ON_THE_COMMAND_LINE,
        resume_from_checkpoint = ON_THE_COMMAND_LINE,
        /// Learning rate, if the deepspeed section leaves lr unset or "auto".
        learning_rate: Option<f64> = opt_real(NotNegative),
        /// Micro-batch size per rank, if the deepspeed section sets neither batch size, or sets it
        /// to "auto".
        micro_batch_size: Option<usize> = opt_positive().unit("samples"),
        /// Enable or disable activation checkpointing, which recomputes activations in backward to
        /// save memory. deepspeed.activation_checkpointing selects the policy.
        gradient_checkpointing: Option<bool> = opt_flag(),
        /// Learning-rate schedule of transformers' Trainer, instead of a scheduler in the deepspeed
        /// section. Unset: that scheduler, or a constant learning rate (transformers: "linear").
        /// "reduce_lr_on_plateau" and "greedy" are not supported.
        lr_scheduler_type: Option<LrSchedulerType> = opt_choice(),
        lr_scheduler_kwargs: SchedulerKwargs<'a> = section(),
        /// Length of the warm-up, as a number of steps or, below 1, as a ratio of all steps. Used
        /// by lr_scheduler_type, and if warmup_num_steps of the deepspeed section is "auto".
        warmup_steps: Option<StepCount> = opt_steps(0).unit("steps"),
        /// Length of the warm-up as a ratio of all steps, rounded up to whole steps. Excludes
        /// warmup_steps.
        warmup_ratio: Option<f64> = opt_real(Fraction),
        /// Label smoothing: weight of the mean over all classes or tokens of the vocabulary in the
        /// loss, in training and in evaluation, as in transformers' Trainer.
        label_smoothing_factor: f64 = real(Decay, 0.0),
        /// What is optimized: "dpo" (direct preference optimization), which data of kind
        /// "preference" always is. Unset for other data: the likelihood of tokens or classes.
        objective: Option<&'a str> = opt_one_of(&["dpo"]),
        dpo: Dpo<'a> = section(),
        /// Parameters without weight decay: "biases_and_norms" (all one-dimensional parameters, as
        /// in transformers' Trainer) or "nothing" (every parameter decays, as in DeepSpeed).
        no_decay: NoDecay = choice("biases_and_norms"),
        param_groups: Vec<ParamGroup<'a>> = sections(),
        gradient_accumulation_steps = belongs("write deepspeed.gradient_accumulation_steps"),
        train_batch_size = belongs("write deepspeed.train_batch_size"),
        per_device_train_batch_size = belongs(MICRO_BATCH),
        max_grad_norm = belongs("write deepspeed.gradient_clipping"),
        weight_decay = belongs("write deepspeed.optimizer.params.weight_decay"),
        fp16 = belongs("write deepspeed.fp16.enabled"),
        bf16 = belongs("write deepspeed.bf16.enabled"),
    }

    /// Direct preference optimization of data of kind "preference", with the names and defaults of
    /// TRL's DPOConfig. The reference is the model at the start of the run; its log-probabilities
    /// are computed once, before the first step.
    pub(crate) struct Dpo<'a> {
        /// Strength of the bond to the reference model: the scale of rewards.
        beta: f64 = real(Positive, 0.1),
        /// Loss of a pair: "sigmoid" (DPO) or "ipo", whose log-probabilities are means over tokens.
        loss_type: PreferenceLoss = choice("sigmoid"),
        /// Label smoothing. As in TRL, neither loss uses it.
        label_smoothing = real(NotNegative, 0.0).inert("as in TRL, the losses \"sigmoid\" and \"ipo\" do not use it"),
    }

    /// Parameters of lr_scheduler_type, with the names and defaults of transformers.
    pub(crate) struct SchedulerKwargs<'a> {
        /// Periods of the cosine for cosine, cosine_with_min_lr, cosine_warmup_with_min_lr and the
        /// decay of warmup_stable_decay; 0.5 by default. Number of restarts for
        /// cosine_with_restarts; 1 by default.
        num_cycles: Option<f64> = opt_real(NotNegative),
        /// Exponent of polynomial; 1 by default.
        power: Option<f64> = opt_real(NotNegative),
        /// Learning rate at the end of polynomial; 1e-7 by default.
        lr_end: Option<f64> = opt_real(NotNegative),
        /// Time scale of inverse_sqrt. Unset: the number of warm-up steps, or 10000 without a
        /// warm-up.
        timescale: Option<usize> = opt_positive().unit("steps"),
        /// Lowest learning rate of cosine_with_min_lr and cosine_warmup_with_min_lr. They need
        /// min_lr or min_lr_rate.
        min_lr: Option<f64> = opt_real(NotNegative),
        /// The same as a fraction of the optimizer's lr.
        min_lr_rate: Option<f64> = opt_real(Fraction),
        /// Learning rate of the first step of cosine_warmup_with_min_lr, as a fraction of the
        /// optimizer's lr. Unset: 1 / warmup_steps.
        warmup_lr_rate: Option<f64> = opt_real(Fraction),
        /// Length of the decay of warmup_stable_decay, which needs it.
        num_decay_steps: Option<usize> = opt_count().unit("steps"),
        /// Length of the constant part of warmup_stable_decay. Unset: all steps outside of the
        /// warm-up and the decay.
        num_stable_steps: Option<usize> = opt_count().unit("steps"),
        /// Shape of the warm-up of warmup_stable_decay; "linear" by default.
        warmup_type: Option<RampShape> = opt_choice(),
        /// Shape of the decay of warmup_stable_decay; "cosine" by default.
        decay_type: Option<RampShape> = opt_choice(),
        /// Learning rate at the start and the end of warmup_stable_decay, as a fraction of the
        /// optimizer's lr; 0 by default.
        min_lr_ratio: Option<f64> = opt_real(Fraction),
    }

    /// Batch-size schedule: change train_batch_size during training through gradient accumulation.
    pub(crate) struct BatchSizeSchedule<'a> {
        /// First optimizer step of each batch size, in ascending order and counted from 1 as in
        /// metrics.jsonl.
        from_step: Option<Vec<usize>> = opt_positives().unit("steps"),
        /// Batch sizes, one for each from_step; each is a multiple of micro-batch size times ranks.
        train_batch_size: Option<Vec<usize>> = opt_positives().unit("samples"),
    }

    /// Parameter groups with their own settings. A parameter can be in one group only.
    pub(crate) struct ParamGroup<'a> {
        /// Regular expression or a list of them, searched for in the module paths of parameters:
        /// "^wte\\." for example. Unset: all paths.
        params: Vec<&'a str> = texts(),
        /// Numbers of dimensions to select: [1] for biases and norm weights, [2] for matrices.
        /// Unset: all.
        dims: Option<Vec<usize>> = opt_positives(),
        /// Learning rate of the group. The schedule applies in proportion: half of the optimizer's
        /// lr is half of the scheduled rate in every step. Excludes lr_factor.
        lr: Option<f64> = opt_real(NotNegative),
        /// Factor of the scheduled learning rate. Excludes lr.
        lr_factor: f64 = real(NotNegative, 1.0),
        /// Weight decay of the group; overrides the optimizer's and no_decay.
        weight_decay: Option<f64> = opt_real(NotNegative),
        /// Betas of the group, the decay rates of the moments; overrides the optimizer's.
        betas: Option<[f64; 2]> = opt_pair(Decay),
        /// Number of matrices side by side along the outputs of each parameter, for Muon; each is
        /// orthogonalized separately, and 0 selects Adam. Unset: 3 for fused query, key and value
        /// projections, 0 for embeddings and output layers, 1 for other matrices and convolutions.
        muon_matrices: Option<usize> = opt_count(),
        /// Freeze the parameters of the group. Excludes the other settings.
        frozen: bool = flag(false),
    }
}
