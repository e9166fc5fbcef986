//! The keys of a job file: `model`, `data`, `training`, `deepspeed`.

use crate::key::{Key, Literal};

use crate::keys::{DEEPSPEED, SCHEMA};
use crate::kind::{Integers, Kind, Reals};

/// Where `training.backend` may run. Which of them a program has is decided when it is built.
pub(crate) const BACKENDS: &[&str] = &["flex", "wgpu", "cuda", "tch"];

/// Smallest vocabulary of a byte-level tokenizer: 256 bytes and the end of text.
const SMALLEST_VOCABULARY: i64 = 257;

const IN_COMMAND: &str = "says where one run begins, not what the job is";

const IN_DEEPSPEED: &str = "is not a key of the job file";

/// A key that Hugging Face's trainer has here and DeepSpeed has in its own file.
const fn belongs(name: &'static str, remedy: &'static str) -> Key {
    Key::optional(name, Kind::Free, "Belongs in the deepspeed section.")
        .refused(IN_DEEPSPEED, remedy)
}

const fn positive(name: &'static str, doc: &'static str) -> Key {
    Key::optional(name, Kind::Integer(Integers::POSITIVE), doc)
}

const MODEL: &[Key] = &[
    Key::new(
        "architecture",
        Kind::Choice(&["gpt2", "imdb_encoder"]),
        Literal::Text("gpt2"),
        "What is trained: gpt2, a language model, or imdb_encoder, which classifies texts.",
    ),
    Key::optional(
        "pretrained",
        Kind::Text,
        "Folder of a checkpoint in Hugging Face's layout, looked for from the current folder, then \
            beside the job file; or a repository on the Hub (owner/name, owner/name@revision). \
            Without it weights are drawn from the seed.",
    ),
    Key::optional(
        "config",
        Kind::Free,
        "Hugging Face's config fields; they override those of the checkpoint. Of gpt2: vocab_size, \
            n_positions, n_embd, n_layer, n_head, n_inner, activation_function, resid_pdrop, embd_pdrop, \
            attn_pdrop, layer_norm_epsilon, initializer_range, tie_word_embeddings and others of its \
            config.json. Of imdb_encoder: vocab_size, embed_dim, num_heads, num_layers, hidden_dim, max_len, \
            dropout, layer_norm_epsilon. Of classifiers also id2label.",
    ),
];

const SPLITS: &[Key] = &[
    Key::optional(
        "train",
        Kind::Text,
        "What trains: a share of data.path (\"90%\"), a split of the data set data.path by its \
            name, or without data.path a file or folder.",
    ),
    Key::optional(
        "eval",
        Kind::Text,
        "What evaluates during training, in the same form; of classification also a share of the \
            split train.",
    ),
    Key::optional("test", Kind::Text, "What is kept for a final test, in the same form."),
];

const DATA: &[Key] = &[
    Key::new(
        "kind",
        Kind::Choice(&["text", "tokens", "synthetic", "classification"]),
        Literal::Text("text"),
        "What the data is: text files, raw token files, the embedded synthetic corpus, or texts \
            with a class each.",
    ),
    Key::new("text_field", Kind::Text, Literal::Text("text"), "Field or column of the text."),
    Key::new(
        "label_field",
        Kind::Text,
        Literal::Text("label"),
        "Field or column of the class: a number from 0, or a name.",
    ),
    Key::optional(
        "path",
        Kind::Text,
        "File or folder, looked for from the current folder, then beside the job file; or a data \
            set on the Hub (owner/name, owner/name@revision). Without it, text is the embedded \
            synthetic corpus.",
    ),
    Key::optional("name", Kind::Text, "Configuration of a data set that has several."),
    Key::new(
        "join",
        Kind::Choice(&["end_of_text", "blank_line", "nothing"]),
        Literal::Text("end_of_text"),
        "What stands between the documents of a text. Figures for WikiText are those of blank_line.",
    ),
    Key::flag(
        "token_cache",
        true,
        "Keep the tokens of text for the next run, in deepburn/tokens of the user's cache folder \
            (XDG_CACHE_HOME).",
    ),
    Key::section(
        "splits",
        SPLITS,
        "Which part trains, evaluates, tests; without it everything trains.",
    ),
    Key::optional(
        "tokenizer",
        Kind::Text,
        "Folder, tokenizer.json or repository on the Hub; without it the pretrained model's is \
            taken, or one is trained on the train split.",
    ),
    Key::new(
        "vocab_size",
        Kind::Integer(Integers { min: SMALLEST_VOCABULARY, max: 1 << 24 }),
        Literal::Integer(512),
        "Entries of the tokenizer that is trained, at most.",
    )
    .unit("tokens"),
    Key::positive("sequence_length", 128, "Length of a sample.").unit("tokens"),
    Key::flag("shuffle", true, "Draw samples in a new order every epoch."),
    Key::optional(
        "drop_last",
        Kind::Flag,
        "Drop the samples that do not fill a last global batch; by default dataloader_drop_last \
            of the deepspeed section.",
    ),
];

