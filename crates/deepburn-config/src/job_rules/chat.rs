//! The keys of the section `data` about conversations.

use super::*;
use crate::job_plan::{
    AssistantOnlyLoss, ChatPlan, PackingPlan, PackingStrategy, SamplePlan, TemplateSource,
};

impl JobReader<'_> {
    /// Reads the keys of `data.kind` "chat".
    pub(super) fn chat(&mut self, data: &Data<'_>) -> ChatPlan {
        filled!(ChatPlan, data { assistant_only_loss, completion_only_loss, skip_invalid_rows }
            text_field: data.text_field.value.to_owned(),
            messages_field: data.messages_field.value.map(str::to_owned),
            chat_template: self.chat_template(&data.chat_template),
            // `packing` takes precedence over `padding_free`, which `check_chat` then reports as
            // unused.
            packing: match (data.packing.value, data.padding_free.value) {
                (true, _) => PackingPlan::Packed(data.packing_strategy.value),
                (false, true) => PackingPlan::PaddingFree,
                (false, false) => PackingPlan::Padded,
            },
            pad_token: data.pad_token.value.map(str::to_owned),
        )
    }

    /// Reads the keys of `data.kind` "preference". The others have their defaults.
    pub(super) fn preference(&mut self, data: &Data<'_>) -> ChatPlan {
        ChatPlan {
            text_field: "text".to_owned(),
            messages_field: None,
            chat_template: self.chat_template(&data.chat_template),
            assistant_only_loss: AssistantOnlyLoss::Off,
            completion_only_loss: None,
            packing: PackingPlan::Padded,
            skip_invalid_rows: data.skip_invalid_rows.value,
            pad_token: data.pad_token.value.map(str::to_owned),
        }
    }

    /// Returns the settings of preference optimization, which data of kind "preference" has.
    pub(crate) fn dpo(&mut self, training: &Training<'_>, data: &DataJob) -> Option<DpoPlan> {
        let section = &training.dpo.value;
        if matches!(data.kind, DataKind::Preference(_)) {
            return Some(DpoPlan { beta: section.beta.value, loss_type: section.loss_type.value });
        }
        // An unknown objective has already been reported.
        let is_dpo =
            training.objective.is_given() && !self.findings.have_error_in("training.objective");
        refuse!(if is_dpo; self.findings, &*training.objective =>
            "\"dpo\" learns from a better and a worse completion of each prompt, which data of kind \"{}\" does not have",
            data.kind.name(); "set data.kind to \"preference\", or remove it");
        unused! { self; section { beta, loss_type } if true => "only data of kind \"preference\" reads it"; }
        None
    }

    /// Returns the texts that are generated after each evaluation. Keys that then have no effect
    /// are reported.
    pub(crate) fn samples(
        &mut self,
        training: &Training<'_>,
        data: &DataJob,
    ) -> Option<SamplePlan> {
        let Training { sample_prompts, sample_rows, sample_max_new_tokens, .. } = training;
        let is_classified = matches!(data.kind, DataKind::Classification { .. });
        unused! { self;
            training { sample_prompts, sample_rows } if is_classified => "a classifier generates no text";
            training { sample_prompts, sample_rows } if !is_classified && !data.splits.has_eval() =>
                "there is no evaluation: data.splits.eval is not given";
        }
        let is_stream = data.kind.samples().is_none() && !is_classified;
        refuse!(if is_stream && sample_rows.value > 0; self.findings, &**sample_rows =>
            "only data of kind \"chat\" or \"preference\" has prompts"; "write training.sample_prompts, or remove it");
        let prompts: Vec<_> = sample_prompts.value.iter().map(|it| (*it).to_owned()).collect();
        refuse!(if prompts.iter().any(|prompt| prompt.trim().is_empty()); self.findings, &**sample_prompts =>
            "has a prompt without text"; "remove it");
        let is_used = !is_classified && data.splits.has_eval();
        let samples = SamplePlan {
            rows: sample_rows.value,
            max_new_tokens: sample_max_new_tokens.value,
            prompts,
        };
        let samples = (is_used && samples.rows + samples.prompts.len() > 0).then_some(samples);
        let why = "neither sample_prompts nor sample_rows asks for a text";
        self.report_unused(sample_max_new_tokens, samples.is_none(), why);
        samples
    }

    /// Returns the template that a key contains or names. A text with a brace or a line break is a
    /// template.
    fn chat_template(&mut self, key: &Setting<'_, Option<&str>>) -> Option<TemplateSource> {
        let given = key.value?;
        if given.contains(['{', '\n']) {
            return Some(TemplateSource::Text(given.to_owned()));
        }
        let path = self.existing(given, key)?;
        refuse!(if path.is_dir(); self.findings, &**key => "is a folder; must be a file or a template";
            "give the file chat_template.jinja in it, or set data.tokenizer to the folder");
        Some(TemplateSource::File(path))
    }

    /// Reports the keys about conversations that have no effect on data of this kind.
    pub(super) fn check_chat(&mut self, data: &Data<'_>, kind: &DataKind) {
        unused! { self;
            data { chat_template, pad_token, skip_invalid_rows } if kind.samples().is_none() =>
                "only data of kind \"chat\" or \"preference\" reads it";
        }
        let DataKind::Chat(plan) = kind else {
            unused! { self;
                data { messages_field, assistant_only_loss, completion_only_loss, packing, packing_strategy, padding_free }
                    if true => "only data of kind \"chat\" reads it";
            }
            return;
        };
        let is_packed = matches!(plan.packing, PackingPlan::Packed(_));
        let wraps = plan.packing == PackingPlan::Packed(PackingStrategy::Wrapped);
        unused! { self;
            data { packing_strategy } if !is_packed => "samples are not packed without data.packing";
            data { padding_free } if is_packed && !wraps => "packed samples are always joined without padding";
            data { padding_free } if wraps => "samples packed by \"wrapped\" are one text, and see each other";
            data { pad_token } if plan.packing != PackingPlan::Padded =>
                "no sample is padded with data.packing or data.padding_free";
        }
    }
}
