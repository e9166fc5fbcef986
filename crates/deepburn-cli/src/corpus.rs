//! The data that a job names, opened.

use std::path::{Path, PathBuf};

use deepburn_config::{DataKind, Job, SplitPlan};
use deepburn_datasets::{
    Content, Corpus, DataError, DataSource, Fractions, Join, Packing, Splits, SyntheticCorpus,
    TEXT_FIELD, TokenizerChoice, open,
};
use deepburn_models::gpt2::Gpt2Config;

/// Size of the embedded corpus: enough for any run on a few cores, written in a moment.
const SYNTHETIC_BYTES: usize = 2 << 20;

/// Opens the data of `job` for a model of `config`.
///
/// # Errors
/// What is wrong with the data.
pub(crate) fn open_corpus(job: &Job, config: &Gpt2Config) -> Result<Corpus, DataError> {
    let data = &job.data;
    let pretrained = job.model.pretrained.as_deref().and_then(tokenizer_of);
    let tokenizer = data.tokenizer.clone().or(pretrained);
    let choice = match &tokenizer {
        Some(path) => TokenizerChoice::Load(path.clone()),
        None => TokenizerChoice::Train { vocab_size: data.vocab_size },
    };
    let content = match (&data.kind, &data.splits) {
        (DataKind::Tokens, splits) => Content::Tokens { splits: files(splits), tokenizer },
        (DataKind::Text, splits) => Content::Text {
            splits: files(splits),
            field: TEXT_FIELD.to_owned(),
            join: Join::EndOfText,
            tokenizer: choice,
        },
        (DataKind::Synthetic | DataKind::Classification { .. }, splits) => Content::Synthetic {
            corpus: SyntheticCorpus { seed: job.training.seed, bytes: SYNTHETIC_BYTES },
            fractions: match splits {
                SplitPlan::Shares { train, eval, test, .. } => {
                    Fractions { train: *train, eval: *eval, test: *test }
                }
                SplitPlan::Paths { .. } => Fractions::ALL,
            },
            tokenizer: choice,
        },
    };
    open(&DataSource {
        content,
        packing: Packing::drop_rest(data.sequence_length),
        vocab_size: Some(config.vocab_size),
        token_cache: None,
    })
}

/// The tokenizer that lies beside a checkpoint.
fn tokenizer_of(checkpoint: &Path) -> Option<PathBuf> {
    let known = ["tokenizer.json", "vocab.json"];
    known.iter().any(|file| checkpoint.join(file).is_file()).then(|| checkpoint.to_owned())
}

fn files(splits: &SplitPlan) -> Splits {
    match splits {
        SplitPlan::Shares { path, train, eval, test } => Splits::Shares {
            files: path.iter().cloned().collect(),
            fractions: Fractions { train: *train, eval: *eval, test: *test },
        },
        SplitPlan::Paths { train, eval, test, .. } => {
            let files = |path: &Option<PathBuf>| path.clone().map(|path| vec![path]);
            Splits::Paths { train: vec![train.clone()], eval: files(eval), test: files(test) }
        }
    }
}