const BATCH_SIZE_SCHEDULE: &[Key] = &[
    Key::optional(
        "from_step",
        Kind::Integers(Integers::POSITIVE),
        "First optimizer step of each size, counted from 1 as in metrics.jsonl.",
    )
    .unit("steps"),
    Key::optional(
        "train_batch_size",
        Kind::Integers(Integers::POSITIVE),
        "The sizes, each a multiple of micro-batch times ranks.",
    )
    .unit("samples"),
];

const PARAM_GROUPS: &[Key] = &[
    Key::optional(
        "params",
        Kind::Texts,
        "Regular expression, or several, that is looked for in the module paths of parameters: \"^wte\\\\.\" \
            for example. Without it, parameters of any path.",
    ),
    Key::optional(
        "dims",
        Kind::Integers(Integers::POSITIVE),
        "Numbers of dimensions: [1] for biases and the weights of norms, [2] for matrices. Without it, any.",
    ),
    Key::optional(
        "lr",
        Kind::Real(Reals::NotNegative),
        "Learning rate in place of the optimizer's. The schedule applies in proportion: half of the optimizer's \
            lr is half of the schedule's rate in every step.",
    ),
    Key::new(
        "lr_factor",
        Kind::Real(Reals::NotNegative),
        Literal::Real(1.0),
        "Factor of the schedule's learning rate.",
    ),
    Key::optional(
        "weight_decay",
        Kind::Real(Reals::NotNegative),
        "Weight decay in place of the optimizer's and of no_decay.",
    ),
    Key::optional(
        "betas",
        Kind::Pair(Reals::Decay),
        "Decay of the moments in place of the optimizer's.",
    ),
    Key::optional(
        "muon_matrices",
        Kind::Integer(Integers::COUNT),
        "With Muon: matrices side by side along the outputs of each parameter, each orthogonalised alone; 0 leaves \
            them to Adam. Without it: 3 for a fused query, key and value projection, 0 for embeddings and output \
            layers, known by layer type and name, and 1 for other matrices and for convolutions.",
    ),
    Key::flag("frozen", false, "Leave these parameters as they are."),
];

