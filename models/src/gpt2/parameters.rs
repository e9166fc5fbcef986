//! The weight map of a GPT-2 model: module paths, `transformers` names, shapes and initial values.
//!
//! A test compares the map with the parameters of the module.

use deepburn_weights::{Composition, InitialValues, Origin, Weight, WeightMap};

use super::config::Gpt2Config;

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

/// Names of the causal-mask buffers, which old checkpoints contain. `*` stands for the number of a block.
const MASK_BUFFERS: [&str; 2] = ["transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"];

/// Returns the map of a language model, in the order in which the module holds the parameters. Names in files may omit
/// the prefix. A tied head is listed with the embedding's values, because files may contain a copy.
pub(crate) fn weight_map(config: &Gpt2Config) -> WeightMap {
    let (d, inner) = (config.n_embd, config.inner_width());
    let normal = InitialValues::Normal { std: config.initializer_range };
    // The outputs of these layers are added to the residual stream, so their initial weights are smaller.
    let residual = InitialValues::Normal { std: config.residual_std() };
    let (ones, zeros) = (InitialValues::Ones, InitialValues::Zeros);
    let mut weights = vec![
        fresh(EMBEDDING, &[config.vocab_size, d], normal),
        fresh("wpe.weight", &[config.n_positions, d], normal),
    ];
    for block in 0..config.n_layer {
        let mut add = |leaf: &str, shape: &[usize], values| {
            weights.push(fresh(&format!("h.{block}.{leaf}"), shape, values));
        };
        add("ln_1.weight", &[d], ones);
        add("ln_1.bias", &[d], zeros);
        add("attn.c_attn.weight", &[d, 3 * d], normal);
        add("attn.c_attn.bias", &[3 * d], zeros);
        add("attn.c_proj.weight", &[d, d], residual);
        add("attn.c_proj.bias", &[d], zeros);
        add("ln_2.weight", &[d], ones);
        add("ln_2.bias", &[d], zeros);
        add("mlp.c_fc.weight", &[d, inner], normal);
        add("mlp.c_fc.bias", &[inner], zeros);
        add("mlp.c_proj.weight", &[inner, d], residual);
        add("mlp.c_proj.bias", &[d], zeros);
    }
    weights.push(fresh("ln_f.weight", &[d], ones));
    weights.push(fresh("ln_f.bias", &[d], zeros));
    let head = fresh(HEAD, &[config.vocab_size, d], normal);
    weights.push(match config.tie_word_embeddings {
        true => head.with_origin(Origin::Tied { to: EMBEDDING.to_owned() }),
        false => head,
    });
    let map = WeightMap::new(weights).expect("each parameter has a tensor of its own");
    map.with_optional_prefix(PREFIX).with_ignored(MASK_BUFFERS)
}

/// Returns the map of a classifier. Its body has no head and is a part of the module, so module paths and tensor names
/// are equal.
pub(crate) fn classifier_map(headless: &Gpt2Config, num_classes: usize) -> WeightMap {
    let body = weight_map(headless);
    let body = body.parameters().map(|weight| {
        let path = format!("{PREFIX}{}", weight.path());
        let composition = Composition::whole(&path, weight.composition().shape());
        Weight::new(path, composition).with_origin(weight.origin().clone())
    });
    let normal = InitialValues::Normal { std: headless.initializer_range };
    let score = fresh(SCORE, &[num_classes, headless.n_embd], normal);
    WeightMap::new(body.chain([score]).collect()).expect("each parameter has a tensor of its own")
}

/// Returns a parameter that is stored in the layout of the module.
fn fresh(path: &str, shape: &[usize], values: InitialValues) -> Weight {
    Weight::new(path, Composition::whole(hf_name(path), shape)).with_origin(Origin::Fresh(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Architecture;
    use crate::gpt2::Gpt2;
    use crate::hf::ParameterShape;
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
    fn names_may_omit_the_prefix() {
        for tie_word_embeddings in [true, false] {
            let map = weight_map(&Gpt2Config { tie_word_embeddings, ..Gpt2Config::small() });
            for weight in map.weights() {
                let name = weight.stored_name();
                assert_eq!(map.tensor_name(weight.path()), Some(name.clone()));
                assert_eq!(map.tensor_name(&name), Some(name));
            }
        }
        assert_eq!(hf_name("wte.weight"), "transformer.wte.weight");
        assert_eq!(hf_name(HEAD), HEAD);
    }

    #[test]
    fn mask_buffers_are_told_from_biases() {
        let map = weight_map(&Gpt2Config::small());
        assert_eq!(map.tensor_name("h.11.attn.bias"), None);
        assert_eq!(map.tensor_name("transformer.h.0.attn.masked_bias"), None);
        for name in ["h.0.attn.c_attn.bias", "h.x.attn.bias", "attn.bias", "h.0.ln_1.bias"] {
            assert!(map.tensor_name(name).is_some(), "{name}");
        }
    }
}
