//! GPT-2 as a language model.

use burn::tensor::Tensor;
use deepburn::ops::FusedOps;
use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
use deepburn_models::gpt2::{Gpt2, Gpt2Config};

use crate::compared::{ComparedModel, check};

struct LanguageModeling(Gpt2Config);

impl ComparedModel for LanguageModeling {
    type Module<B: FusedOps> = Gpt2<B>;

    fn build<B: FusedOps>(&self, device: &B::Device) -> Gpt2<B> {
        Gpt2::new(&self.0, 3, device).unwrap()
    }

    fn loss<B: FusedOps>(&self, module: &Gpt2<B>, device: &B::Device) -> Tensor<B, 1> {
        let ids: Vec<u32> = (0..2 * 40).map(|it| (it % 61) as u32).collect();
        let batch = CausalBatch::new(&self.0, &ids, None, [2, 40], device).unwrap();
        module.loss(&batch).mean()
    }
}

#[test]
fn a_language_model_needs_what_its_dry_run_says() {
    for (n_embd, n_head, tie_word_embeddings, dropout) in [(90, 5, true, 0.0), (48, 3, false, 0.1)]
    {
        check(&LanguageModeling(Gpt2Config {
            n_embd,
            n_head,
            n_layer: 4,
            vocab_size: 67,
            n_positions: 80,
            tie_word_embeddings,
            resid_pdrop: dropout,
            embd_pdrop: dropout,
            attn_pdrop: dropout,
            ..Gpt2Config::small()
        }));
    }
}
