//! The files of a model folder that a GGUF file stands for.
//!
//! Main type: [`UnpackedGguf`]. The programs read configuration, tokenizer and chat template of a
//! model from a folder. A GGUF file has all of them in its header, so they are written into a
//! temporary folder. The weights stay where they are.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use deepburn_gguf::{
    GgufReader, GgufSpecialTokens, GgufTokenizer, Hyperparameters, Value as GgufValue,
};
use deepburn_models::hf::GENERATION_CONFIG;
use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::data::chat::TEMPLATE_FILE;
use crate::failure::Failure;
use crate::models;

/// A GGUF file, and the folder of its texts, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct UnpackedGguf {
    /// The path of the file.
    pub(crate) path: PathBuf,
    /// What the file says about the model.
    pub(crate) hyperparameters: Hyperparameters,
    /// `None` after it was removed.
    folder: Option<TempDir>,
    /// The path of the folder with the texts of the model.
    pub(crate) texts: PathBuf,
}

impl UnpackedGguf {
    /// Reads the header of a file, and writes `config.json`, `tokenizer.json`,
    /// `tokenizer_config.json`, `generation_config.json` and, if the file has a template,
    /// `chat_template.jinja`.
    ///
    /// # Errors
    /// Returns a user's mistake that names the file if it is malformed, or if its model or its
    /// tokenizer is not supported. Returns a failure while running if the folder cannot be written.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let refused = Failure::of_key(path.display());
        let mut file = GgufReader::open(path).map_err(&refused)?;
        let model = Hyperparameters::read(&mut file).map_err(&refused)?;
        let metadata = file.header().metadata();
        let tokenizer =
            GgufTokenizer::from_metadata(metadata, model.vocab_size).map_err(&refused)?;
        // Everything is read and checked before the folder is made, so that a mistake leaves
        // nothing.
        let special = GgufSpecialTokens::from_metadata(metadata, &tokenizer).map_err(&refused)?;
        let mut config = model.config_fields();
        config.extend(special.id_fields());
        // Messages about the folder would name a file that users do not know.
        let key = format!("{}: as a config.json", path.display());
        models::read_saved(config.clone()).map_err(Failure::of_key(key))?;
        let name = metadata.get("general.name").and_then(GgufValue::as_str).unwrap_or_default();
        let files = [
            ("config.json", Value::Object(config)),
            (GENERATION_CONFIG, generation_config(&special)),
            ("tokenizer_config.json", Value::Object(special.tokenizer_config(&tokenizer))),
            ("tokenizer.json", tokenizer.to_json(name, &special)),
        ];
        let folder = unpack(&files, special.chat_template.as_deref()).map_err(|error| {
            Failure::run(format!("the temporary folder of {}: {error}", path.display()))
        })?;
        let texts = folder.path().to_owned();
        let (path, folder) = (path.to_owned(), Some(folder));
        Ok(Self { path, hyperparameters: model, folder, texts })
    }

    /// Removes the folder, so that a signal cannot leave it behind.
    pub(crate) fn remove_folder(&mut self) {
        self.folder = None;
    }
}

fn generation_config(special: &GgufSpecialTokens) -> Value {
    let mut fields: Map<_, _> = special.id_fields();
    // In a `config.json` null removes a token, but `generation_config.json` has ids only.
    fields.retain(|_, id| !id.is_null());
    Value::Object(fields)
}

