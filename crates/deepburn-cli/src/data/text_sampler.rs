//! Generates texts with the sharded model after each evaluation, so that people see what it says.
//!
//! Main type: [`TextSampler`].

use deepburn::comm::CollectiveTag;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Training, Zero};
use deepburn::{BoxError, Engine, GeneratedText, GeneratedTexts, Interrupt};
use deepburn_config::{Job, counted};
use deepburn_datasets::Tokenizer;
use deepburn_models::causal_lm::{GenerateOptions, LanguageModel};
use deepburn_models::decoder::{AnyDecoder, Decoder};
use deepburn_models::{LanguageModelConfig, TokenLimits};

use crate::data::causal_data::CausalData;
use crate::data::sample_prompts::SamplePrompt;
use crate::failure::Failure;

/// Generates texts with the sharded model. All ranks do it together, because each op may gather
/// parameters.
pub(crate) struct TextSampler {
    /// The prompts, at least one.
    prompts: Vec<SamplePrompt>,
    /// Greedy decoding, and the tokens that end a text.
    options: GenerateOptions,
    /// Decodes the texts.
    tokenizer: Tokenizer,
}

impl TextSampler {
    /// Returns the sampler of a job; `None` if it asks for no texts. A text ends at the tokens
    /// `stop`, with which the model is exported.
    ///
    /// # Errors
    /// Returns a user's mistake if a prompt is empty or too long, or if there is no tokenizer.
    pub(crate) fn of_job(
        job: &Job,
        data: &CausalData,
        config: &AnyDecoder,
        stop: Vec<u32>,
    ) -> Result<Option<Self>, Failure> {
        let Some(plan) = &job.training.evaluation.samples else { return Ok(None) };
        let prompts = match data {
            CausalData::Stream(corpus) => SamplePrompt::of_texts(plan, corpus.tokenizer.as_ref())?,
            CausalData::Samples(corpus) => corpus.prompts.clone(),
            CausalData::Pairs(corpus) => corpus.prompts.clone(),
        };
        let Some(tokenizer) = data.tokenizer() else { return Ok(None) };
        let new = plan.max_new_tokens;
        let TokenLimits { max_len, max_len_field, .. } = config.limits();
        let room = max_len.saturating_sub(new);
        if room == 0 {
            return Err(Failure::mistake(format!(
                "training.sample_max_new_tokens: {new} leaves no room for a prompt, because the model's {max_len_field} is \
                 {max_len}; ask for fewer tokens"
            )));
        }
        // Held-out prompts were chosen to fit, so this is about the prompts of the job.
        let does_not_fit = |it: &&SamplePrompt| it.ids.is_empty() || it.ids.len() > room;
        if let Some(SamplePrompt { text, ids, .. }) = prompts.iter().find(does_not_fit) {
            let (count, text) =
                (counted(ids.len(), "token"), text.chars().take(40).collect::<String>());
            return Err(Failure::mistake(format!(
                "training.sample_prompts: the prompt {text:?} has {count}, and with training.sample_max_new_tokens = {new} it \
                 must have from 1 to {room}, because the model's {max_len_field} is {max_len}; change the prompt, or ask for \
                 fewer tokens"
            )));
        }
        // The embedding may have more rows than there are tokens, and padding rows have no text.
        let num_tokens = Some(tokenizer.vocab_size());
        let options = GenerateOptions { stop, num_tokens, ..GenerateOptions::greedy(new) };
        Ok(Some(Self { prompts, options, tokenizer: tokenizer.clone() }))
    }

    /// Continues each prompt, until a rank is interrupted.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    pub(crate) fn generate<B: FusedOps + OptimizerOps>(
        &self,
        engine: &Engine<B, Decoder<Training<B>>>,
        interrupt: &Interrupt,
    ) -> Result<GeneratedTexts, BoxError> {
        let mut texts = Vec::new();
        for prompt in &self.prompts {
            let found =
                engine.evaluate(|model| self.continued(engine, model, prompt, interrupt))??;
            // The texts so far are kept. A run that resumes generates all of them again.
            let Some(text) = found else { return Ok(GeneratedTexts::Part(texts)) };
            texts.push(GeneratedText {
                step: engine.global_steps(),
                prompt: prompt.text.clone(),
                text,
                expected: prompt.expected.clone(),
            });
        }
        Ok(GeneratedTexts::All(texts))
    }

    /// Returns the text that follows a prompt; `None` if a rank was interrupted.
    ///
    /// The ranks compute the same tokens. They still agree after each token on whether there is
    /// another one: on machines with different instructions, the tokens may differ, and a rank that
    /// stopped alone would leave the others waiting.
    fn continued<B: FusedOps + OptimizerOps>(
        &self,
        engine: &Engine<B, Decoder<Training<B>>>,
        model: &Decoder<Zero<B>>,
        prompt: &SamplePrompt,
        interrupt: &Interrupt,
    ) -> Result<Option<String>, BoxError> {
        let mut generation = model.generate(&prompt.ids, &self.options)?;
        let (mut new, mut failure) = (Vec::new(), None);
        loop {
            let ended = match generation.next() {
                Some(Ok(token)) => {
                    new.push(token);
                    new.len() == self.options.max_new_tokens || self.options.stop.contains(&token)
                }
                // Training has diverged. The losses say so too.
                Some(Err(error)) => {
                    failure = Some(format!("[{error}]"));
                    true
                }
                None => true,
            };
            let mine = vec![f64::from(ended), f64::from(interrupt.is_asked())];
            let all = engine.group().sum(CollectiveTag::new("text continues", 0), mine)?;
            // The sums are the same on all ranks, so either all of them leave here or none.
            if all[1] > 0.0 {
                return Ok(None);
            }
            // One rank that has ended is enough. On equal machines, all of them end together.
            if all[0] > 0.0 {
                let text = self.tokenizer.decode(&new, true)?;
                return Ok(Some(failure.map_or(text.clone(), |failure| text + &failure)));
            }
        }
    }
}
