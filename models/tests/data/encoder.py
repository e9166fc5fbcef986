"""Writes encoder.json: weights, texts and logits of PyTorch's encoder layers (torch 2.9.0).

    python models/tests/data/encoder.py > models/tests/data/encoder.json
"""

import json
import math

import torch

WIDTH, HEADS, LAYERS, HIDDEN, VOCAB, CLASSES = 8, 2, 2, 12, 11, 3
TEXTS = [[7, 3, 9, 1, 4], [2, 10], [5, 5, 6]]

torch.manual_seed(3)
embedding = torch.nn.Embedding(VOCAB, WIDTH)
layers = [
    torch.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    for _ in range(LAYERS)
]
classifier = [torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)]

length = max(map(len, TEXTS))
ids = torch.tensor([text + [0] * (length - len(text)) for text in TEXTS])
padding = torch.tensor([[i >= len(text) for i in range(length)] for text in TEXTS])
position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
frequency = torch.exp(torch.arange(0, WIDTH, 2, dtype=torch.float64) * (-math.log(10000) / WIDTH))
positions = torch.zeros(length, WIDTH, dtype=torch.float64)
positions[:, 0::2] = torch.sin(position * frequency)
positions[:, 1::2] = torch.cos(position * frequency)

x = embedding(ids) + positions.float()
for layer in layers:
    x = layer(x, src_key_padding_mask=padding)
kept = (~padding).unsqueeze(2)
mean = (x * kept).sum(1) / kept.sum(1)
logits = classifier[1](torch.relu(classifier[0](mean)))

weights = {"embedding.weight": embedding.weight}
for number, layer in enumerate(layers):
    maps = {
        "in_proj": (layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias),
        "out_proj": (layer.self_attn.out_proj.weight, layer.self_attn.out_proj.bias),
        "linear1": (layer.linear1.weight, layer.linear1.bias),
        "linear2": (layer.linear2.weight, layer.linear2.bias),
    }
    for name, (weight, bias) in maps.items():
        weights[f"layers.{number}.{name}.weight"] = weight.T
        weights[f"layers.{number}.{name}.bias"] = bias
    for name in ["norm1", "norm2"]:
        norm = getattr(layer, name)
        weights[f"layers.{number}.{name}.weight"] = norm.weight
        weights[f"layers.{number}.{name}.bias"] = norm.bias
for number, linear in enumerate(classifier, 1):
    weights[f"classifier{number}.weight"] = linear.weight.T
    weights[f"classifier{number}.bias"] = linear.bias
labels = torch.tensor([2, 0, 1])
loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
print(
    json.dumps(
        {
            "weights": {path: value.flatten().tolist() for path, value in weights.items()},
            "ids": ids.flatten().tolist(),
            "lengths": [len(text) for text in TEXTS],
            "labels": labels.tolist(),
            "logits": logits.flatten().tolist(),
            "loss": loss.item(),
        }
    )
)
