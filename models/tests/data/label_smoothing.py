"""Writes label_smoothing.json: losses of transformers' LabelSmoother (5.x) in float32, for the language models in `tiny`
and `odd`, and for given logits of a classifier. Inputs and labels are those of reference.safetensors.

    python models/tests/data/label_smoothing.py > models/tests/data/label_smoothing.json
"""

import json
import pathlib

import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel
from transformers.trainer_pt_utils import LabelSmoother

FACTOR = 0.1
FOLDER = pathlib.Path(__file__).parent
CLASSIFIER = json.loads((FOLDER / "classifier.json").read_text())
CLASSES = [2, 0, 1]


@torch.no_grad()
def language_model(folder, inputs, labels):
    model = GPT2LMHeadModel.from_pretrained(FOLDER / folder, dtype=torch.float32).eval()
    outputs = model(inputs)
    return LabelSmoother(FACTOR)(outputs, labels, shift_labels=True).item()


def classifier():
    logits = torch.tensor(CLASSIFIER["logits"]).reshape(len(CLASSES), -1)
    return LabelSmoother(FACTOR)({"logits": logits}, torch.tensor(CLASSES)).item()


stored = load_file(FOLDER / "reference.safetensors")
inputs, odd = stored["inputs"], stored["odd.inputs"]
found = {
    "factor": FACTOR,
    "tiny": language_model("tiny", inputs, inputs),
    "masked": language_model("tiny", inputs, stored["masked.labels"]),
    "odd": language_model("odd", odd, odd),
    "classes": CLASSES,
    "classifier": classifier(),
}
print(json.dumps(found))
