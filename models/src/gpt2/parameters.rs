//! The parameters of a GPT-2 model: their module paths, `transformers` names and shapes.
//!
//! The same list is used to count parameters and to check and write checkpoints. A test compares it
//! with the parameters of the module.

use super::config::Gpt2Config;
use crate::hf::{Names, ParameterShape};

/// The prefix of tensor names in `transformers`. The tensors of the heads do not have it.
const PREFIX: &str = "transformer.";
/// Module path of the output projection of an untied model.
pub(crate) const HEAD: &str = "lm_head.weight";
/// Module path of the token embedding.
pub(crate) const EMBEDDING: &str = "wte.weight";
/// Module path of the classification head.
pub(crate) const SCORE: &str = "score.weight";

/// Returns the `transformers` name of the parameter at a module path.
///
/// ```
/// use deepburn_models::gpt2::hf_name;
/// assert_eq!(hf_name("h.0.ln_1.weight"), "transformer.h.0.ln_1.weight");
/// assert_eq!(hf_name("lm_head.weight"), "lm_head.weight");
/// ```
#[must_use]
pub fn hf_name(path: &str) -> String {
    if [HEAD, SCORE].contains(&path) { path.to_owned() } else { format!("{PREFIX}{path}") }
}

/// Returns the module path of a `transformers` name, with or without its prefix.
#[must_use]
pub fn module_path(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

/// Returns whether a module path is a causal-mask buffer, which old checkpoints contain.
pub(crate) fn is_mask_buffer(path: &str) -> bool {
    path.strip_prefix("h.").and_then(|rest| rest.split_once('.')).is_some_and(|(block, leaf)| {
        block.parse::<usize>().is_ok() && matches!(leaf, "attn.bias" | "attn.masked_bias")
    })
}

/// The tensor names of a language model. Names in files may omit the prefix.
pub(crate) const NAMES: Names = Names {
    in_file: hf_name,
    path: |name| {
        let path = module_path(name);
        (!is_mask_buffer(path)).then(|| path.to_owned())
    },
};

/// Returns all parameters of a language model, in the order in which the module holds them.
pub(crate) fn parameters(config: &Gpt2Config) -> Vec<ParameterShape> {
    let (d, inner) = (config.n_embd, config.inner_width());
    let mut list = vec![
        ParameterShape::new(EMBEDDING, &[config.vocab_size, d]),
        ParameterShape::new("wpe.weight", &[config.n_positions, d]),
    ];
    for block in 0..config.n_layer {
        let mut add = |leaf: &str, shape: &[usize]| {
            list.push(ParameterShape::new(format!("h.{block}.{leaf}"), shape));
        };
        add("ln_1.weight", &[d]);
        add("ln_1.bias", &[d]);
        add("attn.c_attn.weight", &[d, 3 * d]);
        add("attn.c_attn.bias", &[3 * d]);
        add("attn.c_proj.weight", &[d, d]);
        add("attn.c_proj.bias", &[d]);
        add("ln_2.weight", &[d]);
        add("ln_2.bias", &[d]);
        add("mlp.c_fc.weight", &[d, inner]);
        add("mlp.c_fc.bias", &[inner]);
        add("mlp.c_proj.weight", &[inner, d]);
        add("mlp.c_proj.bias", &[d]);
    }
    list.push(ParameterShape::new("ln_f.weight", &[d]));
    list.push(ParameterShape::new("ln_f.bias", &[d]));
    if !config.tie_word_embeddings {
        list.push(ParameterShape::new(HEAD, &[config.vocab_size, d]));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Architecture;
    use crate::gpt2::Gpt2;
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::{Tensor, backend::Backend};
    use burn_flex::Flex;

    #[derive(Default)]
    struct Lister {
        path: Vec<String>,
        found: Vec<ParameterShape>,
    }

    impl<B: Backend> ModuleVisitor<B> for Lister {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.found.push(ParameterShape::new(self.path.join("."), &param.lazy_shape()));
        }
    }

    #[test]
    fn the_list_is_what_the_module_holds() {
        for tied in [true, false] {
            let config = Gpt2Config {
                vocab_size: 30,
                n_positions: 9,
                n_embd: 12,
                n_layer: 2,
                n_head: 3,
                n_inner: Some(7),
                tie_word_embeddings: tied,
                ..Gpt2Config::small()
            };
            let model = Gpt2::<Flex>::new(&config, 0, &Default::default()).unwrap();
            let mut lister = Lister::default();
            model.visit(&mut lister);
            assert_eq!(lister.found, config.parameters());
            assert_eq!(model.num_params(), config.num_parameters());
        }
    }

    #[test]
    fn names_translate_both_ways() {
        for tie_word_embeddings in [true, false] {
            let config = Gpt2Config { tie_word_embeddings, ..Gpt2Config::small() };
            for parameter in config.parameters() {
                assert_eq!(module_path(&hf_name(&parameter.path)), parameter.path);
                assert_eq!(module_path(&parameter.path), parameter.path);
            }
        }
        assert_eq!(hf_name("wte.weight"), "transformer.wte.weight");
        assert_eq!(hf_name(HEAD), HEAD);
    }

    #[test]
    fn mask_buffers_are_told_from_biases() {
        assert!(is_mask_buffer("h.11.attn.bias"));
        assert!(is_mask_buffer("h.0.attn.masked_bias"));
        for path in ["h.0.attn.c_attn.bias", "h.x.attn.bias", "attn.bias", "h.0.ln_1.bias"] {
            assert!(!is_mask_buffer(path), "{path}");
        }
    }
}
