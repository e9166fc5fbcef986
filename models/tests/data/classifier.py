"""Writes classifier.json: a random classification head for the checkpoint in `tiny`, and the logits of
GPT2ForSequenceClassification in transformers (5.x). With FOLDER, prints the logits of a saved classifier.

    python models/tests/data/classifier.py > models/tests/data/classifier.json
    python models/tests/data/classifier.py FOLDER   # logits of a saved classifier
"""

import json
import pathlib
import sys

import torch
from transformers import GPT2ForSequenceClassification

TEXTS = [[7, 3, 9, 1, 4], [2, 10], [5, 5, 6]]
PAD = 0


def logits(model):
    model.eval()
    rows = []
    for text in TEXTS:
        with torch.no_grad():
            rows += model(torch.tensor([text])).logits.flatten().tolist()
    return rows


if len(sys.argv) > 1:
    print(logits(GPT2ForSequenceClassification.from_pretrained(sys.argv[1])))
    sys.exit()

folder = pathlib.Path(__file__).parent / "tiny"
torch.manual_seed(5)
model = GPT2ForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=PAD)
model.score.weight.data.normal_()
found = {"texts": TEXTS, "score": model.score.weight.flatten().tolist(), "logits": logits(model)}
print(json.dumps(found))
