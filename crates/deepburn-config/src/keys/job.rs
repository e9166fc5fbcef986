//! The keys of a job file: `model`, `data`, `training`, `deepspeed`.
//!
//! Names match Hugging Face's `TrainingArguments` where both have the same meaning. A key of
//! `TrainingArguments` that DeepSpeed has in its own file is an error, which names the place where
//! the key belongs.

use crate::job_plan::{Architecture, Backend, Join, ModelMetric};
use crate::keys::{DeepSpeed, SCHEMA};
use crate::plan::NoDecay;
use crate::spec::*;

/// Smallest vocabulary of a byte-level tokenizer: 256 bytes and the end of text.
const SMALLEST_VOCABULARY: i64 = 257;

/// A key that only the command line has: a job file describes the job, not one run of it.
const ON_THE_COMMAND_LINE: Spec<()> = free()
    .refused(
        "says where one run begins, not what the job is",
        "give --resume or --resume TAG on the command line",
    )
    .doc("Is an option of the command line.");

/// What to write instead of Hugging Face's name of the micro-batch.
const MICRO_BATCH: &str =
    "write training.micro_batch_size or deepspeed.train_micro_batch_size_per_gpu";

/// A key that Hugging Face's trainer has here and DeepSpeed has in its own file.
const fn belongs(remedy: &'static str) -> Spec<()> {
    free().refused("is not a key of the job file", remedy).doc("Belongs in the deepspeed section.")
}

