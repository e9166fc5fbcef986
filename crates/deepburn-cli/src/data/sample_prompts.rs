//! Prompts that the model continues after each evaluation
//! ([`TextSampler`](super::text_sampler::TextSampler)).
//!
//! Main type: [`SamplePrompt`].

use deepburn_config::SamplePlan;
use deepburn_datasets::Tokenizer;

use crate::failure::Failure;

/// A prompt.
#[derive(Debug, Clone)]
pub(crate) struct SamplePrompt {
    /// Its text, for people.
    pub(crate) text: String,
    /// Its tokens, at least one.
    pub(crate) ids: Vec<u32>,
    /// How the data continues; `None` for a prompt of the job.
    pub(crate) expected: Option<String>,
}

impl SamplePrompt {
    /// Returns the prompts of a job whose model continues plain text.
    ///
    /// # Errors
    /// Returns a user's mistake if a prompt cannot be encoded.
    pub(crate) fn of_texts(
        plan: &SamplePlan,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Vec<Self>, Failure> {
        // Token files need no tokenizer for training, but a prompt is text.
        let Some(tokenizer) = tokenizer else {
            return Err(Failure::mistake(
                "training.sample_prompts: the tokens of the data have no tokenizer; give data.tokenizer, or remove it",
            ));
        };
        let prompt = |text: &String| {
            let ids = tokenizer.encode(text).map_err(Failure::mistake)?;
            Ok(Self { text: text.clone(), ids, expected: None })
        };
        plan.prompts.iter().map(prompt).collect()
    }
}
