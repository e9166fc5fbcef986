//! Tests of the vocabulary of a pretrained model: its tokenizer, the token between documents, and
//! larger embeddings.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::job::{Job, Trained, tensors, tiny_model};
use crate::program::{deepburn, finetune};

/// The words of all texts. Their ids are 2 to 13, after the unknown token and the end of text.
const WORDS: [&str; 12] = [
    "amber", "birch", "cloud", "delta", "ember", "fjord", "grove", "haze", "inlet", "jade",
    "knoll", "lark",
];
/// Tokens of the vocabulary.
const TOKENS: usize = 14;

/// Returns a tokenizer of words.
fn tokenizer(words: &[&str]) -> Value {
    let tokens = ["<unk>", "</s>"].iter().chain(words).enumerate();
    let vocab: serde_json::Map<_, _> =
        tokens.map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": vocab},
    })
}

/// Writes a file in a new or existing folder.
fn write(folder: &Path, name: &str, content: impl ToString) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join(name), content.to_string()).unwrap();
}

/// Returns documents of 5 to 9 words.
fn documents() -> Vec<String> {
    let word = |at: usize| WORDS[at * at * 7 % 11];
    (0..60)
        .map(|n| (0..5 + n % 5).map(|at| word(n * 3 + at)).collect::<Vec<_>>().join(" "))
        .collect()
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Returns a job on the documents in `rows.jsonl` and, as one text, in `text.txt`, with the
/// tokenizer in `words`. It has been run once, so that `base/model` is a model with its own
/// tokenizer.
fn job() -> Job {
    let job = Job::tiny()
        .with(
            "model",
            json!({"config": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32,
                "vocab_size": TOKENS, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}}),
        )
        .with(
            "data",
            json!({"path": "rows.jsonl", "sequence_length": 8, "token_cache": false,
                "tokenizer": "words"}),
        )
        .with("training.max_steps", 2)
        .with("training.output_dir", "base");
    let folder = job.folder();
    write(&folder.join("words"), "tokenizer.json", tokenizer(&WORDS));
    write(&folder.join("words"), "special_tokens_map.json", json!({"eos_token": "</s>"}));
    let row = |text: &String| json!({"text": text, "label": text.len() % 2}).to_string();
    write(folder, "rows.jsonl", documents().iter().map(row).collect::<Vec<_>>().join("\n"));
    write(folder, "text.txt", documents().join(" "));
    let ending = job.run().succeeded();
    let line = "documents are separated by the end-of-text token `</s>`, id 1";
    assert!(ending.stderr.contains(line), "{}", ending.stderr);
    assert_eq!(read(&folder.join("base/model/config.json"))["eos_token_id"], 1);
    // A copy without the tokenizer.
    fs::create_dir(folder.join("bare")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(folder.join("base/model").join(name), folder.join("bare").join(name)).unwrap();
    }
    job.with("training.output_dir", "output")
}

/// Returns the job from the pretrained model `model`, without another tokenizer.
fn from(job: Job, model: &str) -> Job {
    job.with("model", json!({"pretrained": model})).with("data.tokenizer", Value::Null)
}

