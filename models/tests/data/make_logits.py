"""Writes reference.safetensors and odd/ with transformers 5.23.0 and torch 2.9.0 on CPU in float32.

    python make_logits.py            # in this folder; reads tiny/

`tiny.*` contains the logits of all positions; the variants contain two positions. Losses are the mean
cross-entropy of transformers, with labels shifted inside the sequence and -100 ignored.
"""
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

POSITIONS = [7, 15]
VARIANTS = {
    "gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "tanh": {"activation_function": "tanh"},
    "gelu_pytorch_tanh": {"activation_function": "gelu_pytorch_tanh"},
    "inverse_layer": {"scale_attn_by_inverse_layer_idx": True},
    "unscaled": {"scale_attn_weights": False},
    "reordered": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    "epsilon": {"layer_norm_epsilon": 1e-2},
}


def load(folder, **overrides):
    return GPT2LMHeadModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **overrides
    ).eval()


def make_odd(folder):
    """A model whose widths are not powers of two, with an explicit hidden width of the MLP and an untied head."""
    config = GPT2Config(
        vocab_size=61, n_positions=20, n_embd=15, n_layer=2, n_head=3, n_inner=22,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)


def greedy(model, seed, length):
    """Prompts whose continuation does not immediately repeat one token. The seeds were found by trial and error."""
    torch.manual_seed(seed)
    prompt = torch.randint(0, model.config.vocab_size, (1, 5))
    tokens = model.generate(
        prompt, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return prompt[0], tokens[0, 5:]


@torch.no_grad()
def main():
    torch.manual_seed(20)
    inputs = torch.randint(0, 512, (2, 16))
    out = {"inputs": inputs}

    model = load("tiny")
    out["tiny.logits"] = model(inputs).logits
    out["tiny.loss"] = model(inputs, labels=inputs).loss.reshape(1)
    masked = inputs.clone()
    masked[0, 9:] = -100
    masked[1, :4] = -100
    out["masked.labels"] = masked
    out["masked.loss"] = model(inputs, labels=masked).loss.reshape(1)
    out["greedy.prompt"], out["greedy.tokens"] = greedy(model, seed=2, length=20)

    for name, overrides in VARIANTS.items():
        out[f"{name}.logits"] = load("tiny", **overrides)(inputs).logits[:, POSITIONS]

    make_odd("odd")
    odd_inputs = torch.randint(0, 61, (3, 7))
    odd = load("odd")
    out["odd.inputs"] = odd_inputs
    out["odd.logits"] = odd(odd_inputs).logits
    out["odd.loss"] = odd(odd_inputs, labels=odd_inputs).loss.reshape(1)
    out["odd.greedy.prompt"], out["odd.greedy.tokens"] = greedy(odd, seed=22, length=15)
    save_file({k: v.contiguous() for k, v in out.items()}, "reference.safetensors")


main()
