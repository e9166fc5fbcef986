//! The weight map of a classifier.

use deepburn_weights::{Composition, InitialValues, Origin, Weight, WeightMap};

use super::config::Gpt2Config;
use super::model::PREFIX;
use crate::decoder::SCORE;

/// Returns the map of a classifier. Its body has no head and is a part of the module, so module
/// paths and tensor names are equal.
pub(crate) fn classifier_map(headless: &Gpt2Config, num_classes: usize) -> WeightMap {
    let body = headless.decoder_parts().weight_map();
    let body = body.parameters().map(|weight| {
        let path = format!("{PREFIX}{}", weight.path());
        // GPT-2's files have the layout of the module (`Conv1D`), so each tensor is stored as it
        // is.
        let composition = Composition::whole(&path, weight.composition().shape());
        Weight::new(path, composition).with_origin(weight.origin().clone())
    });
    let normal = InitialValues::Normal { std: headless.initializer_range };
    let score = Composition::whole(SCORE, &[num_classes, headless.n_embd]);
    let score = Weight::new(SCORE, score).with_origin(Origin::Fresh(normal));
    WeightMap::new(body.chain([score]).collect()).expect("each parameter has a tensor of its own")
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
            let map = Gpt2Config { tie_word_embeddings, ..Gpt2Config::small() }.weight_map();
            for weight in map.weights() {
                let name = weight.stored_name();
                assert_eq!(map.tensor_name(weight.path()), Some(name.clone()));
                assert_eq!(map.tensor_name(&name), Some(name));
            }
        }
        let map = Gpt2Config::small().weight_map();
        assert_eq!(map.stored_name("wte.weight"), "transformer.wte.weight");
        assert_eq!(map.stored_name("lm_head.weight"), "lm_head.weight");
    }

    #[test]
    fn mask_buffers_are_told_from_biases() {
        let map = Gpt2Config::small().weight_map();
        assert_eq!(map.tensor_name("h.11.attn.bias"), None);
        assert_eq!(map.tensor_name("transformer.h.0.attn.masked_bias"), None);
        for name in ["h.0.attn.c_attn.bias", "h.x.attn.bias", "attn.bias", "h.0.ln_1.bias"] {
            assert!(map.tensor_name(name).is_some(), "{name}");
        }
    }
}