#[test]
fn a_pretrained_model_needs_its_tokenizer() {
    let mut job = from(job(), "bare");
    let parts =
        ["model.pretrained", "bare", "tokenizer.json", "data.tokenizer", "data.new_vocabulary"];
    for (kind, path) in [
        ("text", json!("rows.jsonl")),
        ("synthetic", Value::Null),
        ("classification", json!("rows.jsonl")),
    ] {
        job = job.with("data.kind", kind).with("data.path", path);
        job.run().failed(2, &parts);
        assert!(!job.folder().join("output").exists(), "{kind}");
    }
    write(&job.folder().join("bare"), "tokenizer.model", "sentencepiece");
    job.run().failed(2, &[&parts[..], &["tokenizer.model", "save_pretrained"]].concat());

    // Given separately, the model's own tokenizer is the same as in its folder.
    let job = job.with("data.kind", "text").with("data.tokenizer", "base/model");
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains("data.tokenizer cannot be compared"), "{}", ending.stderr);
    let given = job.train();
    let job = from(job, "base/model");
    let own = job.train();
    assert_eq!(own.numbers(), given.numbers());

    // A vocabulary that is trained on the text has to be asked for. It has all bytes.
    let job = from(job, "bare").with("data.new_vocabulary", true);
    job.run().failed(2, &["model.config.vocab_size", "or more"]);
    let job = job.with("model.config", json!({"vocab_size": 512}));
    assert_ne!(job.train().steps[0].loss, own.steps[0].loss);
    assert!(job.folder().join("output/model/tokenizer.json").is_file());
    // Token files need no tokenizer.
    Job::tiny().with("training.max_steps", 1).train();
}

