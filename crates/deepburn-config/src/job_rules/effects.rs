//! Keys of a job file that have no effect because of other keys.
//!
//! A key that is given without an effect is a warning, or a note if its value is the default, which
//! many files contain. `tests/effects.rs` has a line for every key of a job file. Keys of the
//! DeepSpeed section, and keys of the job file whose effect depends on the plan, are checked by
//! [`crate::rules`].

use super::*;

impl JobReader<'_> {
    /// Reports the keys of the job file that have no effect in this job.
    pub(crate) fn check_effects(&mut self, top: &JobFile<'_>, job: &Job) {
        self.check_model(job);
        self.check_data(&top.data.value, job);
        self.check_training(&top.training.value, job);
    }

    /// Checks the section `model`.
    fn check_model(&mut self, job: &Job) {
        let Job { model, data, .. } = job;
        let range = model.config.get("initializer_range").filter(|range| !range.is_null());
        // A classifier may get a new head, which has random weights.
        let is_loaded =
            model.pretrained.is_some() && !matches!(data.kind, DataKind::Classification { .. });
        warning!(if range.is_some() && is_loaded; self.findings, "model.config.initializer_range" =>
            "has no effect: all weights come from model.pretrained"; "remove it");
    }

    /// Checks the section `data`.
    fn check_data(&mut self, data: &Data<'_>, job: &Job) {
        // A path that does not exist has an error of its own.
        let is_embedded = job.data.splits.is_embedded() && !data.path.is_given();
        let is_tokens = job.data.kind == DataKind::Tokens;
        let classifies = matches!(job.data.kind, DataKind::Classification { .. }) && !is_embedded;
        let is_text = matches!(job.data.kind, DataKind::Text { .. });
        let is_chat = matches!(job.data.kind, DataKind::Chat(_));
        let has_samples = job.data.kind.samples().is_some();
        unused! { self;
            data { text_field } if !classifies && !is_text && !is_chat =>
                "only classification, chat and text from files read it";
            data { label_field } if !classifies => "only classification of texts from files reads it";
            data { join } if !is_text => "only text from files is joined";
        }
        self.check_chat(data, &job.data.kind);
        let by_steps = job.training.length.epochs.is_none();
        let dropped = "training ends after training.max_steps, and not with an epoch";
        let whole = "an epoch of samples ends with a step of the samples that are left";
        unused! { self;
            data { token_cache } if is_tokens || is_embedded => "only text from files is tokenized and cached";
            data { vocab_size } if is_tokens => "tokens need no tokenizer";
            data { vocab_size } if !is_tokens && has_tokenizer(job) =>
                "the given tokenizer or the pretrained model's is used, and none is trained";
            data { drop_last } if by_steps => dropped;
            data { drop_last } if has_samples && !by_steps => whole;
        }
        let other = &self.deepspeed.dataloader_drop_last;
        note!(if has_samples && !by_steps && other.value; self.findings, "deepspeed.dataloader_drop_last" => "has no effect: {whole}");
        note!(if by_steps && other.is_given() && data.drop_last.value.is_none();
            self.findings, "deepspeed.dataloader_drop_last" => "has no effect: {dropped}");
        note!(if data.drop_last.value.is_some_and(|own| other.is_given() && own != other.value);
            self.findings, "deepspeed.dataloader_drop_last" => "has no effect: data.drop_last takes precedence");
        note!(if data.kind.given().and_then(Node::as_text) == Some("text") && is_embedded;
            self.findings, &*data.kind => "reads the embedded synthetic text: neither data.path nor data.splits names a file");
    }

    /// Checks the section `training`.
    fn check_training(&mut self, training: &Training<'_>, job: &Job) {
        let plan = &job.training;
        let evaluation = &plan.evaluation;
        let evaluates = job.data.splits.has_eval();
        unused! { self;
            training { label_smoothing_factor } if plan.objective.dpo.is_some() =>
                "preference optimization compares completions, and predicts no single token";
            training { eval_max_samples } if !evaluates => "there is no evaluation: data.splits.eval is not given";
        }
        note!(if training.eval_strategy.value == Some("no") && evaluates; self.findings, &*training.eval_strategy =>
            "the model is still evaluated after the last step, because data.splits.eval is given");
        let compares = evaluation.load_best_model_at_end
            || evaluation.early_stopping_patience.is_some()
            || plan.saving.save_best_limit.is_some();
        let is_frozen = |group: &ParamGroup| group.update == GroupUpdate::Frozen;
        let freezes = plan.param_groups.iter().any(is_frozen);
        // The weights under an adapter are frozen without a group.
        let freezes = freezes || !self.lacks_adapter(&job.model);
        unused! { self;
            training { metric_for_best_model } if !compares =>
                "models are only compared for load_best_model_at_end, early_stopping_patience and save_best_limit";
            training { early_stopping_threshold } if evaluation.early_stopping_patience.is_none() =>
                "training only stops early with training.early_stopping_patience";
            training { no_decay } if !self.decays(plan) =>
                "no parameter has a weight decay: optimizer.params.weight_decay is 0";
            training { checkpoint_scope } if !freezes =>
                "no parameter is frozen: training.param_groups has no frozen group";
        }
        refuse!(if job.model.has_adapter() && plan.saving.checkpoint_scope == CheckpointScope::All; self.findings, &*training.checkpoint_scope =>
            "\"all\" would let a run resume with another base model than the one that its adapter names";
            "write \"trained\", or remove it");
        unused! { self;
            training { save_merged } if self.lacks_adapter(&job.model) =>
                "there is no adapter: neither model.lora nor model.adapter is given";
        }
        let is_new = self.lacks_pretrained(&job.model) && freezes && self.lacks_adapter(&job.model);
        refuse!(if is_new && plan.saving.checkpoint_scope == CheckpointScope::Trained; self.findings, &*training.checkpoint_scope =>
            "\"trained\" omits the frozen parameters that model.pretrained has, and this job has no pretrained model";
            "write \"all\", or give model.pretrained");
        let of_deepspeed = &self.deepspeed.pipeline.value.stages;
        let stages = plan.placement.pipeline.stages.filter(|_| !of_deepspeed.is_given());
        let is_one = stages.unwrap_or(of_deepspeed.value) == 1;
        unused! { self;
            training { pipeline_schedule } if is_one => "there is one pipeline stage";
            training { float32_matmul_precision } if plan.placement.backend != Backend::Cuda
                && !self.findings.have_error_in("training.backend") =>
                "only the backend \"cuda\" multiplies float32 matrices in less than all bits";
            training { collective_timeout } if plan.placement.ranks == 1 => "one rank does not wait for others";
        }
        let (own, other) = (training.logging_steps.value, &self.deepspeed.steps_per_print);
        note!(if own.is_some() && other.is_given() && own != other.value.map(StepCount::Steps);
            self.findings, "deepspeed.steps_per_print" => "has no effect: training.logging_steps takes precedence");
    }

    /// Returns whether a parameter may have a weight decay: the optimizer's or a group's.
    fn decays(&self, training: &TrainingJob) -> bool {
        let params = self.deepspeed.optimizer.value.params.given();
        let param = |name: &str| params.and_then(|params| params.get(name));
        let decay = param("weight_decay")
            .map(|node| node.as_list().and_then(<[Node]>::first).unwrap_or(node));
        let is_set = decay.and_then(Node::as_real).is_some_and(|decay| decay != 0.0);
        // PyTorch's AdamW has a default weight decay.
        let of_torch = decay.is_none() && param("torch_adam").and_then(Node::as_flag) == Some(true);
        let by_group = |group: &ParamGroup| matches!(group.update, GroupUpdate::Trained { weight_decay: Some(decay), .. } if decay > 0.0);
        is_set || of_torch || training.param_groups.iter().any(by_group)
    }

    /// Reports `key` if it is given and `is_unused`. `why` is the reason.
    ///
    /// A key may seem unused only because a key of `data` has an invalid value.
    pub(super) fn report_unused(&mut self, key: &ConfigEntry<'_>, is_unused: bool, why: &str) {
        // An invalid key was read as its default, which may be the only reason.
        let is_certain = is_unused && !self.is_misread;
        let Some(node) = key.given().filter(|_| is_certain) else { return };
        let (severity, remedy) = key.key.unused(node);
        report!(severity, self.findings, key => "has no effect: {why}"; "{remedy}");
    }

    /// Reports a group without settings, whose parameters are trained like all others.
    pub(super) fn check_group(&mut self, group: &Group<'_>) {
        let Group { lr, lr_factor, weight_decay, betas, muon_matrices, frozen, .. } = group;
        let sets = [&**lr, weight_decay, betas, muon_matrices].iter().any(|key| key.is_given());
        let is_neutral = lr_factor.value == 1.0 && !frozen.value && !sets;
        warning!(if is_neutral; self.findings, &group.params =>
            "the group has no effect: it changes no setting of its parameters"; "set lr, lr_factor, weight_decay, \
             betas or frozen in it, or remove the group");
    }
}

/// Returns whether text is tokenized with an existing tokenizer.
fn has_tokenizer(job: &Job) -> bool {
    let of_model = job.model.pretrained.is_some() && !job.data.new_vocabulary;
    job.data.tokenizer.is_some() || of_model
}