const TRAINING: &[Key] = &[
    positive(
        "epochs",
        "Passes over the train split; 1 when max_steps is not given \
        either.",
    )
    .unit("epochs"),
    positive(
        "max_steps",
        "Optimizer steps after which training ends, whatever the \
        epochs.",
    )
    .unit("steps"),
    Key::count("seed", 42, "Seed of weights, order and dropout."),
    Key::optional(
        "ranks",
        Kind::Integer(Integers { min: 1, max: 1024 }),
        "Ranks, one thread each; by default num_processes of an Accelerate file, or 1. Under mpirun or \
        srun, one process each: as many as were started.",
    )
    .unit("ranks"),
    Key::new(
        "backend",
        Kind::Choice(BACKENDS),
        Literal::Text("flex"),
        "Where tensors live. \
        wgpu, cuda and tch need a program built with the feature of that name.",
    ),
    Key::optional(
        "devices",
        Kind::Free,
        "Devices of each host, a list of indices among those that are visible; each rank takes the \
            one of its local rank, from the front again where there are more ranks. \"auto\", the \
            default, means all that are visible.",
    )
    .auto(),
    Key::new(
        "output_dir",
        Kind::Text,
        Literal::Text("output"),
        "Folder of everything that is \
        written, made when it is missing.",
    ),
    Key::new(
        "collective_timeout",
        Kind::Integer(Integers::POSITIVE),
        Literal::Integer(1800),
        "Time that a rank waits for the others in a collective. Then the run fails, with the names of \
        those that did not come.",
    )
    .unit("s"),
    positive(
        "eval_steps",
        "Optimizer steps between two evaluations; none without \
        it.",
    )
    .unit("steps"),
    positive(
        "eval_max_samples",
        "Samples that an evaluation during training takes, the first of its split; all without it.",
    )
    .unit("samples"),
    Key::flag(
        "load_best_model_at_end",
        false,
        "Save a checkpoint whenever an evaluation is the best so far, keep it, and load its weights \
            when training ends: model/ and the final test are of the best model. Needs eval_steps.",
    ),
    Key::new(
        "metric_for_best_model",
        Kind::Choice(&["loss", "eval_loss", "accuracy", "eval_accuracy"]),
        Literal::Text("loss"),
        "What models are compared by: the lowest evaluation loss, or the highest accuracy of a \
            classifier.",
    ),
    positive(
        "early_stopping_patience",
        "Evaluations in a row without a better one, after which training stops; without it all steps \
            are taken. Needs eval_steps.",
    )
    .unit("evaluations"),
    Key::new(
        "early_stopping_threshold",
        Kind::Real(Reals::NotNegative),
        Literal::Real(0.0),
        "By how much an evaluation has to be better for early_stopping_patience.",
    ),
    Key::section(
        "batch_size_schedule",
        BATCH_SIZE_SCHEDULE,
        "Batch sizes that change while training, through gradient accumulation.",
    ),
    positive(
        "logging_steps",
        "Optimizer steps between two printed lines; by default \
        steps_per_print of the deepspeed section.",
    )
    .unit("steps"),
    positive(
        "save_steps",
        "Optimizer steps between two checkpoints in \
        output_dir/checkpoints, of which the last step always has one; none without it, but of a \
        run that is interrupted.",
    )
    .unit("steps"),
    Key::flag(
        "async_save",
        false,
        "Training goes on while a checkpoint is written; takes up to once more the memory of what \
        is saved.",
    ),
    positive("save_total_limit", "Newest checkpoints that are kept; all without it.")
        .unit("checkpoints"),
    positive(
        "save_best_limit",
        "Checkpoints with the best evaluations by metric_for_best_model that are kept besides the newest; \
        none without it.",
    )
    .unit("checkpoints"),
    Key::optional("resume", Kind::Free, "Is an option of the command line.")
        .refused(IN_COMMAND, "give --resume or --resume TAG on the command line"),
    Key::optional("resume_from_checkpoint", Kind::Free, "Is an option of the command line.")
        .refused(IN_COMMAND, "give --resume or --resume TAG on the command line"),
    Key::optional(
        "learning_rate",
        Kind::Real(Reals::NotNegative),
        "Learning rate where the \
        deepspeed section gives none or says \"auto\".",
    ),
    positive(
        "micro_batch_size",
        "Samples of a micro-batch where the deepspeed section gives \
        none or says \"auto\".",
    )
    .unit("samples"),
    Key::optional(
        "gradient_checkpointing",
        Kind::Flag,
        "Recompute the activations of each block in backward. `deepspeed.activation_checkpointing` says how.",
    ),
    positive(
        "warmup_steps",
        "Length of the warm-up where the deepspeed section says \
        \"auto\".",
    )
    .unit("steps"),
    Key::new(
        "no_decay",
        Kind::Choice(&["biases_and_norms", "nothing"]),
        Literal::Text("biases_and_norms"),
        "What weight decay leaves alone: parameters of one dimension, as transformers' Trainer does, or \
            nothing, as DeepSpeed does.",
    ),
    Key::optional(
        "param_groups",
        Kind::Sections(PARAM_GROUPS),
        "Parameters with settings of their own; each may be in one group.",
    ),
    belongs("gradient_accumulation_steps", "write deepspeed.gradient_accumulation_steps"),
    belongs("train_batch_size", "write deepspeed.train_batch_size"),
    belongs(
        "per_device_train_batch_size",
        "write training.micro_batch_size or \
        deepspeed.train_micro_batch_size_per_gpu",
    ),
    belongs("max_grad_norm", "write deepspeed.gradient_clipping"),
    belongs("weight_decay", "write deepspeed.optimizer.params.weight_decay"),
    belongs("fp16", "write deepspeed.fp16.enabled"),
    belongs("bf16", "write deepspeed.bf16.enabled"),
];

/// The top level of a job file.
pub(crate) const JOB: &[Key] = &[
    Key::section("model", MODEL, "What is trained."),
    Key::section("data", DATA, "What it is trained on."),
    Key::section(
        "training",
        TRAINING,
        "For how long, on how many ranks, and where the results go.",
    ),
    Key::optional(
        "deepspeed",
        Kind::SectionOrPath(DEEPSPEED),
        "DeepSpeed configuration, verbatim or as a path, looked for beside the job file, in the \
            current folder and in configs/; or one of Lightning's strategies, \
            deepspeed_stage_2_offload for example.",
    ),
    SCHEMA,
];
