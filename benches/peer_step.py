"""One training step after another of GPT-2 124M in eager PyTorch: seconds each and peak memory."""

import argparse
import json
import resource
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
if options.bf16:
    model = model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
seconds = []
for _ in range(options.steps):
    tokens = torch.randint(0, 50257, (options.batch, options.length))
    start = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
