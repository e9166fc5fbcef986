"""Compares predictions of `deepburn predict` with PyTorch's on the same folder, in padded batches.

    deepburn predict --model RUN --file TABLE --output found.jsonl
    python models/tests/data/predictions.py RUN/model found.jsonl [TEXT_FIELD] [MAX_LENGTH]

GPT-2 is loaded with transformers (5.x, with torch 2.9). The encoder is built here from PyTorch layers, which
shows what other programs need to load its folder. Fails if a probability, or the difference of two logits, differs
by more than 1e-5. Differences of logits are computed from log probabilities with eight decimals, so they are only
compared in rows whose probabilities all exceed 0.01.
"""

import json
import math
import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

TOLERANCE = 1e-5
BATCH = 16


def encoder(folder, config):
    """Returns the function from token ids and their mask to logits."""
    weights = load_file(folder / "model.safetensors")
    width, heads = config["embed_dim"], config["num_heads"]

    def affine(name):
        # Matrices are [in, out].
        return weights[f"{name}.weight"].T, weights[f"{name}.bias"]

    layers = []
    for number in range(config["num_layers"]):
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, config["hidden_dim"], batch_first=True,
            layer_norm_eps=config["layer_norm_epsilon"],
        )
        path = f"layers.{number}"
        state = {}
        maps = {"self_attn.in_proj_": "in_proj", "self_attn.out_proj.": "out_proj",
                "linear1.": "linear1", "linear2.": "linear2"}
        for torch_name, name in maps.items():
            state[f"{torch_name}weight"], state[f"{torch_name}bias"] = affine(f"{path}.{name}")
        for norm in ["norm1", "norm2"]:
            for leaf in ["weight", "bias"]:
                state[f"{norm}.{leaf}"] = weights[f"{path}.{norm}.{leaf}"]
        layer.load_state_dict(state)
        layers.append(layer.eval())

    def forward(ids, mask):
        length = ids.shape[1]
        position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
        frequency = torch.exp(
            torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000) / width)
        )
        positions = torch.zeros(length, width, dtype=torch.float64)
        positions[:, 0::2] = torch.sin(position * frequency)
        positions[:, 1::2] = torch.cos(position * frequency)
        x = weights["embedding.weight"][ids] + positions.float()
        for layer in layers:
            x = layer(x, src_key_padding_mask=mask == 0)
        mean = (x * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        inner = torch.relu(torch.nn.functional.linear(mean, *affine("classifier1")))
        return torch.nn.functional.linear(inner, *affine("classifier2"))

    return forward


folder = pathlib.Path(sys.argv[1])
rows = [json.loads(line) for line in pathlib.Path(sys.argv[2]).read_text().splitlines()]
field = sys.argv[3] if len(sys.argv) > 3 else "text"
config = json.loads((folder / "config.json").read_text())
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
if config["model_type"] == "deepburn_encoder":
    forward, longest = encoder(folder, config), config["max_len"]
else:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    forward, longest = lambda ids, mask: model(ids, attention_mask=mask).logits, config["n_positions"]
longest = int(sys.argv[4]) if len(sys.argv) > 4 else longest

names = [config["id2label"][str(label)] for label in range(len(config["id2label"]))]
worst, worst_logit = 0.0, 0.0
for start in range(0, len(rows), BATCH):
    part = rows[start : start + BATCH]
    batch = tokenizer(
        [row[field] for row in part], padding=True, truncation=True, max_length=longest,
        return_tensors="pt",
    )
    with torch.no_grad():
        logits = forward(batch["input_ids"], batch["attention_mask"]).double()
    for row, logits, probabilities in zip(part, logits, torch.softmax(logits, 1)):
        found = row["probabilities"]
        found = [found.get(name, found.get(str(label))) for label, name in enumerate(names)]
        found = torch.tensor(found, dtype=torch.float64)
        worst = max(worst, (found - probabilities).abs().max().item())
        if found.min() > 0.01:
            gaps = (found.log() - found[0].log()) - (logits - logits[0])
            worst_logit = max(worst_logit, gaps.abs().max().item())
print(f"{len(rows)} texts, largest difference of a probability {worst:.2e}, of a logit {worst_logit:.2e}")
sys.exit(max(worst, worst_logit) > TOLERANCE)
