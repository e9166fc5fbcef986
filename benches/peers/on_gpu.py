"""Trains GPT-2 on a GPU with PyTorch alone, eagerly or with torch.compile.

The model is the GPT-2 of `transformers` with PyTorch's fused attention, AdamW and GELU. With bf16, weights and optimizer
states are in fp32, and operations run under autocast. Products of fp32 use all bits, as DeepBurn's do by default.
"""

import json
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import training

# Fields of `config.json` with the values of GPT-2 124M.
SIZES = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.attention_output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.mlp_output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        projected = self.projections(self.before_attention(hidden))
        heads = [it.unflatten(-1, (self.heads, -1)).transpose(1, 2) for it in projected.chunk(3, dim=-1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.attention_output(attended)
        return hidden + self.mlp_output(F.gelu(self.inner(self.before_mlp(hidden)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, sizes, recompute):
        super().__init__()
        width = sizes["n_embd"]
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(sizes["vocab_size"], width), nn.Embedding(sizes["n_positions"], width)
        self.blocks = nn.ModuleList(Block(width, sizes["n_head"]) for _ in range(sizes["n_layer"]))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        """Returns the loss of predicting each token from those before it. The head's weights are the embedding's."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        logits = F.linear(self.norm(hidden), self.tokens.weight)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main():
    options = training.parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(training.SEED)
    with torch.device(device):
        model = GPT2({**SIZES, **json.loads(options.model)}, options.recompute)
    run = training.compiled(options, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE, fused=True)

    def step(tokens):
        tokens = tokens.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = run(tokens)
        loss.backward()
        wait()
        start = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        return loss.detach(), {"optimizer": time.perf_counter() - start}

    training.timed_steps(options, step)


if __name__ == "__main__":
    main()