#[test]
fn another_tokenizer_is_refused() {
    let mut swapped = WORDS;
    swapped.swap(3, 7);
    let mut job = from(job(), "base/model").with("data.tokenizer", "swapped");
    write(&job.folder().join("swapped"), "tokenizer.json", tokenizer(&swapped));
    write(&job.folder().join("swapped"), "special_tokens_map.json", json!({"eos_token": "</s>"}));
    for kind in ["classification", "text"] {
        job = job.with("data.kind", kind);
        let change = "2 ids stand for other tokens, such as 5 for \"haze\" instead of \"delta\"";
        job.run().failed(2, &["data.tokenizer", "base/model", change, "data.new_vocabulary"]);
        assert!(!job.folder().join("output").exists(), "{kind}");
    }
    let says = |job: &Job, part: &str| {
        let ending = job.run().succeeded();
        assert!(ending.stderr.contains(part), "{}", ending.stderr);
    };
    let job = job.with("data.new_vocabulary", true);
    says(&job, "2 ids stand for other tokens than in the pretrained model");
    // The same tokens are the model's own vocabulary, and a model without weights has none yet.
    let job = job.with("data.tokenizer", "words");
    says(&job, "data.new_vocabulary has no effect");
    let config = json!({"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32});
    let job = job.with("model", json!({"config": config}));
    says(&job, "no effect without model.pretrained");
    // The same tokens, but another way to split text.
    let mut other = tokenizer(&WORDS);
    other["pre_tokenizer"]["type"] = json!("WhitespaceSplit");
    write(&job.folder().join("words"), "tokenizer.json", other);
    let job =
        from(job, "base/model").with("data.tokenizer", "words").with("data.new_vocabulary", false);
    says(&job, "but another pre_tokenizer");
    // A damaged tokenizer of the model cannot be compared, as if it were missing.
    write(&job.folder().join("base/model"), "tokenizer.json", "{");
    says(&job, "cannot be compared with the tokenizer of model.pretrained: ");
    let job = job.with("data.new_vocabulary", true);
    job.run().succeeded();
    let job = job.with("data.new_vocabulary", false).with("data.tokenizer", Value::Null);
    job.run().failed(2, &["model.pretrained", "tokenizer.json"]);
}

/// Follows the messages from a tokenizer with more tokens than the model to a model with more
/// embeddings.
#[test]
fn a_vocabulary_grows_with_its_tokenizer() {
    let mut job = from(job(), "base/model")
        .with("data.tokenizer", "larger")
        .with("training.save_steps", 1)
        .with("deepspeed.optimizer.params", json!({"lr": 0.0, "weight_decay": 0.0}));
    let folder = job.folder().to_owned();
    let larger = [&WORDS[..], &["mesa", "nook", "opal"]].concat();
    write(&folder.join("larger"), "tokenizer.json", tokenizer(&larger));
    let embedding = |model: &str| {
        let file = fs::read(folder.join(model).join("model.safetensors")).unwrap();
        let all = tensors(&file).into_iter();
        all.filter(|(name, _)| name == "transformer.wte.weight").map(|it| it.1).next().unwrap()
    };
    let old = embedding("base/model");
    let column = |at: usize| old.iter().skip(at).step_by(16).map(|it| f64::from(*it)).sum::<f64>();
    let mean: Vec<f32> = (0..16).map(|at| (column(at) / TOKENS as f64) as f32).collect();
    for kind in ["text", "classification"] {
        job = job.with("data.kind", kind).with("model.config", Value::Null);
        let parts = ["model.config.vocab_size", "the tokenizer has 17", "set it to 17 or more"];
        job.run().failed(2, &parts);
        assert!(!folder.join("output").exists(), "{kind}");
        job = job.with("model.config", json!({"vocab_size": 17})).with("training.max_steps", 1);
        let ending = job.run().succeeded();
        let part = "has 14 tokens and gets 17: each new row of its embedding";
        assert!(ending.stderr.contains(part), "{}", ending.stderr);
        // With a learning rate of 0, the export has the initial weights.
        assert_eq!(embedding("output/model"), [&old[..], &mean.repeat(3)].concat(), "{kind}");
        assert_eq!(read(&folder.join("output/model/config.json"))["vocab_size"], 17);

        let more = ["--config", "job.json", "--resume", "--set", "training.max_steps=2"];
        finetune(&folder, &more).succeeded();
        assert_eq!(Trained::read(&folder.join("output")).steps.len(), 2);
        assert_eq!(embedding("output/model"), [&old[..], &mean.repeat(3)].concat(), "{kind}");
        fs::rename(folder.join("output"), folder.join(kind)).unwrap();
    }
    // The larger models are models like any others.
    let generate =
        ["generate", "--model", "text", "--prompt", "amber nook", "--max-new-tokens", "4"];
    deepburn(&folder, &generate).succeeded();
    let predict = ["predict", "--model", "classification", "--text", "amber nook"];
    deepburn(&folder, &predict).succeeded();
    let job = from(job, "text/model").with("data.kind", "text");
    job.train();
    assert_eq!(embedding("output/model").len(), 17 * 16);
}

#[test]
fn special_tokens_are_in_the_vocabulary() {
    let mut job = from(job(), "base/model");
    for kind in ["text", "classification"] {
        for (name, ids) in [
            ("eos_token_id", json!([1, 14])),
            ("pad_token_id", json!(14)),
            ("bos_token_id", json!(14)),
        ] {
            job = job.with("data.kind", kind).with("model.config", json!({name: ids}));
            let field = format!("model.config.{name}");
            job.run().failed(2, &[&field, "14; the model has the tokens 0 to 13"]);
            assert!(!job.folder().join("output").exists(), "{name}");
        }
    }
    job.with("data.kind", "text").with("model.config", json!({"eos_token_id": 13})).train();
}

/// The ids of a pretrained model stand for other tokens in another vocabulary.
#[test]
fn a_new_vocabulary_has_no_ids_of_the_old_one() {
    let mut swapped = WORDS;
    swapped.swap(3, 7);
    let job = from(job(), "base/model").with("data.new_vocabulary", true);
    let folder = job.folder().to_owned();
    write(&folder.join("swapped"), "tokenizer.json", tokenizer(&swapped));
    let special = json!({"eos_token": "</s>", "sep_token": "lark"});
    write(&folder.join("swapped"), "special_tokens_map.json", special);
    let tokens: Vec<u8> = (0..400_u16).flat_map(|at| (at % 14).to_le_bytes()).collect();
    fs::write(folder.join("own.bin"), tokens).unwrap();
    let mut own = read(&folder.join("base/model/config.json"));
    let old = json!({"bos_token_id": 2, "pad_token_id": 3, "sep_token_id": 4, "cls_token_id": 5,
        "forced_eos_token_id": 6, "suppress_tokens": [7]});
    own.as_object_mut().unwrap().extend(old.as_object().unwrap().clone());
    write(&folder.join("base/model"), "config.json", &own);
    let generation = json!({"eos_token_id": 1, "pad_token_id": 3, "temperature": 0.5});
    write(&folder.join("base/model"), "generation_config.json", &generation);
    let exported = |job: &Job| {
        job.train();
        let file = |name: &str| read(&folder.join("output/model").join(name));
        (file("config.json"), file("generation_config.json"))
    };
    // Token files without a tokenizer have the ids of the model, unless their vocabulary is new.
    let mut job = job.with("data.kind", "tokens").with("data.path", "own.bin");
    for (is_new, eos) in [(true, Value::Null), (false, json!(1))] {
        job = job.with("data.new_vocabulary", is_new);
        let (config, kept) = exported(&job);
        assert_eq!(config["eos_token_id"], eos);
        for name in old.as_object().unwrap().keys() {
            let expected = if is_new { &Value::Null } else { &old[name] };
            assert_eq!(&config[name], expected, "{name}");
        }
        assert_eq!(kept == generation, !is_new, "{kept}");
        assert_eq!(kept.get("pad_token_id").is_none(), is_new, "{kept}");
    }
    let job = job
        .with("data.kind", "text")
        .with("data.path", "rows.jsonl")
        .with("data.new_vocabulary", true)
        .with("data.tokenizer", "swapped")
        .with("model.config", json!({"cls_token_id": 8}));
    let (config, generation) = exported(&job);
    assert_eq!(generation, json!({"_from_model_config": true, "eos_token_id": 1}));
    let lark = WORDS.len() + 1;
    let known = [("eos_token_id", 1), ("sep_token_id", lark), ("cls_token_id", 8)];
    for (name, id) in known {
        assert_eq!(config[name], id, "{name}");
    }
    for name in ["bos_token_id", "pad_token_id", "forced_eos_token_id", "suppress_tokens"] {
        assert_eq!(config[name], Value::Null, "{name}");
    }
}

#[test]
fn a_vocabulary_does_not_shrink() {
    let job = from(job(), "base/model").with("model.config", json!({"vocab_size": 13}));
    job.run().failed(2, &["model.config.vocab_size = 13", "14 entries; set it to 14 or more"]);
    // A tokenizer with few tokens would fit, but rows of the embedding would get lost.
    let job = job
        .with("model.pretrained", json!(tiny_model()))
        .with("model.config", json!({"vocab_size": 400}))
        .with("data.tokenizer", "words");
    job.run().failed(2, &["`vocab_size` is smaller", ": 400", "512 rows", "512 or more"]);
    assert!(!job.folder().join("output").exists());
}

#[test]
fn documents_need_a_token_between_them() {
    let job = job()
        .with("data.tokenizer", "plain")
        .with("training.max_steps", 1)
        .with("deepspeed.optimizer.params.lr", 0.0);
    let plain = job.folder().join("plain");
    write(&plain, "tokenizer.json", tokenizer(&WORDS));
    let parts =
        ["data.join", "\"end_of_text\"", "60 documents", "data.eos_token", "\"blank_line\""];
    job.run().failed(2, &parts);
    assert!(!job.folder().join("output").exists());
    let job = job.with("data.eos_token", "<|endoftext|>");
    job.run().failed(2, &["data.eos_token = \"<|endoftext|>\"", "not a token of the tokenizer"]);

    let eos =
        |job: &Job| read(&job.folder().join("output/model/config.json"))["eos_token_id"].clone();
    let ordinary = "\"amber\" is an ordinary token of the tokenizer";
    let job = job.with("data.eos_token", "amber");
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains(ordinary), "{}", ending.stderr);
    // Texts do not contain this token: the tokenizer splits them at punctuation.
    let job = job.with("data.eos_token", "</s>");
    let ending = job.run().succeeded();
    assert!(!ending.stderr.contains("ordinary token"), "{}", ending.stderr);
    let named = job.train();
    assert_eq!(eos(&job), 1);
    // The same token, named by each of the tokenizer's files.
    let mut job = job.with("data.eos_token", Value::Null);
    for name in ["special_tokens_map.json", "tokenizer_config.json"] {
        write(&plain, name, json!({"eos_token": {"content": "</s>"}}));
        for path in ["plain", "plain/tokenizer.json"] {
            job = job.with("data.tokenizer", path);
            assert_eq!(job.train().numbers(), named.numbers(), "{name} {path}");
            assert_eq!(eos(&job), 1);
        }
        fs::remove_file(plain.join(name)).unwrap();
    }
    // Without separators, other tokens are learned, and no end of text is invented.
    let job = job.with("data.join", "nothing");
    assert_ne!(job.train().steps[0].loss, named.steps[0].loss);
    assert_eq!(eos(&job), Value::Null);
    // A single text has nothing to be separated from.
    let job = job.with("data.join", "end_of_text").with("data.path", "text.txt");
    job.train();
    assert_eq!(eos(&job), Value::Null);

    // The pretrained model knows its end of text, which its tokenizer does not name.
    let job = from(job, "base/model").with("data.path", "rows.jsonl");
    let own = job.train();
    fs::remove_file(job.folder().join("base/model/special_tokens_map.json")).unwrap();
    fs::remove_file(job.folder().join("base/model/tokenizer_config.json")).unwrap();
    assert_eq!(job.train().numbers(), own.numbers());
    assert_eq!(eos(&job), 1);

    // To name the model's own end of text changes nothing, so its generation settings stay.
    let model = job.folder().join("base/model");
    write(&model, "generation_config.json", json!({"eos_token_id": 1, "temperature": 0.5}));
    let generation = |job: &Job| read(&job.folder().join("output/model/generation_config.json"));
    let job = job.with("data.eos_token", "</s>");
    assert_eq!(job.train().numbers(), own.numbers());
    assert_eq!(generation(&job)["temperature"], 0.5);
    let job = job.with("data.eos_token", "amber");
    let ending = job.run().succeeded();
    assert!(ending.stderr.contains("generation_config.json is replaced"), "{}", ending.stderr);
    assert_eq!(generation(&job)["temperature"], Value::Null);
}

#[test]
fn fields_that_do_not_fit_pretrained_weights_are_named() {
    let job = from(job(), "base/model").with("training.max_steps", 1);
    let config = json!({"n_head": 4, "torch_dtype": "bfloat99", "resid_pdrop": 0.1});
    let job = job.with("model.config", config);
    let ending = job.run().succeeded();
    for part in [
        "model.config.n_head: 4 instead of the pretrained model's 2",
        "model.config.torch_dtype: \"bfloat99\" has no effect: deepspeed.bf16.enabled",
    ] {
        assert!(ending.stderr.contains(part), "{}", ending.stderr);
    }
    assert!(!ending.stderr.contains("resid_pdrop"), "{}", ending.stderr);
    let config = read(&job.folder().join("output/model/config.json"));
    assert_eq!((&config["dtype"], &config["torch_dtype"]), (&json!("float32"), &Value::Null));

    // A classifier of two classes.
    let job = job.with("model.config", json!({})).with("data.kind", "classification");
    job.train();
    fs::rename(job.folder().join("output"), job.folder().join("classifier")).unwrap();
    let job = job.with("model.pretrained", "classifier");
    job.train();
    let row = |n: usize| json!({"text": "amber", "label": n % 3}).to_string();
    write(job.folder(), "three.jsonl", (0..9).map(row).collect::<Vec<_>>().join("\n"));
    let job = job.with("data.path", "three.jsonl");
    job.run().failed(2, &["the labels have 3 classes", "model.pretrained has 2 outputs"]);
    let job = job.with("data.path", "rows.jsonl").with("data.kind", "text");
    job.run().failed(2, &["model.pretrained", "score.weight", "data.kind", "language model"]);
}
