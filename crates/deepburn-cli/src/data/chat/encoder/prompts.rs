//! The prompts of conversations that the model continues after each evaluation.

use deepburn_chat::{ChatError, EncodedPrompt, ReadRow};
use deepburn_config::{SamplePlan, counted};
use deepburn_datasets::{DataRow, Samples};

use super::ChatEncoder;
use crate::data::sample_prompts::SamplePrompt;
use crate::failure::Failure;

impl ChatEncoder<'_> {
    /// Returns the prompts of the job, then the prompts of the first samples of the eval split that
    /// leave room for an answer. `max_len` is the longest sequence of the model.
    ///
    /// # Errors
    /// Returns a user's mistake if a prompt cannot be encoded, if a file cannot be read, or if no
    /// sample has a prompt.
    pub(in crate::data::chat) fn prompts(
        &self,
        plan: &SamplePlan,
        eval: Option<&Samples>,
        max_len: usize,
    ) -> Result<Vec<SamplePrompt>, Failure> {
        let of_text = |text: &String| {
            let ids = self.encoder.user_prompt(text);
            let ids = ids.map_err(Failure::of_key(format!("training.sample_prompts: {text:?}")))?;
            Ok(SamplePrompt { text: text.clone(), ids, expected: None })
        };
        let mut prompts: Vec<SamplePrompt> =
            plan.prompts.iter().map(of_text).collect::<Result<_, Failure>>()?;
        if let Some(eval) = eval.filter(|_| plan.rows > 0) {
            prompts.extend(self.held_out(plan, eval, max_len)?);
        }
        Ok(prompts)
    }

    /// Returns the prompts of samples.
    fn held_out(
        &self,
        plan: &SamplePlan,
        eval: &Samples,
        max_len: usize,
    ) -> Result<Vec<SamplePrompt>, Failure> {
        let mut found = Vec::new();
        let mut failure = None;
        let room = max_len.saturating_sub(plan.max_new_tokens);
        eval.visit_rows(Some(&self.columns), &mut |row| {
            match self.prompt_of(row) {
                Ok(Some(EncodedPrompt { ids, expected })) if ids.len() <= room => {
                    found.push((ids, expected));
                }
                // No prompt, as in a row of text, or one that leaves no room for an answer.
                Ok(_) => {}
                Err(error) => failure = Some(error),
            }
            // Reading ends with `false`.
            failure.is_none() && found.len() < plan.rows
        })
        .map_err(Failure::mistake)?;
        if let Some(error) = failure {
            return Err(Failure::mistake(format!("training.sample_rows: {error}")));
        }
        if found.is_empty() {
            return Err(Failure::mistake(format!(
                "training.sample_rows: no sample of the eval split has a prompt of at most {room} tokens; remove it, or ask for \
                 fewer tokens with training.sample_max_new_tokens"
            )));
        }
        if found.len() < plan.rows {
            let (count, rows) = (counted(found.len(), "sample"), plan.rows);
            tracing::warn!(
                "training.sample_rows: {rows} are asked for, and {count} of the eval split can be continued"
            );
        }
        let prompt = |(ids, expected): (Vec<u32>, String)| {
            // As the template renders it, but without special tokens, which say little to people.
            let text = self.tokenizer.decode(&ids, true).map_err(Failure::mistake)?;
            Ok(SamplePrompt { text, ids, expected: Some(expected) })
        };
        found.into_iter().map(prompt).collect()
    }

    /// Returns the prompt of a row; `None` if it has none.
    ///
    /// # Errors
    /// Returns an error if the template or the tokenizer fails.
    fn prompt_of(&self, row: DataRow) -> Result<Option<EncodedPrompt>, ChatError> {
        let ReadRow { row, .. } = self.read(row)?;
        self.encoder.prompt(&row)
    }
}
