//! Prompts that the model continues after each evaluation, so that people see what it says.
//!
//! Main types: [`SamplePrompt`], and [`TextSampler`], which generates the texts with the sharded model.

use burn::module::AutodiffModule;
use deepburn::comm::CollectiveTag;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Training, Zero};
use deepburn::{BoxError, Engine, GeneratedText, Interrupt};
use deepburn_config::SamplePlan;
use deepburn_datasets::Tokenizer;
use deepburn_models::TokenLimits;
use deepburn_models::causal_lm::{GenerateOptions, LanguageModel};

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

    /// Returns whether the model has positions for the prompt and `new` tokens.
    pub(crate) fn fits(&self, new: usize, limits: TokenLimits) -> bool {
        !self.ids.is_empty() && self.ids.len().saturating_add(new) <= limits.max_len
    }
}

/// Generates texts with the sharded model. All ranks do it together, because each op may gather parameters.
pub(crate) struct TextSampler {
    /// The prompts, at least one.
    prompts: Vec<SamplePrompt>,
    /// Greedy decoding, and the tokens that end a text.
    options: GenerateOptions,
    /// Decodes the texts.
    tokenizer: Tokenizer,
}

impl TextSampler {
    /// Returns the sampler of a job. `stop` are the tokens that end a text.
    ///
    /// # Errors
    /// Returns a user's mistake if a prompt has no tokens or is too long.
    pub(crate) fn new(
        plan: &SamplePlan,
        prompts: Vec<SamplePrompt>,
        (limits, stop): (TokenLimits, Vec<u32>),
        tokenizer: &Tokenizer,
    ) -> Result<Self, Failure> {
        let new = plan.max_new_tokens;
        if let Some(SamplePrompt { text, ids, .. }) =
            prompts.iter().find(|it| !it.fits(new, limits))
        {
            let (count, text) = (ids.len(), text.chars().take(40).collect::<String>());
            return Err(Failure::mistake(format!(
                "training.sample_prompts: the prompt {text:?} has {count} tokens, and with training.sample_max_new_tokens = {new} \
                 it must have from 1 to {}, because the model's {} is {}; change the prompt, or ask for fewer tokens",
                limits.max_len.saturating_sub(new),
                limits.max_len_field,
                limits.max_len
            )));
        }
        let num_tokens = Some(tokenizer.vocab_size());
        let options = GenerateOptions { stop, num_tokens, ..GenerateOptions::greedy(new) };
        Ok(Self { prompts, options, tokenizer: tokenizer.clone() })
    }

    /// Continues each prompt. Returns the complete texts if a rank is interrupted.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    pub(crate) fn generate<B, M>(
        &self,
        engine: &Engine<B, M>,
        interrupt: &Interrupt,
    ) -> Result<Vec<GeneratedText>, BoxError>
    where
        B: FusedOps + OptimizerOps,
        M: AutodiffModule<Training<B>, InnerModule: LanguageModel<Zero<B>>>,
    {
        let mut texts = Vec::new();
        for prompt in &self.prompts {
            let found =
                engine.evaluate(|model| self.continued(engine, model, prompt, interrupt))??;
            let Some(text) = found else { break };
            texts.push(GeneratedText {
                step: engine.global_steps(),
                prompt: prompt.text.clone(),
                text,
                expected: prompt.expected.clone(),
            });
        }
        Ok(texts)
    }

    /// Returns the text that follows a prompt; `None` if a rank was interrupted.
    ///
    /// The ranks compute the same tokens. They still agree after each token on whether there is another one: on machines
    /// with different instructions, the tokens may differ, and a rank that stopped alone would leave the others waiting.
    fn continued<B, M, N>(
        &self,
        engine: &Engine<B, M>,
        model: &N,
        prompt: &SamplePrompt,
        interrupt: &Interrupt,
    ) -> Result<Option<String>, BoxError>
    where
        B: FusedOps + OptimizerOps,
        M: AutodiffModule<Training<B>>,
        N: LanguageModel<Zero<B>>,
    {
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
            if all[1] > 0.0 {
                return Ok(None);
            }
            if all[0] > 0.0 {
                let text = self.tokenizer.decode(&new, true)?;
                return Ok(Some(failure.map_or(text.clone(), |failure| text + &failure)));
            }
        }
    }
}