section! {
    /// A job file.
    pub(crate) struct JobFile<'a> {
        model: Model<'a> = section(),
        data: Data<'a> = section(),
        training: Training<'a> = section(),
        /// DeepSpeed configuration, verbatim or as a path, looked for beside the job file, in the
        /// current folder and in configs/; or one of Lightning's strategies,
        /// deepspeed_stage_2_offload for example.
        deepspeed = Spec::<()>::of(Kind::SectionOrPath(DeepSpeed::KEYS)),
        schema as "$schema" = SCHEMA,
    }

    /// What is trained.
    pub(crate) struct Model<'a> {
        /// What is trained: gpt2, a language model, or imdb_encoder, which classifies texts.
        architecture: Architecture = choice("gpt2"),
        /// Folder of a checkpoint in Hugging Face's layout, looked for from the current folder,
        /// then beside the job file; or a repository on the Hub (owner/name, owner/name@revision).
        /// Without it weights are drawn from the seed.
        pretrained: Option<&'a str> = opt_text(),
        /// Hugging Face's config fields; they override the checkpoint's. For gpt2:
        /// vocab_size, n_positions, n_embd, n_layer, n_head, n_inner, activation_function,
        /// resid_pdrop, embd_pdrop, attn_pdrop, layer_norm_epsilon, initializer_range,
        /// tie_word_embeddings and others of its config.json. For imdb_encoder: vocab_size,
        /// embed_dim, num_heads, num_layers, hidden_dim, max_len, dropout, layer_norm_epsilon. For
        /// classifiers also id2label.
        config: () = free(),
    }

    /// What it is trained on.
    pub(crate) struct Data<'a> {
        /// What the data is: text files, raw token files, the embedded synthetic corpus, or texts
        /// with a class each.
        kind: &'a str = one_of(&["text", "tokens", "synthetic", "classification"], "text"),
        /// Field or column of the text.
        text_field: &'a str = text("text"),
        /// Field or column of the class: a number from 0, or a name.
        label_field: &'a str = text("label"),
        /// File or folder, looked for from the current folder, then beside the job file; or a data
        /// set on the Hub (owner/name, owner/name@revision). Without it, text is the embedded
        /// synthetic corpus.
        path: Option<&'a str> = opt_text(),
        /// Configuration of a data set that has several.
        name: Option<&'a str> = opt_text(),
        /// Separator between the documents of a text. Figures for WikiText use blank_line.
        join: Join = choice("end_of_text"),
        /// Keep the tokens of text for the next run, in deepburn/tokens of the user's cache folder
        /// (XDG_CACHE_HOME).
        token_cache: bool = flag(true),
        splits: Splits<'a> = section(),
        /// Folder, tokenizer.json or repository on the Hub; without it the pretrained model's is
        /// taken, or one is trained on the train split.
        tokenizer: Option<&'a str> = opt_text(),
        /// Entries of the tokenizer that is trained, at most.
        vocab_size: usize = count_in(SMALLEST_VOCABULARY, 1 << 24, 512).unit("tokens"),
        /// Length of a sample.
        sequence_length: usize = positive(128).unit("tokens"),
        /// Draw samples in a new order every epoch.
        shuffle: bool = flag(true),
        /// Drop the samples that do not fill a last global batch; by default dataloader_drop_last
        /// of the deepspeed section.
        drop_last: Option<bool> = opt_flag(),
    }

    /// Which part trains, evaluates, tests; without it everything trains.
    pub(crate) struct Splits<'a> {
        /// What trains: a share of data.path ("90%"), a split of the data set data.path by its
        /// name, or without data.path a file or folder.
        train: Option<&'a str> = opt_text(),
        /// What evaluates during training, in the same form; of classification also a share of the
        /// split train.
        eval: Option<&'a str> = opt_text(),
        /// What is kept for a final test, in the same form.
        test: Option<&'a str> = opt_text(),
    }

    /// For how long, on how many ranks, and where the results go.
    pub(crate) struct Training<'a> {
        /// Passes over the train split; 1 when max_steps is not given either.
        epochs: Option<usize> = opt_positive().unit("epochs"),
        /// Optimizer steps after which training ends, whatever the epochs.
        max_steps: Option<usize> = opt_positive().unit("steps"),
        /// Seed of weights, order and dropout.
        seed: usize = count(42),
        /// Ranks, one thread each; by default num_processes of an Accelerate file, or 1. Under
        /// mpirun or srun, one process each: as many as were started.
        ranks: Option<usize> = opt_count_in(1, 1024).unit("ranks"),
        /// Where tensors live. wgpu, cuda and tch need a program built with the feature of that
        /// name.
        backend: Backend = choice("flex"),
        /// Devices of each host, a list of indices among those that are visible; each rank takes
        /// the one of its local rank, from the front again where there are more ranks. "auto", the
        /// default, means all that are visible.
        devices: () = free().auto(),
        /// Folder of everything that is written, made when it is missing.
        output_dir: &'a str = text("output"),
        /// Time that a rank waits for the others in a collective. Then the run fails, with the
        /// names of those that did not come.
        collective_timeout: usize = positive(1800).unit("s"),
        /// Optimizer steps between two evaluations; none without it.
        eval_steps: Option<usize> = opt_positive().unit("steps"),
        /// Samples that an evaluation during training takes, the first of its split; all without
        /// it.
        eval_max_samples: Option<usize> = opt_positive().unit("samples"),
        /// Save a checkpoint whenever an evaluation is the best so far, keep it, and load its
        /// weights when training ends: model/ and the final test are of the best model. Needs
        /// eval_steps.
        load_best_model_at_end: bool = flag(false),
        /// What models are compared by: the lowest evaluation loss, or the highest accuracy of a
        /// classifier.
        metric_for_best_model: ModelMetric = choice("loss"),
        /// Evaluations in a row without a better one, after which training stops; without it all
        /// steps are taken. Needs eval_steps.
        early_stopping_patience: Option<usize> = opt_positive().unit("evaluations"),
        /// By how much an evaluation has to be better for early_stopping_patience.
        early_stopping_threshold: f64 = real(NotNegative, 0.0),
        batch_size_schedule: BatchSizeSchedule<'a> = section(),
        /// Optimizer steps between two printed lines; by default steps_per_print of the deepspeed
        /// section.
        logging_steps: Option<usize> = opt_positive().unit("steps"),
        /// Save every N optimizer steps and after the last, in output_dir/checkpoints. Unset: save
        /// only on interruption.
        save_steps: Option<usize> = opt_positive().unit("steps"),
        /// Write checkpoints in the background; takes up to once more the memory of what is saved.
        async_save: bool = flag(false),
        /// Newest checkpoints that are kept; all without it.
        save_total_limit: Option<usize> = opt_positive().unit("checkpoints"),
        /// Checkpoints with the best evaluations by metric_for_best_model that are kept besides the
        /// newest; none without it.
        save_best_limit: Option<usize> = opt_positive().unit("checkpoints"),
        resume = ON_THE_COMMAND_LINE,
        resume_from_checkpoint = ON_THE_COMMAND_LINE,
        /// Learning rate where the deepspeed section gives none or says "auto".
        learning_rate: Option<f64> = opt_real(NotNegative),
        /// Samples of a micro-batch where the deepspeed section gives none or says "auto".
        micro_batch_size: Option<usize> = opt_positive().unit("samples"),
        /// Recompute the activations of each block in backward.
        /// `deepspeed.activation_checkpointing` says how.
        gradient_checkpointing: Option<bool> = opt_flag(),
        /// Length of the warm-up where the deepspeed section says "auto".
        warmup_steps: Option<usize> = opt_positive().unit("steps"),
        /// What weight decay leaves alone: parameters of one dimension, as transformers' Trainer
        /// does, or nothing, as DeepSpeed does.
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

    /// Batch sizes that change while training, through gradient accumulation.
    pub(crate) struct BatchSizeSchedule<'a> {
        /// First optimizer step of each size, counted from 1 as in metrics.jsonl.
        from_step: Option<Vec<usize>> = opt_positives().unit("steps"),
        /// The sizes, each a multiple of micro-batch times ranks.
        train_batch_size: Option<Vec<usize>> = opt_positives().unit("samples"),
    }

    /// Parameters with settings of their own; each may be in one group.
    pub(crate) struct ParamGroup<'a> {
        /// Regular expression, or several, that is looked for in the module paths of parameters:
        /// "^wte\\." for example. Without it, parameters of any path.
        params: Vec<&'a str> = texts(),
        /// Numbers of dimensions: [1] for biases and the weights of norms, [2] for matrices.
        /// Without it, any.
        dims: Option<Vec<usize>> = opt_positives(),
        /// Learning rate in place of the optimizer's. The schedule applies in proportion: half of
        /// the optimizer's lr is half of the schedule's rate in every step.
        lr: Option<f64> = opt_real(NotNegative),
        /// Factor of the schedule's learning rate.
        lr_factor: f64 = real(NotNegative, 1.0),
        /// Weight decay in place of the optimizer's and of no_decay.
        weight_decay: Option<f64> = opt_real(NotNegative),
        /// Decay of the moments in place of the optimizer's.
        betas: Option<[f64; 2]> = opt_pair(Decay),
        /// With Muon: matrices side by side along the outputs of each parameter, each
        /// orthogonalised alone; 0 leaves them to Adam. Without it: 3 for a fused query, key and
        /// value projection, 0 for embeddings and output layers, known by layer type and name, and
        /// 1 for other matrices and for convolutions.
        muon_matrices: Option<usize> = opt_count(),
        /// Leave these parameters as they are.
        frozen: bool = flag(false),
    }
}
