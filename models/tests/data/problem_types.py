"""Writes problem_types.json: classification heads for the checkpoint in `tiny`, and for each `problem_type` the labels,
the logits, and four steps of SGD with GPT2ForSequenceClassification in transformers (5.x), without dropout.

    python models/tests/data/problem_types.py > models/tests/data/problem_types.json
"""

import json
import pathlib

import torch
from transformers import GPT2ForSequenceClassification

TEXTS = [[7, 3, 9, 1, 4], [2, 10], [5, 5, 6]]
PAD = 0
PROBLEMS = [
    ("regression", 1, 1e-5, 1.0, [[0.5], [-2.0], [3.25]]),
    ("regression", 2, 1e-5, 1.0, [[0.5, 1.0], [-2.0, 0.0], [3.25, -0.125]]),
    ("multi_label_classification", 4, 1e-3, 1.0, [[1.0, 0.0, 0.0, 1.0], [0.0] * 4, [0.0, 1.0, 1.0, 1.0]]),
    # All logits are 0 at first.
    ("multi_label_classification", 3, 1e-2, 0.0, [[1.0, 0.0, 1.0], [0.0] * 3, [0.0, 1.0, 1.0]]),
]

folder = pathlib.Path(__file__).parent / "tiny"
length = max(map(len, TEXTS))
ids = torch.tensor([text + [PAD] * (length - len(text)) for text in TEXTS])
found = []
for problem_type, num_labels, rate, scale, labels in PROBLEMS:
    torch.manual_seed(5)
    model = GPT2ForSequenceClassification.from_pretrained(
        folder, num_labels=num_labels, pad_token_id=PAD, problem_type=problem_type
    )
    model.score.weight.data.normal_().mul_(scale)
    model.eval()
    score = model.score.weight.flatten().tolist()
    targets = torch.tensor(labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    logits, losses = [], []
    for _ in range(4):
        output = model(ids, labels=targets[:, 0] if num_labels == 1 else targets)
        logits.append(output.logits.flatten().tolist())
        losses.append(output.loss.item())
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    found.append(
        {
            "problem_type": problem_type,
            "num_labels": num_labels,
            "labels": labels,
            "rate": rate,
            "score": score,
            "logits": logits[0],
            "losses": losses,
            "trained_score": model.score.weight.flatten().tolist(),
            "trained_norm": model.transformer.ln_f.weight.flatten().tolist(),
        }
    )
print(json.dumps({"texts": TEXTS, "problems": found}))