/// Writes the files into a new temporary folder.
fn unpack(files: &[(&str, Value)], template: Option<&str>) -> io::Result<TempDir> {
    let folder = tempfile::Builder::new().prefix("deepburn-gguf-").tempdir()?;
    for (name, json) in files {
        fs::write(folder.path().join(name), json.to_string())?;
    }
    if let Some(template) = template {
        fs::write(folder.path().join(TEMPLATE_FILE), template)?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use deepburn_chat::{ChatTemplates, Day};
    use deepburn_datasets::Tokenizer;
    use deepburn_models::decoder::DecoderParts;
    use deepburn_models::hf::{GenerationConfig, read_fields, read_small_file};

    use super::*;
    use crate::job::known_model::KnownModel;
    use crate::tools::export::{ExportArguments, export};

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        export: ExportArguments,
    }

    /// Texts in which pre-tokenizers and normalizers differ.
    const TEXTS: [&str; 12] = [
        "It's 1234 o'clock, I'LL say: don't!",
        "fn main() {\n\tlet x = a[0] & 0xff; // ok\n}\n\n",
        "  leading, trailing  and   many    spaces ",
        "日本語のテキスト、漢字。 한국어 문장입니다",
        "🚀🦙 👩‍👩‍👧 ok",
        "naïve café ÀÉ ½ Ⅷ",
        "\r\n\r\nx\r\n\t\u{a0}nbsp\u{3000}wide",
        "Привет мир नमस्ते مرحبا",
        "<|im_start|>user\n<tool_call>x</tool_call><|im_end|>\n<|eot_id|>",
        "<s> </s> <unk> <0x0A> ▁",
        "\u{1}\u{2}\u{200b}",
        "",
    ];

    fn golden() -> Option<PathBuf> {
        let data = std::env::var_os("DEEPBURN_TEST_DATA").map(PathBuf::from)?;
        Some(data.parent()?.join("golden/llm/models")).filter(|models| models.is_dir())
    }

    fn parts(folder: &Path) -> DecoderParts {
        let fields = read_fields(&read_small_file(&folder.join("config.json")).unwrap()).unwrap();
        match models::read_saved(fields).unwrap() {
            KnownModel::LanguageModel(model) => model.parts(),
            KnownModel::Classifier(_) => panic!("not a language model"),
        }
    }

    fn ids(tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
        TEXTS.iter().map(|text| tokenizer.encode_surrounded(text).unwrap()).collect()
    }

    /// A file of a published model stands for the folder that it was made of.
    #[test]
    fn a_file_gives_the_texts_of_its_model() {
        let Some(golden) = golden() else { return };
        for name in ["llama3_tied", "llama_untied_sharded", "phi4", "qwen2", "qwen3", "smollm2"] {
            let (folder, model) = (tempfile::tempdir().unwrap(), golden.join(name));
            let out = folder.path().join("model.gguf");
            let [given, file] = [&model, &out].map(|path| path.to_str().unwrap());
            let arguments = ["export", given, "--type", "f32", "--out", file];
            export(&Arguments::parse_from(arguments).export).unwrap();
            let unpacked = UnpackedGguf::open(&out).unwrap();
            assert_eq!(unpacked.path, out);
            let read = unpacked.texts.clone();
            assert_eq!(parts(&read), parts(&model), "{name}");
            let [own, other] = [&read, &model].map(|path| Tokenizer::load(path).unwrap());
            assert_eq!(ids(&own), ids(&other), "{name}");
            assert_eq!(own.end_of_text(), other.end_of_text());
            for token in ["pad_token", "unk_token"] {
                assert_eq!(own.special_token(token), other.special_token(token), "{name} {token}");
            }
            let ends = |folder: &Path| {
                let config = GenerationConfig::read(folder).unwrap().unwrap();
                config.eos_token_ids().unwrap().to_vec()
            };
            assert_eq!(ends(&read), ends(&model), "{name}");
            let template = |folder: &Path| {
                let templates = ChatTemplates::find(folder, Day::today()).unwrap();
                templates.map(|it| it.source_without_marks().unwrap())
            };
            assert_eq!(template(&read), template(&model), "{name}");
            drop(unpacked);
            assert!(!read.exists());
        }
    }

    #[test]
    fn other_files_are_mistakes_that_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        for bytes in [&b""[..], b"GGUF", b"PK\x03\x04"] {
            fs::write(&path, bytes).unwrap();
            let failure = UnpackedGguf::open(&path).unwrap_err();
            assert_eq!(failure.status(), 2);
            assert!(failure.to_string().contains("a.gguf: "), "{failure}");
        }
        assert_eq!(UnpackedGguf::open(folder.path()).unwrap_err().status(), 2);
    }
}
