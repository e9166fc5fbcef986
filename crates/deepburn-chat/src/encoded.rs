//! Encoded rows, and what is noticed while they are encoded.

use deepburn_config::shortened;
use thiserror::Error;

use crate::error::SHOWN_NAME;

/// A training example: token ids, and which of them are trained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedRow {
    /// The token ids.
    pub ids: Vec<u32>,
    /// For each token, whether its prediction is trained: whether its label counts. As long as
    /// `ids`.
    pub trained: Vec<bool>,
    /// What may be unintended.
    pub findings: Vec<Finding>,
}

impl EncodedRow {
    /// Returns the label of each token: its id, or `None` if it is not trained (-100 in PyTorch).
    pub fn labels(&self) -> impl Iterator<Item = Option<u32>> {
        self.ids.iter().zip(&self.trained).map(|(id, trained)| trained.then_some(*id))
    }

    /// Returns whether a token is trained. TRL drops other examples. The first token is never
    /// predicted.
    pub fn has_labels(&self) -> bool {
        self.trained.iter().any(|it| *it)
    }
}

/// An example of preference optimization (DPO).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedPreference {
    /// The token ids of the prompt.
    pub prompt: Vec<u32>,
    /// The token ids of the better completion.
    pub chosen: Vec<u32>,
    /// The token ids of the worse completion.
    pub rejected: Vec<u32>,
    /// What may be unintended.
    pub findings: Vec<Finding>,
}

/// Something in an example that trains, but may not train what was intended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Error)]
pub enum Finding {
    /// No token is trained.
    #[error("no token is trained")]
    NothingTrained,
    /// No token is trained, because the example was truncated.
    #[error("no token is trained, because the example of {length} tokens is truncated before them")]
    LabelsTruncated {
        /// The number of tokens before.
        length: usize,
    },
    /// The end of the example was removed.
    #[error("the example of {length} tokens is truncated")]
    Truncated {
        /// The number of tokens before.
        length: usize,
    },
    /// A trained text does not end with a special token, so the model does not learn to stop.
    #[error(
        "the trained text ends with `{last}` instead of a special token, so the model does not learn to stop; let the \
         chat template print a special token after each answer, before {{% endgeneration %}} if it marks the answers"
    )]
    EndOfTurnUntrained {
        /// The text of the last trained token.
        last: String,
    },
    /// Tokens outside of the marked answers are trained, as in TRL.
    #[error(
        "tokens after the answer are trained, from `{first}` on, as in TRL, because no token has the answer's \
         last character; set `assistant_only_loss` to \"turns\" to train the answers alone"
    )]
    TrainedOutside {
        /// The text of the first of them.
        first: String,
    },
    /// Tokens of the marked answers are not trained, as in TRL.
    #[error(
        "tokens of answers are not trained, from `{first}` on, as in TRL, which finds them by the first and the \
         last character of an answer; set `assistant_only_loss` to \"turns\" to train them all"
    )]
    AnswerUntrained {
        /// The text of the first of them.
        first: String,
    },
    /// The token for the beginning of a sequence occurs twice at the start.
    #[error(
        "the example starts with two tokens for the beginning of a sequence: {}",
        match is_conversation {
            true => "the chat template prints both, or a message starts with one; remove one from the template or the message",
            false => "one of the text, one of the tokenizer; remove it from the text",
        }
    )]
    BosTwice {
        /// Whether a template printed the text. The tokenizer adds nothing to it.
        is_conversation: bool,
    },
    /// The text of a field is not printed by the template.
    #[error(
        "the chat template does not print all of `{field}`; use a template that does, or remove the field if it is not \
         meant for the model"
    )]
    NotPrinted {
        /// The path of the field, such as `messages[1].content`.
        field: String,
    },
    /// The template does not read a variable of `chat_template_kwargs`.
    #[error(
        "the chat template does not read the variable `{}` of `chat_template_kwargs`; correct its name, or remove it",
        shortened(name, SHOWN_NAME)
    )]
    VariableUnread {
        /// Its name.
        name: String,
    },
    /// An answer is empty, so the model learns to say nothing.
    #[error(
        "the answer `{field}` is empty, so the model learns to say nothing; write the answer, or remove the row"
    )]
    EmptyAnswer {
        /// The path of the answer, such as `messages[1]`.
        field: String,
    },
    /// The prompt is encoded differently without the completion, so the model reads other tokens
    /// when it generates.
    #[error(
        "the prompt alone has other tokens at its end ({}) than with the completion, so the model is trained on another \
         text than it generates from; end a prompt before the space of the next word, or let the chat template print \
         the same start of an answer with `add_generation_prompt`",
        match lost.trim() {
            "" => "white space".to_owned(),
            _ => format!("`{}`", shortened(lost, SHOWN_NAME)),
        }
    )]
    PromptDiffers {
        /// The end of the prompt that is not part of the example.
        lost: String,
    },
    /// Both completions are the same.
    #[error("`chosen` and `rejected` are equal, which trains nothing; correct or remove the row")]
    EqualCompletions,
}

impl Finding {
    /// Returns the kind of finding, for counts.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NothingTrained => "nothing trained",
            Self::LabelsTruncated { .. } => "labels truncated",
            Self::Truncated { .. } => "truncated",
            Self::EndOfTurnUntrained { .. } => "end of turn untrained",
            Self::TrainedOutside { .. } => "trained outside",
            Self::AnswerUntrained { .. } => "answer untrained",
            Self::BosTwice { .. } => "two beginnings",
            Self::NotPrinted { .. } => "not printed",
            Self::VariableUnread { .. } => "variable unread",
            Self::EmptyAnswer { .. } => "empty answer",
            Self::PromptDiffers { .. } => "prompt differs",
            Self::EqualCompletions => "equal completions",
        }
    }
}
