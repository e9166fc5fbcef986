//! The `config.json` of a model that was read from a file.

use serde_json::{Map, Value as Json, json};

use super::{Architecture, GgufRope, Hyperparameters, RopeScaling};

impl Hyperparameters {
    /// Returns the fields of the `config.json` that `transformers` has for this model, without
    /// special tokens.
    ///
    /// Files do not tell Mistral from Llama. A model of this architecture with windows is a
    /// Mistral, and all others are a Llama, which computes the same.
    #[must_use]
    pub fn config_fields(&self) -> Map<String, Json> {
        let mut fields = match self.architecture {
            Architecture::Gpt2 => self.gpt2_fields(),
            _ => self.family_fields(),
        };
        let (model_type, class) = self.model_type();
        fields.insert("model_type".to_owned(), model_type.into());
        fields.insert("architectures".to_owned(), json!([class]));
        fields.insert("vocab_size".to_owned(), self.vocab_size.into());
        fields.insert("tie_word_embeddings".to_owned(), self.is_tied.into());
        fields
    }

    /// Returns `model_type`, and the class of `transformers` that loads the model.
    fn model_type(&self) -> (&'static str, &'static str) {
        match self.architecture {
            Architecture::Llama if self.window().is_some() => ("mistral", "MistralForCausalLM"),
            other => {
                let (_, model_type, class) = other.row();
                (model_type, class)
            }
        }
    }

    fn gpt2_fields(&self) -> Map<String, Json> {
        object([
            ("n_positions", json!(self.context_length)),
            ("n_embd", json!(self.width)),
            ("n_layer", json!(self.num_layers())),
            ("n_head", json!(self.attention.heads)),
            ("n_inner", json!(self.feed_forward.width)),
            ("activation_function", json!(self.feed_forward.activation)),
            ("layer_norm_epsilon", json!(self.epsilon)),
        ])
    }

    /// Returns the fields of a Llama and its kin.
    fn family_fields(&self) -> Map<String, Json> {
        let mut fields = object([
            ("hidden_size", json!(self.width)),
            ("intermediate_size", json!(self.feed_forward.width)),
            ("num_hidden_layers", json!(self.num_layers())),
            ("num_attention_heads", json!(self.attention.heads)),
            ("num_key_value_heads", json!(self.attention.key_value_heads)),
            ("head_dim", json!(self.attention.head_width)),
            ("max_position_embeddings", json!(self.context_length)),
            ("rms_norm_eps", json!(self.epsilon)),
            ("rope_parameters", self.rope_parameters()),
        ]);
        let activation =
            if self.architecture.is_gemma() { "hidden_activation" } else { "hidden_act" };
        fields.insert(activation.to_owned(), json!(self.feed_forward.activation));
        fields.extend(match self.architecture {
            // Mistral's configuration has no biases, and Llama's has no window.
            Architecture::Llama if self.window().is_none() => object([
                ("attention_bias", json!(self.attention.has_output_bias)),
                ("mlp_bias", json!(self.feed_forward.has_bias)),
            ]),
            Architecture::Gpt2 | Architecture::Llama => {
                object([("sliding_window", json!(self.window()))])
            }
            Architecture::Phi3 => {
                let mut fields = object([("sliding_window", json!(self.window()))]);
                // Phi 3 of `transformers` reads it here only.
                if let Some(RopeScaling::LongRope { original_len, .. }) =
                    self.rope.as_ref().map(|rope| &rope.scaling)
                {
                    fields
                        .insert("original_max_position_embeddings".to_owned(), json!(original_len));
                }
                fields
            }
            Architecture::Qwen2 => self.window_fields(true),
            Architecture::Qwen3 => {
                let mut fields = self.window_fields(true);
                fields.insert("attention_bias".to_owned(), json!(self.attention.has_output_bias));
                fields
            }
            Architecture::Gemma2 | Architecture::Gemma3 => {
                let mut fields = self.window_fields(false);
                fields.extend(object([
                    ("query_pre_attn_scalar", json!(self.attention.query_scalar)),
                    ("attn_logit_softcapping", json!(self.attention.soft_cap)),
                    ("final_logit_softcapping", json!(self.logit_soft_cap)),
                ]));
                fields
            }
        });
        fields
    }

    /// Returns the fields of windows of models in which layers may differ. `has_switch` is whether
    /// a field turns windows on.
    fn window_fields(&self, has_switch: bool) -> Map<String, Json> {
        let name = |window: &Option<usize>| match window {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        let types: Vec<_> = self.attention.windows.iter().map(name).collect();
        let mut fields =
            object([("sliding_window", json!(self.window())), ("layer_types", json!(types))]);
        if has_switch {
            fields.insert("use_sliding_window".to_owned(), json!(self.window().is_some()));
        }
        fields
    }

    fn rope_parameters(&self) -> Json {
        let Some(rope) = &self.rope else { return Json::Null };
        let full = rope.parameters(self.attention.head_width);
        match self.architecture {
            Architecture::Gemma3 => {
                // Both rotations are named, even if they are equal.
                let sliding = self.window_rope.as_ref().unwrap_or(rope);
                json!({"full_attention": full, "sliding_attention": sliding.parameters(self.attention.head_width)})
            }
            _ => Json::Object(full),
        }
    }
}

impl GgufRope {
    /// Returns the fields of `rope_parameters` for heads of `head_width` elements.
    fn parameters(&self, head_width: usize) -> Map<String, Json> {
        let mut fields = self.scaling.parameters();
        fields.insert("rope_type".to_owned(), self.scaling.name().into());
        fields.insert("rope_theta".to_owned(), json!(self.theta));
        if self.width != head_width {
            let share = self.width as f64 / head_width as f64;
            // `transformers` rounds the product towards 0.
            let is_short = ((head_width as f64 * share) as usize) < self.width;
            let share = if is_short { share.next_up() } else { share };
            fields.insert("partial_rotary_factor".to_owned(), json!(share));
        }
        fields
    }
}

impl RopeScaling {
    /// Returns the fields of `rope_parameters` that this type has.
    fn parameters(&self) -> Map<String, Json> {
        match self {
            Self::Default => Map::new(),
            Self::Linear { factor } => object([("factor", json!(factor))]),
            // Files cannot have it, because llama.cpp does not.
            Self::Dynamic => Map::new(),
            Self::Yarn {
                factor,
                original_len,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
            } => object([
                ("factor", json!(factor)),
                ("original_max_position_embeddings", json!(original_len)),
                ("beta_fast", json!(beta_fast)),
                ("beta_slow", json!(beta_slow)),
                ("truncate", json!(truncate)),
                ("attention_factor", json!(attention_factor)),
            ]),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => object([
                ("factor", json!(factor)),
                ("low_freq_factor", json!(low_freq_factor)),
                ("high_freq_factor", json!(high_freq_factor)),
                ("original_max_position_embeddings", json!(original_len)),
            ]),
            Self::LongRope { short_factor, long_factor, original_len, attention_factor } => {
                object([
                    ("short_factor", json!(short_factor)),
                    ("long_factor", json!(long_factor)),
                    ("original_max_position_embeddings", json!(original_len)),
                    ("attention_factor", json!(attention_factor)),
                ])
            }
        }
    }
}

/// Returns a JSON object.
fn object<const N: usize>(fields: [(&str, Json); N]) -> Map<String, Json> {
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
